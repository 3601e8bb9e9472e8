"""Keys of runs: sizes and times of the models' files, versions and options."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from mergekit.common import ModelReference

from rotation_merge.errors import CheckpointError
from rotation_merge.model.gguf import weight_files
from rotation_merge.model.view import View
from rotation_merge.record import versions

READ = (".safetensors", ".bin", ".index.json", "config.json")
"""Endings of the files that a model's weights are read by."""

ENDINGS = (".safetensors", ".bin", ".json")


def mark_of(models: Iterable[View], beside_models: Iterable[str] = (), **options: Any) -> str:
    """A stable key of all inputs and options of a run, the same in every process.

    Args:
        beside_models: files and folders that are read beside the models; other names are ignored.
    """
    folders = [folder for model in models for folder in _folders(model)]
    model_files = [
        os.path.join(folder, name) for folder in folders for name in os.listdir(folder) if name.endswith(ENDINGS)
    ]
    extra_files = [path for path in beside_models if os.path.exists(path)]
    files = {os.path.realpath(path) for path in (*model_files, *extra_files)} - {
        os.path.realpath(folder) for folder in folders
    }
    files_facts = {path: [(facts := os.stat(path)).st_size, facts.st_mtime_ns] for path in files}
    return json.dumps({"files": files_facts, "versions": versions(), **options}, sort_keys=True, default=str, indent=1)


@contextmanager
def unchanged(models: Iterable[ModelReference]) -> Iterator[None]:
    """Checks that local models do not change within the block.

    Raises:
        CheckpointError: names the first that did not.
    """
    parts = [part.path for reference in models for part in (reference.model, reference.lora) if part is not None]
    folders = [path for path in dict.fromkeys(parts) if os.path.isdir(path)]
    paths = [os.path.join(f, name) for f in folders for name in sorted(os.listdir(f)) if name.endswith(READ)]
    paths += [file for path in dict.fromkeys(parts) for file in weight_files(path)]
    before = [_stamp(path) for path in paths]
    yield
    for path, stamp in zip(paths, before, strict=True):
        if _stamp(path) != stamp:
            problem = "was changed while it was read"
            raise CheckpointError(problem, where=path, remedy="run again when nothing writes to it")


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def stamps_of(model: View) -> dict[str, tuple[int, int, int] | None]:
    """Size, time and inode of each file that a stored model is read from, by real path."""
    folders = _folders(model)
    paths = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder) if name.endswith(READ)]
    return {os.path.realpath(path): _stamp(path) for path in paths}


def _folders(model: View) -> list[str]:
    """Folders of a model's own files."""
    assert model.files is not None
    return [model.files.folder, model.adapter.path] if model.adapter else [model.files.folder]
