"""Column prices for the assignment problem: guesses, and the bounds that they prove.

A price vector v is a dual solution: for every permutation p, sum_i C[i, p[i]] <= sum_j v_j + sum_i max_j (C_ij - v_j).
All passes run over blocks of rows that fit the cache, so nothing of size n x n is ever copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ENTRIES = 1 << 18
_SAMPLE_ROWS = 256
_EXP_FLOOR = -80.0  # below it float32 exp underflows, which is an order of magnitude slower
_TINY = 1e-30
_ROUNDS = 12
_OVER_RELAXATION = 1.9
_COOLING = 0.7
_PROBED_COLUMNS = 768


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of consecutive rows, each of about ``_BLOCK_ENTRIES`` entries."""
    step = max(1, _BLOCK_ENTRIES // max(columns, 1))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def row_maxima(similarity: Tensor, prices: Tensor) -> Tensor:
    """max_j (C_ij - v_j) for each row i, in float64.

    Args:
        similarity: C, shape (m, n).
        prices: v, shape (n,), float64.

    Returns:
        Shape (m,), float64.
    """
    rows, columns = similarity.shape
    result = torch.empty(rows, dtype=torch.float64)
    buffer = torch.empty(min(rows, max(1, _BLOCK_ENTRIES // max(columns, 1))), columns, dtype=torch.float64)
    for block in row_blocks(rows, columns):
        reduced = buffer[: block.stop - block.start]
        reduced.copy_(similarity[block])
        reduced.sub_(prices)
        torch.amax(reduced, 1, out=result[block])
    return result


def row_slacks(similarity: Tensor, permutation: Tensor, prices: Tensor) -> Tensor:
    """max_j (C_ij - v_j) - (C_i,p(i) - v_p(i)) for each row i, in float64; their sum is the duality gap of p and v.

    Args:
        similarity: C, shape (n, n).
        permutation: p, shape (n,), int64.
        prices: v, shape (n,), float64.

    Returns:
        Shape (n,), float64, never negative; zero in a row exactly if p(i) is a best column of that row under v.
    """
    attained = similarity.gather(1, permutation[:, None])[:, 0].double() - prices[permutation]
    return row_maxima(similarity, prices) - attained


def best_columns(similarity: Tensor, prices: Tensor, count: int, rows: Tensor | None = None) -> Tensor:
    """The ``count`` best columns of each row under C - v; near-ties are broken by a fixed row-dependent jitter.

    Without the jitter all rows of a matrix with many equal entries would choose the same few columns.

    Args:
        similarity: C, shape (n, n).
        prices: v, shape (n,), float64.
        count: columns for each row, at most n.
        rows: int64 indices of the rows wanted; all of them if None.

    Returns:
        int64, shape (number of rows, count), unordered.
    """
    n = similarity.shape[1]
    indices = torch.arange(similarity.shape[0]) if rows is None else rows
    prices = prices.to(similarity.dtype)
    result = torch.empty(len(indices), count, dtype=torch.int64)
    noise = _jitter(similarity, 2 * n)
    for block in row_blocks(len(indices), n):
        chosen = indices[block]
        source = similarity[block] if rows is None else similarity[chosen]
        reduced = source - prices
        reduced += noise.as_strided((len(chosen), n), (1, 1), int(chosen[0]) % n) if len(chosen) <= n else 0.0
        result[block] = reduced.topk(count, dim=1, sorted=False).indices
    return result


def _jitter(similarity: Tensor, length: int) -> Tensor:
    scale = 1e-5 * float(_sample(similarity).double().std())
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(length + _BLOCK_ENTRIES, generator=generator, dtype=torch.float32)
    return noise.to(similarity.dtype).mul_(scale)


def _sample(similarity: Tensor) -> Tensor:
    step = max(1, similarity.shape[0] // _SAMPLE_ROWS)
    return similarity[::step]


def planted_prices(similarity: Tensor) -> Tensor | None:
    """Prices that prove a planted permutation, if nearly every column has one clear row.

    Each column j picks the row i where C_ij is largest against the row's spread, and v_j = C_ij / 2: if
    C_ij <= (C_i,p(i) + C_p^-1(j),j) / 2 everywhere, as between a model and its fine-tune, these prices prove p.
    A probe of some columns must collide far less often than independent choices would.

    Args:
        similarity: C, shape (n, n).

    Returns:
        float64, shape (n,); None where columns compete for the same rows.
    """
    n = similarity.shape[1]
    probed = min(n, max(_PROBED_COLUMNS, n // 18))
    if not _single_out(_favourite_rows(similarity[:, :probed]), n):
        return None
    partner = _favourite_rows(similarity)
    return similarity[partner, torch.arange(n)].double() / 2 if _single_out(partner, n) else None


def _single_out(favourites: Tensor, rows: int) -> bool:
    """Whether the columns' favourite rows collide less than a quarter as often as random ones."""
    chosen = len(favourites)
    expected = chosen - rows * (1.0 - (1.0 - 1.0 / rows) ** chosen)
    return chosen - len(torch.unique(favourites)) <= expected / 4


def _favourite_rows(similarity: Tensor) -> Tensor:
    """Row of the largest entry of each column, in units of that row's standard deviation, shape (columns,)."""
    columns = similarity.shape[1]
    best = torch.full((columns,), -torch.inf, dtype=similarity.dtype)
    favourite = torch.zeros(columns, dtype=torch.int64)
    for block in row_blocks(*similarity.shape):
        rows = similarity[block]
        spread = rows.std(1, correction=0, keepdim=True).clamp_min_(_TINY)
        value, index = (rows / spread).max(0)
        better = value > best
        best = torch.where(better, value, best)
        favourite = torch.where(better, index + block.start, favourite)
    return favourite


def annealed_prices(similarity: Tensor) -> Tensor:
    """Rough prices from over-relaxed Sinkhorn sweeps in the matrix's own precision at falling temperatures.

    Args:
        similarity: C, shape (n, n).

    Returns:
        float64, shape (n,).
    """
    prices = torch.zeros(similarity.shape[1], dtype=similarity.dtype)
    temperature = float(_sample(similarity).double().std())
    if temperature <= _TINY:
        return prices.double()
    for _ in range(_ROUNDS):
        load = _soft_load(similarity, prices, temperature)
        prices += _OVER_RELAXATION * temperature * load.clamp_min_(_TINY).log_()
        temperature *= _COOLING
    return prices.double()


def _soft_load(similarity: Tensor, prices: Tensor, temperature: float) -> Tensor:
    """Column sums of the row-wise softmax of (C - v) / temperature, shape (n,)."""
    rows, columns = similarity.shape
    load, offset = torch.zeros(columns, dtype=similarity.dtype), prices * (-1.0 / temperature)
    buffer = similarity.new_empty(min(rows, max(1, _BLOCK_ENTRIES // columns)), columns)
    for block in row_blocks(rows, columns):
        soft = buffer[: block.stop - block.start]
        torch.add(offset, similarity[block], alpha=1.0 / temperature, out=soft)
        soft.sub_(soft.amax(1, keepdim=True)).clamp_(min=_EXP_FLOOR).exp_()
        load += soft.sum(1).reciprocal_() @ soft
    return load
