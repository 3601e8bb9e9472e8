"""Transforms of the experts of one layer: their order, and the neurons of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, is_order
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.neurons import NeuronGroup, NeuronTransform, act_on_neurons, degree_in, degree_tensor
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform


@dataclass(frozen=True, eq=False)
class ExpertTransform(SpaceTransform):
    """Experts reordered, ``aligned expert e = donor expert order[e]``, then the neurons of each moved.

    Attributes:
        order: int64 (E,).
        neurons: Monomial of batch E and size n.
        degree: of their activation, f(c x) = c^degree f(x).

    Roles: `index` is the axis that counts the experts (router rows; dimension 0 of stacked expert weights);
    `in`, `gate`, `out` are neuron axes of stacked weights, whose dimension 0 counts the (reordered) experts.
    """

    order: Tensor
    neurons: Monomial
    degree: int = 1

    space_kind = "experts"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        if role == "index":
            return x.index_select(dim, self.order.to(x.device))
        return act_on_neurons(self.neurons, self.degree, x, role, dim, dual)

    def mixes(self, role: str) -> bool:
        return False

    def inverse(self) -> ExpertTransform:
        back = self.order.argsort()
        return ExpertTransform(back, self.neurons.inverse().select(back), self.degree)

    def compose(self, first: ExpertTransform) -> ExpertTransform:
        neurons = self.neurons.compose(first.neurons.select(self.order))
        return ExpertTransform(first.order[self.order], neurons, self.degree)

    def still(self) -> ExpertTransform:
        return ExpertTransform(torch.arange(len(self.order)), self.neurons.still(), self.degree)

    def elements(self) -> dict[str, GroupElement]:
        return {"neurons": self.neurons}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> ExpertTransform:
        return ExpertTransform(self.order, cast(Monomial, elements["neurons"]), self.degree)

    def _moved(self) -> float:
        at_home = torch.arange(len(self.order), device=self.order.device)
        return float((self.order != at_home).double().mean())

    def is_identity(self) -> bool:
        return self._moved() == 0 and self.neurons.is_identity()

    def distances(self) -> dict[str, float]:
        return {
            "experts": self._moved(),
            "neurons": float(self.neurons.permutation.distance().mean()),
            "scale": float(self.neurons.scaling.distance().mean()),
        }

    def group(self) -> str:
        return "order of experts, permutation of each one's neurons"

    def tensors(self) -> dict[str, Tensor]:
        return {"order": self.order} | self.neurons.tensors() | degree_tensor(self.degree)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> ExpertTransform:
        return cls(tensors["order"].long(), Monomial.from_tensors(tensors), degree_in(tensors))


@dataclass(frozen=True)
class ExpertGroup(SpaceGroup):
    """The order of experts, and the group of each expert's neurons.

    Attributes:
        routing: groups that the router picks first: experts change places inside them, and they among themselves.
    """

    neurons: NeuronGroup
    routing: int = 1

    def identity(self) -> ExpertTransform:
        neurons = self.neurons.identity()
        return ExpertTransform(torch.arange(self.neurons.count), neurons.element, neurons.degree)

    def random(self, generator: torch.Generator) -> ExpertTransform:
        neurons, count = self.neurons.random(generator), self.neurons.count
        order = torch.arange(count)
        if self.neurons.permute:
            inner = [torch.randperm(count // self.routing, generator=generator) for _ in range(self.routing)]
            outer = torch.randperm(self.routing, generator=generator)
            order = (outer[:, None] * (count // self.routing) + torch.stack(inner)).flatten()
        return ExpertTransform(order, neurons.element, neurons.degree)

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, ExpertTransform):
            return "it is not a transform of experts"
        if transform.order.shape != (self.neurons.count,) or not is_order(transform.order[None]):
            return f"its order is not a permutation of {self.neurons.count} experts"
        groups = transform.order.reshape(self.routing, -1) // (self.neurons.count // self.routing)
        if bool((groups != groups[:, :1]).any()):
            return "experts leave the group that the router picks them in"
        return self.neurons.refuses(NeuronTransform(transform.neurons, transform.degree))

    @property
    def words(self) -> str:
        return ("order of experts, " if self.neurons.permute else "") + self.neurons.words

    def work(self) -> MatchingCost:
        work, pairs = self.neurons.work(), self.neurons.count if self.neurons.permute else 1
        return replace(work, assigned=work.assigned * pairs)
