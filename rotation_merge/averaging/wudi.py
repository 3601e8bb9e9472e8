r"""WUDI: RegMean with the Grams that the changes imply, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        if len(changes[0].parts) == 1:
            whole = [change.whole() for change in changes]
            if parameters["sides"] == "both":
                return SlicedMatrix.of(both_sides(whole, weights, parameters["ridge"]))
            return SlicedMatrix.of(one_side(whole, shares, self.prior(whole, weights), parameters["ridge"]))
        grams = [change.gram() for change in changes]
        total = torch.zeros_like(grams[0])
        for gram, share in zip(grams, shares, strict=True):
            total.add_(gram, alpha=share)
        solve = _ridge_solver(total, parameters["ridge"])

        def merged(rows: list[Tensor]) -> Tensor:
            prior = self.prior(rows, weights)
            right = torch.zeros_like(prior)
            for change, gram, share in zip(rows, grams, shares, strict=True):
                right.addmm_(change - prior, gram, alpha=share)
            return prior + solve(right)

        return combined(changes, merged)

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
    """``(sum_t a_t D_t G_t + l M) (sum_t a_t G_t + l I)^-1``; see `Wudi`.

    Args:
        shares: a_t: each weight over the squared norm of the change, which its Gram is divided by.
        prior: M.
        ridge: l over the mean eigenvalue of the sum, weighted by itself.
    """
    total = torch.zeros(prior.shape[1], prior.shape[1], dtype=prior.dtype, device=prior.device)
    right = torch.zeros_like(prior)
    wide = 2 * prior.shape[0] < prior.shape[1]  # D D^T D takes less time and memory by D D^T than by D^T D
    for change, share in zip(changes, shares, strict=True):
        if wide:
            total.addmm_(change.mT, change, alpha=share)
            right.addmm_((change - prior) @ change.mT, change, alpha=share)
        else:
            gram = change.mT @ change
            total.add_(gram, alpha=share)
            right.addmm_(change - prior, gram, alpha=share)
    return prior + _ridge_solver(total, ridge)(right)


def _ridge_solver(total: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """``R (G + l I)^-1`` as a function of R; l is `ridge` times G's mean eigenvalue, weighted by itself. Changes G."""
    penalty = ridge * float(total.square().sum() / total.diagonal().sum())
    if penalty == 0.0:
        return lambda right: torch.linalg.lstsq(total, right.mT, driver="gelsd").solution.mT
    total.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(total)
    return lambda right: torch.cholesky_solve(right.mT, factor).mT


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
