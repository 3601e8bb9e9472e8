"""The in-head spaces of one attention layer, each with its group and the two halves of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.matching.products import HeadProjections, Order
from rotation_merge.symmetry import DirectSum, GroupElement
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.heads import QUERY_ROLES, SHARED_GAINS, HeadGroup
from rotation_merge.symmetry.monomial import GatedOrder
from rotation_merge.symmetry.planar import pair_dims
from rotation_merge.symmetry.signs import IdentityGroup
from rotation_merge.symmetry.statistics import Grams

_ENTRIES = 1 << 19  # of statistics that are looked at together

PairingSolution = tuple[Grams, GroupElement, Tensor]
"""Statistics of pairs of groups, the best maps for them, and what these gain, (N,)."""


@dataclass(frozen=True)
class Pairing:
    """Coordinates of heads with the group that acts on them.

    Attributes:
        side: qk, vo, gains, or rest (numbers that only follow the order of the heads).
        group: not a split one.
        primal: keys or values, one head a group.
        dual: queries or outputs, r heads a group.
        follow: what changes places with the coordinates and nothing more (rows of output gates), r heads a group.
    """

    side: str
    group: Group
    primal: HeadProjections
    dual: HeadProjections
    follow: HeadProjections | None = None
    _solved: dict[tuple[bytes, ...], PairingSolution] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def halves(self) -> tuple[HeadProjections, ...]:
        return (self.primal, self.dual) if self.follow is None else (self.primal, self.dual, self.follow)

    @property
    def compact(self) -> bool:
        """Whether the statistics of all pairs of heads together are small."""
        return self.group.statistic != "full"

    @property
    def at_once(self) -> int:
        """Number of pairs of groups whose statistics are computed at once."""
        size = self.dual.shape[2]
        return max(32, _ENTRIES // (size * size if self.group.statistic == "full" else size))

    def grams(self, order: Order | None = None) -> Grams:
        """Statistics of the pairs of groups that `order` puts together (None: the donor's own order)."""
        norms = self.norms(order)
        rounding = Grams.rounding(all(half.exact for half in self.halves))
        grams = Grams(self.primal.products(order), self.dual.products(order), *norms, rank_tolerance=rounding)
        if self.follow is None:
            return grams
        group_norms = self.follow.donor_norms.sum(1)
        group_norms = group_norms if order is None else group_norms[order.donor.to(group_norms.device)]
        return replace(grams, follow=self.follow.products(order), donor_follow=group_norms)

    def solved(self, order: Order | None = None) -> PairingSolution:
        """The statistics under an order, with the best maps and their gains; the latest result is cached."""
        if order is not None and order.is_own(self.dual.shape[0]):
            order = None
        parts = () if order is None else (order.anchor, order.donor, order.queries)
        key = tuple(part.cpu().contiguous().numpy().tobytes() for part in parts)
        if key not in self._solved:
            grams = self.grams(order)
            self._solved.clear()
            self._solved[key] = (grams, *self.group.solve(grams))
        return self._solved[key]

    def norms(self, order: Order | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squared norms in the order of `Grams`, (N, d) each; independent of the order inside a group."""
        donor = [half.donor_norms.sum(1) for half in (self.primal, self.dual)]
        anchor = [half.anchor_norms.sum(1) for half in (self.primal, self.dual)]
        if order is not None:
            donor = [x[order.donor.to(x.device)] for x in donor]
            anchor = [x[order.anchor.to(x.device)] for x in anchor]
        return donor[0], donor[1], anchor[0], anchor[1]

    def distance(self, order: Order | None = None) -> Tensor:
        """Squared distance of the pairs before any map, (N,)."""
        return torch.stack([half.distance(order) for half in self.halves]).sum(0)

    def anchor_norm(self) -> Tensor:
        """Squared norm of the anchor's groups, (G,): an upper bound on the gain of any map."""
        return torch.stack([half.anchor_norms.sum((1, 2)) for half in self.halves]).sum(0)

    def without_rounding(self, grams: Grams, distance: Tensor) -> Grams:
        """Replace the statistics of equal pairs by exact ones, so that nothing moves there."""
        equal = distance == 0
        if not bool(equal.any()):
            return grams
        primal, dual = (
            torch.where(equal.reshape(-1, *[1] * (product.ndim - 1)), self._own(norms), product)
            for product, norms in ((grams.primal, grams.anchor_primal), (grams.dual, grams.anchor_dual))
        )
        anchor = grams.anchor_primal, grams.anchor_dual
        donor_primal, donor_dual = (
            torch.where(equal[:, None], norm_products, product)
            for norm_products, product in zip(anchor, (grams.donor_primal, grams.donor_dual), strict=True)
        )
        return replace(grams, primal=primal, dual=dual, donor_primal=donor_primal, donor_dual=donor_dual)

    def _own(self, norms: Tensor) -> Tensor:
        if self.group.statistic == "full":
            return torch.diag_embed(norms)
        if self.group.statistic == "coordinates":
            return norms
        first, second = pair_dims(norms.shape[-1], self.primal.interleaved)
        return torch.complex(norms[..., first] + norms[..., second], torch.zeros_like(norms[..., first]))


def pairings_of(space: Space, sides: list[Side], group: HeadGroup) -> list[Pairing]:
    """All tensors of an attention space that move with its heads, by side: qk, vo, rest."""
    sizes = space.sizes
    result = _parts("qk", group.qk, space, sides, ("k", "q"), sizes["head_dim"])
    values = _parts("vo", group.vo, space, sides, ("v", "o"), sizes["value_dim"])
    remainder = [(("kv_head", "head"), 1)]
    if any(side.role in ("q_gain", "k_gain") for side in sides):
        result += _parts("gains", group.gains or IdentityGroup(), space, sides, ("k_gain", "q_gain"), sizes["head_dim"])
    if isinstance(group.vo, GatedOrder):
        values = [replace(values[0], follow=_half(space, sides, "gate", sizes["value_dim"]))]
    else:
        remainder.append((("", "gate"), sizes["value_dim"]))
    result += values
    for roles, size in remainder:
        if any(side.role in roles for side in sides):
            result += _parts("rest", IdentityGroup(), space, sides, roles, size)
    return result


def shared_gains(space: Space, sides: list[Side], group: HeadGroup) -> list[Pairing]:
    """Gains of norms shared by all heads of a layer, as one group of one head."""
    if not any(side.role in SHARED_GAINS for side in sides):
        return []
    return _parts("gains", group.gains or IdentityGroup(), space, sides, ("k_norm", "q_norm"), space.sizes["head_dim"])


def assembled(pairings: list[Pairing], elements: list[GroupElement], side: str) -> GroupElement | None:
    """One element from all parts of a side; None if the side has none."""
    parts = [element for pairing, element in zip(pairings, elements, strict=True) if pairing.side == side]
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else DirectSum(tuple(parts))


def _parts(
    name: str, group: Group, space: Space, sides: list[Side], roles: tuple[str, str], size: int
) -> list[Pairing]:
    primal, dual = (_half(space, sides, role, size) for role in roles)
    return [
        Pairing(name, part, *(half.narrow(dims, part.statistic) for half in (primal, dual)))
        for part, dims in group.parts(size)
    ]


def _half(space: Space, sides: list[Side], role: str, size: int) -> HeadProjections:
    groups, per_group = space.sizes["groups"], space.sizes["per_group"]
    shape = (1, 1, size) if role in SHARED_GAINS else (groups, per_group if role in QUERY_ROLES else 1, size)
    pairs = [(_shaped(s.anchor, shape), _shaped(s.donor, shape)) for s in sides if s.role == role]
    return HeadProjections(pairs, shape, "full", space.interleaved, sides[0].anchor.device)


def _shaped(x: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """A side's matrix (*factors, m) as (G, r, d, m), without a copy where its layout allows."""
    columns = x.shape[-1]
    return x if x.shape == (*shape, columns) else x.reshape(*shape, columns)
