"""Transforms of the neurons of one FFN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rotation_merge.symmetry.base import LARGEST_ENTRY, GroupElement, is_order
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform

_PROOF_FLOPS = 700.0
"""Operations for each weight that prove an order of neurons the best between near models, without all products."""


def act_on_neurons(element: Monomial, degree: int, x: Tensor, role: str, dim: int, dual: bool) -> Tensor:
    """Move dimension `dim` of x, whose dimension 0 counts the elements (one for each expert).

    Roles: `in` (rows into the neurons; up, where gated), `out` (columns out of them, which the activation's degree
        divides by the scale so many times), `gate` (order only); with `dual`, the paired axes.
    """
    if role == "gate":
        return element.permutation.act(x, 0, dim)
    if role == "out":
        return element.powered(degree).act(x, 0, dim, dual=not dual)
    return element.act(x, 0, dim, dual)


def degree_tensor(degree: int) -> dict[str, Tensor]:
    """The degree as a transform's `tensors` have it: nothing where it is 1."""
    return {} if degree == 1 else {"degree": torch.tensor(degree)}


def degree_in(tensors: dict[str, Tensor]) -> int:
    """The reverse of `degree_tensor`."""
    return int(tensors["degree"]) if "degree" in tensors else 1


@dataclass(frozen=True, eq=False)
class NeuronTransform(SpaceTransform):
    """Order and rescaling of the neurons (G = 1), and the degree of their activation: f(c x) = c^degree f(x)."""

    element: Monomial
    degree: int = 1

    space_kind = "ffn"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        return act_on_neurons(self.element, self.degree, x.unsqueeze(0), role, dim + 1, dual).squeeze(0)

    def mixes(self, role: str) -> bool:
        return False

    def moves(self, role: str) -> bool:
        return not (self.element.permutation if role == "gate" else self.element).is_identity()

    def inverse(self) -> NeuronTransform:
        return NeuronTransform(self.element.inverse(), self.degree)

    def compose(self, first: NeuronTransform) -> NeuronTransform:
        return NeuronTransform(self.element.compose(first.element), self.degree)

    def still(self) -> NeuronTransform:
        return NeuronTransform(self.element.still(), self.degree)

    def elements(self) -> dict[str, GroupElement]:
        return {"neurons": self.element}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> NeuronTransform:
        return NeuronTransform(cast(Monomial, elements["neurons"]), self.degree)

    def is_identity(self) -> bool:
        return self.element.is_identity()

    def distances(self) -> dict[str, float]:
        return {
            "neurons": float(self.element.permutation.distance().mean()),
            "scale": float(self.element.scaling.distance().mean()),
        }

    def group(self) -> str:
        return "permutation" if self.element.scaling.is_identity() else "permutation with rescaling"

    def tensors(self) -> dict[str, Tensor]:
        return self.element.tensors() | degree_tensor(self.degree)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> NeuronTransform:
        return cls(Monomial.from_tensors(tensors), degree_in(tensors))


@dataclass(frozen=True)
class NeuronGroup(SpaceGroup):
    """Neurons of one FFN, or of each expert of a layer.

    Attributes:
        size: number of neurons.
        permute: whether they may change places.
        degree: of their activation, f(c x) = c^degree f(x); 0: they cannot be rescaled.
        signed: whether factors may be negative, too.
        count: number of experts.
    """

    size: int
    permute: bool
    degree: int
    signed: bool = False
    count: int = 1

    def _with(self, element: Monomial) -> NeuronTransform:
        return NeuronTransform(element, self.degree or 1)

    def identity(self) -> NeuronTransform:
        return self._with(Monomial.identity(self.count, self.size))

    def random(self, generator: torch.Generator) -> NeuronTransform:
        draw = Permutation.random if self.permute else lambda batch, size, _: Permutation.identity(batch, size)
        order = draw(self.count, self.size, generator)
        if not self.degree:
            return self._with(Monomial(order, Scaling.identity(self.count, self.size)))
        factor = Scaling.random(self.count, self.size, generator)
        if self.signed:
            factor = factor.compose(Scaling.random_signs(self.count, self.size, generator))
        return self._with(Monomial(order, factor))

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, NeuronTransform):
            return "it is not a transform of neurons"
        index, factor = transform.element.permutation.index, transform.element.scaling.factor
        if index.shape != (self.count, self.size) or factor.shape != index.shape:
            return f"it does not have {self.count} x {self.size} neurons"
        if not is_order(index) or not (self.permute or transform.element.permutation.is_identity()):
            return (
                "the order of its neurons is not a permutation" if self.permute else "neurons have to keep their places"
            )
        size = factor.abs()
        if not bool(((size >= 1 / LARGEST_ENTRY) & (size <= LARGEST_ENTRY)).all()):
            return "a factor is zero, infinite or out of range"
        if transform.degree != (self.degree or 1) or not (self.degree or transform.element.scaling.is_identity()):
            return "its factors do not pass through the activation"
        return None if self.signed or bool((factor > 0).all()) else "its factors have to be positive"

    @property
    def words(self) -> str:
        parts = ["permutation"] if self.permute else []
        if self.degree:
            parts.append("signed rescaling" if self.signed else "positive rescaling")
        return ", ".join(parts) or "none"

    def work(self) -> MatchingCost:
        near = min(2.0 * self.size, _PROOF_FLOPS)
        return MatchingCost(2.0 * self.size, assigned=self.count * self.size**2, table=self.size**2, near=near)
