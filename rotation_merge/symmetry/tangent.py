"""Learnable parameters of an element: zero at the element, and inside its group."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_FACTORIALS = [math.factorial(k) for k in range(10)]
_REACH = 0.8
"""Up to this spectral norm the sum is exact in float32: the remainder is 0.8^10 / 10! at most."""


def exp_skew(a: Tensor) -> Tensor:
    r"""``exp(A)`` of skew-symmetric A, in float32: scaling and squaring.

    With ``A / 2^s`` in the place of A, terms up to the ninth power are summed in three groups (Paterson and Stockmeyer,
    1973), and the sum is squared s times. A is normal, so that its spectral norm, ``sqrt(||A^2||_2)``, is all that
    decides about s; ``||A^2||_1`` bounds it. Everything is a product, and gradients are two products for each, where
    those of `torch.matrix_exp` are the exponential of a matrix of twice the size.

    Args:
        a: shape (..., d, d), skew-symmetric, floating.

    Returns:
        Orthogonal matrices, shape (..., d, d), in a's dtype.
    """
    square = a @ a
    norm = math.sqrt(float(square.detach().abs().sum(-1).max()))
    halvings = max(0, math.ceil(math.log2(norm / _REACH))) if norm else 0
    a, square = a / 2**halvings, square / 4**halvings
    cube = a @ square
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    first, two, three = (eye / _FACTORIALS[k] + a / _FACTORIALS[k + 1] + square / _FACTORIALS[k + 2] for k in (0, 3, 6))
    result = first + cube @ (two + cube @ (three + cube / _FACTORIALS[9]))
    for _ in range(halvings):
        result = result @ result
    return result


Steps = Mapping[str, Tensor]
"""Parameters by name, float32; all zero (scores of a permutation: the identity) at the element itself."""


@dataclass(frozen=True)
class Freedom:
    """Learnable quantities besides maps and angles.

    Attributes:
        scales: rescalings.
        permutations: the order of neurons.
        fixes_ones: maps have to fix the all-ones vector (a residual stream under LayerNorm).
    """

    scales: bool = True
    permutations: bool = False
    fixes_ones: bool = False


def like(start: Tensor, step: Tensor, exact: bool) -> Tensor:
    """The start on the step's device, in float64 if `exact`, else in float32."""
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
