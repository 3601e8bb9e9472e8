r"""Averages that minimise a quadratic form of the change, one tensor at a time, in float64.

Directions: a weight here is W, shape (outputs, inputs), so that ``y = W x``; A is the Gram of inputs, B that of the
gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.errors import StatisticsError

RIDGE_REMEDY = "set 'ridge' (0.001 is a good start), or measure on more samples"


@dataclass(frozen=True)
class Metric:
    """A symmetric positive matrix: dense, or ``diag(diagonal) + factor @ factor^T``."""

    dense: Tensor | None = None
    diagonal: Tensor | None = None
    factor: Tensor | None = None

    @property
    def trace(self) -> Tensor:
        if self.dense is not None:
            return self.dense.diagonal().sum()
        return _there(self.diagonal).sum() + _there(self.factor).square().sum()

    @property
    def size(self) -> int:
        return len(_there(self.diagonal if self.dense is None else self.dense))

    def shrunk(self, shrink: float, ridge: float) -> Metric:
        """Off-diagonals times `shrink`, plus `ridge` times the mean of the diagonal."""
        floor = ridge * self.trace / self.size
        if self.dense is not None:
            diagonal = self.dense.diagonal()
            return Metric(shrink * self.dense + torch.diag((1 - shrink) * diagonal + floor))
        diagonal, factor = _there(self.diagonal), _there(self.factor)
        factor_diagonal = factor.square().sum(1)
        return Metric(diagonal=diagonal + (1 - shrink) * factor_diagonal + floor, factor=shrink**0.5 * factor)

    def times(self, w: Tensor) -> Tensor:
        """``w @ self``."""
        if self.dense is not None:
            return w @ self.dense
        factor = _there(self.factor)
        return w * _there(self.diagonal) + (w @ factor) @ factor.T


def _there(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("a metric is dense, or has a diagonal and a factor")
    return tensor


def mean(weights: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean, in float64."""
    total = sum(shares)
    if total == 0:
        raise StatisticsError("the weights of the models sum to zero", remedy="give positive weights")
    return sum((share / total) * w.double() for share, w in zip(shares, weights, strict=True))  # type: ignore[return-value]


def regmean(weights: Sequence[Tensor], grams: Sequence[Metric], shares: Sequence[float]) -> Tensor:
    r"""``W = (sum_k a_k W_k G_k) (sum_k a_k G_k)^-1``.

    Args:
        weights: (outputs, inputs) each.
        grams: of the inputs, shrunk and with their ridge.
        shares: a_k.

    Raises:
        StatisticsError: the sum of the Grams is singular.

    Source: Jin, Ren, Preotiuc-Pietro and Cheng 2023, equation 1.
    """
    if sum(shares) == 0 or all(float(gram.trace) == 0 for gram in grams):
        return mean(weights, shares)
    # what the models agree on comes out bit for bit: solve for the differences from the first
    first = weights[0].double()
    right = sum(a * g.times(w.double() - first) for a, g, w in zip(shares, grams, weights, strict=True))
    return first + _over(right, grams, shares)  # type: ignore[arg-type]


def _over(right: Tensor, grams: Sequence[Metric], shares: Sequence[float]) -> Tensor:
    """``right @ (sum_k a_k G_k)^-1``."""
    if all(gram.dense is not None for gram in grams):
        total: Tensor = sum(a * _there(g.dense) for a, g in zip(shares, grams, strict=True))  # type: ignore[assignment]
        return torch.cholesky_solve(right.T, _cholesky(total)).T
    if any(gram.dense is not None for gram in grams):
        raise StatisticsError(
            "some models have full Grams and others have them of low rank", remedy="measure all with one 'rank'"
        )
    diagonal: Tensor = sum(a * _there(g.diagonal) for a, g in zip(shares, grams, strict=True))  # type: ignore[assignment]
    factor = torch.cat([a**0.5 * _there(g.factor) for a, g in zip(shares, grams, strict=True)], 1)
    if bool((diagonal <= 0).any()):
        raise StatisticsError("the Grams of a map are singular", remedy=RIDGE_REMEDY)
    scaled = factor / diagonal[:, None]
    inner = torch.eye(factor.shape[1], dtype=torch.float64, device=factor.device) + factor.T @ scaled
    return right / diagonal - torch.cholesky_solve(((right / diagonal) @ factor).T, _cholesky(inner)).T @ scaled.T


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


def kfac(
    weights: Sequence[Tensor], inputs: Sequence[Tensor], outputs: Sequence[Tensor], shares: Sequence[float]
) -> Tensor:
    r"""The W that minimises ``sum_k a_k tr(B_k (W - W_k) A_k (W - W_k)^T)``.

    Args:
        weights: (outputs, inputs) each.
        inputs: A_k, (inputs, inputs), positive definite.
        outputs: B_k, (outputs, outputs), likewise.
        shares: a_k.

    With all B_k alike it is RegMean. Two models are solved by simultaneous diagonalisation of both pairs, more by
    conjugate gradients.

    Raises:
        StatisticsError: a matrix is singular.
    """
    first = weights[0].double()
    changes = [w.double() - first for w in weights]
    right: Tensor = sum(a * b @ d @ g for a, b, d, g in zip(shares, outputs, changes, inputs, strict=True))  # type: ignore[assignment]
    if len(weights) == 2:
        u, mu = _jointly_diagonalised(outputs[0], outputs[1])
        v, nu = _jointly_diagonalised(inputs[0], inputs[1])
        inner = (u.T @ right @ v) / (shares[0] + shares[1] * mu[:, None] * nu[None, :])
        return first + u @ inner @ v.T

    def apply(w: Tensor) -> Tensor:
        return sum(a * b @ w @ g for a, b, g in zip(shares, outputs, inputs, strict=True))  # type: ignore[return-value]

    output_factor = _cholesky(sum(a * b for a, b in zip(shares, outputs, strict=True)))  # type: ignore[arg-type]
    over = _cholesky(sum(a * g for a, g in zip(shares, inputs, strict=True)))  # type: ignore[arg-type]
    scale = sum(shares)

    def before(r: Tensor) -> Tensor:
        return scale * torch.cholesky_solve(torch.cholesky_solve(r, output_factor).T, over).T

    return first + conjugate_gradients(apply, right, before)


def _jointly_diagonalised(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """V and nu with ``V^T first V = I`` and ``V^T second V = diag(nu)``."""
    lower = _cholesky(first)
    half = torch.linalg.solve_triangular(lower, second, upper=False)
    whole = torch.linalg.solve_triangular(lower, half.T, upper=False)
    values, vectors = torch.linalg.eigh((whole + whole.T) / 2)
    return torch.linalg.solve_triangular(lower.T, vectors, upper=True), values.clamp(min=0)


TOLERANCE, MOST_STEPS = 1e-10, 500
"""Of conjugate gradients: the residual's norm over the right side's, and steps."""


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    right: Tensor,
    before: Callable[[Tensor], Tensor],
) -> Tensor:
    """Solve ``apply(x) = right`` for a symmetric positive operator, preconditioned by `before`.

    Raises:
        StatisticsError: it does not converge.
    """
    x, residual = torch.zeros_like(right), right
    size = float(right.norm())
    if size == 0:
        return x
    z = before(residual)
    direction, rho = z, float((residual * z).sum())
    for _ in range(MOST_STEPS):
        moved = apply(direction)
        step = rho / float((direction * moved).sum())
        x = x + step * direction
        residual = residual - step * moved
        if float(residual.norm()) <= TOLERANCE * size:
            return x
        z = before(residual)
        rho, last = float((residual * z).sum()), rho
        direction = z + (rho / last) * direction
    raise StatisticsError("the models' statistics contradict each other too much to be averaged", remedy=RIDGE_REMEDY)
