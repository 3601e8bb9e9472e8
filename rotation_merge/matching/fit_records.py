"""Options and report of a fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass as config_dataclass

from rotation_merge.config import FOLDER, Config, Count, NotNegative, Numbers, Rate, Share, option
from rotation_merge.matching.objective import Objective
from rotation_merge.matching.options import MatchOn

LOOKS = 12
"""How often a fit looks at the held-out samples."""


@config_dataclass(frozen=True)
class FitConfig(Config):
    """Options of learning an alignment."""

    objective: Objective = option(
        "auto",
        "`distill`: match the parents' outputs, without labels; `labels`: the models' own loss; `auto`: `labels` if "
        "the data has labels",
    )
    steps: Count = option(600, "optimiser steps")
    minutes: NotNegative = option(0.0, "stop after this many minutes; `0`: no limit")
    patience: Count = option(
        5,
        f"stop after this many evaluations on held-out samples ({LOOKS} in all) without a better state",
        command=False,
    )
    learning_rate: Rate = option(0.02, "peak learning rate of Adam, with cosine decay to 0")
    coefficients: Numbers | None = option(
        None,
        "fixed shares of the models, anchor first. Not given: drawn at random around the middle",
        command=False,
    )
    permutations: bool = option(False, "also learn the order of FFN neurons")
    start: Literal["auto", "matched", "identity"] = option(
        "auto",
        "start of the search. `auto`: the better of the other two on held-out samples",
    )
    match_on: MatchOn = option("weights", "what chooses the start's maps, on the same samples", command=False)
    mixing: Share = option(
        0.5,
        "share of distillation steps on mixtures of two samples, which helps with few samples; token ids are not mixed",
        command=False,
    )
    held_out: Share = option(0.15, "share of the batches that is held out to choose the best state", command=False)
    seed: int = option(0, "seed of all random numbers", command=False)
    half: bool = option(False, "mixed precision (bfloat16) on CUDA", command=False)
    checkpointing: bool = option(False, "gradient checkpointing: less memory, more time")
    state: Annotated[FilePath, FOLDER] | None = option(
        None,
        "folder for the state of an unfinished fit. The same fit continues from it if it exists",
        command=False,
    )


@dataclass
class FitReport:
    """The report on a fit.

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
        """One sentence on whether the fit helped."""
        if self.after >= self.unaligned - 1e-3 * abs(self.unaligned) - 1e-4:
            return f"the fit gains nothing over the plain merge (held-out loss {self.unaligned:.4g})"
        return (
            f"held-out loss between the models: plain {self.unaligned:.4g}, at the start {self.before:.4g}, "
            f"learned {self.after:.4g} (barrier {self.barrier_after:.3g} nats)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict()}
