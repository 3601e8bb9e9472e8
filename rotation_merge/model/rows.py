"""Rows of tensors along an axis: tokens of vocabularies, classes of heads, and slices of long vocabularies.

An embedding or a head may be as large as several layers, so that it is computed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors

LONG = 1 << 25
"""Entries that are looked at in one piece."""


def with_rows(source: TensorSource, axes: Mapping[str, int], rows: Tensor | slice) -> Tensors:
    """Tensors with some of their rows, in the given order.

    Args:
        axes: whose rows are selected, by name; all other tensors stay as they are.
        rows: int64, shape (rows,); a slice gives views.
    """
    tensors, count = as_tensors(source), rows.stop - rows.start if isinstance(rows, slice) else len(rows)

    def select(name: str, tensor: Tensor) -> Tensor:
        if name not in axes:
            return tensor
        if isinstance(rows, slice):
            return tensor.narrow(axes[name], rows.start, count)
        return tensor.index_select(axes[name], rows.to(tensor.device))

    known = {name: tensors.shapes[name] for name in axes if name in tensors}
    changed = {name: (*shape[: axes[name]], count, *shape[axes[name] + 1 :]) for name, shape in known.items()}
    return tensors.map(select, {**tensors.shapes, **changed})


def vocabulary_axes(infos: Iterable[TensorInfo]) -> dict[str, int]:
    """The vocabulary axis of each tensor that has one, by name, including names of tied tensors."""
    return {
        name: info.vocabulary_axis
        for info in infos
        for name in (*info.names, *info.tied)
        if info.vocabulary_axis is not None and not info.stacked
    }


def vocabulary_subset(architecture: Architecture, source: TensorSource, rows: Tensor) -> Tensors:
    """A model with selected tokens of its vocabulary, in the given order."""
    return with_rows(source, vocabulary_axes(architecture.tensors()), rows)


def on_shared_rows(known: Architecture, sources: Sequence[TensorSource], rows: Sequence[Tensor]) -> list[Tensors]:
    """Models under one's names, each with its rows of the tokens that all know."""
    return [vocabulary_subset(known, *pair) for pair in zip(sources, rows, strict=True)]


def padded_as(source: TensorSource, like: TensorSource, axes: Mapping[str, int]) -> Tensors:
    """Tensors with another model's number of vocabulary rows: cut, or extended by the other's rows.

    Args:
        axes: the vocabulary axis of each tensor that has one, by name.
    """
    tensors, others = as_tensors(source), as_tensors(like)
    known = {name: others.shapes[name] for name in axes if name in tensors and name in others}

    def pad(name: str, tensor: Tensor) -> Tensor:
        unequal = name in known and tensor.shape != known[name]
        return with_rows_of(tensor, others[name], axes[name]) if unequal else tensor

    return tensors.map(pad, {**tensors.shapes, **known})


def with_rows_of(tensor: Tensor, like: Tensor, axis: int) -> Tensor:
    """A tensor with another one's number of vocabulary rows: cut, or extended by the other's rows."""
    length = min(tensor.shape[axis], like.shape[axis])
    absent = like.narrow(axis, length, like.shape[axis] - length).to(tensor)
    return torch.cat([tensor.narrow(axis, 0, length), absent], axis)


def row_slices(tensor: Tensor, axis: int, entries: int) -> list[slice]:
    """Slices along an axis, of so many entries at most where they have several rows."""
    count = tensor.shape[axis]
    step = max(1, entries * count // max(1, tensor.numel()))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def vocabulary_slices(info: TensorInfo, stored: Sequence[Tensor]) -> list[slice]:
    """The slices of a tensor's long vocabulary; none of a short one.

    Args:
        stored: the tensor in all models that are looked at; nothing is sliced where these differ in shape.
    """
    axis, alike = info.vocabulary_axis, len({copy.shape for copy in stored}) == 1
    slices = [] if axis is None or info.stacked or not alike else row_slices(stored[0], axis, LONG)
    return slices if len(slices) > 1 else []


def stored_tensors(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """A block's tensors by their names, as they are stored."""
    names = (name for info in block.tensors for name in (*info.names, *info.tied))
    return {name: source[name] for name in dict.fromkeys(names) if name in source}


def in_slices(
    block: Block,
    info: TensorInfo,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
    make: Callable[[Sequence[Tensors] | None], Tensor],
) -> Tensor:
    """Computes a tensor of a block, in slices of a long vocabulary, each rounded at once to save memory.

    Args:
        sources: that it is computed from; none: in one piece.
        dtype: of the result.
        make: gets the sources with a slice of the vocabulary; None: the whole tensor is wanted.
    """
    stored = [tensor for source in sources if (tensor := read_tensor(info, source)) is not None]
    slices = vocabulary_slices(info, stored)
    if not slices:
        return make(None).to(dtype).contiguous()
    axes, parts = vocabulary_axes(block.tensors), [stored_tensors(block, source) for source in sources]
    result = torch.empty(stored[0].shape, dtype=dtype, device=stored[0].device)
    for rows in slices:
        place = result.narrow(info.vocabulary_axis or 0, rows.start, rows.stop - rows.start)
        place.copy_(make([with_rows(part, axes, rows) for part in parts]))
    return result
