"""Matching heads whose coordinates have one order for all of a layer, because they share the gains of their norm.

For given pairs of heads, that order is one assignment over what coordinates gain beside each other, signs and exchanged
gains being the best for each pair; for a given order of coordinates, heads are matched like any others. The two take
turns: from the order that stands, and from that of the heads as everything else pairs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign_small
from rotation_merge.matching.head_order import head_order
from rotation_merge.matching.pairing import Pairing, pairings_of, shared_gains
from rotation_merge.matching.products import Order
from rotation_merge.matching.sides import Side
from rotation_merge.matching.spectral import spectral_order
from rotation_merge.symmetry import HeadTransform
from rotation_merge.symmetry.heads import HeadGroup
from rotation_merge.symmetry.ordered import OrderedExchange, OrderedSigns, orders_of, with_orders

MOST_TURNS = 8

_GAINED = 1e-9  # share of the squared distance that a turn has to take off


@dataclass(frozen=True)
class AttentionMatch:
    """What matching found for one attention layer.

    Attributes:
        transform: order of heads and maps inside them.
        notes: for the report.
        before, after: squared distance donor - anchor over the axes that live in the space.
        anchor: the anchor's squared norm there.
    """

    transform: HeadTransform
    notes: list[str]
    before: float
    after: float
    anchor: float


def best_order(group: HeadGroup, pairings: list[Pairing]) -> tuple[Order | None, list[str]]:
    """The order of the donor's heads, None where it is its own; and notes."""
    donor, queries = group.own_order
    if group.order == "none" or queries.numel() == 1 or not pairings:
        return None, []
    if group.order == "fixed":
        return None, ["the order of the heads is fixed by the architecture"]
    order_heads = spectral_order if group.order == "spectral" else head_order
    order, notes = order_heads(pairings, group.inside)
    unmoved = torch.equal(order.donor, donor) and torch.equal(order.queries, queries)
    return (None if unmoved else order), notes


def match_ordered(
    space: Space, sides: list[Side], group: HeadGroup, match: Callable[[list[Side]], AttentionMatch]
) -> AttentionMatch:
    """The best of a group that orders coordinates of several heads together.

    Args:
        match: the best of its elements that leave coordinates at their places.
    """
    pairings = [*pairings_of(space, sides, group), *shared_gains(space, sides, group)]
    ordered = [p for p in pairings if isinstance(p.group, OrderedSigns | OrderedExchange)]
    turns = _Turns(sides, group, match, ordered)
    best = turns.climbed(group.identity())
    if best.after <= _GAINED * best.before or group.order in ("none", "fixed"):
        return best
    order, _ = best_order(group, [p for p in pairings if p not in ordered and p.side in ("qk", "vo", "rest")])
    still = group.identity()
    heads = still if order is None else replace(still, groups=order.donor, queries=order.queries)
    if torch.equal(heads.groups, best.transform.groups) and torch.equal(heads.queries, best.transform.queries):
        return best  # to which the same order of heads has led
    reordered = turns.climbed(turns.reordered(heads))
    return replace(reordered, before=best.before) if reordered.after < best.after * (1 - _GAINED) else best


@dataclass(frozen=True)
class _Turns:
    """Orders of heads for that of coordinates, and the other way round.

    Attributes:
        sides: the sides of the space, as they are.
        ordered: what of them takes part in the order of coordinates.
    """

    sides: list[Side]
    group: HeadGroup
    match: Callable[[list[Side]], AttentionMatch]
    ordered: list[Pairing]

    def climbed(self, start: HeadTransform) -> AttentionMatch:
        """The best that turns lead to from an order of coordinates; no turn makes it worse."""
        best, order = self._matched(start), start
        for _ in range(MOST_TURNS):
            following = self.reordered(best.transform)
            if _same(following, order):
                break
            following_match, order = self._matched(following), following
            if following_match.after >= best.after * (1 - _GAINED):
                break
            best = replace(following_match, before=best.before)
        return best

    def _matched(self, order: HeadTransform) -> AttentionMatch:
        """The best match under an order of coordinates."""
        moved = [replace(side, donor=order.act(side.donor, side.role, 0)) for side in self.sides]
        match = self.match(moved)
        transform, orders = self.group.lifted(match.transform), orders_of(order.qk)
        assert orders is not None
        return replace(match, transform=self._with(transform, orders[transform.groups]))

    def _with(self, transform: HeadTransform, orders: Tensor) -> HeadTransform:
        """A transform with other orders of coordinates, (G, n)."""
        assert transform.gains is not None
        gains = with_orders(transform.gains, orders[: transform.gains.batch])
        return replace(transform, qk=with_orders(transform.qk, orders), gains=gains)

    def reordered(self, heads: HeadTransform) -> HeadTransform:
        """The best order of coordinates for the pairs of heads that a transform makes; nothing else moves."""
        order = self.group.own_order
        pairs = Order(order[0], heads.groups, heads.queries)
        alone = Order(*(torch.zeros(1, dtype=torch.long),) * 2, torch.zeros(1, 1, dtype=torch.long))
        value: Tensor | float = 0.0
        for pairing in self.ordered:
            if isinstance(pairing.group, OrderedExchange):
                gained = pairing.group.values(pairing.grams(alone if self.group.shared else pairs))
            elif isinstance(pairing.group, OrderedSigns):
                grams = pairing.grams(pairs)
                gained = 2 * pairing.group.values(grams.primal + grams.dual)
            value = value + (gained.sum(0, keepdim=True) if self.group.shared else gained).cpu()
        orders = torch.stack([assign_small(m) for m in torch.as_tensor(value)])
        return self._with(self.group.identity(), orders.expand(len(heads.groups), -1)[heads.groups.argsort()])


def _same(first_transform: HeadTransform, second_transform: HeadTransform) -> bool:
    first, second = orders_of(first_transform.qk), orders_of(second_transform.qk)
    return first is not None and second is not None and torch.equal(first, second)
