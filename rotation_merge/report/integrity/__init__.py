"""Whether a checkpoint folder is complete, by its headers and small files, without reading weights.

They are compared with each other, with transformers' model, and with the parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rotation_merge.model.contents import Contents
from rotation_merge.report.integrity.companions import check_companions
from rotation_merge.report.integrity.defect import Defect
from rotation_merge.report.integrity.fields import check_fields, quantised_parents
from rotation_merge.report.integrity.keys import check_keys
from rotation_merge.report.integrity.tokens import check_tokens
from rotation_merge.report.integrity.turns import check_turns
from rotation_merge.report.integrity.weight_files import check_weight_files, stale_copies

__all__ = ["Contents", "Defect", "check_folder", "check_parents"]


def check_folder(folder: str, parents: Sequence[str] = ()) -> list[Defect]:
    """Every defect visible in a checkpoint folder's headers and small files, fatal ones first.

    A defect that a parent has, too, is not fatal: the merge did not cause it.

    Args:
        parents: folders of the models that it was merged from, the base first; others are not looked at.
    """
    parent_contents = [Contents(parent) for parent in parents]
    defects = list(dict.fromkeys(_defects(Contents(folder), parent_contents)))
    if any(defect.fatal for defect in defects):
        inherited = {(defect.kind, defect.what) for parent in parent_contents for defect in _defects(parent, ())}
        defects = [
            replace(defect, what=f"{defect.what} (as in a parent)", fatal=False)
            if (defect.kind, defect.what) in inherited
            else defect
            for defect in defects
        ]
    return sorted(defects, key=lambda defect: not defect.fatal)


def check_parents(folders: Mapping[str, str]) -> list[Defect]:
    """Defects of parents that mergekit's own methods do not notice: codes in place of weights, tensors in two files.

    Args:
        folders: by name of the parent, which is the place of a defect; of none with an adapter, which peft merges.
    """
    parents = {name: Contents(folder) for name, folder in folders.items()}
    return [*quantised_parents(parents), *stale_copies(parents)]


def _defects(contents: Contents, parents: Sequence[Contents]) -> Iterator[Defect]:
    yield from check_weight_files(contents)
    if not contents.is_adapter:
        yield from check_fields(contents, parents)
        yield from check_keys(contents, parents)
    yield from check_tokens(contents, parents)
    if not contents.is_adapter:
        yield from check_turns(contents, parents)
        yield from check_companions(contents, parents)
