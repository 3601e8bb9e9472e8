r"""Invertible maps GL(d): the largest group of a value/output pair, or of a query/key pair without rotary embedding.

The best one minimises |A_P - G B_P|^2 + |A_D - G^-T B_D|^2. The problem is not convex: L-BFGS descends from the best
orthogonal map with its scale, all heads at once, and each head keeps its start unless the result is better. Singular
values are held within a bounded ratio, because a badly conditioned map loses digits in half precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.linalg.polar import random_orthogonal
from rotation_merge.symmetry.base import GroupElement, act_by_matrices
from rotation_merge.symmetry.group import Own
from rotation_merge.symmetry.matrix import MatrixElement
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps, like

LARGEST_CONDITION = 30.0
"""Bound on the ratio of largest to smallest singular value of a map."""

_ITERATIONS = 60
_TIE = 1e-10  # gains below this share of the norms leave the start as it is


@dataclass(frozen=True, eq=False)
class Invertible(MatrixElement):
    """``aligned = matrix @ donor``, on the dual side ``matrix^-T @ donor``; float64, shape (G, d, d)."""

    kind = "invertible"

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Invertible:
        """Singular values between about 1/2 and 2."""
        before, after = random_orthogonal(batch, size, generator), random_orthogonal(batch, size, generator)
        stretch = (torch.rand(batch, 1, size, dtype=torch.float64, generator=generator) * 1.4 - 0.7).exp()
        return cls(before * stretch @ after)

    def inverse(self) -> Invertible:
        return Invertible(torch.linalg.inv(self.matrix))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        matrix = torch.linalg.inv(self.matrix).mT if dual else self.matrix
        return act_by_matrices(matrix, x, batch_dim, dim)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Invertible:
        return cls(tensors["matrix"].double())

    def tangent(self, freedom: Freedom) -> Steps:
        return {"turn": torch.zeros(self.matrix.shape)}

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> Invertible:
        turn = steps["turn"]
        return Invertible(torch.matrix_exp(like(turn, turn, exact)) @ like(self.matrix, turn, exact))


@dataclass(frozen=True)
class InvertibleGroup(OrthogonalGroup):
    """GL(d); `solve` gives the best element of O(d), and `refined` descends from there."""

    kind = "invertible"
    words = "invertible maps"
    symbol = "GL(d)"

    def random(self, batch: int, size: int, generator: torch.Generator) -> GroupElement:
        return Invertible.random(batch, size, generator)

    def admits(self, maps: Tensor) -> bool:
        return True

    def refined(
        self, element: GroupElement, gain: Tensor, grams: Grams, donor_products: Own, equal: Tensor
    ) -> tuple[Invertible, Tensor]:
        """The best maps found, of condition number at most `LARGEST_CONDITION`."""
        objective = _Objective(grams, *donor_products())
        eye = torch.eye(element.size, dtype=torch.float64, device=grams.primal.device).repeat(element.batch, 1, 1)
        first = element.act(eye, 0, 1)
        result = _bounded(_descend(objective, first))
        before, after = objective(first), objective(result)
        better = (before - after > _TIE * objective.scale) & ~equal
        chosen = Invertible(torch.where(better[:, None, None], result, first))
        return chosen, -torch.where(better, after, before)


class _Objective:
    """The squared distance as a function of the maps, from second-order statistics; a constant is left out."""

    def __init__(self, grams: Grams, own_primal: Tensor, own_dual: Tensor) -> None:
        self.k_primal, self.k_dual = own_primal, own_dual
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
