"""Folders for a while: gone when their owner has ended, well or not, and never anybody else's."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rotation_merge.files import TemporaryFolder

OWNER, PREFIX = TemporaryFolder.OWNER, TemporaryFolder.PREFIX


def ended(parent: Path, how: int) -> None:
    """A process that makes a folder with a file in it, and ends: killed, or without cleaning up."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    mine = TemporaryFolder(str(parent))
    Path(mine.path, "states").write_text("much")
    if how:
        os.kill(os.getpid(), how)
    os._exit(0)


@pytest.mark.parametrize("how", [0, signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_leaves_goes_with_the_next(tmp_path: Path, how: int) -> None:
    ended(tmp_path, how)
    (left,) = tmp_path.iterdir()
    assert (left / "states").exists()
    with TemporaryFolder(str(tmp_path)) as path:
        assert [str(one) for one in tmp_path.iterdir()] == [path]
    assert not list(tmp_path.iterdir())


def test_held_ones_and_those_of_others_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / OWNER).touch()
    there = tmp_path / "there"
    there.mkdir()
    (there / "another").mkdir()
    (there / "another" / OWNER).touch()
    (there / f"{PREFIX}without").mkdir()
    (there / f"{PREFIX}link").symlink_to(elsewhere)
    first, second = TemporaryFolder(str(there)), TemporaryFolder(str(there))
    assert len(list(there.iterdir())) == 5
    assert (elsewhere / OWNER).exists()
    first.close()
    assert os.path.exists(second.path)
    del second
    assert sorted(one.name for one in there.iterdir()) == ["another", f"{PREFIX}link", f"{PREFIX}without"]


def test_goes_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x"), TemporaryFolder(str(tmp_path)):
        raise ValueError("x")
    assert not list(tmp_path.iterdir())
