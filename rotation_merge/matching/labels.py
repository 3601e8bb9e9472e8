"""What a classifier's outputs stand for: rows of heads can only be merged where both models call them the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rotation_merge.errors import CheckpointError, short
from rotation_merge.matching.member import Member

_NAMELESS = re.compile(r"LABEL_\d+")


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's outputs, in the order of its head's rows; none where nobody chose them."""
    given = config.get("id2label")
    if not isinstance(given, Mapping) or not all(str(key).isdigit() for key in given):
        return ()  # transformers loads no such model
    names = tuple(str(given[key]) for key in sorted(given, key=int))
    return () if all(_NAMELESS.fullmatch(name) for name in names) else names


def check_labels(anchor: Member, donor: Member, excluded: Callable[[str], bool]) -> None:
    """Both classifiers' outputs mean the same, row by row.

    Args:
        excluded: says of a tensor that it is copied from the anchor.

    Raises:
        CheckpointError: they have other names, or the same ones in another order; says both.
    """
    ours, theirs = labels(anchor.config), labels(donor.config)
    if not (ours and theirs) or ours == theirs or not all(map(_classifies, (anchor, donor))):
        return
    tensors = anchor.architecture.tensors()
    heads = [info.name for info in tensors if any(axis.label == "classes" for axis in info.axes)]
    if heads and all(map(excluded, heads)):
        return
    remedy = "name the head under 'exclude' of a recipe, or keep each model's own with 'heads_of: each'"
    if sorted(ours) == sorted(theirs):
        what = f"'id2label' has the names of {anchor.name} in another order"
        remedy = f"reorder the rows of one model's head, with its 'id2label' and 'label2id'; or {remedy}"
    else:
        what = f"'id2label' has other names than {anchor.name}"
    raise CheckpointError(f"{what}: {_differing(ours, theirs)}", where=donor.name, remedy=remedy)


def _classifies(member: Member) -> bool:
    """Whether the model is a classifier; where its class is not known, it may be one."""
    classes = member.config.get("architectures") or []
    return not classes or any("Classification" in str(name) for name in classes)


def _differing(ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """The first row that differs, with both values."""
    row = next(
        (i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), min(len(ours), len(theirs))
    )
    its, mine = (short(repr(names[row])) if row < len(names) else "nothing" for names in (theirs, ours))
    return f"row {row} is {its}, against {mine}"
