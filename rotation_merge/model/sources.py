"""Sources made of other sources: a model in new coordinates, the mean of several, another spelling of names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo, factors_of
from rotation_merge.model.apply import at_least_float32
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.source import TensorSource, read_tensor


class MeanSource:
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


class AverageSource:
    """The weighted mean of several sources, in float32 at least; equal sources give the same, bit for bit.

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
        start = at_least_float32(first)
        total, apart = start.clone(), torch.empty_like(start)
        for source, share in zip(self.sources[1:], self.shares[1:], strict=True):
            total.add_(torch.sub(source[name].to(start), start, out=apart), alpha=share)
        return total


class ExtrapolatedSource:
    """A source moved along its difference to a reference r: ``r + scale (source - r)``, in float32 at least."""

    def __init__(self, source: TensorSource, reference: TensorSource, scale: float) -> None:
        self.source, self.reference, self.scale = source, reference, scale

    def __contains__(self, name: object) -> bool:
        return name in self.source and name in self.reference

    def __getitem__(self, name: str, /) -> Tensor:
        tensor = self.source[name]
        if not tensor.is_floating_point():
            return tensor
        work = torch.promote_types(tensor.dtype, torch.float32)
        return torch.lerp(self.reference[name].to(tensor.device, work), tensor.to(work), self.scale)


class SelectedSource:
    """A source that takes the tensors chosen by name from another source."""

    def __init__(self, source: TensorSource, alternative: TensorSource, chosen: Callable[[str], bool]) -> None:
        self.source, self.alternative, self.chosen = source, alternative, chosen

    def __contains__(self, name: object) -> bool:
        return name in (self.alternative if self.chosen(str(name)) else self.source)

    def __getitem__(self, name: str, /) -> Tensor:
        return (self.alternative if self.chosen(name) else self.source)[name]


class ReplacedSource:
    """A source with some tensors replaced."""

    def __init__(self, source: TensorSource, replacements: Mapping[str, Tensor]) -> None:
        self.source, self.replacements = source, replacements

    def __contains__(self, name: object) -> bool:
        return name in self.replacements or name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.replacements[name] if name in self.replacements else self.source[name]


class RoundedSource:
    """A source with every floating tensor rounded as it would be stored, in the source's own dtype.

    Attributes:
        like: whose dtypes are those of storage; tensors that it lacks are not rounded.
        dtype: of storage, for all tensors; None: that of `like`.
    """

    def __init__(self, source: TensorSource, like: TensorSource, dtype: torch.dtype | None = None) -> None:
        self.source, self.like, self.dtype = source, like, dtype

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        tensor = self.source[name]
        if not tensor.is_floating_point() or (self.dtype is None and name not in self.like):
            return tensor
        return tensor.to(self.dtype or self.like[name].dtype).to(tensor.dtype)


class RenamedSource:
    """A source with renamed tensors.

    Attributes:
        names: by name here, the name there; others are the same in both.
    """

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self.source, self.names = source, dict(names)

    def __contains__(self, name: object) -> bool:
        return self.names.get(str(name), name) in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[self.names.get(name, name)]


class TranslatedSource(RenamedSource):
    """A source under the names of another model of the same family (a bare model under those of one with a head)."""

    def __init__(self, source: TensorSource, stored: Architecture, named: Architecture) -> None:
        by_place = {
            (block.module, block.place, block.index, info.key): info
            for block in stored.blocks
            for info in block.tensors
        }
        names: dict[str, str] = {}
        for block in named.blocks:
            for info in block.tensors:
                info_stored = by_place.get((block.module, block.place, block.index, info.key))
                if info_stored is not None:
                    names.update(zip(info.names, info_stored.names, strict=True))
        super().__init__(source, names)


class RestructuredSource(TranslatedSource):
    """A source under the names of another form of the same model.

    Experts are separate or stacked; gates and values (or queries, keys and values) separate or fused. Corresponding
    tensors are found by the spaces of their axes.

    Attributes:
        made: by name, the tensors that a tensor is composed of, and its entry in them.
    """

    def __init__(self, source: TensorSource, stored: Architecture, named: Architecture) -> None:
        super().__init__(source, stored, named)
        place = {(block.module, block.place, block.index): block for block in stored.blocks}
        self.made: dict[str, tuple[ComposedTensor, int | None]] = {}
        self._latest: tuple[ComposedTensor, Tensor] | None = (
            None  # all entries of one are asked for one after the other
        )
        for block in named.blocks:
            stored_block = place.get((block.module, block.place, block.index))
            for key, composed in other_form(stored_block, block).items() if stored_block is not None else ():
                info = block.tensor(key)
                assert info is not None
                entries = enumerate(info.names) if info.stacked else [(None, info.name)]
                self.made.update((name, (composed, entry)) for entry, name in entries)

    def __contains__(self, name: object) -> bool:
        if str(name) in self.made:
            return all(cut.info.names[0] in self.source for cut in self.made[str(name)][0].cuts)
        return super().__contains__(name)

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self.made:
            return super().__getitem__(name)
        composed, entry = self.made[name]
        if entry is None:
            return self._put_together(composed)
        if self._latest is None or self._latest[0] is not composed:
            self._latest = composed, self._put_together(composed)
        return self._latest[1][entry]

    def _put_together(self, composed: ComposedTensor) -> Tensor:
        tensors = [(cut, read_tensor(cut.info, self.source)) for cut in composed.cuts]
        cuts = [tensor.narrow(cut.dim, cut.start, cut.length) for cut, tensor in tensors if tensor is not None]
        return cuts[0] if len(cuts) == 1 else torch.cat(cuts, composed.dim)


Lives = tuple[tuple[tuple[str, str], ...], ...]
"""Spaces and roles of the axes of a tensor that has one piece along each."""


@dataclass(frozen=True)
class TensorSlice:
    """A slice of a tensor's entries along a dimension."""

    info: TensorInfo
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class ComposedTensor:
    """A tensor as cuts of others, one after the other along a dimension."""

    dim: int
    cuts: tuple[TensorSlice, ...]


def other_form(stored: Block, named: Block) -> dict[str, ComposedTensor]:
    """Compositions that build a block's tensors from another block's form of storage, by key.

    Args:
        stored: the block that has the other form.
        named: the same block of a model of the same family.
    """
    cuts = _cuts(stored)
    composed = {info.key: _made(info, cuts) for info in named.tensors if stored.tensor(info.key) is None}
    return {key: entry for key, entry in composed.items() if entry is not None}


def _lives(info: TensorInfo) -> Lives:
    return tuple(tuple((part.space.name, part.role) for part in axis.parts) for axis in info.axes)


def _pieces(info: TensorInfo) -> Iterator[tuple[Lives, TensorSlice]]:
    """The consecutive pieces of a tensor, and the spaces of their axes."""
    whole = _lives(info)
    for dim, axis in enumerate(info.axes):
        start = 0
        for piece in axis.pieces if len(axis.pieces) > 1 and axis.depth == 0 else ():
            living = tuple((part.space.name, part.role) for part in piece if part.space.kind != "fixed")
            length = math.prod(factors_of(piece))
            yield (*whole[:dim], living, *whole[dim + 1 :]), TensorSlice(info, dim, start, length)
            start += length


def _cuts(block: Block) -> dict[Lives, TensorSlice]:
    """A block's tensors and their pieces, those that are one of a kind."""
    by_axes: dict[Lives, list[TensorSlice]] = {}
    for info in block.tensors:
        if info.axes and info.axes[0].size is not None:
            by_axes.setdefault(_lives(info), []).append(TensorSlice(info, 0, 0, info.axes[0].size))
        for living, cut in _pieces(info):
            by_axes.setdefault(living, []).append(cut)
    return {living: cuts[0] for living, cuts in by_axes.items() if any(living) and len(cuts) == 1}


def _made(info: TensorInfo, cuts: Mapping[Lives, TensorSlice]) -> ComposedTensor | None:
    """The cuts that a tensor is composed of; None if they are not all there."""
    if (same := cuts.get(_lives(info))) is not None:
        return ComposedTensor(0, (same,))
    pieces = list(_pieces(info))
    matching = [cuts[living] for living, _ in pieces if living in cuts]
    return ComposedTensor(pieces[0][1].dim, tuple(matching)) if pieces and len(matching) == len(pieces) else None


def vocabulary_axes(architecture: Architecture) -> dict[str, int]:
    """The vocabulary axis of each tensor that has one, by name, including names of tied tensors."""
    infos = [info for info in architecture.tensors() if not info.stacked]
    axes = {name: info.vocabulary_axis for info in infos for name in (*info.names, *info.tied)}
    return {name: axis for name, axis in axes.items() if axis is not None}


class VocabularySubset:
    """A source with selected tokens of its vocabulary, in the given order."""

    def __init__(self, architecture: Architecture, source: TensorSource, rows: Tensor) -> None:
        self.source, self.rows, self.axes = source, rows, vocabulary_axes(architecture)

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        tensor, axis = self.source[name], self.axes.get(name)
        return tensor if axis is None else tensor.index_select(axis, self.rows.to(tensor.device))


def with_rows_of(tensor: Tensor, like: Tensor, axis: int) -> Tensor:
    """A tensor with another one's number of vocabulary rows: cut, or extended by the other's rows."""
    length = min(tensor.shape[axis], like.shape[axis])
    absent = like.narrow(axis, length, like.shape[axis] - length).to(tensor)
    return torch.cat([tensor.narrow(axis, 0, length), absent], axis)


class ResizedVocabulary:
    """A source with another vocabulary size, and some rows of another source; rows beyond both are zero.

    Attributes:
        rows: where rows of `other` stand here, and which of its rows these are, (rows,) each.
    """

    def __init__(
        self,
        architecture: Architecture,
        source: TensorSource,
        length: int,
        other: TensorSource,
        rows: tuple[Tensor, Tensor],
    ) -> None:
        self.source, self.other, self.length, self.rows = source, other, length, rows
        self.axes = vocabulary_axes(architecture)
        tied = {name: info for info in architecture.tensors() for name in info.tied}
        self.infos = {**tied, **{name: info for info in architecture.tensors() for name in info.names}}

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        tensor, axis = self.source[name], self.axes.get(name)
        if axis is None:
            return tensor
        kept = min(self.length, tensor.shape[axis])
        shape = [*tensor.shape]
        shape[axis] = self.length
        result = tensor.new_zeros(shape)
        result.narrow(axis, 0, kept).copy_(tensor.narrow(axis, 0, kept))
        other = self.other[name] if name in self.other else read_tensor(self.infos[name], self.other)
        here, there = (rows.to(tensor.device) for rows in self.rows)
        if other is None or not len(here):
            return result
        return result.index_copy(axis, here, other.to(result).index_select(axis, there))


class ReorderedClasses:
    """A source with its classes in another order."""

    def __init__(self, source: TensorSource, rows: LabelRows) -> None:
        self.source, self.rows = source, rows

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return in_order(self.source[name], self.rows.get(name))


class DeviceSource:
    """A source that moves its tensors to a device on access."""

    def __init__(self, source: TensorSource, device: torch.device) -> None:
        self.source, self.device = source, device

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        return self.source[name].to(self.device)
