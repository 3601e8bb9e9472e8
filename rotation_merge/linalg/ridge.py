"""Least squares with a ridge, from sums of products: what a linear map lacks to give what is wanted."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_change(gram: Tensor, cross: Tensor, penalty: Tensor) -> Tensor | None:
    r"""The change D of a linear map that minimises |R - X D^T|^2 + sum_j penalty_j |D_j|^2.

    D = (R^T X) (X^T X + diag(penalty))^-1, by Cholesky in float64.

    Args:
        gram: X^T X, shape (in, in); only its upper triangle is read.
        cross: X^T R, shape (in, out); R is what the map's outputs lack.
        penalty: of each input, shape (in,), not negative.

    Returns:
        D, shape (out, in), float64; None where the sum is singular.
    """
    factor = ridge_factor(gram, penalty)
    return None if factor is None else solved_with(factor, cross)


def ridge_factor(gram: Tensor, penalty: Tensor) -> Tensor | None:
    """The Cholesky factor, for all maps that read the same; see `ridge_change`."""
    whole = gram.double()
    diagonal = whole.diagonal()
    before = diagonal.clone()
    diagonal.add_(penalty)  # and put back: the whole is large
    factor, failed = torch.linalg.cholesky_ex(whole.mT)  # which is read below its diagonal, and columns first
    diagonal.copy_(before)
    if int(failed) or bool((factor.diagonal() < 1e-7 * before.clamp_min(1e-300).sqrt()).any()):
        return None
    return factor


def solved_with(factor: Tensor, cross: Tensor) -> Tensor:
    """The change of a map by the factor of what it reads; see `ridge_change`."""
    return torch.cholesky_solve(cross.double(), factor).mT
