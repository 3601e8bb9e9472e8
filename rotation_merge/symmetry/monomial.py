"""Permutation and rescaling together: FFN neurons, signed permutations of a residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign, assign_small
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.symmetry.base import GroupElement
from rotation_merge.symmetry.group import Group, agreement_by_matrices
from rotation_merge.symmetry.orthogonal import Orthogonal
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps, scaled


@dataclass(frozen=True, eq=False)
class Monomial(GroupElement):
    """A permutation followed by a rescaling: FFN neurons, signed permutations of a residual stream.

    ``aligned[i] = scaling.factor[i] * donor[permutation.index[i]]``.
    """

    permutation: Permutation
    scaling: Scaling

    kind = "monomial"
    monomial = True

    @property
    def batch(self) -> int:
        return self.permutation.batch

    @property
    def size(self) -> int:
        return self.permutation.size

    @classmethod
    def identity(cls, batch: int, size: int) -> Monomial:
        return cls(Permutation.identity(batch, size), Scaling.identity(batch, size))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Monomial:
        return cls(Permutation.random(batch, size, generator), Scaling.random(batch, size, generator))

    def inverse(self) -> Monomial:
        back = self.permutation.inverse()
        return replace(self, permutation=back, scaling=Scaling(1 / self.scaling.factor.gather(1, back.index)))

    def compose(self, first: Monomial) -> Monomial:
        factor = self.scaling.factor * first.scaling.factor.gather(1, self.permutation.index)
        return replace(self, permutation=self.permutation.compose(first.permutation), scaling=Scaling(factor))

    def select(self, index: Tensor) -> Monomial:
        return replace(self, permutation=self.permutation.select(index), scaling=self.scaling.select(index))

    def powered(self, degree: int) -> Monomial:
        """The same order, every factor to the power of `degree`."""
        return self if degree == 1 else Monomial(self.permutation, Scaling(self.scaling.factor**degree))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        if not self.permutation.is_identity():
            x = self.permutation.act(x, batch_dim, dim)
        return x if self.scaling.is_identity() else self.scaling.act(x, batch_dim, dim, dual)

    def distance(self) -> Tensor:
        """Fraction of coordinates that move, plus the distance of the rescaling."""
        return self.permutation.distance() + self.scaling.distance()

    def tensors(self) -> dict[str, Tensor]:
        return self.permutation.tensors() | self.scaling.tensors()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Monomial:
        return cls(Permutation.from_tensors(tensors), Scaling.from_tensors(tensors))

    def tangent(self, freedom: Freedom) -> Steps:
        scale = {"log_scale": torch.zeros(self.batch, self.size)} if freedom.scales else {}
        return {**scale, "scores": torch.eye(self.size)} if freedom.permutations and self.batch == 1 else scale

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> Monomial:
        permutation = self._reordered(steps["scores"], exact) if "scores" in steps else self.permutation
        return Monomial(permutation, Scaling(scaled(self.scaling.factor, steps, exact)))

    def _reordered(self, scores: Tensor, exact: bool) -> Permutation:
        """The best assignment of the scores after the permutation.

        While learning, the hard permutation stands as a matrix whose gradient goes straight through to the scores
        (Git Re-Basin, 2023, section 3.3).
        """
        best = assign(scores.detach()).permutation[None]
        current = self.permutation.to(best.device)
        if exact:
            return Permutation(best).compose(current)
        hard = torch.zeros_like(scores).scatter(1, best.T.to(scores.device), 1.0)
        matrix = (hard + scores - scores.detach())[:, current.inverse().index[0].to(scores.device)]
        return cast(Permutation, Orthogonal(matrix[None]))  # acts as a permutation does


@dataclass(frozen=True)
class CoordinateOrder(Group):
    """Permutations of the coordinates of a head (TransFusion, 2025)."""

    kind = "permutation"
    words = "permutations"
    symbol = "permutations"

    def identity(self, batch: int, size: int) -> Monomial:
        return Monomial.identity(batch, size)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        return Monomial(Permutation.random(batch, size, generator), Scaling.identity(batch, size))

    def admits(self, maps: Tensor) -> bool:
        return bool((((maps == 0) | (maps == 1)).all() & ((maps == 1).sum((1, 2)) == maps.shape[-1])).all())

    def solve(self, grams: Grams) -> tuple[Monomial, Tensor]:
        agreement = grams.primal + grams.dual
        index = torch.stack([assign_small(m) for m in agreement])
        element = Monomial(Permutation(index), Scaling.identity(*index.shape))
        return element, 2 * agreement.gather(2, index.to(agreement.device)[..., None]).sum((1, 2)) - grams.norms()

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        return agreement_by_matrices(element, products)


@dataclass(frozen=True)
class GatedOrder(Group):
    """Signed, scaled permutations of values: the group that an elementwise gate of the outputs admits.

    The gate's rows follow the permutation. Factors and order are jointly optimal, as those of gated neurons.
    """

    rescale: bool | str = False

    kind = "gated_order"
    words = "permutations, with a factor for each value"
    symbol = "permuted, scaled"

    def identity(self, batch: int, size: int) -> Monomial:
        return Monomial.identity(batch, size)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        element = Monomial.random(batch, size, generator)
        if not self.rescale:
            return Monomial(element.permutation, Scaling.identity(batch, size))
        signs = Scaling.random_signs(batch, size, generator)
        return Monomial(element.permutation, element.scaling.compose(signs))

    def admits(self, maps: Tensor) -> bool:
        moved = maps != 0
        single = bool(((moved.sum(1) == 1) & (moved.sum(2) == 1)).all())
        return single and (bool(self.rescale) or bool(((maps == 0) | (maps == 1)).all()))

    def _values(self, grams: Grams) -> tuple[Tensor, Tensor]:
        """The best factor of each pair of coordinates, and the gain of the pair, (N, d, d) both."""
        norms = grams.donor_primal[:, None], grams.donor_dual[:, None]
        scale = torch.ones_like(grams.primal)
        if self.rescale:
            scale = best_scale(*norms, grams.primal, grams.dual, signed=True)
        return scale, -cost(scale, *norms, grams.primal, grams.dual)

    def solve(self, grams: Grams) -> tuple[Monomial, Tensor]:
        scale, value = self._values(grams)
        if grams.follow is not None and grams.donor_follow is not None:
            value = value + 2 * grams.follow - grams.donor_follow[:, None]
        index = torch.stack([assign_small(m) for m in value]).to(value.device)
        factor, gain = (x.gather(2, index[..., None])[..., 0] for x in (scale, value))
        return Monomial(Permutation(index.cpu()), Scaling(factor.cpu())), gain.sum(1)

    def bound(self, primal: Tensor, dual: Tensor, grams: Grams) -> Tensor:
        """None is known beside the anchor's norm."""
        return torch.full_like(grams.anchor_primal.sum(-1), torch.inf)

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        return agreement_by_matrices(element, products)
