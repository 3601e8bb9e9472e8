"""Matching the channels of a gated convolution: one order, and four factors of each channel.

With a separate factor for each role, the distance of channel i of the anchor and j of the donor is at least ``sum_r
|A_ri|^2 (1 - cos^2(A_ri, B_rj))``. The order is the optimal assignment of these bounds. The factors of its pairs are
then solved in turn, each by its quartic, until they converge. The sum of the bounds in the optimal order is a lower
bound for all orders and factors, so the result has a certified gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.scaling import LARGEST_LOG_SCALE, best_scale
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import at_least_float32
from rotation_merge.symmetry.admitted import convolution
from rotation_merge.symmetry.convolution import COUNT, FACTORS, ConvolutionTransform, multiplier

_ROUNDS = 100
_SETTLED = 1e-13  # change of a log factor
_TIE = 1e-12  # share of the squared distance that a change has to take off


@dataclass(frozen=True)
class _RoleRows:
    """One role's rows in both models, (n, m) float64 (of float32 tensors float32), their squared norms (n,)."""

    anchor: Tensor
    donor: Tensor

    @property
    def norms(self) -> tuple[Tensor, Tensor]:
        anchor_norms, donor_norms = (x.double().square().sum(1) for x in (self.anchor, self.donor))
        return anchor_norms, donor_norms

    def inner(self) -> Tensor:
        """<A_i, B_i>, (n,)."""
        return (self.anchor.double() * self.donor.double()).sum(1)

    def reordered(self, index: Tensor) -> _RoleRows:
        return _RoleRows(self.anchor, self.donor[index.to(self.donor.device)])


def match_convolution(space: Space, sides: list[Side], options: AlignConfig) -> tuple[ConvolutionTransform, float]:
    """The best order and factors of a convolution's channels, with the order's certified gap.

    With factors the gap is relative to the anchor's squared norm.
    """
    group = convolution(space, options)
    rows = _by_role(sides)
    if all(torch.equal(role_rows.anchor, role_rows.donor) for role_rows in rows.values()):
        return group.identity(), 0.0
    order, unit_factors = torch.arange(group.size), torch.ones(COUNT, group.size, dtype=torch.float64)
    best, least = (order, unit_factors), _left(rows, unit_factors)
    orders, gap, bound = [order], 0.0, 0.0
    norm = float(sum(role_rows.norms[0].sum() for role_rows in rows.values()))
    if group.permute:
        solved = assign(_similarity(rows, group.rescale))
        orders, gap = [order, solved.permutation], solved.gap
        bound = norm - 2 * (solved.value + gap * abs(solved.value))
    for order in orders:
        moved = {role: role_rows.reordered(order) for role, role_rows in rows.items()}
        factors = _factors(moved) if group.rescale else unit_factors
        distance = _left(moved, factors)
        if distance < least * (1 - _TIE):
            best, least = (order, factors), distance
    if group.permute and group.rescale:
        gap = (least - max(bound, 0.0)) / norm if norm else 0.0
    return group.element(*best), max(gap, 0.0)


def _by_role(role_sides: list[Side]) -> dict[str, _RoleRows]:
    result = {}
    for role in FACTORS:
        sides = [side for side in role_sides if side.role == role]
        if sides:
            result[role] = _RoleRows(*(torch.cat([at_least_float32(x) for x in xs], 1) for xs in _both(sides)))
    return result


def _both(sides: list[Side]) -> tuple[list[Tensor], list[Tensor]]:
    return [side.anchor for side in sides], [side.donor.to(side.anchor.device) for side in sides]


def _similarity(rows: dict[str, _RoleRows], rescale: bool) -> Tensor:
    """Reduction of half the squared norm by pairing i with j, (n, n); an upper bound with factors."""
    total: Tensor | None = None
    for role_rows in rows.values():
        products = role_rows.anchor @ role_rows.donor.to(role_rows.anchor.dtype).T
        if rescale:
            products = products.square_() / (2 * role_rows.norms[1].to(products)).clamp_min(
                torch.finfo(products.dtype).tiny
            )
        total = products if total is None else total.add_(products)
    assert total is not None
    return total


def _left(rows: dict[str, _RoleRows], factors: Tensor) -> float:
    """Squared distance under factors (4, n)."""
    total = 0.0
    for role, role_rows in rows.items():
        scale = multiplier(factors.to(role_rows.donor.device), role)[:, None]
        total += float((role_rows.anchor.double() - scale * role_rows.donor.double()).square().sum())
    return total


def _factors(rows: dict[str, _RoleRows]) -> Tensor:
    """The factors of ordered channels, (4, n), improved in turn until convergence.

    They start at the anchor's lengths; each step solves one quartic.
    """
    inner = {role: role_rows.inner().cpu() for role, role_rows in rows.items()}
    norms = {role: tuple(x.cpu() for x in role_rows.norms) for role, role_rows in rows.items()}
    factors = torch.ones(COUNT, len(next(iter(inner.values()))), dtype=torch.float64)
    for place, role in ((0, "first"), (1, "second"), (3, "third"), (2, "filter")):
        if role in inner:
            aim = _ratio(inner[role], *norms[role])
            factors[place] = aim * factors[0] * factors[1] if role == "filter" else aim
    for _ in range(_ROUNDS):
        before = factors.clone()
        for place in range(COUNT):
            factors[place] = _one_factor(
                place, factors, inner, {role: donor_norms for role, (_, donor_norms) in norms.items()}
            )
        if bool(((factors / before - 1).abs() <= _SETTLED).all()):
            break
    return factors


def _ratio(inner: Tensor, anchor: Tensor, donor: Tensor) -> Tensor:
    """The factor that brings rows to the anchor's length, with the sign of their product; 1 for rows of zeros."""
    limit = torch.tensor(LARGEST_LOG_SCALE / COUNT).exp().double()
    size = (anchor / donor).sqrt().nan_to_num(1.0, 1.0, 1.0).clamp(1 / limit, limit)
    return torch.where(inner < 0, -size, size)


def _one_factor(place: int, factors: Tensor, inner: dict[str, Tensor], norms: dict[str, Tensor]) -> Tensor:
    """The best value of one factor with the others fixed."""
    remaining = factors.clone()
    remaining[place] = 1.0
    sums = [torch.zeros_like(factors[0]) for _ in range(4)]
    for role, products in inner.items():
        above, below = FACTORS[role]
        if place in (*above, *below):
            scale, side = multiplier(remaining, role), int(place in below)
            sums[side] += scale**2 * norms[role]
            sums[2 + side] += scale * products
    return best_scale(sums[0], sums[1], sums[2], sums[3], signed=True)
