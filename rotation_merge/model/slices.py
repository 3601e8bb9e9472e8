"""Slices of long vocabularies, since an embedding or a head may be as large as several layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.model.tensors import TensorSource

LONG = 1 << 25
"""Entries that are looked at in one piece."""


def rows(info: TensorInfo, tensor: Tensor) -> list[slice]:
    """The slices of a tensor's vocabulary, or one of all; none where it has no vocabulary."""
    if info.vocabulary_axis is None or info.stacked:
        return []
    return row_slices(tensor, info.vocabulary_axis)


def row_slices(tensor: Tensor, axis: int = 0, entries: int | None = None) -> list[slice]:
    """Slices along an axis, of so many entries (`LONG` if not given) at most where they have several rows."""
    count = tensor.shape[axis]
    step = max(1, (entries or LONG) * count // max(1, tensor.numel()))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def narrow_vocabulary(
    infos: Iterable[tuple[str, TensorInfo]], tensors: Mapping[str, Tensor], part: slice
) -> dict[str, Tensor]:
    """Narrow the tensors with a vocabulary axis to a slice, as views.

    Args:
        infos: tensor of each name; the vocabularies have one size.
    """
    result = dict(tensors)
    for name, info in infos:
        if name in tensors and (axis := info.vocabulary_axis) is not None:
            result[name] = tensors[name].narrow(axis, part.start, part.stop - part.start)
    return result


def stored_tensors(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """A block's tensors by their names, as they are stored."""
    names = (name for info in block.tensors for name in (*info.names, *info.tied))
    return {name: source[name] for name in dict.fromkeys(names) if name in source}


def views(block: Block, sources: Iterable[TensorSource]) -> Callable[[slice], list[TensorSource]]:
    """Several models' tensors of a block, with a slice of its vocabularies."""
    infos = [(name, info) for info in block.tensors for name in (*info.names, *info.tied)]
    known = [stored_tensors(block, source) for source in sources]
    return lambda part: [narrow_vocabulary(infos, source, part) for source in known]


def in_slices(
    info: TensorInfo, stored: Sequence[Tensor], dtype: torch.dtype, make: Callable[[slice | None], Tensor]
) -> Tensor:
    """Applies `make` to a tensor, in slices of a long vocabulary, each rounded at once to save memory.

    Args:
        stored: the tensor as it is stored in all models that are looked at; nothing is sliced where these differ in
            shape.
        dtype: that the slices are rounded to.
        make: told which slice; None: all of it.
    """
    first = stored[0]
    parts = rows(info, first) if all(copy.shape == first.shape for copy in stored) else []
    if len(parts) <= 1:
        return make(None)
    result = torch.empty(first.shape, dtype=dtype, device=first.device)
    for part in parts:
        result.narrow(info.vocabulary_axis or 0, part.start, part.stop - part.start).copy_(make(part))
    return result
