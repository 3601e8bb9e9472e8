"""A model written as a checkpoint, whole or not at all; keys of runs, and whether models change while they are read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rotation_merge.errors import CheckpointError
from rotation_merge.model.view import View
from rotation_merge.model.writing import SHARD_SIZE, free_name, staged
from rotation_merge.record import REPORT_FILE, MergeReport, versions
from rotation_merge.workers import Progress


def write_checkpoint(
    view: View,
    report: MergeReport,
    text: str,
    out: str,
    shard_size: int = SHARD_SIZE,
    progress: Progress | None = None,
    check: Callable[[str], Any] | None = None,
) -> Any:
    """A model as a normal checkpoint, whole or not at all; returns what the check found.

    Args:
        text: the model card.
        shard_size: bytes of a weight file at most.
        check: checks the written files before they take their place; what it finds has `failed` and `words`.

    Raises:
        CheckpointError: it has not passed; it is kept as OUT.rejected.
    """
    with staged(out) as staging:
        with unchanged([view]):
            view.write(staging, shard_size, progress)
        proof = None if check is None else check(staging)
        words = "" if proof is None else f"\n{proof.words[:1].upper()}{proof.words[1:]}.\n"
        write_notes(staging, report, text + words)
        if proof is not None and proof.failed:
            rejected = free_name(f"{out.rstrip(os.sep)}.rejected")
            shutil.move(staging, rejected)
            problem = f"does not compute what {view.name} computes ({proof.words})"
            raise CheckpointError(problem, where=rejected, remedy="nothing else was written; please report it")
    return proof


def write_notes(folder: str, report: MergeReport, text: str) -> None:
    """Write the report and the card beside a model."""
    report.write(os.path.join(folder, REPORT_FILE))
    Path(folder, "README.md").write_text(text, encoding="utf-8")


READ = (".safetensors", ".bin", ".index.json", "config.json")
"""Endings of the files that a model's weights are read by."""

Stamps = dict[str, tuple[int, int, int] | None]
"""Size, time in nanoseconds and inode of files, by real path; None: it is gone."""


def mark_of(models: Iterable[View], beside_models: Iterable[str] = (), **options: Any) -> str:
    """A stable key of all inputs and options of a run, the same in every process.

    Args:
        beside_models: files and folders that are read beside the models; other names are ignored.
    """
    files = {path: stamp for model in models for path, stamp in stamps_of(model, (*READ, ".json")).items()}
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
    if changed := next((path for path in before if after[path] != before[path]), None):
        problem, remedy = "was changed while it was read", "run again when nothing writes to it"
        raise CheckpointError(problem, where=changed, remedy=remedy)


def stamps_of(model: View, endings: tuple[str, ...] = READ) -> Stamps:
    """Stamps of the files that a stored model is read from; of a model in memory there are none."""
    adapter = None if model.files is None else model.files.adapter
    folders = [] if model.files is None else [model.files.folder, *([] if adapter is None else [adapter.path])]
    names = ((folder, name) for folder in folders for name in sorted(os.listdir(folder)) if name.endswith(endings))
    return _stamps(os.path.join(folder, name) for folder, name in names)


def _stamps(paths: Iterable[str]) -> Stamps:
    stamps: Stamps = {}
    for path in map(os.path.realpath, paths):
        stamps[path] = None
        with suppress(OSError):
            status = os.stat(path)
            stamps[path] = status.st_size, status.st_mtime_ns, status.st_ino
    return stamps
