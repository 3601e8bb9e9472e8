"""Matching two models block by block, as pieces of work (`spread/`): one piece is one block of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block
from rotation_merge.groups import HeadTransform, SpaceTransform
from rotation_merge.matching.biases import settled
from rotation_merge.matching.block import BlockMatch, check_finite, match_block, squared_distances, wanted_spaces
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Tensors
from rotation_merge.matching.sources import OnDevice
from rotation_merge.matching.spanning import whole_spans
from rotation_merge.matching.state import Kept, TensorSource, read_block
from rotation_merge.matching.stream import Statistics
from rotation_merge.spread.threads import BYTES_A_WEIGHT, workers_for

Transforms = dict[str, SpaceTransform]


Match = Callable[[Tensors, Tensors, MatchOptions, Transforms], BlockMatch]
"""`match_block` for one block, with what spans layers."""


class Step(Protocol):
    """What is done to a block of both models."""

    def __call__(self, both: Both, block: Block, anchor: Tensors, donor: Tensors, match: Match) -> Any: ...


@dataclass(frozen=True)
class Led:
    """A step with what has been found for the first layers of spans (`spanning.py`)."""

    step: Step
    leads: Mapping[str, HeadTransform]


@dataclass(frozen=True)
class Found:
    """What a step found, and the elements of the spans whose first layer this block is."""

    result: Any
    leads: dict[str, HeadTransform]

    def to(self, device: torch.device) -> Found:
        leads = {name: lead.to(device) for name, lead in self.leads.items()}
        return Found(None if self.result is None else self.result.to(device), leads)


@dataclass(frozen=True, eq=False)
class Both:
    """Two models, read block by block.

    Attributes:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: as they are stored.
        options: which groups to use.
        folded: streams whose norms are folded as blocks are read.
        kept: whether what fits in memory is kept, as the models are read more than once.
        device: where blocks are brought; None: they stay where they are read.
        home: where what is found is brought.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    options: MatchOptions
    folded: tuple[str, ...] = ()
    kept: bool = False
    device: str | None = None
    home: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        options = self.options.settled(self.architecture)
        given = (self.architecture, self.anchor, self.donor, options, self.folded, self.kept)
        return Both, (*given, self.device, self.home)

    @cached_property
    def _reading(self) -> Lock:
        return Lock()

    @cached_property
    def _sources(self) -> tuple[TensorSource, TensorSource]:
        return self._source(self.anchor), self._source(self.donor)

    def _source(self, source: TensorSource) -> TensorSource:
        if self.device is not None:
            source = OnDevice(source, torch.device(self.device))
        if self.folded:
            source = Folded(self.architecture, source, self.folded)
        return Kept(source) if self.kept else source

    @cached_property
    def _ready(self) -> dict[str, dict[str, Tensor]]:
        """The anchor's block that was read to see how large they are, until its turn comes."""
        inner = [block for block in self.architecture.blocks if block.index is not None]
        return {block.name: read_block(block, self._sources[0]) for block in inner[:1]}

    @cached_property
    def _weights(self) -> tuple[int, bool]:
        """How many weights a block holds, and whether they are on an accelerator."""
        tensors = [tensor for block in self._ready.values() for tensor in block.values()]
        return sum(t.numel() for t in tensors), any(t.device.type != "cpu" for t in tensors)

    @cached_property
    def spans(self) -> frozenset[str]:
        """Spaces that span layers and move in all of them, by the names that they have in the first."""
        return whole_spans(self.architecture, self.options)

    def is_lead(self, block: Block) -> bool:
        """Whether a block is the first layer of a span that moves: it is matched before the others."""
        return not self.spans.isdisjoint(space.name for space in block.spaces.values())

    @property
    def at_once(self) -> int:
        """How many blocks are matched at once; 0 on an accelerator, which one block keeps busy."""
        weights, accelerated = self._weights
        return 0 if accelerated else workers_for(max(weights, 1))

    @property
    def size(self) -> int:
        return BYTES_A_WEIGHT * self._weights[0]

    def on(self, device: str, home: str) -> Both:
        return replace(self, device=device, home=home)

    def piece(self, step: Led, item: int) -> Found:
        """A step on the block of a number."""
        block = self.architecture.blocks[item]
        first, second = self._sources
        with self._reading:
            anchor = self._ready.pop(block.name, None) or read_block(block, first)
            donor = read_block(block, second)
        check_finite(block, anchor, "anchor")
        check_finite(block, donor, "donor")
        matched = {space.name for space in wanted_spaces(block, self.options.at(self.architecture, block))}
        leads: dict[str, HeadTransform] = {}

        def match(first: Tensors, second: Tensors, options: MatchOptions, streams: Transforms) -> BlockMatch:
            here = self.spans & {space.name for space in block.spaces.values()}
            found = match_block(block, first, second, options, streams, {**dict.fromkeys(here), **step.leads})
            leads.update((n, t) for n in here if isinstance(t := found.transforms[n], HeadTransform))
            return found

        anchor, donor = settled(block, anchor, matched), settled(block, donor, matched)
        found = Found(step.step(self, block, anchor, donor, match), leads)
        return found if self.home is None else found.to(torch.device(self.home))


@dataclass(frozen=True)
class Ends:
    """What embeddings and heads alone say about the streams."""

    transforms: Transforms

    def __call__(self, both: Both, block: Block, anchor: Tensors, donor: Tensors, match: Match) -> Statistics:
        own = Statistics(both.architecture, equal=True)
        own.add(block, anchor, donor, self.transforms)
        return own


@dataclass(frozen=True)
class Pass:
    """Match all local spaces under the stream transforms; collect the streams' statistics and the objective.

    Attributes:
        transforms: of the streams.
        weights: of tensors by name, for the local spaces; one not named counts as it stands.
        precise: for models that nearly agree already.
    """

    transforms: Transforms
    weights: Mapping[str, float]
    precise: bool = False

    def __call__(self, both: Both, block: Block, anchor: Tensors, donor: Tensors, match: Match) -> Statistics:
        local: Transforms = {}
        options = both.options.at(both.architecture, block)
        if wanted_spaces(block, options):
            a, b = _weighted(block, anchor, donor, self.weights)
            local = match(a, b, options, self.transforms).transforms
            del a, b
        own = Statistics(both.architecture, precise=self.precise)
        own.add(block, anchor, donor, {**self.transforms, **local})
        return own


@dataclass(frozen=True)
class Final:
    """Match the local spaces, unweighted, under the stream transforms; None where there is nothing to match."""

    streams: Transforms

    def __call__(self, both: Both, block: Block, anchor: Tensors, donor: Tensors, match: Match) -> FinalMatch | None:
        options = both.options.at(both.architecture, block)
        if not self.streams and not wanted_spaces(block, options):
            return None
        own = match(anchor, donor, options, self.streams)
        if not self.streams:
            return FinalMatch(own)
        maps = {**self.streams, **own.transforms}
        apart, norm = squared_distances(block, None, anchor, donor, {})
        return FinalMatch(own, apart, squared_distances(block, None, anchor, donor, maps)[0], norm)


@dataclass(frozen=True)
class FinalMatch:
    """A block's match; where streams move, the squared distance of all its tensors before and after, and the squared
    norm of the anchor's."""

    match: BlockMatch
    before: float = 0.0
    after: float = 0.0
    norm: float = 0.0

    def to(self, device: torch.device) -> FinalMatch:
        return replace(self, match=self.match.to(device))


def _weighted(
    block: Block, anchor: Tensors, donor: Tensors, weights: Mapping[str, float]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both models' tensors times the root of their weights, so that squared distances count by them."""
    factors = {info.key: weights[info.name] ** 0.5 for info in block.tensors if info.name in weights}
    first, second = (
        {key: x.float() * factors[key] if key in factors else x for key, x in tensors.items()}
        for tensors in (anchor, donor)
    )
    return first, second
