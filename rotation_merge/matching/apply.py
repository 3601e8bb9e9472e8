"""Apply: transform a tensor by acting with each space's transform on every axis that lives in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotation_merge.architectures.model import Axis, Part, TensorInfo
from rotation_merge.groups import SpaceTransform


def transform_tensor(tensor: Tensor, info: TensorInfo, transforms: Mapping[str, SpaceTransform]) -> Tensor:
    """The tensor in the new coordinates.

    Args:
        tensor: the donor's tensor (stacked, if `info.stacked`), any floating dtype.
        info: its labelled axes.
        transforms: by space name; spaces not named keep their coordinates.

    Returns:
        The very same tensor if nothing moves, else a new one in float32 at least (rounding is the caller's, once).
    """
    moving = {name: t for name, t in transforms.items() if not t.is_identity()}
    if not any(space.name in moving for space in info.spaces()):
        return tensor
    result = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    for dim, axis in enumerate(info.axes):
        if any(part.space.name in moving for part in axis.parts):
            result = transform_axis(result, dim, axis, moving)
    return result


def transform_axis(
    x: Tensor, dim: int, axis: Axis, transforms: Mapping[str, SpaceTransform], dual: bool = False
) -> Tensor:
    """One labelled axis of x, which stands at `dim`, in the new coordinates; with `dual`, what is paired with it."""

    def act(piece: Tensor, part: Part) -> Tensor:
        transform = transforms.get(part.space.name)
        return piece if transform is None else transform.act(piece, part.role, dim, dual)

    pieces = [act(piece, part) for piece, part in zip(split_axis(x, dim, axis), axis.parts, strict=True)]
    return join_axis(pieces, dim, axis)


def split_axis(x: Tensor, dim: int, axis: Axis) -> list[Tensor]:
    """Views of x, one for each part of the axis, dimension `dim` replaced by the part's factors."""
    if not axis.interleaved:
        pieces = x.split([part.size for part in axis.parts], dim=dim)
        return [piece.unflatten(dim, part.factors) for piece, part in zip(pieces, axis.parts, strict=True)]
    groups, width = axis.parts[0].factors[0], axis.parts[0].factors[-1]
    rows = [part.size // (groups * width) for part in axis.parts]
    pieces = x.unflatten(dim, (groups, sum(rows), width)).split(rows, dim=dim + 1)
    return [
        piece if len(part.factors) == 3 else piece.squeeze(dim + 1)
        for piece, part in zip(pieces, axis.parts, strict=True)
    ]


def join_axis(pieces: list[Tensor], dim: int, axis: Axis) -> Tensor:
    """The reverse of `split_axis`."""
    if not axis.interleaved:
        flat = [piece.flatten(dim, dim + len(part.factors) - 1) for piece, part in zip(pieces, axis.parts, strict=True)]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=dim)
    full = [
        piece if len(part.factors) == 3 else piece.unsqueeze(dim + 1)
        for piece, part in zip(pieces, axis.parts, strict=True)
    ]
    return torch.cat(full, dim=dim + 1).flatten(dim, dim + 2)
