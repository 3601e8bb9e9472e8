"""Matching two models: the streams and the local spaces in turn, part by part; then the local spaces without weights.

Layers are visited in a few parts. The local spaces of one part are matched under the streams' maps. Then the streams
are solved again from the new sums of that part and the latest ones of all others (incremental EM: Neal and Hinton,
1998, section 3). These sums bound the objective from above, and every step lowers the bound. So the objective never
rises, and streams converge in fewer passes than with an update after all layers.

What is known after a pass is kept, and every block's last match, so that an interrupted run continues from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from threading import Lock
from typing import Any

import torch

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, checked, match_block, row_of, squared_distances, wanted_spaces
from rotation_merge.matching.matrix_pairs import SpaceMatch
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import (
    FLOOR,
    Piece,
    StreamMeasurement,
    StreamSums,
    Transforms,
    measured,
    residual_groups,
)
from rotation_merge.model.apply import at_least_float32, read_block, transform_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.vocabulary import stored_tensors, vocabulary_axes, vocabulary_slices, with_rows
from rotation_merge.record import SpaceRow
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import BYTES_A_WEIGHT, Progress, Spread, in_threads, workers_for

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
ENDS = "embeddings and heads"
KEPT = "streams"
"""What a ledger calls the state after a pass, and then the result."""
BYTES_FOLDED = 20
"""As `BYTES_A_WEIGHT`, of models that are folded: both are widened. With freed memory in between, pass after pass, a
layer of 8B shape takes 28 at its peak: workers then have 0.7 of what is free."""

PROBED = 1 << 16
"""Bytes of a model that are kept from the question on which device it lies."""

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
        AlignmentError: as of `checked`.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    by_block = {block.name: options.at(architecture, block) for block in architecture.blocks}
    visits = Visits(architecture, anchor, donor, by_block, folded if fold else (), cached=bool(streams))
    matching = _ModelMatching(visits, progress or (lambda *_: None), streams, over, ledger)
    passes = matching.streams_matched(starts) if streams else None
    transforms = passes.maps if passes is not None else {}
    began, model = time.perf_counter(), BlockMatch({}, [])
    for match in matching.last_matches(transforms):
        model = model.plus(match)
    rows = model.rows + stream_rows(architecture, transforms, model, time.perf_counter() - began)
    return Alignment(transforms | model.transforms, folded, rows, {} if passes is None else passes.summary)


def recorded(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Alignment:
    """Add a report's rows to an alignment that was not matched, for example a learned one.

    Each has the distance over the space before and after, with the other transforms applied.
    """
    anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    transforms, model = alignment.transforms, BlockMatch({}, [])
    streams = {name: transform for name, transform in transforms.items() if name in architecture.streams}
    for block in architecture.blocks:
        a, b = (read_block(block, source) for source in (anchor, donor))
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
        home: where sums are brought; None: they stay where they are computed.
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
        return Visits, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def _reading(self) -> Lock:
        return Lock()

    @cached_property
    def _stored(self) -> list[TensorSource]:
        sources = [as_tensors(source) for source in (self.anchor, self.donor)]
        return [(s if self.device is None else s.on(self.device)).cached(PROBED) for s in sources]

    @cached_property
    def _sources(self) -> list[TensorSource]:
        """Both models, folded."""
        sources = [folded_tensors(self.architecture, source, self.folded) for source in self._stored]
        return [as_tensors(source).cached() for source in sources] if self.cached else sources

    @property
    def at_once(self) -> int:
        """The number of blocks matched at once; 0 on an accelerator, which one block keeps busy."""
        layers = [block for block in self.architecture.blocks if block.index is not None]
        shapes = as_tensors(self.anchor).shapes
        sizes = {n: math.prod(shapes[n]) for block in layers[:1] for i in block.tensors for n in i.names if n in shapes}
        smallest = self._stored[0][min(sizes, key=lambda name: sizes[name])] if sizes else None
        if smallest is not None and smallest.device.type != "cpu":
            return 0
        return workers_for(sum(sizes.values()) * (BYTES_FOLDED if self.folded else BYTES_A_WEIGHT) // BYTES_A_WEIGHT)

    def on(self, device: str, home: str) -> Visits:
        return replace(self, device=device, home=home)

    def is_plain(self, block: Block) -> bool:
        """Whether a block says the same of the streams in every pass.

        It is outside of layers, has no matched space, and no tensor between two streams.
        """
        sides = (sum(any(p.space.kind == "stream" for p in axis.parts) for axis in i.axes) for i in block.tensors)
        matched = wanted_spaces(block, self.options[block.name])
        return block.index is None and not matched and max(sides, default=0) <= 1

    def piece(self, step: Callable[[Visits, Block], Any], item: int) -> Any:
        """A step, which is one of the following methods with its arguments, on the block of a number."""
        return step(self, self.architecture.blocks[item])

    def measurements(self, block: Block, streams: Transforms, precise: bool = False) -> list[StreamMeasurement]:
        """What the tensors of a plain block say of the streams, whatever their maps are.

        Args:
            precise: products are summed in float64.
        """
        return [tensor.to(self.home) for tensor in measured(self._pieces(block), streams, precise)]

    def sums(
        self,
        block: Block,
        streams: Transforms,
        weights: Mapping[str, float],
        equal: bool = False,
        precise: bool = False,
    ) -> StreamSums:
        """Match all local spaces under the streams' transforms, and sum what the block says of the streams.

        Tensors have the roots of their weights as factors, in place; not those that are stored without an offset.

        Args:
            weights: of tensors by name, for the local spaces; one not named counts as it stands.
            equal: every tensor has the same say in the sums.
            precise: products are summed in float64.
        """
        ((_, anchor, donor),) = self._pieces(block)
        options = self.options[block.name]
        weighted = [i for i in block.tensors if i.name in weights and not i.offset and wanted_spaces(block, options)]
        factors = {info.key: weights[info.name] for info in weighted}
        for tensors in (anchor, donor):
            for key in factors.keys() & tensors.keys():
                tensors[key] = at_least_float32(tensors[key]) * factors[key] ** 0.5
        maps = streams | match_block(block, anchor, donor, options, streams, with_rows=False).transforms
        sums = StreamSums.of(measured([(block, anchor, donor)], maps, precise), maps, equal)
        applied = {info.name: factors.get(info.key, 1.0) for info in block.tensors}
        of_stored = {name: weight * applied[name] for name, weight in sums.weights.items()}
        return replace(
            sums, weights=of_stored, products={key: x.to(device=self.home) for key, x in sums.products.items()}
        )

    def match(self, block: Block, streams: Transforms) -> BlockMatch:
        """Match the local spaces without weights under the streams' transforms."""
        result, options = BlockMatch({}, []), self.options[block.name]
        matched = wanted_spaces(block, options)
        for part, anchor, donor in self._pieces(block) if streams or matched else ():
            before, norm = squared_distances(part, anchor, donor, {}) if streams else (0.0, 0.0)
            for info in (info for info in part.tensors if info.key in donor):  # turned once, not for every look at it
                donor[info.key] = transform_tensor(donor[info.key], info, streams)
            match = match_block(part, anchor, donor, options) if matched else BlockMatch({}, [])
            after = squared_distances(part, anchor, donor, match.transforms)[0] if streams else 0.0
            result = result.plus(replace(match, whole=(before, after, norm)))
        return result

    def _pieces(self, block: Block) -> Iterator[Piece]:
        """A block with the tensors of both models, checked; of a plain one, long vocabularies in slices."""
        slices = self._slices(block) if self.is_plain(block) else {}
        short = replace(block, tensors=tuple(info for info in block.tensors if info.key not in slices))
        with self._reading:
            whole = [read_block(short, source) for source in self._sources]
            stored = [stored_tensors(block, source) for source in self._stored] if slices else []
        yield short, *checked(short, *whole)
        axes = vocabulary_axes(block.tensors)
        for info in (info for info in block.tensors if info.key in slices):
            part = replace(block, tensors=(info,))
            for rows in slices[info.key]:
                sliced = (with_rows(source, axes, rows) for source in stored)
                folded = (folded_tensors(self.architecture, source, self.folded) for source in sliced)
                yield part, *checked(part, *(read_block(part, source) for source in folded))

    def _slices(self, block: Block) -> dict[str, list[slice]]:
        """The slices of long vocabularies, by the keys of their tensors."""
        result = {}
        for info in block.tensors:
            known = [[s.shapes[n] for n in (*info.names, *info.tied) if n in s] for s in map(as_tensors, self._stored)]
            if all(known) and (slices := vocabulary_slices(info, [shapes[0] for shapes in known])):
                result[info.key] = slices
        return result


@dataclass
class _Passes:
    """The state of the passes.

    Attributes:
        maps: of the streams.
        start, objectives: the start that was chosen (`shared`: the streams of related models are to stay), and what all
            of them were at.
        sums: what is known of the streams by part of the layers.
        history: a bound of the objective after every pass, never rising.
        done: whether the maps are the result.
    """

    maps: Transforms
    start: str
    objectives: dict[str, float]
    sums: dict[int, StreamSums] = field(default_factory=dict)
    history: list[float] = field(default_factory=list)
    done: bool = False

    @property
    def summary(self) -> dict[str, object]:
        """What a report says of them."""
        if self.start == "shared":
            return {"start": "identity", "passes": 0, "objective": [*self.objectives.values()], "shared": True}
        passes = {"start": self.start, "passes": len(self.history), "objective": self.history}
        return {**passes, "starts": self.objectives}


torch.serialization.add_safe_globals([_Passes, StreamSums])  # so that an interrupted run reads them again


@dataclass
class _ModelMatching:
    """The passes over two models.

    Attributes:
        streams: the group of each stream that is to move.
        over: who matches blocks.
        ledger: where what is known is kept.
        known: what plain blocks say of the streams, which is the same in every pass, by whether it is precise.
    """

    visits: Visits
    progress: Progress
    streams: dict[str, str]
    over: Spread
    ledger: Ledger = NOWHERE
    known: dict[bool, list[StreamMeasurement]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.architecture, self.blocks = self.visits.architecture, self.visits.architecture.blocks
        numbers = range(len(self.blocks))
        self.layers = [number for number in numbers if self.blocks[number].index is not None]
        self.plain = [number for number in numbers if self.visits.is_plain(self.blocks[number])]
        self.further = [number for number in numbers if number not in (*self.layers, *self.plain)]

    def each(
        self, label: str, step: Callable[..., Any], chosen: Sequence[int], before: int = 0, total: int = 0
    ) -> Iterator[Any]:
        """Run a step on blocks in parallel; the results, in order.

        Args:
            step: a method of `Visits`, with all its arguments but the block.
            chosen: numbers of the blocks.
            before: how many blocks of the same pass come before these.
            total: how many blocks the pass has; 0: these alone.
        """
        if chosen and not before:
            self.progress(label, 0, total or len(chosen))
        for done, result in enumerate(self.over(self.visits, step, chosen) if chosen else (), before + 1):
            self.progress(label, done, total or len(chosen))
            yield result

    def ends(self, maps: Transforms, precise: bool = False, equal: bool = False) -> StreamSums:
        """The sums of plain blocks, each of which is measured once; arguments as of `Visits.sums`."""
        if precise not in self.known:
            step = partial(Visits.measurements, streams=maps, precise=precise)
            self.known = {precise: [*chain(*self.each(ENDS, step, self.plain))]}
        return StreamSums.of(self.known[precise], maps, equal)

    def sums(self, label: str, chosen: Sequence[int], maps: Transforms, equal: bool = False) -> StreamSums:
        """The sums of plain blocks and of chosen ones without weights; arguments as of `each` and `Visits.sums`."""
        step = partial(Visits.sums, streams=maps, weights={}, equal=equal)
        return StreamSums.total([self.ends(maps, equal=equal), *self.each(label, step, chosen)])

    def streams_matched(self, starts: Mapping[str, Transforms] | None) -> _Passes:
        """Alternate residual and local spaces from the nearest start (in deep models judged on a sample of layers).

        Args:
            starts: by name, instead of the identity and what embeddings and heads say.
        """
        passes: _Passes = self.ledger.get(KEPT) or self._started(starts)
        if not passes.done:
            passes = replace(passes, maps=self._alternated(passes), sums={}, done=True)
        self.ledger.keep(KEPT, lambda: passes)
        return passes

    def _started(self, starts: Mapping[str, Transforms] | None) -> _Passes:
        """The passes' state at the nearest start."""
        still = {s: self.architecture.stream_group(s, g).identity() for s, g in self.streams.items()}
        known, objectives, count = dict(starts or {"identity": still}), dict[str, float](), len(self.layers)
        places = [count * (2 * i + 1) // (2 * SAMPLE) for i in range(SAMPLE)] if count > 2 * SAMPLE else range(count)
        sample = sorted([*self.further, *(self.layers[place] for place in places)])
        for name, start in known.items():
            sums = self.sums(f"residual, from {name}", sample, start)
            objectives[name] = sums.bound(start)
        if starts is None:
            solved = sums.solve(self.architecture, self.streams, still)
            if objectives["identity"] < RELATED and sums.promise(still, solved) < LEAST_PROMISE:
                return _Passes(still, "shared", objectives, done=True)
            start = self.sums(ENDS, self.further, still, equal=True).solve(self.architecture, self.streams, still)
            known[ENDS], objectives[ENDS] = start, self.sums(f"residual, from {ENDS}", sample, start).bound(start)
        best = min(objectives, key=lambda name: objectives[name])
        return _Passes(known[best], best, objectives)

    def _alternated(self, passes: _Passes) -> Transforms:
        """Alternate between streams and local spaces until the gain is small; the best maps of the streams."""
        history, best = passes.history, passes.maps
        while len(history) < MOST_PASSES:
            moved, now = self._pass(passes)
            if history and now > history[-1]:
                break
            history.append(now)
            best = passes.maps
            if now - FLOOR <= EXACT or not moved or _expected(history) < LEAST_GAIN:
                break
            self.ledger.keep(KEPT, lambda: passes, large=True)
        return best

    def _pass(self, passes: _Passes) -> tuple[bool, float]:
        """Visit every part once, and solve the streams after each; whether that has turned one, and the bound.

        Layers are evenly spread over the parts; in the first is what else changes from pass to pass.
        """
        count, every = max(1, min(PARTS, len(self.layers))), len(self.further + self.layers)
        parts = [self.further * (part == 0) + self.layers[part::count] for part in range(count)]
        moved, label, before = False, f"residual, pass {len(passes.history) + 1}", 0
        precise = bool(passes.history) and passes.history[-1] < 2 * FLOOR  # the models nearly agree
        for number, part in enumerate(parts):
            ends = self.ends(passes.maps, precise)
            weights = {name: weight for sums in passes.sums.values() for name, weight in sums.weights.items()}
            step = partial(Visits.sums, streams=passes.maps, weights=weights, precise=precise)
            passes.sums[number] = StreamSums.total(self.each(label, step, part, before, every))
            before += len(part)
            total = StreamSums.total([ends, *passes.sums.values()])
            solved = total.solve(self.architecture, self.streams, passes.maps)
            if total.promise(passes.maps, solved) > EXACT:
                passes.maps, moved = solved, True
        return moved, total.bound(passes.maps)

    def last_matches(self, streams: Transforms) -> Iterator[BlockMatch]:
        """The match of every block without weights, from an earlier run if it is known."""
        known = {number: self.ledger.get(block.name) for number, block in enumerate(self.blocks)}
        pending = [number for number, match in known.items() if match is None]
        fresh = self.each(
            "matching", partial(Visits.match, streams=streams), pending, len(known) - len(pending), len(known)
        )
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
