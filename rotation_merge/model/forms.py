"""Forms of one model: other spellings of its names, experts apart or in one tensor, projections apart or fused.

Corresponding tensors are found by the spaces of their axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo, factors_of
from rotation_merge.model.apply import blockwise, read_tensor, unstack, with_tied
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors


def paired(stored: Architecture, named: Architecture) -> Iterator[tuple[Block, Block]]:
    """The blocks that two models of a family both have."""
    places = {(block.module, block.place, block.index): block for block in stored.blocks}
    pairs = ((places.get((block.module, block.place, block.index)), block) for block in named.blocks)
    return ((stored_block, block) for stored_block, block in pairs if stored_block is not None)


def names_in(stored: Architecture, named: Architecture) -> dict[str, str]:
    """By the names of one model's tensors those of another model of the family (a bare model, one with a head)."""
    names: dict[str, str] = {}
    for stored_block, block in paired(stored, named):
        for info in block.tensors:
            if (info_stored := stored_block.tensor(info.key)) is not None:
                names.update(zip(info.names, info_stored.names, strict=True))
    return names


def named_as(named: Architecture, source: TensorSource, stored: Architecture) -> Tensors:
    """A model's tensors by the names of another model of its family, a tied one under both of its names."""
    tensors = as_tensors(source)
    return with_tied(named, tensors if stored is named else tensors.renamed(names_in(stored, named)))


def restructured(source: TensorSource, stored: Architecture, named: Architecture) -> Tensors:
    """A model's tensors under the names of another form of it.

    Experts are separate or stacked; gates and values (or queries, keys and values) separate or fused.
    """
    tensors = as_tensors(source)
    empty = {
        name: torch.empty(shape, dtype=tensors.dtypes[name], device="meta") for name, shape in tensors.shapes.items()
    }
    forms, described = dict[str, ComposedTensor](), dict[str, Tensor]()
    for stored_block, block in paired(stored, named):
        composed = other_form(stored_block, block)
        for info in (info for info in block.tensors if info.key in composed):
            if all(cut.info.names[0] in tensors for cut in composed[info.key].cuts):
                forms[info.name] = composed[info.key]
                described |= unstack(info, composed[info.key].read(empty))

    def compute(_: Block, info: TensorInfo) -> Tensor | None:
        return forms[info.name].read(tensors) if info.name in forms else None

    return blockwise(named, named_as(named, tensors, stored).replaced(described), compute)


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

    def read(self, tensors: TensorSource) -> Tensor:
        """The composed tensor (stacked, if it is stored in pieces)."""
        stored = [(cut, read_tensor(cut.info, tensors)) for cut in self.cuts]
        parts = [tensor.narrow(cut.dim, cut.start, cut.length) for cut, tensor in stored if tensor is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def other_form(stored: Block, named: Block) -> dict[str, ComposedTensor]:
    """Compositions that build a block's tensors from another block's form of storage, by key.

    Args:
        stored: the block that has the other form.
        named: the same block of a model of the same family.
    """
    cuts = _cuts(stored)
    composed = {info.key: _composed(info, cuts) for info in named.tensors if stored.tensor(info.key) is None}
    return {key: entry for key, entry in composed.items() if entry is not None}


def lives(info: TensorInfo) -> Lives:
    """The spaces and roles of a tensor's axes."""
    return tuple(tuple((part.space.name, part.role) for part in axis.parts) for axis in info.axes)


def pieces(info: TensorInfo) -> Iterator[tuple[Lives, TensorSlice]]:
    """The consecutive pieces of a tensor, and the spaces of their axes."""
    whole = lives(info)
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
            by_axes.setdefault(lives(info), []).append(TensorSlice(info, 0, 0, info.axes[0].size))
        for living, cut in pieces(info):
            by_axes.setdefault(living, []).append(cut)
    return {living: cuts[0] for living, cuts in by_axes.items() if any(living) and len(cuts) == 1}


def _composed(info: TensorInfo, cuts: Mapping[Lives, TensorSlice]) -> ComposedTensor | None:
    """The cuts that a tensor is composed of; None if they are not all there."""
    if (same := cuts.get(lives(info))) is not None:
        return ComposedTensor(0, (same,))
    parts = list(pieces(info))
    matching = [cuts[living] for living, _ in parts if living in cuts]
    return ComposedTensor(parts[0][1].dim, tuple(matching)) if parts and len(matching) == len(parts) else None
