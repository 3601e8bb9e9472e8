r"""Invertible maps inside heads: never worse than the orthogonal map with rescale that they start from.

Minimises |A_P - G B_P|^2 + |A_D - G^-T B_D|^2 over GL(d) by L-BFGS, all heads at once. The problem is not convex, so
each head keeps its start unless the result is better; singular values are held within a bounded ratio, because a
badly conditioned map loses digits in half precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rotation_merge.groups import GroupElement, Invertible

if TYPE_CHECKING:
    from rotation_merge.matching.attention import HeadPair

LARGEST_CONDITION = 30.0
"""Bound on the ratio of largest to smallest singular value of a map."""

_ITERATIONS = 60


def refine(pair: HeadPair, groups: Tensor, queries: Tensor, start: GroupElement) -> Invertible:
    """The best map of GL(d) found from `start`, of condition number at most `LARGEST_CONDITION`.

    Args:
        pair: the two sides of the in-head space.
        groups, queries: order of the donor's heads, as `HeadPair.grams` takes it.
        start: orthogonal maps with rescale, batch G.

    Returns:
        Maps with a squared distance no larger than that of `start`, head by head.
    """
    objective = _Objective(pair, groups, queries)
    eye = torch.eye(start.size, dtype=torch.float64, device=objective.m_primal.device).repeat(start.batch, 1, 1)
    first = start.act(eye, 0, 1)
    result = _descend(objective, first)
    result = _bounded(result)
    better = objective(result) < objective(first) * (1 - 1e-12)
    return Invertible(torch.where(better[:, None, None], result, first))


class _Objective:
    """The squared distance as a function of the maps, from second-order statistics; a constant is left out."""

    def __init__(self, pair: HeadPair, groups: Tensor, queries: Tensor) -> None:
        donor_primal = pair.donor_primal[groups]
        donor_dual = pair.donor_dual[groups[:, None], queries]
        self.m_primal = pair.anchor_primal @ donor_primal.mT
        self.m_dual = (pair.anchor_dual @ donor_dual.mT).sum(1)
        self.k_primal = donor_primal @ donor_primal.mT
        self.k_dual = (donor_dual @ donor_dual.mT).sum(1)
        self.constant = pair.anchor_primal.square().sum((1, 2)) + pair.anchor_dual.square().sum((1, 2, 3))

    def __call__(self, maps: Tensor) -> Tensor:
        dual = torch.linalg.inv(maps).mT
        primal_part = ((maps @ self.k_primal - 2 * self.m_primal) * maps).sum((1, 2))
        dual_part = ((dual @ self.k_dual - 2 * self.m_dual) * dual).sum((1, 2))
        return self.constant + primal_part + dual_part


def _descend(objective: _Objective, first: Tensor) -> Tensor:
    with torch.enable_grad():
        maps = first.clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS([maps], max_iter=_ITERATIONS, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = objective(maps).sum()
            loss.backward()
            return loss

        try:
            optimiser.step(closure)
        except torch.linalg.LinAlgError:  # a step onto a singular matrix: keep the start
            return first
    result = maps.detach()
    return torch.where(result.isfinite().all(-1).all(-1)[:, None, None], result, first)


def _bounded(maps: Tensor) -> Tensor:
    """Singular values clamped around their geometric mean to a ratio of `LARGEST_CONDITION`."""
    u, s, vh = torch.linalg.svd(maps)
    middle = s.clamp_min(1e-300).log().mean(-1, keepdim=True).exp()
    reach = LARGEST_CONDITION**0.5
    return (u * s.clamp(middle / reach, middle * reach)[:, None, :]) @ vh
