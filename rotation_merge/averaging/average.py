"""Models averaged in memory by any merge method, tensor by tensor, each when it is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from mergekit.merge_methods.base import MergeMethod, TensorGroup
from torch import Tensor

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.models import MergedModels, Place
from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.seeding import seeded
from rotation_merge.model.blocks import with_tied
from rotation_merge.model.forms import translated
from rotation_merge.model.tensors import Names, Tensors
from rotation_merge.model.view import View

Parameters = Callable[[str], Mapping[str, Any]]
"""Gives the parameters of a method for an output tensor; of those with a value for each model a list, or a mapping by
the models' numbers."""


def averaged(
    views: Sequence[View],
    method: MergeMethod,
    parameters: Parameters | Mapping[str, Any],
    *,
    seed: int = 0,
    excluded: Callable[[str], bool] = lambda _: False,
    based: bool = True,
) -> Tensors:
    """Models in one set of coordinates, averaged by a merge method: mergekit's, or ours.

    Args:
        views: of one architecture, the anchor first; the result has its names.
        method: one of ours that was told about no models is told about these, by their numbers.
        parameters: for each output tensor, or for all; those that are not given have their defaults.
        seed: of what the method draws; each tensor draws its own numbers, in whatever order tensors are asked for.
        excluded: says of a tensor that it is the anchor's, as are those outside the architecture.
        based: whether the method is told that the anchor is the base.

    Returns:
        Lazy tensors, each in float32 at least.

    Raises:
        RotationMergeError: when a tensor is read: it holds NaN or infinity, or would.
    """
    values = parameters if callable(parameters) else lambda _: parameters
    average = _Average(views, _told(method, views), values, seed, excluded, based)
    sources = average.sources
    common = sources[0].only(name for name in sources[0] if all(name in source for source in sources))
    return Tensors(common.shapes, common.dtypes, average.read)


@dataclass(frozen=True)
class _Average:
    """An average in progress; attributes are the arguments of `averaged`."""

    views: Sequence[View]
    method: MergeMethod
    parameters: Parameters
    seed: int
    excluded: Callable[[str], bool]
    based: bool

    @cached_property
    def places(self) -> Mapping[str, Place]:
        return self.views[0].architecture.places()

    @cached_property
    def sources(self) -> list[Tensors]:
        """The models' tensors by the anchor's names."""
        known = self.views[0].architecture
        return [with_tied(known, translated(view.tensors, view.architecture, known)) for view in self.views]

    def read(self, names: Names) -> Tensor:
        """One tensor of the average, or several stacked."""
        every = (names,) if isinstance(names, str) else names
        sources = self.sources[:1] if all(map(self._copied, every)) else self.sources
        stored = [source.read(names) for source in sources]
        if isinstance(names, str):
            return self._tensor(names, stored)
        return torch.stack([self._tensor(name, [tensor[i] for tensor in stored]) for i, name in enumerate(names)])

    def _copied(self, name: str) -> bool:
        """Whether a tensor is the anchor's."""
        floating = self.sources[0].dtypes[name].is_floating_point
        return not floating or name not in self.places or self.excluded(name)

    def _tensor(self, name: str, tensors: Sequence[Tensor]) -> Tensor:
        if self._copied(name):
            return check_finite(tensors[0], name, self.views[0].name)
        tensors = [check_finite(tensor, name, view.name) for tensor, view in zip(tensors, self.views, strict=True)]
        out_dtype = None
        if isinstance(self.method, OwnMethod):  # which takes tensors as they are stored
            out_dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        else:
            tensors = [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
        axis = self.places[name][1].vocabulary_axis
        base_index = 0 if self.based else None
        group = TensorGroup.from_tensors(tensors, base_index=base_index, name=name, vocabulary_axis=axis)
        with seeded(zlib.crc32(f"{self.seed} {name}".encode())):
            (result,) = self.method((group,), parameters=self.parameters(name), out_dtype=out_dtype)
        return check_merged(result, name)


def _told(method: MergeMethod, views: Sequence[View]) -> MergeMethod:
    if isinstance(method, OwnMethod) and method.bound is None:
        return method.on(MergedModels.of(views))
    return method


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
