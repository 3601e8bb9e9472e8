"""Whether a checkpoint folder is complete, by its headers and small files, without reading weights.

They are compared with each other, with transformers' model, and with the parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rotation_merge.model.contents import Contents
from rotation_merge.report.integrity.companions import check_companions
from rotation_merge.report.integrity.defect import Defect
from rotation_merge.report.integrity.fields import check_fields
from rotation_merge.report.integrity.keys import check_keys
from rotation_merge.report.integrity.tokens import check_tokens
from rotation_merge.report.integrity.weight_files import check_weight_files

__all__ = ["CHECKS", "Contents", "Defect", "check_folder"]

CHECKS: tuple[Callable[[Contents, Sequence[Contents]], Iterator[Defect]], ...] = (
    check_weight_files,
    check_fields,
    check_keys,
    check_tokens,
    check_companions,
)
"""Each takes a folder and those of its parents, the base first."""


def check_folder(folder: str, parents: Sequence[str] = ()) -> list[Defect]:
    """Every defect visible in a checkpoint folder's headers and small files, fatal ones first.

    A defect that a parent has, too, is not fatal: the merge did not cause it.

    Args:
        parents: folders of the models that it was merged from, the base first; others are not looked at.
    """
    contents, parent_contents = Contents(folder), [Contents(parent) for parent in parents]
    defects = list(dict.fromkeys(_defects(contents, parent_contents)))
    if any(defect.fatal for defect in defects):
        inherited = {defect.key for parent in parent_contents for defect in _defects(parent, ())}
        defects = [defect.inherited() if defect.key in inherited else defect for defect in defects]
    return sorted(defects, key=lambda defect: not defect.fatal)


def _defects(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    for check in (check_weight_files, check_tokens) if contents.is_adapter else CHECKS:
        yield from check(contents, parents)
