r"""One-dimensional rescaling problems: the quartics and the joint map-and-scale problem.

A scale a acts on the primal side (keys, values, up) and 1/a on the dual side (queries, outputs, down). With
P, D the squared norms of the donor's primal and dual side and p, q its inner products with the anchor,

    cost(a) = a^2 P + D / a^2 - 2 a p - 2 q / a    (+ a constant).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST_LOG_SCALE = 4.6
"""Scales stay within exp(+-4.6), a factor of about 100: further out half precision is the limit, not the fit."""

_NEWTON = 6


def cost(scale: Tensor, primal: Tensor, dual: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """a^2 P + D / a^2 - 2 a p - 2 q / a, elementwise."""
    return scale**2 * primal + dual / scale**2 - 2 * scale * p - 2 * q / scale


def best_scale(primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, signed: bool = False) -> Tensor:
    r"""The scale that minimises `cost`: the right real root of P a^4 - p a^3 + q a - D = 0.

    All roots come from the companion matrix, refined by Newton's method; 1 is kept where nothing is gained.

    Args:
        primal, dual: P and D, >= 0, one shape (...).
        p, q: inner products with the anchor, same shape.
        signed: also allow negative scales.

    Returns:
        a, shape (...), float64, within exp(+-LARGEST_LOG_SCALE).
    """
    primal, dual, p, q = (x.double() for x in (primal, dual, p, q))
    shape = primal.shape
    primal, dual, p, q = (x.reshape(-1) for x in (primal, dual, p, q))
    one = torch.ones_like(primal)
    usable = (primal > 0) & (dual > 0)
    lead = torch.where(usable, primal, one)
    companion = torch.zeros(len(lead), 4, 4, dtype=torch.float64, device=lead.device)
    companion[:, 1, 0] = companion[:, 2, 1] = companion[:, 3, 2] = 1
    companion[:, 0, 3] = dual / lead
    companion[:, 1, 3] = -q / lead
    companion[:, 3, 3] = p / lead
    roots = torch.linalg.eigvals(companion).real
    roots = _newton(roots, *(x[:, None] for x in (primal, dual, p, q)))
    limit = float(torch.tensor(LARGEST_LOG_SCALE).exp())
    magnitude = roots.abs().clamp(1 / limit, limit)
    candidates = magnitude * (roots.sign() if signed else 1)
    candidates = torch.where(candidates == 0, 1.0, candidates)
    if signed:
        candidates = torch.cat([candidates, -candidates], dim=1)
    return _keep_one(candidates, primal, dual, p, q, usable).reshape(shape)


def _newton(a: Tensor, primal: Tensor, dual: Tensor, p: Tensor, q: Tensor) -> Tensor:
    for _ in range(_NEWTON):
        value = ((primal * a - p) * a * a + q) * a - dual
        slope = (4 * primal * a - 3 * p) * a * a + q
        step = torch.where(slope.abs() > 0, value / slope, torch.zeros_like(value))
        better = a - step
        residual = ((primal * better - p) * better * better + q) * better - dual
        a = torch.where(residual.abs() < value.abs(), better, a)
    return a


def _keep_one(candidates: Tensor, primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, usable: Tensor) -> Tensor:
    costs = cost(candidates, *(x[:, None] for x in (primal, dual, p, q)))
    best = costs.argmin(1, keepdim=True)
    value, chosen = costs.gather(1, best)[:, 0], candidates.gather(1, best)[:, 0]
    at_one = cost(torch.ones_like(chosen), primal, dual, p, q)
    gains = usable & (at_one - value > 1e-12 * (primal + dual))
    return torch.where(gains, chosen, torch.ones_like(chosen))


def joint_scale(value: Callable[[Tensor], Tensor], primal: Tensor, dual: Tensor, guess: Tensor) -> Tensor:
    r"""Scale of the joint problem over a map g and a scale a > 0, batched.

    Minimises f(a) = a^2 P + D / a^2 - 2 h(a), where h(a) = max_g <g, a M_P + M_D / a> is what the best map
    attains (the nuclear norm for O(d), a modulus for a plane). One dimension each: a coarse grid in log a around
    a guess, then golden-section search around the best point.

    Args:
        value: h, maps scales of shape (...) to values of shape (...).
        primal, dual: P and D, shape (...).
        guess: centre of the search, > 0, shape (...); the scale that balances donor and anchor is a good one.

    Returns:
        a, shape (...), float64; 1 where nothing is gained.

    Source: one-dimensional reduction of the ICML 2025 paper's open joint problem (its section 4.3).
    """
    primal, dual = primal.double(), dual.double()
    usable = (primal > 0) & (dual > 0)

    def objective(log_scale: Tensor) -> Tensor:
        a = log_scale.exp()
        return a**2 * primal + dual / a**2 - 2 * value(a)

    zero = torch.zeros_like(primal)
    grid = torch.linspace(-1.5, 1.5, 7, dtype=torch.float64, device=primal.device)
    middle = torch.where(usable, guess.double().log(), zero).clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
    centre = middle + grid[torch.stack([objective(middle + g) for g in grid]).argmin(0)]
    log_scale = golden_section(objective, centre - 0.5, centre + 0.5, steps=32)
    log_scale = log_scale.clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
    gains = usable & (objective(zero) - objective(log_scale) > 1e-12 * (primal + dual))
    return torch.where(gains, log_scale, zero).exp()


def golden_section(objective: Callable[[Tensor], Tensor], low: Tensor, high: Tensor, steps: int) -> Tensor:
    """Minimiser of a batch of functions unimodal on [low, high], elementwise, to (high - low) * 0.618^steps."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    f_left, f_right = objective(left), objective(right)
    for _ in range(steps):
        smaller = f_left < f_right
        low, high = torch.where(smaller, low, left), torch.where(smaller, right, high)
        probe = torch.where(smaller, high - ratio * (high - low), low + ratio * (high - low))
        f_probe = objective(probe)
        left, right = torch.where(smaller, probe, right), torch.where(smaller, left, probe)
        f_left, f_right = torch.where(smaller, f_probe, f_right), torch.where(smaller, f_left, f_probe)
    return (low + high) / 2
