"""Models averaged in memory by any merge method, tensor by tensor, each when it is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from mergekit.merge_methods.base import MergeMethod, TensorGroup
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.seeding import seeded
from rotation_merge.model.forms import named_as
from rotation_merge.model.tensors import Names, Tensors
from rotation_merge.model.view import View

Parameters = Callable[[str], Mapping[str, Any]]
"""Gives the parameters of a method for an output tensor; of those with a value for each model a list, or a mapping by
the models' `ids`."""


def averaged(
    views: Sequence[View],
    method: MergeMethod,
    parameters: Parameters | Mapping[str, Any],
    *,
    seed: int = 0,
    excluded: Callable[[str], bool] = lambda _: False,
    based: bool = True,
    ids: Sequence[Hashable] | None = None,
) -> Tensors:
    """Models in one set of coordinates, averaged by a merge method: mergekit's, or ours.

    Args:
        views: of one architecture, the anchor first; the result has its names.
        method: one of ours knows these models, by `ids`.
        parameters: for each output tensor, or for all; those that are not given have their defaults.
        seed: of what the method draws; each tensor draws its own numbers, in whatever order tensors are asked for.
        excluded: says of a tensor that it is the anchor's, as are those outside the architecture.
        based: whether the method is told that the anchor is the base.
        ids: of the models for the method; None: their numbers.

    Returns:
        Lazy tensors, each in float32 at least.

    Raises:
        RotationMergeError: when a tensor is read: it holds NaN or infinity, or would.
    """
    known = views[0].architecture
    places, values = known.places(), parameters if callable(parameters) else lambda _: parameters
    sources = [named_as(known, view.tensors, view.architecture) for view in views]

    def copied(name: str) -> bool:
        return not sources[0].dtypes[name].is_floating_point or name not in places or excluded(name)

    def merged(name: str, stored: Sequence[Tensor]) -> Tensor:
        if copied(name):
            return check_finite(stored[0], name, views[0].name)
        tensors = [check_finite(tensor, name, view.name) for tensor, view in zip(stored, views, strict=True)]
        widest = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
        axis, base_index = places[name][1].vocabulary_axis, 0 if based else None
        group = TensorGroup.from_tensors(tensors, ids=ids, base_index=base_index, name=name, vocabulary_axis=axis)
        with seeded(zlib.crc32(f"{seed} {name}".encode())):
            (result,) = method((group,), parameters=values(name), dtype=widest, out_dtype=widest)
        return check_merged(result, name)

    def read(names: Names) -> Tensor:
        every = (names,) if isinstance(names, str) else names
        stored = [source.read(names) for source in (sources[:1] if all(map(copied, every)) else sources)]
        if isinstance(names, str):
            return merged(names, stored)
        return torch.stack([merged(name, [tensor[i] for tensor in stored]) for i, name in enumerate(names)])

    common = sources[0].only(name for name in sources[0] if all(name in source for source in sources))
    return Tensors(common.shapes, common.dtypes, read)


def check_finite(tensor: Tensor, name: str, model: object) -> Tensor:
    """A model's tensor; NaN would go through every method in silence.

    Raises:
        CheckpointError: it holds NaN or infinity; names it.
    """
    if not all_finite([tensor]):
        problem = f"tensor '{name}' holds NaN or infinity"
        raise CheckpointError(problem, where=str(model), remedy="repair or replace the checkpoint")
    return tensor


def check_merged(tensor: Tensor, name: str) -> Tensor:
    """A merged tensor; weights may add up to zero for a method that divides by the sum, or a dtype overflow.

    Raises:
        RotationMergeError: it holds NaN or infinity; names it.
    """
    if not all_finite([tensor]):
        raise RotationMergeError(
            f"tensor '{name}' of the merged model would hold NaN or infinity",
            remedy="check that the weights do not add up to 0 and that the dtype holds the values; nothing was written",
        )
    return tensor
