r"""Second-order statistics of anchor and donor, which the best element of every group follows from.

The squared distance that a map g (primal side) leaves is a constant minus the gain

    gain(g) = 2 <g B_P, A_P> - |g B_P|^2 + 2 <g^-T B_D, A_D> - |g^-T B_D|^2,

with P the primal side (keys, values), D the dual one (queries, outputs), A anchor and B donor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.linalg.polar import RANK_TOLERANCE
from rotation_merge.symmetry.element import Linear, Monomial


@dataclass(frozen=True)
class Stats:
    """Of N (anchor, donor) pairs, float64.

    Attributes:
        primal, dual: A B^T of either side, (N, d, d).
        donor: squared norms of the donor's coordinates on either side, (N, d) each.
        anchor: the same of the anchor.
        follow: A B^T, (N, d, d), of tensors that are permuted with the coordinates and neither scaled nor turned.
        follow_norms: the donor's squared norms there, (N, d).
        rounding: relative rounding of the products.
        turns: how often map and scale take turns at most, where both are free.
    """

    primal: Tensor
    dual: Tensor
    donor: tuple[Tensor, Tensor]
    anchor: tuple[Tensor, Tensor]
    follow: Tensor | None = None
    follow_norms: Tensor | None = None
    rounding: float = RANK_TOLERANCE
    turns: int = 60

    @classmethod
    def of_products(cls, products: Tensor, gains: Tensor) -> Stats:
        """Of one side whose maps keep norms, as a stream's: products of its axes and of gains, (N, d, d) each."""
        nothing = torch.zeros_like(products[:, 0])
        return cls(products, torch.zeros_like(products), (nothing, nothing), (nothing, nothing), gains, nothing)

    def balanced(self, groups: Tensor) -> Tensor:
        """The scales that give the donor the anchor's ratio of primal to dual norm, 1 where a side is zero.

        Args:
            groups: numbers, (d,), of the coordinates that share a scale.

        Returns:
            (N, number of groups).
        """
        sums = [summed(x, groups) for x in (*self.donor, *self.anchor)]
        ratio = (sums[1] * sums[2]) / (sums[0] * sums[3])
        return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio)) ** 0.25

    def part(self, dims: slice) -> Stats:
        """The statistics of some of the coordinates."""
        donor, anchor = ((x[0][:, dims], x[1][:, dims]) for x in (self.donor, self.anchor))
        return replace(
            self, primal=self.primal[:, dims, dims], dual=self.dual[:, dims, dims], donor=donor, anchor=anchor
        )

    def gain(self, element: Monomial | Linear) -> Tensor:
        """The gain of one element for each pair, (N,)."""
        total = torch.zeros_like(self.primal[:, 0, 0])
        sides = (element.matrices(), self.primal), (element.powered().matrices(dual=True), self.dual)
        for (maps, products), norms in zip(sides, self.donor, strict=True):
            maps = maps.to(products)
            total = total + 2 * (maps * products).sum((1, 2)) - (maps.square().sum(1) * norms).sum(1)
        if self.follow is None or self.follow_norms is None:
            return total
        return (
            total
            + 2 * (element.order().matrices().to(self.follow) * self.follow).sum((1, 2))
            - self.follow_norms.sum(1)
        )

    def of_equals(self, equal: Tensor) -> Stats:
        """The same with exact statistics where both models are equal, (N,): nothing moves there."""
        if not bool(equal.any()):
            return self
        primal, dual = (
            torch.where(equal[:, None, None], torch.diag_embed(norms), m)
            for norms, m in zip(self.anchor, (self.primal, self.dual), strict=True)
        )
        donor = tuple(torch.where(equal[:, None], a, b) for a, b in zip(self.anchor, self.donor, strict=True))
        return replace(self, primal=primal, dual=dual, donor=(donor[0], donor[1]))


def summed(x: Tensor, groups: Tensor) -> Tensor:
    """Sums of (N, d) over the coordinates of each group, (N, k); on the CPU, as a GPU adds in any order."""
    sums = torch.zeros(*x.shape[:-1], int(groups.max()) + 1, dtype=x.dtype)
    return sums.index_add_(-1, groups.cpu(), x.cpu()).to(x.device)
