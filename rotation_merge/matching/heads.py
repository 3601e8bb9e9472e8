"""Matching one attention layer: the order of its heads and the maps inside them, jointly.

The products of all heads with all say what every pair of KV groups gains under its best maps, so that the order of the
groups is one assignment. Query heads that share keys and values are ordered in turn with the maps, from two starts.
Bounds on the gains of other pairs come from the norms of the products: where they prove the heads to be at their
places, as in a fine-tune, no other pair is solved for.

`heads: spectral` pairs heads by the distance of their singular values, after TransFusion (Rinaldi and others, 2025),
for comparison. TransFusion takes those of the query, key and value matrices without biases, which no permutation inside
a head changes, and permutes the coordinates of each pair, with one permutation for all three. Here output matrix and
biases take part, too, and queries and keys are permuted separately from values and outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import FLOAT32_RANK_TOLERANCE, RANK_TOLERANCE
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.model.apply import at_least_float32
from rotation_merge.symmetry import Linear, Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import GroupOptions, SpaceGroup, admitted
from rotation_merge.symmetry.element import in_order
from rotation_merge.symmetry.group import Group, Monomials
from rotation_merge.symmetry.space import PAIRED

TURNS = 6
"""Maps and the order of query heads take turns at most so often."""
CLEARLY = 1.1
"""An order that gains so many times what another does is the better one, without a closer look."""
GAINED = 1e-12
"""Share of a gain by which a turn has to raise it."""
ENTRIES = 1 << 22
"""Entries of statistics that are looked at together."""
NOTE = "query heads inside KV groups: alternated from two starts (shared keys and values couple them)"
SPECTRAL = "heads paired by their singular values, after TransFusion"

Pairs = list[tuple[Tensor, Tensor]]
"""(anchor, donor), (G, r, d, m) each, of any strides; r is 1 for keys and values."""


def match_heads(space: Space, sides: Sequence[Side], options: GroupOptions) -> tuple[Transform, float, list[str]]:
    """The best order of heads and maps inside them, within the options and the layer's groups.

    Returns:
        The transform, by how much it lowers the squared distance, and notes.
    """
    group = admitted(space, options)
    parts = [part for name in PAIRED if (part := _part(space, sides, group, name)) is not None]
    pairing, notes = _best_order(group, parts)
    elements = dict(group.identity().elements)
    gained = 0.0
    for part in parts:
        element, gain = part.solved(pairing)
        gained += gain
        if part.name in elements and elements[part.name].shape[0] == len(pairing.donor):
            elements[part.name] = element
    shared = _shared_gains(space, sides, group)
    if shared is not None:
        elements["gains"], gain = shared.solved(Pairing.own(1, 1))
        gained += gain
    return Transform("attention", elements, (pairing.donor, pairing.queries)), gained, notes


@dataclass(frozen=True)
class Pairing:
    """N pairs of KV groups, with the order of the query heads inside each.

    Attributes:
        anchor, donor: numbers of groups, int64 (N,).
        queries: int64 (N, r): head a of the anchor's group meets head queries[:, a] of the donor's.
    """

    anchor: Tensor
    donor: Tensor
    queries: Tensor

    @classmethod
    def of_all(cls, order: Tensor, queries: Tensor) -> Pairing:
        """Every group of the anchor's, with the donor's groups in an order."""
        return cls(torch.arange(len(order)), order, queries)

    @property
    def changes_nothing(self) -> bool:
        """Whether every group meets itself, in the same order of heads."""
        return in_order(self.donor) and torch.equal(self.anchor, self.donor) and in_order(self.queries)

    @classmethod
    def own(cls, groups: int, per_group: int) -> Pairing:
        """Every group with itself."""
        return cls.of_all(torch.arange(groups), torch.arange(per_group).repeat(groups, 1))

    def equals(self, other: Pairing) -> bool:
        """Whether both pair the anchor's heads with the same ones."""
        return torch.equal(self.donor, other.donor) and torch.equal(self.queries, other.queries)


@dataclass(frozen=True, eq=False)
class HeadPart:
    """The coordinates of heads that one element moves, in both models.

    Attributes:
        name: of the element; None: numbers that only follow the order of the heads.
        primal: keys or values, one head a group; `dual`: queries or outputs, r heads a group.
        follow: what changes places with the coordinates and nothing more (rows of output gates), r heads a group.
        shape: G, r and d.
        device: of the sums.
    """

    name: str | None
    group: Group
    primal: Pairs
    dual: Pairs
    follow: Pairs
    shape: tuple[int, int, int]
    device: torch.device

    @property
    def rounding(self) -> float:
        """Relative rounding of the products."""
        pairs = (*self.primal, *self.dual, *self.follow)
        double = all(torch.float64 in (a.dtype, b.dtype) for a, b in pairs)
        return RANK_TOLERANCE if double else FLOAT32_RANK_TOLERANCE

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Coordinates of the blocks that maps stay inside, (k, s) for those of each size s."""
        numbers = self.group.blocks(self.shape[2])
        by_size: dict[int, list[Tensor]] = {}
        for number in range(int(numbers.max()) + 1):
            coordinates = (numbers == number).nonzero()[:, 0]
            by_size.setdefault(len(coordinates), []).append(coordinates)
        return [torch.stack(coordinates) for size, coordinates in by_size.items() if size]

    @property
    def sides(self) -> tuple[Pairs, ...]:
        """Primal and dual, and what follows where there is any."""
        return (self.primal, self.dual, self.follow) if self.follow else (self.primal, self.dual)

    @cached_property
    def norms(self) -> Tensor:
        """Squared norms of anchor and donor on either side and of what follows, (2, 3, G, d)."""
        groups, _, size = self.shape
        total = torch.zeros(2, 3, groups, size, dtype=torch.float64, device=self.device)
        for side, pairs in enumerate(self.sides):
            for which, model in ((which, pair[which]) for pair in pairs for which in (0, 1)):
                for g, x in enumerate(model):
                    squares = at_least_float32(x.to(self.device)).square().sum(-1)
                    total[which, side, g] += squares.sum(0, dtype=torch.float64)
        return total

    def stats(self, pairing: Pairing) -> Stats:
        """The statistics of pairs of groups."""
        i, j = pairing.anchor.to(self.device), pairing.donor.to(self.device)
        anchor, donor = self.norms[0][:, i], self.norms[1][:, j]
        primal, dual, *follow = (self._summed(side, pairing) for side in range(len(self.sides)))
        stats = Stats(primal, dual, (donor[0], donor[1]), (anchor[0], anchor[1]), rounding=self.rounding)
        return replace(stats, follow=follow[0], follow_norms=donor[2]) if follow else stats

    def tabulate(self) -> None:
        """Form the products of all heads with all; before, those inside every group with itself are known."""
        self.__dict__["tables"] = [self._table(pairs, every=True) for pairs in self.sides]

    @cached_property
    def tables(self) -> list[list[Tensor]]:
        """Products of heads with heads on each side, for the blocks of each size, in the inputs' precision.

        (G, r, 1, r, k, s, s) inside the groups, or of all with all (G, r, G, r, k, s, s).
        """
        return [self._table(pairs, every=False) for pairs in self.sides]

    def _tables_of(self, i: Tensor, j: Tensor) -> tuple[list[list[Tensor]], Tensor]:
        """The tables, with the products of groups `i` with groups `j`, and where these are."""
        if not (self.every or torch.equal(i, j)):
            self.tabulate()
        return self.tables, j if self.every else torch.zeros_like(j)

    @property
    def every(self) -> bool:
        """Whether the products of all heads with all are known."""
        return self.tables[0][0].shape[2] == self.shape[0]

    def _table(self, pairs: Pairs, every: bool) -> list[Tensor]:
        return [self._block_table(blocks, pairs, every) for blocks in self.blocks]

    def _block_table(self, blocks: Tensor, pairs: Pairs, every: bool) -> Tensor:
        groups, _, width = self.shape
        per_group = pairs[0][0].shape[1] if pairs else 1
        count, size = blocks.shape
        batch, met = (1, groups) if every else (groups, 1)
        heads = met * per_group
        index = (torch.arange(heads)[None, :, None] * width + blocks[:, None]).flatten(1).to(self.device)
        total = torch.zeros(1, device=self.device)
        for pair in pairs:
            x, y = (self._rows(t.flatten(0, 2).to(self.device).unflatten(0, (batch, -1)), index) for t in pair)
            total = total + torch.bmm(*_alike(x, y))
        total = total.expand(batch * count, heads * size, heads * size)
        apart = total.reshape(batch, count, met, per_group, size, met, per_group, size)
        return apart.permute(0, 2, 3, 5, 6, 1, 4, 7).flatten(0, 1)

    @staticmethod
    def _rows(x: Tensor, index: Tensor) -> Tensor:
        """Some rows of (b, n, m), (b k, rows, m), widened; without a copy where these are all of them in order."""
        whole = index.numel() == x.shape[1] and len(index) == 1
        return at_least_float32(x if whole else x[:, index].flatten(0, 1))

    def _summed(self, side: int, pairing: Pairing) -> Tensor:
        """A B^T of pairs of groups, summed over their heads, (N, d, d), zero outside of blocks."""
        i, j = pairing.anchor.to(self.device), pairing.donor.to(self.device)
        size, (tables, places) = self.shape[2], self._tables_of(i, j)
        result = torch.zeros(len(i), size, size, dtype=torch.float64, device=self.device)
        for blocks, table in zip(self.blocks, tables[side], strict=True):
            rows = torch.arange(table.shape[1], device=self.device)
            queries = pairing.queries.to(self.device) if len(rows) > 1 else torch.zeros_like(i)[:, None]
            picked = table[i[:, None], rows, places[:, None], queries]
            index = blocks.to(self.device)
            result[:, index[:, :, None], index[:, None, :]] = picked.sum(1, dtype=torch.float64)
        return result

    def inner(self, pairing: Pairing) -> list[Tensor]:
        """Products of every query head with every other, of N pairs of groups, (N, r, r, k, s, s) for each size."""
        i, j = pairing.anchor.to(self.device), pairing.donor.to(self.device)
        tables, places = self._tables_of(i, j)
        return [table[i, :, places].double() for table in tables[1]]

    @property
    def compact(self) -> bool:
        """Whether the table of all heads with all is small: maps stay inside blocks of one or two coordinates."""
        return max(blocks.shape[1] for blocks in self.blocks) <= 2

    def bounds(self) -> Tensor:
        """Upper bounds on the gains of all pairs of groups, (G, G): |M|_* <= sqrt(s) |M|_F in each block.

        Without a table of all heads, or where the coordinates of a block have scales of their own, the anchor's squared
        norms: all that can be gained.
        """
        if not self.every or (self.group.permutes and self.group.scaled):
            return self.norms[0].sum((0, 2))[:, None].expand(-1, self.shape[0]).cpu()
        total = self.norms[0, 2].sum(1)[:, None].repeat(1, self.shape[0])
        for blocks, primal, dual in zip(self.blocks, *self.tables[:2], strict=True):
            root = blocks.shape[1] ** 0.5 * (1 + self.rounding)
            p, q = (root * torch.linalg.matrix_norm(table).double().amax(3).sum(1) for table in (primal, dual))
            first, second = (x[:, blocks.to(self.device)].sum(-1)[None] for x in self.norms[1, :2])
            scale = best_scale(first, second, p, q) if self.group.scaled else torch.ones_like(p)
            total -= cost(scale, first, second, p, q).sum(-1)
        return total.cpu()

    def solved(self, pairing: Pairing) -> tuple[Monomial | Linear, float]:
        """The best element of each pair, the identity where both models are equal, and by how much it gains."""
        stats = self.stats(pairing)
        element = self.group.solve(stats.of_equals(self._equal(pairing)))
        groups, per_group, size = self.shape
        before = stats if pairing.changes_nothing else self.stats(Pairing.own(groups, per_group))
        gained = stats.gain(element) - before.gain(Monomial.identity(groups, size))
        return element, float(gained.sum())

    def _equal(self, pairing: Pairing) -> Tensor:
        """Whether the heads that meet are equal in both models, (N,)."""
        equal = torch.ones(len(pairing.anchor), dtype=torch.bool, device=self.device)
        places = list(zip(pairing.anchor.tolist(), pairing.donor.tolist(), pairing.queries, strict=True))
        for a, b in itertools.chain.from_iterable(self.sides):
            for n, (i, j, queries) in enumerate(places):
                x, y = a[i].to(self.device), b[j].to(self.device, a.dtype)
                equal[n] &= torch.equal(x, y if len(y) == 1 else y[queries.to(self.device)])
        return equal

    def chunks(self, pairing: Pairing) -> Iterator[tuple[Tensor, Pairing]]:
        """A few pairs at a time, with their numbers."""
        size = self.shape[2]
        for chunk in torch.arange(len(pairing.anchor)).split(max(1, ENTRIES // (size * size * self.shape[1]))):
            yield chunk, Pairing(pairing.anchor[chunk], pairing.donor[chunk], pairing.queries[chunk])


def _alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """X and Y^T, in one dtype."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    return x.to(dtype), y.to(dtype).mT


def _part(space: Space, sides: Sequence[Side], group: SpaceGroup, name: str | None) -> HeadPart | None:
    """The part of an element's tensors; None if there are none. Without a group of their own they stay."""
    roles, sizes = PAIRED[name], space.sizes
    element_group = group.groups[name][0] if name in group.groups else Monomials()
    size = {"vo": sizes["value_dim"], None: 1}.get(name, sizes["head_dim"])
    shape = (sizes["groups"], sizes["per_group"], size)
    primal, dual = (_pairs(sides, role, shape) for role in roles)
    gates = _pairs(sides, "gate", shape) if name == "vo" else []
    if not (primal or dual or gates):
        return None
    return HeadPart(name, element_group, primal, dual, gates, shape, sides[0].anchor.device)


def _pairs(sides: Sequence[Side], role: str, shape: tuple[int, int, int]) -> Pairs:
    groups, _, size = shape
    return [
        (s.anchor.reshape(groups, -1, size, s.anchor.shape[-1]), s.donor.reshape(groups, -1, size, s.donor.shape[-1]))
        for s in sides
        if s.role == role
    ]


def _shared_gains(space: Space, sides: Sequence[Side], group: SpaceGroup) -> HeadPart | None:
    """Gains of norms that all heads of a layer share, as those of one head."""
    shape = (1, 1, space.sizes["head_dim"])
    primal, dual = (_pairs(sides, role, shape) for role in ("k_norm", "q_norm"))
    if not (primal or dual) or "gains" not in group.groups:
        return None
    return HeadPart("gains", group.groups["gains"][0], primal, dual, [], shape, sides[0].anchor.device)


def _best_order(group: SpaceGroup, parts: list[HeadPart]) -> tuple[Pairing, list[str]]:
    """The donor's head order and the query heads inside each group, with notes."""
    rows, queries = group.orders
    unmoved = Pairing.of_all(rows, queries)
    if group.order == "fixed" and queries.numel() > 1:
        return unmoved, ["the order of the heads is fixed by the architecture"]
    if not group.reorders or queries.numel() == 1 or not parts:
        return unmoved, []
    if group.order == "spectral":
        return _spectral(group, parts), [SPECTRAL]
    notes = [NOTE] if queries.shape[1] > 1 else []
    gains, inner = _inner_orders(parts, rows, rows)
    orders = [(unmoved, float(_gains(parts, unmoved).sum())), (Pairing.of_all(rows, inner), float(gains.sum()))]
    if not (group.inside or _at_home(parts, gains)):
        count = len(rows)
        gains, every = _inner_orders(parts, rows.repeat_interleave(count), rows.repeat(count))
        values = gains.reshape(count, count)
        order = assign(values)
        inner = every.reshape(count, count, -1)[rows, order]
        orders.append((Pairing.of_all(order, inner), float(values[rows, order].sum())))
    return _chosen(parts, orders), notes


def _at_home(parts: list[HeadPart], gains: Tensor) -> bool:
    """Whether bounds on what other pairs gain prove that groups are at their places; if not, all products are known.

    Args:
        gains: of every group with itself, (G,).
    """
    rows = torch.arange(len(gains))
    for compact in (True, False):
        for part in parts:
            if part.compact == compact:
                part.tabulate()
        values = torch.stack([part.bounds() for part in parts]).sum(0)
        values[rows, rows] = gains
        if torch.equal(assign(values), rows):
            return True
    return False


def _chosen(parts: list[HeadPart], orders: list[tuple[Pairing, float]]) -> Pairing:
    """The first of the orders that gains most; where several gain nearly as much, under the best maps."""
    most = max(gain for _, gain in orders)
    close: list[Pairing] = []
    for pairing, gain in orders:
        if CLEARLY * max(gain, 0.0) >= most and not any(pairing.equals(other) for other in close):
            close.append(pairing)
    gains = [_gained(parts, pairing) for pairing in close] if len(close) > 1 else [most]
    best = 0
    for number, gain in enumerate(gains):
        best = number if gain > gains[best] + GAINED * abs(gains[best]) else best
    return close[best]


def _gained(parts: list[HeadPart], pairing: Pairing) -> float:
    """What an order gains under the best maps."""
    every = [part.stats(pairing) for part in parts]
    gains = (float(stats.gain(part.group.solve(stats)).sum()) for part, stats in zip(parts, every, strict=True))
    return sum(gains)


def _inner_orders(parts: list[HeadPart], i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """What N pairs of groups gain, (N,), and the best orders of the query heads inside them, (N, r)."""
    per_group = parts[0].shape[1]
    unmoved = torch.arange(per_group).repeat(len(i), 1)
    if per_group == 1:
        return _gains(parts, Pairing(i, j, unmoved)), unmoved
    gains, orders = torch.full((len(i),), -torch.inf, dtype=torch.float64), unmoved.clone()
    likely = _assigned(_alone(parts, Pairing(i, j, unmoved)))
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


def _gains(parts: list[HeadPart], pairing: Pairing) -> Tensor:
    """What N pairs gain under the best maps, or ones nearly the best, (N,), on the CPU."""
    total = torch.zeros(len(pairing.anchor), dtype=torch.float64)
    for part in parts:
        for chunk, pairs in part.chunks(pairing):
            total[chunk] += part.group.value(replace(part.stats(pairs), turns=1)).cpu()
    return total


def _alone(parts: list[HeadPart], pairing: Pairing) -> Tensor:
    """The norms of the products of every pair of query heads, (N, r, r): those of heads that go together are larger."""
    total = torch.zeros(len(pairing.anchor), *[parts[0].shape[1]] * 2, dtype=torch.float64)
    for part in parts:
        for chunk, pairs in part.chunks(pairing):
            total[chunk] += sum(torch.linalg.matrix_norm(t).sum(-1).cpu() for t in part.inner(pairs))
    return total


def _turned(parts: list[HeadPart], pairing: Pairing) -> tuple[Tensor, Tensor]:
    """What N pairs of groups gain under nearly the best maps, (N,), and <A, g^-T B> of their query heads, (N, r, r)."""
    gains = torch.zeros(len(pairing.anchor), dtype=torch.float64)
    total = torch.zeros(len(gains), *[parts[0].shape[1]] * 2, dtype=torch.float64)
    for part in parts:
        for chunk, pairs in part.chunks(pairing):
            stats = replace(part.stats(pairs), turns=1)
            element = part.group.solve(stats)
            gains[chunk] += stats.gain(element).cpu()
            maps = element.matrices(dual=True).to(part.device)
            for blocks, table in zip(part.blocks, part.inner(pairs), strict=True):
                index = blocks.to(part.device)
                inside = maps[:, index[:, :, None], index[:, None, :]]
                total[chunk] += torch.einsum("nkxy,nabkxy->nab", inside, table).cpu()
    return gains, total


def _spectral(group: SpaceGroup, parts: list[HeadPart]) -> Pairing:
    """KV groups (unless they stay) and, inside them, query heads, assigned by the distance of their spectra."""
    groups, per_group = group.orders[1].shape
    shared = torch.zeros(groups, groups, dtype=torch.float64)
    every = torch.zeros(groups, per_group, groups, per_group, dtype=torch.float64)
    for part in parts:
        if part.name is not None:
            if part.primal:
                shared += _spectral_distances(part.primal, (groups, 1))[:, 0, :, 0]
            if part.dual:
                every += _spectral_distances(part.dual, (groups, per_group))
    inner = every.permute(0, 2, 1, 3)
    queries = _assigned(-inner.flatten(0, 1)).reshape(groups, groups, per_group)
    chosen = inner.gather(3, queries[..., None])[..., 0].sum(-1)
    rows = torch.arange(groups)
    order = rows if group.inside else assign(-(shared + chosen))
    return Pairing.of_all(order, queries[rows, order])


def _spectral_distances(pairs: Pairs, shape: tuple[int, int]) -> Tensor:
    """Distances between the singular values of the anchor's and of the donor's heads, (G, r, G, r), biases included."""
    anchor, donor = (
        torch.linalg.eigvalsh(sum(_gram(pair[which]) for pair in pairs)).clamp_min(0).sqrt().flatten(0, 1)
        for which in (0, 1)
    )
    return torch.cdist(anchor, donor).reshape(*shape, *shape).cpu()


def _gram(x: Tensor) -> Tensor:
    """X X^T of each head, (G, r, d, d)."""
    wide = x.double()
    return wide @ wide.mT
