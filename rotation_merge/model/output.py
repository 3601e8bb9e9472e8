"""Atomic writing of a model: mergekit writes into a staging directory, which then replaces the output."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rotation_merge.errors import CheckpointError, RotationMergeError, short
from rotation_merge.files.durable import sync, sync_tree, temporary_name, under_temporary_names
from rotation_merge.files.locks import output_lock
from rotation_merge.model.folder_exchange import JOURNAL, FolderExchange, interrupted, is_of_a_model

LOG = logging.getLogger(__name__)

INSIDE = "rotation-merge"
"""Name of a staging folder inside a directory, as the directory may be moved."""


@contextmanager
def staged(out_path: str) -> Iterator[str]:
    """A staging directory that is moved to `out_path` when the block ends without an error, and removed otherwise.

    Everything in it is on disk before it moves. It has a name of its own, and nobody else writes `out_path` meanwhile.

    It lies beside `out_path`, or inside, where that is already a directory (which may be a file system of its own). An
    existing directory keeps its other files, and all files if the exchange fails; an exchange that a killed process
    left is undone first.

    Raises:
        RotationMergeError: another run writes there, or the exchange is impossible; the staged files are then kept.
    """
    target, name = os.path.realpath(out_path), os.path.basename(os.path.abspath(out_path))
    with output_lock(out_path) as locked:
        if locked:
            mend(target)
        before = _model_in(target)
        holder = temporary_name(os.path.join(target, INSIDE) if os.path.isdir(target) else target)
        staging = os.path.join(holder, name)
        try:
            os.makedirs(staging)
            yield staging
            sync_tree(staging)
            _take_place(staging, target, before, out_path)
        finally:
            if not os.path.lexists(os.path.join(holder, JOURNAL)):  # else it holds what could not be put back
                shutil.rmtree(holder, ignore_errors=True)
        sync(os.path.dirname(target))


@contextmanager
def new_folder(out_path: str) -> Iterator[str]:
    """A staging directory, as of `staged`, for a folder that is new or empty.

    Raises:
        CheckpointError: it holds something, or is a file.
    """
    if os.path.lexists(out_path) and (not os.path.isdir(out_path) or os.listdir(out_path)):
        problem = "is not empty" if os.path.isdir(out_path) else "is a file"
        raise CheckpointError(problem, where=out_path, remedy="write to a new folder")
    with staged(out_path) as staging:
        yield staging


def write_files(folder: str, files: Mapping[str, bytes]) -> None:
    """Write files by name into a folder, some of them into folders in it."""
    for name, content in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)


def mend(target: str) -> bool:
    """Repair leftovers of killed processes in and beside a locked output; whether an exchange was undone.

    Raises:
        RotationMergeError: replaced files cannot be restored.
    """
    undone = False
    for holder in (*under_temporary_names(os.path.join(target, INSIDE)), *under_temporary_names(target)):
        if not os.path.isdir(holder) or os.path.islink(holder):
            continue
        exchange = interrupted(holder, target)
        if exchange is not None:
            exchange.undo()
            LOG.warning("%s: replacing its model was interrupted; the previous files are restored", target)
            undone = True
        shutil.rmtree(holder, ignore_errors=True)
    return undone


def mend_interrupted(folder: str) -> bool:
    """Undo an interrupted exchange of a model's folder; whether there was one.

    Raises:
        RotationMergeError: it is being written, or cannot be put back.
    """
    target = os.path.realpath(folder)
    holders = (*under_temporary_names(os.path.join(target, INSIDE)), *under_temporary_names(target))
    if not any(os.path.lexists(os.path.join(holder, JOURNAL)) for holder in holders):
        return False
    with output_lock(target) as locked:
        return locked and mend(target)


def _take_place(staging: str, target: str, before: dict[str, tuple[int, int]], out_path: str) -> None:
    """Move the complete staging directory to its place.

    Raises:
        RotationMergeError: that is impossible; says where it is kept instead.
    """
    try:
        if _model_in(target) != before:
            raise RotationMergeError("another model was written there meanwhile", where=out_path)
        if os.path.isdir(target):
            FolderExchange.of(staging, target).run()
        else:
            os.rename(staging, target)
        sync(target)
    except (OSError, RotationMergeError) as error:
        staging_kept = _keep(staging, target)
        if staging_kept is None:
            raise
        problem = error.what if isinstance(error, RotationMergeError) else f"cannot be written ({short(error)})"
        place = error.where if isinstance(error, RotationMergeError) else out_path
        remedy = f"the old files are unchanged, and the new ones are kept in {staging_kept}"
        raise RotationMergeError(problem, where=place, remedy=remedy) from error


def _keep(staging: str, target: str) -> str | None:
    """Move aside a staging directory that cannot replace its target; None if that fails."""
    if os.path.lexists(os.path.join(os.path.dirname(staging), JOURNAL)):
        return None
    for beginning in (f"{target}.kept", os.path.join(target, f"{INSIDE}.kept")):
        try:
            path = free_name(beginning)
            os.rename(staging, path)
            return path
        except OSError:  # a parent that belongs to somebody else, or is another file system
            continue
    return None


def free_name(path: str) -> str:
    """An unused path: this one, or this one with a number."""
    names = (path if number == 1 else f"{path}-{number}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _model_in(folder: str) -> dict[str, tuple[int, int]]:
    """The model files in a folder, each with its size and modification time."""
    if not os.path.isdir(folder):
        return {}
    facts = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder) if is_of_a_model(entry.name)}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in facts.items()}
