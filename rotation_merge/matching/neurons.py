"""Matching the neurons of an FFN or of experts: their order, and the rescaling that their activation admits.

A neuron's squared distance under a scale a on its in side and 1/a^k on its out side (k the activation's degree) is

    |A_in - a B_in|^2 + |A_gate - B_gate|^2 + |A_out - B_out / a^k|^2.

With both sides of every neuron brought to one norm, which scales do, the order is one assignment over inner products;
then each neuron has its scale in closed form.

Which expert of a layer is which is told by the router's rows and by a sketch of what each expert computes that no order
of its neurons changes. The order is kept if the matched neurons then lie nearer than those of experts at their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import cast

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.scaling import best_scale
from rotation_merge.matching.matrix_pairs import Pairs, PartView, SpaceMatch, Squares, row_squares
from rotation_merge.symmetry import Monomial, Transform, orders_of
from rotation_merge.symmetry.admitted import admitted
from rotation_merge.symmetry.group import Monomials
from rotation_merge.symmetry.options import GroupOptions

ROLES = ("in", "gate", "out")
ENTRIES = 1 << 19
"""Entries of a sketch's products that are looked at together."""
SMALLEST = 64
"""Below this many neurons all similarities are cheaper than a proof from some coordinates."""
WIDTHS = (16, 64, 256)
"""Numbers of coordinates that are tried in turn."""
ROUNDING = 1e-5
"""Share of the squared norms by which float32 may be wrong."""
WIDTH = 32
"""Random directions along which a sketch looks at the inputs and the outputs of an expert."""


@dataclass(frozen=True)
class Neurons:
    """The sides of one FFN (or expert), and the group of its neurons.

    Attributes:
        sides: rows into the neurons, gate rows, and columns out of them, (n, m) each.
    """

    sides: tuple[Pairs, ...]
    group: Monomials

    @property
    def pairs(self) -> Pairs:
        """All sides."""
        return [pair for pairs in self.sides for pair in pairs]

    @property
    def unscaled(self) -> Pairs:
        """The sides that no rescaling touches."""
        return self.sides[1] if self.group.scaled else self.pairs

    @property
    def size(self) -> int:
        """n."""
        return len(self.pairs[0][0])

    def sketch(self, width: int) -> list[Tensor]:
        """Some coordinates of every neuron in both models, evenly spread, float32 (n, at most `width` a side)."""
        sides = zip(*self.unscaled, strict=True)
        return [torch.cat([x[:, :: max(1, x.shape[1] // width)][:, :width].float() for x in of], 1) for of in sides]

    def reordered(self, index: Tensor) -> Neurons:
        """The donor's neurons in another order (a copy)."""
        return replace(self, sides=tuple([(a, b[index.to(b.device)]) for a, b in pairs] for pairs in self.sides))

    @cached_property
    def squares(self) -> Tensor:
        """Squared norms of anchor and donor and their squared distance, of ins, gates and outs, float64 (3, 3, n)."""
        total = torch.zeros(3, 3, self.size, dtype=torch.float64, device=self.pairs[0][0].device)
        for side, pairs in enumerate(self.sides):
            for pair in pairs:
                total[side] += row_squares(*pair)
        return total

    @cached_property
    def factor(self) -> Tensor:
        """Every neuron's best scale in the donor's present order, float64 (n,)."""
        anchor, donor, apart = self.squares.unbind(1)
        if not self.group.scaled:
            return torch.ones_like(anchor[0])
        inner = (anchor + donor - apart) / 2
        return best_scale(donor[0], donor[2], inner[0], inner[2], self.group.signed, self.group.degree)

    @cached_property
    def distances(self) -> Tensor:
        """Every neuron's squared distance at its best scale, without cancellation where that is near 1, (n,)."""
        scales = torch.stack([self.factor, torch.ones_like(self.factor), self.factor**-self.group.degree])
        anchor, donor, apart = self.squares.unbind(1)
        return ((1 - scales) * (anchor - scales * donor) + scales * apart).sum(0)

    def similarity(self) -> Tensor:
        """Inner products of all pairs on balanced norms, signs marginalised where free; (n, n), float32 or float64.

        In and out side of each neuron are brought to one norm, in the anchor and in the donor.
        """
        double = all(torch.float64 in (a.dtype, b.dtype) for a, b in self.pairs)
        dtype, power = torch.float64 if double else torch.float32, -self.group.degree
        ins, outs = self.squares[0, :2], self.squares[2, :2]
        balance = torch.where((ins > 0) & (outs > 0), outs / ins, 1.0)
        balance = balance.pow(0.5 / (1 + self.group.degree) if self.group.scaled else 0.0).to(dtype)[..., None]
        rows_in, gates, columns_out = self.sides
        weighted = (rows_in, balance), (columns_out, balance**power), (gates, torch.ones_like(balance))
        result = torch.zeros(self.size, self.size, dtype=dtype, device=balance.device)
        for pairs, scales in weighted:
            if pairs is gates and self.group.signed:
                result.abs_()
            for pair in pairs:
                a, b = (x.to(result) * scale for x, scale in zip(pair, scales, strict=True))
                result.addmm_(a, b.T)
        return result


def match_neurons(space: Space, parts: Iterable[PartView], options: GroupOptions) -> SpaceMatch:
    """Order and rescaling of an FFN's neurons, or of the neurons of a layer's experts, which have an order, too.

    A tensor with a neuron axis counts the experts on dimension 0; one without is the router's.
    """
    group, experts = admitted(space, options), space.kind == "experts"
    count, router = space.sizes["count"] if experts else 1, list[tuple[Tensor, Tensor]]()
    stacks: dict[str, Pairs] = {role: [] for role in ROLES}
    for info, part, dim, *pair in parts:
        if part.role in stacks:
            # (E, n, m) without a copy: all but experts and neurons is one dimension, or none
            a, b = (x.movedim(dim, int(experts)).reshape(count, part.size, -1) for x in pair)
            stacks[part.role].append((a, b))
        elif all(p.role == "index" for axis in info.axes for p in axis.parts if p.space == space):
            a, b = (x.movedim(dim, 0).reshape(count, -1) for x in pair)
            router.append((a, b))
    free = cast(Monomials, group.groups["neurons"][0])

    @cache
    def match(i: int, j: int) -> tuple[Monomial, Squares]:
        """The neurons of the anchor's expert i against those of the donor's j."""
        return best_order(Neurons(tuple([(a[i], b[j]) for a, b in pairs] for pairs in stacks.values()), free))

    order = torch.arange(count)
    if group.order != "none":
        routing = sum((_squares(a, b) for a, b in router), torch.zeros(count, count, dtype=torch.float64))
        likely = _in_groups(-(routing + _likeness(stacks)), space.sizes.get("groups", 1))
        still, moved = (
            sum(match(i, j)[1][1] for i, j in enumerate(places.tolist())) + float(routing[order, places].sum())
            for places in (order, likely)
        )
        order = likely if moved < still else order
    matches, squares = zip(*(match(i, j) for i, j in enumerate(order.tolist())), strict=True)
    index, factor = (torch.cat([getattr(element, name) for element in matches]) for name in ("index", "factor"))
    orders = orders_of(order) if experts else {}
    elements = {**orders, "neurons": Monomial(index, factor, free.degree)}
    return SpaceMatch(Transform(space.kind, elements), None if experts else squares[0])


def best_order(neurons: Neurons) -> tuple[Monomial, Squares]:
    """Order and scales, G = 1, never farther than in the donor's own order; and the squares of `SpaceMatch`."""
    index, best = torch.arange(neurons.size), neurons
    if neurons.group.permutes and bool(neurons.squares[:, 2].any()):
        proven = proven_order(neurons)
        if proven is None:
            similarity = neurons.similarity()
            similarity -= similarity.mean(0, keepdim=True)  # changes no order; no column is the favourite of many rows
            similarity -= similarity.mean(1, keepdim=True)
            order = assign(similarity)
            proven = order, neurons.reordered(order)
        if float(proven[1].distances.sum()) < float(neurons.distances.sum()):
            index, best = proven
    element = Monomial(index[None], best.factor[None].cpu(), neurons.group.degree)
    anchor, _, before = neurons.squares.sum((0, 2)).tolist()
    return element, (before, float(best.distances.clamp_min(0).sum()), anchor)


def proven_order(neurons: Neurons) -> tuple[Tensor, Neurons] | None:
    """The order that neurons have, or that of nearest neighbours, if some coordinates prove it the best; and neurons
    with the donor's in that order.

    They do so for fine-tunes and for twins. With D_ij the squared distance of anchor neuron i and donor neuron j at
    their best scale, the order is optimal if D_ij >= (D_ii + D_jj) / 2 for all pairs: these halves are feasible prices
    that it attains. Over some of the coordinates that no rescaling touches, |a_i - b_j|^2 is at most D_ij.
    """
    if neurons.size < SMALLEST or not neurons.unscaled:
        return None
    if any(_is_proven(neurons, width) for width in WIDTHS):
        return torch.arange(neurons.size), neurons
    anchor, donor = neurons.sketch(WIDTHS[1])
    order = torch.cat([near.argmax(1) for _, near in _products(anchor, donor, donor.square().sum(1) / 2)]).cpu()
    if len(order.unique()) < len(order):
        return None
    moved = neurons.reordered(order)
    return (order, moved) if any(_is_proven(moved, width) for width in WIDTHS) else None


def _is_proven(neurons: Neurons, width: int) -> bool:
    """Whether the distances over some coordinates exclude every pair (i, j), j != i."""
    anchor, donor = neurons.sketch(width)
    halves = (neurons.distances / 2).float()
    first, second = (((1 - ROUNDING) * x.square().sum(1) - (1 + ROUNDING) * halves) / 2 for x in (anchor, donor))
    for rows, near in _products(anchor, donor, second):
        near[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
        if bool((near.amax(1) > first[rows]).any()):
            return False
    return True


def _products(anchor: Tensor, donor: Tensor, offsets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows i of the anchor's, a few of them at a time, with <a_i, b_j> - offset_j."""
    for rows in torch.arange(len(anchor), device=anchor.device).split(max(1, ENTRIES // len(donor))):
        yield rows, torch.addmm(offsets, anchor[rows], donor.T, beta=-1)


def _in_groups(values: Tensor, groups: int) -> Tensor:
    """The best order for these values, (E, E), of the router's groups and of the experts in each, int64 (E,)."""
    size = len(values) // groups
    inner = values.reshape(groups, size, groups, size).transpose(1, 2)
    orders = torch.stack([assign(m) for m in inner.flatten(0, 1)]).unflatten(0, (groups, groups))
    outer = assign(inner.gather(3, orders[..., None])[..., 0].sum(-1))
    return (outer[:, None] * size + orders[torch.arange(groups), outer]).flatten()


def _squares(a: Tensor, b: Tensor) -> Tensor:
    """Squared distances of all pairs of rows, float64 on the CPU, (E, E)."""
    a, b = a.double().cpu(), b.double().cpu()
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()


def _likeness(stacks: Mapping[str, Pairs]) -> Tensor:
    """Squared distances of all pairs of experts' sketches, as shares of the experts' squared norms, (E, E).

    A sketch is what no order, scale or sign of the neurons changes, along random directions: of gated experts the Gram
    of the gate's rows; else the product of the out and the in side (with a degree of one). P X^T Y Q of matrices X,
    (E, n, m), and Y, (E, n, l), for random P and Q.
    """
    pairs = [(pair, pair) for pair in stacks["gate"]] or [(stacks["in"][0], stacks["out"][0])]
    sketches = []
    for which in (0, 1):
        parts = []
        for seed, (x, y) in enumerate((first[which], second[which]) for first, second in pairs):
            draw = torch.Generator().manual_seed(seed)
            left, right = (torch.randn(z.shape[-1], WIDTH, generator=draw, dtype=torch.float64) for z in (x, y))
            products = [(a.double().cpu() @ left).mT @ (b.double().cpu() @ right) for a, b in zip(x, y, strict=True)]
            parts.append(torch.stack(products).flatten(1))
        sketches.append(torch.cat(parts, 1))
    norm = sum(float(x.double().square().sum()) for pairs in stacks.values() for stack, _ in pairs for x in stack)
    scale = float(sketches[0].square().sum())
    return _squares(*sketches) * (norm / scale if scale else 0.0)
