r"""Invertible maps inside heads: never worse than the orthogonal map with rescale that they start from.

Minimises |A_P - G B_P|^2 + |A_D - G^-T B_D|^2 over GL(d) by L-BFGS, all heads at once. The problem is not convex, so
each head keeps its start unless the result is better; singular values are held within a bounded ratio, because a
badly conditioned map loses digits in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.groups import GroupElement, Invertible
from rotation_merge.matching.inhead import Grams
from rotation_merge.matching.pairing import Pairing
from rotation_merge.matching.products import Order

LARGEST_CONDITION = 30.0
"""Bound on the ratio of largest to smallest singular value of a map."""

_ITERATIONS = 60


def refine(
    pairing: Pairing, order: Order | None, grams: Grams, start: GroupElement, equal: Tensor
) -> tuple[Invertible, Tensor]:
    """The best map of GL(d) found from `start`, of condition number at most `LARGEST_CONDITION`.

    Args:
        pairing: the in-head space.
        order: of the donor's heads (None: as they stand).
        grams: its statistics under that order.
        start: orthogonal maps, or these with a scale, batch G.
        equal: groups that are equal in both models, (G,): they keep their start.

    Returns:
        Maps that gain no less than `start`, head by head, and their gains (G,).
    """
    objective = _Objective(pairing, order, grams)
    eye = torch.eye(start.size, dtype=torch.float64, device=grams.primal.device).repeat(start.batch, 1, 1)
    first = start.act(eye, 0, 1)
    result = _bounded(_descend(objective, first))
    before, after = objective(first), objective(result)
    better = (before - after > _TIE * objective.scale) & ~equal
    element = Invertible(torch.where(better[:, None, None], result, first))
    return element, -torch.where(better, after, before)


_TIE = 1e-10  # gains below this share of the norms leave the start as it is


class _Objective:
    """The squared distance as a function of the maps, from second-order statistics; a constant is left out."""

    def __init__(self, pairing: Pairing, order: Order | None, grams: Grams) -> None:
        primal, dual = (half.own_products(1) for half in (pairing.primal, pairing.dual))
        groups = slice(None) if order is None else order.donor.to(primal.device)
        self.k_primal, self.k_dual = primal[groups], dual[groups]
        self.m_primal, self.m_dual = grams.primal, grams.dual
        self.scale = (grams.norms() + grams.anchor_primal.sum(-1) + grams.anchor_dual.sum(-1)).clamp_min(1e-300)

    def __call__(self, maps: Tensor) -> Tensor:
        dual = torch.linalg.inv(maps).mT
        primal_part = ((maps @ self.k_primal - 2 * self.m_primal) * maps).sum((1, 2))
        dual_part = ((dual @ self.k_dual - 2 * self.m_dual) * dual).sum((1, 2))
        return primal_part + dual_part


def _descend(objective: _Objective, first: Tensor) -> Tensor:
    with torch.enable_grad():
        maps = first.clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS([maps], max_iter=_ITERATIONS, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = (objective(maps) / objective.scale).sum()
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
