"""File locks, which the system releases when the process that holds them ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from rotation_merge.errors import RotationMergeError, short

try:
    import fcntl
except ImportError:  # a system without such locks
    fcntl = None  # type: ignore[assignment]

LOCK = "rotation-merge.lock"
"""End of the name of the file that is locked while something is written: beside it, or in it."""

NO_LINK = getattr(os, "O_NOFOLLOW", 0)
"""Opens nothing that a link stands for."""

_held: ContextVar[frozenset[str]] = ContextVar("rotation_merge_outputs", default=frozenset())
"""Outputs that are locked already, further out."""


def take(handle: int) -> bool | None:
    """Lock an open file; None if the file system has no locks.

    Returns:
        False: another process, or another thread, holds it.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def new_locked_file(path: str) -> int | None:
    """Create a file and lock it; returns the open handle, or None if the file system has no locks.

    Raises:
        FileExistsError: it is there.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    if take(handle) and _is_still_at(handle, path):
        return handle
    os.close(handle)
    return None


def remove_if_unlocked(path: str) -> None:
    """Remove a file that a killed process left behind."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR | NO_LINK)
        try:
            if take(handle):
                os.remove(path)
        finally:
            os.close(handle)


@contextmanager
def output_lock(out: str | os.PathLike[str]) -> Iterator[bool]:
    """Lock an output against other processes within the block; False if the file system has no locks.

    Folders that are missing above it are made, and go again where nothing has come into them. A block within a block
    of the same output holds it already.

    Raises:
        RotationMergeError: another run is writing it.
    """
    target = os.path.realpath(out)
    if target in _held.get():
        yield True
        return
    parent, missing = os.path.dirname(target), first_missing(os.path.dirname(target))
    try:
        os.makedirs(parent, exist_ok=True)
        path, handle = _lock(target, str(out))
    except OSError as error:
        problem = f"cannot be written ({short(error.strerror or error).lower()})"
        raise RotationMergeError(problem, where=str(out), remedy="write somewhere else") from error
    token = _held.set(_held.get() | ({target} if handle is not None else set()))
    try:
        yield handle is not None
    finally:
        _held.reset(token)
        if handle is not None:
            with suppress(OSError):
                os.remove(path)
            os.close(handle)
        if missing is not None:
            remove_empty(parent, missing)


def _lock(target: str, out: str) -> tuple[str, int | None]:
    """The lock file of an output, and its handle; None if the file system has no locks."""
    parent, name = os.path.split(target)
    beside, inside = os.path.join(parent, f".{name[:200]}.{LOCK}"), os.path.join(target, f".{LOCK}")
    try:
        return beside, _open_locked(beside, out)
    except OSError as error:
        if error.errno not in NOT_OURS or not os.path.isdir(target):
            raise
    return inside, _open_locked(inside, out)


NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error codes for a folder of another user; an output in it may still be writable."""


def _open_locked(path: str, out: str) -> int | None:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINK, 0o666)
        locked = take(handle)
        if locked is False:
            process = os.read(handle, 20).decode("ascii", "replace").strip()
            os.close(handle)
            problem = f"another run{f' (process {process})' if process else ''} is writing it"
            raise RotationMergeError(problem, where=out, remedy="wait until that has ended, or write somewhere else")
        if locked is None:
            os.close(handle)
            with suppress(OSError):
                os.remove(path)
            return None
        if _is_still_at(handle, path):
            with suppress(OSError):  # a full disk
                os.ftruncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)  # whoever held it has removed it meanwhile


def _is_still_at(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def first_missing(path: str) -> str | None:
    """The topmost missing directory of a path."""
    missing = None
    while not os.path.exists(path):
        missing, path = path, os.path.dirname(path)
    return missing


def remove_empty(path: str, top: str) -> None:
    """Remove directories up to `top` while nothing is in them."""
    while os.path.isdir(path) and not os.listdir(path):
        os.rmdir(path)
        if path == top:
            return
        path = os.path.dirname(path)
