"""Matching two models: the streams and the local spaces in turn, part by part; then the local spaces without weights.

Layers are visited in a few parts. The local spaces of one part are matched under the streams' maps. Then the streams
are solved again from the new sums of that part and the latest ones of all others (incremental EM: Neal and Hinton,
1998, section 3). These sums bound the objective from above, and every step lowers the bound. So the objective never
rises, and streams converge in fewer passes than with an update after all layers.

What is known after a pass is kept, and every block's last match, so that an interrupted run continues from there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, row_of, squared_distances
from rotation_merge.matching.matrix_pairs import SpaceMatch
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import FLOOR, StreamMeasurement, StreamSums, Transforms, residual_groups
from rotation_merge.matching.visit import FINAL, MEASURE, PASS, Step, Visits
from rotation_merge.model.apply import read_block
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource
from rotation_merge.record import SpaceRow
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.symmetry.transform import packed, unpacked
from rotation_merge.workers import Progress, Spread, in_threads

SAMPLE = 4
"""Layers that starts are compared on in deep models."""
PARTS = 4
"""Layers are looked at in so many parts, after each of which the streams are solved for."""
MOST_PASSES = 24
LEAST_GAIN = 2e-3
"""Passes over the model stop when the objective is not expected to fall by more than this fraction in the next. Passes
beyond bring the models a little nearer and the merge nothing."""
RELATED = 1.0
"""Objective below which models count as related: in coordinates of their own they would be at 1.6 to 2."""
LEAST_PROMISE = 0.1
"""The stream of related models stays as it is if turning it would take off less than this share of their squared
distance: so much is gained by turning it after the noise of fine-tuning, and merges are none the better for it."""
EXACT = 1e-12
"""Promised share of the distance, or objective beyond the floor, that counts as nothing."""
KEPT = "streams"
"""What a ledger calls the state after a pass, and then the result."""


class Match(Protocol):
    """A function that aligns the second of two sources to the first, such as `match_model`."""

    def __call__(
        self,
        architecture: Architecture,
        anchor: TensorSource,
        donor: TensorSource,
        options: AlignConfig,
        progress: Progress | None = None,
        *,
        ledger: Ledger = NOWHERE,
    ) -> Alignment: ...


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: AlignConfig,
    progress: Progress | None = None,
    starts: Mapping[str, Transforms] | None = None,
    fold: bool = True,
    over: Spread = in_threads,
    ledger: Ledger = NOWHERE,
) -> Alignment:
    """Match every space that `options` ask for, with one block of each model in memory at a time.

    Tensors of a model that is read more than once may be cached.

    Args:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: the models as they are stored (folding, where needed, is done here).
        options: which groups to use.
        progress: told about every block.
        starts: residual transforms to start from, by name of the start, instead of the identity and what
            embeddings and heads say.
        fold: False where both sources are folded already.
        over: who matches the blocks; for others than this process the sources can be pickled.
        ledger: store of intermediate results, to resume from.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
        AlignmentError: a tensor holds NaN or infinity.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    by_block = {block.name: options.at(architecture, block) for block in architecture.blocks}
    visits = Visits(architecture, anchor, donor, by_block, folded if fold else (), cached=bool(streams))
    matching = ModelMatching(visits, progress or (lambda *_: None), streams, over, ledger)
    transforms, summary = matching.streams_matched(starts) if streams else ({}, {})
    rows = matching.final(transforms)
    return Alignment(transforms, folded, rows, summary)


def recorded(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Alignment:
    """Add a report's rows to an alignment that was not matched, for example a learned one.

    Each has the distance over the space before and after, with the other transforms applied.
    """
    anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    transforms = alignment.transforms
    moved = [space for name, space in architecture.streams.items() if name in transforms]
    rows, whole = [], [0.0, 0.0, 0.0]
    for block in architecture.blocks:
        a, b = (without_hidden_biases(block, read_block(block, source), transforms) for source in (anchor, donor))
        for space in (space for space in block.spaces.values() if space.name in transforms):
            without = {name: t for name, t in transforms.items() if name != space.name}
            before, after = (squared_distances(block, a, b, maps, [space]) for maps in (without, transforms))
            rows.append(row_of(block, space, SpaceMatch(transforms[space.name], (before[0], *after))))
        if moved:
            before, after = (squared_distances(block, a, b, maps) for maps in ({}, transforms))
            whole = [total + part for total, part in zip(whole, (before[0], *after), strict=True)]
    rows += [
        row_of(architecture.blocks[0], space, SpaceMatch(transforms[space.name], (whole[0], whole[1], whole[2])))
        for space in moved
    ]
    return replace(alignment, rows=rows)


@dataclass
class ModelMatching:
    """The passes over two models.

    Attributes:
        streams: the group of each stream that is to move.
        over: who matches blocks.
        ledger: where what is known is kept.
    """

    visits: Visits
    progress: Progress
    streams: dict[str, str]
    over: Spread
    ledger: Ledger = NOWHERE
    precise: bool = False
    _plain: tuple[StreamMeasurement, ...] | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.visits.architecture.blocks

    @cached_property
    def plain(self) -> list[int]:
        """Numbers of the blocks with constant measurements (`Visits.is_plain`)."""
        return [number for number, block in enumerate(self.blocks) if self.visits.is_plain(block)]

    @cached_property
    def parts(self) -> list[list[int]]:
        """Numbers of all other blocks: layers evenly spread over the parts, those outside of layers in the first."""
        visited = [number for number in range(len(self.blocks)) if number not in self.plain]
        layers = [number for number in visited if self.blocks[number].index is not None]
        ends = [number for number in visited if number not in layers]
        count = max(1, min(PARTS, len(layers)))
        return [sorted(ends * (part == 0) + layers[part::count]) for part in range(count)]

    @cached_property
    def sample(self) -> list[int]:
        """Numbers of the blocks that starts are compared on: all of them, or evenly spread layers in deep models."""
        layers = [number for number, block in enumerate(self.blocks) if block.index is not None]
        sampled = layers
        if len(layers) > 2 * SAMPLE:
            sampled = [layers[len(layers) * (2 * i + 1) // (2 * SAMPLE)] for i in range(SAMPLE)]
        return sorted(n for part in self.parts for n in part if self.blocks[n].index is None or n in sampled)

    def each(self, label: str, step: Step, chosen: Sequence[int], before: int = 0, total: int = 0) -> Iterator[Any]:
        """Run a step on blocks in parallel; the results, in order.

        Args:
            chosen: numbers of the blocks.
            before: how many blocks of the same pass come before these.
            total: how many blocks the pass has; 0: these alone.
        """
        total = total or len(chosen)
        if not before:
            self.progress(label, 0, total)
        for done, result in enumerate(self.over(self.visits, step, chosen) if chosen else (), before + 1):
            self.progress(label, done, total)
            yield result

    # The streams.

    def streams_matched(self, starts: Mapping[str, Transforms] | None) -> tuple[Transforms, dict[str, Any]]:
        """Alternate residual and local spaces from the nearest start (in deep models judged on a sample of layers).

        Args:
            starts: by name, instead of the identity and what embeddings and heads say.

        Returns:
            The streams' maps, and a summary, with a bound of the objective after every pass, never rising.
        """
        part = self.ledger.get(KEPT)
        if part is not None and "summary" in part:
            return unpacked(*part["maps"]), part["summary"]
        if part is not None:
            self.precise = part["precise"]
            return self._alternated(Passes.unpacked(part))
        still = {s: self.visits.architecture.stream_group(s, g).identity() for s, g in self.streams.items()}
        objectives = dict[str, float]()
        if starts is None:
            sums = self._compared("identity", still)
            objectives["identity"] = sums.objective
            if sums.objective < RELATED and sums.promise(still, self._solved(sums, still)) < LEAST_PROMISE:
                summary = {"start": "identity", "passes": 0, "objective": [sums.objective], "shared": True}
                return self._kept(still, summary)
            starts = {"identity": still, "embeddings and heads": self._solved(self._ends(still), still)}
        for name, start in starts.items():
            if name not in objectives:
                objectives[name] = self._compared(name, start).objective
        best = min(objectives, key=lambda name: objectives[name])
        return self._alternated(Passes(starts[best], best, objectives))

    def _solved(self, sums: StreamSums, current: Transforms) -> Transforms:
        return sums.solve(self.visits.architecture, self.streams, current)

    def _kept(self, transforms: Transforms, summary: dict[str, Any]) -> tuple[Transforms, dict[str, Any]]:
        """Keep and return the result."""
        self.ledger.keep(KEPT, lambda: {"maps": packed(transforms), "summary": summary})
        return dict(transforms), summary

    def _measured(self, transforms: Transforms, equal: bool = False) -> StreamSums:
        """What plain blocks say under maps of the streams; they are read once."""
        if self._plain is None:
            step = Step(MEASURE, transforms, precise=self.precise)
            visited = self.each("embeddings and heads", step, self.plain)
            self._plain = tuple(tensor for tensors in visited for tensor in tensors)
        sums = StreamSums(equal)
        for tensor in self._plain:
            sums.count(tensor, transforms)
        return sums

    def _ends(self, transforms: Transforms) -> StreamSums:
        """What embeddings and heads say alone, all tensors weighted equally."""
        chosen = [number for part in self.parts for number in part if self.blocks[number].index is None]
        sums = StreamSums(equal=True)
        for tensors in self.each("embeddings and heads", Step(MEASURE, transforms), chosen):
            for tensor in tensors:
                sums.count(tensor, transforms)
        return StreamSums.of([self._measured(transforms, equal=True), sums])

    def _compared(self, name: str, start: Transforms) -> StreamSums:
        """What is known under a start, from a sample of layers or from all."""
        visited = self.each(f"residual, from {name}", Step(PASS, start), self.sample)
        return StreamSums.of([self._measured(start), *visited])

    def _alternated(self, passes: Passes) -> tuple[Transforms, dict[str, Any]]:
        """Alternate between streams and local spaces until the gain is small."""
        history = passes.history
        best = passes.transforms
        while len(history) < MOST_PASSES:
            moved = self._pass(passes)
            now = passes.total.bound(passes.transforms)
            if history and now > history[-1]:
                break
            history.append(now)
            best = passes.transforms
            if now - FLOOR <= EXACT or not moved or _expected(history) < LEAST_GAIN:
                break
            if now - FLOOR < FLOOR and not self.precise:
                self.precise, self._plain = True, None  # nearly equal models: sum in float64 from now on
            self.ledger.keep(KEPT, lambda: {**passes.packed(), "precise": self.precise}, large=True)
        summary = {"start": passes.start, "passes": len(history), "objective": history, "starts": passes.objectives}
        return self._kept(best, summary)

    def _pass(self, passes: Passes) -> bool:
        """Visit every part once, and solve the streams after each; whether that has turned one."""
        moved, label = False, f"residual, pass {len(passes.history) + 1}"
        sizes = [len(part) for part in self.parts]
        for number, part in enumerate(self.parts):
            step = Step(PASS, passes.transforms, passes.weights, self.precise)
            visited = self.each(label, step, part, sum(sizes[:number]), sum(sizes))
            passes.sums[number] = StreamSums.of(visited)
            passes.plain = self._measured(passes.transforms)
            total = passes.total
            solved = self._solved(total, passes.transforms)
            if total.promise(passes.transforms, solved) > EXACT:
                passes.transforms, moved = solved, True
        return moved

    # The local spaces.

    def final(self, transforms: Transforms) -> list[SpaceRow]:
        """Match the local spaces once more without weights into `transforms`; the report's rows on every space."""
        rows, streams, began = list[SpaceRow](), dict(transforms), time.perf_counter()
        sums = [0.0, 0.0, 0.0]
        for match in self._final_matches(streams):
            transforms.update(match.transforms)
            rows += match.rows
            sums = [a + b for a, b in zip(sums, match.whole, strict=True)]
        seconds, notes = time.perf_counter() - began, ["distances of all tensors of the model"]
        spaces, squares = self.visits.architecture.streams, (sums[0], sums[1], sums[2])
        whole = {name: SpaceMatch(transform, squares, notes) for name, transform in streams.items()}
        rows += [row_of(self.blocks[0], spaces[name], match, seconds) for name, match in whole.items()]
        return rows

    def _final_matches(self, streams: Transforms) -> Iterator[BlockMatch]:
        """The last match of every block, from an earlier run if it is known."""
        known = {number: self.ledger.get(block.name) for number, block in enumerate(self.blocks)}
        pending = [number for number, part in known.items() if part is None]
        fresh = self.each("matching", Step(FINAL, streams), pending, len(known) - len(pending), len(known))
        for number, block in enumerate(self.blocks):
            match: BlockMatch = next(fresh) if (part := known[number]) is None else BlockMatch.of_part(part)
            if part is None and (match.transforms or any(match.whole)):
                self.ledger.keep(block.name, match.part)
            yield match


@dataclass
class Passes:
    """The state of the passes.

    Attributes:
        transforms: of the streams.
        start, objectives: the start that was chosen, and what all of them were at.
        sums: what is known of the streams by part; `plain`: of plain blocks.
        history: a bound of the objective after every pass.
    """

    transforms: Transforms
    start: str
    objectives: dict[str, float]
    sums: dict[int, StreamSums] = field(default_factory=dict)
    plain: StreamSums = field(default_factory=StreamSums)
    history: list[float] = field(default_factory=list)

    @property
    def total(self) -> StreamSums:
        return StreamSums.of([self.plain, *self.sums.values()])

    @property
    def weights(self) -> dict[str, float]:
        """Weights of tensors, by name."""
        return {name: weight for part in self.sums.values() for name, weight in part.weights.items()}

    def packed(self) -> dict[str, Any]:
        """The state without the sums of plain blocks, which every part computes anew."""
        sums = {number: vars(part) for number, part in self.sums.items()}
        facts = {"start": self.start, "objectives": self.objectives, "history": self.history}
        return {**facts, "maps": packed(self.transforms), "sums": sums}

    @classmethod
    def unpacked(cls, part: Mapping[str, Any]) -> Passes:
        """The state again."""
        sums = {number: StreamSums(**fields) for number, fields in part["sums"].items()}
        return cls(unpacked(*part["maps"]), part["start"], part["objectives"], sums, history=part["history"])


def _expected(history: list[float]) -> float:
    """Expected relative fall of the objective above `FLOOR` in the next pass.

    Gains are assumed to fall off as between the last two passes; with fewer passes, not at all.
    """
    excess = [max(value - FLOOR, 0.0) for value in history[-3:]]
    gains = [1 - after / before for before, after in itertools.pairwise(excess)]
    if not gains:
        return 1.0
    return gains[-1] * min(1.0, gains[-1] / gains[0]) if gains[0] else 0.0
