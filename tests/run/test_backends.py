"""`--backend`: the same results from the workers of a Ray or Dask cluster; what goes wrong there is said in one line.

Collected where the extras `ray` and `dask` are installed (`conftest.py`); `.ci/run` installs them for this file.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
import distributed
import pytest
import ray
import torch
from backend_support import Work, deadly, die, echo, fail
from cli_support import error_of, output_of
from plugin_support import build, lora, make, state, write_state
from safetensors.torch import load_file

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge import workers as module
from rotation_merge.matching.match import match_model
from rotation_merge.matching.pair import open_pair
from rotation_merge.workers import on_backend

BACKENDS = ("ray", "dask")
HOST = socket.gethostname()


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Two workers of each, for all tests: a cluster that is there already is not ended by those who use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # else Ray writes one into the home directory
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
        with (
            distributed.LocalCluster(silence_logs=logging.CRITICAL, **settings) as cluster,
            dask.config.set(scheduler_address=cluster.scheduler_address),
        ):
            yield
            assert cluster.workers
        assert ray.is_initialized()
        ray.shutdown()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


def test_align_writes_the_same_bytes(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    options, maps = ("--residual", "rotation", "--dtype", "bfloat16", "--shard-size", "20K"), {}
    for backend in ("threads", *BACKENDS):
        out = tmp_path / backend
        file = ("--alignment", out / "maps.safetensors")
        output_of("align", *deep_pair, out, "--no-verify", *file, *options, "--backend", backend)
        maps[backend] = load_file(out / "maps.safetensors")
        (out / "maps.safetensors").unlink()
        assert written(out) == written(tmp_path / "threads")
        assert all(torch.equal(tensor, maps[backend][name]) for name, tensor in maps["threads"].items())
    assert len(written(tmp_path / "ray")) >= 2


def test_align_from_another_folder_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that hold in this folder only arrive as whole paths; the pair is opened again as it was opened here."""
    monkeypatch.chdir(tmp_path)
    make("llama", tmp_path / "anchor")
    lora(tmp_path / "lora", build("llama"), seed=5)
    for backend in ("threads", *BACKENDS):
        output_of("align", "anchor", "anchor+lora", backend, "--no-verify", "--backend", backend)
        assert written(tmp_path / backend) == written(tmp_path / "threads")


def test_results_come_in_the_order_of_the_pieces(backend: str) -> None:
    """Whoever is done first: sums are added in one order."""
    with on_backend(backend) as spread:
        assert list(spread(Work(echo), None, range(12))) == list(range(12))


def test_a_worker_without_the_file_names_it_and_its_machine(
    backend: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor is here when the command starts, and not where workers look for it."""
    donor = shutil.copytree(pair[1], tmp_path / "donor")

    @contextmanager
    def gone(*arguments: Any) -> Iterator[Any]:
        with on_backend(*arguments) as spread:
            donor.rename(tmp_path / "elsewhere")
            yield spread

    monkeypatch.setattr("rotation_merge.workers.on_backend", gone)
    line = error_of("align", pair[0], donor, tmp_path / "out", "--backend", backend)
    assert line.startswith(f"Error: {donor}")
    assert f"worker {HOST}" in line
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_weights_is_said_as_ever(backend: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = state(pair[1])
    tensors[name][0, 0] = torch.nan
    donor = write_state(tensors, pair[1], tmp_path / "donor")
    line = error_of("align", pair[0], donor, tmp_path / "out", "--backend", backend)
    assert name in line
    assert str(donor) in line


@pytest.mark.parametrize(
    ("error", "version", "words"),
    [
        (MemoryError("1 GB"), None, "MemoryError: 1 GB"),
        (OSError(28, "No space left on device", "/tmp/a"), None, "No space left on device: '/tmp/a'"),
        (ValueError("odd"), "0.0.1", "here, but 0.0.1 where the command runs"),
    ],
)
def test_errors_of_workers_are_one_line(
    error: Exception, version: str | None, words: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "__version__", version or module.__version__)
    with on_backend(backend) as spread, pytest.raises(RotationMergeError) as raised:
        list(spread(Work(partial(fail, error)), None, [0]))
    assert str(raised.value).startswith(f"worker {HOST}: ")
    assert words in str(raised.value)


def test_clusters_that_are_not_there_are_said(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in BACKENDS:
        with monkeypatch.context() as patch, dask.config.set(scheduler_address="tcp://127.0.0.1:1"):
            patch.setenv("RAY_ADDRESS", "127.0.0.1:1")
            patch.setattr(ray, "is_initialized", lambda: False)
            patch.setattr(module, "PATIENCE", 1)
            line = error_of("align", *pair, "out", "--backend", backend)
        assert line.startswith(f"Error: --backend {backend}: the cluster cannot be used (")
    with pytest.raises(RotationMergeError, match=r"--backend ray: .*no worker has a GPU"), on_backend("ray", "cuda"):
        pass


def test_a_worker_that_dies_ends_the_command_or_is_replaced(
    backend: str, deep_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Ray's pool gives up where Dask does the block again."""
    options = AlignConfig(heads="permutation")
    pair = open_pair(*map(str, deep_pair), options)
    anchor, donor = pair.matched
    here = match_model(pair.architecture, anchor, donor, options)
    with on_backend(backend) as spread:
        arguments = (pair.architecture, anchor, deadly(donor, tmp_path), options)
        if backend == "ray":
            with pytest.raises(RotationMergeError, match=r"--backend ray: .*Died.*run again to continue"):
                match_model(*arguments, over=spread)
            return
        there = match_model(*arguments, over=spread)
    (dead,) = tmp_path.iterdir()
    assert dead.name != str(os.getpid())
    for name, transform in here.transforms.items():
        for key, tensor in transform.tensors().items():
            assert torch.equal(there.transforms[name].tensors()[key], tensor)


def test_a_piece_that_kills_every_worker_ends_it_with_one_line(backend: str, tmp_path: Path) -> None:
    with on_backend(backend) as spread, pytest.raises(RotationMergeError) as raised:
        list(spread(Work(partial(die, tmp_path)), None, [0]))
    assert str(raised.value).startswith(f"--backend {backend}: ")
    assert "fewer workers" in str(raised.value)
    assert "\n" not in str(raised.value)
