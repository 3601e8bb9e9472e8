"""Samples that judge a carried change: what is held out, losses there, and scales by a search on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.delta import Delta, scale_at
from rotation_merge.errors import DataError
from rotation_merge.model.fold import folded_source
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import Replaced
from rotation_merge.run.data import UNLABELLED, Data, read_batches
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load, local_path
from rotation_merge.run.runner import Runner
from rotation_merge.run.written import SELF, writes_text

AT_ONCE = 16
HELD_OUT = 0.25
"""Share of the samples that nothing is solved from."""


def read_parts(tuned: str, new: str, config: TransferConfig) -> tuple[Data, Data, Data]:
    """What is solved from, what is held out of it, and text of the new base's own.

    Raises:
        DataError: the model writes no text and no data are given, or too few, or without labels.
    """
    model = load(tuned, like=new)
    if config.data == SELF and not writes_text(model):
        raise DataError(f"{type(model).__name__} writes no text of its own", where=tuned, remedy="give --data FILE")
    whole = read_batches(config.data, local_path(tuned), model, **config.reading(AT_ONCE))
    if whole.task in UNLABELLED:
        what = f"holds no labels for {type(model).__name__}, by whose loss it is measured what arrives"
        raise DataError(what, where=config.data, remedy="give data with labels, or carry by weights alone")
    held = max(1, round(HELD_OUT * len(whole.batches)))
    if len(whole.batches) <= held:
        raise DataError(
            f"holds {whole.examples} samples, at least {2 * AT_ONCE} are needed", where=config.data, remedy="give more"
        )
    parts = [
        Data(batches, whole.task, sum(len(next(iter(b.values()))) for b in batches))
        for batches in (whole.batches[:-held], whole.batches[-held:])
    ]
    base: Any = load(new)
    if not writes_text(base):
        return parts[0], parts[1], parts[1]
    own = read_batches(
        SELF, local_path(new), base, **replace(config, samples=AT_ONCE, seed=config.seed + 1).reading(AT_ONCE)
    )
    return parts[0], parts[1], own


SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Of a carried change, among which held-out samples choose."""

LITTLE = 0.1
"""Share of the gain at home below which training again is the advice."""

Both = tuple[float, float]
"""Losses on samples of the fine-tune's kind, and on text that the new base writes."""


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats on samples held out: of the fine-tune's kind, and on text that the new base writes.

    Attributes:
        old, tuned: of the old pair, on the fine-tune's kind; new, own: of the new base, on either.
        carried: by scale, on both.
        writes: whether the new base writes text; where not, the second loss of each pair is the first.
    """

    old: float
    tuned: float
    new: float
    own: float
    carried: dict[float, Both]
    writes: bool = True

    @property
    def best(self) -> float:
        """The scale with the least sum of both losses."""
        return min(self.carried, key=lambda scale: sum(self.carried[scale]))

    def words(self, scale: float, where: str = "") -> list[str]:
        """What the user should know of the scale that was taken (called `where` in words)."""
        there, own = self.carried[scale]
        home = self.old - self.tuned
        lines = [
            f"On samples held out (loss in nats): the old base {self.old:.3f}, its fine-tune {self.tuned:.3f}; the new "
            f"base {self.new:.3f}, carried {there:.3f} {where or f'at scale {scale:g}'}.",
            f"On text that the new base writes itself: {self.own:.3f} before, {own:.3f} after."
            if self.writes
            else "What it costs the new base on its own domain was not measured: it writes no text.",
        ]
        if scale == 0:
            return [*lines, "Nothing is worth carrying: every scale is worse than none. Train on the new base instead."]
        share = (self.new - there) / home if home > 0 else None
        if share is None:
            lines.append(
                "The fine-tune is no better on these than its base, so what arrives of it cannot be told: give samples "
                "of what it was tuned for (--data)."
            )
        if share is not None:
            lines.append(f"That is {share:.0%} of what fine-tuning gained at home.")
        if share is not None and 0 < share < LITTLE:
            lines.append("That is little: where the training data are still there, train on the new base instead.")
        if there >= self.new:
            lines.append("Nothing of it arrives. Train on the new base instead.")
        return lines


def both(model: Any, held_out: Data, own: Data) -> Both:
    """A model's losses on either."""
    return evaluate(model, held_out)[0], evaluate(model, own)[0]


FACTORS = (0.0, 0.5, 1.5, 2.0)
"""What the scale of a block is multiplied by in turn, starting from one scale for all."""

Scales = dict[str, float]
"""By name of a block."""


@dataclass
class Scaled:
    """The new base with a moved change, whatever the scale of each block.

    Attributes:
        tuned: the fine-tune, under the names of the carrier's architecture.
        config: of transformers, the new base's.
    """

    carrier: Carrier
    tuned: TensorSource
    config: Any
    device: str = "cpu"
    ends: dict[str, tuple[str, Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """By tensor: its block, the (folded) new base's value, and its change."""
        carrier = self.carrier
        where = {name: block.name for block in carrier.architecture.blocks for i in block.tensors for name in i.names}
        start = self._base
        for _, pieces, _, _ in Delta(carrier, self.tuned, dtype=torch.float32).tensors():
            for name, moved in pieces.items():
                first = start[name]
                if moved.is_floating_point() and bool((change := moved - first.to(moved)).any()):
                    self.ends[name] = where[name], first, change

    @property
    def _base(self) -> TensorSource:
        carrier, streams = self.carrier, self.carrier.folded
        return folded_source(carrier.architecture, carrier.new, streams, carrier.dtype)

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
        source = Replaced(self._base, tensors)
        own = self.carrier.architecture
        return Runner(self.config, source, own, [], device=self.device, untie=True).fill_all()


def search(
    blocks: Sequence[str],
    losses: Callable[[Mapping[str, float]], Both],
    watch: Callable[[str, int, int], None] = lambda *_: None,
) -> tuple[Scales, Both, Both]:
    """The scales with the least sum of both losses: one for all first, then block after block.

    Returns:
        The scales (all zero, where nothing is better than none), and the losses at zero and there.
    """
    total, step = len(SCALES) + len(blocks) * len(FACTORS), 0

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
    for block in blocks:
        for scale in [factor * best[block] for factor in FACTORS]:
            changed = {**best, block: scale}
            after = ask(changed)
            if sum(after) < sum(reached):
                best, reached = changed, after
    if sum(reached) >= sum(zero):
        return dict.fromkeys(blocks, 0.0), zero, zero
    return best, zero, reached


def scale_words(scales: Mapping[str, float]) -> str:
    """One line on the scales."""
    return "Scale of each block, by samples held out: " + ", ".join(f"{b} {s:g}" for b, s in scales.items()) + "."
