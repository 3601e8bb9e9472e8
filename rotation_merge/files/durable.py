"""Atomic, durable writes: a file is synced to disk before it replaces another."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rotation_merge.files.locks import new_locked_file, remove_if_unlocked

PARTIAL = ".partial"
"""Ending of a file, or folder, that is not whole yet."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.partial")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name to write to; when the block ends without an error, the file is synced and replaces `path`.

    If the block raises, the old file stays. The temporary name belongs to this run; files that a killed process left
    beside the target are removed.
    """
    target = os.path.abspath(os.fspath(path))
    remove_abandoned(target)
    temporary = temporary_name(target)
    handle = new_locked_file(temporary)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            os.remove(temporary)
        raise
    finally:
        if handle is not None:
            os.close(handle)
    sync(os.path.dirname(target))


def temporary_name(target: str) -> str:
    """An unused name beside a file or folder, to write to until it is complete."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name[:200]}.{secrets.token_hex(4)}{PARTIAL}")


def name_when_whole(path: str) -> str:
    """The final name of a temporary name; other names are returned unchanged."""
    folder, name = os.path.split(path)
    temporary = _TEMPORARY.fullmatch(name)
    return path if temporary is None else os.path.join(folder, temporary[1])


def remove_abandoned(target: str) -> None:
    """Remove files under temporary names of `target` that no process writes."""
    for path in under_temporary_names(target):
        if os.path.isfile(path) and not os.path.islink(path):
            remove_if_unlocked(path)


def under_temporary_names(target: str) -> list[str]:
    """Paths of all temporary files that belong to a file or folder."""
    folder, name = os.path.split(target)
    try:
        entries = os.listdir(folder)
    except OSError:
        return []
    temporaries = [entry for entry in entries if (match := _TEMPORARY.fullmatch(entry)) and match[1] == name[:200]]
    return [os.path.join(folder, entry) for entry in sorted(temporaries)]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)


def write_json(path: str, content: object) -> None:
    """Write a JSON file into a folder that is replaced as a whole."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.write("\n")


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
