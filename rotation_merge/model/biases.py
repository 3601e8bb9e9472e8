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
from rotation_merge.model.apply import at_least_float32, join_axis, split_axis, transform_tensor
from rotation_merge.model.blocks import blockwise, reader
from rotation_merge.model.fold import Get
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.symmetry import SpaceTransform

ROLES = {"q", "k", "v", "o"}


@dataclass(frozen=True)
class HiddenBiases:
    """Biases of one attention space that do not change the softmax.

    Attributes:
        keys, values: the tensors that hold such a bias; None where it is seen, or there is none.
        output, bias: with values: the map that reads them, and the bias that theirs can be moved into.
    """

    space: Space
    keys: TensorInfo | None = None
    values: TensorInfo | None = None
    output: TensorInfo | None = None
    bias: TensorInfo | None = None

    def of(self, info: TensorInfo) -> list[str]:
        """The roles of a tensor's hidden biases."""
        role_holders = {"k": self.keys, "v": self.values}
        return [role for role, holder in role_holders.items() if holder is not None and holder.key == info.key]


def block_hidden_biases(block: Block) -> tuple[HiddenBiases, ...]:
    """The hidden biases of each attention space of a block that has any."""
    if block_hidden_biases.__name__ not in block.known:
        spaces = [s for s in block.spaces.values() if s.kind == "attention" and not s.visible_bias]
        biases = [_of_space(block, space) for space in spaces]
        block.known[block_hidden_biases.__name__] = tuple(
            u for u in biases if u.keys is not None or u.values is not None
        )
    known: tuple[HiddenBiases, ...] = block.known[block_hidden_biases.__name__]
    return known


def _of_space(block: Block, space: Space) -> HiddenBiases:
    infos = [info for info in block.tensors if space in info.spaces()]
    maps = {role: [i for i in infos if len(i.axes) > 1 and role in _roles(i, space)] for role in ROLES}
    if any(_roles(info, space) - ROLES for info in infos) or any(len(readers) != 1 for readers in maps.values()):
        return HiddenBiases(space)
    keys = None if space.rotary or space.norm is not None else _bias(infos, space, "k")
    output = maps["o"][0]
    bias = block.tensor(output.key.removesuffix("weight") + "bias")
    values = _bias(infos, space, "v") if space.values == "free" and bias is not None else None
    return HiddenBiases(space, keys, values, output, bias) if values is not None else HiddenBiases(space, keys)


def _roles(info: TensorInfo, space: Space) -> set[str]:
    return {part.role for axis in info.axes for part in axis.parts if part.space == space}


def _bias(infos: list[TensorInfo], space: Space, role: str) -> TensorInfo | None:
    """The bias of a role; None if it is absent or several tensors hold it."""
    holders = [i for i in infos if len(i.axes) == 1 and _place(i.axes[0], space, role) is not None]
    return holders[0] if len(holders) == 1 else None


def _place(axis: Axis, space: Space, role: str) -> int | None:
    """The index of the piece of an axis that holds one role of a space and nothing else."""
    return next((n for n, piece in enumerate(axis.pieces) if piece == (Part(space, role),)), None)


def inputs(block: Block, info: TensorInfo) -> list[str]:
    """Keys of the donor's tensors needed to give `info` the anchor's biases, itself included; empty if it has none."""
    keys: dict[str, None] = {}
    for bias in block_hidden_biases(block) if len(info.axes) == 1 else ():
        if bias.of(info):
            keys[info.key] = None
        if bias.bias is not None and bias.bias.key == info.key and bias.values is not None and bias.output is not None:
            keys.update(dict.fromkeys((info.key, bias.output.key, bias.values.key)))
    return list(keys)


def holders(block: Block, keys: Collection[str]) -> list[str]:
    """The keys of the tensors with hidden biases, which are read from the anchor."""
    return [
        key
        for key in keys
        for hidden in block_hidden_biases(block)
        if (info := block.tensor(key)) is not None and hidden.of(info)
    ]


def with_biases(
    block: Block, info: TensorInfo, moved: Get, anchor: Get, spaces: Collection[str] | Mapping[str, SpaceTransform]
) -> Tensor | None:
    """One tensor of an aligned donor, with the anchor's hidden biases.

    Args:
        moved: gives the donor's tensors of the block in the anchor's coordinates, by key.
        anchor: gives the anchor's, folded where the donor's are.
        spaces: names of the matched spaces; biases of others stay.

    Returns:
        The very same tensor where nothing changes, else a new one in float32 at least; None where there is none.
    """
    if len(info.axes) != 1:
        return moved(info.key)
    return _with(info, moved, anchor, [hidden for hidden in block_hidden_biases(block) if hidden.space.name in spaces])


def _with(info: TensorInfo, moved: Get, anchor: Get, known: list[HiddenBiases]) -> Tensor | None:
    """See `with_biases`, for these hidden biases."""
    tensor = moved(info.key)
    for hidden in known if tensor is not None else ():
        assert tensor is not None
        for role in hidden.of(info):
            tensor = _with_piece(at_least_float32(tensor), info, hidden.space, role, _required(anchor(info.key), info))
        if hidden.bias is not None and hidden.bias.key == info.key:
            shift = shifted(hidden, moved, anchor)
            if shift is not None and bool(shift.any()):
                tensor = at_least_float32(tensor) - _through(hidden, shift, moved)
    return tensor


def shifted(hidden: HiddenBiases, moved: Get, anchor: Get) -> Tensor | None:
    """The shift of the output map's inputs: the anchor's value bias minus the donor's, (groups, value_dim).

    None if a model has no value bias.
    """
    if hidden.values is None:
        return None
    donor_bias, anchor_bias = moved(hidden.values.key), anchor(hidden.values.key)
    if donor_bias is None or anchor_bias is None:
        return None
    place = _place(hidden.values.axes[0], hidden.space, "v")
    assert place is not None
    a, b = (split_axis(at_least_float32(x), 0, hidden.values.axes[0])[place] for x in (anchor_bias, donor_bias))
    return a.to(b) - b


def without_hidden_biases(block: Block, tensors: Mapping[str, Tensor], spaces: Collection[str]) -> dict[str, Tensor]:
    """A block without hidden biases: the values' bias is moved into the output map's bias."""
    known = [hidden for hidden in block_hidden_biases(block) if hidden.space.name in spaces]
    result = dict(tensors)

    def nothing(key: str) -> Tensor | None:
        return torch.zeros_like(tensors[key]) if key in tensors else None

    for info in {
        i.key: i for hidden in known for i in (hidden.bias, hidden.keys, hidden.values) if i is not None
    }.values():
        tensor = _with(info, tensors.get, nothing, known)
        if tensor is not None:
            result[info.key] = tensor
    return result


def read_by(block: Block, info: TensorInfo) -> HiddenBiases | None:
    """The hidden value bias that an output map reads; None for any other tensor."""
    return next(
        (
            o
            for o in block_hidden_biases(block)
            if o.values is not None and o.output is not None and o.output.key == info.key
        ),
        None,
    )


def along(hidden: HiddenBiases, info: TensorInfo, dim: int, shift: Tensor) -> Tensor:
    """A constant of the values, shape (groups, value_dim), along the axis of the output map that reads them, (in,)."""
    axis = info.axes[dim]
    pieces = split_axis(shift.new_zeros(axis.size or 0), 0, axis)
    place = _place(axis, hidden.space, "o")
    assert place is not None
    pieces[place] = shift[:, None].expand(hidden.space.factors("o"))
    return join_axis(pieces, 0, axis)


def in_coordinates(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, SpaceTransform],
    anchor: TensorSource | None = None,
) -> Tensors:
    """A model in the anchor's coordinates, with the anchor's unseen biases, in float32 at least where it moves.

    Args:
        source, anchor: by the architecture's names, both folded or neither; without an anchor biases stay the donor's.
    """
    stored = as_tensors(source)

    def compute(block: Block, info: TensorInfo) -> Tensor | None:
        read = reader(block, stored)

        def moved(key: str) -> Tensor | None:
            tensor, described = read(key), block.tensor(key)
            return None if tensor is None or described is None else transform_tensor(tensor, described, transforms)

        if anchor is None:
            return moved(info.key)
        return with_biases(block, info, moved, reader(block, anchor), transforms)

    return blockwise(architecture, stored, compute)


def without_biases(architecture: Architecture, source: TensorSource, spaces: Collection[str]) -> Tensors:
    """A model without hidden biases (see `without_hidden_biases`).

    Args:
        spaces: names of those that are matched.
    """
    stored = as_tensors(source)

    def compute(block: Block, info: TensorInfo) -> Tensor | None:
        if len(info.axes) != 1:
            return None
        read = reader(block, stored)
        tensors = {key: tensor for key in (info.key, *inputs(block, info)) if (tensor := read(key)) is not None}
        return without_hidden_biases(block, tensors, spaces).get(info.key)

    return blockwise(architecture, stored, compute)


def _with_piece(tensor: Tensor, info: TensorInfo, space: Space, role: str, replacement: Tensor) -> Tensor:
    """A bias with one role's part taken from another."""
    axis = info.axes[0]
    place = _place(axis, space, role)
    assert place is not None
    pieces = split_axis(tensor, 0, axis)
    pieces[place] = split_axis(replacement.to(tensor), 0, axis)[place]
    return join_axis(pieces, 0, axis)


def _through(hidden: HiddenBiases, shift: Tensor, moved: Get) -> Tensor:
    """The output map applied to a constant that all heads of a group read, shape (out,)."""
    assert hidden.output is not None
    weight = at_least_float32(_required(moved(hidden.output.key), hidden.output))
    dim = next(d for d, axis in enumerate(hidden.output.axes) if _place(axis, hidden.space, "o") is not None)
    axis = hidden.output.axes[dim]
    piece = split_axis(weight, dim, axis)[_place(axis, hidden.space, "o") or 0]
    heads = shift.to(weight)[:, None].expand(hidden.space.factors("o"))
    return torch.tensordot(piece, heads, dims=([dim, dim + 1, dim + 2], [0, 1, 2]))


def _required(tensor: Tensor | None, info: TensorInfo) -> Tensor:
    if tensor is None:
        raise KeyError(info.key)
    return tensor
