"""Statistics of FFN neurons for matching: norms, distances and similarities.

A neuron's squared distance under a scale a on its in side and 1/a^k on its out side (k the activation's degree) is

    |A_in - a B_in|^2 + |A_gate - B_gate|^2 + |A_out - B_out / a^k|^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.linalg.scaling import best_scale, least_cost

Pairs = list[tuple[Tensor, Tensor]]
"""(anchor, donor) matrices, (n, m) each, of any strides."""

_BLOCK = 1 << 17  # entries widened at a time
_CACHED = 1 << 16  # the same where each is looked at several times, so that they stay in the processor's cache
_ROWS = 1 << 22  # entries of a block of rows of the similarity


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
        signed: the activation admits any nonzero scale (gated).
        degree: k; 0 where neurons may not be rescaled.
    """

    ins: Pairs
    gates: Pairs
    outs: Pairs
    signed: bool
    degree: int

    @property
    def rescales(self) -> bool:
        """Whether neurons may be rescaled."""
        return self.degree > 0

    @property
    def pairs(self) -> Pairs:
        """All sides."""
        return [*self.ins, *self.gates, *self.outs]

    @property
    def unscaled(self) -> Pairs:
        """The sides that no rescaling touches."""
        return self.gates if self.rescales else self.pairs

    @property
    def size(self) -> int:
        """n."""
        return len(self.pairs[0][0])

    @property
    def device(self) -> torch.device:
        """The anchor's device."""
        return self.pairs[0][0].device

    def reordered(self, index: Tensor) -> Neurons:
        """The donor's neurons in another order (a copy)."""

        def moved(pairs: Pairs) -> Pairs:
            return [(a, b[index.to(b.device)]) for a, b in pairs]

        return Neurons(moved(self.ins), moved(self.gates), moved(self.outs), self.signed, self.degree)

    @cached_property
    def rows(self) -> tuple[Row, Row, Row]:
        """Statistics of ins, gates and outs in the donor's own order."""
        return _rows(self.ins, self), _rows(self.gates, self), _rows(self.outs, self)

    @cached_property
    def factor(self) -> Tensor:
        """Every neuron's best scale in the donor's own order, float64 (n,)."""
        ins, _, outs = self.rows
        if not self.rescales:
            return torch.ones_like(ins.anchor)
        return best_scale(ins.donor, outs.donor, ins.inner, outs.inner, self.signed, self.degree)

    @cached_property
    def distances(self) -> Tensor:
        """Every neuron's squared distance in the donor's own order with the best scales, float64 (n,)."""
        ins, gates, outs = self.rows
        if not self.rescales:
            return ins.distance + gates.distance + outs.distance
        return ins.scaled(self.factor) + gates.distance + outs.scaled(self.factor**-self.degree)

    @property
    def before(self) -> float:
        """Squared distance before matching."""
        return float(sum(row.distance.sum() for row in self.rows))

    @property
    def anchor_norm(self) -> float:
        """Squared norm of the anchor."""
        return float(sum(row.anchor.sum() for row in self.rows))

    def pair_distances(self, i: Tensor, j: Tensor) -> Tensor:
        """Squared distances of anchor neurons i and donor neurons j with the best scale of each pair, float64 (N,)."""
        ins, gates, outs = (_pair_rows(pairs, i, j, self) for pairs in (self.ins, self.gates, self.outs))
        picked = Neurons([], [], [], self.signed, self.degree)
        picked.__dict__["rows"] = (ins, gates, outs)
        return picked.distances

    def similarity(self) -> Tensor:
        """C, (n, n): half of the reduction of the squared norms by each pair, with its best scale.

        With rescaling C_ij = max_a <A_i, a B_j>_in + <A_i, B_j>_gate + <A_i, B_j / a^k>_out - (a^2 |B_j|_in^2 +
        |B_j|_out^2 / a^2k) / 2, so that the assignment over C is the joint optimum of order, signs and scales. Formed
        in blocks of rows, in float32 (float64 for float64 sides).
        """
        double = all(torch.float64 in (a.dtype, b.dtype) for a, b in self.pairs)
        dtype = torch.float64 if double else torch.float32
        n = self.size
        result = torch.empty(n, n, dtype=dtype, device=self.device)
        donor = [[b.to(result) for _, b in pairs] for pairs in (self.ins, self.gates, self.outs)]
        primal, dual = (row.donor.to(result)[None] for row in (self.rows[0], self.rows[2]))
        step, cached = max(1, _ROWS // n), max(1, _CACHED // n)
        for start in range(0, n, step):
            part = slice(start, start + step)
            p, gate, q = (
                _products([a[part] for a, _ in pairs], moved, result)
                for pairs, moved in zip((self.ins, self.gates, self.outs), donor, strict=True)
            )
            if self.rescales:
                for c in (slice(s, s + cached) for s in range(0, len(p), cached)):
                    least = least_cost(primal, dual, p[c], q[c], self.signed, self.degree)
                    torch.sub(gate[c] if self.gates else gate, least, alpha=0.5, out=result[part][c])
            else:
                result[part] = p + gate + q
        return result


def _products(rows: list[Tensor], donor: list[Tensor], like: Tensor) -> Tensor:
    """The sum of A B^T over the pairs, (len(rows), n); a row of zeros where there is none."""
    if not rows:
        return like.new_zeros(1, like.shape[1])
    total = rows[0].to(like) @ donor[0].T
    for a, b in zip(rows[1:], donor[1:], strict=True):
        total.addmm_(a.to(like), b.T)
    return total


def _rows(pairs: Pairs, neurons: Neurons) -> Row:
    total = torch.zeros(3, neurons.size, dtype=torch.float64, device=neurons.device)
    for pair in pairs:
        for part, a, b in _blocks(*pair):
            total[0, part] += (a * a).sum(1)
            total[1, part] += (b * b).sum(1)
            total[2, part] += (a - b).square_().sum(1)
    return Row(*total)


def _pair_rows(pairs: Pairs, i: Tensor, j: Tensor, neurons: Neurons) -> Row:
    total = torch.zeros(3, len(i), dtype=torch.float64, device=neurons.device)
    for a, b in pairs:
        step = max(1, _BLOCK // a.shape[1])
        for start in range(0, len(i), step):
            part = slice(start, start + step)
            x, y = a[i[part].to(a.device)].double(), b[j[part].to(b.device)].double()
            total[:, part] += torch.stack([(x * x).sum(1), (y * y).sum(1), (x - y).square_().sum(1)])
    return Row(*total)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Blocks of (n, m) matrices, widened to float32 at least: rows, or columns if these are contiguous."""
    n, m = a.shape
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    if a.stride(1) == 1 or m == 1:
        step = max(1, _CACHED // m)
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            yield part, a[part].to(dtype), b[part].to(a.device, dtype)
        return
    step = max(1, _CACHED // n)
    for start in range(0, m, step):
        columns = slice(start, start + step)
        yield slice(0, n), a[:, columns].to(dtype), b[:, columns].to(a.device, dtype)
