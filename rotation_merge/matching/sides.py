"""What a space's matching step sees: for each of its roles, the pairs of anchor and donor matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architectures.model import Block, Space, TensorInfo
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching.apply import split_axis, transform_tensor

Tensors = Mapping[str, Tensor]
"""Tensors of a block by key (`TensorInfo.key`); stacked ones stacked."""


@dataclass(frozen=True)
class Side:
    """One axis of one tensor, in both models.

    Attributes:
        role: the role the axis plays.
        anchor, donor: shape (*factors of the role, rest), floating, storage dtype or float32.
    """

    role: str
    anchor: Tensor
    donor: Tensor


def sides(
    block: Block, space: Space, anchor: Tensors, donor: Tensors, others: Mapping[str, SpaceTransform]
) -> list[Side]:
    """Every axis that lives in `space`, the donor's other axes moved by the transforms found so far.

    Args:
        block: whose tensors are looked at.
        space: the space to be matched next.
        anchor, donor: the block's tensors by key.
        others: transforms of other spaces (this one's, if there, is left out).
    """
    result = []
    rest = {name: transform for name, transform in others.items() if name != space.name}
    for info in block.tensors:
        if info.key in anchor and info.key in donor and space in info.spaces():
            moved = transform_tensor(donor[info.key], info, rest)
            result += _sides_of(info, space, anchor[info.key], moved)
    return result


def _sides_of(info: TensorInfo, space: Space, anchor: Tensor, donor: Tensor) -> list[Side]:
    found = []
    for dim, axis in enumerate(info.axes):
        if not any(part.space == space for part in axis.parts):
            continue
        pieces = zip(axis.parts, split_axis(anchor, dim, axis), split_axis(donor, dim, axis), strict=True)
        for part, a, b in pieces:
            if part.space == space:
                count = len(part.factors)
                found.append(Side(part.role, _to_front(a, dim, count), _to_front(b, dim, count)))
    return found


def _to_front(x: Tensor, dim: int, count: int) -> Tensor:
    moved = x.movedim(tuple(range(dim, dim + count)), tuple(range(count)))
    return moved.reshape(*moved.shape[:count], -1)


def joined(found: list[Side], role: str) -> tuple[Tensor, Tensor] | None:
    """All sides of one role side by side along the last dimension, float64; None where there is none."""
    chosen = [side for side in found if side.role == role]
    if not chosen:
        return None
    return (
        torch.cat([side.anchor.double() for side in chosen], dim=-1),
        torch.cat([side.donor.double() for side in chosen], dim=-1),
    )
