"""Heads of their own: one merged body, and a loadable checkpoint of it under every donor's head."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from glob import escape, glob

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.checkpoint import write_checkpoint
from rotation_merge.model.markdown import code
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.view import View
from rotation_merge.model.writing import HEADS, free_name
from rotation_merge.record import MergeReport


def is_head(block: Block, info: TensorInfo) -> bool:
    """Whether a tensor belongs to a model's head: a bare model of the family lacks it."""
    return block.index is None and block.place == "after" and not info.key.startswith("{base}")


def head_names(architecture: Architecture) -> set[str]:
    """Names of a model's head."""
    return {n for b in architecture.blocks for info in b.tensors if is_head(b, info) for n in info.names}


def compared(
    base: View,
    models: Iterable[View],
    head_tensors: Collection[str],
    excluded: Callable[[str], bool] = lambda _: False,
) -> Architecture:
    """The tensors that models are matched on: all except separate heads and excluded tensors of other sizes.

    Args:
        head_tensors: names of heads' tensors.
    """
    known, models = base.architecture.named(), list(models)
    odd = {
        name
        for name, shape in base.shapes.items()
        if name in known and known[name].vocabulary_axis is None and excluded(name)
        if any(model.shapes.get(name, shape) != shape for model in models)
    }
    return base.architecture.without(odd | {name for name in head_tensors if name in known})


def under_heads(body: View, models: Iterable[View]) -> dict[str, View]:
    """A merged body under the head of each model, all in the same coordinates, by the names of the models' folders."""
    heads: dict[str, View] = {}
    for model in models:
        name = free_name(os.path.basename(model.reference.model.path.rstrip("/")), heads.__contains__)
        heads[name] = under_head(body, model)
    return heads


def under_head(body: View, model: View) -> View:
    """A body under the head of a model that is in the same coordinates, in the widest type that the body has."""
    dtypes = {dtype for dtype in body.stored_dtypes.values() if dtype.is_floating_point}

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor:
        of_head = is_head(block, info)
        if (tensor := read_tensor(info, (model if of_head else body).tensors)) is None:
            problem = f"tensor '{info.name}' is not in the merged body"
            raise CheckpointError(problem, where=model.name, remedy="leave out 'heads_of'")
        return tensor.to(dtype) if of_head and tensor.is_floating_point() else tensor

    widest = body.dtype or max(dtypes, key=lambda dtype: dtype.itemsize)
    return model.blockwise(compute, widest, left_out=model.left_out)


def _check_movable(model: View) -> None:
    """Refuse a head with spaces of its own, which a merge does not match.

    Raises:
        CheckpointError: names the tensor.
    """
    for block in model.architecture.blocks:
        for info in block.tensors:
            if is_head(block, info) and any(space.kind not in ("stream", "translation") for space in info.spaces()):
                problem = f"the head's tensor '{info.name}' has neurons or heads of its own"
                raise CheckpointError(problem, where=model.name, remedy="leave out 'heads_of'")


def write_heads(merged: str, donors: Sequence[View], report: MergeReport, shard_size: int) -> None:
    """Write the merged body under each donor's head to `merged`/heads/NAME.

    Args:
        donors: with their heads in the merge's coordinates.
        shard_size: bytes of a weight file at most.

    Raises:
        CheckpointError: a donor has tensors that the merge has not, or a head with spaces of its own.
    """
    for donor in donors:
        _check_movable(donor)
    for name, view in under_heads(open_model(merged, unsupported="merge"), donors).items():
        body = f"The merged body with the head of {code(view.reference)}."
        text = f"---\nlibrary_name: transformers\n---\n# {name}\n\n{body}\n"
        write_checkpoint(view, report, text, os.path.join(merged, HEADS, name), shard_size)


def heads_of_teachers(merged: View, teachers: Sequence[View]) -> list[View | None]:
    """The merged body under the head of each teacher, in memory or in `merged`/heads; None: it has no such head.

    Raises:
        RotationMergeError: teachers cannot be told apart by their names.
    """
    known: Mapping[str, ModelLike] = merged.heads
    if merged.files is not None and merged.is_stored and merged.files.adapter is None:
        folders = filter(os.path.isdir, glob(os.path.join(escape(merged.folder), HEADS, "*")))
        known = {os.path.basename(folder): folder for folder in sorted(folders)}
    names = [os.path.basename(str(teacher.reference.model.path).rstrip("/")) for teacher in teachers]
    same = next((name for name in names if name in known and names.count(name) > 1), None)
    if known and (same is not None or any(teacher.files is None for teacher in teachers)):
        problem = f"two teachers are called '{same}'" if same else "a teacher in memory has no name"
        remedy = "give the teachers as folders whose names differ, as they were merged"
        raise RotationMergeError(f"{problem}, so its head is not known", where=merged.name, remedy=remedy)
    return [open_model(known[name], unsupported="merge") if name in known else None for name in names]
