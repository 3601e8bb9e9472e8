r"""Matching on activations: group elements chosen by the inputs and outputs of linear maps on samples.

The outputs of a map on the same samples form one more matrix along the map's output axis, and the inputs of its readers
one along the stream. So activations are matched like labelled tensors: the same groups solve heads, RoPE pairs, neurons
and streams, and the donor keeps its outputs. Activations are centred, because softmax ignores a common part of all
keys. Those of streams are partly whitened, ``X G^-p`` with their Gram G, so that a few strong directions do not
dominate. Permutations, signs and rotations commute with both.

Experts and latents are matched by weights. If heads and neurons are rescaled, their output weights take part,
because activations alone do not determine the scales.

Source: Ainsworth et al. 2023 (Git Re-Basin), section 3.1; partial whitening: Theseus (2026, arXiv 2602.12952).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Part, Space, TensorInfo, stem_of
from rotation_merge.errors import DataError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import checked
from rotation_merge.matching.match import Match, match_model, recorded
from rotation_merge.matching.matrix_pairs import axis_views
from rotation_merge.matching.options import ACTIVATIONS, BOTH, WEIGHTS, AlignConfig
from rotation_merge.matching.stream import StreamSums, measured, residual_groups
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.open import ModelLike, open_model
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import same_tokens
from rotation_merge.run.batches import Batch, examples_in, unpadded
from rotation_merge.run.data import SAMPLES, Data, Samples, read_samples
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.run.maps import LinearMap, maps_of, same_map
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.runner import Runner
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.statistics import first_readers
from rotation_merge.symmetry import Transform
from rotation_merge.workers import Progress

WHITENING = 0.25
"""The exponent p, of streams."""

ROWS = 4096
"""Rows of activations, at most."""

AT_ONCE = 16

_LEAST = 1e-6  # of the largest variance: below, no direction is enlarged any further
READS, GIVES = ("read",), ("write", "in", "gate", "q", "k", "v")
KINDS = ("stream", "attention", "ffn")
WORDS = {ACTIVATIONS: "activations", BOTH: "weights and activations"}

MOST_ROWS = 1024
"""Rows that are kept of each map, where no number is given."""

Place = tuple[str, str, int | None]

Points = tuple[Tensor, Tensor]
"""Coordinates of the anchor and of the donor as points, (groups, size, features)."""

PLANS = {"out": "neurons", "o": "values", "q": "queries and keys", "k": "queries and keys", "read": "stream"}
"""The plan that activations along an axis of a role are points for."""


@dataclass
class Activations:
    """Rows of inputs and outputs of maps, by the place of their block.

    Attributes:
        maps: the maps of each block, with names of the model's own.
        inputs: by (block, axis) that maps read: (rows, size), at the same samples and positions in every model of a
            class.
        outputs: by map: (rows, size), at the same.
        axes: by map, the (block, axis) that it reads.
        split: those where the inputs are what a norm normalised, before its gain and shift.
    """

    maps: dict[Place, list[LinearMap]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    split: frozenset[str] = frozenset()

    @classmethod
    def of(cls, view: View, batches: Sequence[Batch], most: int = MOST_ROWS, device: str = "cpu") -> Activations:
        """Run a model over samples, one layer in memory at a time.

        Args:
            batches: without padding; the same for every model that is compared.
            most: rows that are kept of each map, evenly spread over every sample.
        """
        dtype = torch.float64 if torch.float64 in view.dtypes.values() else torch.float32
        watched, result = WatchedBlocks(Runner(view, batches, dtype=dtype, device=device)), cls()
        while watched.advance() is not None:
            result._record(watched, max(1, most // sum(map(examples_in, batches))))
        for linear in watched.maps.values():
            block = linear.block
            if linear.info.name in watched.axes and not linear.stacked:
                result.maps.setdefault((block.module, block.place, block.index), []).append(linear)
        return replace(result, axes=watched.axes, split=frozenset(watched.split))

    def _record(self, watched: WatchedBlocks, each: int) -> None:
        """Run a block, and keep so many rows of each sample: at the same positions in every model."""
        runner, axes, first = watched.runner, watched.new_axes, {*first_readers(watched.new_axes).values()}
        inputs, outputs = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)

        def some(x: Tensor) -> Tensor:
            rows, examples = x.flatten(0, -2), examples_in(runner.batches[runner.batch])
            samples = rows.unflatten(0, (examples, -1)) if len(rows) % examples == 0 else rows[:, None]
            count = min(samples.shape[1], each)
            places = torch.linspace(0, samples.shape[1] - 1, count, dtype=torch.float64).round().long()
            return samples[:, places.to(x.device)].flatten(0, 1).float().cpu()

        def record(name: str, expert: int | None, x: Tensor, y: Tensor) -> None:
            if expert is None and name in axes:
                outputs[name].append(some(y))
                if name in first:
                    inputs[axes[name]].append(some(watched.normalised(name, x)))

        watched.run(record)
        self.inputs.update({axis: torch.cat(parts) for axis, parts in inputs.items()})
        self.outputs.update({name: torch.cat(parts) for name, parts in outputs.items()})

    def around(self, linear: LinearMap) -> tuple[str, Tensor | None, Tensor | None]:
        """The (block, axis) that a map reads (empty: it did not run), its inputs and its outputs.

        Args:
            linear: named as in the checkpoint.
        """
        block = linear.block
        place = same_map(linear, self.maps.get((block.module, block.place, block.index), []))
        if place is None:
            return "", None, None
        name, rows = place[0].info.name, place[1]
        outputs = self.outputs.get(name)
        return self.axes[name], self.inputs[self.axes[name]], None if outputs is None else outputs[:, rows]


ActivationPair = tuple[Activations, Activations]
"""Of anchor and donor, on the same samples."""

Recordings = dict[str, tuple[Tensor, Tensor]]
"""Activations of anchor and donor by the name of a tensor that they stand as, (rows, size)."""


def match_on_samples(
    how: str,
    record: Callable[[], ActivationPair],
    samples: tuple[str, int] | None,
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: AlignConfig,
    progress: Progress | None = None,
    *,
    ledger: Ledger = NOWHERE,
) -> Alignment:
    """Match two models by the inputs and outputs of their maps, in place of `match_model`; rows are over the weights.

    Args:
        how: `activations` or `both`.
        record: gives what the maps of the anchor and of the donor read and gave on the same samples.
        samples: what these are called, and how many they are, where a report is to say so.

    Raises:
        DataError: nothing was seen of any map that could be matched; of checkpoints, the vocabularies differ, or there
            are no samples.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    plain = [folded_tensors(architecture, source, folded) for source in (anchor, donor)]
    whole, recordings = with_recordings(architecture, record(), plain[0])
    rows = max((len(x) for x, _ in recordings.values()), default=0)
    if not rows:
        raise DataError("the samples reach no linear map that can be matched", remedy="match on weights")
    first, second = (
        as_tensors(source).replaced({name: pair[which] for name, pair in recordings.items()})
        for which, source in enumerate(plain)
    )
    start = _start(whole, recordings, streams)
    scaled = [bool(options.at(architecture, block).scaling) for block in architecture.blocks]
    chosen = (_alone(block, recordings, scales) for block, scales in zip(whole.blocks, scaled, strict=True))
    steps = {ACTIVATIONS: replace(whole, blocks=tuple(chosen)), **({BOTH: whole} if how == BOTH else {})}
    for step, compared in steps.items():
        starts = {ACTIVATIONS: start} if streams else None
        within = ledger.under(step)
        alignment = match_model(compared, first, second, options, progress, starts, fold=False, ledger=within)
        start = {name: alignment.transforms[name] for name in streams}
    notes = [f"matched on {WORDS[how]}: {rows} rows of inputs and outputs on samples."]
    widest = max((architecture.streams[name].sizes["size"] for name in streams), default=0)
    if rows < widest:
        rest = "the rest is arbitrary" if how == ACTIVATIONS else "weights decide the rest"
        notes.append(f"{rows} rows do not span the {widest} coordinates of a stream: {rest}. Give more samples.")
    alignment = replace(alignment, folded=folded, notes=tuple(notes), samples=samples)
    return recorded(architecture, anchor, donor, alignment)


def matcher(
    how: str,
    anchor: ModelLike,
    donor: ModelLike,
    samples: Samples = SELF,
    count: int = SAMPLES,
    seed: int = 0,
    device: str = "cpu",
    length: int = 128,
    part: Callable[[Data], Data] = lambda data: data,
) -> Match:
    """The function that matches two models, on weights or on samples; a layer of one of them at a time is in memory.

    Args:
        how: `weights`, `activations` or `both`.
        samples: batches, or a source: a file, `synthetic`, or `self`: text of which each of the two writes half.
        count: how many samples of a source.
        length: tokens in a sample of running text.
        part: the samples that count, of those that the models do not write.
    """
    if how == WEIGHTS:
        return match_model
    named, written = isinstance(samples, str | os.PathLike), isinstance(samples, str) and samples == SELF

    def record() -> ActivationPair:
        views = [open_model(model, any_base=True) for model in (anchor, donor)]
        if not same_tokens(*views):
            problem = f"its vocabulary differs from that of {views[0].name}, so samples cannot be shared"
            raise DataError(problem, where=views[1].name, remedy="match on weights (leave out 'match_on')")
        writers, batches = views if written else views[:1], list[Batch]()
        for number, view in enumerate(writers):
            share = count // len(writers) + (number < count % len(writers))  # the first may write one more
            data = read_samples(view, samples, share, AT_ONCE, length, seed + number)
            batches += unpadded((data if written else part(data)).batches, data.source)
        for view in views:
            read_samples(view, batches)  # which refuses what the model does not take
        first, second = (Activations.of(view, batches, ROWS, device) for view in views)
        return first, second

    return partial(match_on_samples, how, record, (str(samples), count) if named else None)


def with_recordings(
    architecture: Architecture, activations: ActivationPair, anchor: TensorSource
) -> tuple[Architecture, Recordings]:
    """The architecture with the activations around its maps beside its tensors, and these by name.

    Of each map its outputs, and its stream inputs once for all maps that share them.

    Args:
        anchor: whose weights set how much a space hears of activations beside them.
    """
    recordings: Recordings = {}

    def infos(block: Block) -> Iterator[TensorInfo]:
        read = set[str]()
        for linear in (linear for linear in maps_of(block) if not linear.stacked):
            (source, x, y), (donor_source, u, v) = (of_model.around(linear) for of_model in activations)
            sources = zip((source, donor_source), activations, strict=True)
            normed = linear.norm is None or all(axis in of_model.split for axis, of_model in sources)
            sides = ("reads", linear.inputs, READS, x, u), ("gives", linear.outputs, GIVES, y, v)
            for side, axis, roles, a, b in sides:
                if a is None or b is None or a.shape != b.shape or not _has_roles(axis, roles):
                    continue
                if side == "gives" or (normed and source not in read):
                    read |= {source} if side == "reads" else set()
                    name = f"{linear.info.name}:{side}"
                    recordings[name] = _as_tensors(axis, a, b, read_tensor(linear.info, anchor))
                    yield TensorInfo(f"{linear.info.key}:{side}", (name,), (Axis(), axis))

    blocks = (replace(block, tensors=(*block.tensors, *infos(block))) for block in architecture.blocks)
    return replace(architecture, blocks=tuple(blocks)), recordings


def _as_tensors(axis: Axis, x: Tensor, u: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of anchor and donor as they are compared: centred, the anchor's of its weight's norm and device."""
    whiten = any(part.space.kind == "stream" for part in axis.parts)
    pair = [centred(rows, whiten) for rows in (x, u)]
    weight_norm = 1.0 if weight is None else float(weight.double().norm())
    factor = weight_norm / max(float(pair[0].norm()), 1e-30)
    device = pair[0].device if weight is None else weight.device
    first, second = ((factor * rows).float().to(device) for rows in pair)
    return first, second


def _alone(block: Block, recordings: Recordings, scales: bool) -> Block:
    """The block's activations, and those of its tensors that know of a local space what activations do not.

    Args:
        scales: whether scales are to be found, of which the output sides' weights know.
    """
    spaces = {i.name: {space.name for space in i.spaces() if space.kind != "stream"} for i in block.tensors}
    of_recordings = [info for info in block.tensors if info.name in recordings]
    stems = {stem_of(info.key.rpartition(":")[0]) for info in of_recordings if spaces[info.name]}
    known = {space for info in of_recordings for space in spaces[info.name]}

    def counts(info: TensorInfo) -> bool:
        local = spaces[info.name]
        return bool(local - known) or (bool(local) and scales and stem_of(info.key) not in stems)

    return replace(block, tensors=tuple(i for i in block.tensors if i.name in recordings or counts(i)))


def _start(whole: Architecture, recordings: Recordings, streams: Mapping[str, str]) -> dict[str, Transform]:
    """The best element of every stream for its recorded activations, all weighted equally."""
    still, sums = {s: whole.stream_group(s, g).identity() for s, g in streams.items()}, list[StreamSums]()
    for block in whole.blocks:
        infos = (info for info in block.tensors if info.name in recordings)
        of_streams = [info for info in infos if any(part.space.kind == "stream" for part in info.axes[1].parts)]
        alone = replace(block, tensors=tuple(of_streams))
        a, b = ({info.key: recordings[info.name][which] for info in of_streams} for which in (0, 1))
        sums.append(StreamSums.of(measured([(alone, *checked(alone, a, b))], still), still, equal=True))
    return StreamSums.total(sums).solve(whole, streams, still)


def _has_roles(axis: Axis, roles: tuple[str, ...]) -> bool:
    return bool(axis.parts) and all(part.role in roles and part.space.kind in KINDS for part in axis.parts)


def centred(rows: Tensor, whiten: bool = True) -> Tensor:
    """Subtract the mean row of X, (rows, size), in float64, and whiten partly: ``X G^-p`` with the Gram G.

    The result commutes with rotations of X.
    """
    rows = rows.double() - rows.double().mean(0)
    if not whiten:
        return rows
    values, vectors = torch.linalg.eigh(rows.mT @ rows / len(rows))
    if float(values[-1]) <= 0:
        return rows
    scales = values.clamp_min(_LEAST * float(values[-1])) ** -WHITENING
    return rows @ (vectors * scales) @ vectors.mT


def activation_points(
    blocks: Iterable[Block], spaces: Iterable[Space], activations: tuple[Activations, Activations]
) -> dict[str, Points]:
    """Points for the plans of some spaces, by space and plan (`SPACE:neurons`), from the maps of some blocks."""
    points: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    keys = {(space.name, plan): f"{space.name}:{plan}" for space in spaces for plan in wanted_roles(space)}
    for linear in (linear for block in blocks for linear in maps_of(block) if not linear.stacked):
        (_, x, y), (_, u, v) = (of_model.around(linear) for of_model in activations)
        for axis, a, b in ((linear.inputs, x, u), (linear.outputs, y, v)):
            for part, start, *pair in () if a is None or b is None or not axis.parts else axis_views(a, b, 1, axis):
                key = keys.get((part.space.name, PLANS.get(part.role, "")))
                if key and (part.role != "read" or axis.size == part.space.sizes["size"]):
                    for side, rows in zip(points.setdefault(key, ([], [])), pair, strict=True):
                        side.append(standard(grouped(rows, start, part)))
    return {key: (torch.cat(first, -1), torch.cat(second, -1)) for key, (first, second) in points.items()}


def grouped(x: Tensor, start: int, part: Part) -> Tensor:
    """A part's coordinates as (groups, size, features), its dimensions in x beginning at `start`.

    Groups are KV groups, or experts; of neurons and streams there is one. Query heads of a group become features of
    their keys.
    """
    space, count = part.space, len(part.factors)
    front = [*([0] if space.kind == "experts" else []), *range(start, start + count)]
    rows = x.permute(*front, *(dim for dim in range(x.ndim) if dim not in front)).flatten(len(front))
    if space.kind in ("ffn", "stream"):
        return rows[None]
    return rows.permute(0, 2, 1, 3).flatten(2) if space.kind == "attention" and rows.ndim == 4 else rows


def standard(points: Tensor) -> Tensor:
    """Points (groups, size, samples), standardised coordinate by coordinate."""
    x = points.double()
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-9)


def wanted_roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The plans of a space: the roles that each is computed from, and those that it moves.

    What rotary embedding turns, or a norm inside the head sees, is aligned and never mixed.
    """
    if space.kind == "stream":
        return {"stream": ("write", "read", "gain", "shift")}
    if space.kind in ("ffn", "experts"):
        return {"neurons": ("in", "gate", "out")}
    roles: dict[str, tuple[str, ...]] = {"values": ("v", "o")} if space.values == "free" else {}
    if not space.rotary and space.norm is None:
        roles["queries and keys"] = ("q", "k")
    return roles
