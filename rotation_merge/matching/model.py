"""Matching whole models, block by block, on lazily read tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block
from rotation_merge.groups import HeadTransform
from rotation_merge.matching.biases import Aligned
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.both import Both, Ends, Final, Led, Pass, Step, Transforms
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.state import TensorSource, read_tensor, unstack
from rotation_merge.matching.stream import FLOOR, Statistics, residual_groups
from rotation_merge.spread.pieces import HERE, Over

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""

MOST_PASSES = 24
LEAST_GAIN = 3e-3
"""Passes over the model stop when the objective falls by less than this fraction. Passes beyond bring the models a
little nearer and the merge nothing (benchmarks/residual.md)."""
RELATED = 1.0
"""Objective below which models count as related: in coordinates of their own they would be at 1.6 to 2."""
LEAST_PROMISE = 0.1
"""The stream of related models stays as it is if turning it would take off less than this share of their squared
distance: so much is gained by turning it after the noise of fine-tuning, and merges are none the better for it."""
_EXACT = 1e-12
SAMPLE = 4
"""Layers that starts are compared on in deep models."""


@dataclass(frozen=True)
class Alignment:
    """What brings one donor to one anchor.

    Attributes:
        transforms: by space name.
        folded: streams whose norm gains were folded into the readers first (anchor and donor alike), which a
            rotation of the stream needs.
        records: what matching did to each space, block by block.
        summary: iterations, objective and the like, for the report.
        notes: what the user should know.
        samples: where it was matched on samples: what they are called, and how many.
    """

    transforms: Transforms
    folded: tuple[str, ...] = ()
    records: list[tuple[Block, list[SpaceMatch]]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: tuple[str, int] | None = None

    def moves_streams(self, architecture: Architecture) -> bool:
        """Whether what reads a stream and is not moved itself (layers that predict tokens further ahead) would be wrong
        behind it."""
        streams = (self.transforms[name] for name in architecture.streams if name in self.transforms)
        return bool(self.folded) or any(not stream.is_identity() for stream in streams)


Match = Callable[[Architecture, TensorSource, TensorSource, MatchOptions, Progress | None], Alignment]
"""Finds what brings the second of two sources to the first: `match_model`, or what takes its place."""


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: MatchOptions,
    progress: Progress | None = None,
    starts: Mapping[str, Transforms] | None = None,
    fold: bool = True,
    over: Over = HERE,
) -> Alignment:
    """Match every space that `options` ask for; one block of either model is in memory at a time, and what is kept of a
    model that is read more than once (`Kept`).

    Args:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: the models as they are stored (folding, where needed, is done here).
        options: which groups to use.
        progress: told about every block.
        starts: residual transforms to start from, by name of the start, instead of the identity and what
            embeddings and heads say.
        fold: False where both sources are folded already.
        over: who matches the blocks; for others than this process the sources can be pickled.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
        AlignmentError: a tensor holds NaN or infinity.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    both = Both(architecture, anchor, donor, options, folded if fold else (), kept=bool(streams))
    walk = _Walk(both, progress or (lambda *_: None), streams, over)
    found: Transforms = {}
    summary: dict[str, object] = {}
    if streams:
        found, summary = _match_streams(walk, starts)
    records = walk.final(found)
    return Alignment(found, folded, records, summary)


@dataclass
class _Walk:
    """One way through both models, block by block; passes of residual matching and the last, local one.

    Attributes:
        over: who matches blocks.
    """

    both: Both
    progress: Progress
    streams: dict[str, str]
    over: Over

    @property
    def architecture(self) -> Architecture:
        return self.both.architecture

    def each(self, what: str, step: Step, layers: int | None = None) -> Iterator[tuple[Block, Any]]:
        """A step on every block, side by side, in order: on what stands before and after the layers, and on all layers
        or some, evenly spread. The first layers of spans that move come before all others."""
        blocks = self.architecture.blocks
        chosen = list(range(len(blocks)))
        inner = [number for number in chosen if blocks[number].index is not None]
        if layers is not None and len(inner) > 2 * layers:
            kept = {inner[len(inner) * (2 * i + 1) // (2 * layers)] for i in range(layers)}
            chosen = [number for number in chosen if blocks[number].index is None or number in kept]
        self.progress(what, 0, len(chosen))
        done, leads = 0, dict[str, HeadTransform]()
        parts = ([n for n in chosen if self.both.is_lead(blocks[n]) == first] for first in (True, False))
        for part in filter(None, parts):
            for number, found in zip(part, self.over.each(self.both, Led(step, dict(leads)), part), strict=True):
                leads |= found.leads
                done += 1
                yield blocks[number], found.result
                self.progress(what, done, len(chosen))

    def gathered(self, what: str, step: Step, layers: int | None = None) -> Statistics:
        """The sum of the statistics that a step gathers on blocks."""
        return Statistics.of(self.architecture, (found for _, found in self.each(what, step, layers)))

    def ends(self, transforms: Transforms) -> Statistics:
        """What embeddings and heads alone say about the streams."""
        return self.gathered("embeddings and heads", Ends(transforms), layers=0)

    def pass_over(
        self,
        transforms: Transforms,
        what: str,
        weights: Mapping[str, float],
        precise: bool = False,
        layers: int | None = None,
    ) -> Statistics:
        """Match all local spaces under the stream transforms; collect the streams' statistics and the objective.

        Args:
            transforms: of the streams; not modified.
            what: shown as progress.
            weights: of tensors by name, for the local spaces; one not named counts as it stands.
            precise: for models that nearly agree already.
            layers: look at so many of them only.
        """
        return self.gathered(what, Pass(transforms, weights, precise), layers)

    def final(self, transforms: Transforms) -> list[tuple[Block, list[SpaceMatch]]]:
        """Match the local spaces once more, unweighted, into `transforms`; record every space, streams included."""
        records = []
        before = after = norm = 0.0
        streams = dict(transforms)
        began = time.perf_counter()
        for block, found in self.each("matching", Final(streams)):
            if found is None:
                continue
            transforms.update(found.match.transforms)
            records.append((block, found.match.records))
            before, norm, after = before + found.before, norm + found.norm, after + found.after
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


def _match_streams(walk: _Walk, starts: Mapping[str, Transforms] | None) -> tuple[Transforms, dict[str, object]]:
    """Alternate residual and local spaces, from the start that is nearest (in deep models: on a sample of layers)."""
    if starts is None:
        still: Transforms = {s: walk.architecture.stream_group(s, g).identity() for s, g in walk.streams.items()}
        run = walk.pass_over(still, "residual, from identity", {}, layers=SAMPLE)
        if run.objective < RELATED and run.promise(still, _solved(walk, run, still)) < LEAST_PROMISE:
            return still, {"start": "identity", "passes": 0, "objective": [run.objective], "shared": True}
        starts = {"identity": still, "embeddings and heads": _solved(walk, walk.ends(still), still)}
        runs = {"identity": run}
    else:
        runs = {}
    for name, start in starts.items():
        if name not in runs:
            runs[name] = walk.pass_over(start, f"residual, from {name}", {}, layers=SAMPLE)
    best = min(runs, key=lambda name: runs[name].objective)
    first = runs[best]
    if first.blocks < len(walk.architecture.blocks):
        first = walk.pass_over(starts[best], "residual, pass 1", {})
    transforms, history = _alternate(walk, dict(starts[best]), first)
    return transforms, {
        "start": best,
        "passes": len(history),
        "objective": history,
        "starts": {name: run.objective for name, run in runs.items()},
    }


def _solved(walk: _Walk, statistics: Statistics, current: Transforms) -> Transforms:
    """Every stream's best transform; the current one of a stream about which nothing is known."""
    return {name: statistics.solve(name, walk.streams[name]) or current[name] for name in current}


def _alternate(walk: _Walk, transforms: Transforms, statistics: Statistics) -> tuple[Transforms, list[float]]:
    """Streams for the local spaces, local spaces for the streams, until the objective stands still.

    Args:
        transforms: of the streams, at the start.
        statistics: of the first pass, under them.

    Returns:
        The best transforms, and the objective of every pass, never rising.
    """
    best, history = transforms, [statistics.objective]
    while len(history) < MOST_PASSES and statistics.excess > _EXACT:
        excess = statistics.excess
        solved = _solved(walk, statistics, transforms)
        if statistics.promise(transforms, solved) <= _EXACT:
            break
        transforms = solved
        what = f"residual, pass {len(history) + 1}"
        statistics = walk.pass_over(transforms, what, statistics.weights, precise=excess < FLOOR)
        if statistics.objective > history[-1]:
            break
        best = transforms
        history.append(statistics.objective)
        if statistics.excess > excess * (1 - LEAST_GAIN):
            break
    return best, history


def aligned_tensors(
    architecture: Architecture,
    source: TensorSource,
    alignment: Alignment,
    anchor: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """A donor's tensors in the anchor's coordinates, one after the other, in their storage dtype.

    For the anchor itself, folded where the alignment needs it, give ``Alignment({}, alignment.folded)``.

    Args:
        anchor: whose biases the donor is given where softmax cannot see them (`matching/biases.py`); None: it keeps its
            own.
        dtype: that the caller rounds to, which folding has to survive, too.
    """
    aligned = aligned_source(architecture, source, alignment, anchor, dtype)
    for block in architecture.blocks:
        for info in block.tensors:
            moved = aligned.tensor(block, info)
            stored = read_tensor(info, source)
            if moved is not None and stored is not None:
                yield from unstack(info, moved.to(stored.dtype).contiguous()).items()


def aligned_source(
    architecture: Architecture,
    source: TensorSource,
    alignment: Alignment,
    anchor: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Aligned:
    """A donor in the anchor's coordinates, folded where the alignment needs it; see `aligned_tensors`."""
    if alignment.folded:
        source = Folded(architecture, source, alignment.folded, dtype)
        anchor = None if anchor is None else Folded(architecture, anchor, alignment.folded)
    return Aligned(architecture, source, alignment.transforms, anchor)
