"""Apply: transform a tensor by acting with each space's transform on every axis that lives in it; blocks of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, AxisPiece, Block, Part, TensorInfo, factors_of
from rotation_merge.model.tensors import Names, Tensors, TensorSource, as_tensors
from rotation_merge.symmetry import Transform


def at_least_float32(tensor: Tensor) -> Tensor:
    """A tensor in the dtype of computations: its own, but float32 where that is less precise."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def transform_tensor(
    tensor: Tensor, info: TensorInfo, transforms: Mapping[str, Transform], change: bool = False
) -> Tensor:
    """The tensor in the new coordinates.

    Args:
        tensor: the donor's tensor (stacked, if `info.stacked`), any floating dtype.
        info: its labelled axes.
        transforms: by space name; spaces not named keep their coordinates.
        change: the tensor is the difference of two donors' tensors, so additive parts of the transform drop out.

    Returns:
        The very same tensor if nothing moves, else a new one in float32 at least (rounding is the caller's, once).
    """
    moving = {
        name: transforms[name] for name, role in info.roles() if name in transforms and transforms[name].moves(role)
    }
    if not moving:
        return tensor
    result = at_least_float32(tensor)
    if info.offset and not change:
        return (transform_tensor(result.double() + info.offset, info, moving, change=True) - info.offset).to(
            result.dtype
        )
    for dim, axis in enumerate(info.axes):
        if any(part.space.name in moving for part in axis.parts):
            result = transform_axis(result, dim, axis, moving)
    added = moving.get(info.common.name) if info.common is not None and not change else None
    return result if added is None else added.added(result)


def transform_axis(x: Tensor, dim: int, axis: Axis, transforms: Mapping[str, Transform], dual: bool = False) -> Tensor:
    """Transforms the labelled axis of x that begins at `dim`; with `dual`, as its dual side."""
    pieces = split_axis(x, dim, axis)
    for number, piece in enumerate(axis.pieces):
        for part, start in placed(piece, dim):
            if part.space.name in transforms:
                pieces[number] = transforms[part.space.name].act(pieces[number], part.role, start, dual)
    return join_axis(pieces, dim, axis)


def placed(piece: AxisPiece, dim: int) -> Iterator[tuple[Part, int]]:
    """The parts of a piece that begins at dimension `dim`, each with the first of its dimensions."""
    for part in piece:
        yield part, dim
        dim += len(part.factors)


def split_axis(x: Tensor, dim: int, axis: Axis) -> list[Tensor]:
    """Views of x, one for each piece of the axis, dimension `dim` replaced by the piece's factors."""
    factors = [factors_of(piece) for piece in axis.pieces]
    shared = factors[0][: axis.depth]
    lengths = [math.prod(piece_factors[axis.depth :]) for piece_factors in factors]
    views = x.unflatten(dim, (*shared, sum(lengths))).split(lengths, dim=dim + axis.depth)
    return [
        view.unflatten(dim + axis.depth, piece_factors[axis.depth :])
        if piece_factors[axis.depth :]
        else view.squeeze(dim + axis.depth)
        for view, piece_factors in zip(views, factors, strict=True)
    ]


def join_axis(pieces: list[Tensor], dim: int, axis: Axis) -> Tensor:
    """The reverse of `split_axis`."""
    at = dim + axis.depth
    flat = []
    for piece, piece_factors in zip(pieces, map(factors_of, axis.pieces), strict=True):
        inner = len(piece_factors) - axis.depth
        flat.append(piece.flatten(at, at + inner - 1) if inner else piece.unsqueeze(at))
    joined = flat[0] if len(flat) == 1 else torch.cat(flat, dim=at)
    return joined.flatten(dim, at) if axis.depth else joined


def times_gain(tensor: Tensor, info: TensorInfo, gain: Tensor, stream: str, role: str = "read") -> Tensor:
    """Times the gain along the axis of a stream, which may hold it several times over; a factor may lack that axis."""
    for dim in dims_of(info, (stream,), role)[:1]:
        axis = info.axes[dim]
        pieces = split_axis(tensor, dim, axis)
        for number, piece in enumerate(axis.pieces):
            for part, start in placed(piece, dim):
                if part.space.name == stream and part.role == role:
                    shape = [-1, *[1] * (pieces[number].ndim - start - 1)]
                    pieces[number] = pieces[number] * gain.to(tensor).reshape(shape)
        tensor = join_axis(pieces, dim, axis)
    return tensor


def dims_of(info: TensorInfo, streams: Collection[str], role: str = "read") -> list[int]:
    """The dimensions along which a tensor reads some streams, or has another role in them."""
    axes = enumerate(info.axes)
    return [d for d, axis in axes if any(p.role == role and p.space.name in streams for p in axis.parts)]


# --- blocks ----------------------------------------------------------------------------------------------------------


def read_tensor(info: TensorInfo, source: TensorSource) -> Tensor | None:
    """A tensor of the architecture (stacked if stored in pieces), or None if the source lacks it."""
    names = info.names if info.names[0] in source else tuple(tied for tied in info.tied if tied in source)[:1]
    if not names or not info.stacked:
        return source[names[0]] if names else None
    return source.read(names) if isinstance(source, Tensors) else torch.stack([source[name] for name in names])


def read_block(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """The tensors of a block by key."""
    tensors = ((info.key, read_tensor(info, source)) for info in block.tensors)
    return {key: tensor for key, tensor in tensors if tensor is not None}


BlockTensor = Callable[[Block, TensorInfo], Tensor | None]
"""Computes one tensor of an architecture (stacked, if it is stored in pieces); None where the model has none."""

Get = Callable[[str], Tensor | None]
"""Gives a tensor of a block by key, None where the model has none."""


def reader(block: Block, source: TensorSource) -> Get:
    """Gives the tensors of a block as they are stored."""

    def get(key: str) -> Tensor | None:
        info = block.tensor(key)
        return None if info is None else read_tensor(info, source)

    return get


def blockwise(architecture: Architecture, source: TensorSource, compute: BlockTensor) -> Tensors:
    """Tensors of the same names and shapes, each computed when it is asked for; None: taken as it stands.

    Tensors outside the architecture are passed on. A tensor that is tied to another stands under both names.
    """
    stored, places = with_tied(architecture, source), architecture.places()

    def read(names: Names) -> Tensor:
        first = names if isinstance(names, str) else names[0]
        if first not in places:
            return stored.read(names)
        block, info, piece = places[first]
        if not isinstance(names, str) and names != info.names:
            return torch.stack([read(name) for name in names])
        computed = compute(block, info)
        if computed is None:
            return stored.read(names)
        return computed[piece] if isinstance(names, str) and info.stacked else computed

    return Tensors(stored.shapes, stored.dtypes, read)


def with_tied(architecture: Architecture, source: TensorSource) -> Tensors:
    """The same, with a tied tensor also under its second name."""
    tensors = as_tensors(source)
    aliases = {
        name: next((tied for tied in info.tied if tied in tensors), name)
        for info in architecture.tensors()
        if info.tied
        for name in info.names
        if name not in tensors
    }
    return tensors.renamed(aliases)


def unstack(info: TensorInfo, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under the names it is stored by."""
    return dict(zip(info.names, tensor.unbind(0), strict=True)) if info.stacked else {info.names[0]: tensor}
