"""What a fit is told, and what it tells."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import Any

LOOKS = 12
"""How often a fit looks at the held-out samples."""


@dataclass(frozen=True)
class FitConfig:
    """How to learn.

    Attributes:
        objective: auto, distill or labels (`learning.objective`).
        steps: optimiser steps.
        minutes: stop after so long, whatever the steps (0: no limit).
        patience: stop early after so many looks at the held-out samples (`LOOKS` in all) without a better state.
        learning_rate: of Adam, at its peak; cosine decay to nothing.
        coefficients: fixed shares of the models, anchor first; None draws them at random around the middle.
        permutations: also learn the order of FFN neurons (straight-through).
        start: auto (the better one on held-out samples), matched or identity.
        match_on: what the start is matched on; not weights alone: the samples that are learned from, too.
        mixing: share of steps that distil mixes of two samples (mixup; not of token ids): more out of few samples.
        held_out: fraction of the batches kept for choosing the best state.
        seed: of everything random.
        half: mixed precision (bfloat16) on CUDA.
        checkpointing: gradient checkpointing, where the model offers it.
        state: file for the state of an unfinished fit; found there, the fit goes on from it.
    """

    objective: str = "auto"
    steps: int = 600
    minutes: float = 0.0
    patience: int = 5
    learning_rate: float = 0.02
    coefficients: tuple[float, ...] | None = None
    permutations: bool = False
    start: str = "auto"
    match_on: str = "weights"
    mixing: float = 0.5
    held_out: float = 0.15
    seed: int = 0
    half: bool = False
    checkpointing: bool = False
    state: FilePath | None = None


@dataclass
class FitReport:
    """What a fit did.

    Attributes:
        start: where it began: matched or identity.
        objective: what was minimised.
        before, after: held-out loss (nats, mean over the inner points of the path) at the start and of what was kept.
        barrier_before, barrier_after: highest held-out loss above the straight line between the ends' losses.
        unaligned: held-out loss of the plain merge, for comparison.
        history: (step, seconds, held-out loss, barrier).
    """

    start: str
    objective: str
    before: float
    after: float
    barrier_before: float
    barrier_after: float
    unaligned: float
    best_step: int
    seconds: float
    history: list[tuple[int, float, float, float]] = field(default_factory=list)

    def verdict(self) -> str:
        """One honest sentence."""
        if self.after >= self.unaligned - 1e-3 * abs(self.unaligned) - 1e-4:
            return f"the fit gains nothing over the plain merge (held-out loss {self.unaligned:.4g})"
        return (
            f"held-out loss between the models: plain {self.unaligned:.4g}, at the start {self.before:.4g}, "
            f"learned {self.after:.4g} (barrier {self.barrier_after:.3g} nats)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict()}
