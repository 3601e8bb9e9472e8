"""Keys of runs, and whether models change meanwhile: sizes, times and inodes of their files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rotation_merge.errors import CheckpointError
from rotation_merge.model.view import View
from rotation_merge.record import versions

READ = (".safetensors", ".bin", ".index.json", "config.json")
"""Endings of the files that a model's weights are read by."""

ENDINGS = (".safetensors", ".bin", ".json")

Stamps = dict[str, tuple[int, int, int] | None]
"""Size, time in nanoseconds and inode of files, by real path; None: it is gone."""


def mark_of(models: Iterable[View], beside_models: Iterable[str] = (), **options: Any) -> str:
    """A stable key of all inputs and options of a run, the same in every process.

    Args:
        beside_models: files and folders that are read beside the models; other names are ignored.
    """
    files = {path: stamp for model in models for path, stamp in stamps_of(model, ENDINGS).items()}
    files |= _stamps(path for path in beside_models if os.path.exists(path))
    facts = {path: stamp and stamp[:2] for path, stamp in files.items()}  # disks of a network number files anew
    return json.dumps({"files": facts, "versions": versions(), **options}, sort_keys=True, default=str, indent=1)


@contextmanager
def unchanged(models: Iterable[View]) -> Iterator[None]:
    """Checks that the files of stored models do not change within the block.

    Raises:
        CheckpointError: names the first that did.
    """
    before = {path: stamp for model in models for path, stamp in stamps_of(model).items()}
    yield
    after = _stamps(before)
    for path, stamp in before.items():
        if after[path] != stamp:
            problem = "was changed while it was read"
            raise CheckpointError(problem, where=path, remedy="run again when nothing writes to it")


def stamps_of(model: View, endings: tuple[str, ...] = READ) -> Stamps:
    """Stamps of the files that a stored model is read from; of a model in memory there are none."""
    adapter = None if model.files is None else model.files.adapter
    folders = [] if model.files is None else [model.files.folder, *([] if adapter is None else [adapter.path])]
    names = ((folder, name) for folder in folders for name in sorted(os.listdir(folder)) if name.endswith(endings))
    return _stamps(os.path.join(folder, name) for folder, name in names)


def _stamps(paths: Iterable[str]) -> Stamps:
    stamps: Stamps = {}
    for path in map(os.path.realpath, paths):
        try:
            status = os.stat(path)
            stamps[path] = status.st_size, status.st_mtime_ns, status.st_ino
        except OSError:
            stamps[path] = None
    return stamps
