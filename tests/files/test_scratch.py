"""Folders for a while: gone when their owner has ended, well or not, and never anybody else's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rotation_merge.files import locks
from rotation_merge.files.scratch import LOCK, PREFIX, Scratch


def ended(parent: Path, how: int) -> None:
    """A process that makes a folder with a file in it, and ends: killed, or without cleaning up."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    mine = Scratch(str(parent))
    Path(mine.path, "states").write_text("much")
    if how:
        os.kill(os.getpid(), how)
    os._exit(0)


@pytest.mark.parametrize("how", [0, signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_leaves_goes_with_the_next(tmp_path: Path, how: int) -> None:
    ended(tmp_path, how)
    (left,) = tmp_path.iterdir()
    assert (left / "states").exists()
    with Scratch(str(tmp_path)) as path:
        assert [str(one) for one in tmp_path.iterdir()] == [path]
    assert not list(tmp_path.iterdir())


def test_held_ones_and_those_of_others_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    there = tmp_path / "there"
    there.mkdir()
    (there / "another").mkdir()
    (there / "another" / LOCK).touch()
    (there / f"{PREFIX}without").mkdir()
    (there / f"{PREFIX}link").symlink_to(elsewhere)
    first, second = Scratch(str(there)), Scratch(str(there))
    assert len(list(there.iterdir())) == 5
    assert (elsewhere / LOCK).exists()
    first.close()
    assert os.path.exists(second.path)
    del second
    assert sorted(one.name for one in there.iterdir()) == ["another", f"{PREFIX}link", f"{PREFIX}without"]


def test_a_forked_process_removes_nothing(tmp_path: Path) -> None:
    mine = Scratch(str(tmp_path))
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        mine.close()
        os._exit(0)
    assert os.path.exists(mine.path)
    Scratch(str(tmp_path)).close()
    assert os.path.exists(mine.path)


def test_goes_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), Scratch(str(tmp_path)):
        raise ValueError("x")
    assert not list(tmp_path.iterdir())


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with Scratch(str(tmp_path / "new")) as path, Scratch(str(tmp_path / "new")):
        assert os.path.exists(path)
    assert not list((tmp_path / "new").iterdir())
