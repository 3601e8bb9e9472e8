r"""Orthogonal Procrustes problems, solved for a whole batch of matrices at once.

Throughout, ``M = A B^T`` is the inner-product matrix of an anchor ``A`` (d, m) and a donor ``B`` (d, m);
the best orthogonal ``R`` is applied to the donor: ``aligned = R @ B``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RANK_TOLERANCE = 1e-10
"""Singular values below this fraction of the largest are taken for zero."""

FLOAT32_RANK_TOLERANCE = 1e-6
"""The same where the products were summed in float32."""

TIE_TOLERANCE = 1e-12
"""A map whose gain over the identity is below this fraction of the optimum gives way to the identity."""


def procrustes(products: Tensor, rank_tolerance: float = RANK_TOLERANCE) -> Tensor:
    r"""Orthogonal R maximising <R, M>; equivalently minimising ||R B - A||_F. May reflect.

    With M = U diag(s) V^T the optimum is R = U V^T. Where M is rank deficient the optimum is not unique: on
    the null spaces the orthogonal map nearest to the identity is taken, and where the identity itself attains
    the optimum it is returned exactly.

    Args:
        products: M = A B^T, shape (..., d, d), floating.
        rank_tolerance: singular values below this fraction of the largest are taken for zero; for products of
            float32 matrices their rounding (`FLOAT32_RANK_TOLERANCE`).

    Returns:
        R, shape (..., d, d), float64, on M's device; use ``R @ donor``.

    Source: Schonemann (1966); ICML 2025 paper, section 4.2.
    """
    m = products.double()
    u, s, vh = torch.linalg.svd(m)
    rotation = u @ vh
    small = s <= rank_tolerance * s[..., :1]
    if bool(small.any()):
        rotation = torch.where(small.any(-1)[..., None, None], _completed(u, small, vh), rotation)
    return _snap_to_identity(rotation, s.sum(-1), m)


def _completed(u: Tensor, small: Tensor, vh: Tensor) -> Tensor:
    """U V^T on the range; from null space to null space the partial isometry nearest to the identity, (..., d, d).

    In the bases U and V the map is the identity on the range and, between the null spaces, the polar factor of their
    bases' inner products; both blocks are solved as one matrix.
    """
    in_range = (~small)[..., None, :].to(u.dtype)
    left, right = u * (1 - in_range), vh * (1 - in_range).mT
    inner = left.mT @ right.mT + torch.diag_embed(in_range[..., 0, :])
    a, _, b = torch.linalg.svd(inner)
    return u @ (a @ b) @ vh


def _snap_to_identity(rotation: Tensor, optimum: Tensor, m: Tensor) -> Tensor:
    trace = m.diagonal(dim1=-2, dim2=-1).sum(-1)
    tie = optimum - trace <= TIE_TOLERANCE * optimum
    eye = torch.eye(m.shape[-1], dtype=rotation.dtype, device=rotation.device)
    return torch.where(tie[..., None, None], eye, rotation)


def random_orthogonal(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Haar-distributed orthogonal matrices, shape (count, size, size), float64.

    Source: Mezzadri (2007), QR of a Gaussian matrix with the signs of R's diagonal taken out.
    """
    gaussian = torch.randn(count, size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]


def complement_of_ones(size: int) -> Tensor:
    """Orthonormal basis of the complement of the all-ones vector, shape (size, size - 1), float64 (Helmert)."""
    steps = torch.arange(1, size, dtype=torch.float64)
    basis = torch.ones(size, size - 1, dtype=torch.float64).triu()
    basis.diagonal(-1).copy_(-steps)
    return basis / (steps * (steps + 1)).sqrt()


REACH = 0.8
"""Up to this spectral norm the sum of `exp_skew` is exact in float32: the remainder is 0.8^10 / 10! at most."""
_FACTORIALS = [math.factorial(k) for k in range(10)]


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
    halvings = max(0, math.ceil(math.log2(norm / REACH))) if norm else 0
    a, square = a / 2**halvings, square / 4**halvings
    cube = a @ square
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    first, two, three = (eye / _FACTORIALS[k] + a / _FACTORIALS[k + 1] + square / _FACTORIALS[k + 2] for k in (0, 3, 6))
    result = first + cube @ (two + cube @ (three + cube / _FACTORIALS[9]))
    for _ in range(halvings):
        result = result @ result
    return result
