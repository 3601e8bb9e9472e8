"""Sources made of other sources: a model in new coordinates, the mean of several, another spelling of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, TensorInfo
from rotation_merge.matching.labels import Rows as LabelRows
from rotation_merge.matching.labels import in_order
from rotation_merge.matching.state import TensorSource, read_tensor


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
        total = start = first.to(torch.promote_types(first.dtype, torch.float32))
        for source, share in zip(self.sources[1:], self.shares[1:], strict=True):
            total = total + share * (source[name].to(total) - start)
        return total


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


class Renamed:
    """A source under the names of another model of the same family (a bare model under those of one with a head)."""

    def __init__(self, source: TensorSource, own: Architecture, wanted: Architecture) -> None:
        self.source = source
        theirs = {
            (block.module, block.place, block.index, info.key): info for block in own.blocks for info in block.tensors
        }
        self.names: dict[str, str] = {}
        for block in wanted.blocks:
            for info in block.tensors:
                other = theirs.get((block.module, block.place, block.index, info.key))
                if other is not None:
                    self.names.update(zip(info.names, other.names, strict=True))

    def __contains__(self, name: object) -> bool:
        return self.names.get(str(name), name) in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[self.names.get(name, name)]


class Joined(Renamed):
    """A source under the names of another form of the same model, whose tensors may hold several of its own, one after
    the other: all experts, gates beside values. Tensors belong together by what lives in their axes."""

    def __init__(self, source: TensorSource, own: Architecture, wanted: Architecture) -> None:
        super().__init__(source, own, wanted)
        place = {(block.module, block.place, block.index): block for block in own.blocks}
        self.pieces: dict[str, tuple[int, list[TensorInfo]]] = {}
        for block in wanted.blocks:
            theirs = place.get((block.module, block.place, block.index))
            living = {} if theirs is None else {_lives(info): info for info in theirs.tensors}
            for info in block.tensors:
                if not info.stacked and info.names[0] not in self.names and (found := _joining(info, living)):
                    self.pieces[info.names[0]] = found

    def __contains__(self, name: object) -> bool:
        if str(name) in self.pieces:
            return all(part in self.source for info in self.pieces[str(name)][1] for part in info.names)
        return super().__contains__(name)

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self.pieces:
            return super().__getitem__(name)
        dim, infos = self.pieces[name]
        found = [read_tensor(info, self.source) for info in infos]
        return torch.cat([tensor for tensor in found if tensor is not None], dim)


Lives = tuple[tuple[tuple[str, str], ...], ...]
"""What lives in the axes of a tensor that is in one piece along each: names of spaces, and roles in them."""


def _lives(info: TensorInfo) -> Lives:
    return tuple(tuple((part.space.name, part.role) for part in axis.parts) for axis in info.axes)


def _joining(info: TensorInfo, living: Mapping[Lives, TensorInfo]) -> tuple[int, list[TensorInfo]] | None:
    """Tensors that make up one where they follow one another along a dimension; None: there are no such."""
    whole = _lives(info)
    if whole in living:
        return 0, [living[whole]]
    for dim, axis in enumerate(info.axes):
        if len(axis.pieces) > 1 and axis.depth == 0:
            each = [tuple((part.space.name, part.role) for part in piece) for piece in axis.pieces]
            found = [living.get((*whole[:dim], piece, *whole[dim + 1 :])) for piece in each]
            parts = [part for part in found if part is not None]
            return (dim, parts) if len(parts) == len(found) else None
    return None


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
