"""Temporary folders that are removed when the process ends, or by the next process.

A process that was killed cannot clean up. So the owner of a folder holds a lock on a file in it, which the system takes
away when the owner ends, however it ends; whoever makes the next folder in the same place removes those without one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from types import TracebackType

from rotation_merge.errors import SpaceError, no_space, short
from rotation_merge.files.locks import take

PREFIX = "rotation-merge-"
LOCK = "owner.lock"


class Scratch:
    """A new temporary folder; as a context manager it gives its path and is removed with the block.

    Attributes:
        path: where it is.
        shared: whether that is the system's folder for temporary files.

    Args:
        parent: folder to create it in, created if missing; None: the system's folder for temporary files.
    """

    def __init__(self, parent: str | None = None) -> None:
        folder = tempfile.gettempdir() if parent is None else parent
        os.makedirs(folder, exist_ok=True)
        _remove_abandoned(folder)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=folder)
        self.shared = parent is None
        self.close = weakref.finalize(self, _remove, self.path, os.getpid(), _locked(self.path))

    def __enter__(self) -> str:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()
        if error is not None and self.shared and no_space(error):
            remedy = "free some space, or name a folder that has more in TMPDIR"
            raise SpaceError(f"the disk is full ({short(error)})", where=os.path.dirname(self.path), remedy=remedy)


def _remove(path: str, owner: int, lock: int | None) -> None:
    """Remove a folder of this process, but not in a forked child."""
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _locked(folder: str) -> int | None:
    """Lock the folder; the lock file appears only once it is locked. None if the file system has no locks."""
    new = os.path.join(folder, f"new-{LOCK}")
    handle = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
    if take(handle):
        os.rename(new, os.path.join(folder, LOCK))
        return handle
    os.close(handle)
    return None


def _remove_abandoned(parent: str) -> None:
    """Remove the folders of processes that were killed."""
    for name in os.listdir(parent):
        folder = os.path.join(parent, name)
        if not name.startswith(PREFIX) or os.path.islink(folder):
            continue
        with suppress(OSError):  # somebody else's, without a lock, or held
            handle = os.open(os.path.join(folder, LOCK), os.O_RDWR)
            try:
                if take(handle):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
