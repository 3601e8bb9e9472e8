"""Groups of factors of heads: nothing but the identity, and what commutes with norms between projection and product."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import GroupElement
from rotation_merge.groups.group import Group
from rotation_merge.groups.planar import pair_dims
from rotation_merge.groups.scaling import Scaling
from rotation_merge.groups.statistics import Grams


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
class Fixed(FactorGroup):
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
class CoordinateSigns(FactorGroup):
    """A sign for each coordinate: what an RMSNorm of queries and keys leaves where no rotary embedding follows."""

    kind = "coordinate_signs"
    words = "a sign for each coordinate"
    symbol = "sign of each coordinate"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Scaling:
        return Scaling.random_signs(batch, size, generator)

    def solve(self, grams: Grams) -> tuple[Scaling, Tensor]:
        agreement = grams.primal + grams.dual
        return Scaling(_sign(agreement)), 2 * agreement.abs().sum(-1) - grams.norms()

    def _admits_factors(self, factor: Tensor) -> bool:
        return bool((factor.abs() == 1).all())


@dataclass(frozen=True)
class PairSigns(FactorGroup):
    """A sign for each RoPE pair: what commutes with a gained RMSNorm and rotary embedding."""

    interleaved: bool = False

    kind = "pair_signs"
    statistic = "pairs"
    words = "a sign for each RoPE pair"
    symbol = "sign of each RoPE pair"

    def _spread(self, signs: Tensor) -> Scaling:
        """One factor a pair, (N, d/2), as one a coordinate."""
        factor = signs.new_ones(len(signs), 2 * signs.shape[1])
        for where in pair_dims(factor.shape[1], self.interleaved):
            factor[:, where] = signs
        return Scaling(factor)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Scaling:
        return self._spread(Scaling.random_signs(batch, size // 2, generator).factor)

    def solve(self, grams: Grams) -> tuple[Scaling, Tensor]:
        agreement = (grams.primal + grams.dual).real
        return self._spread(_sign(agreement)), 2 * agreement.abs().sum(-1) - grams.norms()

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        assert isinstance(element, Scaling)
        pairs = Scaling(element.factor[:, pair_dims(element.size, self.interleaved)[0]])
        return super().agreement(pairs, products.real)

    def _admits_factors(self, factor: Tensor) -> bool:
        first, second = pair_dims(factor.shape[1], self.interleaved)
        return bool((factor.abs() == 1).all()) and torch.equal(factor[:, first], factor[:, second])


@dataclass(frozen=True)
class HeadSign(FactorGroup):
    """One sign for all of a head: what commutes with a LayerNorm of queries and keys."""

    kind = "head_sign"
    words = "a sign for each head"
    symbol = "sign of a KV group"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Scaling:
        return Scaling(Scaling.random_signs(batch, 1, generator).factor.repeat(1, size))

    def solve(self, grams: Grams) -> tuple[Scaling, Tensor]:
        agreement = (grams.primal + grams.dual).sum(-1)
        factor = _sign(agreement)[:, None].repeat(1, grams.primal.shape[-1])
        return Scaling(factor), 2 * agreement.abs() - grams.norms()

    def _admits_factors(self, factor: Tensor) -> bool:
        return bool((factor.abs() == 1).all() and (factor == factor[:, :1]).all())


def _sign(x: Tensor) -> Tensor:
    return torch.where(x < 0, -torch.ones_like(x), torch.ones_like(x))
