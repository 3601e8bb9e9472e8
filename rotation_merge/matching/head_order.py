"""The joint optimum of the order of heads and the maps inside them.

The gain of a pair of KV groups under the best maps is known exactly from its statistics, so the order of the groups is
one assignment over these gains. Products of whole heads are expensive: upper bounds replace the gains until an
assignment uses them. An assignment is optimal if all of its gains are exact. The order of the query heads inside a
group is chosen in the same way among all orders; if there are too many, maps and order are alternated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign, assign_small
from rotation_merge.linalg.polar import nuclear_norm
from rotation_merge.matching.pairing import Pairing
from rotation_merge.matching.products import Order
from rotation_merge.symmetry.statistics import Grams

MOST_ENUMERATED = 4096
"""Orders of query heads are enumerated up to this many (pairs of KV groups) x (orders); beyond, they alternate."""

_ALTERNATIONS = 20
_AT_ONCE = 32  # orders whose gains are computed together
_TIE = 1e-12  # relative difference of gains that counts as a tie
_TIE_FLOAT32 = 1e-7  # the same where products are summed in float32

_TABLE_BYTES = 1 << 30  # of the products of all heads with all, at most

EXACT_NOTE = "query heads inside KV groups: the best of all orders"
ALTERNATED_NOTE = "query heads inside KV groups: alternated from two starts (shared keys and values couple them)"


def head_order(pairings: list[Pairing], inside: bool = False) -> tuple[Order, list[str]]:
    """The best order of KV groups and of the query heads inside them, with notes.

    With `inside`, KV groups keep their order.
    """
    groups, per_group = pairings[0].dual.shape[:2]
    search = _Search(pairings, groups, per_group)
    notes = [] if per_group == 1 else [EXACT_NOTE if search.enumerated else ALTERNATED_NOTE]
    rows = torch.arange(groups)
    if inside:
        return Order(rows, rows, search.evaluate(rows, rows)[1]), notes
    values, exact = search.bounds().reshape(groups, groups), torch.zeros(groups, groups, dtype=torch.bool)
    queries = torch.arange(per_group).repeat(groups, groups, 1)

    def know(candidate: Tensor) -> float:
        """The exact total of a candidate."""
        unknown = rows[~exact[rows, candidate]]
        if len(unknown):
            exact_values = search.evaluate(unknown, candidate[unknown])
            values[unknown, candidate[unknown]], queries[unknown, candidate[unknown]] = exact_values
            exact[unknown, candidate[unknown]] = True
        return float(values[rows, candidate].sum())

    candidate = assign(values).permutation
    rounds = 0
    while not bool(exact[rows, candidate].all()):
        know(candidate)
        candidate = assign(values).permutation
        rounds += 1
        if rounds in search.sharper_bounds and not bool(exact[rows, candidate].all()):
            sharper = search.sharper_bounds[rounds]()
            values = torch.where(exact, values, torch.minimum(values, sharper))
            candidate = assign(values).permutation
    if not torch.equal(candidate, rows):
        total = know(candidate)
        tie = total - search.rounding * abs(total)
        if float(values.diagonal().sum()) >= tie and know(rows) >= tie:
            candidate = rows
    return Order(rows, candidate, queries[rows, candidate]), notes


@dataclass
class _Search:
    """Gains of pairs of KV groups, bounded or exact.

    Attributes:
        pairings: of one layer; those whose statistics are small are tabulated for all pairs of heads.
        groups, per_group: G and r.
        tables: by pairing, the products of all heads with all, where these are small.
        products: the same for pairings whose statistics are large, once all pairs are looked at, if they fit.
        ceilings: by pair of groups and order inside, upper bounds on the gain that are nearly attained, once known.
    """

    pairings: list[Pairing]
    groups: int
    per_group: int
    tables: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    ceilings: Tensor | None = None
    products: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        double = all(half.exact for pairing in self.pairings for half in pairing.halves)
        self.rounding = _TIE if double else _TIE_FLOAT32
        self.enumerated = self.groups**2 * math.factorial(self.per_group) <= MOST_ENUMERATED
        self.enumerated = self.enumerated or self.per_group == 1
        if self.enumerated:
            self.orders = torch.tensor(list(itertools.permutations(range(self.per_group))))
        for k, pairing in enumerate(self.pairings):
            if pairing.compact:
                primal, dual = pairing.primal.all_products(), pairing.dual.all_products()
                self.tables[k] = primal[:, 0, :, 0].cpu(), dual.transpose(1, 2).cpu()

    @property
    def all_pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs of anchor and donor groups, (G G,) each."""
        groups = torch.arange(self.groups)
        return groups.repeat_interleave(self.groups), groups.repeat(self.groups)

    def bounds(self) -> Tensor:
        """Upper bounds on the gain of every pair of groups under any order inside, (G G,), on the CPU."""
        i, j = self.all_pairs
        if self.enumerated:
            return self._order_bounds(i, j).amax(1)
        total = torch.zeros(len(i), dtype=torch.float64)
        for k, pairing in enumerate(self.pairings):
            if k in self.tables:
                primal, dual = self.tables[k]
                likeliest = pairing.group.reach(dual[i, j]).amax(2).sum(1)
                total += _bound(pairing, i, j, pairing.group.reach(primal[i, j]), likeliest)
            else:
                total += pairing.anchor_norm().cpu()[i]
        return total

    @property
    def sharper_bounds(self) -> dict[int, Callable[[], Tensor]]:
        """Sharper bounds than `bounds`, (G, G), each by the round of assignments at which it pays."""
        if not self.enumerated:
            return {}
        return {1: self._by_ceilings} if self.per_group > 1 else {1: self._by_norms, 2: self._by_ceilings}

    def _by_ceilings(self) -> Tensor:
        """Bounds that exceed the gains only by rounding and the last digits of scales."""
        i, j = self.all_pairs
        return self._ceilings(i, j).amax(1).reshape(self.groups, self.groups)

    def _ceilings(self, i: Tensor, j: Tensor) -> Tensor:
        """Nearly attained upper bounds on the gains of N pairs of groups under each inner order, (N, T)."""
        count, pairs = len(self.orders), i * self.groups + j
        if self.ceilings is None:
            self.ceilings = torch.full((self.groups**2, count), torch.nan, dtype=torch.float64)
            self._tabulate()
        missing = self.ceilings[pairs, 0].isnan().nonzero()[:, 0]
        total = torch.zeros(len(missing), count, dtype=torch.float64)
        for k, pairing in enumerate(self.pairings):
            for part in torch.arange(len(missing)).split(max(1, pairing.at_once // count)) if len(missing) else ():
                first, second = (x[missing[part]].repeat_interleave(count) for x in (i, j))
                order = Order(first, second, self.orders.repeat(len(part), 1))
                total[part] += pairing.group.ceiling(self.grams(k, order)).cpu().reshape(len(part), count)
        self.ceilings[pairs[missing]] = total
        return self.ceilings[pairs]

    def _tabulate(self) -> None:
        """All products of heads with heads, if they fit in memory; many orders reuse them."""
        i, j = self.all_pairs
        for k, pairing in enumerate(self.pairings):
            if k not in self.tables and pairing.follow is None and pairing.dual.table_bytes() <= _TABLE_BYTES:
                primal, dual = pairing.primal.head_products(i, j)[:, 0, 0], pairing.dual.head_products(i, j)
                shape = self.groups, self.groups
                self.products[k] = primal.unflatten(0, shape), dual.unflatten(0, shape)

    def _by_norms(self) -> Tensor:
        """Gain bounds for one query head per group, from |M|_* <= sqrt(d) |M|_F."""
        i, j = self.all_pairs
        total = torch.zeros(self.groups**2, dtype=torch.float64)
        for k, pairing in enumerate(self.pairings):
            if k in self.tables:
                primal, dual = self.tables[k][0][i, j], self.tables[k][1][i, j, 0, 0]
                sizes = pairing.group.reach(primal), pairing.group.reach(dual)
            else:
                d = pairing.dual.shape[2]
                sizes = tuple(half.product_norms().cpu().flatten() * d**0.5 for half in (pairing.primal, pairing.dual))
            total += _bound(pairing, i, j, *sizes)
        return total.reshape(self.groups, self.groups)

    def _order_bounds(self, i: Tensor, j: Tensor) -> Tensor:
        """Upper bounds on the gain of N pairs of groups under each order inside, (N, T)."""
        count = len(self.orders)
        total = torch.zeros(len(i) * count, dtype=torch.float64)
        first, second = i.repeat_interleave(count), j.repeat_interleave(count)
        queries = self.orders.repeat(len(i), 1)
        for k, pairing in enumerate(self.pairings):
            if k in self.tables:
                grams = self._tabulated(k, Order(first, second, queries))
                sizes = (pairing.group.reach(x) for x in (grams.primal, grams.dual))
                total += _bound(pairing, first, second, *sizes)
            else:
                total += pairing.anchor_norm().cpu()[first]
        return total.reshape(len(i), count)

    def _tabulated(self, k: int, order: Order) -> Grams:
        primal, dual = self.tables[k] if k in self.tables else self.products[k]
        rows = torch.arange(self.per_group)
        anchor, donor, queries = (x.to(dual.device) for x in (order.anchor, order.donor, order.queries))
        summed = dual[anchor[:, None], donor[:, None], rows.to(dual.device), queries].sum(1)
        norms = [x.to(dual.device) for x in self.pairings[k].norms(order)]
        exact = all(half.exact for half in self.pairings[k].halves)
        return Grams(primal[anchor, donor], summed, *norms, rank_tolerance=Grams.rounding(exact))

    def grams(self, k: int, order: Order) -> Grams:
        """Statistics of one pairing under an order."""
        known = k in self.tables or k in self.products
        return self._tabulated(k, order) if known else self.pairings[k].grams(order)

    def gain(self, order: Order) -> Tensor:
        """Exact gains of N pairs of groups under an order, (N,), on the CPU."""
        total = torch.zeros(len(order.anchor), dtype=torch.float64)
        for k, pairing in enumerate(self.pairings):
            known = k in self.tables or k in self.products
            total += (pairing.group.solve(self._tabulated(k, order)) if known else pairing.solved(order)[1:])[1].cpu()
        return total

    def evaluate(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Gains of N pairs of groups, (N,), and the best inner orders, (N, r)."""
        if self.enumerated:
            return self._best_of_all(i, j)
        return _alternated(self, i, j)

    def _best_of_all(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        values = self._order_bounds(i, j) if self.ceilings is None else self._ceilings(i, j)
        exact = torch.zeros_like(values, dtype=torch.bool)
        for count in itertools.chain((1, 1, 2, 4, 8), itertools.repeat(_AT_ONCE)):
            open_rows = (~exact.gather(1, values.argmax(1)[:, None])[:, 0]).nonzero()[:, 0]
            if not len(open_rows):
                break
            if self.ceilings is None and bool(exact.any()):
                values[open_rows] = torch.where(
                    exact[open_rows], values[open_rows], self._ceilings(i[open_rows], j[open_rows])
                )
            best_inside = torch.where(exact, -torch.inf, values)[open_rows].topk(min(count, values.shape[1]), 1).indices
            pairs, which = open_rows.repeat_interleave(best_inside.shape[1]), best_inside.flatten()
            fresh = ~exact[pairs, which]
            pairs, which = pairs[fresh], which[fresh]
            values[pairs, which] = self.gain(Order(i[pairs], j[pairs], self.orders[which]))
            exact[pairs, which] = True
        rows = torch.arange(len(i))
        exact_own = exact[:, 0] & (values[:, 0] >= values.amax(1) - _TIE * values.amax(1).abs())
        best = torch.where(exact_own, 0, values.argmax(1))
        return values[rows, best], self.orders[best]


def _bound(pairing: Pairing, i: Tensor, j: Tensor, primal: Tensor, dual: Tensor) -> Tensor:
    """Upper bounds on gains, from bounds (N, S) on the contribution of each product."""
    norms = (x.cpu() for x in pairing.norms(Order(i, j, torch.arange(pairing.dual.shape[1])[None])))
    return pairing.group.bound(primal, dual, Grams(primal, dual, *norms))


def _alternated(search: _Search, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Alternate between maps and order until both are stable; the better of two starts."""
    products = [
        search.tables[k][1][i, j] if k in search.tables else pairing.dual.head_products(i, j)
        for k, pairing in enumerate(search.pairings)
    ]
    own_order = torch.arange(search.per_group).repeat(len(i), 1)
    best, highest = own_order, search.gain(Order(i, j, own_order))
    for start in (own_order, _independent(search.pairings, products)):
        queries, gain = start, search.gain(Order(i, j, start))
        for _ in range(_ALTERNATIONS):
            after = _improved(search, products, Order(i, j, queries))
            reached = search.gain(Order(i, j, after))
            rises = reached > gain + _TIE * gain.abs()
            if not bool(rises.any()):
                break
            queries = torch.where(rises[:, None], after, queries)
            gain = torch.where(rises, reached, gain)
        better = gain > highest + _TIE * highest.abs()
        best, highest = torch.where(better[:, None], queries, best), torch.where(better, gain, highest)
    return highest, best


def _independent(pairings: list[Pairing], products: list[Tensor]) -> Tensor:
    """Orders of query heads by the best agreement of each pair alone, (N, r)."""
    total: Tensor | float = 0.0
    for pairing, dual in zip(pairings, products, strict=True):
        value = pairing.group.reach(dual).sum(-1) if pairing.compact else nuclear_norm(dual)
        total = total + value.cpu()
    return torch.stack([assign_small(m) for m in torch.as_tensor(total)])


def _improved(search: _Search, products: list[Tensor], order: Order) -> Tensor:
    """The best orders for the best maps of an order, (N, r)."""
    total: Tensor | float = 0.0
    for k, pairing in enumerate(search.pairings):
        element, _ = pairing.group.solve(search.grams(k, order))
        total = total + pairing.group.agreement(element, products[k]).cpu()
    return torch.stack([assign_small(m) for m in torch.as_tensor(total)])
