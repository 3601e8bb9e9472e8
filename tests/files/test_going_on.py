"""Work that was interrupted goes on from what it kept, to the same bytes; what is of other work is not used."""

from __future__ import annotations

import json
import os
import resource
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
from interrupted_support import forked
from plugin_support import make, mergekit_yaml, one_error, recipe_for, twin, write_recipe

from rotation_merge.matching import match
from rotation_merge.mergekit_plugin import views
from rotation_merge.run import evaluate, ledger
from rotation_merge.run.ledger import Ledger, kept_beside

NEVER = 10**9


class Counter:
    """Counts calls, and lets one run out of memory."""

    def __init__(self) -> None:
        self.calls, self.last, self._lock = 0, NEVER, threading.Lock()

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                if self.calls == self.last:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
                self.calls += 1
            return function(*arguments, **options)

        return call

    def of(self, work: Callable[[], Any], last: int = NEVER) -> int:
        """The number of calls that some work makes, `last` at most."""
        self.calls, self.last = 0, last
        work()
        return self.calls


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts blocks that are matched, one after the other; everything is kept at once."""
    monkeypatch.setattr(ledger, "SECONDS", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counter = Counter()
    for module in (match, views):
        monkeypatch.setattr(module, "match_block", counter.counted(module.match_block))
    return counter


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
@pytest.mark.parametrize(
    ("options", "again"),
    [({}, 4), ({"residual": "rotation"}, 4), ({"anchor": "mean"}, 0)],
    ids=["local", "stream", "mean"],
)
def test_a_recipe_with_two_donors(
    options: dict[str, Any], again: int, four: tuple[Path, Path], far: Path, tmp_path: Path, blocks: Counter
) -> None:
    """Blocks of a pass that was begun, and those begun ahead of one that failed, are matched again: `again` at most."""
    recipe, out = recipe_for("linear", *four, far, heads="permutation"), tmp_path / "out"
    recipe["parameters"].update(options)
    whole, unfinished = blocks.of(lambda: done(mergekit_yaml(recipe, tmp_path / "whole"))), "out.matching.unfinished"
    matched = 0
    for last in (int(whole * 0.84), whole // 12):
        matched += blocks.of(lambda: failed(mergekit_yaml(recipe, out)), last)
        assert (tmp_path / unfinished).is_dir()
        assert not out.exists()
    matched += blocks.of(lambda: done(mergekit_yaml(recipe, out)))
    assert not (tmp_path / unfinished).exists()
    for path in (tmp_path / "whole").glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert whole <= matched <= whole + again


@pytest.mark.slow
def test_a_barrier(
    four: tuple[Path, Path], far: Path, tmp_path: Path, blocks: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two donors, two paths on each of two curves; it ends among the blocks, and on a path."""
    np.savez(tmp_path / "data.npz", input_ids=np.random.default_rng(0).integers(0, 40, (4, 8)))
    recipe = write_recipe(recipe_for("linear", *four, far, residual="permutation"), tmp_path / "recipe.yml")
    command = ["barrier", recipe, "--data", tmp_path / "data.npz", "--points", 3]
    points, results = Counter(), list[Result]()
    monkeypatch.setattr(evaluate, "score", points.counted(evaluate.score))
    whole = blocks.of(lambda: results.append(run(*command, "--json")))
    expected, count, matched = json.loads(results[0].stdout), points.calls, 0
    points.calls = 0
    for last, points.last in ((whole // 2, NEVER), (NEVER, count // 2 + 2)):
        matched += blocks.of(lambda: failed(run(*command, "--save", tmp_path)), last)
        assert (tmp_path / "barrier.json.matching.unfinished").is_dir()
    points.last = NEVER
    matched += blocks.of(lambda: done(run(*command, "--save", tmp_path)))
    assert points.calls == count
    assert whole <= matched <= whole + 6
    assert json.loads((tmp_path / "barrier.json").read_text()) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["barrier.json", "data.npz", "recipe.yml"]


@pytest.mark.parametrize("changed", ["options", "weights"])
def test_matching_of_something_else_is_not_used(
    changed: str, four: tuple[Path, Path], tmp_path: Path, blocks: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    donor, out = shutil.copytree(four[1], tmp_path / "donor"), tmp_path / "out"
    blocks.of(lambda: failed(run("align", four[0], donor, out, "--no-verify")), 3)
    folder = Path(f"{out}.matching.unfinished")
    assert sum(path.suffix == ".pt" for path in folder.iterdir()) == 3
    if changed == "weights":
        os.utime(donor / "model.safetensors", (1, 1))
    options = ["--heads", "permutation"] if changed == "options" else []
    assert blocks.of(lambda: done(run("align", four[0], donor, out, "--no-verify", *options))) == 4
    assert f"{folder} belongs to other weights, options or versions; it is replaced" in caplog.messages


def test_what_waits_is_written_when_the_run_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a minute nothing is written; after it two parts, a third by Ctrl-C; one too large to wait is not kept."""
    clock, out = [0.0], str(tmp_path / "out")
    monkeypatch.setattr(ledger.time, "monotonic", lambda: clock[0])

    def work(progress: Ledger, *moments: float) -> None:
        for name, clock[0] in zip("abc", moments, strict=False):
            progress.keep(name, lambda name=name: {"name": name, "x": torch.ones(2, 3).mT})  # type: ignore[misc]
        progress.keep("large", dict, large=True)
        assert len(list(tmp_path.glob("*/*.pt"))) == (2 if len(moments) == 3 else 0)
        raise KeyboardInterrupt

    for moments in ((0.0,), (0.0, 61.0, 62.0)):
        with pytest.raises(KeyboardInterrupt), kept_beside(out, lambda: "mark") as progress:
            work(progress, *moments)
        assert bool(list(tmp_path.iterdir())) == (len(moments) == 3)
    assert caplog.records[-1].message.endswith("run the same command to continue")
    with kept_beside(out, lambda: "mark") as progress:
        entries = [progress.get(name) for name in ("a", "b", "c", "large")]
    assert [part["name"] for part in entries if part is not None] == ["a", "b", "c"]
    assert entries[0]["x"].stride() == torch.ones(2, 3).mT.stride()  # sums of it are added in the same order
    assert not list(tmp_path.iterdir())


# --- merges that end early leave nothing ------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_that_cannot_grow(deep_pair: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = write_recipe(recipe_for("linear", *deep_pair), tmp_path / "recipe.yml")
    for flags in ((), ("--no-safe-serialization",), ("--async-write",)):
        result = forked(
            *("mergekit-yaml", recipe, tmp_path / "deep" / "out", "--quiet", *flags),
            prepare=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)),
        )
        assert result.returncode == 2, result.stderr
        error = one_error(result.stderr)
        assert "grew over the limit" in error or "disk" in error, error
        assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yml"]
