"""O(d), and O(d) with one scale for each head: value/output and rotary-free query/key dimensions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.linalg.polar import nuclear_norm, procrustes, random_orthogonal
from rotation_merge.linalg.saddle import joint_ceiling
from rotation_merge.linalg.scaling import best_scale, cost, joint_scale, scale_ceiling
from rotation_merge.symmetry.base import GroupElement, act_by_matrices
from rotation_merge.symmetry.group import Group, agreement_by_matrices, near
from rotation_merge.symmetry.matrix import MatrixElement
from rotation_merge.symmetry.orthogonal import Orthogonal
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps, scaled


@dataclass(frozen=True, eq=False)
class ScaledElement(MatrixElement):
    """A map of O(d) times one positive (or signed) factor for each head: R and a in ``aligned = a R donor``."""

    factor: Tensor

    kind = "scaled_orthogonal"

    @classmethod
    def identity(cls, batch: int, size: int) -> ScaledElement:
        return cls(Orthogonal.identity(batch, size).matrix, torch.ones(batch, dtype=torch.float64))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> ScaledElement:
        factor = (0.5 * torch.randn(batch, dtype=torch.float64, generator=generator)).exp()
        return cls(random_orthogonal(batch, size, generator), factor)

    def inverse(self) -> ScaledElement:
        return ScaledElement(self.matrix.mT, 1 / self.factor)

    def compose(self, first: ScaledElement) -> ScaledElement:
        return ScaledElement(self.matrix @ first.matrix, self.factor * first.factor)

    def select(self, index: Tensor) -> ScaledElement:
        return ScaledElement(self.matrix[index], self.factor[index])

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        factor = 1 / self.factor if dual else self.factor
        return act_by_matrices(self.matrix * factor[:, None, None], x, batch_dim, dim)

    def distance(self) -> Tensor:
        """Distance of the orthogonal map, plus |log factor|."""
        return super().distance() + self.factor.abs().log().abs()

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix, "factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> ScaledElement:
        return cls(Orthogonal.from_tensors(tensors).matrix, tensors["factor"].double())

    def tangent(self, freedom: Freedom) -> Steps:
        scale = {"log_scale": torch.zeros(self.batch)} if freedom.scales else {}
        return {"turn": torch.zeros(self.matrix.shape), **scale}

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> ScaledElement:
        turned = Orthogonal(self.matrix).along({"turn": steps["turn"]}, Freedom(), exact)
        return ScaledElement(turned.matrix, scaled(self.factor, steps, exact))


@dataclass(frozen=True)
class OrthogonalGroup(Group):
    """O(d), with `rescale` times the positive scalars."""

    rescale: bool | str = False

    kind = "orthogonal"
    words = "orthogonal maps"
    symbol = "O(d)"

    def identity(self, batch: int, size: int) -> GroupElement:
        return (ScaledElement if self.rescale else Orthogonal).identity(batch, size)

    def random(self, batch: int, size: int, generator: torch.Generator) -> GroupElement:
        return (ScaledElement if self.rescale else Orthogonal).random(batch, size, generator)

    def admits(self, maps: Tensor) -> bool:
        products = maps @ maps.mT
        size = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] if self.rescale else 1.0
        eye = torch.eye(maps.shape[-1], dtype=maps.dtype)
        return near(products / size, eye.expand_as(products))

    def solve(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        """Procrustes; with `rescale` jointly with the scale (ICML 2025 paper, section 4.2 and appendix D)."""
        if not self.rescale:
            rotation = procrustes(grams.primal + grams.dual, grams.rank_tolerance)
            return Orthogonal(rotation), 2 * _inner(rotation, grams.primal + grams.dual) - grams.norms()
        primal, dual = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
        scale = torch.ones_like(primal)
        if self.rescale != "sequential":
            scale = _joint_scale(grams, primal, dual)
        rotation = procrustes(_mix(grams.primal, grams.dual, scale), grams.rank_tolerance)
        scale = best_scale(primal, dual, _inner(rotation, grams.primal), _inner(rotation, grams.dual))
        inner = _inner(rotation, grams.primal), _inner(rotation, grams.dual)
        return ScaledElement(rotation, scale), -cost(scale, primal, dual, *inner)

    def ceiling(self, grams: Grams) -> Tensor:
        """Upper bound on the gain: with `rescale` by `joint_ceiling`, else from singular values at a few scales."""
        if not self.rescale:
            return 2 * nuclear_norm(grams.primal + grams.dual) - grams.norms()
        if self.rescale == "sequential":
            return super().ceiling(grams)
        primal, dual = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
        ceiling = joint_ceiling(grams.primal, grams.dual, (primal, dual))
        unbounded = ceiling.isinf()
        if bool(unbounded.any()):
            first, second = grams.primal[unbounded], grams.dual[unbounded]
            bounds = _nuclear_bound(first), _nuclear_bound(second)
            known = primal[unbounded], dual[unbounded]
            ceiling[unbounded] = scale_ceiling(_mixed_norm(first, second), *known, bounds)
        return ceiling

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        return agreement_by_matrices(element, products)


def _joint_scale(grams: Grams, primal: Tensor, dual: Tensor) -> Tensor:
    def inner(scale: Tensor) -> tuple[Tensor, Tensor]:
        rotation = procrustes(_mix(grams.primal, grams.dual, scale), grams.rank_tolerance)
        return _inner(rotation, grams.primal), _inner(rotation, grams.dual)

    bounds = nuclear_norm(grams.primal), nuclear_norm(grams.dual)
    return joint_scale(_mixed_norm(grams.primal, grams.dual), inner, primal, dual, grams.guess(), bounds)


def _mixed_norm(primal: Tensor, dual: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda scale: nuclear_norm(_mix(primal, dual, scale))


def _nuclear_bound(products: Tensor) -> Tensor:
    """|M|_* <= sqrt(d) |M|_F."""
    return products.shape[-1] ** 0.5 * torch.linalg.matrix_norm(products)


def _mix(primal: Tensor, dual: Tensor, scale: Tensor) -> Tensor:
    return scale[..., None, None] * primal + dual / scale[..., None, None]


def _inner(rotation: Tensor, products: Tensor) -> Tensor:
    return (rotation * products).sum((-2, -1))
