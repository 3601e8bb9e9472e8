r"""WUDI: RegMean with the Grams that the changes imply, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from mergekit.merge_methods.base import MergeMethodSpec
from torch import Tensor

from rotation_merge.averaging.methods import mean
from rotation_merge.averaging.parameters import parameter
from rotation_merge.averaging.sliced import SlicedMatrix, combined
from rotation_merge.averaging.task_vectors import COMMON, CONTRACT, TaskVectorMethod
from rotation_merge.config import NotNegative

WUDI_RIDGE = 0.05
"""Default strength of the pull of `wudi` towards its prior, relative to the mean eigenvalue of the Grams."""

BESIDE_RIDGE = 0.3
"""The same of `WudiBeside`: more of the plain sum, which is the prior there."""

SINGLE = 1024
"""Rows of Grams from which on they are formed and solved in float32: half the time and memory."""

CONDITIONED = 0.01
"""Least ridge of float32: the condition number is at most ``1 + (1 + rows^1/2) / (2 ridge)``, whatever the changes."""

STEPS = 30
"""Of conjugate gradients, where both sides of a map are weighed."""

PRIOR = 0.7
"""Factor of the sum of the changes in the prior of `both` sides."""


class Wudi(TaskVectorMethod):
    r"""RegMean with the Grams that the changes imply, in closed form.

    ``D = (sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1`` with ``G_t = D_t^T D_t`` and M the mean of the changes; l
    is `ridge` times the mean eigenvalue of the sum, each weighted by itself. (The plain mean is next to nothing where
    the changes have low rank, as those of LoRAs, and D grows out of proportion.) `sides: both` also weighs the outputs,
    by ``L_t = D_t D_t^T``: ``sum_t L_t D G_t = sum_t L_t D_t G_t``, by conjugate gradients.

    Source: Cheng and others 2025 (WUDI-Merging, arXiv 2503.08099, equation 9, there by gradient descent).
    """

    spec = MergeMethodSpec(
        name="wudi",
        pretty_name="WUDI (closed form)",
        reference_url="https://arxiv.org/abs/2503.08099",
        parameters=(
            *COMMON,
            parameter(
                "ridge",
                WUDI_RIDGE,
                "strength of the pull towards the mean of the changes, relative to the mean eigenvalue of the Grams",
                NotNegative,
            ),
            parameter(
                "sides", "one", "Grams of one side (inputs) or both (inputs and outputs)", Literal["one", "both"]
            ),
        ),
        contract=CONTRACT,
    )

    def change(
        self, changes: Sequence[SlicedMatrix], weights: Sequence[float], parameters: Mapping[str, Any]
    ) -> SlicedMatrix:
        shares = [weight / c.norm**2 if c.norm else 0.0 for c, weight in zip(changes, weights, strict=True)]
        if len(changes[0].parts) > 1:
            solve = _by_inputs(changes, shares, parameters["ridge"])
            return combined(changes, lambda rows: solve(rows, self.prior(rows, weights)))
        whole = [change.whole() for change in changes]
        if parameters["sides"] == "both":
            return SlicedMatrix.of(both_sides(whole, weights, parameters["ridge"]))
        return SlicedMatrix.of(one_side(whole, shares, self.prior(whole, weights), parameters["ridge"]))

    def prior(self, changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """M, of whole changes or of the same rows of each."""
        return mean(changes, weights)


class WudiBeside(Wudi):
    """The same with the sum of the changes as M: one change beside another one.

    Where the two read from orthogonal inputs (``second @ first^T = 0``) the result is their sum.
    """

    def prior(self, changes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return sum(weights) * mean(changes, weights)


def one_side(changes: Sequence[Tensor], shares: Sequence[float], prior: Tensor, ridge: float) -> Tensor:
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
    """`one_side` as a function of all rows of the changes and of M, or of the same ones, by Grams (inputs, inputs).

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
    """`one_side` by a Gram (changes * outputs, changes * outputs), where that is smaller than (inputs, inputs).

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


def both_sides(changes: Sequence[Tensor], weights: Sequence[float], ridge: float) -> Tensor:
    """``sum_t L_t D G_t = sum_t L_t D_t G_t`` with a ridge towards `PRIOR` times the sum, by conjugate gradients.

    The sum is the weighted mean times the number of changes that count, ``(sum_t w_t)^2 / sum_t w_t^2``: of equal
    weights, their plain sum.
    Each factor is divided by its trace; of the two the smaller one is formed. Both have the eigenvalues of G_t, so that
    the ridge is the sum of the squares of `ridge` times their mean, weighted by themselves.
    """
    wide = changes[0].shape[0] <= changes[0].shape[1]
    grams = [(d, d @ d.mT if wide else d.mT @ d, w) for d, w in zip(changes, weights, strict=True) if bool(d.any())]
    counting = [(d, gram, w / float(gram.trace()) ** 2) for d, gram, w in grams]
    unit = sum(w * w for _, _, w in grams) / sum(w for _, _, w in grams)
    start = PRIOR * sum((w / unit * d for d, _, w in grams), torch.zeros_like(changes[0]))
    penalty = sum(share * (ridge * float(gram.square().sum() / gram.trace())) ** 2 for _, gram, share in counting)

    def gram_product(x: Tensor, change: Tensor, gram: Tensor, share: float) -> Tensor:
        """``D D^T X D^T D``, computed with the smaller Gram of D."""
        if wide:
            return share * (gram @ (x @ change.mT) @ change)
        return share * (change @ (change.mT @ x @ gram))

    def apply(x: Tensor) -> Tensor:
        return sum((gram_product(x, *term) for term in counting), penalty * x)

    merged = start.clone()
    residual = sum((gram_product(term[0], *term) for term in counting), penalty * start) - apply(start)
    direction, size = residual.clone(), float(residual.square().sum())
    least = 1e-24 * max(size, 1e-300)
    for _ in range(STEPS):
        if size <= least:
            break
        image = apply(direction)
        step = size / float((direction * image).sum())
        merged.add_(direction, alpha=step)
        residual.sub_(image, alpha=step)
        before, size = size, float(residual.square().sum())
        direction = residual + (size / before) * direction
    return merged
