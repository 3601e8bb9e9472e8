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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, TensorInfo, stem_of
from rotation_merge.errors import DataError
from rotation_merge.matching.activations import Activations
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import check_numbers
from rotation_merge.matching.match import Match, match_model, recorded
from rotation_merge.matching.options import ACTIVATIONS, BOTH, WEIGHTS, AlignConfig
from rotation_merge.matching.stream import StreamSums, measured, residual_groups
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.open import open_model
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.vocabulary import same_tokens
from rotation_merge.run.batches import Batch, unlabelled, unpadded
from rotation_merge.run.data import SAMPLES, Data, read_samples
from rotation_merge.run.functions import load
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.symmetry import Transform
from rotation_merge.workers import Progress

WHITENING = 0.25
"""The exponent p, of streams."""

ROWS = 4096
"""Rows of activations, at most."""

AT_ONCE = 16

_LEAST = 1e-6  # of the largest variance: below, no direction is enlarged any further
_GIVES = ("write", "in", "gate", "q", "k", "v")
_KINDS = ("stream", "attention", "ffn")

ActivationPair = tuple[Activations, Activations]
"""Of anchor and donor, on the same samples."""


@dataclass(frozen=True)
class ActivationMatcher:
    """Matches two models by the inputs and outputs of their maps on samples, in place of `match_model`.

    Attributes:
        how: `activations` or `both`.
        record: gives what the maps of the anchor and of the donor read and gave on the same samples.
        samples: what these are called, and how many they are, where a report is to say so.
    """

    how: str
    record: Callable[[], ActivationPair]
    samples: tuple[str, int] | None = None

    def __call__(
        self,
        architecture: Architecture,
        anchor: TensorSource,
        donor: TensorSource,
        options: AlignConfig,
        progress: Progress | None = None,
        *,
        ledger: Ledger = NOWHERE,
    ) -> Alignment:
        """Match the two models; records are over the weights.

        Raises:
            DataError: nothing was seen of any map that could be matched; of checkpoints, the vocabularies differ, or
                there are no samples.
        """
        streams = residual_groups(architecture, options.residual)
        folded = architecture.folds(streams)
        plain = [folded_tensors(architecture, source, folded) for source in (anchor, donor)]
        recordings = _Recordings(self.record(), plain[0])
        whole = replace(architecture, blocks=tuple(map(recordings.added, architecture.blocks)))
        alone = replace(
            whole, blocks=tuple(recordings.alone(b, bool(options.at(architecture, b).scaling)) for b in whole.blocks)
        )
        if not (rows := max((len(x) for x, _ in recordings.tensors.values()), default=0)):
            raise DataError("the samples reach no linear map that can be matched", remedy="match on weights")
        first, second = (
            as_tensors(source).replaced({name: pair[which] for name, pair in recordings.tensors.items()})
            for which, source in enumerate(plain)
        )
        start = _start(architecture, streams, [recordings.of(block) for block in whole.blocks], first, second)
        steps = {ACTIVATIONS: alone, BOTH: whole} if self.how == BOTH else {ACTIVATIONS: alone}
        for step, compared in steps.items():
            starts = {ACTIVATIONS: start} if streams else None
            within = ledger.under(step)
            alignment = match_model(compared, first, second, options, progress, starts, fold=False, ledger=within)
            start = {name: alignment.transforms[name] for name in streams}
        notes = _notes(architecture, streams, rows, self.how)
        alignment = replace(alignment, folded=folded, notes=notes, samples=self.samples)
        return recorded(architecture, anchor, donor, alignment)


def matcher(
    how: str,
    anchor: str,
    donor: str,
    data: str = SELF,
    count: int = SAMPLES,
    seed: int = 0,
    device: str = "cpu",
    length: int = 128,
    part: Callable[[Data], Data] = lambda data: data,
) -> Match:
    """The function that matches two checkpoints, on weights or on samples; one of them at a time is in memory.

    Args:
        how: `weights`, `activations` or `both`.
        data: a file, `synthetic`, or `self`: text of which each of the two writes half.
        count: how many samples.
        length: tokens in a sample of running text.
        part: the samples of a file that count.
    """
    if how == WEIGHTS:
        return match_model

    def record() -> ActivationPair:
        views = [open_model(name, any_base=True) for name in (anchor, donor)]
        if not same_tokens(*views):
            problem = f"its vocabulary differs from that of {anchor}, so samples cannot be shared"
            raise DataError(problem, where=donor, remedy="match on weights (leave out 'match_on')")
        writers, batches = views if data == SELF else views[:1], list[Batch]()
        for number, view in enumerate(writers):
            module = load((anchor, donor)[number]) if data == SELF else None
            share = count // len(writers) + (number < count % len(writers))  # the first may write one more
            samples = read_samples(view, data, share, AT_ONCE, length, seed + number, module)
            batches += unpadded((samples if data == SELF else part(samples)).batches, data)
            del module  # before the next one is loaded
        first, second = (Activations.of(load(name).to(device), batches, ROWS) for name in (anchor, donor))
        return first, second

    return ActivationMatcher(how, record, (data, count))


def activation_matcher(
    how: str, anchor: Any, donor: Any, batches: Sequence[Mapping[str, Tensor]], source: str
) -> Match:
    """The function that matches two loaded models on samples: on `activations` or `both`.

    Args:
        source: what the samples are called, where they do not do.
    """
    plain = unpadded([unlabelled(batch) for batch in batches], source)
    return ActivationMatcher(how, lambda: (Activations.of(anchor, plain, ROWS), Activations.of(donor, plain, ROWS)))


def _start(
    architecture: Architecture,
    streams: Mapping[str, str],
    blocks: Iterable[Block],
    anchor: TensorSource,
    donor: TensorSource,
) -> dict[str, Transform]:
    """The best element of every stream for its recorded activations, all weighted equally.

    Args:
        blocks: with the activations alone.
    """
    still = {s: architecture.stream_group(s, g).identity() for s, g in streams.items()}
    sums = []
    for block in blocks:
        of_streams = [info for info in block.tensors if any(part.space.kind == "stream" for part in info.axes[1].parts)]
        a, b = ({info.key: source[info.name] for info in of_streams} for source in (anchor, donor))
        recorded_block = replace(block, tensors=tuple(of_streams))
        check_numbers(recorded_block, a, "anchor")
        check_numbers(recorded_block, b, "donor")
        sums.append(StreamSums.of(measured([(recorded_block, a, b)], still), still, equal=True))
    return StreamSums.total(sums).solve(architecture, streams, still)


def _notes(architecture: Architecture, moved: Iterable[str], rows: int, how: str) -> tuple[str, ...]:
    by = "activations" if how == ACTIVATIONS else "weights and activations"
    notes = [f"matched on {by}: {rows} rows of inputs and outputs on samples."]
    widest = max((architecture.streams[name].sizes["size"] for name in moved), default=0)
    if rows < widest:
        consequence = "the rest is arbitrary" if how == ACTIVATIONS else "weights decide the rest"
        notes.append(f"{rows} rows do not span the {widest} coordinates of a stream: {consequence}. Give more samples.")
    return tuple(notes)


class _Recordings:
    """Activations of two models as labelled tensors.

    Attributes:
        tensors: by name, of anchor and donor: (rows, size).
    """

    def __init__(self, activations: ActivationPair, anchor: TensorSource) -> None:
        self.activations, self.anchor = activations, anchor
        self.tensors: dict[str, tuple[Tensor, Tensor]] = {}

    def added(self, block: Block) -> Block:
        """The block with the activations around its maps beside its tensors."""
        maps, read = (linear_map(block, info) for info in block.tensors), set[str]()
        infos = [info for linear in maps if linear and not linear.stacked for info in self._tensors_of(linear, read)]
        return replace(block, tensors=(*block.tensors, *infos))

    def of(self, block: Block) -> Block:
        """The block's activations alone."""
        return replace(block, tensors=tuple(info for info in block.tensors if info.name in self.tensors))

    def alone(self, block: Block, scales: bool) -> Block:
        """The block's activations, and those of its tensors that know of a local space what activations do not.

        Args:
            scales: whether scales are to be found, of which the output sides' weights know.
        """
        heard = [(stem_of(info.key.rpartition(":")[0]), _local(info)) for info in self.of(block).tensors]
        stems, known = {stem for stem, spaces in heard if spaces}, {name for _, spaces in heard for name in spaces}

        def counts(info: TensorInfo) -> bool:
            spaces = _local(info)
            return bool(spaces - known) or (bool(spaces) and scales and stem_of(info.key) not in stems)

        return replace(block, tensors=tuple(i for i in block.tensors if i.name in self.tensors or counts(i)))

    def _tensors_of(self, linear: LinearMap, read: set[str]) -> Iterator[TensorInfo]:
        """Yield a map's outputs, and its stream inputs once for all maps that share them."""
        (source, x, y), (donor_source, u, v) = (activations.around(linear) for activations in self.activations)
        sources = zip((source, donor_source), self.activations, strict=True)
        normed = linear.norm is None or all(axis in activations.split for axis, activations in sources)
        first = normed and source not in read and _has_roles(linear.inputs, ("read",))
        if first and x is not None and u is not None and x.shape == u.shape:
            read.add(source)
            yield self._add(linear, "reads", linear.inputs, x, u)
        if y is not None and v is not None and y.shape == v.shape and _has_roles(linear.outputs, _GIVES):
            yield self._add(linear, "gives", linear.outputs, y, v)

    def _add(self, linear: LinearMap, side: str, axis: Axis, x: Tensor, u: Tensor) -> TensorInfo:
        whiten = any(part.space.kind == "stream" for part in axis.parts)
        pair = [centred(rows, whiten) for rows in (x, u)]
        weight = read_tensor(linear.info, self.anchor)  # which sets how much a space hears of it beside weights
        weight_norm = 1.0 if weight is None else float(weight.double().norm())
        factor = weight_norm / max(float(pair[0].norm()), 1e-30)
        name = f"{linear.info.name}:{side}"
        device = pair[0].device if weight is None else weight.device
        first, second = ((factor * rows).float().to(device) for rows in pair)
        self.tensors[name] = first, second
        return TensorInfo(f"{linear.info.key}:{side}", (name,), (Axis(), axis))


def _local(info: TensorInfo) -> set[str]:
    """The local spaces that a tensor has an axis in."""
    return {space.name for space in info.spaces() if space.kind != "stream"}


def _has_roles(axis: Axis, roles: tuple[str, ...]) -> bool:
    return bool(axis.parts) and all(part.role in roles and part.space.kind in _KINDS for part in axis.parts)


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
