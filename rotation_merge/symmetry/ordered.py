"""Coordinates whose norm shares gains among all heads: one permutation for all of these heads.

Where an RMSNorm brings each query and each key to one length, its gains are the same for all heads of a layer, and no
rotary embedding ties coordinates to their places, a permutation of the coordinates that all these heads share leaves
scores as they are, once the gains follow. Beside it, each KV group has a sign for each coordinate, and the gains of
queries and keys exchange a factor. The two groups stand side by side, and their permutations are one (`tied`). Of a
norm over all heads, whose gains are each head's own, the permutation is each KV group's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign_small
from rotation_merge.symmetry.base import GroupElement, proven_maps
from rotation_merge.symmetry.direct_sum import DirectSum
from rotation_merge.symmetry.gains import CoordinateExchange, Exchange
from rotation_merge.symmetry.group import Group, agreement_by_matrices
from rotation_merge.symmetry.monomial import GatedOrder, Monomial
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.signs import CoordinateSigns, IdentityGroup
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps


class SignedOrder(Monomial):
    """A permutation with signs, without learnable parameters."""

    kind = "signed_order"

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> SignedOrder:
        return cls(Permutation.random(batch, size, generator), Scaling.random_signs(batch, size, generator))

    def tangent(self, freedom: Freedom) -> Steps:
        return {}


@dataclass(frozen=True)
class OrderedSigns(Group):
    """Permutations of coordinates, with a sign for each (`signs`), of queries and keys before a norm with gains."""

    signs: bool = True

    kind = "ordered_signs"
    words = "permutations that all heads of one norm share, a sign for each coordinate"
    symbol = "signed permutation (one order for all heads)"

    def identity(self, batch: int, size: int) -> SignedOrder:
        return SignedOrder(Permutation.identity(batch, size), Scaling.identity(batch, size))

    def random(self, batch: int, size: int, generator: torch.Generator) -> SignedOrder:
        element = SignedOrder.random(batch, size, generator)
        return element if self.signs else SignedOrder(element.permutation, Scaling.identity(batch, size))

    def admits(self, maps: Tensor) -> bool:
        size = maps if not self.signs else maps.abs()
        return bool((((size == 0) | (size == 1)).all() & ((size == 1).sum((1, 2)) == maps.shape[-1])).all())

    def solve(self, grams: Grams) -> tuple[SignedOrder, Tensor]:
        agreement = grams.primal + grams.dual
        value = self.values(agreement)
        index = torch.stack([assign_small(m) for m in value])
        chosen = agreement.gather(2, index.to(agreement.device)[..., None])[..., 0].cpu()
        signs = torch.where(chosen < 0, -1.0, 1.0).double() if self.signs else torch.ones_like(chosen)
        return SignedOrder(Permutation(index), Scaling(signs)), (2 * chosen * signs).sum(1).to(value) - grams.norms()

    def values(self, agreement: Tensor) -> Tensor:
        """Gains of pairs of coordinates from their inner products, less their norms."""
        return agreement.abs() if self.signs else agreement

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        return agreement_by_matrices(element, products)

    def unordered(self) -> Group:
        return CoordinateSigns() if self.signs else IdentityGroup()

    def lift(self, element: GroupElement) -> SignedOrder:
        assert isinstance(element, Scaling)
        return SignedOrder(Permutation.identity(element.batch, element.size), Scaling(element.factor.cpu()))


@dataclass(frozen=True)
class OrderedExchange(GatedOrder):
    """The gains of those norms: the same permutation, with a factor that queries and keys exchange (`rescale`)."""

    kind = "ordered_exchange"
    words = "gains permuted, and exchanged coordinate by coordinate"
    symbol = "gain exchange"

    def values(self, grams: Grams) -> Tensor:
        """Gains of pairs of coordinates."""
        return self._values(grams)[1]

    def unordered(self) -> Group:
        return CoordinateExchange() if self.rescale else IdentityGroup()

    def lift(self, element: GroupElement) -> Monomial:
        still = Monomial.identity(element.batch, element.size)
        return replace(still, scaling=Scaling(element.factors().cpu())) if isinstance(element, Exchange) else still


def with_orders(element: GroupElement, orders: Tensor) -> GroupElement:
    """An element with other permutations, int64 (G, n); a single order holds for all."""
    if isinstance(element, DirectSum):
        return DirectSum(tuple(with_orders(part, orders) for part in element.parts))
    if not isinstance(element, Monomial):
        return element
    order = Permutation(orders.expand(element.batch, -1).contiguous())
    return type(element)(order, element.scaling)


def orders_of(element: GroupElement) -> Tensor | None:
    """The permutations of an element, int64 (G, n); None where it has none."""
    parts = element.parts if isinstance(element, DirectSum) else (element,)
    return next((part.permutation.index for part in parts if isinstance(part, Monomial)), None)


def tied(qk: GroupElement, gains: GroupElement | None) -> bool:
    """Whether coordinates of queries and keys change places as their gains do."""
    qk_maps, gain_maps = proven_maps(qk), None if gains is None else proven_maps(gains)
    if qk_maps is None:
        return False
    support = torch.eye(qk_maps.shape[-1], dtype=torch.bool) if gain_maps is None else gain_maps != 0
    return bool(((qk_maps != 0) == support).all())
