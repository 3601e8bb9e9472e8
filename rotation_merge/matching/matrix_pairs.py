"""Pairs of anchor and donor matrices for each role of a space, the input of its matching step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Axis, Block, Part, Space, TensorInfo
from rotation_merge.model.apply import placed, split_axis, transform_tensor
from rotation_merge.symmetry import Transform

Tensors = Mapping[str, Tensor]
"""Tensors of a block by key (`TensorInfo.key`); stacked ones stacked."""

Pairs = list[tuple[Tensor, Tensor]]
"""(anchor, donor), of one shape, of any strides."""

PartView = tuple[TensorInfo, Part, int, Tensor, Tensor]
"""A tensor, a part of one of its axes, the first dimension of that, and views of anchor and donor."""

Squares = tuple[float, float, float]
"""The squared distance before and after, and the anchor's squared norm."""

CACHED = 1 << 16
"""Entries that are widened at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class SpaceMatch:
    """The best transform of a space.

    Attributes:
        squares: over the space's sides; None: not known.
        notes: for the report.
    """

    transform: Transform
    squares: Squares | None = None
    notes: Sequence[str] = ()


def views(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, Transform],
    without: Collection[str] = (),
) -> Iterator[PartView]:
    """Every axis that lives in `space`, in place, the donor's other axes moved by the current transforms.

    Biases of keys are left out where a softmax does not see them.

    Args:
        block: whose tensors are looked at.
        space: the space to be matched next.
        anchor, donor: the block's tensors by key.
        transforms: transforms of other spaces (this one's, if there, is left out).
        without: spaces whose tensors are not looked at, because nothing is known of them yet.
    """
    fixed = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        names = {known.name for known in info.spaces()}
        if info.key not in anchor or info.key not in donor or space.name not in names or names & {*without}:
            continue
        a, b = anchor[info.key], transform_tensor(donor[info.key], info, fixed)
        a, b = (a + info.offset, b + info.offset) if info.offset else (a, b)
        unseen = ("k",) if len(info.axes) == 1 and space.hides_key_bias else ()
        for dim, axis in enumerate(info.axes):
            if any(part.space == space for part in axis.parts):
                for part, start, x, y in axis_views(a, b, dim, axis):
                    if part.space == space and part.role not in unseen:
                        yield info, part, start, x, y


def sides(parts: Iterable[PartView]) -> dict[str, Pairs]:
    """The same axes by role, in front of all else, which is one dimension: (*factors of the role, rest)."""
    result: dict[str, Pairs] = {}
    for _, part, dim, *pair in parts:
        count = len(part.factors)
        first, second = (x.movedim(tuple(range(dim, dim + count)), tuple(range(count))) for x in pair)
        a, b = (x.reshape(*x.shape[:count], -1) for x in (first, second))
        result.setdefault(part.role, []).append((a, b))
    return result


def axis_views(a: Tensor, b: Tensor, dim: int, axis: Axis) -> Iterator[tuple[Part, int, Tensor, Tensor]]:
    """Every part of an axis in two tensors of one shape: the part, its first dimension, and both views."""
    for piece, x, y in zip(axis.pieces, split_axis(a, dim, axis), split_axis(b, dim, axis), strict=True):
        for part, start in placed(piece, dim):
            if part.space.kind != "fixed":
                yield part, start, x, y


def chunks(a: Tensor, b: Tensor, entries: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Tensors of one shape in chunks of so many entries, widened to float32 at least: of rows, or of columns if these
    are contiguous; with the slice of the rows."""
    a, b = (x.reshape(1) if x.ndim == 0 else x for x in (a, b))
    dim = int(a.ndim == 2 and a.stride(1) != 1 and a.shape[1] > 1)
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    step = max(1, entries * a.shape[dim] // max(1, a.numel()))
    for start in range(0, a.shape[dim], step):
        x, y = (t.narrow(dim, start, min(step, a.shape[dim] - start)) for t in (a, b))
        yield slice(None) if dim else slice(start, start + step), x.to(dtype), y.to(a.device, dtype)


def row_squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared norms of the rows of two matrices, (n, m), and their squared distances, (3, n), float64."""
    total = torch.zeros(3, len(a), dtype=torch.float64, device=a.device)
    for rows, x, y in chunks(a, b, CACHED):
        total[0, rows] += (x * x).sum(1)
        total[1, rows] += (y * y).sum(1)
        total[2, rows] += (x - y).square_().sum(1)
    return total
