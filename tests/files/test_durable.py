"""Outputs, alignment files and states are on disk before they take another's place."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import hasten
from matching_support import save_for
from plugin_support import make, merged, recipe_for, twin

from rotation_merge import Alignment
from rotation_merge.architecture.model import Architecture
from rotation_merge.files import name_when_whole, replacing, write_text
from rotation_merge.matching.training import kept_in
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.writing import staged
from rotation_merge.run.statistics import Statistics


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and what is moved, in order; a sync by the path it was opened with."""
    found: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def fsync(handle: int) -> None:
        found.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        real["fsync"](handle)

    def move(name: str) -> Any:
        def moving(old: Any, new: Any, **options: Any) -> None:
            found.append(("move", f"{old} -> {new}"))
            real[name](old, new, **options)

        return moving

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", move("replace"))
    monkeypatch.setattr(os, "rename", move("rename"))
    return found


def assert_file_was_kept(steps: list[tuple[str, str]], path: Path) -> None:
    (_, temporary), *_ = steps
    assert name_when_whole(temporary) == str(path) != temporary
    assert steps == [
        ("sync", temporary),
        ("move", f"{temporary} -> {path}"),
        ("sync", str(path.parent)),
    ]


WRITERS: dict[str, Callable[[Path], object]] = {
    "text": lambda path: write_text(path, "text"),
    "alignment": lambda path: save_for(path, Alignment({}), Architecture("llama", {}, {}, (), {}), "one", "two"),
    "statistics": lambda path: Statistics(
        as_tensors({"b/x.gram": torch.ones(1, 1)}), {}, frozenset(), frozenset()
    ).write(path),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file(kind: str, steps: list[tuple[str, str]], tmp_path: Path) -> None:
    WRITERS[kind](tmp_path / "a.safetensors")
    assert_file_was_kept(steps, tmp_path / "a.safetensors")


def test_a_state(steps: list[tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)
    with pytest.raises(KeyboardInterrupt), kept_in(tmp_path / "fit.unfinished", lambda: "key") as ledger:
        interrupted(lambda: ledger.keep("state", dict))
    assert_file_was_kept(steps, next((tmp_path / "fit.unfinished").glob("*.pt")))


def interrupted(work: Callable[[], object]) -> None:
    work()
    raise KeyboardInterrupt


@pytest.mark.parametrize("there", [False, True])
def test_a_model(steps: list[tuple[str, str]], there: bool, tmp_path: Path) -> None:
    """Every file and its folder before the first move; the place that it came to after the last."""
    anchor = make("llama", tmp_path / "anchor", num_hidden_layers=1)
    out = tmp_path / "out"
    if there:
        out.mkdir()
        (out / "config.json").write_text("{}")
    recipe = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"))
    steps.clear()
    merged(recipe, out)
    ends = [Path(words.split(" -> ")[-1]) for _, words in steps]
    begin = next(i for i, end in enumerate(ends) if steps[i][0] == "move" and out in (end, end.parent))
    synced = {Path(words).name for what, words in steps[:begin] if what == "sync"}
    assert {"model.safetensors", "config.json", "rotation_merge.json", "README.md", "out"} <= synced
    assert not there or ("sync", str(out)) in steps[begin:]
    assert steps[-1] == ("sync", str(tmp_path))


def test_what_goes_wrong_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        interrupted(lambda: Path(temporary).write_text("half"))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(KeyboardInterrupt), staged(str(tmp_path / "model")) as folder:
        interrupted(lambda: Path(folder, "half").write_text("half"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_permissions_stay_those_of_a_new_file(tmp_path: Path) -> None:
    write_text(tmp_path / "one", "text")
    (tmp_path / "two").write_text("text")
    assert stat.S_IMODE((tmp_path / "one").stat().st_mode) == stat.S_IMODE((tmp_path / "two").stat().st_mode)
