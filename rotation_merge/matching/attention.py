"""Matching one attention layer: the order of its heads and the maps inside them, jointly."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge.architectures.model import Space
from rotation_merge.groups import HeadTransform
from rotation_merge.linalg.assignment import assign
from rotation_merge.matching.inhead import Grams, InHead, group_for_queries
from rotation_merge.matching.invertible import refine
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Side, joined

MOST_ENUMERATED = 4096
"""Orders of query heads are enumerated up to this many (pairs of KV groups) x (orders); beyond, they alternate."""


@dataclass(frozen=True)
class HeadPair:
    """The two sides of one in-head space, float64: primal (G, d, m), dual (G, r, d, m')."""

    group: InHead
    anchor_primal: Tensor
    donor_primal: Tensor
    anchor_dual: Tensor
    donor_dual: Tensor

    def grams(self, groups: Tensor, queries: Tensor) -> Grams:
        """Statistics of anchor group i against donor group groups[i] under the orders `queries` (G, r)."""
        donor_primal = self.donor_primal[groups]
        donor_dual = self.donor_dual[groups[:, None], queries]
        return Grams(
            self.anchor_primal @ donor_primal.mT,
            (self.anchor_dual @ donor_dual.mT).sum(1),
            *(donor_primal.square().sum(-1), donor_dual.square().sum((1, 3))),
            *(self.anchor_primal.square().sum(-1), self.anchor_dual.square().sum((1, 3))),
        )

    def all_products(self) -> tuple[Tensor, Tensor]:
        """Products of all pairs: primal (G, G, d, d) and dual (G, G, r, r, d, d)."""
        primal = torch.einsum("gim,hjm->ghij", self.anchor_primal, self.donor_primal)
        dual = torch.einsum("gaim,hbjm->ghabij", self.anchor_dual, self.donor_dual)
        return primal, dual

    def norms(self, pairs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squared norms for all pairs, (G G, d) each, in `Grams`' order."""
        donor = [x.repeat(pairs, 1) for x in (self.donor_primal.square().sum(-1), self.donor_dual.square().sum((1, 3)))]
        anchor = [
            x.repeat_interleave(pairs, 0)
            for x in (self.anchor_primal.square().sum(-1), self.anchor_dual.square().sum((1, 3)))
        ]
        return donor[0], donor[1], anchor[0], anchor[1]


def match_attention(space: Space, found: list[Side], options: MatchOptions) -> tuple[HeadTransform, list[str]]:
    """The best order of heads and maps inside them, as far as `options` and the layer allow.

    Returns:
        The transform, and notes for the report.
    """
    sizes = space.sizes
    groups, per_group = sizes["groups"], sizes["per_group"]
    qk_group = group_for_queries(
        options.attention, space.rotary, sizes["head_dim"], space.interleaved, space.norm, options.rescale
    )
    turns = options.attention != "none" and space.free_values
    vo_group = InHead("orthogonal", options.rescale) if turns else InHead("fixed")
    qk = _pair(qk_group, found, ("k", "q"), groups, per_group, sizes["head_dim"])
    vo = _pair(vo_group, found, ("v", "o"), groups, per_group, sizes["value_dim"])
    order, queries, notes = _head_order(space, (qk, vo), options)
    elements = []
    for pair in (qk, vo):
        grams = pair.grams(order, queries)
        element, _ = pair.group.solve(grams)
        if options.attention == "invertible" and pair.group.kind == "orthogonal":
            element = refine(pair, order, queries, element)
        elements.append(element)
    return HeadTransform(order, queries, *elements), notes


def _pair(group: InHead, found: list[Side], roles: tuple[str, str], groups: int, per_group: int, size: int) -> HeadPair:
    empty = torch.zeros(groups, size, 0, dtype=torch.float64), torch.zeros(groups, size, 0, dtype=torch.float64)
    empty_dual = tuple(e[:, None].repeat(1, per_group, 1, 1) for e in empty)
    primal = joined(found, roles[0]) or empty
    dual = joined(found, roles[1]) or empty_dual
    device = primal[0].device if primal[0].numel() else dual[0].device
    moved = [x.to(device) for x in (*primal, *dual)]
    return HeadPair(group, *moved)


def _head_order(
    space: Space, pairs: tuple[HeadPair, HeadPair], options: MatchOptions
) -> tuple[Tensor, Tensor, list[str]]:
    groups, per_group = space.sizes["groups"], space.sizes["per_group"]
    in_order = torch.arange(groups), torch.arange(per_group).repeat(groups, 1)
    if options.heads == "none" or groups * per_group == 1:
        return *in_order, []
    if not space.free_order:
        return *in_order, ["the order of the heads is fixed by the architecture"]
    products = [pair.all_products() for pair in pairs]
    queries, notes = _query_orders(pairs, products, groups, per_group)
    grams = [_pair_grams(pair, product, queries) for pair, product in zip(pairs, products, strict=True)]
    groups_order = _lazy_assignment(groups, pairs, grams)
    chosen = queries.reshape(groups, groups, per_group)[torch.arange(groups), groups_order]
    return groups_order, chosen, notes


def _pair_grams(pair: HeadPair, products: tuple[Tensor, Tensor], queries: Tensor) -> Grams:
    """Statistics of all pairs of KV groups under the query orders (G G, r)."""
    primal, dual = products
    g, d = primal.shape[0], primal.shape[-1]
    per_group = dual.shape[2]
    flat = dual.reshape(g * g, per_group, per_group, d, d)
    rows, columns = torch.arange(g * g)[:, None], torch.arange(per_group)[None]
    return Grams(primal.reshape(g * g, d, d), flat[rows, columns, queries].sum(1), *pair.norms(g))


def _query_orders(
    pairs: tuple[HeadPair, HeadPair], products: list[tuple[Tensor, Tensor]], groups: int, per_group: int
) -> tuple[Tensor, list[str]]:
    """For every pair of KV groups the best order of the query heads inside it: (G G, r)."""
    count = groups * groups
    identity = torch.arange(per_group).repeat(count, 1)
    if per_group == 1:
        return identity, []
    orders = list(itertools.islice(itertools.permutations(range(per_group)), MOST_ENUMERATED + 1))
    exact = count * len(orders) <= MOST_ENUMERATED
    starts = [torch.tensor(o).repeat(count, 1) for o in orders] if exact else [identity, _independent(products)]
    best, best_gain = identity, _gain(pairs, products, identity)
    for start in starts:
        queries = start if exact else _alternate(pairs, products, start)
        gain = _gain(pairs, products, queries)
        better = gain > best_gain + 1e-12 * gain.abs()
        best = torch.where(better[:, None], queries, best)
        best_gain = torch.maximum(gain, best_gain)
    note = (
        "query heads inside KV groups: every order tried"
        if exact
        else ("query heads inside KV groups: alternated from two starts (shared keys and values couple them)")
    )
    return best, [note]


def _gain(pairs: tuple[HeadPair, HeadPair], products: list[tuple[Tensor, Tensor]], queries: Tensor) -> Tensor:
    gains = [
        pair.group.without_scale().solve(_pair_grams(pair, product, queries))[1]
        for pair, product in zip(pairs, products, strict=True)
    ]
    return gains[0] + gains[1]


def _independent(products: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Query orders from what each pair of heads could agree on by itself."""
    value = sum(torch.linalg.svdvals(dual).sum(-1) for _, dual in products)
    return _assign_small(torch.as_tensor(value).flatten(0, 1))


def _assign_small(values: Tensor) -> Tensor:
    solved = [torch.from_numpy(linear_sum_assignment(v, maximize=True)[1]) for v in values.cpu().numpy()]
    return torch.stack(solved)


def _alternate(
    pairs: tuple[HeadPair, HeadPair], products: list[tuple[Tensor, Tensor]], queries: Tensor, rounds: int = 20
) -> Tensor:
    """Maps for the order, order for the maps, until neither changes; the gain never falls."""
    for _ in range(rounds):
        agreement: Tensor | float = 0.0
        for pair, product in zip(pairs, products, strict=True):
            element, _ = pair.group.without_scale().solve(_pair_grams(pair, product, queries))
            dual = product[1].flatten(0, 1)
            eye = torch.eye(dual.shape[-1], dtype=dual.dtype, device=dual.device).expand(len(dual), -1, -1)
            matrix = element.act(eye, 0, 1, dual=True)
            agreement = agreement + torch.einsum("nij,nabij->nab", matrix, dual)
        better = _assign_small(torch.as_tensor(agreement))
        if torch.equal(better, queries):
            break
        queries = better
    return queries


def _lazy_assignment(groups: int, pairs: tuple[HeadPair, HeadPair], grams: list[Grams]) -> Tensor:
    """Assignment over the gains of all pairs, each evaluated exactly only once an optimum could use it.

    Upper bounds stand in for gains not yet known; an assignment all of whose pairs are exact is optimal.
    """
    values = sum((p.group.bound(g) for p, g in zip(pairs, grams, strict=True)), torch.zeros(groups * groups))
    exact = torch.zeros(groups * groups, dtype=torch.bool)
    rows = torch.arange(groups)
    candidate = rows
    while True:
        wanted = rows * groups + candidate
        wanted = wanted[~exact[wanted]]
        if len(wanted):
            gains = [p.group.solve(g.pick((wanted,)))[1] for p, g in zip(pairs, grams, strict=True)]
            values[wanted] = (gains[0] + gains[1]).to(values)
            exact[wanted] = True
        candidate = assign(values.reshape(groups, groups)).permutation
        if exact[rows * groups + candidate].all():
            return candidate
