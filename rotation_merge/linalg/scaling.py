r"""The rescaling problem of one pairing: a scale a acts on the primal side, 1/a on the dual side.

With P, D the squared norms of the donor's primal and dual side and p, q its inner products with the anchor,

    cost(a) = a^2 P + D / a^2k - 2 a p - 2 q / a^k    (+ a constant),

k the degree of an activation between both sides, f(c x) = c^k f(x); 1 where there is none (ICML 2025 paper, equation
12).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST_LOG_SCALE = math.log(1e6)
"""Scales stay within a millionth and a million; `limited` tells whether a scale ended at a limit."""
REACH, POINTS = 6.0, 49
"""Logarithms of scales that are tried around the one that balances both sides, and how many."""
NEWTON, STEPS = 8, 40
"""Steps of Newton's method, from a grid's point and, at most, from the right."""
TIE = 1e-12
"""Gains below this share of the norms give way to the scale 1."""


def cost(scale: Tensor, primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, degree: int = 1) -> Tensor:
    """a^2 P + D / a^2k - 2 a p - 2 q / a^k, elementwise, k the degree."""
    power = scale**degree
    return scale**2 * primal + dual / power**2 - 2 * scale * p - 2 * q / power


def limited(scale: Tensor) -> Tensor:
    """Whether a scale has reached its largest or smallest allowed value."""
    return scale.abs().log().abs() >= LARGEST_LOG_SCALE * (1 - 1e-6)


def best_scale(primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, signed: bool = False, degree: int = 1) -> Tensor:
    r"""The scale that minimises `cost`.

    Args:
        primal, dual: P and D, >= 0, shapes that broadcast.
        p, q: inner products with the anchor.
        signed: also allow negative scales (of degree 1).
        degree: k, the power of the scale that divides the dual side.

    Returns:
        a, in the inputs' dtype, 1 where nothing is gained. Where the optimum lies beyond exp(+-LARGEST_LOG_SCALE), the
        limit, if that is better than 1.
    """
    primal, dual, p, q = torch.broadcast_tensors(primal, dual, p, q)
    usable = (primal > 0) & (dual > 0)
    middle = torch.where(usable, (dual / primal).log() / (2 + 2 * degree), 0.0).nan_to_num(0.0)
    balanced = middle.exp() * p + q / middle.exp()
    sign = torch.where(balanced < 0, -1.0, 1.0).to(p) if signed else torch.ones_like(p)
    known = primal, dual, sign * p, sign * q
    log_scale = _of_degree_one(middle, known) if degree == 1 else _of_degree(middle, known, degree)
    scale = sign * log_scale.clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE).exp()
    unscaled = torch.ones_like(scale)
    gained = cost(unscaled, primal, dual, p, q, degree) - cost(scale, primal, dual, p, q, degree)
    return torch.where(usable & (gained > TIE * (primal + dual)), scale, unscaled)


def _of_degree_one(middle: Tensor, known: tuple[Tensor, ...]) -> Tensor:
    """The best log scale where k = 1.

    With a = x exp(middle), u = p / (exp(middle) P) and v = q exp(middle) / D the cost is stationary at roots of
    x^4 - u x^3 + v x - 1. If u >= v the least lies at x >= 1, where there is one root. Newton's method begins where the
    polynomial rises and is convex: after one step it is right of the root, and descends. If u < v, 1/x solves the
    problem with u and v exchanged.
    """
    primal, dual, p, q = known
    balance = middle.exp()
    u, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (p / (balance * primal), q * balance / dual))
    high, low = torch.maximum(u, v), torch.minimum(u, v)
    x = torch.maximum(high.clamp_min(1.0), 2 * (-low).clamp_min(0.0) ** (1 / 3))
    for step in range(STEPS):
        apart, square = x - high, x * x
        slope = torch.addcmul(low, torch.add(x, apart, alpha=3), square)
        value = torch.addcmul(low, apart, square) * x - 1
        following = torch.where(slope > 0, x - value / slope, x).clamp_min(1.0)
        settled = step > 0 and bool((x - following <= torch.finfo(x.dtype).eps * x).all())
        x = following
        if settled:
            break
    return middle + torch.where(u >= v, x, 1 / x).log()


def _of_degree(middle: Tensor, known: tuple[Tensor, ...], degree: int) -> Tensor:
    """The best log scale: the best point of a grid, then Newton's method."""
    best, least = middle, torch.full_like(middle, torch.inf)
    for offset in torch.linspace(-REACH, REACH, POINTS).tolist():
        value = cost((middle + offset).exp(), known[0], known[1], known[2], known[3], degree)
        best, least = torch.where(value < least, middle + offset, best), torch.minimum(value, least)
    for _ in range(NEWTON):
        best = _stepped(best, known, degree)
    return best


def _stepped(log_scale: Tensor, known: tuple[Tensor, ...], degree: int) -> Tensor:
    """One step of Newton's method for half the cost in the logarithm of the scale, no longer than a grid's."""
    primal, dual, p, q = known
    a, b = log_scale.exp(), (-degree * log_scale).exp()
    slope = a * a * primal - a * p + degree * (b * q - b * b * dual)
    bend = 2 * a * a * primal - a * p + degree**2 * (2 * b * b * dual - b * q)
    step = torch.where(bend > 0, slope / bend, 0.0).nan_to_num(0.0)
    return log_scale - step.clamp(-2 * REACH / POINTS, 2 * REACH / POINTS)
