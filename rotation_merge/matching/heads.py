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

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import FLOAT32_RANK_TOLERANCE, RANK_TOLERANCE
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.matching.matrix_pairs import Pairs, Side, SpaceMatch, row_squares
from rotation_merge.model.apply import at_least_float32
from rotation_merge.symmetry import Linear, Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import GroupOptions, SpaceGroup, admitted
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


class Pairing(NamedTuple):
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

    def equals(self, other: Pairing) -> bool:
        """Whether both pair the same heads."""
        return all(map(torch.equal, self, other))


def match_heads(space: Space, sides: Sequence[Side], options: GroupOptions) -> SpaceMatch:
    """The best order of heads and maps inside them, within the options and the layer's groups."""
    group = admitted(space, options)
    parts = [part for name in PAIRED if (part := HeadPart.of(space, sides, group, name)) is not None]
    pairing, notes = _best_order(group, parts)
    elements, met = dict(group.identity().elements), [(part, pairing) for part in parts]
    if (shared := HeadPart.of(space, sides, group, "gains", shared=True)) is not None:
        met.append((shared, shared.unmoved))
    gained = 0.0
    for part, pairs in met:
        element, gain = part.solved(pairs)
        gained += gain
        if part.name in elements and elements[part.name].shape[0] == len(pairs.donor):
            elements[part.name] = element
    before, anchor = (sum(float(part.squares[which].sum()) for part, _ in met) for which in (2, 0))
    transform = Transform("attention", elements, (pairing.donor, pairing.queries))
    return SpaceMatch(transform, (before, before - gained, anchor), notes)


@dataclass(frozen=True, eq=False)
class HeadPart:
    """The coordinates of heads that one element moves, in both models.

    Attributes:
        name: of the element; None: numbers that only follow the order of the heads.
        sides: primal (keys or values, one head a group), dual (queries or outputs, r heads a group) and what changes
            places with the coordinates and nothing more (rows of output gates, r heads a group); (G, 1 or r, d, m).
        shape: G, r and d.
        device: of the sums.
        tables: by number of batches that the groups are in (1: all together; G: each alone) products of all heads with
            all inside each, by side and by size s of blocks, (G, r, G / batches, r, k, s, s).
    """

    name: str | None
    group: Group
    sides: tuple[Pairs, ...]
    shape: tuple[int, int, int]
    device: torch.device
    tables: dict[int, list[list[Tensor]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, space: Space, sides: Sequence[Side], group: SpaceGroup, name: str | None, shared: bool = False
    ) -> HeadPart | None:
        """The part of an element's tensors; None if there are none. Without a group of their own they stay.

        Args:
            shared: of gains, those of norms that all heads of a layer share, as of one head.
        """
        sizes = space.sizes
        size = {"vo": sizes["value_dim"], None: 1}.get(name, sizes["head_dim"])
        shape = (1, 1, size) if shared else (sizes["groups"], sizes["per_group"], size)
        roles = ("k_norm", "q_norm") if shared else (*PAIRED[name], *(["gate"] if name == "vo" else []))

        def apart(x: Tensor) -> Tensor:
            return x.reshape(shape[0], -1, size, x.shape[-1])

        pairs = tuple([(apart(s.anchor), apart(s.donor)) for s in sides if s.role == role] for role in roles)
        if not any(pairs):
            return None
        of_coordinates = group.groups[name][0] if name in group.groups else Monomials()
        return cls(name, of_coordinates, pairs if any(pairs[2:]) else pairs[:2], shape, sides[0].anchor.device)

    @property
    def unmoved(self) -> Pairing:
        """Every group with itself."""
        groups, per_group, _ = self.shape
        return Pairing.of_all(torch.arange(groups), torch.arange(per_group).repeat(groups, 1))

    @cached_property
    def rounding(self) -> float:
        """Relative rounding of the products."""
        double = all(torch.float64 in (a.dtype, b.dtype) for pairs in self.sides for a, b in pairs)
        return RANK_TOLERANCE if double else FLOAT32_RANK_TOLERANCE

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Coordinates of the blocks that maps stay inside, (k, s) for those of each size s."""
        numbers = self.group.blocks(self.shape[2])
        by_size: dict[int, list[Tensor]] = {}
        for number in range(int(numbers.max()) + 1):
            coordinates = (numbers == number).nonzero()[:, 0]
            by_size.setdefault(len(coordinates), []).append(coordinates)
        return [torch.stack(coordinates).to(self.device) for size, coordinates in by_size.items() if size]

    @cached_property
    def squares(self) -> Tensor:
        """Squared norms of anchor and donor, and the squared distance of every group from itself, (3, sides, G, d)."""
        groups, _, size = self.shape
        total = torch.zeros(3, len(self.sides), groups, size, dtype=torch.float64, device=self.device)
        for side, pairs in enumerate(self.sides):
            for pair in pairs:
                rows = row_squares(*(x.flatten(0, 2) for x in pair)).to(self.device)
                total[:, side] += rows.reshape(3, groups, -1, size).sum(2)
        return total

    def tabulated(self, batch: int) -> list[list[Tensor]]:
        """The tables of the groups in so many batches."""
        if batch not in self.tables:
            self.tables[batch] = [[self._table(b, pairs, batch) for b in self.blocks] for pairs in self.sides]
        return self.tables[batch]

    def _table(self, blocks: Tensor, pairs: Pairs, batch: int) -> Tensor:
        """The products of one side inside batches of groups, in the inputs' precision."""
        (groups, _, width), (count, size) = self.shape, blocks.shape
        met, per_group = groups // batch, pairs[0][0].shape[1] if pairs else 1
        heads = met * per_group
        rows = (torch.arange(heads, device=self.device)[None, :, None] * width + blocks[:, None]).flatten(1)
        whole = count == 1 and size == width  # no copy is needed

        def picked(x: Tensor) -> Tensor:
            x = x.flatten(0, 2).to(self.device).unflatten(0, (batch, -1))
            return at_least_float32(x if whole else x[:, rows].flatten(0, 1))

        total = torch.zeros(batch * count, heads * size, heads * size, device=self.device)
        for x, y in (map(picked, pair) for pair in pairs):
            dtype = torch.promote_types(x.dtype, y.dtype)
            total = total + torch.bmm(x.to(dtype), y.to(dtype).mT)
        apart = total.reshape(batch, count, met, per_group, size, met, per_group, size)
        return apart.permute(0, 2, 3, 5, 6, 1, 4, 7).flatten(0, 1)

    def _places(self, pairing: Pairing) -> tuple[list[list[Tensor]], Tensor, Tensor]:
        """The tables with the products of the pairs, and their places there."""
        i, j = pairing.anchor.to(self.device), pairing.donor.to(self.device)
        if 1 not in self.tables and torch.equal(i, j):
            return self.tabulated(self.shape[0]), i, torch.zeros_like(j)
        return self.tabulated(1), i, j

    def stats(self, pairing: Pairing, turns: int = Stats.turns) -> Stats:
        """The statistics of pairs of groups: A B^T summed over their heads, (N, d, d), zero outside of blocks."""
        size, (tables, i, j) = self.shape[2], self._places(pairing)
        products = []
        for of_side in tables:
            result = torch.zeros(len(i), size, size, dtype=torch.float64, device=self.device)
            for blocks, table in zip(self.blocks, of_side, strict=True):
                heads = torch.arange(table.shape[1], device=self.device)
                queries = pairing.queries.to(self.device) if len(heads) > 1 else torch.zeros_like(i)[:, None]
                picked = table[i[:, None], heads, j[:, None], queries]
                result[:, blocks[:, :, None], blocks[:, None, :]] = picked.sum(1, dtype=torch.float64)
            products.append(result)
        anchor, donor = self.squares[0][:, i], self.squares[1][:, pairing.donor.to(self.device)]
        return Stats(tuple(products), (*donor,), (*anchor,), self.rounding, turns)

    def inner(self, pairing: Pairing) -> list[Tensor]:
        """Products of every query head with every other, of N pairs of groups, (N, r, r, k, s, s) for each size."""
        tables, i, j = self._places(pairing)
        return [table[i, :, j].double() for table in tables[1]]

    def bounds(self) -> Tensor:
        """Upper bounds on the gains of all pairs of groups, (G, G): |M|_* <= sqrt(s) |M|_F in each block."""
        groups = self.shape[0]
        if self.group.permutes and self.group.scaled:  # the coordinates of a block have scales of their own
            return self.squares[0].sum((0, 2))[:, None].expand(-1, groups).cpu()
        total = self.squares[0, 2:].sum((0, 2))[:, None].repeat(1, groups)
        for blocks, primal, dual in zip(self.blocks, *self.tabulated(1)[:2], strict=True):
            root = blocks.shape[1] ** 0.5 * (1 + self.rounding)
            p, q = (root * torch.linalg.matrix_norm(table).double().amax(3).sum(1) for table in (primal, dual))
            first, second = (x[:, blocks].sum(-1)[None] for x in self.squares[1, :2])
            scale = best_scale(first, second, p, q) if self.group.scaled else torch.ones_like(p)
            total -= cost(scale, first, second, p, q).sum(-1)
        return total.cpu()

    def solved(self, pairing: Pairing) -> tuple[Monomial | Linear, float]:
        """The best element of each pair, the identity where both models are equal, and by how much it gains."""
        still, stats = pairing.equals(self.unmoved), self.stats(pairing)
        before = stats if still else self.stats(self.unmoved)
        equal = self.squares[2].sum((0, 2)) == 0
        if not still:
            places = list(zip(*(x.tolist() for x in pairing), strict=True))
            pairs = [pair for pairs in self.sides for pair in pairs]
            alike = (
                all(bool((a[i] == b[j][queries if len(b[j]) > 1 else [0]].to(a.device)).all()) for a, b in pairs)
                for i, j, queries in places
            )
            equal = torch.tensor(list(alike), device=self.device)
        element = self.group.solve(stats.of_equals(equal))
        identity = Monomial.identity(*self.shape[::2])
        return element, float((stats.gain(element) - before.gain(identity)).sum())


def _best_order(group: SpaceGroup, parts: list[HeadPart]) -> tuple[Pairing, list[str]]:
    """The donor's head order and the query heads inside each group, with notes."""
    rows, queries = group.orders
    unmoved, count = Pairing.of_all(rows, queries), len(rows)
    if group.order == "fixed" and queries.numel() > 1:
        return unmoved, ["the order of the heads is fixed by the architecture"]
    if not group.reorders or queries.numel() == 1 or not parts:
        return unmoved, []
    if group.order == "spectral":
        return _spectral(group, parts), [SPECTRAL]
    gains, inner = _inner_orders(parts, rows, rows)
    best = Pairing.of_all(rows, inner)
    if not (group.inside or _at_home(parts, gains)):
        gains, every = _inner_orders(parts, rows.repeat_interleave(count), rows.repeat(count))
        order = assign(gains.reshape(count, count))
        best = Pairing.of_all(order, every.reshape(count, count, -1)[rows, order])
    return _better(parts, unmoved, best), [NOTE] if queries.shape[1] > 1 else []


def _at_home(parts: list[HeadPart], gains: Tensor) -> bool:
    """Whether bounds on what other pairs gain prove that groups are at their places; if not, all products are known.

    A group gains no more than the anchor's squared norm, whatever it meets; better bounds need the products of all
    heads with all, smallest tables first.

    Args:
        gains: of every group with itself, (G,).
    """
    rows = torch.arange(len(gains))
    bounds = [part.squares[0].sum((0, 2))[:, None].expand(-1, len(gains)).cpu() for part in parts]
    widths = [max(blocks.shape[1] for blocks in part.blocks) for part in parts]
    for number in sorted(range(len(parts)), key=lambda number: widths[number]):
        bounds[number] = parts[number].bounds()
        values = torch.stack(bounds).sum(0)
        values[rows, rows] = gains
        if torch.equal(assign(values), rows):
            return True
    return False


def _better(parts: list[HeadPart], unmoved: Pairing, best: Pairing) -> Pairing:
    """The order that gains more, under the best maps where both gain nearly as much."""
    if best.equals(unmoved):
        return unmoved
    nearly = [sum(float(p.group.value(p.stats(x, 1)).sum()) for p in parts) for x in (unmoved, best)]
    if max(nearly) > CLEARLY * max(min(nearly), 0.0):
        return unmoved if nearly[0] > nearly[1] else best
    every = [[(part.group, part.stats(pairing)) for part in parts] for pairing in (unmoved, best)]
    still, gained = (sum(float(s.gain(group.solve(s)).sum()) for group, s in stats) for stats in every)
    return best if gained > still + GAINED * abs(still) else unmoved


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
    pairing = Pairing(i, j, unmoved)
    if per_group == 1:
        return torch.stack([part.group.value(part.stats(pairing, 1)).cpu() for part in parts]).sum(0), unmoved
    gains, orders = torch.full((len(i),), -torch.inf, dtype=torch.float64), unmoved.clone()
    norms = (torch.linalg.matrix_norm(table).sum(-1).cpu() for part in parts for table in part.inner(pairing))
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
        stats = part.stats(pairing, 1)
        element = part.group.solve(stats)
        gains += stats.gain(element).cpu()
        maps = element.matrices(dual=True).to(part.device)
        for blocks, table in zip(part.blocks, part.inner(pairing), strict=True):
            inside = maps[:, blocks[:, :, None], blocks[:, None, :]]
            total += torch.einsum("nkxy,nabkxy->nab", inside, table).cpu()
    return gains, total


def _spectral(group: SpaceGroup, parts: list[HeadPart]) -> Pairing:
    """KV groups (unless they stay) and, inside them, query heads, assigned by the distance of their spectra.

    Distances between the singular values of the anchor's and of the donor's heads, biases included, are summed over
    queries and outputs, (G, r, G, r), and over keys and values.
    """
    groups, per_group = group.orders[1].shape
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
    order = rows if group.inside else assign(-(shared[:, 0, :, 0] + chosen))
    return Pairing.of_all(order, queries[rows, order])
