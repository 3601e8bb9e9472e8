"""Matching two models: the streams and the local spaces in turn, part by part; then the local spaces without weights.

Layers are visited in a few parts. The local spaces of one part are matched under the streams' maps. Then the streams
are solved again from the new sums of that part and the latest ones of all others (incremental EM: Neal and Hinton,
1998, section 3). These sums bound the objective from above, and every step lowers the bound. So the objective never
rises, and streams converge in fewer passes than with an update after all layers.

What is known after a pass is kept, and every block's last match, so that an interrupted run continues from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import torch

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, compared, row_of, squared_distances
from rotation_merge.matching.matrix_pairs import SpaceMatch
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import FLOOR, StreamSums, Transforms, residual_groups
from rotation_merge.matching.visit import Step, Visits
from rotation_merge.model.apply import read_block
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource
from rotation_merge.record import SpaceRow
from rotation_merge.run.ledger import NOWHERE, Ledger
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


Match = Callable[..., Alignment]
"""Aligns the second of two sources to the first: takes what `match_model` takes up to `progress`, and a `ledger`."""


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
    matching = _ModelMatching(visits, progress or (lambda *_: None), streams, over, ledger)
    state = matching.streams_matched(starts) if streams else {"maps": {}, "summary": {}}
    transforms: Transforms = dict(state["maps"])
    began, model = time.perf_counter(), BlockMatch({}, [])
    for match in matching.last_matches(transforms):
        model = model.plus(match)
    rows = model.rows + stream_rows(architecture, transforms, model, time.perf_counter() - began)
    return Alignment(transforms | model.transforms, folded, rows, state["summary"])


def recorded(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Alignment:
    """Add a report's rows to an alignment that was not matched, for example a learned one.

    Each has the distance over the space before and after, with the other transforms applied.
    """
    anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    transforms, model = alignment.transforms, BlockMatch({}, [])
    streams = {name: transform for name, transform in transforms.items() if name in architecture.streams}
    for block in architecture.blocks:
        a, b = (compared(block, read_block(block, source)) for source in (anchor, donor))
        rows, whole = [], (0.0, 0.0, 0.0)
        for space in (space for space in block.spaces.values() if space.name in transforms):
            without = {name: t for name, t in transforms.items() if name != space.name}
            before, after = (squared_distances(block, a, b, maps, [space]) for maps in (without, transforms))
            rows.append(row_of(block, space, SpaceMatch(transforms[space.name], (before[0], after[0], after[1]))))
        if streams:
            before, after = (squared_distances(block, a, b, maps) for maps in ({}, transforms))
            whole = before[0], after[0], after[1]
        model = model.plus(BlockMatch({}, rows, whole))
    return replace(alignment, rows=model.rows + stream_rows(architecture, streams, model))


def stream_rows(
    architecture: Architecture, streams: Transforms, model: BlockMatch, seconds: float = 0.0
) -> list[SpaceRow]:
    """A report's rows on the streams: distances are those of all tensors of the model."""
    notes = ["distances of all tensors of the model"]
    matches = {name: SpaceMatch(transform, model.whole, notes) for name, transform in streams.items()}
    first, spaces = architecture.blocks[0], architecture.streams
    return [row_of(first, spaces[name], match, seconds) for name, match in matches.items()]


@dataclass
class _Passes:
    """The state of the passes.

    Attributes:
        transforms: of the streams.
        start, objectives: the start that was chosen, and what all of them were at.
        sums: what is known of the streams by part; -1: from plain blocks.
        history: a bound of the objective after every pass.
    """

    transforms: Transforms
    start: str
    objectives: dict[str, float]
    sums: dict[int, StreamSums] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)


torch.serialization.add_safe_globals([_Passes, StreamSums])  # so that an interrupted run reads them again


@dataclass
class _ModelMatching:
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

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.visits.architecture.blocks

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the layers."""
        return [number for number, block in enumerate(self.blocks) if block.index is not None]

    @cached_property
    def ends(self) -> list[int]:
        """Numbers of all other blocks."""
        return [number for number, block in enumerate(self.blocks) if block.index is None]

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

    def streams_matched(self, starts: Mapping[str, Transforms] | None) -> dict[str, Any]:
        """Alternate residual and local spaces from the nearest start (in deep models judged on a sample of layers).

        Args:
            starts: by name, instead of the identity and what embeddings and heads say.

        Returns:
            The streams' `maps`, and a `summary`, with a bound of the objective after every pass, never rising.
        """
        state = self.ledger.get(KEPT)
        if state is not None and not isinstance(state, _Passes):
            return dict(state)
        passes = state or self._started(starts)
        best = passes.transforms if passes.start == "shared" else self._alternated(passes)
        summary = {"start": passes.start, "passes": len(passes.history), "objective": passes.history}
        summary["starts"] = passes.objectives
        if passes.start == "shared":
            summary = {"start": "identity", "passes": 0, "objective": [*passes.objectives.values()], "shared": True}
        self.ledger.keep(KEPT, lambda: {"maps": best, "summary": summary})
        return {"maps": best, "summary": summary}

    def _started(self, starts: Mapping[str, Transforms] | None) -> _Passes:
        """The passes' state at the nearest start; `shared`: the streams of related models are to stay."""
        architecture, count = self.visits.architecture, len(self.layers)
        still = {s: architecture.stream_group(s, g).identity() for s, g in self.streams.items()}
        places = [count * (2 * i + 1) // (2 * SAMPLE) for i in range(SAMPLE)] if count > 2 * SAMPLE else range(count)
        sample = sorted(self.ends + [self.layers[place] for place in places])
        objectives = dict[str, float]()
        for name, start in (starts or {"identity": still}).items():
            sums = StreamSums.total(self.each(f"residual, from {name}", Step(start, {}), sample))
            objectives[name] = sums.bound(start)
        if starts is None:
            solved = sums.solve(architecture, self.streams, still)
            if objectives["identity"] < RELATED and sums.promise(still, solved) < LEAST_PROMISE:
                return _Passes(still, "shared", objectives)
            ends = StreamSums.total(self.each("embeddings and heads", Step(still, {}, equal=True), self.ends))
            start = ends.solve(architecture, self.streams, still)
            sums = StreamSums.total(self.each("residual, from embeddings and heads", Step(start, {}), sample))
            objectives["embeddings and heads"] = sums.bound(start)
            starts = {"identity": still, "embeddings and heads": start}
        best = min(objectives, key=lambda name: objectives[name])
        return _Passes(starts[best], best, objectives)

    def _alternated(self, passes: _Passes) -> Transforms:
        """Alternate between streams and local spaces until the gain is small; the best maps of the streams."""
        history, best = passes.history, passes.transforms
        while len(history) < MOST_PASSES:
            moved = self._pass(passes)
            now = StreamSums.total(passes.sums.values()).bound(passes.transforms)
            if history and now > history[-1]:
                break
            history.append(now)
            best = passes.transforms
            if now - FLOOR <= EXACT or not moved or _expected(history) < LEAST_GAIN:
                break
            self.ledger.keep(KEPT, lambda: passes, large=True)
        return best

    def _pass(self, passes: _Passes) -> bool:
        """Visit every part once, and solve the streams after each; whether that has turned one.

        Layers are evenly spread over the parts; in the first is what else changes from pass to pass. Blocks that are
        measured once (`Visits.is_plain`) are weighed anew with every part.
        """
        plain = [number for number in self.ends if self.visits.is_plain(self.blocks[number])]
        count, further = max(1, min(PARTS, len(self.layers))), [n for n in self.ends if n not in plain]
        parts = [further * (part == 0) + self.layers[part::count] for part in range(count)]
        moved, label, before = False, f"residual, pass {len(passes.history) + 1}", 0
        precise = bool(passes.history) and passes.history[-1] < 2 * FLOOR  # the models nearly agree
        for number, part in enumerate(parts):
            weights = {name: weight for sums in passes.sums.values() for name, weight in sums.weights.items()}
            step = Step(passes.transforms, weights, precise=precise)
            visited = self.each(label, step, plain + part, before, sum(len(plain + part) for part in parts))
            passes.sums[-1] = StreamSums.total(islice(visited, len(plain)))
            passes.sums[number] = StreamSums.total(visited)
            before += len(plain + part)
            total = StreamSums.total(passes.sums.values())
            solved = total.solve(self.visits.architecture, self.streams, passes.transforms)
            if total.promise(passes.transforms, solved) > EXACT:
                passes.transforms, moved = solved, True
        return moved

    def last_matches(self, streams: Transforms) -> Iterator[BlockMatch]:
        """The match of every block without weights, from an earlier run if it is known."""
        known = {number: self.ledger.get(block.name) for number, block in enumerate(self.blocks)}
        pending = [number for number, match in known.items() if match is None]
        fresh = self.each("matching", Step(streams), pending, len(known) - len(pending), len(known))
        for number, block in enumerate(self.blocks):
            match: BlockMatch = next(fresh) if known[number] is None else known[number]
            if known[number] is None and (match.transforms or any(match.whole)):
                self.ledger.keep(block.name, lambda match=match: match)  # type: ignore[misc]
            yield match


def _expected(history: list[float]) -> float:
    """Expected relative fall of the objective above `FLOOR` in the next pass.

    Gains are assumed to fall off as between the last two passes; with fewer passes, not at all.
    """
    excess = [max(value - FLOOR, 0.0) for value in history[-3:]]
    gains = [1 - after / before for before, after in pairwise(excess)]
    if not gains:
        return 1.0
    return gains[-1] * min(1.0, gains[-1] / gains[0]) if gains[0] else 0.0
