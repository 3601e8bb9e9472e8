"""Transforms of the channels of a gated convolution (LFM2): ``out @ (third * filter(first * second))``.

Between any two neighbours of that product a channel may be multiplied on one side and divided on the other by one
factor of either sign: four free factors for each channel, and one order of all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rotation_merge.symmetry.base import LARGEST_ENTRY, GroupElement, broadcast, is_order
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform

FACTORS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "first": ((0,), ()),
    "second": ((1,), ()),
    "filter": ((2,), (0, 1)),
    "shift": ((2,), ()),
    "third": ((3,), ()),
    "out": ((), (2, 3)),
}
"""Of every role, the factors that multiply it and those that divide it. Factors 0, 1 and 3 are those of the three maps
that are multiplied, 2 is that of the filter's outputs; `shift` is the filter's bias."""

COUNT = 4
"""Free factors of a channel."""


def multiplier(factors: Tensor, role: str) -> Tensor:
    """The multiplier of a role, shape (...), for factors (4, ...)."""
    above, below = FACTORS[role]
    result = torch.ones_like(factors[0])
    for i in above:
        result = result * factors[i]
    for i in below:
        result = result / factors[i]
    return result


@dataclass(frozen=True, eq=False)
class ConvolutionTransform(SpaceTransform):
    """One order of the channels (G = 4, the same in each) with the four factors of each channel.

    ``aligned[i] = multiplier(factor[:, i], role) * donor[index[i]]`` for every role of `FACTORS`.
    """

    element: Monomial

    space_kind = "convolution"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        order = Permutation(self.element.permutation.index[:1])
        if not order.is_identity():
            x = order.act(x.unsqueeze(0), 0, dim + 1).squeeze(0)
        if self.element.scaling.is_identity():
            return x
        scale = multiplier(self.element.scaling.factor, role)[None]
        return (x * broadcast(1 / scale if dual else scale, x[None], 0, dim + 1)[0]).to(x.dtype)

    def mixes(self, role: str) -> bool:
        return False

    def inverse(self) -> ConvolutionTransform:
        return ConvolutionTransform(self.element.inverse())

    def compose(self, first: ConvolutionTransform) -> ConvolutionTransform:
        return ConvolutionTransform(self.element.compose(first.element))

    def still(self) -> ConvolutionTransform:
        return ConvolutionTransform(self.element.still())

    def elements(self) -> dict[str, GroupElement]:
        return {"channels": self.element}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> ConvolutionTransform:
        return ConvolutionTransform(cast(Monomial, elements["channels"]))

    def is_identity(self) -> bool:
        return self.element.is_identity()

    def distances(self) -> dict[str, float]:
        return {
            "channels": float(self.element.permutation.distance().mean()),
            "scale": float(self.element.scaling.distance().mean()),
        }

    def group(self) -> str:
        return "permutation" if self.element.scaling.is_identity() else "permutation with four rescalings"

    def tensors(self) -> dict[str, Tensor]:
        return self.element.tensors()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> ConvolutionTransform:
        return cls(Monomial.from_tensors(tensors))


@dataclass(frozen=True)
class ConvolutionGroup(SpaceGroup):
    """Channels of one gated convolution: whether they may change places, and be rescaled."""

    size: int
    permute: bool
    rescale: bool

    def identity(self) -> ConvolutionTransform:
        return self.element(torch.arange(self.size), torch.ones(COUNT, self.size, dtype=torch.float64))

    def element(self, order: Tensor, factors: Tensor) -> ConvolutionTransform:
        """Build an element from an order (n,) and factors (4, n)."""
        return ConvolutionTransform(Monomial(Permutation(order.repeat(COUNT, 1)), Scaling(factors)))

    def random(self, generator: torch.Generator) -> ConvolutionTransform:
        still = self.identity().element
        order = torch.randperm(self.size, generator=generator) if self.permute else still.permutation.index[0]
        if not self.rescale:
            return self.element(order, still.scaling.factor)
        signs = Scaling.random_signs(COUNT, self.size, generator)
        return self.element(order, Scaling.random(COUNT, self.size, generator).compose(signs).factor)

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, ConvolutionTransform):
            return "it is not a transform of a convolution's channels"
        index, factor = transform.element.permutation.index, transform.element.scaling.factor
        if index.shape != (COUNT, self.size) or factor.shape != index.shape:
            return f"it does not have {COUNT} factors of {self.size} channels"
        if not is_order(index) or not torch.equal(index, index[:1].expand_as(index)):
            return "the order of its channels is not a permutation"
        if not (self.permute or transform.element.permutation.is_identity()):
            return "channels have to keep their places"
        if not (self.rescale or transform.element.scaling.is_identity()):
            return "channels cannot be rescaled"
        sizes = factor.abs()
        in_reach = bool(((sizes >= 1 / LARGEST_ENTRY) & (sizes <= LARGEST_ENTRY)).all())
        return None if in_reach else "a factor is zero, infinite or out of range"

    @property
    def words(self) -> str:
        parts = ["permutation"] if self.permute else []
        return ", ".join([*parts, "four signed rescalings"] if self.rescale else parts) or "none"

    def work(self) -> MatchingCost:
        return MatchingCost(2.0 * self.size, assigned=self.size**2, table=self.size**2)
