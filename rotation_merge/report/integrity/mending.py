"""Corrections of a checkpoint folder, file by file, each atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Sequence

from safetensors import SafetensorError

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import locked
from rotation_merge.model.writing import staged
from rotation_merge.report.integrity import Contents, Defect, check_folder
from rotation_merge.report.integrity.companions import check_companions
from rotation_merge.report.integrity.defect import Correction

ROUNDS = 6
"""Defects may hide others, such as a damaged index those of the config; so often a folder is looked at again."""


def mend(folder: str, parents: Sequence[str] = ()) -> list[str]:
    """Correct every defect that needs no decision and no change of tensors.

    Returns:
        A line for each corrected file.

    Raises:
        RotationMergeError: a file cannot be written; those before it have been.
    """
    done: list[str] = []
    with locked(folder):
        for _ in range(ROUNDS):
            corrections = _open(check_folder(folder, parents))
            if not corrections:
                break
            for correction in corrections:
                _carry_out(folder, correction)
                done.append(f"{correction.file}: {correction.words}")
    return done


def copy_companions(folder: str, parents: Sequence[str], without: Collection[str]) -> list[str]:
    """Copy the small files that parents have and a folder that is being written lacks; gives their names.

    Args:
        without: kinds of defects that stay.
    """
    copies = {
        correction.file: correction
        for defect in check_companions(Contents(folder), [Contents(parent) for parent in parents])
        for correction in defect.corrections
        if defect.kind not in without
    }
    for correction in copies.values():
        _carry_out(folder, correction)
    return list(copies)


def mended_copy(folder: str, out: str, parents: Sequence[str]) -> list[str]:
    """`mend` on a copy, which comes to its place whole."""
    with staged(out) as staging:
        shutil.copytree(folder, staging, symlinks=False, dirs_exist_ok=True)
        return mend(staging, parents)


def _open(defects: Sequence[Defect]) -> list[Correction]:
    """The first correction of each file: one may make another unnecessary."""
    firsts: dict[str, Correction] = {}
    for defect in defects:
        for correction in defect.corrections:
            firsts.setdefault(correction.file, correction)
    return list(firsts.values())


def _carry_out(folder: str, correction: Correction) -> None:
    path = os.path.join(folder, correction.file)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        correction.make(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise RotationMergeError(
            f"cannot be corrected ({error})", where=path, remedy="check permissions and free space"
        ) from error
