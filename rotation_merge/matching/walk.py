"""One way through both models, block by block, and the last, local matching."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.files.ledger import NOWHERE, Ledger
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.both import Final, FinalMatch, ModelPair, Step, StepResult, StepWithLeads, Transforms
from rotation_merge.matching.packed import entry_of, match_of
from rotation_merge.model.source import Progress
from rotation_merge.symmetry import HeadTransform
from rotation_merge.workers.pieces import Over

SAMPLE = 4
"""Layers that starts are compared on in deep models."""
PARTS = 4
"""Layers are looked at in so many parts, after each of which the streams are solved for."""


@dataclass(frozen=True)
class Walk:
    """Passes of residual matching and the last look are ways through both models.

    Attributes:
        streams: the group of each stream that is to move.
        over: who matches blocks.
        ledger: where what is found is kept.
    """

    both: ModelPair
    progress: Progress
    streams: dict[str, str]
    over: Over
    ledger: Ledger = NOWHERE

    @property
    def architecture(self) -> Architecture:
        return self.both.architecture

    @cached_property
    def plain(self) -> list[int]:
        """Numbers of the blocks whose statistics neither local spaces nor stream maps change (`ModelPair.is_plain`)."""
        return [number for number, block in enumerate(self.architecture.blocks) if self.both.is_plain(block)]

    @cached_property
    def parts(self) -> list[list[int]]:
        """Numbers of all other blocks: layers, evenly spread over the parts. What stands outside of layers, and the
        first layers of spans that move, belong to the first part."""
        blocks = self.architecture.blocks
        inner_blocks = [number for number in range(len(blocks)) if number not in self.plain]
        first = [number for number in inner_blocks if blocks[number].index is None or self.both.is_lead(blocks[number])]
        layers = [number for number in inner_blocks if number not in first]
        count = max(1, min(PARTS, len(layers)))
        return [sorted(first * (part == 0) + layers[part::count]) for part in range(count)]

    @cached_property
    def sample(self) -> list[int]:
        """What starts are compared on: all parts, or in deep models some layers, evenly spread."""
        blocks = self.architecture.blocks
        inner = [number for number, block in enumerate(blocks) if block.index is not None]
        sampled = inner
        if len(inner) > 2 * SAMPLE:
            sampled = [inner[len(inner) * (2 * i + 1) // (2 * SAMPLE)] for i in range(SAMPLE)]
        return sorted(n for part in self.parts for n in part if blocks[n].index is None or n in sampled)

    def each(
        self,
        label: str,
        step: Step,
        chosen: Sequence[int],
        leads: dict[str, HeadTransform] | None = None,
        before: int = 0,
        after: int = 0,
        known: Mapping[int, StepResult] = MappingProxyType({}),
    ) -> Iterator[tuple[Block, Any]]:
        """A step on blocks, side by side, in order. The first layers of spans that move come before all others.

        Args:
            chosen: numbers of the blocks.
            leads: what is known of spans; what is found of them is added.
            before, after: how many blocks of the same way come before these, and after.
            known: by number, what an earlier run has found.
        """
        blocks, leads = self.architecture.blocks, {} if leads is None else leads
        done, total = before, before + len(chosen) + after
        if not before:
            self.progress(label, 0, total)
        parts = ([n for n in chosen if self.both.is_lead(blocks[n]) == first] for first in (True, False))
        for part in filter(None, parts):
            pending = [number for number in part if number not in known]
            new = iter(self.over.each(self.both, StepWithLeads(step, dict(leads)), pending) if pending else ())
            for number in part:
                result = known[number] if number in known else next(new)
                leads |= result.leads
                done += 1
                yield blocks[number], result.result
                self.progress(label, done, total)

    def final(self, transforms: Transforms) -> list[tuple[Block, list[SpaceMatch]]]:
        """Match the local spaces once more, unweighted, into `transforms`; record every space, streams included."""
        records = []
        before = after = norm = 0.0
        streams = dict(transforms)
        began = time.perf_counter()
        every = range(len(self.architecture.blocks))
        known = {number: block_match for number in every if (block_match := self._known(number)) is not None}
        for block, block_match in self.each("matching", Final(streams), every, known=known):
            if block_match is None:
                continue
            self._keep(block, block_match)
            transforms.update(block_match.match.transforms)
            records.append((block, block_match.match.records))
            before, norm, after = before + block_match.before, norm + block_match.norm, after + block_match.after
        if self.both.spans:
            places = [block.name for block in self.architecture.blocks]
            records.sort(key=lambda record: places.index(record[0].name))
        for name, transform in streams.items():
            record = SpaceMatch(
                space=name,
                kind="stream",
                group=transform.group(),
                before=before,
                after=after,
                anchor=norm,
                distances=transform.distances(),
                seconds=time.perf_counter() - began,
                notes=["distances of all tensors of the model"],
            )
            records.append((self.architecture.blocks[0], [record]))
        return records

    def _keep(self, block: Block, block_match: FinalMatch) -> None:
        facts = {"before": block_match.before, "after": block_match.after, "norm": block_match.norm}
        self.ledger.keep(block.name, lambda: entry_of(block_match.match, **facts))

    def _known(self, number: int) -> StepResult | None:
        """What an earlier run has found for the last match of a block."""
        block = self.architecture.blocks[number]
        entry = self.ledger.get(block.name)
        if entry is None:
            return None
        block_match = FinalMatch(match_of(entry), *(entry.facts[name] for name in ("before", "after", "norm")))
        return StepResult(block_match, self.both.leads(block, block_match.match))
