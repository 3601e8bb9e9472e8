"""Alternates between the streams and the local spaces of a model, part by part.

Layers are visited in a few parts. The local spaces of one part are matched under the streams' maps. Then the streams
are solved again from the new statistics of that part and the latest ones of all others (incremental EM: Neal and
Hinton, 1998, section 3). These statistics bound the objective from above, and every step lowers the bound. So the
objective never rises, and streams converge in fewer passes than with an update after all layers.

The state is stored after every part (`_Run`), so that an interrupted run continues from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.files import Entry
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.model_pair import (
    BlockMeasurement,
    Ends,
    FinalMatch,
    FinalPass,
    MatchingPass,
    ModelPair,
    Step,
    StepResult,
    StepWithLeads,
    Transforms,
)
from rotation_merge.matching.serialisation import entry_of, match_of, packed, unpacked
from rotation_merge.matching.stream import FLOOR, StreamStatistics
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.symmetry import HeadTransform
from rotation_merge.workers import Progress, Spread

SAMPLE = 4
"""Layers that starts are compared on in deep models."""
PARTS = 4
"""Layers are looked at in so many parts, after each of which the streams are solved for."""


@dataclass(frozen=True)
class Walk:
    """The blocks of both models in order, for passes of residual matching and the final pass.

    Attributes:
        streams: the group of each stream that is to move.
        over: who matches blocks.
        ledger: where what is found is kept.
    """

    both: ModelPair
    progress: Progress
    streams: dict[str, str]
    over: Spread
    ledger: Ledger = NOWHERE

    @property
    def architecture(self) -> Architecture:
        return self.both.architecture

    @cached_property
    def plain(self) -> list[int]:
        """Numbers of the blocks with constant statistics (`ModelPair.is_plain`)."""
        return [number for number, block in enumerate(self.architecture.blocks) if self.both.is_plain(block)]

    @cached_property
    def parts(self) -> list[list[int]]:
        """Numbers of all other blocks, layers evenly spread over the parts.

        Blocks outside of layers, and the first layers of moving spans, belong to the first part.
        """
        blocks = self.architecture.blocks
        inner_blocks = [number for number in range(len(blocks)) if number not in self.plain]
        first = [number for number in inner_blocks if blocks[number].index is None or self.both.is_lead(blocks[number])]
        layers = [number for number in inner_blocks if number not in first]
        count = max(1, min(PARTS, len(layers)))
        return [sorted(first * (part == 0) + layers[part::count]) for part in range(count)]

    @cached_property
    def sample(self) -> list[int]:
        """Parts for comparing starts: all of them, or evenly spread layers in deep models."""
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
        """Run a step on blocks in parallel, in order, the first layers of moving spans before all others.

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
            new = iter(self.over(self.both, StepWithLeads(step, dict(leads)), pending) if pending else ())
            for number in part:
                result = known[number] if number in known else next(new)
                leads |= result.leads
                done += 1
                yield blocks[number], result.result
                self.progress(label, done, total)

    def final(self, transforms: Transforms) -> list[tuple[Block, list[SpaceMatch]]]:
        """Match the local spaces once more without weights into `transforms`, and record every space."""
        records = []
        before = after = norm = 0.0
        streams = dict(transforms)
        began = time.perf_counter()
        every = range(len(self.architecture.blocks))
        known = {number: block_match for number in every if (block_match := self._known(number)) is not None}
        for block, block_match in self.each("matching", FinalPass(streams), every, known=known):
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
        """Return the last match of a block from an earlier run, or None."""
        block = self.architecture.blocks[number]
        entry = self.ledger.get(block.name)
        if entry is None:
            return None
        block_match = FinalMatch(match_of(entry), *(entry.facts[name] for name in ("before", "after", "norm")))
        return StepResult(block_match, self.both.leads(block, block_match.match))


MOST_PASSES = 24
LEAST_GAIN = 2e-3
"""Passes over the model stop when the objective is not expected to fall by more than this fraction in the next. Passes
beyond bring the models a little nearer and the merge nothing."""
RELATED = 1.0
"""Objective below which models count as related: in coordinates of their own they would be at 1.6 to 2."""
LEAST_PROMISE = 0.1
"""The stream of related models stays as it is if turning it would take off less than this share of their squared
distance: so much is gained by turning it after the noise of fine-tuning, and merges are none the better for it."""
_EXACT = 1e-12

KEPT = "streams"
"""What a ledger calls where the passes stand, and then the result."""
_MAPS = ("transforms", "best", "leads")
_FACTS = ("start", "objectives", "history", "number", "moved")


def match_streams(walk: Walk, starts: Mapping[str, Transforms] | None) -> tuple[Transforms, dict[str, object]]:
    """Alternate residual and local spaces from the nearest start (in deep models judged on a sample of layers).

    Args:
        starts: by name, instead of the identity and what embeddings and heads say.

    Returns:
        The streams' maps, and a summary.
    """
    entry = walk.ledger.get(KEPT)
    if entry is not None and "summary" in entry.facts:
        return unpacked(entry.tensors, entry.facts["kinds"]), entry.facts["summary"]
    still: Transforms = {s: walk.architecture.stream_group(s, g).identity() for s, g in walk.streams.items()}
    gathering = _Gathering(walk, still)
    if entry is not None:
        return _alternate(gathering, _Run.unpacked(gathering, entry))
    objectives = dict[str, float]()
    if starts is None:
        statistics = gathering.compared("identity", still)
        objectives["identity"] = statistics.objective
        if (
            statistics.objective < RELATED
            and statistics.promise(still, _solved(walk, statistics, still)) < LEAST_PROMISE
        ):
            summary = {"start": "identity", "passes": 0, "objective": [statistics.objective], "shared": True}
            return _settled(walk, still, summary)
        starts = {"identity": still, "embeddings and heads": _solved(walk, gathering.from_ends(still), still)}
    for name, start in starts.items():
        if name not in objectives:
            objectives[name] = gathering.compared(name, start).objective
    best = min(objectives, key=lambda name: objectives[name])
    run = _Run(walk, starts[best], starts[best], best, objectives)
    _keep(gathering, run)
    return _alternate(gathering, run)


def _settled(walk: Walk, transforms: Transforms, summary: dict[str, object]) -> tuple[Transforms, dict[str, object]]:
    """Store and return the result."""
    tensors, kinds = packed(transforms)
    walk.ledger.keep(KEPT, lambda: Entry({"kinds": kinds, "summary": summary}, tensors))
    return dict(transforms), summary


def _solved(walk: Walk, statistics: StreamStatistics, current: Transforms) -> Transforms:
    """Every stream's best transform; the current one if there are no statistics."""
    return {name: statistics.solve(name, walk.streams[name]) or current[name] for name in current}


@dataclass
class _Run:
    """The state of the passes.

    Attributes:
        transforms: of the streams; `best`: as they were when the pass began.
        start, objectives: the start that was chosen, and what all of them were at.
        parts: what is known of the streams by part; `plain`: of plain blocks.
        history: a bound of the objective after every pass.
        number: of the part that is next; `moved`: whether a part of the pass before it has turned a stream.
        leads: what the pass has found for the first layers of spans.
    """

    walk: Walk
    transforms: Transforms
    best: Transforms
    start: str
    objectives: dict[str, float]
    parts: dict[int, StreamStatistics] = field(default_factory=dict)
    plain: StreamStatistics | None = None
    history: list[float] = field(default_factory=list)
    number: int = 0
    moved: bool = False
    leads: dict[str, HeadTransform] = field(default_factory=dict)

    @property
    def total(self) -> StreamStatistics:
        return StreamStatistics.of(
            self.walk.architecture, [*([self.plain] if self.plain else []), *self.parts.values()]
        )

    @property
    def weights(self) -> dict[str, float]:
        """Weights of tensors, by name."""
        return {name: weight for part in self.parts.values() for name, weight in part.weights.items()}

    def packed(self, precise: bool) -> Entry:
        """The state without the statistics of plain blocks, which every part computes anew."""
        facts: dict[str, Any] = {name: getattr(self, name) for name in _FACTS}
        tensors: dict[str, Tensor] = {}
        for name in _MAPS:
            map_tensors, facts[name] = packed(getattr(self, name))
            tensors |= {f"{name}/{key}": x for key, x in map_tensors.items()}
        packed_parts = {number: part.packed() for number, part in self.parts.items()}
        tensors |= {
            f"{number}/{key}": x
            for number, (part_tensors, _) in packed_parts.items()
            for key, x in part_tensors.items()
        }
        parts = {number: fact for number, (_, fact) in packed_parts.items()}
        return Entry({**facts, "parts": parts, "precise": precise}, tensors)

    @classmethod
    def unpacked(cls, gathering: _Gathering, entry: Entry) -> _Run:
        """Restore the state; the precision of sums is passed on to the gathering."""
        facts, by_name = entry.facts, dict[str, dict[str, Tensor]]()
        for key, tensor in entry.tensors.items():
            name, _, key_in_map = key.partition("/")
            by_name.setdefault(name, {})[key_in_map] = tensor
        architecture = gathering.walk.architecture
        maps: dict[str, Any] = {name: unpacked(by_name.get(name, {}), facts[name]) for name in _MAPS}
        parts = {
            int(n): StreamStatistics.unpacked(architecture, by_name.get(n, {}), part_facts)
            for n, part_facts in facts["parts"].items()
        }
        gathering.precise = facts["precise"]
        return cls(gathering.walk, parts=parts, **maps, **{name: facts[name] for name in _FACTS})


@dataclass
class _Gathering:
    """Sums the statistics of both models on the streams.

    Attributes:
        still: streams that stay.
        plain_measurements: what plain blocks say, which is asked for once; `precise`: summed in float64.
    """

    walk: Walk
    still: Transforms
    plain_measurements: tuple[BlockMeasurement, ...] | None = None
    precise: bool = False

    def plain(self, transforms: Transforms, equal: bool = False) -> StreamStatistics:
        """Statistics from plain blocks under maps of the streams."""
        if self.plain_measurements is None:
            step = Ends(self.still, self.precise)
            measurements = self.walk.each("embeddings and heads", step, self.walk.plain)
            self.plain_measurements = tuple(measurement for _, measurement in measurements)
        statistics = StreamStatistics(self.walk.architecture, equal=equal, blocks=len(self.plain_measurements))
        for measurement in self.plain_measurements:
            for tensor in measurement.tensors:
                statistics.count(tensor, transforms)
        return statistics

    def sharpen(self) -> None:
        """Sum in float64 from now on, for nearly equal models."""
        if not self.precise:
            self.precise, self.plain_measurements = True, None

    def from_ends(self, transforms: Transforms) -> StreamStatistics:
        """Statistics from embeddings and heads alone, all tensors weighted equally."""
        blocks = self.walk.architecture.blocks
        end_blocks = [n for part in self.walk.parts for n in part if blocks[n].index is None]
        gathered = (
            [statistics for _, statistics in self.walk.each("embeddings and heads", Ends(transforms), end_blocks)]
            if end_blocks
            else []
        )
        return StreamStatistics.of(self.walk.architecture, [self.plain(transforms, equal=True), *gathered])

    def compared(self, name: str, start: Transforms) -> StreamStatistics:
        """Statistics under a start, from a sample of layers or from all."""
        gathered = self.walk.each(f"residual, from {name}", MatchingPass(start, {}), self.walk.sample)
        return StreamStatistics.of(
            self.walk.architecture, [self.plain(start), *(statistics for _, statistics in gathered)]
        )

    def part(self, run: _Run, number: int, step: MatchingPass, label: str, leads: dict[str, HeadTransform]) -> None:
        """Compute the statistics of one part, and of the plain blocks, anew."""
        sizes = [len(part) for part in self.walk.parts]
        around = sum(sizes[:number]), sum(sizes[number + 1 :])
        gathered = self.walk.each(label, step, self.walk.parts[number], leads, *around)
        run.parts[number] = StreamStatistics.of(self.walk.architecture, (statistics for _, statistics in gathered))
        run.plain = self.plain(step.transforms)


def _alternate(gathering: _Gathering, run: _Run) -> tuple[Transforms, dict[str, object]]:
    """Alternate between streams and local spaces until the gain is small.

    Args:
        run: at its start, or where an earlier one was interrupted.

    Returns:
        The best transforms, and a summary, with a bound of the objective after every pass, never rising.
    """
    walk, history = gathering.walk, run.history
    while len(history) < MOST_PASSES:
        for number in range(run.number, len(walk.parts)):
            if number > run.number:
                run.number = number
                _keep(gathering, run)
            step = MatchingPass(run.transforms, run.weights, gathering.precise)
            gathering.part(run, number, step, f"residual, pass {len(history) + 1}", run.leads)
            better = _better(walk, run.total, run.transforms)
            run.moved |= better is not run.transforms
            run.transforms = better
        now = run.total.bound(run.transforms)
        if history and now > history[-1]:
            break
        history.append(now)
        run.best = run.transforms
        if now - FLOOR <= _EXACT or not run.moved or _expected(history) < LEAST_GAIN:
            break
        if now - FLOOR < FLOOR:
            gathering.sharpen()
        run.number, run.moved, run.leads = 0, False, {}
        _keep(gathering, run)
    summary = {"start": run.start, "passes": len(history), "objective": history, "starts": run.objectives}
    return _settled(walk, run.best, summary)


def _keep(gathering: _Gathering, run: _Run) -> None:
    run.walk.ledger.keep(KEPT, lambda: run.packed(gathering.precise), large=True)


def _better(walk: Walk, total: StreamStatistics, transforms: Transforms) -> Transforms:
    """The streams' best transforms, or the current ones if nothing is gained."""
    solved = _solved(walk, total, transforms)
    return solved if total.promise(transforms, solved) > _EXACT else transforms


def _expected(history: list[float]) -> float:
    """Expected relative fall of the objective above `FLOOR` in the next pass.

    Gains are assumed to fall off as between the last two passes; with fewer passes, not at all.
    """
    excess = [max(value - FLOOR, 0.0) for value in history[-3:]]
    gains = [1 - after / before for before, after in itertools.pairwise(excess)]
    if not gains:
        return 1.0
    return gains[-1] * min(1.0, gains[-1] / gains[0]) if gains[0] else 0.0
