"""Matching two models block by block; each block of both is one piece of work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.matching.block import BlockMatch, check_finite, match_block, squared_distances, wanted_spaces
from rotation_merge.matching.layer_spans import matched_spans
from rotation_merge.matching.matrix_pairs import Tensors
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import StreamStatistics, compared
from rotation_merge.matching.stream_products import TensorMeasurement, measured
from rotation_merge.model.apply import at_least_float32, transform_tensor
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.model.blocks import read_block, read_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.rows import stored_tensors, vocabulary_axes, vocabulary_slices, with_rows
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.symmetry import HeadTransform, SpaceTransform
from rotation_merge.workers import BYTES_A_WEIGHT, workers_for

BYTES_FOLDED = 20
"""As `BYTES_A_WEIGHT`, of models that are folded: both are widened. With freed memory in between, pass after pass, a
layer of 8B shape takes 28 at its peak (`report/estimate.py` counts it): workers then have 0.7 of what is free."""

Transforms = dict[str, SpaceTransform]


Match = Callable[[Tensors, Tensors, AlignConfig, Transforms], BlockMatch]
"""`match_block` for one block, with what spans layers."""


Slices = Iterable[tuple[Tensors, Tensors]]
"""A block's tensors in both models, a few at a time; long vocabularies in slices."""


class Step(Protocol):
    """One step of matching both models' blocks."""

    def __call__(
        self, both: ModelPair, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], match: Match
    ) -> Any:
        """Run the step on one block. It owns the tensors and may change the dictionaries."""

    def plain(self, both: ModelPair, block: Block, parts: Slices) -> Any:
        """Run the step on a block outside of layers without matched local spaces (`ModelPair.is_plain`)."""


@dataclass(frozen=True)
class StepWithLeads:
    """A step with the elements of the first layers of spans (`layer_spans.py`)."""

    step: Step
    leads: Mapping[str, HeadTransform]


@dataclass(frozen=True)
class StepResult:
    """The result of a step, and the elements of the spans that begin at this block."""

    result: Any
    leads: dict[str, HeadTransform]

    def to(self, device: torch.device) -> StepResult:
        leads = {name: lead.to(device) for name, lead in self.leads.items()}
        return StepResult(None if self.result is None else self.result.to(device), leads)


@dataclass(frozen=True, eq=False)
class ModelPair:
    """Two models, read block by block.

    Attributes:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: as they are stored.
        options: which groups to use.
        folded: streams whose norms are folded as blocks are read.
        cached: whether what fits in memory is kept, as the models are read more than once.
        device: where blocks are brought; None: they stay where they are read.
        home: where what is found is brought.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    options: AlignConfig
    folded: tuple[str, ...] = ()
    cached: bool = False
    device: str | None = None
    home: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.options.resolved(self.architecture)
        arguments = (self.architecture, self.anchor, self.donor, options, self.folded, self.cached)
        return ModelPair, (*arguments, self.device, self.home)

    @cached_property
    def _reading(self) -> Lock:
        return Lock()

    @cached_property
    def _sources(self) -> tuple[TensorSource, TensorSource]:
        return self._source(self.anchor), self._source(self.donor)

    def _source(self, source: TensorSource) -> TensorSource:
        if self.device is not None:
            source = as_tensors(source).to(self.device)
        if self.folded:
            source = folded_tensors(self.architecture, source, self.folded)
        return as_tensors(source).cached() if self.cached else source

    @cached_property
    def _ready(self) -> dict[str, dict[str, Tensor]]:
        """The anchor's block that was read for its size, kept for its turn."""
        inner = [block for block in self.architecture.blocks if block.index is not None]
        return {block.name: read_block(block, self._sources[0]) for block in inner[:1]}

    @cached_property
    def _weights(self) -> tuple[int, bool]:
        """The number of weights in a block, and whether they are on an accelerator."""
        tensors = [tensor for block in self._ready.values() for tensor in block.values()]
        return sum(t.numel() for t in tensors), any(t.device.type != "cpu" for t in tensors)

    @cached_property
    def spans(self) -> frozenset[str]:
        """Spaces that span several layers, by their names in the first layer."""
        return matched_spans(self.architecture, self.options)

    def is_plain(self, block: Block) -> bool:
        """Whether a block gives the same stream statistics in every pass.

        Such a block is outside of layers, has no matched space, and no tensor between two streams.
        """
        if block.index is not None or wanted_spaces(block, self.options.at(self.architecture, block)):
            return False
        sides = (sum(any(p.space.kind == "stream" for p in axis.parts) for axis in i.axes) for i in block.tensors)
        return max(sides, default=0) <= 1

    def is_lead(self, block: Block) -> bool:
        """Whether a block is the first layer of a moving span: it is matched before the others."""
        return not self.spans.isdisjoint(space.name for space in block.spaces.values())

    def leads(self, block: Block, match: BlockMatch) -> dict[str, HeadTransform]:
        """The elements of the moving spans that begin at a block."""
        led_spans = self.spans & {space.name for space in block.spaces.values()}
        return {name: element for name in led_spans if isinstance(element := match.transforms[name], HeadTransform)}

    @property
    def at_once(self) -> int:
        """The number of blocks matched at once; 0 on an accelerator, which one block keeps busy."""
        return 0 if self._weights[1] else workers_for(max(self.size // BYTES_A_WEIGHT, 1))

    @property
    def size(self) -> int:
        return (BYTES_FOLDED if self.folded else BYTES_A_WEIGHT) * self._weights[0]

    def on(self, device: str, home: str) -> ModelPair:
        return replace(self, device=device, home=home)

    def piece(self, step: StepWithLeads, item: int) -> StepResult:
        """A step on the block of a number."""
        block = self.architecture.blocks[item]
        if self.is_plain(block):
            return self._brought(StepResult(step.step.plain(self, block, self._slices(block)), {}))
        first, second = self._sources
        with self._reading:
            anchor = self._ready.pop(block.name, None) or read_block(block, first)
            donor = read_block(block, second)
        check_finite(block, anchor, "anchor")
        check_finite(block, donor, "donor")
        matched = {space.name for space in wanted_spaces(block, self.options.at(self.architecture, block))}
        leads: dict[str, HeadTransform] = {}

        def match(first: Tensors, second: Tensors, options: AlignConfig, streams: Transforms) -> BlockMatch:
            led_spans = self.spans & {space.name for space in block.spaces.values()}
            block_match = match_block(
                block, first, second, options, streams, {**dict.fromkeys(led_spans), **step.leads}
            )
            leads.update(self.leads(block, block_match))
            return block_match

        anchor, donor = (
            dict(without_hidden_biases(block, anchor, matched)),
            dict(without_hidden_biases(block, donor, matched)),
        )
        return self._brought(StepResult(step.step(self, block, anchor, donor, match), leads))

    def _brought(self, result: StepResult) -> StepResult:
        return result if self.home is None else result.to(torch.device(self.home))

    def _slices(self, block: Block) -> Iterator[tuple[Tensors, Tensors]]:
        """The tensors of a plain block."""
        with self._reading:
            stored = [self._stored(block, source) for source in (self.anchor, self.donor)]
        long = {info.key: sliced for info in block.tensors if (sliced := _long(info, stored))}
        short = [info for info in block.tensors if info.key not in long]
        axes = vocabulary_axes(block.tensors)
        for infos, rows in [(short, None), *(([i], rows) for i in block.tensors for rows in long.get(i.key, ()))]:
            part = replace(block, tensors=tuple(infos))
            sources: list[TensorSource] = [*stored]
            if rows is not None:
                sources = [with_rows(source, axes, rows) for source in stored]
            if self.folded:
                sources = [folded_tensors(self.architecture, source, self.folded) for source in sources]
            anchor, donor = (read_block(part, source) for source in sources)
            check_finite(part, anchor, "anchor")
            check_finite(part, donor, "donor")
            yield anchor, donor

    def _stored(self, block: Block, source: TensorSource) -> dict[str, Tensor]:
        """A block's stored tensors by name."""
        return stored_tensors(block, source if self.device is None else as_tensors(source).to(self.device))


def _long(info: TensorInfo, stored: Sequence[Mapping[str, Tensor]]) -> list[slice]:
    """The vocabulary slices of a large tensor."""
    known = [tensor for tensors in stored if (tensor := read_tensor(info, tensors)) is not None]
    return vocabulary_slices(info, known) if len(known) == 2 else []


@dataclass(frozen=True)
class BlockMeasurement:
    """Statistics of the streams from the tensors of a block."""

    tensors: tuple[TensorMeasurement, ...]

    def to(self, device: torch.device) -> BlockMeasurement:
        return BlockMeasurement(tuple(tensor.to(device) for tensor in self.tensors))

    @classmethod
    def of(cls, block: Block, parts: Slices, transforms: Transforms, precise: bool) -> BlockMeasurement:
        tensors: dict[str, TensorMeasurement] = {}
        for anchor, donor in parts:
            for info, a, b in compared(block, anchor, donor):
                measurement = measured(info, a, b, transforms, precise)
                tensors[info.key] = tensors[info.key].plus(measurement) if info.key in tensors else measurement
        return cls(tuple(tensor.centred() for tensor in tensors.values()))


@dataclass(frozen=True)
class Ends:
    """Statistics of the streams from embeddings and heads alone.

    Attributes:
        transforms: of the streams.
        precise: for models that nearly agree already.
    """

    transforms: Transforms
    precise: bool = False

    def __call__(
        self, both: ModelPair, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], match: Match
    ) -> StreamStatistics:
        statistics = StreamStatistics(both.architecture, equal=True)
        statistics.add(block, anchor, donor, self.transforms)
        return statistics

    def plain(self, both: ModelPair, block: Block, parts: Slices) -> BlockMeasurement:
        return BlockMeasurement.of(block, parts, self.transforms, self.precise)


@dataclass(frozen=True)
class MatchingPass:
    """Match all local spaces under the stream transforms, and sum the streams' statistics and the objective.

    Attributes:
        transforms: of the streams.
        weights: of tensors by name, for the local spaces; one not named counts as it stands.
        precise: for models that nearly agree already.
    """

    transforms: Transforms
    weights: Mapping[str, float]
    precise: bool = False

    def __call__(
        self, both: ModelPair, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], match: Match
    ) -> StreamStatistics:
        maps, statistics = dict(self.transforms), StreamStatistics(both.architecture)
        if wanted_spaces(block, options := both.options.at(both.architecture, block)):
            exact = [self._weigh(block, tensors) for tensors in (anchor, donor)]
            maps |= match(anchor, donor, options, self.transforms).transforms
            anchor.update(exact[0])
            donor.update(exact[1])
        statistics.add(block, anchor, donor, maps, self.precise)
        scaled = {info.name for info in block.tensors if maps.keys() != self.transforms.keys() and not info.offset}
        statistics.weights = {
            n: w * self.weights.get(n, 1.0) if n in scaled else w for n, w in statistics.weights.items()
        }
        return statistics

    def plain(self, both: ModelPair, block: Block, parts: Slices) -> StreamStatistics:
        statistics = StreamStatistics(both.architecture)
        for tensor in BlockMeasurement.of(block, parts, self.transforms, self.precise).tensors:
            statistics.count(tensor, self.transforms)
        return statistics

    def _weigh(self, block: Block, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply a model's tensors by the roots of their weights, in place, for weighted distances.

        Returns the tensors whose stream statistics are not invariant under scale, without weights.
        """
        unweighted = {}
        for info in block.tensors:
            if info.name in self.weights and info.key in tensors:
                x = tensors[info.key]
                unweighted.update({info.key: x} if info.offset else {})
                wide = at_least_float32(x)
                tensors[info.key] = wide * self.weights[info.name] ** 0.5
        return unweighted


@dataclass(frozen=True)
class FinalPass:
    """Match the local spaces without weights under the stream transforms; None if nothing is matched."""

    streams: Transforms

    def __call__(
        self, both: ModelPair, block: Block, anchor: dict[str, Tensor], donor: dict[str, Tensor], match: Match
    ) -> FinalMatch | None:
        options = both.options.at(both.architecture, block)
        if not self.streams:
            return FinalMatch(match(anchor, donor, options, {})) if wanted_spaces(block, options) else None
        apart, norm = squared_distances(block, None, anchor, donor, {})
        for info in block.tensors:  # turned once, not for every look at it
            if info.key in donor:
                donor[info.key] = transform_tensor(donor[info.key], info, self.streams)
        block_match = match(anchor, donor, options, {})
        return FinalMatch(
            block_match, apart, squared_distances(block, None, anchor, donor, block_match.transforms)[0], norm
        )

    def plain(self, both: ModelPair, block: Block, parts: Slices) -> FinalMatch | None:
        if not self.streams:
            return None
        apart = after = norm = 0.0
        for anchor, donor in parts:
            before, block_norm = squared_distances(block, None, anchor, donor, {})
            apart, norm = apart + before, norm + block_norm
            after += squared_distances(block, None, anchor, donor, self.streams)[0]
        return FinalMatch(BlockMatch({}, []), apart, after, norm)


@dataclass(frozen=True)
class FinalMatch:
    """A block's match, with squared distances before and after and the anchor's squared norm if streams move."""

    match: BlockMatch
    before: float = 0.0
    after: float = 0.0
    norm: float = 0.0

    def to(self, device: torch.device) -> FinalMatch:
        return replace(self, match=self.match.to(device))
