"""Visiting the blocks of two models; each block of both is one piece of work, for a thread, a device or a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.matching.block import BlockMatch, check_finite, match_block, squared_distances, wanted_spaces
from rotation_merge.matching.matrix_pairs import Tensors
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import Piece, StreamSums, Transforms, measured, piece
from rotation_merge.model.apply import at_least_float32, read_block, read_tensor, transform_tensor
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.vocabulary import stored_tensors, vocabulary_axes, vocabulary_slices, with_rows
from rotation_merge.workers import BYTES_A_WEIGHT, workers_for

BYTES_FOLDED = 20
"""As `BYTES_A_WEIGHT`, of models that are folded: both are widened. With freed memory in between, pass after pass, a
layer of 8B shape takes 28 at its peak: workers then have 0.7 of what is free."""

MEASURE, PASS, FINAL = "measure", "pass", "final"


@dataclass(frozen=True)
class Step:
    """What is done with every block.

    Attributes:
        kind: `measure`: what its tensors say of the streams (`StreamMeasurement`s); `pass`: its local spaces are
            matched under the streams' maps, weighted, and the sums taken (`StreamSums`); `final`: they are matched
            without weights (`BlockMatch`).
        streams: transforms of the streams.
        weights: of tensors by name, for the local spaces; one not named counts as it stands.
        precise: for models that nearly agree already.
    """

    kind: str
    streams: Transforms
    weights: Mapping[str, float] = field(default_factory=dict)
    precise: bool = False


@dataclass(frozen=True, eq=False)
class Visits:
    """Two models, read block by block.

    Attributes:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: as they are stored.
        options: of every block, by its name.
        folded: streams whose norms are folded as blocks are read.
        cached: whether what fits in memory is kept, as the models are read more than once.
        device: where blocks are brought; None: they stay where they are read.
        home: where results are brought.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    options: Mapping[str, AlignConfig]
    folded: tuple[str, ...] = ()
    cached: bool = False
    device: str | None = None
    home: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        arguments = (self.architecture, self.anchor, self.donor, self.options, self.folded, self.cached)
        return Visits, (*arguments, self.device, self.home)

    @cached_property
    def _reading(self) -> Lock:
        return Lock()

    @cached_property
    def _sources(self) -> tuple[TensorSource, TensorSource]:
        return self._source(self.anchor), self._source(self.donor)

    def _source(self, source: TensorSource) -> TensorSource:
        if self.device is not None:
            source = as_tensors(source).on(self.device)
        if self.folded:
            source = folded_tensors(self.architecture, source, self.folded)
        return as_tensors(source).cached() if self.cached else source

    @cached_property
    def _ready(self) -> dict[str, dict[str, Tensor]]:
        """The anchor's block that was read for its size, kept for its turn."""
        return {}

    @cached_property
    def _weights(self) -> tuple[int, bool]:
        """The number of weights in a block, and whether they are on an accelerator."""
        for block in [block for block in self.architecture.blocks if block.index is not None][:1]:
            self._ready[block.name] = read_block(block, self._sources[0])
        tensors = [tensor for block in self._ready.values() for tensor in block.values()]
        return sum(t.numel() for t in tensors), any(t.device.type != "cpu" for t in tensors)

    def is_plain(self, block: Block) -> bool:
        """Whether a block gives the same measurements in every pass.

        Such a block is outside of layers, has no matched space, and no tensor between two streams.
        """
        if block.index is not None or wanted_spaces(block, self.options[block.name]):
            return False
        sides = (sum(any(p.space.kind == "stream" for p in axis.parts) for axis in i.axes) for i in block.tensors)
        return max(sides, default=0) <= 1

    @property
    def at_once(self) -> int:
        """The number of blocks matched at once; 0 on an accelerator, which one block keeps busy."""
        weights, accelerated = self._weights
        each = BYTES_FOLDED if self.folded else BYTES_A_WEIGHT
        return 0 if accelerated else workers_for(weights * each // BYTES_A_WEIGHT)

    def on(self, device: str, home: str) -> Visits:
        return replace(self, device=device, home=home)

    def piece(self, step: Step, item: int) -> Any:
        """A step on the block of a number."""
        block = self.architecture.blocks[item]
        result = self._plain(step, block) if self.is_plain(block) else self._visited(step, block)
        if self.home is None:
            return result
        home = torch.device(self.home)
        return tuple(tensor.to(home) for tensor in result) if isinstance(result, tuple) else result.to(home)

    def _visited(self, step: Step, block: Block) -> Any:
        options = self.options[block.name]
        matched = {space.name for space in wanted_spaces(block, options)}
        if step.kind == FINAL and not step.streams and not matched:
            return BlockMatch({}, [])
        with self._reading:
            anchor = self._ready.pop(block.name, None) or read_block(block, self._sources[0])
            donor = read_block(block, self._sources[1])
        check_finite(block, anchor, "anchor")
        check_finite(block, donor, "donor")
        anchor, donor = (dict(without_hidden_biases(block, tensors, matched)) for tensors in (anchor, donor))
        if step.kind == MEASURE:
            return tuple(measured([piece(block, anchor, donor)], step.streams, step.precise))
        if step.kind == PASS:
            return self._passed(step, block, anchor, donor, options)
        return _final(step, block, anchor, donor, options)

    def _passed(
        self, step: Step, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], options: AlignConfig
    ) -> StreamSums:
        """Match all local spaces under the streams' transforms, and sum what the block says of the streams.

        Tensors have the roots of their weights as factors, in place; not those that are stored without an offset.
        """
        maps, sums, weights = dict(step.streams), StreamSums(), dict[str, float]()
        if wanted_spaces(block, options):
            for info in (info for info in block.tensors if info.name in step.weights and not info.offset):
                weights[info.name] = step.weights[info.name]
                for tensors in (tensors for tensors in (anchor, donor) if info.key in tensors):
                    tensors[info.key] = at_least_float32(tensors[info.key]) * weights[info.name] ** 0.5
            maps |= match_block(block, anchor, donor, options, step.streams, told=False).transforms
        for tensor in measured([piece(block, anchor, donor)], maps, step.precise):
            sums.count(tensor, maps)
        sums.weights = {name: weight * weights.get(name, 1.0) for name, weight in sums.weights.items()}
        return sums

    def _plain(self, step: Step, block: Block) -> Any:
        """A step on a block outside of layers without matched local spaces, long vocabularies in slices."""
        if step.kind == MEASURE:
            return tuple(measured(self._pieces(block), step.streams, step.precise))
        if not step.streams:
            return BlockMatch({}, [])
        before = after = norm = 0.0
        for part, read in self._pieces(block):
            pair = read()
            apart, square = squared_distances(part, *pair, {})
            before, norm = before + apart, norm + square
            after += squared_distances(part, *pair, step.streams)[0]
        return BlockMatch({}, [], (before, after, norm))

    def _pieces(self, block: Block) -> list[Piece]:
        """The tensors of a plain block: short ones together, long vocabularies in slices."""
        with self._reading:
            stored = [self._stored(block, source) for source in (self.anchor, self.donor)]
        long = {info.key: sliced for info in block.tensors if (sliced := _long(info, stored))}
        short = replace(block, tensors=tuple(info for info in block.tensors if info.key not in long))
        slices = [(replace(block, tensors=(i,)), rows) for i in block.tensors for rows in long.get(i.key, ())]
        axes = vocabulary_axes(block.tensors)
        return [(part, partial(self._read, part, stored, axes, rows)) for part, rows in ((short, None), *slices)]

    def _read(
        self, part: Block, stored: Sequence[TensorSource], axes: Mapping[str, int], rows: slice | None
    ) -> tuple[Tensors, Tensors]:
        """Tensors of a plain block, or rows of them, of both models; folded, and finite."""
        pair = []
        for source, model in zip(stored, ("anchor", "donor"), strict=True):
            source = source if rows is None else with_rows(source, axes, rows)
            pair.append(read_block(part, folded_tensors(self.architecture, source, self.folded)))
            check_finite(part, pair[-1], model)
        return pair[0], pair[1]

    def _stored(self, block: Block, source: TensorSource) -> dict[str, Tensor]:
        """A block's stored tensors by name."""
        return stored_tensors(block, source if self.device is None else as_tensors(source).on(self.device))


def _long(info: TensorInfo, stored: Sequence[Mapping[str, Tensor]]) -> list[slice]:
    """The vocabulary slices of a large tensor."""
    known = [tensor for tensors in stored if (tensor := read_tensor(info, tensors)) is not None]
    return vocabulary_slices(info, known) if len(known) == 2 else []


def _final(
    step: Step, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], options: AlignConfig
) -> BlockMatch:
    """Match the local spaces without weights under the streams' transforms."""
    if not step.streams:
        return match_block(block, anchor, donor, options)
    before, norm = squared_distances(block, anchor, donor, {})
    for info in block.tensors:  # turned once, not for every look at it
        if info.key in donor:
            donor[info.key] = transform_tensor(donor[info.key], info, step.streams)
    match = match_block(block, anchor, donor, options)
    after = squared_distances(block, anchor, donor, match.transforms)[0]
    return replace(match, whole=(before, after, norm))
