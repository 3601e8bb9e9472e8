"""What learning moves of an element: parameters that are zero at the element and cannot lead out of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.linalg.exponential import exp_skew

Steps = Mapping[str, Tensor]
"""Parameters by name, float32; all zero (scores of a permutation: the identity) at the element itself."""


@dataclass(frozen=True)
class Freedom:
    """What may be learned besides maps and angles.

    Attributes:
        scales: rescalings.
        permutations: the order of neurons.
        fixes_ones: maps have to fix the all-ones vector (a residual stream under LayerNorm).
    """

    scales: bool = True
    permutations: bool = False
    fixes_ones: bool = False


def like(start: Tensor, step: Tensor, exact: bool) -> Tensor:
    """The start where the step lies: in float64 if `exact`, else in float32."""
    return start.to(device=step.device, dtype=torch.float64 if exact else torch.float32)


def scaled(start: Tensor, steps: Steps, exact: bool) -> Tensor:
    """``start * exp(log_scale)``; the start where no scale is learned."""
    step = next(iter(steps.values()))
    start = like(start, step, exact)
    return start * like(steps["log_scale"], step, exact).exp() if "log_scale" in steps else start


def turned(turn: Tensor, exact: bool) -> Tensor:
    """The rotations ``exp(A - A^T)``, shape (G, d, d)."""
    skew = like(turn - turn.mT, turn, exact)
    return torch.matrix_exp(skew) if exact else exp_skew(skew)
