"""`--ray`: the same results from the workers of a Ray cluster, whatever happens to them.

Collected where the extra `ray` is installed (`conftest.py`); `.ci/run` installs it for this file.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from cli_support import run
from plugin_support import build, make, one_error, save, state
from ray_support import Deadly, Echo, Failing, Killing
from safetensors.torch import load_file

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.matching.match import match_model
from rotation_merge.matching.open_pair import open_pair
from rotation_merge.workers import cluster as module
from rotation_merge.workers.cluster import Cluster, spread

torch.set_num_threads(1)  # as workers have it

RAY = ("--ray", "local")


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[None]:
    """Two workers, for all tests: a cluster that is there already is not ended by those who use it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", uuid.uuid4().hex)  # else Ray writes one into the home directory
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        assert ray.is_initialized()
        ray.shutdown()


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


ALIGN = {
    "local": ["--heads", "permutation"],
    "residual": ["--residual", "rotation", "--untie"],
    "bfloat16 in shards": ["--dtype", "bfloat16", "--shard-size", "20K", "--residual", "permutation"],
}


@pytest.mark.parametrize("options", ALIGN.values(), ids=list(ALIGN))
def test_align_writes_the_same_bytes(options: list[str], deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    found = []
    for where in ([], RAY):
        out = tmp_path / f"out{len(where)}"
        done = run("align", *deep_pair, out, "--no-verify", "--alignment", out / "maps.safetensors", *options, *where)
        assert done.exit_code == 0, done.output
        found.append(written(out))
    assert len(found[0]) >= 2
    assert found[0].keys() == found[1].keys()
    for name in found[0].keys() - {"maps.safetensors"}:
        assert found[0][name] == found[1][name], name
    first, second = (load_file(tmp_path / f"out{n}" / "maps.safetensors") for n in (0, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_align_from_another_folder_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that hold in this folder only arrive as whole paths; the pair is opened again as it was opened here."""
    monkeypatch.chdir(tmp_path)
    make("llama", tmp_path / "anchor")
    adapter(tmp_path / "lora")
    found = []
    for where in ([], RAY):
        out = tmp_path / f"out-{len(where)}"
        done = run("align", "anchor", "anchor+lora", out.name, "--no-verify", *where)
        assert done.exit_code == 0, done.output
        found.append(state(out))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def adapter(where: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    tuned = get_peft_model(
        build("llama"), LoraConfig(r=2, target_modules=["up_proj", "q_proj"], init_lora_weights=False)
    )
    tuned.save_pretrained(where)


def test_results_come_in_the_order_of_the_pieces() -> None:
    """Whoever is done first: sums are added in one order."""
    with spread("local") as over:
        assert list(over.each(Echo(), None, range(12))) == list(range(12))


def test_a_worker_without_the_file_names_it_and_its_machine(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The donor is here when the command starts, and not where workers look for it."""
    donor = shutil.copytree(pair[1], tmp_path / "donor")

    @contextmanager
    def gone(*given: Any) -> Iterator[Any]:
        with spread(*given) as over:
            donor.rename(tmp_path / "elsewhere")
            yield over

    monkeypatch.setattr(module, "spread", gone)
    done = run("align", pair[0], donor, tmp_path / "out", *RAY)
    assert done.exit_code == 2
    line = one_error(done.output)
    assert line.startswith(f"Error: {donor}")
    assert f"worker {socket.gethostname()}" in line
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_weights_is_said_as_ever(pair: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = state(pair[1])
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    model = build("llama")
    model.load_state_dict(tensors)
    donor = save(model, tmp_path / "donor")
    line = one_error(run("align", pair[0], donor, tmp_path / "out", *RAY).output)
    assert "model.layers.1.mlp.up_proj.weight" in line
    assert str(donor) in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "out of memory; fewer workers"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough"), "out of memory; fewer"),
        (FileNotFoundError(2, "No such file or directory", "/data/a"), "/data/a, worker {host}: No such file"),
        (OSError(28, "No space left on device", "/tmp/a"), "the disk is full ([Errno 28] No space left"),
        (ValueError("odd"), "ValueError: odd"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_errors_of_workers_are_one_line(error: Exception, words: str) -> None:
    with spread("local") as over, pytest.raises(RotationMergeError) as found:
        list(over.each(Failing(error), None, [0]))
    host = socket.gethostname()
    assert words.format(host=host) in str(found.value)
    assert f"worker {host}" in str(found.value)


def test_other_versions_models_that_are_too_large_and_clusters_that_are_not_there(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with spread("local") as over:
        assert isinstance(over, Cluster)
        with pytest.raises(RotationMergeError, match=r"a worker needs 11529215\d\d.* GB, the largest machine gives"):
            list(over.each(Failing(ValueError(), size=1 << 60), None, [0]))
        monkeypatch.setattr(module, "__version__", "0.0.1")
        with pytest.raises(RotationMergeError, match=r"is \S+ here, but 0.0.1 where the command runs"):
            list(over.each(Failing(ValueError()), None, [0]))
    with pytest.raises(RotationMergeError, match="the cluster has no GPU"):
        Cluster("local", "cuda")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    lost = module._died(RuntimeError("failed to import: No module named 'rotation_merge'"), "auto")
    assert str(lost).startswith("--ray auto: a worker has no rotation_merge; install it on every machine")
    full = module._died(ray.exceptions.OutOfDiskError("full"), "auto")
    assert str(full).startswith("--ray auto: Ray's object store is full")
    assert "RAY_TMPDIR" in str(full)
    for address in ("127.0.0.1:1", "nowhere"):
        line = one_error(run("align", *pair, "out", "--ray", address).output)
        assert line.startswith(f"Error: --ray {address}: no Ray cluster answers (")


def test_what_cannot_be_shared_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for options, words in (
        (["--match-on", "both"], "leave out --match-on"),
        (["--device", "cuda:1"], "use --device cuda"),
    ):
        assert words in one_error(run("align", *pair, tmp_path / "out", *RAY, *options).output)
    assert json.loads(run("align", *pair, tmp_path / "out", *RAY, "--match-on", "both", "--json").stdout)["error"]


def test_a_worker_that_dies_is_replaced_and_nothing_is_lost(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    options = AlignConfig(heads="permutation")
    pair = open_pair(*map(str, deep_pair), options)
    anchor, donor = pair.matched
    here = match_model(pair.architecture, anchor, donor, options)
    with spread("local") as over:
        found = match_model(pair.architecture, anchor, Deadly(donor, tmp_path), options, over=over)
    (dead,) = tmp_path.iterdir()
    assert dead.name != str(os.getpid())
    assert found.transforms.keys() == here.transforms.keys()
    for name, transform in here.transforms.items():
        for key, tensor in transform.tensors().items():
            assert torch.equal(found.transforms[name].tensors()[key], tensor)


def test_a_piece_that_kills_every_worker_ends_it_with_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRIES", 1)
    with spread("local") as over, pytest.raises(RotationMergeError) as error:
        list(over.each(Killing(tmp_path), None, [0]))
    assert "workers died 2 times on the same piece" in str(error.value)
    assert "fewer workers" in str(error.value)
    assert len(list(tmp_path.iterdir())) == 2
