"""Slices of long vocabularies: an embedding or a head is as large as several layers, and all its rows move alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from rotation_merge.architectures.model import TensorInfo

LONG = 1 << 25
"""Entries that are looked at in one piece."""


def rows(info: TensorInfo, tensor: Tensor) -> list[slice]:
    """The slices of a tensor's vocabulary, or one of all; none where it has no vocabulary."""
    if info.vocabulary_axis is None or info.stacked:
        return []
    count = tensor.shape[info.vocabulary_axis]
    step = max(1, LONG * count // max(1, tensor.numel()))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def narrowed(infos: Iterable[tuple[str, TensorInfo]], tensors: Mapping[str, Tensor], part: slice) -> dict[str, Tensor]:
    """Some tensors, views of a slice of those that have a vocabulary.

    Args:
        infos: what each name stands for; the vocabularies are of one size.
    """
    result = dict(tensors)
    for name, info in infos:
        if name in tensors and (axis := info.vocabulary_axis) is not None:
            result[name] = tensors[name].narrow(axis, part.start, part.stop - part.start)
    return result
