"""Assignment with a factored similarity matrix that is never formed.

The similarity is given by its factors. Projected rows bound all pairs; only the remaining pairs are evaluated.

With Q of orthonormal rows and R = I - Q^T Q, <a, b> <= <Qa, Qb> + |Ra| |Rb|, and the same holds for |<a, b>| with
|<Qa, Qb>|. Q sums groups of coordinates with random signs, so a projection costs one pass over the factors, and a
projection of half the width is the sum of the two halves of a wider one. Residual norms are appended to the projected
rows as coordinates of their own, so one narrow product tells which pairs stay open. The squared residual norms are
enlarged by a share of the squared norms, which by Cauchy-Schwarz raises every bound by at least that share of |a| |b|,
more than float32 can lose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rotation_merge.linalg._sparse import AssignmentSolution, Edges, edge_keys, match, relax

Pairs = tuple[tuple[Tensor, Tensor], ...]

_GATHERED = 1 << 17  # entries of one factor gathered at a time
_FORMED_ROWS = 1024
_DOUBLE_UP_TO = 4096


@dataclass(frozen=True)
class Factors:
    """C_ij = sum_k <A_k[i], B_k[j]> + |sum_l <S_l[i], T_l[j]>|.

    Attributes:
        plain: the pairs (A_k, B_k), each (n, d_k).
        signed: the pairs (S_l, T_l), each (n, d_l).
    """

    plain: Pairs
    signed: Pairs

    @property
    def pairs(self) -> Pairs:
        """All pairs, plain ones first."""
        return self.plain + self.signed

    @property
    def n(self) -> int:
        """Size of the problem."""
        return int(self.pairs[0][0].shape[0])

    @property
    def width(self) -> int:
        """Multiplications in one entry."""
        return sum(anchor.shape[1] for anchor, _ in self.pairs)

    def equal(self) -> bool:
        """Whether every donor factor equals its anchor factor; then the identity is optimal (Cauchy-Schwarz)."""
        return all(torch.equal(anchor, donor) for anchor, donor in self.pairs)

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """C[rows, columns] in float64 on the CPU, shape (len(rows),)."""
        plain, signed = _summed(self.plain, rows, columns, len(rows)), _summed(self.signed, rows, columns, len(rows))
        return plain + signed.abs()

    def diagonal(self) -> Tensor:
        """C_ii in float64 on the CPU, shape (n,)."""
        return _summed(self.plain, None, None, self.n) + _summed(self.signed, None, None, self.n).abs()


def _summed(pairs: Pairs, rows: Tensor | None, columns: Tensor | None, count: int) -> Tensor:
    total = torch.zeros(count, dtype=torch.float64)
    for anchor, donor in pairs:
        device = anchor.device
        step = max(1, (_GATHERED if device.type == "cpu" else _GATHERED << 8) // max(1, anchor.shape[1]))
        for start in range(0, count, step):
            part = slice(start, start + step)
            first = anchor[part if rows is None else rows[part].to(device)].double()
            second = donor[part if columns is None else columns[part].to(donor.device)].to(device).double()
            total[part] += torch.linalg.vecdot(first, second).cpu()
    return total


def form(factors: Factors) -> Tensor:
    """C, shape (n, n), on the factors' device: float32, or float64 if all factors are and n is at most 4096."""
    n = factors.n
    double = n <= _DOUBLE_UP_TO and all(side.dtype == torch.float64 for pair in factors.pairs for side in pair)
    dtype = torch.float64 if double else torch.float32
    device = factors.pairs[0][0].device
    plain = [(anchor.to(device, dtype), donor.to(device, dtype)) for anchor, donor in factors.plain]
    signed = [(anchor.to(device, dtype), donor.to(device, dtype)) for anchor, donor in factors.signed]
    formed = torch.zeros(n, n, dtype=dtype, device=device)
    for start in range(0, n, _FORMED_ROWS):
        part = slice(start, start + _FORMED_ROWS)
        rows = formed[part]
        for anchor, donor in signed:
            rows.addmm_(anchor[part], donor.T)
        rows.abs_()
        for anchor, donor in plain:
            rows.addmm_(anchor[part], donor.T)
    return formed


_WIDEST = 256  # coordinates kept of each factor
_NARROWEST = 16
_PROBED_ROWS = 128
_ROUNDS = 5
_BLOCK_ENTRIES = 1 << 19
_ALLOWANCE = 1e-4  # share of |a| |b| by which bounds are raised to cover float32 rounding
_ROUNDING = 1e-6  # the same for prices and thresholds
_GATHER_COST = 10.0  # time of one gathered multiplication over that of one inside a matrix product


@dataclass(frozen=True)
class Sketch:
    """Projected factors of one side.

    Attributes:
        plain: projections of the plain factors, each (n, r_k).
        signed: projections of the signed factors, each (n, r_l).
        norms: squared row norms of the plain factors and then of the signed ones taken together, each (n,).
    """

    plain: tuple[Tensor, ...]
    signed: tuple[Tensor, ...]
    norms: tuple[Tensor, ...]

    def halved(self) -> Sketch:
        """The same rows projected to half as many dimensions."""
        return Sketch(tuple(map(_fold, self.plain)), tuple(map(_fold, self.signed)), self.norms)

    def side(self) -> tuple[Tensor, Tensor]:
        """Coordinates with products that bound the similarity: unsigned ones with residual norms, and signed ones."""
        residuals = []
        signed = torch.cat(self.signed, 1) if self.signed else self.norms[0].new_zeros(len(self.norms[0]), 0)
        parts = [*self.plain, signed] if self.signed else list(self.plain)
        for part, norm in zip(parts, self.norms, strict=True):
            residual = (norm - torch.linalg.vecdot(part, part)).clamp_min_(0) + _ALLOWANCE * norm
            residuals.append(residual.sqrt_()[:, None])
        return torch.cat([*self.plain, *residuals], 1), signed

    @property
    def width(self) -> int:
        """Coordinates in all."""
        return sum(part.shape[1] for part in (*self.plain, *self.signed))


def _fold(part: Tensor) -> Tensor:
    half = part.shape[1] // 2
    if half < _NARROWEST or part.shape[1] % 2:
        return part
    return (part[:, :half] + part[:, half:]) * 0.5**0.5


def _sketch(plain: tuple[Tensor, ...], signed: tuple[Tensor, ...], seed: int) -> Sketch:
    pieces = [_project(factor, seed + index) for index, factor in enumerate((*plain, *signed))]
    norms = [norm for _, norm in pieces]
    together = [sum(norms[len(plain) + 1 :], norms[len(plain)])] if signed else []
    projected = tuple(piece for piece, _ in pieces)
    return Sketch(projected[: len(plain)], projected[len(plain) :], tuple(norms[: len(plain)]) + tuple(together))


def _project(factor: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Rows projected to a power of two of dimensions and their squared norms; float32, CPU."""
    n, d = factor.shape
    width = min(_WIDEST, 1 << max(0, d.bit_length() - 3))
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (d,), generator=generator).mul_(2).sub_(1).float()
    groups = d // width
    remainder = d - groups * width
    counts = torch.full((width,), float(groups))
    counts[:remainder] += 1
    scale, signs = counts.rsqrt().to(factor.device), signs.to(factor.device)
    projected, norms = torch.empty(n, width), torch.empty(n)
    step = max(1, _BLOCK_ENTRIES // max(d, 1))
    for start in range(0, n, step):
        rows = factor[start : start + step].float()
        norms[start : start + step] = torch.linalg.vecdot(rows, rows).cpu()
        turned = rows * signs
        sums = turned[:, : groups * width].view(len(rows), groups, width).sum(1)
        sums[:, :remainder] += turned[:, groups * width :]
        projected[start : start + step] = (sums * scale).cpu()
    return projected, norms


@dataclass(frozen=True)
class Bound:
    """Upper bounds of C_ij for all pairs, as products of narrow rows.

    Attributes:
        anchor: anchor side, plain coordinates and signed ones.
        donor: donor side.
    """

    anchor: tuple[Tensor, Tensor]
    donor: tuple[Tensor, Tensor]

    @staticmethod
    def of(anchor: Sketch, donor: Sketch) -> Bound:
        """The bound of two sides projected alike."""
        return Bound(anchor.side(), donor.side())

    def open_pairs(self, rows: Tensor, thresholds: Tensor, prices: Tensor, limit: int) -> tuple[Tensor, Tensor] | None:
        """All pairs (i, j), i in rows, that may have C_ij > t_i + v_j; None if there are more than limit."""
        (anchor, signed_anchor), (donor, signed_donor) = self.anchor, self.donor
        lower, price = _lowered(thresholds[rows])[:, None], _lowered(prices)
        step = max(1, _BLOCK_ENTRIES // len(prices))
        candidates: list[Tensor] = []
        total = 0
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            excess = anchor[part] @ donor.T
            if signed_donor.shape[1]:
                excess += (signed_anchor[part] @ signed_donor.T).abs_()
            open_ones = excess.sub_(price) > lower[start : start + step]
            flat = torch.from_numpy(np.flatnonzero(open_ones.numpy())) + start * len(prices)
            total += len(flat)
            if total > limit:
                return None
            candidates.append(flat)
        pairs = torch.cat(candidates) if candidates else torch.zeros(0, dtype=torch.int64)
        return rows[pairs // len(prices)], pairs % len(prices)

    def keep(self, rows: Tensor, columns: Tensor, thresholds: Tensor, prices: Tensor) -> Tensor:
        """Whether the bound leaves each of the given pairs open, shape (len(rows),), bool."""
        (anchor, signed_anchor), (donor, signed_donor) = self.anchor, self.donor
        lower, price = _lowered(thresholds), _lowered(prices)
        open_pairs = torch.empty(len(rows), dtype=torch.bool)
        step = max(1, _BLOCK_ENTRIES // max(1, anchor.shape[1]))
        for start in range(0, len(rows), step):
            i, j = rows[start : start + step], columns[start : start + step]
            excess = torch.linalg.vecdot(anchor[i], donor[j])
            if signed_anchor.shape[1]:
                excess += torch.linalg.vecdot(signed_anchor[i], signed_donor[j]).abs_()
            open_pairs[start : start + step] = excess - price[j] > lower[i]
        return open_pairs


def _lowered(values: Tensor) -> Tensor:
    return (values - _ROUNDING * values.abs()).float()


def solve_projected(factors: Factors, diagonal: Tensor) -> AssignmentSolution | None:
    """The best permutation with a proof, from bounds and few exact entries; None if forming C is cheaper.

    Every pair is either evaluated or known to satisfy C_ij <= t_i + v_j. Solving the assignment on the evaluated pairs
    only raises prices, so the proof holds until a row's optimum falls below its t_i; such rows are bounded again.

    Args:
        factors: the similarity, size n.
        diagonal: its diagonal, shape (n,), float64.
    """
    fine = (_sketch_side(factors, 0), _sketch_side(factors, 1))
    bound = Bound.of(*fine)
    start = _starting_point(factors, diagonal, bound)
    if start is None:
        return None
    permutation, prices, thresholds = start
    coarse = _cheapest(factors, fine, bound, thresholds, prices)
    if coarse is None:
        return None
    return _column_generation(factors, (coarse, bound), permutation, prices, thresholds)


def _sketch_side(factors: Factors, side: int) -> Sketch:
    def take(pairs: Pairs) -> tuple[Tensor, ...]:
        return tuple(pair[side] for pair in pairs)

    return _sketch(take(factors.plain), take(factors.signed), seed=0)


def _starting_point(factors: Factors, diagonal: Tensor, fine: Bound) -> tuple[Tensor, Tensor, Tensor] | None:
    """A permutation p, prices C_p^-1(j),j / 2 and thresholds C_i,p(i) / 2; None if no permutation is in sight."""
    n = factors.n
    squares = (fine.donor[0].square().sum(1) + fine.donor[1].square().sum(1)) / 2
    permutation = torch.arange(n)
    probe = torch.arange(0, n, max(1, n // _PROBED_ROWS))
    if float((_nearest(fine, probe, squares) == probe).double().mean()) < 0.9:
        permutation = _nearest(fine, permutation, squares)
        if len(torch.unique(permutation)) < n:
            return None
        diagonal = factors.entries(torch.arange(n), permutation)
    prices = torch.empty_like(diagonal)
    prices[permutation] = diagonal / 2
    return permutation, prices, diagonal / 2


def _nearest(bound: Bound, rows: Tensor, squares: Tensor) -> Tensor:
    """Column with the largest bound less price for each row, shape (len(rows),)."""
    nearest = torch.empty(len(rows), dtype=torch.int64)
    (anchor, signed_anchor), (donor, signed_donor) = bound.anchor, bound.donor
    price = squares
    step = max(1, _BLOCK_ENTRIES // len(squares))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        score = anchor[part] @ donor.T - price
        if signed_donor.shape[1]:
            score += (signed_anchor[part] @ signed_donor.T).abs_()
        nearest[start : start + step] = score.argmax(1)
    return nearest


def _cheapest(
    factors: Factors, fine: tuple[Sketch, Sketch], bound: Bound, thresholds: Tensor, prices: Tensor
) -> Bound | None:
    """The projection of least estimated work, judged on some rows; None if forming C is estimated to be cheaper."""
    n = factors.n
    probe = torch.arange(0, n, max(1, n // _PROBED_ROWS))
    least, best = 0.5 * factors.width * float(n) ** 2, None
    sketches, exact = fine, None
    while True:
        pairs = bound.open_pairs(probe, thresholds, prices, len(probe) * n)
        assert pairs is not None
        count = len(pairs[0]) * n / len(probe)
        exact = count * factors.width * _GATHER_COST if exact is None else exact
        work = sketches[0].width * float(n) ** 2 + count * fine[0].width * _GATHER_COST + exact
        if work < least:
            least, best = work, bound
        halved = (sketches[0].halved(), sketches[1].halved())
        if halved[0].width == sketches[0].width:
            return best
        sketches, bound = halved, Bound.of(*halved)


def _column_generation(
    factors: Factors, bounds: tuple[Bound, Bound], permutation: Tensor, prices: Tensor, thresholds: Tensor
) -> AssignmentSolution | None:
    n = factors.n
    rows = torch.arange(n)
    limit = max(64 * n, n * n // 50)
    keys = edge_keys(rows.numpy(), permutation.numpy(), n)
    keys, weights = np.sort(keys), factors.entries(*_pairs(np.sort(keys), n)).numpy()
    for _ in range(_ROUNDS):
        pairs = bounds[0].open_pairs(rows, thresholds, prices, limit)
        if pairs is None:
            return None
        open_pairs = bounds[1].keep(*pairs, thresholds, prices)
        fresh = np.setdiff1d(edge_keys(pairs[0][open_pairs].numpy(), pairs[1][open_pairs].numpy(), n), keys)
        merged = np.concatenate([keys, fresh])
        order = np.argsort(merged)
        weights = np.concatenate([weights, factors.entries(*_pairs(fresh, n)).numpy()])[order]
        keys = merged[order]
        edges = Edges(n, keys % n, keys // n, weights)
        prices, utility, permutation, gap = _restricted(edges, permutation, prices)
        rows = torch.nonzero(utility < thresholds)[:, 0]
        if not len(rows):
            return AssignmentSolution(permutation, prices, gap)
        thresholds = torch.minimum(thresholds, utility)
    return None


def _pairs(keys: np.ndarray, n: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(keys % n), torch.from_numpy(keys // n)


def _restricted(edges: Edges, permutation: Tensor, prices: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Raised prices, C_i,p(i) - v_p(i), the best permutation and its gap on the evaluated pairs."""
    price, chosen = prices.numpy(), permutation.numpy()
    attained, best = _own_and_best(edges, chosen, price)
    if np.any(best > attained):
        chosen = match(edges, price)
        price = relax(edges, chosen, price)
        attained, best = _own_and_best(edges, chosen, price)
    return torch.from_numpy(price), torch.from_numpy(attained), torch.from_numpy(chosen), float((best - attained).sum())


def _own_and_best(edges: Edges, chosen: np.ndarray, price: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    reduced = edges.weights - price[edges.columns]
    best = np.full(edges.n, -np.inf)
    np.maximum.at(best, edges.rows, reduced)
    attained = np.empty(edges.n)
    assigned = chosen[edges.rows] == edges.columns
    attained[edges.rows[assigned]] = reduced[assigned]
    return attained, best
