"""Alternating between the streams and the local spaces of a model, part by part.

Layers are looked at in a few parts. The local spaces of one part are matched under the streams' maps, and the streams
are solved for anew with what that part says now and what all others said last (incremental EM: Neal and Hinton, 1998,
section 3). What is gathered bounds the objective from above, touches it where it was gathered, and is lowered by every
step: it never rises, and streams settle in fewer passes than if they waited for all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from rotation_merge.groups import HeadTransform
from rotation_merge.matching.both import Ends, Pass, Seen, Transforms
from rotation_merge.matching.stream import FLOOR, Statistics
from rotation_merge.matching.walk import Walk

MOST_PASSES = 24
LEAST_GAIN = 2e-3
"""Passes over the model stop when the objective is not expected to fall by more than this fraction in the next. Passes
beyond bring the models a little nearer and the merge nothing (benchmarks/residual.md)."""
RELATED = 1.0
"""Objective below which models count as related: in coordinates of their own they would be at 1.6 to 2."""
LEAST_PROMISE = 0.1
"""The stream of related models stays as it is if turning it would take off less than this share of their squared
distance: so much is gained by turning it after the noise of fine-tuning, and merges are none the better for it."""
_EXACT = 1e-12


def match_streams(walk: Walk, starts: Mapping[str, Transforms] | None) -> tuple[Transforms, dict[str, object]]:
    """Alternate residual and local spaces, from the start that is nearest (in deep models: on a sample of layers).

    Args:
        starts: by name, instead of the identity and what embeddings and heads say.

    Returns:
        The streams' maps, and a summary.
    """
    still: Transforms = {s: walk.architecture.stream_group(s, g).identity() for s, g in walk.streams.items()}
    gathering, objectives = _Gathering(walk, still), dict[str, float]()
    if starts is None:
        told = gathering.compared("identity", still)
        objectives["identity"] = told.objective
        if told.objective < RELATED and told.promise(still, _solved(walk, told, still)) < LEAST_PROMISE:
            return still, {"start": "identity", "passes": 0, "objective": [told.objective], "shared": True}
        starts = {"identity": still, "embeddings and heads": _solved(walk, gathering.from_ends(still), still)}
    for name, start in starts.items():
        if name not in objectives:
            objectives[name] = gathering.compared(name, start).objective
    best = min(objectives, key=lambda name: objectives[name])
    transforms, history = _alternate(gathering, dict(starts[best]))
    return transforms, {"start": best, "passes": len(history), "objective": history, "starts": objectives}


def _solved(walk: Walk, statistics: Statistics, current: Transforms) -> Transforms:
    """Every stream's best transform; the current one of a stream about which nothing is known."""
    return {name: statistics.solve(name, walk.streams[name]) or current[name] for name in current}


@dataclass
class _Run:
    """What is known of the streams: of plain blocks, and by part of all others."""

    walk: Walk
    plain: Statistics
    parts: dict[int, Statistics] = field(default_factory=dict)

    @property
    def total(self) -> Statistics:
        return Statistics.of(self.walk.architecture, [self.plain, *self.parts.values()])

    @property
    def weights(self) -> dict[str, float]:
        """Of tensors, by name."""
        return {name: weight for part in self.parts.values() for name, weight in part.weights.items()}


@dataclass
class _Gathering:
    """Gathers what both models say of the streams.

    Attributes:
        still: streams that stay.
        seen: what plain blocks say, which is asked for once; `precise`: summed in float64.
    """

    walk: Walk
    still: Transforms
    seen: tuple[Seen, ...] | None = None
    precise: bool = False

    def plain(self, transforms: Transforms, equal: bool = False) -> Statistics:
        """What plain blocks say under maps of the streams."""
        if self.seen is None:
            step = Ends(self.still, self.precise)
            found = self.walk.each("embeddings and heads", step, self.walk.plain)
            self.seen = tuple(seen for _, seen in found)
        own = Statistics(self.walk.architecture, equal=equal, blocks=len(self.seen))
        for seen in self.seen:
            for tensor in seen.tensors:
                own.count(tensor, transforms)
        return own

    def sharpen(self) -> None:
        """From now on sum in float64: the models nearly agree."""
        if not self.precise:
            self.precise, self.seen = True, None

    def from_ends(self, transforms: Transforms) -> Statistics:
        """What embeddings and heads alone say, all tensors alike."""
        blocks = self.walk.architecture.blocks
        others = [n for part in self.walk.parts for n in part if blocks[n].index is None]
        found = [own for _, own in self.walk.each("embeddings and heads", Ends(transforms), others)] if others else []
        return Statistics.of(self.walk.architecture, [self.plain(transforms, equal=True), *found])

    def compared(self, name: str, start: Transforms) -> Statistics:
        """What is said under a start, by a sample of layers or by all."""
        found = self.walk.each(f"residual, from {name}", Pass(start, {}), self.walk.sample)
        return Statistics.of(self.walk.architecture, [self.plain(start), *(own for _, own in found)])

    def part(self, run: _Run, number: int, step: Pass, what: str, leads: dict[str, HeadTransform]) -> None:
        """Ask one part, and the plain blocks, anew."""
        sizes = [len(part) for part in self.walk.parts]
        around = sum(sizes[:number]), sum(sizes[number + 1 :])
        found = self.walk.each(what, step, self.walk.parts[number], leads, *around)
        run.parts[number] = Statistics.of(self.walk.architecture, (own for _, own in found))
        run.plain = self.plain(step.transforms)


def _alternate(gathering: _Gathering, transforms: Transforms) -> tuple[Transforms, list[float]]:
    """Streams for the local spaces, local spaces for the streams, until little is to be gained.

    Args:
        transforms: of the streams, at the start.

    Returns:
        The best transforms, and a bound of the objective after every pass, never rising.
    """
    walk, history, best = gathering.walk, list[float](), transforms
    run = _Run(walk, gathering.plain(transforms))
    while len(history) < MOST_PASSES:
        before, leads = transforms, dict[str, HeadTransform]()
        for number in range(len(walk.parts)):
            step = Pass(transforms, run.weights, gathering.precise)
            gathering.part(run, number, step, f"residual, pass {len(history) + 1}", leads)
            transforms = _better(walk, run.total, transforms)
        now = run.total.bound(transforms)
        if history and now > history[-1]:
            break
        history.append(now)
        best = transforms
        if now - FLOOR <= _EXACT or transforms is before or _expected(history) < LEAST_GAIN:
            break
        if now - FLOOR < FLOOR:
            gathering.sharpen()
    return best, history


def _better(walk: Walk, total: Statistics, transforms: Transforms) -> Transforms:
    """The streams' best transforms; the same where nothing is to be gained."""
    solved = _solved(walk, total, transforms)
    return solved if total.promise(transforms, solved) > _EXACT else transforms


def _expected(history: list[float]) -> float:
    """The fraction by which the next pass is expected to lower the objective above `FLOOR`: gains fall off as they
    did between the last two passes, or not at all as far as is known."""
    left = [max(value - FLOOR, 0.0) for value in history[-3:]]
    gains = [1 - after / before for before, after in itertools.pairwise(left)]
    if not gains:
        return 1.0
    return gains[-1] * min(1.0, gains[-1] / gains[0]) if gains[0] else 0.0
