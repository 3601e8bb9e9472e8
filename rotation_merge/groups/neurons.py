"""Transforms of the neurons of one FFN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.monomial import Monomial
from rotation_merge.groups.space import SpaceTransform


def act_on_neurons(element: Monomial, degree: int, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
    """Move dimension `dim` of x, whose dimension 0 counts the elements (one for each expert).

    Roles: `in` (rows into the neurons; up, where gated), `out` (columns out of them, which the activation's degree
    divides by the scale so many times), `gate` (order only); with `dual`, what these are paired with.
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

    def inverse(self) -> NeuronTransform:
        return NeuronTransform(self.element.inverse(), self.degree)

    def compose(self, first: NeuronTransform) -> NeuronTransform:
        return NeuronTransform(self.element.compose(first.element), self.degree)

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
