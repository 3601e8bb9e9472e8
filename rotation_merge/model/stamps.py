"""What decides a result, cheaply told: the files that models consist of by size and time, versions, options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mergekit.common import ModelReference

from rotation_merge.errors import CheckpointError
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.gguf.place import is_folder, weight_files
from rotation_merge.model.halves import HalfLoader
from rotation_merge.record import versions

ENDINGS = (".safetensors", ".bin", ".json")
READ = (".safetensors", ".bin", ".index.json", "config.json")
"""Endings of the files that a model's weights are read by."""


def mark_of(models: Iterable[Model], others: Iterable[str] = (), **options: Any) -> str:
    """What a run is of, the same in another process, and other after any of it has changed.

    Args:
        others: files and folders that are read beside the models; what is none is passed over.
    """
    folders = [folder for model in models for folder in _folders(model)]
    found = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder) if name.endswith(ENDINGS)]
    beside = [path for path in others if os.path.exists(path)]
    files = {os.path.realpath(path) for path in (*found, *beside)} - {os.path.realpath(folder) for folder in folders}
    told = {path: [(facts := os.stat(path)).st_size, facts.st_mtime_ns] for path in files}
    return json.dumps({"files": told, "versions": versions(), **options}, sort_keys=True, default=str, indent=1)


@contextmanager
def unchanged(models: Iterable[ModelReference]) -> Iterator[None]:
    """The files of models in folders stay what they are within the block: else what is made of them is of no model.

    Raises:
        CheckpointError: names the first that did not.
    """
    parts = [part.path for one in models for part in (one.model, one.lora) if part is not None]
    folders = [path for path in dict.fromkeys(parts) if os.path.isdir(path)]
    paths = [os.path.join(f, name) for f in folders for name in sorted(os.listdir(f)) if name.endswith(READ)]
    paths += [file for path in dict.fromkeys(parts) for file in weight_files(path)]
    before = [_stamp(path) for path in paths]
    yield
    for path, stamp in zip(paths, before, strict=True):
        if _stamp(path) != stamp:
            what = "was changed while it was read"
            raise CheckpointError(what, where=path, remedy="run again once nothing writes to it any more")


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ino


def _folders(model: Model) -> list[str]:
    """Where a model's own files lie, not those of the anchor that it is read as a half of."""
    path, loader = model.reference.model.path, None
    if not is_folder(path):
        loader = model.loader.own if isinstance(model.loader, HalfLoader) else model.loader
    own = path if loader is None else str(loader.index.base_path)
    return [own, model.adapter.path] if model.adapter else [own]
