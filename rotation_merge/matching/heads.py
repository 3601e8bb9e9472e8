"""Matching one attention layer: the order of its heads and the maps inside them, jointly.

The products of all heads with all say what every pair of KV groups gains under its best maps, so that the order of the
groups is one assignment. Query heads that share keys and values are ordered in turn with the maps, from two starts. Of
near models, such as fine-tunes, products of other pairs are not formed: no map inside a head changes the norms of its
columns, and these prove that every head is at its place.

`heads: spectral` pairs heads by the distance of their singular values, after TransFusion (Rinaldi and others, 2025),
for comparison. TransFusion takes those of the query, key and value matrices without biases, which no permutation inside
a head changes, and permutes the coordinates of each pair, with one permutation for all three. Here output matrix and
biases take part, too, and queries and keys are permuted separately from values and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import FLOAT32_RANK_TOLERANCE, RANK_TOLERANCE
from rotation_merge.matching.matrix_pairs import Pairs, SpaceMatch, row_squares
from rotation_merge.symmetry import ROLES, Linear, Monomial, Stats, Transform, orders_of
from rotation_merge.symmetry.admitted import SpaceGroup, admitted
from rotation_merge.symmetry.group import Group, Monomials
from rotation_merge.symmetry.options import GroupOptions

TURNS = 6
"""Maps and the order of query heads take turns at most so often."""
GAINED = 1e-12
"""Share of a gain by which a turn has to raise it."""
ENTRIES = 1 << 22
"""Entries of statistics that are looked at together."""
ROUNDING = 1e-5
"""Share of the squared norms by which norms of columns in float32 may be wrong."""
NOTE = "query heads inside KV groups: alternated from two starts (shared keys and values couple them)"
SPECTRAL = "heads paired by their singular values, after TransFusion"
FIXED = "the order of the heads is fixed by the architecture"


class Pairing(NamedTuple):
    """N pairs of KV groups, with the order of the query heads inside each.

    Attributes:
        anchor, donor: numbers of groups, int64 (N,).
        queries: int64 (N, r): head a of the anchor's group meets head queries[:, a] of the donor's.
    """

    anchor: Tensor
    donor: Tensor
    queries: Tensor


class Solution(NamedTuple):
    """The best element of each KV group, and the squared distances that it leaves, float64 (G,)."""

    element: Monomial | Linear
    distances: Tensor


def match_heads(space: Space, sides: Mapping[str, Pairs], options: GroupOptions) -> SpaceMatch:
    """The best order of heads and maps inside them, within the options and the layer's groups."""
    group = admitted(space, options)
    elements, unmoved = ("qk", "vo", "gains", None), group.identity()
    parts = [part for name in elements if (part := HeadPart.of(space, sides, group, name)) is not None]
    rows, queries = unmoved.orders
    pairing, notes = Pairing(rows, rows, queries), list[str]()
    solutions, spectral = [part.solved(pairing) for part in parts], group.order == "spectral"
    if group.order == "fixed" and queries.numel() > 1:
        notes = [FIXED]
    elif group.order != "none" and queries.numel() > 1 and parts and (spectral or not _at_home(parts, solutions)):
        notes = [SPECTRAL] if spectral else [NOTE] if queries.shape[1] > 1 else []
        candidate = (_spectral if spectral else _searched)(parts, group.inside)
        candidate_solutions = [part.solved(candidate) for part in parts]
        norm = sum(float(part.squares[0].sum()) for part in parts)
        if spectral or _left(candidate_solutions) < _left(solutions) - GAINED * norm:
            pairing, solutions = candidate, candidate_solutions
    if (shared := HeadPart.of(space, sides, group, "gains", shared=True)) is not None:
        parts, solutions = [*parts, shared], [*solutions, shared.solved(shared.unmoved)]
    best = {**unmoved.elements, **orders_of(pairing.donor, pairing.queries)}
    for part, solution in zip(parts, solutions, strict=True):
        if part.name in best and best[part.name].shape == solution.element.shape:
            best[part.name] = solution.element
    before, anchor = (sum(float(part.squares[which].sum()) for part in parts) for which in (2, 0))
    return SpaceMatch(Transform("attention", best), (before, _left(solutions), anchor), notes)


def _left(solutions: list[Solution]) -> float:
    """The squared distance that the solutions of all parts leave."""
    return sum(float(solution.distances.sum()) for solution in solutions)


@dataclass(frozen=True, eq=False)
class HeadPart:
    """The coordinates of heads that one element moves, in both models.

    Attributes:
        name: of the element; None: numbers that only follow the order of the heads.
        sides: primal (keys or values, one head a group), dual (queries or outputs, r heads a group) and what changes
            places with the coordinates and nothing more (rows of output gates, r heads a group); (G, 1 or r, d, m).
        shape: G, r and d.
        device: of the sums.
    """

    name: str | None
    group: Group
    sides: tuple[Pairs, ...]
    shape: tuple[int, int, int]
    device: torch.device

    @classmethod
    def of(
        cls, space: Space, sides: Mapping[str, Pairs], group: SpaceGroup, name: str | None, shared: bool = False
    ) -> HeadPart | None:
        """The part of an element's tensors; None if there are none. Without a group of their own they stay.

        Args:
            shared: of gains, those of norms that all heads of a layer share, as of one head.
        """
        sizes, device = space.sizes, next(iter(sides.values()))[0][0].device
        size = {"vo": sizes["value_dim"], None: 1}.get(name, sizes["head_dim"])
        shape = (1, 1, size) if shared else (sizes["groups"], sizes["per_group"], size)
        rules = ROLES["attention"]
        roles = [role for role in rules if rules[role].element == name and shared != bool(rules[role].levels)]

        def apart(x: Tensor) -> Tensor:
            return x.reshape(shape[0], -1, size, x.shape[-1]).to(device)

        pairs = tuple([(apart(a), apart(b)) for a, b in sides.get(role, ())] for role in roles)
        of_coordinates = group.groups[name][0] if name in group.groups else Monomials()
        pairs = pairs if any(pairs[2:]) else pairs[:2]
        return cls(name, of_coordinates, pairs, shape, device) if any(pairs) else None

    @property
    def unmoved(self) -> Pairing:
        """Every group with itself."""
        rows = torch.arange(self.shape[0])
        return Pairing(rows, rows, torch.arange(self.shape[1]).repeat(len(rows), 1))

    @cached_property
    def rounding(self) -> float:
        """Relative rounding of the products."""
        double = all(torch.float64 in (a.dtype, b.dtype) for pairs in self.sides for a, b in pairs)
        return RANK_TOLERANCE if double else FLOAT32_RANK_TOLERANCE

    @cached_property
    def squares(self) -> Tensor:
        """Squared norms of anchor and donor, and the squared distance of every group from itself, (3, sides, G, d)."""
        groups, _, size = self.shape
        total = torch.zeros(3, len(self.sides), groups, size, dtype=torch.float64, device=self.device)
        for side, pairs in enumerate(self.sides):
            for pair in pairs:
                total[:, side] += row_squares(*(x.flatten(0, 2) for x in pair)).reshape(3, groups, -1, size).sum(2)
        return total

    @cached_property
    def tables(self) -> list[Tensor]:
        """Products of all heads with all inside blocks, by side, (G, 1 or r, G, 1 or r, d, d)."""
        numbers, tables = self.group.blocks(self.shape[2]).to(self.device), []
        for side, pairs in enumerate(self.sides):
            shape = self.shape[0], len(self._heads(side)), self.shape[2]
            total = torch.zeros(math.prod(shape), math.prod(shape), device=self.device)
            for pair in pairs:
                total = total + _product(*(x.flatten(0, 2) for x in pair))
            whole = total.reshape(*shape, *shape).permute(0, 1, 3, 4, 2, 5)
            tables.append(whole * (numbers[:, None] == numbers))
        return tables

    def _heads(self, side: int) -> Tensor:
        """The numbers of the heads of each group on a side."""
        return torch.arange(self.shape[1] if side else 1)

    def _products(self, side: int, pairing: Pairing, searching: bool) -> Tensor:
        """A B^T of pairs of groups on one side, summed over their heads, float64 (N, d, d); arguments as of `stats`."""
        heads, i, j = self._heads(side), pairing.anchor[:, None], pairing.donor[:, None]
        queries = pairing.queries if side else torch.zeros_like(j)
        if searching:
            return self.tables[side][i, heads, j, queries].sum(1, dtype=torch.float64)
        total = torch.zeros(len(i), len(heads), *self.shape[2:] * 2, device=self.device)
        for a, b in self.sides[side]:
            total = total + _product(a[i, heads], b[j, queries])
        return total.sum(1, dtype=torch.float64)

    def stats(self, pairing: Pairing, searching: bool = False) -> Stats:
        """The statistics of pairs of groups.

        Args:
            searching: use the products of all heads with all, and let map and scale take one turn only: enough to
                choose pairs by.
        """
        products = (self._products(side, pairing, searching) for side in range(len(self.sides)))
        anchor, donor = self.squares[0][:, pairing.anchor], self.squares[1][:, pairing.donor]
        return Stats(tuple(products), (*donor,), (*anchor,), self.rounding, 1 if searching else Stats.turns)

    @cached_property
    def _stats_unmoved(self) -> Stats:
        return self.stats(self.unmoved)

    def solved(self, pairing: Pairing) -> Solution:
        """The best element of each pair of groups, the identity where both models are equal."""
        unmoved = self.unmoved
        home = (pairing.donor == unmoved.donor) & (pairing.queries == unmoved.queries).all(1)
        before = self._stats_unmoved
        stats = before if bool(home.all()) else self.stats(pairing)
        apart = self.squares[2].sum((0, 2))
        element = self.group.solve(stats.of_equals(home.to(self.device) & (apart == 0)))
        gained = stats.gain(element) - before.gain(Monomial.identity(*self.shape[::2]))
        return Solution(element, apart - gained)

    def least_distances(self) -> Tensor:
        """Lower bounds on the squared distances of all query heads from all others, (G r, G r), under any maps.

        Inside blocks of coordinates maps keep the norms of columns, up to a scale.
        """
        heads = self.shape[0] * self.shape[1]
        total = torch.zeros(heads, heads, device=self.device)
        if self.group.permutes and self.group.scaled:  # every coordinate has a scale of its own
            return total
        for pairs in (pairs for pairs in self.sides if pairs and pairs[0][0].shape[1] == self.shape[1]):
            a, b = (torch.cat([self._column_norms(pair[which]) for pair in pairs], 2) for which in (0, 1))
            inner, first, second = a @ b.mT, a.square().sum(2)[..., None], b.square().sum(2)[:, None]
            shared = inner.square() / second.clamp_min(1e-30) if self.group.scaled else 2 * inner - second
            total += (first - shared - ROUNDING * (first + second)).sum(0)
        return total

    def _column_norms(self, x: Tensor) -> Tensor:
        """Of heads (G, r, d, m) the norms of columns in each block of coordinates, float32 (blocks, G r, m)."""
        numbers = self.group.blocks(self.shape[2]).to(x.device)
        squares = x.flatten(0, 1).float().square().movedim(1, 0)
        return squares.new_zeros(int(numbers.max()) + 1, *squares.shape[1:]).index_add_(0, numbers, squares).sqrt()


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Products X Y^T of matrices, in float32 at least."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(dtype) @ y.to(dtype).mT


def _at_home(parts: list[HeadPart], solutions: list[Solution]) -> bool:
    """Whether every head is at its place for sure: farther from any other than all heads of its group are now."""
    left = torch.stack([solution.distances for solution in solutions]).sum(0)
    apart: Tensor | float = 0.0
    for part in parts:
        apart = (apart + part.least_distances()).fill_diagonal_(torch.inf)
        if bool((apart >= left.repeat_interleave(part.shape[1])[:, None]).all()):
            return True
    return False


def _searched(parts: list[HeadPart], inside: bool) -> Pairing:
    """The donor's KV groups (unless they stay: `inside`) and the query heads in each in the best order."""
    rows, count = parts[0].unmoved.donor, parts[0].shape[0]
    if inside:
        return Pairing(rows, rows, _inner_orders(parts, rows, rows)[1])
    gains, queries = _inner_orders(parts, rows.repeat_interleave(count), rows.repeat(count))
    order = assign(gains.reshape(count, count))
    return Pairing(rows, order, queries.reshape(count, count, -1)[rows, order])


def _inner_orders(parts: list[HeadPart], i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """What N pairs of groups gain, (N,), and the best orders of their query heads, (N, r); a few pairs at a time."""
    size = max(part.shape[1] * part.shape[2] ** 2 for part in parts)
    chunks = zip(*(x.split(max(1, ENTRIES // size)) for x in (i, j)), strict=True)
    gains, orders = zip(*(_alternated(parts, *chunk) for chunk in chunks), strict=True)
    return torch.cat(gains), torch.cat(orders)


def _alternated(parts: list[HeadPart], i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Maps and the order of query heads in turn, from that of the heads and from that of the likeliest pairs."""
    per_group = parts[0].shape[1]
    unmoved = torch.arange(per_group).repeat(len(i), 1)
    gains, orders = torch.full((len(i),), -torch.inf, dtype=torch.float64), unmoved.clone()
    norms = (torch.linalg.matrix_norm(part.tables[1][i, :, j].double()).cpu() for part in parts)
    likely = _assigned(sum(norms, torch.zeros(len(i), per_group, per_group, dtype=torch.float64)))
    differs = (likely != unmoved).any(1).nonzero()[:, 0]
    for rows, queries in ((torch.arange(len(i)), unmoved), (differs, likely[differs])):
        for _ in range(TURNS):
            if not len(rows):  # the pairs that still change
                break
            reached, agreement = _turned(parts, Pairing(i[rows], j[rows], queries))
            better = reached - gains[rows] > GAINED * reached.abs()
            orders[rows[better]], gains[rows[better]] = queries[better], reached[better]
            following = _assigned(agreement)
            changes = (following != queries).any(1)
            rows, queries = rows[changes], following[changes]
    return gains, orders


def _assigned(values: Tensor) -> Tensor:
    return torch.stack([assign(m) for m in values])


def _turned(parts: list[HeadPart], pairing: Pairing) -> tuple[Tensor, Tensor]:
    """What N pairs of groups gain under nearly the best maps, (N,), and <A, g^-T B> of their query heads, (N, r, r)."""
    gains = torch.zeros(len(pairing.anchor), dtype=torch.float64)
    total = torch.zeros(len(gains), *[parts[0].shape[1]] * 2, dtype=torch.float64)
    for part in parts:
        stats = part.stats(pairing, searching=True)
        element = part.group.solve(stats)
        gains += stats.gain(element).cpu()
        maps = element.matrices(dual=True).to(part.device)
        inner = part.tables[1][pairing.anchor, :, pairing.donor].double()
        total += torch.einsum("nxy,nabxy->nab", maps, inner).cpu()
    return gains, total


def _spectral(parts: list[HeadPart], inside: bool) -> Pairing:
    """KV groups (unless they stay: `inside`) and the query heads in each, assigned by the distance of their spectra.

    Distances between the singular values of the anchor's and of the donor's heads, biases included, are summed over
    queries and outputs, (G, r, G, r), and over keys and values.
    """
    groups, per_group, _ = parts[0].shape
    shared, every = (torch.zeros(groups, r, groups, r, dtype=torch.float64) for r in (1, per_group))
    for part in (part for part in parts if part.name is not None):
        for total, pairs in zip((shared, every), part.sides[:2], strict=True):
            if pairs:
                grams = (sum(x.double() @ x.double().mT for x in of_model) for of_model in zip(*pairs, strict=True))
                spectra = [torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().flatten(0, 1) for gram in grams]
                total += torch.cdist(*spectra).reshape(total.shape).cpu()
    inner = every.permute(0, 2, 1, 3)
    queries = _assigned(-inner.flatten(0, 1)).reshape(groups, groups, per_group)
    chosen = inner.gather(3, queries[..., None])[..., 0].sum(-1)
    rows = torch.arange(groups)
    order = rows if inside else assign(-(shared[:, 0, :, 0] + chosen))
    return Pairing(rows, order, queries[rows, order])
