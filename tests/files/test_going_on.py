"""Matching that was interrupted goes on from what was found, to the same bytes; by anything else it is not used."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import run
from click.testing import Result
from plugin_support import make, mergekit_yaml, one_error, recipe_for, twin, write_recipe
from tiny_models import ALL, planted

from rotation_merge import AlignConfig, Alignment, RotationMergeError
from rotation_merge.matching import visit
from rotation_merge.matching.match import match_model
from rotation_merge.mergekit_plugin import views
from rotation_merge.run import evaluate, ledger
from rotation_merge.run.ledger import NOWHERE, Ledger, kept_beside


class Counted:
    """Calls of what matches blocks and of what solves for streams, and the first call that runs out of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls, self.last, self._lock = 0, 10**9, threading.Lock()
        for module in (visit, views):
            monkeypatch.setattr(module, "match_block", self._counted(module.match_block))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            with self._lock:
                self.calls += 1
                if self.calls > self.last:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return real(*given, **more)

        return call

    def of(self, do: Callable[[], Any], last: int = 10**9) -> int:
        """How many blocks something matches, which may match so many."""
        self.calls, self.last = 0, last
        do()
        return min(self.calls, last)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Everything is kept at once; blocks are matched one after the other."""
    monkeypatch.setattr(ledger, "SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return Counted(monkeypatch)


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def assert_goes_on(
    begin: Callable[[Path], Result], folder: Path, counted: Counted, again: int, first: float = 0.84
) -> None:
    """Something that is interrupted twice writes what it would have written, and matches no more than `again` blocks
    twice; `first`: after which share of its blocks."""
    out, place = folder / "out", folder / "out.matching.unfinished"
    whole = counted.of(lambda: begin(folder / "whole"))
    matched = 0
    for last in (int(whole * first), whole // 12):
        matched += counted.of(lambda: failed(begin(out)), last)
        assert place.is_dir()
        assert not out.exists()
    matched += counted.of(lambda: done(begin(out)))
    assert not place.exists()
    assert weights(out) == weights(folder / "whole")
    assert whole <= matched <= whole + again


def failed(result: Result) -> None:
    assert result.exit_code == 2
    error = one_error(result.output)
    assert error.startswith("Error: the GPU ran out of memory (tried to allocate 2.00 GiB); match on another device")


def done(result: Result) -> None:
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of other weights than a pair."""
    return make("llama", tmp_path_factory.mktemp("far") / "far", seed=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def four(far: Path) -> tuple[Path, Path]:
    """A model of four layers and a twin of it in other coordinates."""
    anchor = make("llama", far.parent / "anchor", num_hidden_layers=4)
    return anchor, twin(anchor, far.parent / "twin")


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_wherever_it_is_interrupted_the_result_is_the_same(residual: str, tmp_path: Path, counted: Counted) -> None:
    """After any block of any pass, and once more; no more than the pass that was begun is done again."""
    model = planted(next(case for case in ALL if (case.family, case.name) == ("llama", "llama")))
    draw = torch.Generator().manual_seed(3)
    donor = {n: x + 0.5 * x.std() * torch.randn(x.shape, generator=draw, dtype=x.dtype) for n, x in model.state.items()}
    options = AlignConfig(heads="permutation", residual=residual)
    results: list[Alignment] = []

    def match(ledger: Ledger = NOWHERE) -> None:
        results.append(match_model(model.architecture, model.state, donor, options, ledger=ledger))

    def again(out: Path) -> None:
        with kept_beside(str(out), lambda: "mark") as ledger:
            match(ledger)

    whole = counted.of(match)
    for last in range(1, whole, 1 + whole // 8):
        out = tmp_path / str(last)
        for stop in (last, 1):
            with contextlib.suppress(torch.OutOfMemoryError):
                counted.of(lambda out=out: again(out), stop)
        assert counted.of(lambda out=out: again(out)) <= whole - last + len(model.architecture.blocks)
        first, resumed = (
            {
                (name, part): x
                for name, transform in result.transforms.items()
                for part, x in transform.tensors().items()
            }
            for result in (results[0], results[-1])
        )
        assert first.keys() == resumed.keys()
        assert all(torch.equal(first[name], resumed[name]) for name in first)
        assert results[-1].summary == results[0].summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chosen", "again"),
    [({}, 4), ({"residual": "signed_permutation"}, 2), ({"anchor": "mean"}, 0)],
    ids=["local", "signed", "mean"],
)
def test_a_recipe_with_two_donors(
    chosen: dict[str, Any], again: int, four: tuple[Path, Path], far: Path, tmp_path: Path, counted: Counted
) -> None:
    """Blocks that were begun ahead of one that failed are matched again."""
    recipe = recipe_for("linear", *four, far, heads="permutation")
    recipe["parameters"].update(chosen)
    assert_goes_on(lambda out: mergekit_yaml(recipe, out), tmp_path, counted, again)


@pytest.mark.slow
def test_a_barrier(
    four: tuple[Path, Path], far: Path, tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two donors, two paths on each of two curves; it ends among the blocks, on a path, and on a later one."""
    np.savez(tmp_path / "data.npz", input_ids=np.random.default_rng(0).integers(0, 40, (4, 8)))
    recipe = write_recipe(recipe_for("linear", *four, far, residual="permutation"), tmp_path / "recipe.yml")
    given = ["barrier", recipe, "--data", tmp_path / "data.npz", "--points", 3]
    points: list[Any] = []
    real = evaluate.evaluate

    def counted_points(model: Any, data: Any) -> tuple[float, float]:
        if len(points) == most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        points.append(model)
        return real(model, data)

    most, told = [1000], list[Result]()
    monkeypatch.setattr(evaluate, "evaluate", counted_points)
    whole = counted.of(lambda: told.append(run(*given, "--json")))
    wanted, every, matched = json.loads(told[0].stdout), len(points), 0
    points.clear()
    for last, most[0] in ((whole // 2, 1000), (1000, every // 2 + 2), (1000, every - 2)):
        matched += counted.of(lambda: failed(run(*given, "--save", tmp_path)), last)
        assert (tmp_path / "barrier.json.matching.unfinished").is_dir()
    most[0] = 1000
    matched += counted.of(lambda: done(run(*given, "--save", tmp_path)))
    assert len(points) == every
    assert whole <= matched <= whole + 6
    assert json.loads((tmp_path / "barrier.json").read_text()) == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["barrier.json", "data.npz", "recipe.yml"]


def interrupted(pair: tuple[Path, Path], out: Path, counted: Counted, last: int = 3) -> Path:
    """The folder of an alignment that was interrupted."""
    counted.of(lambda: run("align", *pair, out, "--no-verify"), last)
    place = Path(f"{out}.matching.unfinished")
    assert sum(path.suffix == ".pt" for path in place.iterdir()) == last
    return place


@pytest.mark.parametrize("changed", ["options", "weights"])
def test_what_is_of_something_else_is_not_used(
    changed: str, four: tuple[Path, Path], tmp_path: Path, counted: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    donor = shutil.copytree(four[1], tmp_path / "donor")
    given = (four[0], donor)
    place = interrupted(given, tmp_path / "out", counted)
    if changed == "weights":
        os.utime(donor / "model.safetensors", (1, 1))
    options = ["--heads", "permutation"] if changed == "options" else []
    assert counted.of(lambda: done(run("align", *given, tmp_path / "out", "--no-verify", *options))) == 4
    assert [r.message for r in caplog.records if "replaced" in r.message] == [
        f"{place} belongs to other weights, options or versions; it is replaced"
    ]


def test_a_folder_that_no_run_wrote_stays(tmp_path: Path) -> None:
    diary = tmp_path / "out.matching.unfinished" / "diary.txt"
    diary.parent.mkdir()
    diary.write_text("mine")
    refused = pytest.raises(RotationMergeError, match=r"exists, but rotation-merge did not write it; move it away")
    with refused, kept_beside(str(tmp_path / "out"), lambda: "mark") as entries:
        entries.get("a")
    assert diary.read_text() == "mine"


def test_what_takes_no_minute_writes_nothing(
    four: tuple[Path, Path], tmp_path: Path, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "SECONDS", 60.0)
    counted.of(lambda: failed(run("align", *four, tmp_path / "out", "--no-verify")), 3)
    assert not list(tmp_path.iterdir())


def test_what_waits_is_written_when_the_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of what was found the first two are written after a minute, the third by Ctrl-C; what is too large to wait is
    not kept."""
    clock, out = [0.0], str(tmp_path / "out")
    monkeypatch.setattr(ledger.time, "monotonic", lambda: clock[0])

    def work(found: Ledger) -> None:
        for name, moment in (("a", 0.0), ("b", 61.0), ("c", 62.0)):
            clock[0] = moment
            found.keep(name, lambda name=name: {"name": name, "x": torch.ones(2, 3).mT})  # type: ignore[misc]
        found.keep("large", dict, large=True)
        assert len(list((tmp_path / "out.matching.unfinished").glob("*.pt"))) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), kept_beside(out, lambda: "mark") as found:
        work(found)
    assert caplog.records[-1].message.endswith("run the same command to continue")
    with kept_beside(out, lambda: "mark") as found:
        entries = [found.get(name) for name in ("a", "b", "c", "large")]
    assert [part["name"] for part in entries if part is not None] == ["a", "b", "c"]
    assert entries[0] is not None
    assert entries[0]["x"].stride() == torch.ones(2, 3).mT.stride()  # sums of it are added in the same order
    assert not list(tmp_path.iterdir())


def test_a_full_disk_keeps_nobody_from_matching(
    four: tuple[Path, Path],
    tmp_path: Path,
    counted: Counted,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(part: Any, path: str) -> None:
        Path(path).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")  # torch's own words

    monkeypatch.setattr(torch, "save", full)
    done(run("align", *four, tmp_path / "out", "--no-verify"))
    told = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(told) == 1
    assert told[0].endswith("; after an interruption the run starts again")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
