r"""Averages that minimise a quadratic form of the change, one tensor at a time, in float64.

Directions: a weight here is W, shape (outputs, inputs), so that ``y = W x``; G is the Gram of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rotation_merge.errors import StatisticsError

RIDGE_REMEDY = "set 'ridge' (0.001 is a good start), or measure on more samples"


def shrunk(gram: Tensor, shrink: float, ridge: float) -> Tensor:
    """A Gram (n, n) with its off-diagonals times `shrink`, plus `ridge` times the mean of the diagonal."""
    diagonal = gram.diagonal()
    floor = ridge * diagonal.sum() / len(gram)
    return shrink * gram + torch.diag((1 - shrink) * diagonal + floor)


def mean(weights: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, in float64."""
    total = sum(shares)
    if total == 0:
        raise StatisticsError("the weights of the models sum to zero", remedy="give positive weights")
    return sum((share / total) * w.double() for share, w in zip(shares, weights, strict=True))  # type: ignore[return-value]


def regmean(weights: Sequence[Tensor], grams: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    r"""``W = (sum_k a_k W_k G_k) (sum_k a_k G_k)^-1``.

    Args:
        weights: (outputs, inputs) each.
        grams: (inputs, inputs) each, shrunk and with their ridge.
        shares: a_k.

    Raises:
        StatisticsError: the sum of the Grams is singular.

    Source: Jin, Ren, Preotiuc-Pietro and Cheng 2023, equation 1.
    """
    if sum(shares) == 0 or all(float(gram.trace()) == 0 for gram in grams):
        return mean(weights, shares)
    # what the models agree on comes out bit for bit: solve for the differences from the first
    first = weights[0].double()
    right: Tensor = sum(a * ((w.double() - first) @ g) for a, g, w in zip(shares, grams, weights, strict=True))  # type: ignore[assignment]
    total: Tensor = sum(a * g for a, g in zip(shares, grams, strict=True))  # type: ignore[assignment]
    return first + torch.cholesky_solve(right.T, _cholesky(total)).T


def _cholesky(total: Tensor) -> Tensor:
    """The lower factor; a matrix without one is singular."""
    lower, info = torch.linalg.cholesky_ex(total)
    smallest = lower.diagonal().min() ** 2
    if int(info) != 0 or not float(smallest) > 1e-13 * float(total.diagonal().max()):
        raise StatisticsError("the Grams of a map are singular: too few samples, or none", remedy=RIDGE_REMEDY)
    return lower


def fisher(weights: Sequence[Tensor], fishers: Sequence[Tensor], shares: Sequence[float], floor: float) -> Tensor:
    r"""``sum_k a_k F_k W_k / sum_k a_k F_k``, coordinate by coordinate.

    Args:
        fishers: of the shape of the weights, not negative.
        shares: a_k, over the norm of each model's whole Fisher where that is wanted.
        floor: the least of the first model's: where all vanish its value is kept.

    Source: Matena and Raffel 2022, equation 6; floor and normalisation as in their code.
    """
    first = weights[0].double()
    floored = [f.double().clamp(min=floor) if i == 0 else f.double() for i, f in enumerate(fishers)]
    total = sum(a * f for a, f in zip(shares, floored, strict=True))
    change = sum(a * f * (w.double() - first) for a, f, w in zip(shares, floored, weights, strict=True))
    return first + torch.where(total == 0, torch.zeros_like(first), change / total)  # type: ignore[arg-type]
