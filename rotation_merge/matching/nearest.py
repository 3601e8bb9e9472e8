r"""Near fine-tunes: proof that an order of neurons is the best one, without the similarities of all pairs.

Let D_ij be the squared distance of anchor neuron i and donor neuron j (at the pair's best scale). An order p is
optimal if D_ij >= (D_i,p(i) + D_p^-1(j),j) / 2 for all pairs: these halves are feasible prices that p attains. For Q
of orthonormal rows, |Q (a_i - b_j)|^2 over the coordinates that no rescaling touches is at most D_ij, and one narrow
matrix product compares it with the prices; the few pairs that it leaves open are evaluated exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.matching.neurons import Neurons, Pairs

SMALLEST = 64
"""Below this many neurons all similarities are cheaper."""

_WIDTHS = (16, 32, 64, 128, 256)
_PROBED = 64
_PARTS = 16  # in which nearest neighbours are looked for, until two share one
_MOST_OPEN = 8  # open pairs a neuron that are evaluated exactly
_ROUNDING = 1e-5  # share of the squared norms by which float32 may be wrong
_TIE = 1e-12
_BLOCK = 1 << 20
_CACHED = 1 << 17  # entries that are widened at a time, so that they stay in the processor's cache


def nearest_order(neurons: Neurons) -> tuple[Tensor, Neurons] | None:
    """An order proven to be the joint optimum of order and scales; None if there is no quick proof.

    Returns:
        The order, int64 (n,), and the neurons with the donor in that order.
    """
    n = neurons.size
    if n < SMALLEST or not neurons.unscaled:
        return None
    anchor, donor = (_sketch(neurons.unscaled, which) for which in (0, 1))
    index = _candidate(anchor, donor)
    if index is None:
        return None
    if not torch.equal(index.cpu(), torch.arange(n)):
        neurons, donor = neurons.reordered(index), donor[index]
    halves = neurons.distances.to(anchor.device) / 2
    probe = torch.arange(0, n, max(1, n // _PROBED), device=anchor.device)
    for width in _WIDTHS:
        anchor_sketch, right = _folded(anchor, width), _folded(donor, width)
        count = len(_open_pairs(anchor_sketch, right, halves, probe)[0])
        if count <= _MOST_OPEN * len(probe) or anchor_sketch.shape[1] == anchor.shape[1]:
            break
    if count > _MOST_OPEN * len(probe):
        return None
    i, j = _open_pairs(anchor_sketch, right, halves, torch.arange(n, device=anchor.device))
    if len(i) > 2 * _MOST_OPEN * n:
        return None
    i, j = _still_open(anchor, donor, halves, i, j)
    exact = neurons.pair_distances(i, j)
    price = halves[i] + halves[j]
    if bool((exact < price - _TIE * (exact + price)).any()):
        return None
    return index.cpu(), neurons


def least_distance(neurons: Neurons, share: int, width: int) -> float:
    """A lower bound on the squared distance under any order and scales: projected distances to nearest neighbours.

    Args:
        neurons: of the two models.
        share: one anchor neuron in this many is looked at.
        width: coordinates kept of each.
    """
    if not neurons.unscaled:
        return 0.0
    anchor, donor = (_folded(_sketch(neurons.unscaled, which), width) for which in (0, 1))
    anchor = anchor[::share]
    squares = anchor.square().sum(1), donor.square().sum(1)
    rounding = _ROUNDING * (squares[0] + squares[1].amax())
    total = 0.0
    for part in torch.arange(len(anchor), device=anchor.device).split(max(1, _BLOCK // len(donor))):
        nearest = (squares[1] / 2 - anchor[part] @ donor.T).amin(1) * 2 + squares[0][part]
        total += float((nearest - rounding[part]).clamp_min(0).sum())
    return total


def _candidate(anchor: Tensor, donor: Tensor) -> Tensor | None:
    """The identity if it looks right, else nearest neighbours if they form a permutation."""
    n = len(anchor)
    probe = torch.arange(0, n, max(1, n // _PROBED), device=anchor.device)
    own_order = torch.arange(n, device=anchor.device)
    if float((_nearest(anchor, donor, probe) == probe).double().mean()) >= 0.9:
        return own_order
    used = torch.zeros(n, dtype=torch.bool, device=anchor.device)
    nearest = []
    for rows in own_order.split(max(_PROBED, n // _PARTS)):
        nearest.append(_nearest(anchor, donor, rows))
        used[nearest[-1]] = True
        if int(used.sum()) < int(rows[-1]) + 1:
            return None
    return torch.cat(nearest)


def _nearest(anchor: Tensor, donor: Tensor, rows: Tensor) -> Tensor:
    squares = donor.square().sum(1) / 2
    step = max(1, _BLOCK // len(donor))
    return torch.cat([(anchor[part] @ donor.T - squares).argmax(1) for part in rows.split(step)])


def _open_pairs(anchor_sketch: Tensor, right: Tensor, halves: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (i, j), i in rows and j != i, not excluded by their projected distance and prices."""
    anchor_squares, donor_squares = anchor_sketch.square().sum(1), right.square().sum(1)
    offset = ((1 - _ROUNDING) * anchor_squares - halves.float() * (1 + _ROUNDING))[rows] / 2
    price = ((1 - _ROUNDING) * donor_squares - halves.float() * (1 + _ROUNDING)) / 2
    right = torch.cat([right, -price[:, None]], 1).T
    anchor_sketch = torch.cat([anchor_sketch, torch.ones_like(anchor_sketch[:, :1])], 1)
    step = max(1, 2 * _CACHED // right.shape[1])
    first, second = [], []
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        excess = anchor_sketch[part] @ right
        excess[torch.arange(len(part), device=part.device), part] = -torch.inf
        suspects = (excess.amax(1) > offset[start : start + step]).nonzero()[:, 0]
        i, j = (excess[suspects] > offset[start : start + step][suspects, None]).nonzero(as_tuple=True)
        first.append(part[suspects[i]])
        second.append(j)
    return torch.cat(first), torch.cat(second)


def _still_open(anchor: Tensor, donor: Tensor, halves: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Filter the given pairs by the whole sketch."""
    open_pairs = []
    for first, second in zip(i.split(_BLOCK // anchor.shape[1]), j.split(_BLOCK // anchor.shape[1]), strict=True):
        distance = (anchor[first] - donor[second]).square_().sum(1)
        open_pairs.append(distance * (1 - _ROUNDING) < (halves[first] + halves[second]) * (1 + _ROUNDING))
    which = torch.cat(open_pairs)
    return i[which], j[which]


def _folded(sketch: Tensor, width: int) -> Tensor:
    """The sketch in at most `width` dimensions: scaled sums of neighbours, so that the projection stays orthonormal."""
    times = -(-sketch.shape[1] // width)
    if times <= 1:
        return sketch
    padded = torch.nn.functional.pad(sketch, (0, times * width - sketch.shape[1]))
    return padded.unflatten(1, (width, times)).sum(2) * times**-0.5


def _sketch(pairs: Pairs, which: int) -> Tensor:
    """Rows projected by an orthonormal matrix: groups of coordinates summed with fixed random signs, float32 (n, r)."""
    return torch.cat([_project(pair[which], seed) for seed, pair in enumerate(pairs)], 1)


def _project(matrix: Tensor, seed: int) -> Tensor:
    """One side (n, m) as (n, r): r a power of two, at most an eighth of m (1 where that is less).

    Coordinate k is the signed sum of coordinates k, k + r, k + 2 r, ... over the root of their number.
    """
    n, m = matrix.shape
    width = 1
    while width * 8 <= m and width < _WIDTHS[-1]:
        width *= 2
    times = m // width
    signs = torch.randint(0, 2, (times, width), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    signs = signs.to(matrix.device)
    summands = matrix[:, : times * width].unflatten(1, (times, width))
    by_rows = matrix.stride(1) == 1 or m == 1
    size = times * (width if by_rows else n)
    result = torch.empty(n, width, dtype=torch.float32, device=matrix.device)
    for part in torch.arange(n if by_rows else width).split(max(1, _CACHED // size)):
        rows = slice(int(part[0]), int(part[-1]) + 1)
        if by_rows:
            result[rows] = (summands[rows].float() * signs).sum(1)
        else:
            result[:, rows] = (summands[:, :, rows].float() * signs[:, rows]).sum(1)
    return result * times**-0.5
