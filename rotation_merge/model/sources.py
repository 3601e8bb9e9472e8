"""Sources made of other sources: a model in new coordinates, the mean of several, another spelling of names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo, factors_of
from rotation_merge.model.labels import Rows as LabelRows
from rotation_merge.model.labels import in_order
from rotation_merge.model.source import TensorSource, read_tensor


class Mean:
    """The mean of several sources, in float32."""

    def __init__(self, sources: Sequence[TensorSource]) -> None:
        self.sources = sources

    def __contains__(self, name: object) -> bool:
        return all(name in source for source in self.sources)

    def __getitem__(self, name: str, /) -> Tensor:
        total = self.sources[0][name].to(torch.float32)
        for source in self.sources[1:]:
            total = total + source[name].to(torch.float32)
        return total / len(self.sources)


class Average:
    """The weighted mean of several sources, in float32 at least; where all agree it is what they are, bit for bit.

    Args:
        shares: of the sources; their sum is one.
    """

    def __init__(self, sources: Sequence[TensorSource], shares: Sequence[float]) -> None:
        self.sources, self.shares = sources, shares

    def __contains__(self, name: object) -> bool:
        return all(name in source for source in self.sources)

    def __getitem__(self, name: str, /) -> Tensor:
        first = self.sources[0][name]
        if not first.is_floating_point():
            return first
        start = first.to(torch.promote_types(first.dtype, torch.float32))
        total, apart = start.clone(), torch.empty_like(start)
        for source, share in zip(self.sources[1:], self.shares[1:], strict=True):
            total.add_(torch.sub(source[name].to(start), start, out=apart), alpha=share)
        return total


class Extrapolated:
    """A source moved along its difference to another: ``other + scale (source - other)``, in float32 at least."""

    def __init__(self, source: TensorSource, other: TensorSource, scale: float) -> None:
        self.source, self.other, self.scale = source, other, scale

    def __contains__(self, name: object) -> bool:
        return name in self.source and name in self.other

    def __getitem__(self, name: str, /) -> Tensor:
        tensor = self.source[name]
        if not tensor.is_floating_point():
            return tensor
        work = torch.promote_types(tensor.dtype, torch.float32)
        return torch.lerp(self.other[name].to(tensor.device, work), tensor.to(work), self.scale)


class Either:
    """A source some of whose tensors, told by their names, are another's."""

    def __init__(self, source: TensorSource, other: TensorSource, chosen: Callable[[str], bool]) -> None:
        self.source, self.other, self.chosen = source, other, chosen

    def __contains__(self, name: object) -> bool:
        return name in (self.other if self.chosen(str(name)) else self.source)

    def __getitem__(self, name: str, /) -> Tensor:
        return (self.other if self.chosen(name) else self.source)[name]


class Replaced:
    """A source some of whose tensors are others."""

    def __init__(self, source: TensorSource, others: Mapping[str, Tensor]) -> None:
        self.source, self.others = source, others

    def __contains__(self, name: object) -> bool:
        return name in self.others or name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.others[name] if name in self.others else self.source[name]


class Spelled:
    """A source whose tensors go by other names.

    Attributes:
        names: by name here, the name there; others are the same in both.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.source, self.names = source, dict(names)

    def __contains__(self, name: object) -> bool:
        return self.names.get(str(name), name) in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[self.names.get(name, name)]


class Renamed(Spelled):
    """A source under the names of another model of the same family (a bare model under those of one with a head)."""

    def __init__(self, source: TensorSource, own: Architecture, wanted: Architecture) -> None:
        theirs = {
            (block.module, block.place, block.index, info.key): info for block in own.blocks for info in block.tensors
        }
        names: dict[str, str] = {}
        for block in wanted.blocks:
            for info in block.tensors:
                other = theirs.get((block.module, block.place, block.index, info.key))
                if other is not None:
                    names.update(zip(info.names, other.names, strict=True))
        super().__init__(source, names)


class Respelled(Renamed):
    """A source under the names of another form of the same model: experts apart or all in one tensor, gates and values
    (or queries, keys and values) apart or one after the other. What belongs together is told by what lives in the axes.

    Attributes:
        made: by name, what a tensor is made of that the source has in another form, and which entry of that it is.
    """

    def __init__(self, source: TensorSource, own: Architecture, wanted: Architecture) -> None:
        super().__init__(source, own, wanted)
        place = {(block.module, block.place, block.index): block for block in own.blocks}
        self.made: dict[str, tuple[Made, int | None]] = {}
        self._latest: tuple[Made, Tensor] | None = None  # all entries of one are asked for one after the other
        for block in wanted.blocks:
            theirs = place.get((block.module, block.place, block.index))
            for key, made in other_form(theirs, block).items() if theirs is not None else ():
                info = block.tensor(key)
                assert info is not None
                entries = enumerate(info.names) if info.stacked else [(None, info.name)]
                self.made.update((name, (made, entry)) for entry, name in entries)

    def __contains__(self, name: object) -> bool:
        if str(name) in self.made:
            return all(cut.info.names[0] in self.source for cut in self.made[str(name)][0].cuts)
        return super().__contains__(name)

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self.made:
            return super().__getitem__(name)
        made, entry = self.made[name]
        if entry is None:
            return self._put_together(made)
        if self._latest is None or self._latest[0] is not made:
            self._latest = made, self._put_together(made)
        return self._latest[1][entry]

    def _put_together(self, made: Made) -> Tensor:
        found = [(cut, read_tensor(cut.info, self.source)) for cut in made.cuts]
        cuts = [tensor.narrow(cut.dim, cut.start, cut.length) for cut, tensor in found if tensor is not None]
        return cuts[0] if len(cuts) == 1 else torch.cat(cuts, made.dim)


Lives = tuple[tuple[tuple[str, str], ...], ...]
"""What lives in the axes of a tensor that is in one piece along each: names of spaces, and roles in them."""


@dataclass(frozen=True)
class Cut:
    """Some of a tensor's entries along a dimension."""

    info: TensorInfo
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Made:
    """A tensor as cuts of others, one after the other along a dimension."""

    dim: int
    cuts: tuple[Cut, ...]


def other_form(own: Block, wanted: Block) -> dict[str, Made]:
    """What those tensors of a block are made of that another one has in another form, by their keys.

    Args:
        own: the block that has the other form.
        wanted: the same block of a model of the same family.
    """
    cuts = _cuts(own)
    found = {info.key: _made(info, cuts) for info in wanted.tensors if own.tensor(info.key) is None}
    return {key: made for key, made in found.items() if made is not None}


def _lives(info: TensorInfo) -> Lives:
    return tuple(tuple((part.space.name, part.role) for part in axis.parts) for axis in info.axes)


def _pieces(info: TensorInfo) -> Iterator[tuple[Lives, Cut]]:
    """The pieces that follow one another in a tensor, and what lives in their axes."""
    whole = _lives(info)
    for dim, axis in enumerate(info.axes):
        start = 0
        for piece in axis.pieces if len(axis.pieces) > 1 and axis.depth == 0 else ():
            living = tuple((part.space.name, part.role) for part in piece if part.space.kind != "fixed")
            length = math.prod(factors_of(piece))
            yield (*whole[:dim], living, *whole[dim + 1 :]), Cut(info, dim, start, length)
            start += length


def _cuts(block: Block) -> dict[Lives, Cut]:
    """A block's tensors and their pieces, those that are one of a kind."""
    found: dict[Lives, list[Cut]] = {}
    for info in block.tensors:
        if info.axes and info.axes[0].size is not None:
            found.setdefault(_lives(info), []).append(Cut(info, 0, 0, info.axes[0].size))
        for living, cut in _pieces(info):
            found.setdefault(living, []).append(cut)
    return {living: cuts[0] for living, cuts in found.items() if any(living) and len(cuts) == 1}


def _made(info: TensorInfo, cuts: Mapping[Lives, Cut]) -> Made | None:
    """What a tensor is made of; None: there is no such."""
    if (same := cuts.get(_lives(info))) is not None:
        return Made(0, (same,))
    pieces = list(_pieces(info))
    found = [cuts[living] for living, _ in pieces if living in cuts]
    return Made(pieces[0][1].dim, tuple(found)) if pieces and len(found) == len(pieces) else None


class Rows:
    """A source whose vocabulary holds some tokens only, in the order given."""

    def __init__(self, architecture: Architecture, source: TensorSource, rows: Tensor) -> None:
        self.source, self.rows = source, rows
        self.axes = {
            name: info.vocabulary_axis
            for name, info in architecture.named().items()
            if info.vocabulary_axis is not None and not info.stacked
        }
        tied = {other: info.vocabulary_axis for info in architecture.tensors() for other in info.tied}
        self.axes.update({name: axis for name, axis in tied.items() if axis is not None})

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        tensor, axis = self.source[name], self.axes.get(name)
        return tensor if axis is None else tensor.index_select(axis, self.rows.to(tensor.device))


class Relabelled:
    """A source whose classes are in another order."""

    def __init__(self, source: TensorSource, rows: LabelRows) -> None:
        self.source, self.rows = source, rows

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return in_order(self.source[name], self.rows.get(name))


class OnDevice:
    """A source whose tensors are moved to a device as they are read."""

    def __init__(self, source: TensorSource, device: torch.device) -> None:
        self.source, self.device = source, device

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[name].to(self.device)
