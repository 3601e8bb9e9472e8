"""Biases that do not change a softmax: an aligned donor takes the anchor's; its outputs stay the same.

Softmax is invariant to a term that all keys of a query share; without rotary positions a key's bias gives such a term,
so it is arbitrary. As its shares sum to one, a value's bias b is the same as W_o b in the output map's bias c: ``(b,
c)`` computes what ``(b', c + W_o (b - b'))`` computes. No map is fitted to such biases, and once the maps are found the
donor is given the anchor's, so that an average of the two has them as well.

Task vectors are carried by their maps alone: the change of the outer product W_o b is no linear one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Part, Space, TensorInfo
from rotation_merge.model.apply import Get, at_least_float32, blockwise, join_axis, reader, split_axis
from rotation_merge.model.fold import required
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.symmetry import Transform

ROLES = {"q", "k", "v", "o"}


@dataclass(frozen=True)
class HiddenBias:
    """The biases of the keys (role k) or values (v) of an attention space, which do not change the softmax.

    Attributes:
        info: the tensor that holds them.
        output, bias: of values: the map that reads them, and its bias, which theirs can be moved into.
    """

    space: Space
    role: str
    info: TensorInfo
    output: TensorInfo | None = None
    bias: TensorInfo | None = None


def block_hidden_biases(block: Block) -> tuple[HiddenBias, ...]:
    """The hidden biases of a block's attention spaces."""
    name = block_hidden_biases.__name__
    if name not in block.known:
        spaces = [s for s in block.spaces.values() if s.kind == "attention" and not s.visible_bias]
        block.known[name] = tuple(bias for space in spaces for bias in _of_space(block, space))
    known: tuple[HiddenBias, ...] = block.known[name]
    return known


def _of_space(block: Block, space: Space) -> list[HiddenBias]:
    infos = [info for info in block.tensors if space in info.spaces()]
    roles = {info.key: {name for held, name in info.roles() if held == space.name} for info in infos}
    maps = {role: [info for info in infos if len(info.axes) > 1 and role in roles[info.key]] for role in ROLES}
    if set().union(*roles.values()) - ROLES or any(len(readers) != 1 for readers in maps.values()):
        return []
    keys, values = (_bias(infos, space, role) for role in "kv")
    output = maps["o"][0]
    bias = block.tensor(output.key.removesuffix("weight") + "bias")
    hidden = [HiddenBias(space, "k", keys)] if keys is not None and not space.rotary and space.norm is None else []
    if values is not None and bias is not None and space.values == "free":
        hidden.append(HiddenBias(space, "v", values, output, bias))
    return hidden


def _bias(infos: list[TensorInfo], space: Space, role: str) -> TensorInfo | None:
    """The bias of a role; None if it is absent or several tensors hold it."""
    holding = [i for i in infos if len(i.axes) == 1 and (Part(space, role),) in i.axes[0].pieces]
    return holding[0] if len(holding) == 1 else None


def _place(axis: Axis, space: Space, role: str) -> int:
    """The index of the piece of an axis that holds one role of a space and nothing else."""
    return axis.pieces.index((Part(space, role),))


def holders(block: Block) -> list[TensorInfo]:
    """A block's tensors with hidden biases, which are read from the anchor."""
    hidden = {bias.info.key for bias in block_hidden_biases(block)}
    return [info for info in block.tensors if info.key in hidden]


def read_by(block: Block, info: TensorInfo) -> HiddenBias | None:
    """The hidden value bias that an output map reads; None for any other tensor."""
    return next((bias for bias in block_hidden_biases(block) if bias.output and bias.output.key == info.key), None)


def with_biases(
    block: Block, info: TensorInfo, moved: Get, anchor: Get, spaces: Collection[str] | Mapping[str, Transform]
) -> Tensor | None:
    """One tensor of an aligned donor, with the anchor's hidden biases.

    Args:
        moved: gives the donor's tensors of the block in the anchor's coordinates, by key.
        anchor: gives the anchor's, folded where the donor's are.
        spaces: names of the matched spaces; biases of others stay.

    Returns:
        The very same tensor where nothing changes, else a new one in float32 at least; None where there is none.
    """
    if (tensor := moved(info.key)) is None:
        return None
    for hidden in block_hidden_biases(block):
        if hidden.space.name not in spaces:
            continue
        if hidden.info.key == info.key:
            tensor = _with_piece(at_least_float32(tensor), hidden, required(anchor, info.key))
        if hidden.output and hidden.bias and hidden.bias.key == info.key:
            shift = shifted(hidden, moved, anchor)
            if shift is not None and bool(shift.any()):
                tensor = at_least_float32(tensor) - _through(hidden, hidden.output, shift, moved)
    return tensor


def without_hidden_biases(block: Block, tensors: Mapping[str, Tensor], spaces: Collection[str]) -> dict[str, Tensor]:
    """A block without hidden biases: the values' bias is moved into the output map's bias."""
    changed = ((info.key, _without(block, info, tensors.get, spaces)) for info in block.tensors)
    return {**tensors, **{key: tensor for key, tensor in changed if tensor is not None}}


def _without(block: Block, info: TensorInfo, get: Get, spaces: Collection[str]) -> Tensor | None:
    """One tensor of a block without hidden biases."""

    def zeros(key: str) -> Tensor | None:
        tensor = get(key)
        return None if tensor is None else torch.zeros_like(tensor)

    return with_biases(block, info, get, zeros, spaces)


def shifted(hidden: HiddenBias, moved: Get, anchor: Get) -> Tensor | None:
    """The shift of the output map's inputs: the anchor's value bias minus the donor's, (groups, value_dim).

    None if a model has no value bias.
    """
    a, b = anchor(hidden.info.key), moved(hidden.info.key)
    if a is None or b is None:
        return None
    axis, b = hidden.info.axes[0], at_least_float32(b)
    return split_axis(a.to(b) - b, 0, axis)[_place(axis, hidden.space, "v")]


def along(hidden: HiddenBias, info: TensorInfo, dim: int, shift: Tensor) -> Tensor:
    """A constant of the values, shape (groups, value_dim), along the axis of the output map that reads them, (in,)."""
    axis = info.axes[dim]
    pieces = split_axis(shift.new_zeros(axis.size or 0), 0, axis)
    pieces[_place(axis, hidden.space, "o")] = shift[:, None].expand(hidden.space.factors("o"))
    return join_axis(pieces, 0, axis)


def without_biases(architecture: Architecture, source: TensorSource, spaces: Collection[str]) -> Tensors:
    """A model without hidden biases (see `without_hidden_biases`).

    Args:
        spaces: names of those that are matched.
    """
    stored = as_tensors(source)
    return blockwise(architecture, stored, lambda block, info: _without(block, info, reader(block, stored), spaces))


def _with_piece(tensor: Tensor, hidden: HiddenBias, replacement: Tensor) -> Tensor:
    """A tensor with its hidden biases taken from another."""
    axis = hidden.info.axes[0]
    place = _place(axis, hidden.space, hidden.role)
    pieces = split_axis(tensor, 0, axis)
    pieces[place] = split_axis(replacement.to(tensor), 0, axis)[place]
    return join_axis(pieces, 0, axis)


def _through(hidden: HiddenBias, output: TensorInfo, shift: Tensor, moved: Get) -> Tensor:
    """The output map applied to a constant that all heads of a group read, shape (out,)."""
    weight = at_least_float32(required(moved, output.key))
    dim = next(dim for dim, axis in enumerate(output.axes) if (Part(hidden.space, "o"),) in axis.pieces)
    return torch.tensordot(weight, along(hidden, output, dim, shift.to(weight)), dims=([dim], [0]))
