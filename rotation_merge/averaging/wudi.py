r"""WUDI: RegMean with the Grams that the changes imply, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotation_merge.averaging.methods import mean, weighted_sum
from rotation_merge.averaging.parameters import parameter
from rotation_merge.averaging.sliced import SlicedMatrix, combined
from rotation_merge.averaging.task_vectors import TaskVectorMethod, spec_of
from rotation_merge.config import NotNegative

WUDI_RIDGE = 0.05
"""Default strength of the pull of `wudi` towards its prior, relative to the mean eigenvalue of the Grams."""

BESIDE_RIDGE = 0.3
"""The same of `WudiBeside`: more of the plain sum, which is the prior there."""

SINGLE = 1024
"""Rows of Grams from which on they are formed and solved in float32: half the time and memory."""

CONDITIONED = 0.01
"""Least ridge of float32: the condition number is at most ``1 + (1 + rows^1/2) / (2 ridge)``, whatever the changes."""

Rows = Callable[[Sequence[Tensor]], Tensor]
"""A matrix as a function of all rows of the changes, or of the same rows of each."""


class Wudi(TaskVectorMethod):
    r"""RegMean with the Grams that the changes imply, in closed form.

    ``D = (sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1`` with ``G_t = D_t^T D_t``. l is `ridge` times the mean
    eigenvalue of the sum, each weighted by itself. (The plain mean is next to nothing where the changes have low rank,
    as those of LoRAs, and D grows out of proportion.) M, which D is where the Grams say little, is the sum of the
    changes, in which what they share counts once (`prior_of`).

    Source: Cheng and others 2025 (WUDI-Merging, arXiv 2503.08099, equation 9, there by gradient descent and without M).
    """

    spec = spec_of(
        "wudi",
        "WUDI (closed form)",
        "2503.08099",
        parameter(
            "ridge",
            WUDI_RIDGE,
            "strength of the pull towards the sum of the changes, where what they share counts once, relative to "
            "the mean eigenvalue of the Grams",
            NotNegative,
        ),
    )

    def change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        if len(changes) == 1:
            return changes[0]
        shares = [weight / change.norm**2 for change, weight in zip(changes, weights, strict=True)]
        prior = self.prior(changes, weights)
        if len(changes[0].parts) > 1:
            solve = _by_inputs(changes, shares, parameters["ridge"])
            return combined(changes, lambda rows: solve(rows, prior(rows)))
        whole = [change.whole() for change in changes]
        return SlicedMatrix.of(closed_form(whole, shares, prior(whole), parameters["ridge"]))

    def prior(self, changes: Sequence[SlicedMatrix], weights: Sequence[float]) -> Rows:
        return prior_of(changes, weights)


class WudiBeside(Wudi):
    """The same with the plain sum of the changes as M, whatever they share: one change beside another one.

    Three fine-tunes of SmolLM2-135M beside another base's change so lose 0.007 nats less on their texts than by `Wudi`
    at its own ridge, and 0.016 more on the base's own.
    """

    def prior(self, changes: Sequence[SlicedMatrix], weights: Sequence[float]) -> Rows:
        return lambda rows: weighted_sum(rows, weights)


def prior_of(changes: Sequence[SlicedMatrix], weights: Sequence[float]) -> Rows:
    """M of `Wudi`: the sum of the changes, each of which it holds once.

    It is the weighted mean, lengthened until it holds each change once on the average (``<M, D_t> / |D_t|^2 = 1``), but
    to no more than the sum (``sum_t w_t / sum_t w_t^2`` times the weighted one). So orthogonal changes of equal weights
    give their sum, and equal changes themselves.

    Args:
        changes: D_t, (outputs, inputs), float64; none is zero.
        weights: of the mean, positive.

    Source: Singular Value Calibration (arXiv 2602.05536), here of the whole map instead of each singular direction.
    """
    products = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for part in changes[0].parts:
        rows = [change.rows(part).flatten() for change in changes]
        products += torch.tensor([[float(x @ y) for y in rows] for x in rows], dtype=torch.float64)
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    mean_share = float(shares @ ((products @ shares) / products.diagonal()))
    length = 1 / max(mean_share, float(shares @ shares))
    return lambda rows: length * mean(rows, weights)


def closed_form(changes: Sequence[Tensor], shares: Sequence[float], prior: Tensor, ridge: float) -> Tensor:
    """``(sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1``, float64; see `Wudi`.

    Args:
        changes: D_t, (outputs, inputs), float64; not all zero.
        shares: a_t: each weight over the squared norm of the change, which its Gram is divided by.
        prior: M, (outputs, inputs), float64; any matrix.
        ridge: l over the mean eigenvalue of the sum, weighted by itself.
    """
    if ridge and len(changes) * prior.shape[0] < prior.shape[1]:
        return _by_outputs(changes, shares, prior, ridge)
    return _by_inputs([SlicedMatrix.of(change) for change in changes], shares, ridge)(changes, prior)


def _by_inputs(
    changes: Sequence[SlicedMatrix], shares: Sequence[float], ridge: float
) -> Callable[[Sequence[Tensor], Tensor], Tensor]:
    """`closed_form` as a function of all rows of the changes and of M, or of the same ones, by Grams (inputs, inputs).

    With B one of the changes it is ``B + (sum_t a_t (D_t - B) G_t + l (M - B)) (sum_t a_t G_t + l I)^-1``, which takes
    no product for B. Without a ridge, B is M: where the Grams have no eigenvalues, nothing else determines D.
    """
    first = changes[0].rows(changes[0].parts[0])
    outputs, inputs = first.shape
    wide = len(changes[0].parts) == 1 and 2 * outputs < inputs  # X D^T D takes less by X D^T than by D^T D
    dtype = _precision(inputs, ridge)
    total, products = first.new_zeros(inputs, inputs, dtype=dtype), list[Callable[[Tensor], Tensor]]()
    for change, share in zip(changes, shares, strict=True):
        scaled = change.to(dtype) * share**0.5  # the factor first: squares of small numbers vanish in float32
        gram = scaled.gram()
        total.add_(gram)
        products.append(partial(_twice, factor=scaled.whole()) if wide else partial(torch.matmul, other=gram))
    penalty, solve = _ridge_solver(total, ridge)

    def merged(rows: Sequence[Tensor], prior: Tensor) -> Tensor:
        start = rows[-1] if ridge else prior
        right = torch.zeros_like(prior, dtype=dtype)
        for change, product in zip(rows, products, strict=True):
            if change is not start:
                right.add_(product((change - start).to(dtype)))
        return start + solve(right.add_(prior - start, alpha=penalty))

    return merged


def _by_outputs(changes: Sequence[Tensor], shares: Sequence[float], prior: Tensor, ridge: float) -> Tensor:
    """`closed_form` by a Gram (changes * outputs, changes * outputs), where that is smaller than (inputs, inputs).

    With S the changes times ``a_t^1/2`` one below the other, and W ``a_t^1/2 (D_t - M) D_t^T`` side by side, it is
    ``M + W S (S^T S + l I)^-1 = M + W (S S^T + l I)^-1 S``; the two products have the same eigenvalues but zeros.
    """
    dtype = _precision(len(changes) * len(prior), ridge)
    stacked = torch.cat([change.to(dtype) * share**0.5 for change, share in zip(changes, shares, strict=True)])
    parts = stacked.split(len(prior))
    right = torch.cat([(d - prior).to(dtype) @ part.mT for d, part in zip(changes, parts, strict=True)], 1)
    _, solve = _ridge_solver(SlicedMatrix.of(stacked.mT).gram(), ridge)
    return prior + solve(right) @ stacked


def _twice(x: Tensor, factor: Tensor) -> Tensor:
    """``X D^T D``."""
    return (x @ factor.mT) @ factor


def _precision(size: int, ridge: float) -> torch.dtype:
    """The type that Grams of so many rows are formed and solved in."""
    return torch.float32 if size >= SINGLE and ridge >= CONDITIONED else torch.float64


def _ridge_solver(total: Tensor, ridge: float) -> tuple[float, Callable[[Tensor], Tensor]]:
    """l, `ridge` times G's mean eigenvalue weighted by itself, and ``R (G + l I)^-1`` as a function of R. Changes G."""
    penalty = ridge * float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2 / float(total.trace())
    if penalty == 0.0:
        return penalty, lambda right: torch.linalg.lstsq(total, right.mT, driver="gelsd").solution.mT
    total.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(total)
    return penalty, lambda right: torch.cholesky_solve(right.mT, factor).mT
