"""Matching one attention layer: the order of its heads and the maps inside them, jointly.

Heads that share the gains of their norm have one order of coordinates for the whole layer. For fixed pairs of heads,
that order is one assignment over the gains of pairs of coordinates, with the best signs and scales. For a fixed order
of coordinates, heads are matched as usual. The two steps alternate, from the identity and from the order of heads that
the other tensors give.

`heads: spectral` pairs heads by their singular values, after TransFusion (Rinaldi and others, 2025), for comparison.
TransFusion pairs heads by the distance of the singular values of their query, key and value matrices without biases,
which no permutation inside a head changes. Then it permutes the coordinates of each pair, with one permutation for all
three. Here the output matrix and the biases take part, too; queries and keys are permuted separately from values and
outputs (this includes the single permutation and is as exact); and the stream follows `residual`. The pairing ignores
directions: the joint optimum of `head_order` is never worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign_small
from rotation_merge.matching.head_order import head_order
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.pairing import Pairing, assembled, pairings_of, shared_gains
from rotation_merge.matching.products import HeadProjections, Order
from rotation_merge.symmetry import GroupElement, HeadTransform
from rotation_merge.symmetry.admitted import heads
from rotation_merge.symmetry.heads import HeadGroup
from rotation_merge.symmetry.ordered import OrderedExchange, OrderedSigns, orders_of, with_orders


def match_attention(space: Space, sides: list[Side], options: AlignConfig) -> AttentionMatch:
    """The best order of heads and maps inside them, within `options` and the layer's groups."""
    group = heads(space, options)
    if not group.orders:
        return _match(space, sides, group)
    return match_ordered(space, sides, group, lambda sides: _match(space, sides, group.unordered()))


def _match(space: Space, sides: list[Side], group: HeadGroup) -> AttentionMatch:
    """The best element of a group that permutes coordinates of each head separately."""
    donor, queries = group.own_order
    own_order = Order(torch.arange(group.groups), donor, queries)
    pairings, shared = pairings_of(space, sides, group), shared_gains(space, sides, group)
    distances = [pairing.distance() for pairing in (*pairings, *shared)]
    before = float(sum(distance.sum().cpu() for distance in distances))
    anchor = float(sum(pairing.anchor_norm().sum().cpu() for pairing in (*pairings, *shared)))
    if before == 0:
        return AttentionMatch(group.identity(), [], 0.0, 0.0, anchor)
    order, notes = best_order(group, pairings)
    if order is not None:
        distances[: len(pairings)] = [pairing.distance(order) for pairing in pairings]
    elements, after = [], 0.0
    orders = [order] * len(pairings) + [None] * len(shared)
    for pairing, its, distance in zip((*pairings, *shared), orders, distances, strict=True):
        element, gained = _solve(pairing, its, distance)
        elements.append(element)
        after += float((distance - gained).clamp_min(0).sum())
    order, still = order or own_order, group.identity()
    maps = {
        side: assembled([*pairings, *shared], elements, side) or identity for side, identity in still.elements().items()
    }
    transform = replace(still.with_elements(maps), groups=order.donor, queries=order.queries)
    return AttentionMatch(transform, notes, before, after, anchor)


def _solve(pairing: Pairing, order: Order | None, distance: Tensor) -> tuple[GroupElement, Tensor]:
    """The best maps, and their reduction of the squared distances."""
    known, element, gain = pairing.solved(order)
    grams = pairing.without_rounding(known, distance)
    if grams is not known:
        element, gain = pairing.group.solve(grams)
    return element, gain - pairing.group.gain_as_it_stands(grams)


MOST_TURNS = 8

_GAINED = 1e-9  # share of the squared distance that a turn has to take off


@dataclass(frozen=True)
class AttentionMatch:
    """The match of one attention layer.

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
    """The donor's head order, or None if unchanged, with notes."""
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
    """The best element of a group that permutes coordinates of several heads jointly.

    Args:
        match: the best of its elements that leave coordinates at their places.
    """
    pairings = [*pairings_of(space, sides, group), *shared_gains(space, sides, group)]
    ordered = [p for p in pairings if isinstance(p.group, OrderedSigns | OrderedExchange)]
    turns = _AlternatingOrders(sides, group, match, ordered)
    best = turns.ascend(group.identity())
    if best.after <= _GAINED * best.before or group.order in ("none", "fixed"):
        return best
    order, _ = best_order(group, [p for p in pairings if p not in ordered and p.side in ("qk", "vo", "rest")])
    still = group.identity()
    heads = still if order is None else replace(still, groups=order.donor, queries=order.queries)
    if torch.equal(heads.groups, best.transform.groups) and torch.equal(heads.queries, best.transform.queries):
        return best  # to which the same order of heads has led
    reordered = turns.ascend(turns.reordered(heads))
    return replace(reordered, before=best.before) if reordered.after < best.after * (1 - _GAINED) else best


@dataclass(frozen=True)
class _AlternatingOrders:
    """Alternates between the order of heads and the order of coordinates.

    Attributes:
        sides: the sides of the space, as they are.
        ordered: what of them takes part in the order of coordinates.
    """

    sides: list[Side]
    group: HeadGroup
    match: Callable[[list[Side]], AttentionMatch]
    ordered: list[Pairing]

    def ascend(self, start: HeadTransform) -> AttentionMatch:
        """Alternate from an order of coordinates until the match stops improving."""
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
        """A transform with another order of coordinates, (G, n)."""
        assert transform.gains is not None
        gains = with_orders(transform.gains, orders[: transform.gains.batch])
        return replace(transform, qk=with_orders(transform.qk, orders), gains=gains)

    def reordered(self, heads: HeadTransform) -> HeadTransform:
        """The best order of coordinates for the head pairs of a transform."""
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


def spectral_order(pairings: list[Pairing], inside: bool = False) -> tuple[Order, list[str]]:
    """KV groups (unless `inside`) and, inside them, query heads assigned by the distance of their spectra."""
    shared: Tensor | float = 0.0
    heads: Tensor | float = 0.0
    for pairing in pairings:
        if pairing.side != "rest":
            shared = shared + _distances(pairing.primal)[:, 0, :, 0]
            heads = heads + _distances(pairing.dual).permute(0, 2, 1, 3)
    cost, inner = torch.as_tensor(shared), torch.as_tensor(heads)
    groups, per_group = inner.shape[0], inner.shape[-1]
    queries = torch.stack([assign_small(-m) for m in inner.flatten(0, 1)]).reshape(groups, groups, per_group)
    chosen = inner.cpu().gather(3, queries[..., None])[..., 0].sum(-1)
    rows = torch.arange(groups)
    donor = rows if inside else assign_small(-(cost.cpu() + chosen))
    return Order(rows, donor, queries[rows, donor]), ["heads paired by their singular values, after TransFusion"]


def _distances(half: HeadProjections) -> Tensor:
    """Euclidean distances between the singular values of the anchor's and the donor's heads, (G, r, G, r)."""
    groups, per_group, d = half.shape
    anchor, donor = (_spectra(half, which).reshape(groups * per_group, d) for which in (0, 1))
    return torch.cdist(anchor, donor).reshape(groups, per_group, groups, per_group)


def _spectra(half: HeadProjections, which: int) -> Tensor:
    """Singular values of each head's matrix (bias included as a column), (G, r, d), float64."""
    single = HeadProjections(
        [(p[which], p[which]) for p in half.pairs], half.shape, "full", half.interleaved, half.device
    )
    squares = torch.stack([_gram(single, head) for head in range(half.shape[1])], dim=1)
    return torch.linalg.eigvalsh(squares).clamp_min(0).sqrt()


def _gram(half: HeadProjections, head: int) -> Tensor:
    pairs = [(a[:, head : head + 1], b[:, head : head + 1]) for a, b in half.pairs]
    groups, _, d = half.shape
    return HeadProjections(pairs, (groups, 1, d), "full", half.interleaved, half.device).products()
