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
from rotation_merge.report.integrity.companions import check_companions, tokenizer_copies
from rotation_merge.report.integrity.tokens import check_ids
from rotation_merge.report.integrity.turns import check_turns

COPIED = "copied from a parent"

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


def complete_files(folder: str, parents: Sequence[str], tokenizer: str, without: Collection[str]) -> dict[str, str]:
    """Complete the small files of a folder that is being written.

    A tokenizer whose tokens and special tokens are unchanged is copied byte for byte; then the files come that parents
    have and the folder lacks; then ids of tokens are set to what vocabulary and chat template need.

    Args:
        parents: folders of the merged models, the base first.
        tokenizer: the folder that the tokenizer comes from.
        without: kinds of defects that stay.

    Returns:
        What was done, by file.
    """
    known, work = [Contents(parent) for parent in parents], dict[str, str]()
    for name, copy in tokenizer_copies(Contents(folder), Contents(tokenizer)).items():
        copy(os.path.join(folder, name))
    for check in (check_companions, check_ids, check_turns):
        defects = (defect for defect in check(Contents(folder), known) if defect.kind not in without)
        work |= {
            file: COPIED if check is check_companions else kind for file, kind in _correct(folder, defects).items()
        }
    return work


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
