"""Corrections of a checkpoint folder, file by file, each atomically."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Sequence

from safetensors import SafetensorError

from rotation_merge.errors import RotationMergeError
from rotation_merge.files import locked
from rotation_merge.model.writing import staged
from rotation_merge.report.integrity import Contents, Defect, check_folder
from rotation_merge.report.integrity.companions import check_companions

ROUNDS = 6
"""Defects may hide others, such as a damaged index those of the config; so often a folder is looked at again."""


def mend(folder: str, parents: Sequence[str] = ()) -> list[str]:
    """Correct every defect that needs no decision and no change of tensors.

    Returns:
        A line for each corrected file.

    Raises:
        RotationMergeError: a file cannot be written; those before it have been.
    """
    lines: list[str] = []
    with locked(folder):
        for _ in range(ROUNDS):
            corrected = _correct(folder, check_folder(folder, parents))
            lines += [f"{file}: {kind}" for file, kind in corrected.items()]
            if not corrected:
                break
    return lines


def mended_copy(folder: str, out: str, parents: Sequence[str]) -> list[str]:
    """`mend` on a copy, which comes to its place whole."""
    with staged(out) as staging:
        shutil.copytree(folder, staging, symlinks=False, dirs_exist_ok=True)
        return mend(staging, parents)


def copy_companions(folder: str, parents: Sequence[str], without: Collection[str]) -> list[str]:
    """Copy the small files that parents have and a folder that is being written lacks; gives their names.

    Args:
        without: kinds of defects that stay.
    """
    defects = check_companions(Contents(folder), [Contents(parent) for parent in parents])
    return list(_correct(folder, (defect for defect in defects if defect.kind not in without)))


def _correct(folder: str, defects: Iterable[Defect]) -> dict[str, str]:
    """Make the first correction of each file (one may make another unnecessary); gives the defect's kind by file."""
    kinds: dict[str, str] = {}
    for defect in defects:
        for file in [file for file in defect.corrections if file not in kinds]:
            path = os.path.join(folder, file)
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                defect.corrections[file](path)
            except (OSError, ValueError, SafetensorError) as error:
                problem = f"cannot be corrected ({error})"
                raise RotationMergeError(problem, where=path, remedy="check permissions and free space") from error
            kinds[file] = defect.kind
    return kinds
