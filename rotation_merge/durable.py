"""Files that are there whole or not at all, also after the power fails: on disk before they take another's place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PARTIAL = ".partial"
"""Ending of a file that is not whole yet."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write a file under; when the block ends well, it is on disk and has taken the place of `path`.

    When the block does not end well, what stood there stands there still.
    """
    target = os.path.abspath(os.fspath(path))
    temporary = target + PARTIAL
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    sync(os.path.dirname(target))


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, whole or not at all."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def sync(path: str) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    with suppress(PermissionError):  # a file that its writer made unreadable, a folder on Windows
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def sync_tree(folder: str) -> None:
    """`sync` for everything in a folder, the innermost first, and the folder itself."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if os.path.isfile(path := os.path.join(place, name)):
                sync(path)
        sync(place)
