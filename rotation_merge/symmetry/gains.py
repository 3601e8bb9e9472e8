r"""Exchange of gains between the norms of queries and keys: one is multiplied by t, the other divided.

A score is a sum of ``g_q q_i * g_k k_i`` over the coordinates that the norms have brought to one length, so that
``g_q / t`` and ``g_k t`` give the same one. Where rotary embedding follows, t is equal on both coordinates of a pair,
which it mixes; where it comes first, or there is none, each coordinate has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.symmetry.base import GroupElement, broadcast
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.planar import pair_dims
from rotation_merge.symmetry.scaling import scaling_distance
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps, scaled

LAYOUTS = ("coordinates", "half", "interleaved")
"""One factor for each coordinate, or for each RoPE pair in either layout."""


@dataclass(frozen=True, eq=False)
class Exchange(GroupElement):
    """Keys' gains times factor[g, p], of either sign and nonzero; queries' gains, the dual side, over it.

    factor: float64, (G, d), or (G, d/2) where `layout` (of `LAYOUTS`) says that pairs share one.
    """

    factor: Tensor
    layout: str = "half"

    kind = "exchange"
    monomial = True

    @property
    def batch(self) -> int:
        return self.factor.shape[0]

    @property
    def size(self) -> int:
        return self.factor.shape[1] * (1 if self.layout == "coordinates" else 2)

    @classmethod
    def identity(cls, batch: int, size: int) -> Exchange:
        return cls(torch.ones(batch, size // 2, dtype=torch.float64))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Exchange:
        return cls(_random_factors(batch, size // 2, generator))

    def inverse(self) -> Exchange:
        return replace(self, factor=1 / self.factor)

    def compose(self, first: Exchange) -> Exchange:
        return replace(self, factor=self.factor * first.factor)

    def select(self, index: Tensor) -> Exchange:
        return replace(self, factor=self.factor[index])

    def still(self) -> Exchange:
        return replace(self, factor=torch.ones_like(self.factor))

    def factors(self) -> Tensor:
        """One for each coordinate, (G, d)."""
        if self.layout == "coordinates":
            return self.factor
        if self.layout == "interleaved":
            return self.factor.repeat_interleave(2, dim=1)
        return self.factor.repeat(1, 2)

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        factors = 1 / self.factors() if dual else self.factors()
        return (x * broadcast(factors, x, batch_dim, dim)).to(x.dtype)

    def distance(self) -> Tensor:
        return scaling_distance(self.factor)

    def tensors(self) -> dict[str, Tensor]:
        layout = torch.tensor(LAYOUTS.index(self.layout), device=self.factor.device)
        return {"factor": self.factor, "layout": layout}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Exchange:
        return cls(tensors["factor"].double(), LAYOUTS[int(tensors["layout"])])

    def tangent(self, freedom: Freedom) -> Steps:
        return {"log_scale": torch.zeros(self.factor.shape)} if freedom.scales else {}

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> Exchange:
        return replace(self, factor=scaled(self.factor, steps, exact))


def _random_factors(batch: int, count: int, generator: torch.Generator) -> Tensor:
    sign = torch.randint(0, 2, (batch, count), generator=generator).double() * 2 - 1
    return sign * (0.5 * torch.randn(batch, count, dtype=torch.float64, generator=generator)).exp()


class _ExchangeGroup(Group):
    """Factors of either sign, solved one by one."""

    rescale = True

    @property
    def _layout(self) -> str:
        return "coordinates"

    def _summed(self, norms: Tensor) -> Tensor:
        """Squared norms (N, d) of entries that share a factor."""
        return norms

    def _count(self, size: int) -> int:
        return size if self._layout == "coordinates" else size // 2

    def identity(self, batch: int, size: int) -> Exchange:
        return Exchange(torch.ones(batch, self._count(size), dtype=torch.float64), self._layout)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Exchange:
        return Exchange(_random_factors(batch, self._count(size), generator), self._layout)

    def solve(self, grams: Grams) -> tuple[Exchange, Tensor]:
        """Each factor by its quartic (`best_scale`), of either sign."""
        norms = self._summed(grams.donor_primal), self._summed(grams.donor_dual)
        inner = grams.primal.real, grams.dual.real
        factor = best_scale(*norms, *inner, signed=True)
        return Exchange(factor, self._layout), -cost(factor, *norms, *inner).sum(-1)

    def bound(self, primal: Tensor, dual: Tensor, grams: Grams) -> Tensor:
        norms = self._summed(grams.donor_primal), self._summed(grams.donor_dual)
        return self._bounded(primal, dual, norms).sum(-1)

    def reach(self, products: Tensor) -> Tensor:
        return products.real.abs()

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        assert isinstance(element, Exchange)
        return torch.einsum("np,nabp->nab", 1 / element.factor, products.real)

    def admits(self, maps: Tensor) -> bool:
        factors = maps.diagonal(dim1=1, dim2=2)
        return torch.equal(maps, factors.diag_embed()) and bool((factors != 0).all()) and self._tied(factors)

    def _tied(self, factors: Tensor) -> bool:
        """Whether factors (N, d) are equal where they have to be."""
        return True


@dataclass(frozen=True)
class CoordinateExchange(_ExchangeGroup):
    """A factor for each coordinate: no rotary embedding, or one before the norm."""

    kind = "coordinate_exchange"
    statistic = "coordinates"
    words = "gains exchanged coordinate by coordinate"
    symbol = "gain exchange"


@dataclass(frozen=True)
class PairExchange(_ExchangeGroup):
    """A factor for each RoPE pair."""

    interleaved: bool = False

    kind = "pair_exchange"
    statistic = "pairs"
    words = "gains exchanged RoPE pair by RoPE pair"
    symbol = "gain exchange"

    @property
    def _layout(self) -> str:
        return "interleaved" if self.interleaved else "half"

    def _summed(self, norms: Tensor) -> Tensor:
        first, second = pair_dims(norms.shape[-1], self.interleaved)
        return norms[..., first] + norms[..., second]

    def _tied(self, factors: Tensor) -> bool:
        first, second = pair_dims(factors.shape[1], self.interleaved)
        return torch.equal(factors[:, first], factors[:, second])
