"""Matching whole models, block by block, on lazily read tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block
from rotation_merge.groups import SpaceTransform, StreamTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.block import SpaceMatch, match_block, squared_distances, wanted_spaces
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Tensors
from rotation_merge.matching.state import TensorSource, read_block, read_tensor, unstack
from rotation_merge.matching.stream import StreamStatistics, check_group, identity, layer_normed, weight_of

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""

Transforms = dict[str, SpaceTransform]

MOST_PASSES = 24
LEAST_GAIN = 1e-4
"""Passes over the model stop when the objective falls by less than this fraction."""


@dataclass(frozen=True)
class Alignment:
    """What brings one donor to one anchor.

    Attributes:
        transforms: by space name.
        folded: streams whose norm gains were folded into the readers first (anchor and donor alike), which a
            rotation of the stream needs.
        records: what matching did to each space, block by block.
        summary: iterations, objective and the like, for the report.
    """

    transforms: Transforms
    folded: tuple[str, ...] = ()
    records: list[tuple[Block, list[SpaceMatch]]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: MatchOptions,
    progress: Progress | None = None,
    starts: Mapping[str, Transforms] | None = None,
    fold: bool = True,
) -> Alignment:
    """Match every space that `options` ask for; one block of either model is in memory at a time.

    Args:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: the models as they are stored (folding, where needed, is done here).
        options: which groups to use.
        progress: told about every block.
        starts: residual transforms to start from, by name of the start, instead of the identity and the embeddings.
        fold: False where both sources are folded already.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
        AlignmentError: a tensor holds NaN or infinity.
    """
    streams = check_group(architecture, options.residual) if options.residual != "none" else []
    folded = tuple(streams) if options.residual == "rotation" else ()
    if folded and fold:
        anchor, donor = Folded(architecture, anchor, folded), Folded(architecture, donor, folded)
    walk = _Walk(architecture, anchor, donor, options, progress or (lambda *_: None))
    found: Transforms = {}
    summary: dict[str, object] = {}
    if streams:
        found, summary = _match_streams(walk, streams, starts)
    records = walk.final(found)
    return Alignment(found, folded, records, summary)


@dataclass
class _Walk:
    """One way through both models, block by block; passes of residual matching and the last, local one."""

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    options: MatchOptions
    progress: Progress

    def blocks(self, what: str) -> Iterator[tuple[Block, Tensors, Tensors]]:
        blocks = self.architecture.blocks
        for done, block in enumerate(blocks):
            self.progress(what, done, len(blocks))
            yield block, read_block(block, self.anchor), read_block(block, self.donor)
        self.progress(what, len(blocks), len(blocks))

    def pass_over(
        self, streams: list[str], transforms: Transforms, what: str, only: str | None = None
    ) -> tuple[dict[str, StreamStatistics], float]:
        """Match all local spaces under the stream transforms; collect the streams' statistics and the objective.

        Args:
            streams: streams to collect for.
            transforms: of the streams; not modified.
            only: look at blocks of this place only (`before`: the embeddings).
        """
        statistics = {s: StreamStatistics(self.architecture.streams[s].sizes["size"]) for s in streams}
        objective = 0.0
        for block, anchor, donor in self.blocks(what):
            if only is not None and block.place != only:
                continue
            anchor, donor = _weighted(block, anchor, donor)
            local = match_block(block, anchor, donor, self.options, transforms).transforms if only is None else {}
            everything = {**transforms, **local}
            for stream in streams:
                statistics[stream].add(self.architecture, block, stream, anchor, donor, everything)
            objective += squared_distances(block, None, anchor, donor, everything)[0]
        return statistics, objective

    def final(self, transforms: Transforms) -> list[tuple[Block, list[SpaceMatch]]]:
        """Match the local spaces once more, unweighted, into `transforms`; record every space, streams included."""
        records = []
        totals = [0.0, 0.0, 0.0]
        streams = dict(transforms)
        began = time.perf_counter()
        for block, anchor, donor in self.blocks("matching"):
            if not streams and not wanted_spaces(block, self.options):
                continue
            match = match_block(block, anchor, donor, self.options, streams)
            transforms.update(match.transforms)
            records.append((block, match.records))
            if streams:
                before = squared_distances(block, None, anchor, donor, {})
                after = squared_distances(block, None, anchor, donor, {**streams, **match.transforms})
                totals = [t + x for t, x in zip(totals, (before[0], after[0], before[1]), strict=True)]
        for name, transform in streams.items():
            record = SpaceMatch(
                *(name, "stream", transform.group(), *totals),
                distances=transform.distances(),
                seconds=time.perf_counter() - began,
                notes=["distances of all tensors of the model"],
            )
            records.append((self.architecture.blocks[0], [record]))
        return records


def _weighted(block: Block, anchor: Tensors, donor: Tensors) -> tuple[Tensors, Tensors]:
    """Both models' tensors divided so that no single matrix drowns the rest: see `weight_of`."""
    weights = {info.key: weight_of(info, anchor[info.key]) for info in block.tensors if info.key in anchor}
    scaled = [
        {key: x.float() * weights[key] for key, x in tensors.items() if key in weights} for tensors in (anchor, donor)
    ]
    return scaled[0], scaled[1]


def _match_streams(
    walk: _Walk, streams: list[str], starts: Mapping[str, Transforms] | None
) -> tuple[Transforms, dict[str, object]]:
    """Alternate residual and local spaces from several starts; the best kept."""
    group = walk.options.residual
    if starts is None:
        still: Transforms = {s: identity(group, walk.architecture.streams[s].sizes["size"]) for s in streams}
        starts = {"identity": still, "embeddings": _from_embeddings(walk, streams, still)}
    runs = {name: _alternate(walk, streams, start, name) for name, start in starts.items()}
    best = min(runs, key=lambda name: runs[name][1][-1])
    transforms, history = runs[best]
    return transforms, {
        "start": best,
        "passes": len(history),
        "objective": history,
        "starts": {name: run[1][-1] for name, run in runs.items()},
    }


def _from_embeddings(walk: _Walk, streams: list[str], still: Transforms) -> Transforms:
    """Stream transforms from what stands before the layers: token, patch and position embeddings."""
    statistics, _ = walk.pass_over(streams, still, "embeddings", only="before")
    return {
        s: _solve(walk, s, statistics[s]) if bool((statistics[s].products != 0).any()) else still[s] for s in streams
    }


def _solve(walk: _Walk, stream: str, statistics: StreamStatistics) -> SpaceTransform:
    return StreamTransform(statistics.solve(walk.options.residual, layer_normed(walk.architecture, stream)))


def _alternate(walk: _Walk, streams: list[str], start: Transforms, name: str) -> tuple[Transforms, list[float]]:
    """Local spaces for the streams, streams for the local spaces, until the objective stands still.

    With several streams one is solved a pass, in turn, so that the objective never rises.

    Returns:
        The best transforms, and the objective of every pass.
    """
    transforms, best = dict(start), dict(start)
    history: list[float] = []
    quiet = 0
    for turn in range(MOST_PASSES * len(streams)):
        statistics, objective = walk.pass_over(streams, transforms, f"residual, from {name}, pass {turn + 1}")
        if history and objective > history[-1] * (1 - LEAST_GAIN):
            quiet += 1
        else:
            quiet = 0
        if not history or objective <= min(history):
            best = dict(transforms)
        history.append(min([objective, *history]))
        if quiet >= len(streams) or objective == 0.0:
            break
        stream = streams[turn % len(streams)]
        transforms = {**transforms, stream: _solve(walk, stream, statistics[stream])}
    return best, history


def aligned_tensors(
    architecture: Architecture, source: TensorSource, alignment: Alignment
) -> Iterator[tuple[str, Tensor]]:
    """A donor's tensors in the anchor's coordinates, one after the other, in their storage dtype.

    For the anchor itself, folded where the alignment needs it, give ``Alignment({}, alignment.folded)``.
    """
    seen = Folded(architecture, source, alignment.folded) if alignment.folded else source
    for block in architecture.blocks:
        for info in block.tensors:
            tensor = read_tensor(info, seen)
            stored = read_tensor(info, source)
            if tensor is not None and stored is not None:
                moved = transform_tensor(tensor, info, alignment.transforms)
                yield from unstack(info, moved.to(stored.dtype).contiguous()).items()
