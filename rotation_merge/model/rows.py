"""Rows of vocabularies: some tokens of a model, in another order or number."""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors


def vocabulary_axes(architecture: Architecture) -> dict[str, int]:
    """The vocabulary axis of each tensor that has one, by name, including names of tied tensors."""
    infos = [info for info in architecture.tensors() if not info.stacked]
    axes = {name: info.vocabulary_axis for info in infos for name in (*info.names, *info.tied)}
    return {name: axis for name, axis in axes.items() if axis is not None}


def _resized_shapes(tensors: Tensors, axes: dict[str, int], length: int) -> dict[str, tuple[int, ...]]:
    """Shapes with another number of rows."""
    return {
        name: shape if name not in axes else (*shape[: axes[name]], length, *shape[axes[name] + 1 :])
        for name, shape in tensors.shapes.items()
    }


def vocabulary_subset(architecture: Architecture, source: TensorSource, rows: Tensor) -> Tensors:
    """A model with selected tokens of its vocabulary, in the given order."""
    tensors, axes = as_tensors(source), vocabulary_axes(architecture)

    def select(name: str, tensor: Tensor) -> Tensor:
        return tensor if name not in axes else tensor.index_select(axes[name], rows.to(tensor.device))

    return tensors.map(select, _resized_shapes(tensors, axes, len(rows)))


def with_rows_of(tensor: Tensor, like: Tensor, axis: int) -> Tensor:
    """A tensor with another one's number of vocabulary rows: cut, or extended by the other's rows."""
    length = min(tensor.shape[axis], like.shape[axis])
    absent = like.narrow(axis, length, like.shape[axis] - length).to(tensor)
    return torch.cat([tensor.narrow(axis, 0, length), absent], axis)


def resized_vocabulary(
    architecture: Architecture,
    source: TensorSource,
    length: int,
    further: TensorSource,
    rows: tuple[Tensor, Tensor],
) -> Tensors:
    """A model with another vocabulary size, and some rows of another model; rows beyond both are zero.

    Args:
        rows: where rows of `further` stand in the result, and which of its rows these are, (rows,) each.
    """
    tensors, axes = as_tensors(source), vocabulary_axes(architecture)
    tied = {name: info for info in architecture.tensors() for name in info.tied}
    infos = {**tied, **{name: info for info in architecture.tensors() for name in info.names}}

    def resize(name: str, tensor: Tensor) -> Tensor:
        if name not in axes:
            return tensor
        axis = axes[name]
        common = min(length, tensor.shape[axis])
        result = tensor.new_zeros((*tensor.shape[:axis], length, *tensor.shape[axis + 1 :]))
        result.narrow(axis, 0, common).copy_(tensor.narrow(axis, 0, common))
        added = further[name] if name in further else read_tensor(infos[name], further)
        place, number = (index.to(tensor.device) for index in rows)
        if added is None or not len(place):
            return result
        return result.index_copy(axis, place, added.to(result).index_select(axis, number))

    return tensors.map(resize, _resized_shapes(tensors, axes, length))
