"""Files are on disk before they take another's place; folders for a while, and unfinished work, are nobody else's."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from plugin_support import make, merged, recipe_for, twin

from rotation_merge.errors import RotationMergeError, SpaceError
from rotation_merge.files import Store, TemporaryFolder, name_when_whole, replacing, write_text, writing
from rotation_merge.model.writing import staged

Steps = list[tuple[str, str]]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """What is synced, by the path it was opened with, and what is moved, in order."""
    recorded: Steps = []
    fsync = os.fsync

    def synced(handle: int) -> None:
        recorded.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def moving(move: Callable[..., None]) -> Callable[..., None]:
        def moved(old: Any, new: Any, **options: Any) -> None:
            recorded.append(("move", f"{old} -> {new}"))
            move(old, new, **options)

        return moved

    monkeypatch.setattr(os, "fsync", synced)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, moving(getattr(os, name)))
    return recorded


def test_a_file(steps: Steps, tmp_path: Path) -> None:
    """A text, and a part of a run: on disk before it takes its place, which is on disk after it."""
    store = Store(str(tmp_path / "run"))
    store.begin("key")
    (tmp_path / "plain").write_text("text")
    for write, pattern in ((lambda: write_text(tmp_path / "a", "text"), "a"), (lambda: store.put("b", {}), "run.*/b*")):
        steps.clear()
        write()
        (path,), temporary = tmp_path.glob(pattern), steps[0][1]
        assert name_when_whole(temporary) == str(path) != temporary
        assert steps == [("sync", temporary), ("move", f"{temporary} -> {path}"), ("sync", str(path.parent))]
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_a_model(steps: Steps, tmp_path: Path) -> None:
    """Every file and its folder before the first move; the place that it came to after the last."""
    anchor, out = make("llama", tmp_path / "anchor", num_hidden_layers=1), tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    recipe = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"))
    steps.clear()
    merged(recipe, out)
    ends = [Path(words.split(" -> ")[-1]) for _, words in steps]
    begin = next(i for i, end in enumerate(ends) if steps[i][0] == "move" and out in (end, end.parent))
    synced = {Path(words).name for step, words in steps[:begin] if step == "sync"}
    assert {"model.safetensors", "config.json", "rotation_merge.json", "README.md", "out"} <= synced
    assert ("sync", str(out)) in steps[begin:]
    assert steps[-1] == ("sync", str(tmp_path))


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def half_written(half: Path) -> None:
        half.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        half_written(Path(temporary))
    with pytest.raises(KeyboardInterrupt), staged(str(tmp_path / "model")) as folder:
        half_written(Path(folder, "half"))
    with pytest.raises(KeyboardInterrupt), TemporaryFolder(str(tmp_path)) as folder:
        half_written(Path(folder, "half"))
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("end", [0, signal.SIGKILL, signal.SIGTERM])
def test_the_temporary_folder_of_a_killed_process_goes_with_the_next(end: int, tmp_path: Path) -> None:
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        held = TemporaryFolder(str(tmp_path))
        Path(held.path, "states").write_text("much")
        os.kill(os.getpid(), end)
        os._exit(0)
    (folder,) = tmp_path.iterdir()
    assert (folder / "states").exists()
    with TemporaryFolder(str(tmp_path)) as path:
        assert [str(entry) for entry in tmp_path.iterdir()] == [path]
    assert not list(tmp_path.iterdir())


def test_temporary_folders_that_are_held_and_those_of_others_stay(tmp_path: Path) -> None:
    owner, prefix, parent = TemporaryFolder.OWNER, TemporaryFolder.PREFIX, tmp_path / "parent"
    for name in ("elsewhere", "parent/another"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / owner).touch()
    (parent / f"{prefix}without").mkdir()
    (parent / f"{prefix}link").symlink_to(tmp_path / "elsewhere")
    first, second = TemporaryFolder(str(parent)), TemporaryFolder(str(parent))
    assert len(list(parent.iterdir())) == 5
    assert (tmp_path / "elsewhere" / owner).exists()
    first.close()
    assert os.path.exists(second.path)
    del second
    assert sorted(entry.name for entry in parent.iterdir()) == ["another", f"{prefix}link", f"{prefix}without"]


@pytest.fixture
def work(tmp_path: Path) -> Store:
    """A store that has begun, beside `out`."""
    store = Store(str(tmp_path / "out"))
    store.begin("key")
    return store


@pytest.mark.parametrize("torn", [0, 7, 0.5, -1])
def test_a_torn_part_is_computed_again(torn: float, work: Store, caplog: pytest.LogCaptureFixture) -> None:
    work.put("state", {"x": torch.ones(3)})
    (path,) = work.path.glob("*.pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(torn * len(whole)) if 0 < torn < 1 else int(torn)])
    assert work.get("state") is None
    assert "is damaged" in caplog.text


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("inline_container.cc:664] . unexpected pos 64 vs 0")]
)
def test_a_full_disk_is_said_in_one_line(error: Exception, work: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", Mock(side_effect=error))
    said = rf"^{work.path}: cannot be written \(.*\); free some space \(the same command continues\)"
    with pytest.raises(SpaceError, match=said):
        work.put("state", {})
    with pytest.raises(RuntimeError, match=r"^odd$"), writing(work.path, "wait"):
        raise RuntimeError("odd")


@pytest.mark.parametrize(
    ("error", "parts", "stays"),
    [
        (KeyboardInterrupt(), True, True),
        (KeyboardInterrupt(), False, False),
        (RotationMergeError("bad data"), True, False),
        (SpaceError("the disk is full"), True, True),
        (SpaceError("the disk is full"), False, False),
    ],
)
def test_a_store_stays_where_it_is_of_use(error: BaseException, parts: bool, stays: bool, work: Store) -> None:
    def fail() -> None:
        if parts:
            work.put("part", {})
        raise error

    with pytest.raises(type(error)), work:
        fail()
    assert work.path.exists() == stays


def test_a_run_that_is_killed_as_it_cleans_up_leaves_a_folder_that_is_known(
    work: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "z"):
        (work.path / name).mkdir()
    monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        work.remove()
    monkeypatch.undo()
    assert work.is_of("key")
    work.remove()
    assert not work.path.exists()
