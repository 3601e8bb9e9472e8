"""Least squares with a ridge, from sums of products: what a linear map lacks to give what is wanted."""

from __future__ import annotations

import torch
from torch import Tensor


def ridge_change(gram: Tensor, cross: Tensor, penalty: Tensor) -> Tensor | None:
    r"""The change D of a linear map that minimises |R - X D^T|^2 + sum_j penalty_j |D_j|^2.

    D = (R^T X) (X^T X + diag(penalty))^-1, by Cholesky in float64.

    Args:
        gram: X^T X, shape (in, in).
        cross: X^T R, shape (in, out); R is what the map's outputs lack.
        penalty: of each input, shape (in,), not negative.

    Returns:
        D, shape (out, in), float64; None where the sum is singular.
    """
    gram, cross = gram.double(), cross.double()
    whole = gram.clone()
    whole.diagonal().add_(penalty)
    factor, failed = torch.linalg.cholesky_ex(whole)
    pivots = factor.diagonal()
    if int(failed) or bool((pivots < 1e-7 * gram.diagonal().clamp_min(1e-300).sqrt()).any()):
        return None
    return torch.cholesky_solve(cross, factor).mT
