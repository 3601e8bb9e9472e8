r"""One-dimensional rescaling problems: the quartics and the joint map-and-scale problem.

A scale a acts on the primal side (keys, values, up) and 1/a on the dual side (queries, outputs, down). With
P, D the squared norms of the donor's primal and dual side and p, q its inner products with the anchor,

    cost(a) = a^2 P + D / a^2 - 2 a p - 2 q / a    (+ a constant).

Put a = k x with k = (D/P)^(1/4), u = k p / sqrt(P D) and v = q / (k sqrt(P D)). Then cost / sqrt(P D) is
x^2 + x^-2 - 2 u x - 2 v / x, with stationary points at the roots of x^4 - u x^3 + v x - 1. If u >= v the global minimum
lies at x >= 1, where there is one root (the derivative in log x >= 0, over cosh, is convex or increasing and starts at
or below zero); Newton's method from its right descends to it. If u < v, 1/x solves the problem with u and v exchanged;
a negative scale changes the signs of both.

Behind a homogeneous activation of degree k, f(c x) = c^k f(x), the dual side is scaled by 1/a^k. In t = log x, half the
derivative of the cost, x^2 - u x - k x^-2k + k v x^-k, has one root or three (Descartes' rule): the outer two are
minima, and the better one is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST_LOG_SCALE = math.log(1e6)
"""Scales stay within a millionth and a million; `limited` tells whether a scale ended at a limit."""

_NEWTON = {4: 8, 8: 14}  # steps at most, by the bytes of a number
_TIE = 1e-12  # gains below this share of the norms give way to the scale 1
_ROUNDS = 60
_LOOKUPS = 2
_SECOND_LOOKS = 4
_OPEN = 1e-6  # share of the norms: where no more can be gained elsewhere, nobody looks again
_GRID = 16
_SETTLED = 1e-8  # change of a log scale; the cost's error is its square
_UNLIKE = 1.0  # sums and differences of u and v up to this are those of unlike vectors
_WIDE = 0.3  # log scales further apart than this from the best start are searched on a grid


def cost(scale: Tensor, primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, degree: int = 1) -> Tensor:
    """a^2 P + D / a^2k - 2 a p - 2 q / a^k, elementwise, k the degree."""
    power = scale**degree
    return scale**2 * primal + dual / power**2 - 2 * scale * p - 2 * q / power


def limited(scale: Tensor) -> Tensor:
    """Whether a scale has reached its largest or smallest allowed value."""
    return scale.abs().log().abs() >= LARGEST_LOG_SCALE * (1 - 1e-6)


def best_scale(primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, signed: bool = False, degree: int = 1) -> Tensor:
    r"""The scale that minimises `cost`: the right real root of P a^4 - p a^3 + q a - D = 0.

    Args:
        primal, dual: P and D, >= 0, shapes that broadcast.
        p, q: inner products with the anchor.
        signed: also allow negative scales (of degree 1).
        degree: k, the power of the scale that divides the dual side.

    Returns:
        a, in the inputs' dtype, 1 where nothing is gained. Where the optimum lies beyond exp(+-LARGEST_LOG_SCALE), the
        limit, if that is better than 1.

    Source: ICML 2025 paper, equation 12.
    """
    lib, (primal, dual, p, q) = _arrays(primal, dual, p, q)
    with np.errstate(all="ignore"):
        usable = (primal > 0) & (dual > 0)
        first, second = (lib.where(usable, x, lib.ones_like(x)) for x in (primal, dual))
        root = (second / first) ** (0.5 / (1 + degree))
        middle = first * root * root
        u, v = p * root / middle, q / (root**degree * middle)
        unit = lib.ones_like(u)
        sign = lib.where(u + v < 0, -unit, unit) if signed else unit
        u, v = u * sign, v * sign
        if degree == 1:
            x = _largest_root(lib, lib.maximum(u, v), lib.minimum(u, v))
            x = lib.where(u >= v, x, 1 / x)
        else:
            x = _outer_roots(lib, u, v, degree)
        limit = math.exp(LARGEST_LOG_SCALE)
        a = (x * root).clip(1 / limit, limit) * sign
        a = lib.where(usable & lib.isfinite(a), a, unit)
        gains = cost(unit, primal, dual, p, q) - cost(a, primal, dual, p, q, degree) > _TIE * (primal + dual)
        return torch.as_tensor(lib.where(gains, a, unit))


def least_cost(primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, signed: bool = False, degree: int = 1) -> Tensor:
    """`cost` at `best_scale`, to the dtype's rounding.

    At an optimum the cost is flat: half the digits of the scale give all of the cost's, and between unlike vectors a
    step or two of `_flat_cost` find them. Other cases are left to `best_scale`.

    Args: as `best_scale`; broadcast arguments are expanded as little as possible.
    """
    if degree == 1 and p.numel() and bool((primal > 0).all()) and bool((dual > 0).all()):
        return _flat_cost(primal, dual, p, q, signed)
    return cost(best_scale(primal, dual, p, q, signed, degree), primal, dual, p, q, degree)


def _flat_cost(primal: Tensor, dual: Tensor, p: Tensor, q: Tensor, signed: bool) -> Tensor:
    """`least_cost` of degree 1 where P and D are positive.

    With s = u + v, d = u - v and y = sinh(log x) the cost over sqrt(P D) is 2 + 4 y^2 - 2 d y - 2 s r, r^2 = 1 + y^2:
    convex for s < 4 and least where y = d / (4 - s / r). For |s| and |d| up to t <= 1 this contracts by (t / (4 - t))^3
    and starts, from y = d / (4 - s), so close that k steps leave the cost wrong by (t / (4 - t))^(8 + 6 k) at most.
    """
    lib, (first, second, inner, dual_inner) = _arrays(primal, dual, p, q)
    root, middle = (second / first) ** 0.25, lib.sqrt(first * second)
    d, v = inner * (root / middle), dual_inner * (1 / (root * middle))
    s = d + v
    d -= v
    s = lib.abs(s) if signed else s
    reach = max(float(s.max()), -float(s.min()), float(d.max()), -float(d.min()))
    within = min(reach, _UNLIKE)
    steps = math.log(2 * float(lib.finfo(s.dtype).eps)) / math.log(within / (4 - within) + 1e-9)
    y = d / (4 - s)
    r = lib.sqrt(1 + y * y)
    for _ in range(math.ceil((steps - 8) / 6)):
        y = d / (4 - s / r)
        r = lib.sqrt(1 + y * y)
    result = y * (2 * y - d)
    result -= s * r
    result += 1
    result *= 2 * middle
    if not reach <= _UNLIKE:
        outliers = (lib.abs(s) > _UNLIKE) | (lib.abs(d) > _UNLIKE)
        known = (torch.as_tensor(lib.broadcast_to(x, s.shape)[outliers]) for x in (first, second, inner, dual_inner))
        primal, dual, p, q = known
        result[outliers] = lib.asarray(cost(best_scale(primal, dual, p, q, signed), primal, dual, p, q))
    return torch.as_tensor(result)


def _arrays(*tensors: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """The cheapest backend for a few numbers, and the tensors in its format.

    On the CPU numpy, an operation of which costs a third of torch's and gives the same; elsewhere torch itself.
    """
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return torch, tensors
    return np, tuple(tensor.detach().numpy() for tensor in tensors)


def _largest_root(lib: Any, u: Any, v: Any) -> Any:
    """The root x >= 1 of x^4 - u x^3 + v x - 1 for u >= v, elementwise: Newton from the right, where it is convex."""
    x, unit = _right_of_root(lib, u, v), lib.ones_like(u)
    eps = float(lib.finfo(x.dtype).eps)
    for _ in range(_NEWTON[x.dtype.itemsize]):
        square = x * x
        value = x - u
        value *= square
        value += v
        value *= x
        value -= 1
        slope = 4 * x - 3 * u
        slope *= square
        slope += v
        before, x = x, lib.maximum(lib.where(slope > 0, x - value / slope, x), unit)
        if bool((before - x <= eps * x).all()):
            break
    return x


def _right_of_root(lib: Any, u: Any, v: Any) -> Any:
    """A start for Newton's method right of the root; between unlike vectors its first step, from 1."""
    if bool((u < 1).all()) and bool((v > -0.5).all()):
        return 1 + (u - v) / (v + 4 - 3 * u)  # convex and rising from 1 on: beyond the root
    nought = lib.zeros_like(u)
    start, below = u / 2 + lib.sqrt(u * u / 4 + 1), lib.maximum(-v, nought)
    cube_root = 1 + below / 3 if bool((below < 1).all()) else (below + 1) ** (1 / 3)  # the first is never the smaller
    return lib.where(u + v >= 0, start, lib.maximum(u, nought) + cube_root)


def _outer_roots(lib: Any, u: Any, v: Any, degree: int) -> Any:
    """The better one of the least and the greatest stationary x > 0 of x^2 - 2 u x + x^-2k - 2 v x^-k, elementwise.

    Both lie in brackets found on a grid between bounds of all roots, and are closed in on by Newton's method in log x,
    by halves where a step would leave the bracket.
    """
    k, unit, none = degree, lib.ones_like(u), lib.full_like(u, math.inf)
    nought = 0 * unit
    alone = lib.where(u > 0, lib.log(u), -none), lib.where(v > 0, -lib.log(v) / k, none)  # minima of either side
    spread = lib.maximum(v, nought) + 1 + lib.maximum(-u, nought)
    low = lib.maximum(-lib.log(spread) / k, lib.minimum(*alone))
    spread = lib.maximum(u, nought) + 1 + k * (1 + lib.maximum(-v, nought))
    high = lib.minimum(lib.log(spread), lib.maximum(*alone))

    def slope(t: Any) -> Any:
        x, y = lib.exp(t), lib.exp(-k * t)
        return x * (x - u) - k * y * (y - v)

    step = (high - low) / _GRID
    first, last = high, low
    for i in range(1, _GRID):
        point = low + i * step
        falls = slope(point) < 0
        last = lib.where(falls, point, last)
        first = lib.where(~falls & (first == high), point, first)
    roots = []
    for left, right in ((first - step, first), (last, last + step)):
        t = (left + right) / 2
        for _ in range(2 * _NEWTON[t.dtype.itemsize]):
            value = slope(t)
            left, right = lib.where(value < 0, t, left), lib.where(value < 0, right, t)
            x, y = lib.exp(t), lib.exp(-k * t)
            moved = t - value / (x * (2 * x - u) + k * k * y * (2 * y - v))
            t = lib.where((moved > left) & (moved < right), moved, (left + right) / 2)
        roots.append(lib.exp(t))
    better = cost(roots[0], unit, unit, u, v, k) <= cost(roots[1], unit, unit, u, v, k)
    return lib.where(better, roots[0], roots[1])


def joint_scale(
    value: Callable[[Tensor], Tensor],
    inner: Callable[[Tensor], tuple[Tensor, Tensor]],
    primal: Tensor,
    dual: Tensor,
    guess: Tensor,
    bounds: tuple[Tensor, Tensor],
) -> Tensor:
    r"""Scale of the joint problem over a map g and a scale a > 0, batched.

    Minimises f(a) = a^2 P + D / a^2 - 2 h(a), where h(a) = max_g <g, a M_P + M_D / a> is the value of the best map (the
    nuclear norm for O(d), a modulus for a plane). Starts are 1, a guess and a grid of the scales that the bound h(a) <=
    a max_g <g, M_P> + max_g <g, M_D> / a leaves in the running. From the best start, the best map for the scale and the
    best scale for the map take turns, extrapolated (Aitken); f never rises. If the evaluated scales do not rule out a
    better optimum (`_under_chords`), the most promising scale is evaluated, too, a few times.

    Args:
        value: h, maps scales of shape (...) to values of shape (...).
        inner: maps scales to <g, M_P> and <g, M_D> of the best map g at that scale.
        primal, dual: P and D, shape (...), float64.
        guess: a start, > 0, shape (...); the scale that balances donor and anchor is a good one.
        bounds: max_g <g, M_P> and max_g <g, M_D>.

    Returns:
        a, shape (...), float64; 1 where nothing is gained.

    Source: one-dimensional reduction of the joint problem that the ICML 2025 paper leaves open (its appendix D).
    """
    usable = (primal > 0) & (dual > 0)
    zero = torch.zeros_like(primal)

    def objective(log_scale: Tensor) -> Tensor:
        a = log_scale.exp()
        return a**2 * primal + dual / a**2 - 2 * value(a)

    at_one = objective(zero)
    visited = [(zero, at_one)]
    middle = torch.where(usable, guess.log(), zero).clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
    starts = [middle] if bool((middle.abs() > 1e-3).any()) else []
    for start in starts + _open_scales(primal, dual, bounds, middle, at_one, usable):
        visited.append((start, objective(start)))
    refined = _alternate(inner, primal, dual, _lowest(visited)[0])
    visited.append((refined, objective(refined)))
    for _ in range(_SECOND_LOOKS):
        refined, lowest = _lowest(visited)
        elsewhere, least = _elsewhere(visited, primal, dual, bounds)
        if not bool((usable & (least < lowest - _OPEN * (primal + dual))).any()):
            break
        visited.append((elsewhere, objective(elsewhere)))
        if bool((usable & (visited[-1][1] < lowest)).any()):
            refined = _alternate(inner, primal, dual, _lowest(visited)[0])
            visited.append((refined, objective(refined)))
    refined, lowest = _lowest(visited)
    return torch.where(usable & (at_one - lowest > _TIE * (primal + dual)), refined, zero).exp()


def _lowest(visited: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The best log scales by their objectives, elementwise; the later one of equals."""
    best, lowest = visited[0]
    for point, value in visited[1:]:
        best, lowest = torch.where(value <= lowest, point, best), torch.minimum(value, lowest)
    return best, lowest


def _elsewhere(
    visited: list[tuple[Tensor, Tensor]], primal: Tensor, dual: Tensor, bounds: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The log scale with the least possible objective outside the known range, and a lower bound on it."""
    p, d, ahead, behind = (x.flatten() for x in (primal, dual, *bounds))
    squares, order = torch.stack([(2 * point).exp().flatten() for point, _ in visited], 1).sort(1)
    values = torch.stack([value.flatten() for _, value in visited], 1).gather(1, order)
    heights = squares.sqrt() * (squares * p[:, None] + d[:, None] / squares - values) / 2
    scale, gain = _under_chords(squares, heights, p, d, (ahead, behind))
    return scale.log().reshape(primal.shape), -gain.reshape(primal.shape)


def scale_ceiling(
    value: Callable[[Tensor], Tensor], primal: Tensor, dual: Tensor, bounds: tuple[Tensor, Tensor]
) -> Tensor:
    """An upper bound on the gain of the joint problem, max_a 2 h(a) - a^2 P - D / a^2, nearly attained, shape (N,).

    h is a norm of a M_P + M_D / a, hence a h(a) convex in a^2: between two scales that were looked up it lies below its
    chord p a^2 + q, and for h = a p + q / a the best scale is known. Where the bound would be attained h is looked up,
    which lowers it, a few times over.

    Args: as `joint_scale`, of shape (N,); `bounds` may exceed the value of every element.
    """
    scale = torch.where((primal > 0) & (dual > 0), dual / primal, 1.0).to(primal) ** 0.25
    squares, heights = scale[:, None] ** 2, (scale * value(scale))[:, None]
    for _ in range(_LOOKUPS):
        scale, _ = _under_chords(squares, heights, primal, dual, bounds)
        squares, order = torch.cat([squares, scale[:, None] ** 2], 1).sort(1)
        heights = torch.cat([heights, (scale * value(scale))[:, None]], 1).gather(1, order)
    return _under_chords(squares, heights, primal, dual, bounds)[1] + _TIE * (primal + dual)


def _under_chords(
    squares: Tensor, heights: Tensor, primal: Tensor, dual: Tensor, bounds: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The best scale and its gain if a h(a) is replaced by chords between known (a^2, a h(a))."""
    run, rise = squares.diff(dim=1), heights.diff(dim=1)
    slope = torch.where(run > 0, rise / run, 0.0)
    start = heights[:, :-1] - slope * squares[:, :-1]
    ahead, behind = (bound[:, None] for bound in bounds)
    p = torch.cat([(heights[:, :1] - behind) / squares[:, :1], slope, ahead], 1)
    q = torch.cat([behind, start, heights[:, -1:] - ahead * squares[:, -1:]], 1)
    norms = primal[:, None].expand_as(p), dual[:, None].expand_as(p)
    scales = best_scale(*norms, p, q)
    costs = cost(scales, *norms, p, q)
    costs[:, 1:-1] = torch.where(run > 0, costs[:, 1:-1], torch.inf)
    least, best = costs.min(1)
    return scales.gather(1, best[:, None])[:, 0], -least


def _open_scales(
    primal: Tensor, dual: Tensor, bounds: tuple[Tensor, Tensor], middle: Tensor, known: Tensor, usable: Tensor
) -> list[Tensor]:
    """Grid points at which some element may still beat the values known, if they lie far from the starts."""
    grid = torch.linspace(-2.0, 2.0, 17, dtype=torch.float64, device=primal.device)
    points = (middle + grid.reshape(-1, *[1] * middle.ndim)).clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
    lower = cost(points.exp(), primal, dual, *bounds)
    near = torch.minimum((points - middle).abs(), points.abs()) < _WIDE
    is_open = usable & (lower < known) & ~near
    return [point for point, is_needed in zip(points, is_open.flatten(1).any(1), strict=True) if bool(is_needed)]


def _alternate(inner: Callable[[Tensor], tuple[Tensor, Tensor]], primal: Tensor, dual: Tensor, start: Tensor) -> Tensor:
    """Log scale from the best map, map from the scale, until it settles; every third step is Aitken's."""

    def evaluate(log_scale: Tensor) -> tuple[Tensor, Tensor]:
        a = log_scale.exp()
        p, q = inner(a)
        return cost(a, primal, dual, p, q), best_scale(primal, dual, p, q).log()

    point = start
    value, following = evaluate(point)
    for _ in range(_ROUNDS):
        if bool(((following - point).abs() < _SETTLED).all()):
            break
        value, after = evaluate(following)
        first, second = following - point, after - following
        if bool((second.abs() < _SETTLED).all()):
            return after
        jump = following + second / (1 - second / torch.where(first == 0, 1.0, first)).clamp_min(0.05)
        jump = torch.where(jump.isfinite(), jump, following).clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE)
        tried, beyond = evaluate(jump)
        better = tried <= value
        point, following = torch.where(better, jump, following), torch.where(better, beyond, after)
    return following
