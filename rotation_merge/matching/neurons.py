"""Matching the neurons of an FFN: their order, and the rescaling that their activation admits.

A neuron's squared distance under a scale a on its in side and 1/a^k on its out side (k the activation's degree) is

    |A_in - a B_in|^2 + |A_gate - B_gate|^2 + |A_out - B_out / a^k|^2.

With both sides of every neuron brought to one norm, which scales do, the order is one assignment over inner products;
then each neuron has its scale in closed form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.scaling import best_scale
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.symmetry import Monomial
from rotation_merge.symmetry.admitted import GroupOptions, admitted

Pairs = list[tuple[Tensor, Tensor]]
"""(anchor, donor) matrices, (n, m) each, of any strides."""

CACHED = 1 << 16
"""Entries that are widened at a time, so that they stay in the processor's cache."""
ROWS = 1 << 22
"""Entries of the similarity that are formed at a time."""
SMALLEST = 64
"""Below this many neurons all similarities are cheaper than a sketch."""
WIDTHS = (16, 64, 256)
"""Coordinates of sketches, tried in turn."""
PROBED = 64
"""Rows that tell whether a sketch is wide enough."""
ROUNDING = 1e-5
"""Share of the squared norms by which float32 may be wrong."""


@dataclass(frozen=True)
class Row:
    """Squared norms of both models and squared distances for every neuron of a role, float64 (n,)."""

    anchor: Tensor
    donor: Tensor
    distance: Tensor

    @property
    def inner(self) -> Tensor:
        """<A_i, B_i>."""
        return (self.anchor + self.donor - self.distance) / 2

    def scaled(self, factor: Tensor) -> Tensor:
        """|A_i - a_i B_i|^2, without cancellation where a is near 1."""
        return (1 - factor) * (self.anchor - factor * self.donor) + factor * self.distance


@dataclass
class Neurons:
    """The sides of one FFN by role: rows into the neurons, gate rows, columns out of them.

    Attributes:
        ins, gates, outs: (anchor, donor) matrices of each role.
        signed: factors may be negative, too (gated).
        degree: k; 0 where neurons may not be rescaled.
        permute: whether they may change places.
    """

    ins: Pairs
    gates: Pairs
    outs: Pairs
    signed: bool
    degree: int
    permute: bool = True

    @classmethod
    def of(cls, space: Space, by_role: dict[str, Pairs], options: GroupOptions) -> Neurons:
        """The sides of an FFN or of one expert, with what its activation and the options admit."""
        group = admitted(space, options).groups["neurons"][0]
        degree = space.degree if group.scaled else 0
        return cls(by_role["in"], by_role["gate"], by_role["out"], space.gated and degree > 0, degree, group.permutes)

    @property
    def pairs(self) -> Pairs:
        """All sides."""
        return [*self.ins, *self.gates, *self.outs]

    @property
    def size(self) -> int:
        """n."""
        return len(self.pairs[0][0])

    @property
    def device(self) -> torch.device:
        """The anchor's device."""
        return self.pairs[0][0].device

    def reordered(self, index: Tensor) -> Neurons:
        """The donor's neurons in another order (a copy); themselves in their own."""
        if torch.equal(index.cpu(), torch.arange(self.size)):
            return self

        def moved(pairs: Pairs) -> Pairs:
            return [(a, b[index.to(b.device)]) for a, b in pairs]

        return replace(self, ins=moved(self.ins), gates=moved(self.gates), outs=moved(self.outs))

    @cached_property
    def rows(self) -> tuple[Row, Row, Row]:
        """Statistics of ins, gates and outs in the donor's present order."""
        return self._row(self.ins), self._row(self.gates), self._row(self.outs)

    def _row(self, pairs: Pairs) -> Row:
        total = torch.zeros(3, self.size, dtype=torch.float64, device=self.device)
        for pair in pairs:
            for part, a, b in _blocks(*pair):
                total[0, part] += (a * a).sum(1)
                total[1, part] += (b * b).sum(1)
                total[2, part] += (a - b).square_().sum(1)
        return Row(*total)

    @cached_property
    def factor(self) -> Tensor:
        """Every neuron's best scale in the donor's present order, float64 (n,)."""
        ins, _, outs = self.rows
        if not self.degree:
            return torch.ones_like(ins.anchor)
        return best_scale(ins.donor, outs.donor, ins.inner, outs.inner, self.signed, self.degree)

    @cached_property
    def distances(self) -> Tensor:
        """Every neuron's squared distance in the donor's present order with the best scales, float64 (n,)."""
        ins, gates, outs = self.rows
        if not self.degree:
            return ins.distance + gates.distance + outs.distance
        return ins.scaled(self.factor) + gates.distance + outs.scaled(self.factor**-self.degree)

    @property
    def before(self) -> float:
        """Squared distance before matching."""
        return float(sum(row.distance.sum() for row in self.rows))

    def _balance(self) -> tuple[Tensor, Tensor]:
        """Scales, (n,), that give the in and the out side of each neuron one norm: the anchor's and the donor's."""
        ins, _, outs = self.rows
        sides = ((ins.anchor, outs.anchor), (ins.donor, outs.donor))
        power = 0.5 / (1 + self.degree) if self.degree else 0.0
        first, second = (torch.where((x > 0) & (y > 0), y / x, 1.0).pow(power) for x, y in sides)
        return first, second

    def similarity(self) -> Tensor:
        """Inner products of all pairs on balanced norms, signs marginalised where free; (n, n), float32 or float64."""
        double = all(torch.float64 in (a.dtype, b.dtype) for a, b in self.pairs)
        dtype = torch.float64 if double else torch.float32
        n = self.size
        result = torch.empty(n, n, dtype=dtype, device=self.device)
        first, second = (x.to(dtype)[:, None] for x in self._balance())
        power = self.degree
        weighted = (
            (self.ins, first, second),
            (self.outs, first**-power, second**-power),
            (self.gates, torch.ones_like(first), torch.ones_like(second)),
        )
        donor = [[b.to(result, copy=True).mul_(t) for _, b in pairs] for pairs, _, t in weighted]
        step = max(1, ROWS // n)
        for part in (slice(start, start + step) for start in range(0, n, step)):
            total = result[part].zero_()
            for number, (pairs, scale, _) in enumerate(weighted):
                if number == 2 and self.signed:
                    total.abs_()
                for (a, _), b in zip(pairs, donor[number], strict=True):
                    total.addmm_(a[part].to(result) * scale[part], b.T)
        return result


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of (n, m) matrices, widened to float32 at least: rows, or columns if these are contiguous."""
    n, m = a.shape
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if a.stride(1) == 1 or m == 1:
        step = max(1, CACHED // m)
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            yield part, a[part].to(dtype), b[part].to(a.device, dtype)
        return
    step = max(1, CACHED // n)
    for start in range(0, m, step):
        columns = slice(start, start + step)
        yield slice(0, n), a[:, columns].to(dtype), b[:, columns].to(a.device, dtype)


@dataclass(frozen=True)
class Matched:
    """The element of an FFN's neurons, with squared distances before and after and the anchor's squared norm."""

    element: Monomial
    before: float
    after: float
    anchor: float


def match_ffn(space: Space, sides: Sequence[Side], options: GroupOptions) -> Matched:
    """Order and rescaling of one FFN's neurons."""
    by_role = {role: [(s.anchor, s.donor) for s in sides if s.role == role] for role in ("in", "gate", "out")}
    return match_neurons(Neurons.of(space, by_role, options), space)


def match_neurons(neurons: Neurons, space: Space) -> Matched:
    """Order and scales, G = 1; never farther than the identity order."""
    index, best = torch.arange(neurons.size), neurons
    if neurons.permute and neurons.before != 0:
        order, moved = nearest_order(neurons) or assigned(neurons)
        if float(moved.distances.sum()) < float(neurons.distances.sum()):
            index, best = order, moved
    element = Monomial(index[None], best.factor[None].cpu(), space.degree or 1)
    after = float(best.distances.clamp_min(0).sum())
    return Matched(element, neurons.before, after, float(sum(row.anchor.sum() for row in neurons.rows)))


def assigned(neurons: Neurons) -> tuple[Tensor, Neurons]:
    """The best order over the similarities of all pairs, and the neurons with the donor's in that order."""
    similarity = neurons.similarity()
    similarity -= similarity.mean(0, keepdim=True)  # changes no order; no column is the favourite of many rows
    similarity -= similarity.mean(1, keepdim=True)
    order = assign(similarity)
    return order, neurons.reordered(order)


def nearest_order(neurons: Neurons) -> tuple[Tensor, Neurons] | None:
    """The same for the order of nearest neighbours in a sketch, if that proves it the best; None if it does not.

    With D_ij the squared distance of anchor neuron i and donor neuron j, moved to where they should be, at their best
    scale, the order is optimal if D_ij >= (D_ii + D_jj) / 2 for all pairs: these halves are feasible prices that it
    attains. For Q of orthonormal rows |Q (a_i - b_j)|^2, over the coordinates that no rescaling touches, is at most
    D_ij.
    """
    pairs = neurons.gates if neurons.degree else neurons.pairs
    if neurons.size < SMALLEST or not pairs:
        return None
    anchor, donor = (torch.cat([_sketch(pair[which], n) for n, pair in enumerate(pairs)], 1) for which in (0, 1))
    order = every = torch.arange(neurons.size, device=anchor.device)
    probe = every[:: max(1, len(every) // PROBED)]
    if float((_nearest(anchor, donor, probe) == probe).double().mean()) < 0.9:
        order = _nearest(anchor, donor, every)
        if len(order.unique()) < len(order):
            return None
    moved = neurons.reordered(order)
    halves = (moved.distances / 2).to(anchor)
    for width in WIDTHS:
        sketches = [_folded(anchor, width), _folded(donor[order], width)]
        if _all_apart(sketches, halves, probe) and _all_apart(sketches, halves, every):
            return order.cpu(), moved
    return None


def _nearest(anchor: Tensor, donor: Tensor, rows: Tensor) -> Tensor:
    """The donor's rows that lie nearest to some of the anchor's."""
    first, second = _folded(anchor, WIDTHS[1]), _folded(donor, WIDTHS[1])
    return torch.cat([near.argmax(1) for _, near in _products(first, second, second.square().sum(1) / 2, rows)])


def _all_apart(sketches: list[Tensor], halves: Tensor, rows: Tensor) -> bool:
    """Whether the sketch excludes every pair (i, j) of these rows, j != i."""
    first, second = (((1 - ROUNDING) * x.square().sum(1) - (1 + ROUNDING) * halves) / 2 for x in sketches)
    for part, near in _products(sketches[0], sketches[1], second, rows):
        near[torch.arange(len(part), device=part.device), part] = -torch.inf
        if bool((near.amax(1) > first[part]).any()):
            return False
    return True


def _products(anchor: Tensor, donor: Tensor, offsets: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """<a_i, b_j> - offset_j for some rows i of the anchor's, a few of them at a time."""
    donor = torch.cat([donor, -offsets[:, None]], 1).T
    anchor = torch.cat([anchor, torch.ones_like(anchor[:, :1])], 1)
    for part in rows.split(max(1, 2 * CACHED // donor.shape[1])):
        yield part, anchor[part] @ donor


def _folded(sketch: Tensor, width: int) -> Tensor:
    """The sketch in at most `width` dimensions: scaled sums of neighbours, so that the projection stays orthonormal."""
    times = -(-sketch.shape[1] // width)
    padded = torch.nn.functional.pad(sketch, (0, times * width - sketch.shape[1]))
    return padded.unflatten(1, (width, times)).sum(2) * times**-0.5


def _sketch(matrix: Tensor, seed: int) -> Tensor:
    """One side (n, m) projected to (n, at most 256), float32: coordinates k, k + r, k + 2 r, ... with fixed signs."""
    n, m = matrix.shape
    width = 1 << max(0, min(m // 8, WIDTHS[-1]).bit_length() - 1)
    times = m // width
    signs = (
        torch.randint(0, 2, (times, width), generator=torch.Generator().manual_seed(seed)).to(matrix.device) * 2.0 - 1
    )
    result = torch.empty(n, width, dtype=torch.float32, device=matrix.device)
    for rows in torch.arange(n, device=matrix.device).split(max(1, 2 * CACHED // m)):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        summands = matrix[part, : times * width].float().unflatten(1, (times, width))
        result[part] = (summands * signs).sum(1)
    return result * times**-0.5
