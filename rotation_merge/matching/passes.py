"""Alternating between the streams and the local spaces of a model, part by part.

Layers are looked at in a few parts. The local spaces of one part are matched under the streams' maps, and the streams
are solved for anew with what that part says now and what all others said last (incremental EM: Neal and Hinton, 1998,
section 3). What is gathered bounds the objective from above, touches it where it was gathered, and is lowered by every
step: it never rises, and streams settle in fewer passes than if they waited for all layers.

After every part it is kept where things stand (`_Run`), so that an interrupted run goes on from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rotation_merge.files.ledger import LedgerEntry
from rotation_merge.matching.both import BlockMeasurement, Ends, MatchingPass, Transforms
from rotation_merge.matching.packed import packed, unpacked
from rotation_merge.matching.stream import FLOOR, StreamStatistics
from rotation_merge.matching.walk import Walk
from rotation_merge.symmetry import HeadTransform

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
    """Alternate residual and local spaces, from the start that is nearest (in deep models: on a sample of layers).

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
    """The result, kept."""
    tensors, kinds = packed(transforms)
    walk.ledger.keep(KEPT, lambda: LedgerEntry({"kinds": kinds, "summary": summary}, tensors))
    return dict(transforms), summary


def _solved(walk: Walk, statistics: StreamStatistics, current: Transforms) -> Transforms:
    """Every stream's best transform; the current one of a stream about which nothing is known."""
    return {name: statistics.solve(name, walk.streams[name]) or current[name] for name in current}


@dataclass
class _Run:
    """Where the passes stand.

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
        """Of tensors, by name."""
        return {name: weight for part in self.parts.values() for name, weight in part.weights.items()}

    def packed(self, precise: bool) -> LedgerEntry:
        """All of it but what is said of plain blocks, which every part asks for anew."""
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
        return LedgerEntry({**facts, "parts": parts, "precise": precise}, tensors)

    @classmethod
    def unpacked(cls, gathering: _Gathering, entry: LedgerEntry) -> _Run:
        """The same again; whether sums are precise is said to who gathers them."""
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
    """Gathers what both models say of the streams.

    Attributes:
        still: streams that stay.
        plain_measurements: what plain blocks say, which is asked for once; `precise`: summed in float64.
    """

    walk: Walk
    still: Transforms
    plain_measurements: tuple[BlockMeasurement, ...] | None = None
    precise: bool = False

    def plain(self, transforms: Transforms, equal: bool = False) -> StreamStatistics:
        """What plain blocks say under maps of the streams."""
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
        """From now on sum in float64: the models nearly agree."""
        if not self.precise:
            self.precise, self.plain_measurements = True, None

    def from_ends(self, transforms: Transforms) -> StreamStatistics:
        """What embeddings and heads alone say, all tensors alike."""
        blocks = self.walk.architecture.blocks
        end_blocks = [n for part in self.walk.parts for n in part if blocks[n].index is None]
        gathered = (
            [statistics for _, statistics in self.walk.each("embeddings and heads", Ends(transforms), end_blocks)]
            if end_blocks
            else []
        )
        return StreamStatistics.of(self.walk.architecture, [self.plain(transforms, equal=True), *gathered])

    def compared(self, name: str, start: Transforms) -> StreamStatistics:
        """What is said under a start, by a sample of layers or by all."""
        gathered = self.walk.each(f"residual, from {name}", MatchingPass(start, {}), self.walk.sample)
        return StreamStatistics.of(
            self.walk.architecture, [self.plain(start), *(statistics for _, statistics in gathered)]
        )

    def part(self, run: _Run, number: int, step: MatchingPass, label: str, leads: dict[str, HeadTransform]) -> None:
        """Ask one part, and the plain blocks, anew."""
        sizes = [len(part) for part in self.walk.parts]
        around = sum(sizes[:number]), sum(sizes[number + 1 :])
        gathered = self.walk.each(label, step, self.walk.parts[number], leads, *around)
        run.parts[number] = StreamStatistics.of(self.walk.architecture, (statistics for _, statistics in gathered))
        run.plain = self.plain(step.transforms)


def _alternate(gathering: _Gathering, run: _Run) -> tuple[Transforms, dict[str, object]]:
    """Streams for the local spaces, local spaces for the streams, until little is to be gained.

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
    """The streams' best transforms; the same where nothing is to be gained."""
    solved = _solved(walk, total, transforms)
    return solved if total.promise(transforms, solved) > _EXACT else transforms


def _expected(history: list[float]) -> float:
    """The fraction by which the next pass is expected to lower the objective above `FLOOR`: gains fall off as they
    did between the last two passes, or not at all as far as is known."""
    excess = [max(value - FLOOR, 0.0) for value in history[-3:]]
    gains = [1 - after / before for before, after in itertools.pairwise(excess)]
    if not gains:
        return 1.0
    return gains[-1] * min(1.0, gains[-1] / gains[0]) if gains[0] else 0.0
