"""Judging a carried change: held-out samples, losses, the search for scales, and the recovered lift.

Recovered lift = (new base - carried) / (what fine-tuning gained at home), on samples held out of every choice. Two
controls have the carried change's size: random changes with the same singular values, and the negated change.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.config import NONE, TransferConfig
from rotation_merge.carrying.delta import Delta, scale_at
from rotation_merge.errors import DataError
from rotation_merge.model.fold import folded_source
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import ReplacedSource
from rotation_merge.run.data import UNLABELLED, Data, examples_in, read_batches, split_batches
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import Batch, local_path
from rotation_merge.run.generated_samples import SELF, writes_text
from rotation_merge.run.runner import Runner

AT_ONCE = 16
HELD_OUT = 0.25
"""Share of the samples that nothing is solved from, a whole batch at least where there are two."""


SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Of a carried change, among which held-out samples choose."""

LITTLE = 0.1
"""Recovered lift below which training again is the advice."""

KNOWN = 0.01
"""Share of the gain at home from which the new base is better than the old one in words."""

DRAWS = 10
"""Random changes that a carried one is compared with."""

Both = tuple[float, float]
"""Losses on samples of the fine-tune's kind, and on text that the new base writes."""


@dataclass(frozen=True)
class HeldOutSamples:
    """Samples that nothing is solved from: of the fine-tune's kind, and text of the new base's own.

    Attributes:
        writes: whether the new base writes text; where not, `own` is `tuned`.
    """

    tuned: Data
    own: Data
    writes: bool

    def losses(self, model: Any) -> Both:
        """A model's mean losses on either, in nats."""
        return evaluate(model, self.tuned)[0], evaluate(model, self.own)[0]


@dataclass(frozen=True)
class TransferSamples:
    """Samples of one transfer.

    Attributes:
        solved: samples to solve from.
        choice: says scales and methods.
        judge: held out of every choice.
        source: name of the held-out samples.
    """

    solved: Data
    choice: HeldOutSamples
    judge: HeldOutSamples
    source: str


def read_parts(tuned: str, new: str, config: TransferConfig, load: Callable[[str], Any]) -> TransferSamples:
    """The samples of a transfer, read or written by the models.

    Args:
        load: makes a model of its name.

    Raises:
        DataError: the model writes no text and no data are given, or too few, or without labels.
    """
    model = load(tuned)
    if config.data == SELF and not writes_text(model):
        raise DataError(f"{type(model).__name__} writes no text", where=tuned, remedy="give a file as 'data'")

    def read(source: str, seed: int) -> Data:
        reading = replace(config, seed=seed).reading(AT_ONCE)
        data = read_batches(source, local_path(tuned), model, **reading)
        if data.task in UNLABELLED:
            problem = f"holds no labels for the loss of {type(model).__name__}"
            raise DataError(problem, where=source, remedy="give data with labels, or carry by weights alone")
        return data

    if config.judge is not None and is_same_file(config.judge, config.data):
        problem, remedy = "has the samples to solve from, too", "leave out 'judge' (a part is held out), or name others"
        raise DataError(problem, where=config.judge, remedy=remedy)
    judge_seed = config.seed + (3 if config.judge == SELF else 0)  # other text than what is solved from
    whole = read(config.data, config.seed)
    if len(whole.batches) <= 1:
        raise DataError(f"holds {whole.examples} samples", where=config.data, remedy=f"give at least {2 * AT_ONCE}")
    solved, held_out = parted(whole) if config.judge is None else (whole, read(config.judge, judge_seed))
    choice, judge = halves(held_out)
    source = config.judge or config.data
    base: Any = load(new)
    if not writes_text(base):
        return TransferSamples(
            solved, HeldOutSamples(choice, choice, False), HeldOutSamples(judge, judge, False), source
        )
    few = replace(config, samples=AT_ONCE, seed=config.seed + 1)
    base_texts = halves(read_batches(SELF, local_path(new), base, **few.reading(AT_ONCE)))
    return TransferSamples(
        solved, HeldOutSamples(choice, base_texts[0], True), HeldOutSamples(judge, base_texts[1], True), source
    )


def is_same_file(first: str, second: str) -> bool:
    """Whether two sources of samples are one; `self` writes other text for another seed."""
    return first != SELF and os.path.realpath(first) == os.path.realpath(second)


def parted(data: Data) -> tuple[Data, Data]:
    """Samples to solve from, and a quarter to choose and to judge by: a batch at least, but at most half of all."""
    if _is_one_by_one(data):
        count = len(data.batches) - min(max(1, round(HELD_OUT * data.examples)), data.examples // 2)
        return _data(data.batches[:count], data.task), _data(data.batches[count:], data.task)
    held_out = min(max(AT_ONCE, round(HELD_OUT * data.examples)), data.examples // 2)
    return split_batches(data, data.examples - held_out)


def halves(data: Data) -> tuple[Data, Data]:
    """Every other row of each batch, or every other batch of one example, and the rest.

    Raises:
        DataError: there are fewer than two rows.
    """

    def half(start: int) -> list[Batch]:
        if _is_one_by_one(data):
            return list(data.batches[start::2])
        rows = ({name: tensor[start::2] for name, tensor in batch.items()} for batch in data.batches)
        return [batch for batch in rows if examples_in(batch)]

    parts = half(0), half(1)
    if not all(parts):
        raise DataError("holds one sample to judge by", where=data.source or None, remedy="give at least two")
    return _data(parts[0], data.task), _data(parts[1], data.task)


def _is_one_by_one(data: Data) -> bool:
    """Whether each batch is one example, whose tensors may have several rows."""
    return len(data.batches) == data.examples


def _data(batches: Sequence[Batch], task: str) -> Data:
    return Data(list(batches), task, sum(map(examples_in, batches)))


@dataclass(frozen=True)
class RecoveredLift:
    """Gain and cost of a carried change, in mean losses (nats) on the judging samples.

    Attributes:
        old, tuned: of the old pair, on samples of the fine-tune's kind.
        new, carried: of the new base without and with the change, on these and on text that the new base writes.
        method: whose change was taken: one of `METHODS`, `plain addition`, or `none`.
        scale: at which scale, in words.
        others: losses of the other methods on both, by method.
        controls: losses on the fine-tune's kind with random changes of the same singular values and scale.
        negated: the loss there with the negated change.
        writes: whether the new base writes text; where not, the second losses say nothing.
    """

    old: float
    tuned: float
    new: Both
    carried: Both
    method: str
    scale: str = ""
    others: Mapping[str, Both] = field(default_factory=dict)
    controls: tuple[float, ...] = ()
    negated: float | None = None
    writes: bool = True

    @property
    def home(self) -> float:
        """Gain of fine-tuning on the old base."""
        return self.old - self.tuned

    def lift(self, loss: float) -> float | None:
        """The recovered lift of a loss; None: fine-tuning gained nothing at home."""
        return (self.new[0] - loss) / self.home if self.home > 0 else None

    @property
    def recovered(self) -> float | None:
        """Recovered lift: (new base - carried) / (gain of fine-tuning on the old base), of losses."""
        return self.lift(self.carried[0])

    @property
    def known(self) -> float | None:
        """Share of the gain at home that the new base has without the change; None: there is no gain."""
        return (self.old - self.new[0]) / self.home if self.home > 0 else None

    @property
    def is_known(self) -> bool:
        """Whether the new base is better than the old one without the change."""
        return self.known is not None and self.known >= KNOWN

    @property
    def of_the_way(self) -> float | None:
        """(new base - carried) / (new base - fine-tune at home), of losses; None: the fine-tune is no better."""
        distance = self.new[0] - self.tuned
        return (self.new[0] - self.carried[0]) / distance if distance > 0 else None

    @property
    def random(self) -> tuple[float, float] | None:
        """Mean and standard error of the random controls' lifts."""
        lifts = [lift for loss in self.controls if (lift := self.lift(loss)) is not None]
        if len(lifts) < 2:
            return None
        return statistics.mean(lifts), statistics.stdev(lifts) / math.sqrt(len(lifts))

    @property
    def net(self) -> float | None:
        """The recovered lift minus the better control's."""
        negated = None if self.negated is None else self.lift(self.negated)
        if self.recovered is None or self.random is None or negated is None:
            return None
        return self.recovered - max(self.random[0], negated)

    def facts(self) -> dict[str, Any]:
        """Everything, for a report."""
        random = None if self.random is None else dict(zip(("mean", "standard error"), self.random, strict=True))
        derived = {
            "recovered": self.recovered,
            "known to the new base": self.known,
            "of the way to the fine-tune": self.of_the_way,
            "random controls": random,
            "net of controls": self.net,
        }
        return {**asdict(self), "others": dict(self.others), "controls": list(self.controls), **derived}

    def words(self) -> list[str]:
        """Lines on the losses; the last one has the decision and the recovered lift."""
        on_samples, on_texts = self.carried
        lines = [
            f"Loss on the judging samples (nats): old base {self.old:.3f}, its fine-tune {self.tuned:.3f}, new base "
            f"{self.new[0]:.3f}, carried {on_samples:.3f} by {self.method}{self.scale}.",
            f"Loss on the new base's own text: {self.new[1]:.3f} before, {on_texts:.3f} after."
            if self.writes
            else "The loss on the new base's own text is not measured: it writes no text.",
        ]
        if self.others:
            of = "losses on both" if self.writes else "losses on the judging samples"
            tried = (f"{name} {' and '.join(f'{loss:.3f}' for loss in pair)}" for name, pair in self._other_losses())
            lines.append(f"Also tried ({of}): {'; '.join(tried)}.")
        return [*lines, *self._control_words(), *self._known_words(), self._closing()]

    def _other_losses(self) -> Iterator[tuple[str, tuple[float, ...]]]:
        for name, losses in self.others.items():
            yield name, losses if self.writes else losses[:1]

    def _known_words(self) -> list[str]:
        if self.known is None or not self.is_known:
            return []
        known = f"The new base alone already has {self.known:.0%} of what fine-tuning gained on the old base"
        if self.of_the_way is None:
            return [f"{known}: it needs no fine-tune for these samples."]
        return [f"{known}; the fine-tune itself would bring the other {1 - self.known:.0%}."]

    def _control_words(self) -> list[str]:
        negated = None if self.negated is None else self.lift(self.negated)
        if self.random is None or negated is None or self.net is None:
            return []
        mean, error = self.random
        return [
            f"Controls at the same scale: {len(self.controls)} random changes with the same singular values recover "
            f"{mean:.1%} (standard error {error:.1%}), the negated change {negated:.1%}. The lift above the better "
            f"control is {self.net:.1%}."
        ]

    def _closing(self) -> str:
        if self.recovered is None:
            carried = "Nothing was carried. " if self.method == NONE else ""
            return (
                f"{carried}Give samples of the fine-tune's task ('data' or 'judge'): on these it is no better than its "
                "base, so the recovered lift is unknown."
            )
        if self.method == NONE:
            return "Train on the new base instead: it is better alone than with the change. Recovered lift: 0%."
        way = self.of_the_way if self.is_known else None
        more = "" if way is None else f" ({way:.0%} of the way from the new base to the fine-tune)"
        line = f"Recovered lift: {self.recovered:.0%} of what fine-tuning gained on the old base{more}."
        if self.recovered <= 0:
            return f"Train on the new base instead: none of the gain transfers. {line}"
        if max(self.recovered, way or 0.0) < LITTLE:
            return f"Train on the new base instead if you can: little transfers. {line}"
        return line


def random_change(change: Tensor, draw: torch.Generator) -> Tensor:
    """A random change of a map, (..., out, in), with the same singular values and random rotations, float64.

    For a vector, a random one of the same length.
    """
    change = change.double()
    if change.ndim < 2:
        noise = torch.randn(change.shape, generator=draw, dtype=torch.float64).to(change.device)
        return noise * (change.norm() / noise.norm().clamp_min(1e-300))
    if change.ndim > 3:  # a convolution: its kernels are one matrix
        return random_change(change.flatten(1), draw).reshape(change.shape)
    tall = change if change.shape[-2] >= change.shape[-1] else change.mT
    upper = torch.linalg.qr(tall, mode="r").R
    left, right = (torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device) for x in (tall, upper))
    core = upper @ torch.linalg.qr(right).Q
    cholesky = torch.linalg.cholesky(left.mT @ left)  # `left` times the inverse of its transpose is orthonormal
    turned = left @ torch.linalg.solve_triangular(cholesky.mT, core, upper=True)
    return turned if tall is change else turned.mT


FACTORS = (0.0, 0.5, 1.5, 2.0)
"""Factors tried for the scale of each group of blocks, starting from one scale for all."""
GROUPS = 8
"""Of neighbouring blocks, at most, that have scales of their own."""

Scales = dict[str, float]
"""By name of a block."""


@dataclass
class ScaledChange:
    """The new base with a moved change at any scale of each block.

    Attributes:
        tuned: the fine-tune, under the names of the carrier's architecture.
        config: of transformers, the new base's.
        untie: whether a tied head has a tensor of its own.
        rounded: the model's tensors as they would be stored.
    """

    carrier: Carrier
    tuned: TensorSource
    config: Any
    device: str = "cpu"
    untie: bool = True
    rounded: Callable[[TensorSource], TensorSource] = lambda source: source
    ends: dict[str, tuple[str, Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Record for every tensor its block, the (folded) new base's value, and its change."""
        carrier = self.carrier
        block_of = {
            name: block.name for block in carrier.architecture.blocks for i in block.tensors for name in i.names
        }
        start = self._base
        for _, pieces, _, _ in Delta(carrier, self.tuned, dtype=torch.float32).tensors():
            for name, moved in pieces.items():
                first = start[name]
                if moved.is_floating_point() and bool((change := moved - first.to(moved)).any()):
                    self.ends[name] = block_of[name], first, change

    @property
    def _base(self) -> TensorSource:
        carrier = self.carrier
        return folded_source(carrier.architecture, carrier.new, carrier.alignment.folded, carrier.dtype)

    @property
    def blocks(self) -> list[str]:
        """Blocks that change, in the model's order."""
        changed = {block for block, _, _ in self.ends.values()}
        return [block.name for block in self.carrier.architecture.blocks if block.name in changed]

    def model(self, scales: Mapping[str, float] | float) -> Any:
        """The model at some scales."""
        tensors = {
            name: first.to(change) + scale_at(scales, block) * change
            for name, (block, first, change) in self.ends.items()
        }
        source = self.rounded(ReplacedSource(self._base, tensors))
        architecture = self.carrier.architecture
        return Runner(self.config, source, architecture, [], device=self.device, untie=self.untie).fill_all()


def search(
    blocks: Sequence[str],
    losses: Callable[[Mapping[str, float]], Both],
    watch: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Scales, Both, Both]:
    """The scales with the least sum of both losses: one for all, then group by group of neighbouring blocks.

    So the number of evaluations does not grow with the depth.

    Returns:
        The scales (all zero, where nothing is better than none), and the losses at zero and there.
    """
    groups = [blocks[i * len(blocks) // GROUPS : (i + 1) * len(blocks) // GROUPS] for i in range(GROUPS)]
    groups = [group for group in groups if group]
    total, step = len(SCALES) + len(groups) * len(FACTORS), 0

    def ask(scales: Mapping[str, float]) -> Both:
        nonlocal step
        step += 1
        watch("scales", min(step, total), total)
        return losses(scales)

    zero = ask(dict.fromkeys(blocks, 0.0))
    tried = {scale: ask(dict.fromkeys(blocks, scale)) for scale in SCALES[1:]}
    least = min(tried, key=lambda scale: sum(tried[scale]))
    if sum(zero) <= sum(tried[least]):
        least = SCALES[1]
    best, reached = dict.fromkeys(blocks, least), tried[least]
    for group in groups:
        for scale in [factor * best[group[0]] for factor in FACTORS]:
            changed = {**best, **dict.fromkeys(group, scale)}
            after = ask(changed)
            if sum(after) < sum(reached):
                best, reached = changed, after
    if sum(reached) >= sum(zero):
        return dict.fromkeys(blocks, 0.0), zero, zero
    return best, zero, reached


def scale_words(scales: Mapping[str, float]) -> str:
    """The scale of each block, after the carried change's name."""
    return " at these scales of blocks: " + ", ".join(f"{block} {scale:g}" for block, scale in scales.items())
