"""Scales of what weights alone carry, block by block, by a line search on samples held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.carry_losses import SCALES, Both
from rotation_merge.carrying.tuned import Tuned, scale_at
from rotation_merge.model.fold import folded_source
from rotation_merge.model.source import TensorSource
from rotation_merge.model.sources import Replaced
from rotation_merge.run.runner import Runner

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
        for _, pieces, _, _ in Tuned(carrier, self.tuned, dtype=torch.float32).tensors():
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


def words(scales: Mapping[str, float]) -> str:
    """One line on the scales."""
    return "Scale of each block, by samples held out: " + ", ".join(f"{b} {s:g}" for b, s in scales.items()) + "."
