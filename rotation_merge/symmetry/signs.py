"""Groups of factors of heads: the identity, and the maps that commute with norms between projection and product."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.planar import pair_dims
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.statistics import Grams


class FactorGroup(Group):
    """Groups whose elements are one factor for each coordinate."""

    statistic = "coordinates"

    def admits(self, maps: Tensor) -> bool:
        factor = maps.diagonal(dim1=1, dim2=2)
        return torch.equal(maps, factor.diag_embed()) and self._admits_factors(factor)

    @abstractmethod
    def _admits_factors(self, factor: Tensor) -> bool:
        """Whether these, (N, d), are the factors of elements."""

    def identity(self, batch: int, size: int) -> Scaling:
        return Scaling.identity(batch, size)

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        assert isinstance(element, Scaling)
        return torch.einsum("np,nabp->nab", 1 / element.factor, products)


@dataclass(frozen=True)
class IdentityGroup(FactorGroup):
    """The identity alone."""

    kind = "fixed"
    words = "none"
    symbol = "none"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Scaling:
        return Scaling.identity(batch, size)

    def solve(self, grams: Grams) -> tuple[Scaling, Tensor]:
        identity = Scaling.identity(*grams.donor_primal.shape).to(grams.primal.device)
        return identity, self.gain_as_it_stands(grams)

    def reach(self, products: Tensor) -> Tensor:
        return products

    def _admits_factors(self, factor: Tensor) -> bool:
        return bool((factor == 1).all())


@dataclass(frozen=True)
class SignGroup(FactorGroup):
    """Signs that some coordinates share; by default each has its own."""

    def _together(self, agreement: Tensor) -> Tensor:
        """Sum statistics of coordinates, (N, d), over those that share a sign: (N, k)."""
        return agreement

    def _spread(self, signs: Tensor, size: int) -> Tensor:
        """One sign for each that is shared, (N, k), as one for each coordinate, (N, d)."""
        return signs

    def _own(self, factor: Tensor) -> Tensor:
        """The inverse of `_spread`."""
        return factor

    def random(self, batch: int, size: int, generator: torch.Generator) -> Scaling:
        count = self._own(torch.ones(batch, size, dtype=torch.float64)).shape[1]
        return Scaling(self._spread(Scaling.random_signs(batch, count, generator).factor, size))

    def solve(self, grams: Grams) -> tuple[Scaling, Tensor]:
        agreement = self._together((grams.primal + grams.dual).real)
        signs = torch.where(agreement < 0, -torch.ones_like(agreement), torch.ones_like(agreement))
        return Scaling(self._spread(signs, grams.donor_primal.shape[-1])), 2 * agreement.abs().sum(-1) - grams.norms()

    def _admits_factors(self, factor: Tensor) -> bool:
        signs = bool((factor.abs() == 1).all())
        return signs and torch.equal(factor, self._spread(self._own(factor), factor.shape[1]))


@dataclass(frozen=True)
class CoordinateSigns(SignGroup):
    """A sign for each coordinate: the group of an RMSNorm of queries and keys without rotary embedding after it."""

    kind = "coordinate_signs"
    words = "a sign for each coordinate"
    symbol = "sign of each coordinate"


@dataclass(frozen=True)
class PairSigns(SignGroup):
    """A sign for each RoPE pair: commutes with a gained RMSNorm and rotary embedding."""

    interleaved: bool = False

    kind = "pair_signs"
    statistic = "pairs"
    words = "a sign for each RoPE pair"
    symbol = "sign of each RoPE pair"

    def _spread(self, signs: Tensor, size: int) -> Tensor:
        factor = signs.new_ones(len(signs), size)
        for dims in pair_dims(size, self.interleaved):
            factor[:, dims] = signs
        return factor

    def _own(self, factor: Tensor) -> Tensor:
        return factor[:, pair_dims(factor.shape[1], self.interleaved)[0]]

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        assert isinstance(element, Scaling)
        return super().agreement(Scaling(self._own(element.factor)), products.real)


@dataclass(frozen=True)
class HeadSign(SignGroup):
    """One sign for all of a head: commutes with a LayerNorm of queries and keys."""

    kind = "head_sign"
    words = "a sign for each head"
    symbol = "sign of a KV group"

    def _together(self, agreement: Tensor) -> Tensor:
        return agreement.sum(-1, keepdim=True)

    def _spread(self, signs: Tensor, size: int) -> Tensor:
        return signs.repeat(1, size)

    def _own(self, factor: Tensor) -> Tensor:
        return factor[:, :1]
