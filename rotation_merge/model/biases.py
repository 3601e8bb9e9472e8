"""Biases that softmax cannot see: an aligned donor has the anchor's, what it computes unchanged.

Softmax does not see what all keys of a query share, which without rotary positions is what a key's bias gives: it may
be any other. As its shares sum to one, a value's bias b is the same as W_o b in the output map's bias c: ``(b, c)``
computes what ``(b', c + W_o (b - b'))`` computes. No map is fitted to such biases, and once the maps are found the
donor is given the anchor's, so that an average of the two has them as well.

Task vectors are carried by their maps alone: the change of the outer product W_o b is no linear one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Part, Space, TensorInfo
from rotation_merge.model.apply import join_axis, split_axis, transform_tensor
from rotation_merge.model.fold import Get
from rotation_merge.model.source import TensorSource, read_tensor
from rotation_merge.symmetry import SpaceTransform

ROLES = {"q", "k", "v", "o"}


@dataclass(frozen=True)
class Unseen:
    """What softmax cannot see in the biases of one attention space.

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
        """The roles whose unseen bias a tensor holds."""
        own = {"k": self.keys, "v": self.values}
        return [role for role, holder in own.items() if holder is not None and holder.key == info.key]


def unseen(block: Block) -> tuple[Unseen, ...]:
    """Of every attention space of a block that has such biases."""
    if unseen.__name__ not in block.known:
        spaces = [s for s in block.spaces.values() if s.kind == "attention" and not s.visible_bias]
        found = [_of_space(block, space) for space in spaces]
        block.known[unseen.__name__] = tuple(u for u in found if u.keys is not None or u.values is not None)
    known: tuple[Unseen, ...] = block.known[unseen.__name__]
    return known


def _of_space(block: Block, space: Space) -> Unseen:
    infos = [info for info in block.tensors if space in info.spaces()]
    maps = {role: [i for i in infos if len(i.axes) > 1 and role in _roles(i, space)] for role in ROLES}
    if any(_roles(info, space) - ROLES for info in infos) or any(len(found) != 1 for found in maps.values()):
        return Unseen(space)
    keys = None if space.rotary or space.norm is not None else _bias(infos, space, "k")
    output = maps["o"][0]
    bias = block.tensor(output.key.removesuffix("weight") + "bias")
    values = _bias(infos, space, "v") if space.values == "free" and bias is not None else None
    return Unseen(space, keys, values, output, bias) if values is not None else Unseen(space, keys)


def _roles(info: TensorInfo, space: Space) -> set[str]:
    return {part.role for axis in info.axes for part in axis.parts if part.space == space}


def _bias(infos: list[TensorInfo], space: Space, role: str) -> TensorInfo | None:
    """The one bias that a role has; None where there is none, or one that is spread over several tensors."""
    found = [i for i in infos if len(i.axes) == 1 and _place(i.axes[0], space, role) is not None]
    return found[0] if len(found) == 1 else None


def _place(axis: Axis, space: Space, role: str) -> int | None:
    """Which piece of an axis a role of a space is, nothing else in it."""
    return next((n for n, piece in enumerate(axis.pieces) if piece == (Part(space, role),)), None)


def inputs(block: Block, info: TensorInfo) -> list[str]:
    """Keys of the donor's tensors that `info` is made of where it is given the anchor's biases, itself included; none
    where it has nothing to do with them."""
    found: dict[str, None] = {}
    for one in unseen(block) if len(info.axes) == 1 else ():
        if one.of(info):
            found[info.key] = None
        if one.bias is not None and one.bias.key == info.key and one.values is not None and one.output is not None:
            found.update(dict.fromkeys((info.key, one.output.key, one.values.key)))
    return list(found)


def holders(block: Block, keys: Collection[str]) -> list[str]:
    """Those of some keys of a block whose tensors hold unseen biases: what is needed of the anchor."""
    return [key for key in keys for one in unseen(block) if (info := block.tensor(key)) is not None and one.of(info)]


def with_biases(
    block: Block, info: TensorInfo, moved: Get, anchor: Get, spaces: Collection[str] | Mapping[str, SpaceTransform]
) -> Tensor | None:
    """One tensor of an aligned donor, which is given the anchor's unseen biases.

    Args:
        moved: gives the donor's tensors of the block in the anchor's coordinates, by key.
        anchor: gives the anchor's, folded where the donor's are.
        spaces: names of the spaces that have been matched; what others hold stays.

    Returns:
        The very same tensor where nothing changes, else a new one in float32 at least; None where there is none.
    """
    if len(info.axes) != 1:
        return moved(info.key)
    return _with(info, moved, anchor, [one for one in unseen(block) if one.space.name in spaces])


def _with(info: TensorInfo, moved: Get, anchor: Get, known: list[Unseen]) -> Tensor | None:
    """See `with_biases`, for the unseen biases that are known to be matched."""
    tensor = moved(info.key)
    for one in known if tensor is not None else ():
        assert tensor is not None
        for role in one.of(info):
            tensor = _with_piece(_work(tensor), info, one.space, role, _required(anchor(info.key), info))
        if one.bias is not None and one.bias.key == info.key:
            shift = shifted(one, moved, anchor)
            if shift is not None and bool(shift.any()):
                tensor = _work(tensor) - _through(one, shift, moved)
    return tensor


def shifted(one: Unseen, moved: Get, anchor: Get) -> Tensor | None:
    """By how much what the output map reads grows: the anchor's bias of values less the donor's, shape (groups,
    value_dim); None where one of the two has none."""
    if one.values is None:
        return None
    own, given = moved(one.values.key), anchor(one.values.key)
    if own is None or given is None:
        return None
    place = _place(one.values.axes[0], one.space, "v")
    assert place is not None
    a, b = (split_axis(_work(x), 0, one.values.axes[0])[place] for x in (given, own))
    return a.to(b) - b


def settled(block: Block, tensors: Mapping[str, Tensor], spaces: Collection[str]) -> dict[str, Tensor]:
    """A block in the form that maps are fitted to: no unseen bias, that of values in the output map's."""
    known = [one for one in unseen(block) if one.space.name in spaces]
    found = dict(tensors)

    def nothing(key: str) -> Tensor | None:
        return torch.zeros_like(tensors[key]) if key in tensors else None

    for info in {i.key: i for one in known for i in (one.bias, one.keys, one.values) if i is not None}.values():
        tensor = _with(info, tensors.get, nothing, known)
        if tensor is not None:
            found[info.key] = tensor
    return found


def read_by(block: Block, info: TensorInfo) -> Unseen | None:
    """The unseen bias of values that a map reads; None of any other tensor."""
    return next(
        (o for o in unseen(block) if o.values is not None and o.output is not None and o.output.key == info.key), None
    )


def along(one: Unseen, info: TensorInfo, dim: int, shift: Tensor) -> Tensor:
    """A constant of the values, shape (groups, value_dim), along the axis of the output map that reads them, (in,)."""
    axis = info.axes[dim]
    pieces = split_axis(shift.new_zeros(axis.size or 0), 0, axis)
    place = _place(axis, one.space, "o")
    assert place is not None
    pieces[place] = shift[:, None].expand(one.space.factors("o"))
    return join_axis(pieces, 0, axis)


class _Placed:
    """A source made of another one, tensor by tensor, each of which may need others of its block."""

    def __init__(self, architecture: Architecture, source: TensorSource) -> None:
        self.source = source
        self.places = architecture.places()

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        found = None
        if name in self.places:
            block, info, piece = self.places[name]
            found = self.tensor(block, info)
        if found is None:
            return self.source[name]
        return found[piece] if info.stacked else found

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        """A tensor of the architecture (stacked, if stored in pieces), None where the source lacks it."""
        raise NotImplementedError


class Aligned(_Placed):
    """A source in the anchor's coordinates, with the anchor's unseen biases, in float32 at least.

    Args:
        source, anchor: by the architecture's names, both folded or neither; without an anchor biases stay the donor's.
    """

    def __init__(
        self,
        architecture: Architecture,
        source: TensorSource,
        transforms: Mapping[str, SpaceTransform],
        anchor: TensorSource | None = None,
    ) -> None:
        super().__init__(architecture, source)
        self.transforms, self.anchor = transforms, anchor

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        def moved(key: str) -> Tensor | None:
            own = block.tensor(key)
            stored = None if own is None else read_tensor(own, self.source)
            return None if own is None or stored is None else transform_tensor(stored, own, self.transforms)

        def given(key: str) -> Tensor | None:
            own = block.tensor(key)
            return None if own is None or self.anchor is None else read_tensor(own, self.anchor)

        return moved(info.key) if self.anchor is None else with_biases(block, info, moved, given, self.transforms)


class Settled(_Placed):
    """A source in the form that maps are fitted to (see `settled`).

    Args:
        spaces: names of those that are matched.
    """

    def __init__(self, architecture: Architecture, source: TensorSource, spaces: Collection[str]) -> None:
        super().__init__(architecture, source)
        self.spaces = spaces

    def tensor(self, block: Block, info: TensorInfo) -> Tensor | None:
        if len(info.axes) != 1:
            return read_tensor(info, self.source)
        keys = [info.key, *inputs(block, info)]
        found = {key: read_tensor(own, self.source) for key in keys if (own := block.tensor(key)) is not None}
        tensors = {key: tensor for key, tensor in found.items() if tensor is not None}
        return settled(block, tensors, self.spaces).get(info.key)


def _with_piece(tensor: Tensor, info: TensorInfo, space: Space, role: str, other: Tensor) -> Tensor:
    """A bias with one role's part taken from another."""
    axis = info.axes[0]
    place = _place(axis, space, role)
    assert place is not None
    pieces = split_axis(tensor, 0, axis)
    pieces[place] = split_axis(other.to(tensor), 0, axis)[place]
    return join_axis(pieces, 0, axis)


def _through(one: Unseen, shift: Tensor, moved: Get) -> Tensor:
    """What the output map makes of a constant that all heads of a group read, shape (out,)."""
    assert one.output is not None
    weight = _work(_required(moved(one.output.key), one.output))
    dim = next(d for d, axis in enumerate(one.output.axes) if _place(axis, one.space, "o") is not None)
    axis = one.output.axes[dim]
    piece = split_axis(weight, dim, axis)[_place(axis, one.space, "o") or 0]
    heads = shift.to(weight)[:, None].expand(one.space.factors("o"))
    return torch.tensordot(piece, heads, dims=([dim, dim + 1, dim + 2], [0, 1, 2]))


def _required(tensor: Tensor | None, info: TensorInfo) -> Tensor:
    if tensor is None:
        raise KeyError(info.key)
    return tensor


def _work(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
