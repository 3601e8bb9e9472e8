r"""Dual of the joint problem of a map and a scale: upper bounds on its gain, which prove optima.

The gain of the joint problem at a scale a is 2 h(a) - a^2 P - D / a^2 with h(a) = |a M_P + M_D / a|_* (a modulus for a
plane). For any positive definite H, |M|_* <= (tr H + tr H^-1 M M^T) / 2, with equality for H = (M M^T)^(1/2). One H
bounds the gain at all scales, and the scale at which that bound is largest is known:

    gain <= tr H + 2 tr H^-1 M_P M_D^T - 2 sqrt((P - tr H^-1 M_P M_P^T) (D - tr H^-1 M_D M_D^T)),

as long as both factors under the root are positive. With the H of the best scale the bound is attained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.linalg.scaling import LARGEST_LOG_SCALE, best_scale, cost

_STEPS = 12
_SETTLED = 1e-9  # change of the log of a squared scale
_TIE = 1e-12  # share of the norms that counts as nothing
_ROUNDING = 1e-14  # share of the largest eigenvalue by which all may be wrong
_LOOKS = 3  # at eigenvectors, for those whose bound is not _CLOSE to what is attained, as a share of tr H
_CLOSE = 1e-3
_FLOORS = (0.0, 1e-3, 3e-3, 0.01, 0.03, 0.1)  # added to H, as shares of its mean
_SPREAD = 0.85  # a typical |M|_* over sqrt(d) |M|_F, of a matrix of independent entries


def plane_scale(primal: Tensor, dual: Tensor, norms: tuple[Tensor, Tensor], guess: Tensor) -> tuple[Tensor, Tensor]:
    """Best scales of planes for h(a) = |a z + w / a|, and whether the bound proves each of them optimal.

    Args:
        primal, dual: z and w, complex, any shape.
        norms: P and D.
        guess: starts, positive.

    Returns:
        a, 1 where that gains as much; and whether it is proven to be the best, elementwise.
    """
    products = tuple(x[..., None] for x in (primal.abs().square(), dual.abs().square(), (primal * dual.conj()).real))
    unit = torch.ones_like(norms[0])
    squared = _climbed(products, norms, guess.square())
    size = _sizes(products, squared)
    gained = _gain(size, norms, squared)
    bound = _bound(products, norms, size)
    plain = _gain(_sizes(products, unit), norms, unit)
    tie = _TIE * (norms[0] + norms[1])
    alive = (norms[0] > 0) & (norms[1] > 0)
    inside = squared.log().abs() < 2 * LARGEST_LOG_SCALE
    moves = alive & (gained - plain > tie)
    return torch.where(moves, squared.sqrt(), unit), ~alive | (inside & (bound - gained <= tie))


def joint_ceiling(primal: Tensor, dual: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
    """An upper bound on the gain of the joint problem of O(d), nearly attained if the donor is no smaller, (N,).

    H is that of a scale near the best one: first the best scale if |M|_* were a typical share of |M|_F; then, if the
    bound is far from the value of the best map there, the scale of that map.

    Args:
        primal, dual: M_P and M_D, (N, d, d), float64.
        norms: P and D, (N,).

    Returns:
        The bound; infinite where none was found.
    """
    whole = tuple(_SPREAD**2 * primal.shape[-1] * (x * y).sum((1, 2)) for x, y in _both(primal, dual))
    point = _climbed(tuple(x[:, None] for x in whole), norms, _level(norms)).sqrt()
    bound, active = torch.full_like(point, torch.inf), torch.arange(len(point), device=point.device)
    for _ in range(_LOOKS):
        scale, block_norms = point[active], (norms[0][active], norms[1][active])
        products, size = _turned(primal[active], dual[active], scale)
        least = _ROUNDING * size.amax(1, keepdim=True)
        floors = (size + floor * size.mean(1, keepdim=True) + least for floor in _FLOORS)
        ceiling = torch.stack([_bound(products, block_norms, floored) for floored in floors]).amin(0)
        bound[active] = torch.minimum(bound[active], ceiling + _TIE * (block_norms[0] + block_norms[1] + size.sum(1)))
        inverse = torch.where(size > least, 1 / size, 0.0)
        a = scale[:, None]
        p, q = (((a * x + y / a) * inverse).sum(1) for x, y in (products[::2], products[2:0:-1]))
        point[active] = best_scale(*block_norms, p, q)
        attained = -cost(point[active], *block_norms, p, q)
        active = active[bound[active].isfinite() & (bound[active] - attained > _CLOSE * size.sum(1))]
        if not len(active):
            break
    return bound


def _turned(primal: Tensor, dual: Tensor, scale: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """Products of the rows of M_P and M_D in the basis that makes M M^T diagonal, and |rows of M|, (N, d)."""
    mixed = scale[:, None, None] * primal + dual / scale[:, None, None]
    basis = torch.linalg.eigh(mixed @ mixed.mT)[1].mT
    products = tuple((x * y).sum(2) for x, y in _both(basis @ primal, basis @ dual))
    return products, _sizes(products, scale.square())


def _both(primal: Tensor, dual: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return (primal, primal), (dual, dual), (primal, dual)


def _level(norms: tuple[Tensor, Tensor]) -> Tensor:
    """The squared scale at which both sides of the donor are of one size, 1 where either is empty."""
    alive = (norms[0] > 0) & (norms[1] > 0)
    return torch.where(alive, norms[1] / norms[0], 1.0).sqrt()


def _sizes(products: tuple[Tensor, ...], squared: Tensor) -> Tensor:
    """|row of M(a)| for squared scales (...,) and the products (..., k) of rows of M_P and M_D, (..., k)."""
    s = squared[..., None]
    return (s * products[0] + products[1] / s + 2 * products[2]).clamp_min(0).sqrt()


def _gain(sizes: Tensor, norms: tuple[Tensor, Tensor], squared: Tensor) -> Tensor:
    return 2 * sizes.sum(-1) - squared * norms[0] - norms[1] / squared


def _climbed(products: tuple[Tensor, ...], norms: tuple[Tensor, Tensor], start: Tensor) -> Tensor:
    """A squared scale at which sums of `_sizes` gain most, by Newton's method in its logarithm; never worse."""
    point = start.clamp(1e-12, 1e12).log()
    for _ in range(_STEPS):
        squared = point.exp()
        size = _sizes(products, squared).clamp_min(torch.finfo(point.dtype).tiny)
        ahead, behind = squared[..., None] * products[0], products[1] / squared[..., None]
        rise = (ahead - behind) / size
        slope = rise.sum(-1) - squared * norms[0] + norms[1] / squared
        bend = ((ahead + behind) / size - rise.square() / (2 * size)).sum(-1) - squared * norms[0] - norms[1] / squared
        step = torch.where(bend < 0, -slope / bend, slope.sign()).nan_to_num(0.0).clamp(-1, 1)
        point = (point + step).clamp(-2 * LARGEST_LOG_SCALE, 2 * LARGEST_LOG_SCALE)
        if bool((step.abs() < _SETTLED).all()):
            break
    return point.exp()


def _bound(products: tuple[Tensor, ...], norms: tuple[Tensor, Tensor], sizes: Tensor) -> Tensor:
    """The bound on the gain at all scales with H of these eigenvalues, infinite where it is none."""
    left, right = (norm - (x / sizes).sum(-1) for norm, x in zip(norms, products[:2], strict=True))
    bound = (sizes + 2 * products[2] / sizes).sum(-1) - 2 * (left * right).clamp_min(0).sqrt()
    return torch.where((left > 0) & (right > 0) & bound.isfinite(), bound, torch.inf)
