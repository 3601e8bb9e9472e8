"""Labels of classifiers: heads are merged row by row, so rows must mean the same in all models.

Where a donor has the anchor's names in another order, the rows of its head are put into the anchor's: it then gives the
same answers in another order, the one that the merge's config says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, short
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View

_NAMELESS = re.compile(r"LABEL_\d+")

LabelRows = Mapping[str, tuple[int, tuple[int, ...]]]
"""By name of a tensor: the dimension of its classes, and which of its entries there comes in each place."""


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a classifier's outputs in the order of its head's rows; empty for default names."""
    id2label = config.get("id2label")
    if not isinstance(id2label, Mapping) or not all(str(key).isdigit() for key in id2label):
        return ()  # transformers loads no such model
    names = tuple(str(id2label[key]) for key in sorted(id2label, key=int))
    return () if all(_NAMELESS.fullmatch(name) for name in names) else names


def label_rows(anchor: View, donor: View, excluded: Callable[[str], bool] = lambda _: False) -> LabelRows:
    """The permutation of a donor's head rows into the anchor's order, by tensor name; empty if they agree.

    Args:
        excluded: says of a tensor that it is copied from the anchor.

    Raises:
        CheckpointError: the outputs have other names, or the same ones in another order in a head that is not known;
            says both.
    """
    ours, donor_labels = labels(anchor.config), labels(donor.config)
    classes = [view.config.get("architectures") or ["Classification"] for view in (anchor, donor)]
    classify = all(any("Classification" in str(name) for name in names) for names in classes)
    if not (ours and donor_labels) or ours == donor_labels or not classify:
        return {}
    heads = _heads(donor, len(donor_labels))
    if heads and all(map(excluded, heads)):
        return {}
    same_names, distinct = sorted(ours) == sorted(donor_labels), len(set(ours)) == len(ours)
    if same_names and heads and distinct:
        order = tuple(map(donor_labels.index, ours))
        return {name: (dim, order) for name, dim in heads.items() if not excluded(name)}
    why = "" if not same_names else ", its head is not known" if distinct else ", and some labels occur twice"
    problem = f"'id2label' is {short(repr(donor_labels))}, that of {anchor.name} {short(repr(ours))}{why}"
    remedy = "give both models the same labels in one order, or name the head under 'exclude' of a recipe"
    raise CheckpointError(problem, where=donor.name, remedy=f"{remedy}, or keep each model's with 'heads_of: each'")


def rows_note(anchor: str, donor: str, rows: LabelRows) -> list[str]:
    """A note on rows that were reordered."""
    put = f"The rows of its head ({', '.join(rows)}) are put into the anchor's order."
    return [f"`{donor}` has the classes of `{anchor}` in another order. {put}"] if rows else []


def in_class_order(view: View, rows: LabelRows) -> View:
    """A model with its classes in another order, in its config, too.

    Args:
        rows: of the tensors that are reordered; empty: the model itself is returned.
    """
    if not rows:
        return view
    names, (_, order) = labels(view.config), next(iter(rows.values()))
    named = {i: names[number] if names else f"LABEL_{number}" for i, number in enumerate(order)}
    changed = {"id2label": {str(i): n for i, n in named.items()}, "label2id": {n: i for i, n in named.items()}}
    of_files = next((filed for _, filed in view.rows.values()), range(len(order)))
    whole = {name: (dim, tuple(of_files[i] for i in order)) for name, (dim, _) in rows.items()}
    changes: dict[str, Any] = {"config": {**view.config, **changed}, "changed": {**view.changed, **changed}}
    return replace(view, tensors=_ordered(view.tensors, rows), rows=whole, filed=view.as_filed, **changes)


def _ordered(tensors: Tensors, rows: LabelRows) -> Tensors:
    return tensors.map(lambda name, tensor: in_order(tensor, rows.get(name)))


def watched(view: View, look: Callable[[str, Tensor], Tensor]) -> Tensors:
    """A model's tensors; each is shown to a function as it stands in the files, when it is read."""
    return _ordered(view.as_filed.tensors.map(look), view.rows)


def with_classes_of(view: View, anchor: View) -> View:
    """A model with its classes in the anchor's order, if both name the same ones."""
    same = sorted(labels(view.config)) == sorted(labels(anchor.config))
    return in_class_order(view, label_rows(anchor, view)) if same else view


def in_order(tensor: Tensor, rows: tuple[int, tuple[int, ...]] | None) -> Tensor:
    """A tensor with its classes in another order (None: unchanged)."""
    return tensor if rows is None else tensor.index_select(rows[0], torch.tensor(rows[1], device=tensor.device))


def _heads(member: View, count: int) -> dict[str, int]:
    """Names of the tensors with so many classes, and along which dimension."""
    return {
        info.name: dim
        for info in member.architecture.tensors()
        for dim, axis in enumerate(info.axes)
        if axis.label == "classes" and member.shapes.get(info.name, ())[dim : dim + 1] == (count,)
    }
