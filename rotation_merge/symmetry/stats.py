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
from rotation_merge.symmetry.element import Element, Monomial


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

    def balanced(self, groups: Tensor | None = None) -> Tensor:
        """The scales that give the donor the anchor's ratio of primal to dual norm, 1 where a side is zero.

        Args:
            groups: numbers, (d,), of the coordinates that share a scale; None: all do.

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

    def gain(self, element: Element) -> Tensor:
        """The gain of one element for each pair, (N,)."""
        if isinstance(element, Monomial):
            return self._gain_of_order(element)
        maps = (element.matrix, element.dual)
        total = torch.zeros_like(self.primal[:, 0, 0])
        for g, m, norms in zip(maps, (self.primal, self.dual), self.donor, strict=True):
            g = g.to(m)
            total = total + 2 * (g * m).sum((1, 2)) - (g.square().sum(1) * norms).sum(1)
        return total if self.follow is None else total - self._followed(None)

    def _gain_of_order(self, element: Monomial) -> Tensor:
        index = element.index.to(self.primal.device)
        total = torch.zeros_like(self.primal[:, 0, 0])
        for m, norms, power in ((self.primal, self.donor[0], 1), (self.dual, self.donor[1], -element.degree)):
            factor = element.factor.to(m) ** power
            picked = m.gather(2, index[..., None])[..., 0]
            total = total + (2 * factor * picked - factor.square() * norms.gather(1, index)).sum(1)
        return total if self.follow is None else total - self._followed(index)

    def _followed(self, index: Tensor | None) -> Tensor:
        """What is lost on the tensors that only follow an order, (N,)."""
        assert self.follow is not None
        assert self.follow_norms is not None
        order = torch.arange(self.follow.shape[1]).to(self.follow.device) if index is None else index
        picked = self.follow.gather(2, order.expand(len(self.follow), -1)[..., None])[..., 0]
        return self.follow_norms.sum(1) - 2 * picked.sum(1)

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


def summed(x: Tensor, groups: Tensor | None) -> Tensor:
    """Sums of (N, d) over the coordinates of each group, (N, k); None: over all, (N, 1)."""
    if groups is None:
        return x.sum(-1, keepdim=True)
    count = int(groups.max()) + 1
    return x.new_zeros(*x.shape[:-1], count).index_add_(-1, groups.to(x.device), x)
