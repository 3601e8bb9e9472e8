r"""Second-order statistics of anchor and donor heads, which the best element of every in-head group follows from.

The squared distance that a map g (primal side) leaves is a constant minus the gain

    gain(g) = 2 <g B_P, A_P> - |g B_P|^2 + 2 <g^-T B_D, A_D> - |g^-T B_D|^2,

with P the primal side (keys, values), D the dual one (queries, outputs), A anchor and B donor. The group's `statistic`
names the needed entries of A B^T.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.linalg.polar import FLOAT32_RANK_TOLERANCE, RANK_TOLERANCE

STATISTICS = ("full", "pairs", "coordinates")
"""All products of two coordinates, one complex number for each RoPE pair, or one number for each coordinate."""


@dataclass(frozen=True)
class Grams:
    """Second-order statistics of N (anchor head, donor head) pairs, float64 or complex128.

    Attributes:
        primal, dual: statistics of A B^T of either side, shape (N, *S) as the group's `statistic` says.
        donor_primal, donor_dual, anchor_primal, anchor_dual: squared norm of each coordinate, shape (N, d).
        rank_tolerance: relative rounding of the products.
        follow, donor_follow: the same, (N, d, d) and (N, d), of tensors that are permuted with the coordinates and
            never scaled; None if there are none.
    """

    primal: Tensor
    dual: Tensor
    donor_primal: Tensor
    donor_dual: Tensor
    anchor_primal: Tensor
    anchor_dual: Tensor
    rank_tolerance: float = field(default=RANK_TOLERANCE, kw_only=True)
    follow: Tensor | None = field(default=None, kw_only=True)
    donor_follow: Tensor | None = field(default=None, kw_only=True)

    @staticmethod
    def rounding(exact: bool) -> float:
        """Relative rounding of products summed from float64 values, or from float32 ones."""
        return RANK_TOLERANCE if exact else FLOAT32_RANK_TOLERANCE

    def norms(self) -> Tensor:
        """Squared norm of the donor's sides, shape (N,)."""
        total = self.donor_primal.sum(-1) + self.donor_dual.sum(-1)
        return total if self.donor_follow is None else total + self.donor_follow.sum(-1)

    def guess(self) -> Tensor:
        """The scale that gives the donor the anchor's ratio of primal to dual norm, shape (N,)."""
        return balance(
            *(getattr(self, n).sum(-1) for n in ("donor_primal", "donor_dual", "anchor_primal", "anchor_dual"))
        )


def balance(donor_primal: Tensor, donor_dual: Tensor, anchor_primal: Tensor, anchor_dual: Tensor) -> Tensor:
    """The scale that gives a donor of these squared norms the anchor's ratio of primal to dual, 1 where a side is 0."""
    ratio = (donor_dual * anchor_primal) / (donor_primal * anchor_dual)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio)) ** 0.25
