"""The assignment problem by column generation: match on few candidates, price all entries, add missing candidates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotation_merge.linalg._prices import best_columns, row_slacks

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

CANDIDATES = 16
_ADDED = 12
_ROUNDS = 12
_PATIENCE = 3  # rounds without a smaller gap
_GRID = 2.0**30
_RELAXATIONS = 2000
_LINGERING = 64  # sweeps in a row that move prices by less than the grid, as cycles left over from rounding do


@dataclass(frozen=True)
class AssignmentSolution:
    """A permutation, prices, and the duality gap between them (absolute)."""

    permutation: Tensor
    prices: Tensor
    gap: float


@dataclass(frozen=True)
class Edges:
    """Candidate pairs of an n x n problem, sorted by column and then by row.

    Attributes:
        n: size of the problem.
        rows: shape (m,).
        columns: shape (m,).
        weights: C[rows, columns], shape (m,).
    """

    n: int
    rows: Ints
    columns: Ints
    weights: Floats

    @staticmethod
    def build(similarity: Tensor, keys: Ints) -> Edges:
        """Edges from unique keys column * n + row."""
        n = similarity.shape[0]
        by_row = keys[np.argsort(keys % n, kind="stable")]  # in the order in which the matrix is stored
        columns, rows = np.divmod(by_row, n)
        weights = similarity[torch.from_numpy(rows), torch.from_numpy(columns)].double().numpy()
        return Edges(n, rows, columns, weights).sorted()

    def sorted(self) -> Edges:
        """The same edges in their order."""
        order = np.argsort(edge_keys(self.rows, self.columns, self.n))
        return Edges(self.n, self.rows[order], self.columns[order], self.weights[order])

    def extended(self, similarity: Tensor, keys: Ints) -> Edges:
        """These edges and those of the keys that are not among them."""
        fresh = Edges.build(similarity, np.setdiff1d(keys, edge_keys(self.rows, self.columns, self.n)))
        pairs = ((self.rows, fresh.rows), (self.columns, fresh.columns))
        rows, columns = (np.concatenate(pair) for pair in pairs)
        return Edges(self.n, rows, columns, np.concatenate([self.weights, fresh.weights])).sorted()


def edge_keys(rows: Ints, columns: Ints, n: int) -> Ints:
    """column * n + row."""
    return columns * n + rows


def match(edges: Edges, prices: Floats) -> Ints:
    """Best perfect matching on the edges (there must be one), up to rounding of reduced costs to a 2^-30 grid.

    Unrounded near-ties make the solver crawl. Prices only change the reduced costs, never the optimum.

    Returns:
        p, shape (n,), with p[i] the column of row i.
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import min_weight_full_bipartite_matching

    reduced = edges.weights - prices[edges.columns]
    best = np.full(edges.n, -np.inf)
    np.maximum.at(best, edges.rows, reduced)
    costs = best[edges.rows] - reduced
    scale = float(costs.max(initial=0.0)) or 1.0
    costs = 1.0 + np.round(costs / scale * _GRID) / _GRID
    graph = csr_matrix((costs, (edges.rows, edges.columns)), shape=(edges.n, edges.n))
    rows, columns = min_weight_full_bipartite_matching(graph)
    permutation = np.empty(edges.n, dtype=np.int64)
    permutation[rows] = columns
    return permutation


def relax(edges: Edges, permutation: Ints, prices: Floats) -> Floats:
    """Smallest prices >= the given ones under which each p(i) is a best candidate of row i (Bellman-Ford).

    Raises v_j to v_p(i) + C_ij - C_i,p(i) until nothing moves by more than rounding.
    """
    attained = np.empty(edges.n)
    chosen = permutation[edges.rows] == edges.columns
    attained[edges.rows[chosen]] = edges.weights[chosen]
    source = permutation[edges.rows]
    gain = edges.weights - attained[edges.rows]
    occupied, start = np.unique(edges.columns, return_index=True)
    prices = prices.copy()
    tolerance = 1e-15 * float(np.abs(edges.weights).max(initial=0.0))
    spread = float((gain + prices[source] - prices[edges.columns]).min(initial=0.0))
    lingering = 0
    for _ in range(_RELAXATIONS):
        raised = np.maximum.reduceat(prices[source] + gain, start)
        change = float((raised - prices[occupied]).max(initial=0.0))
        lingering = lingering + 1 if change * _GRID <= -spread else 0
        if change <= tolerance or lingering == _LINGERING:
            break
        prices[occupied] = np.maximum(prices[occupied], raised)
    return prices


def solve_sparse(
    similarity: Tensor,
    prices: Tensor,
    accept: float,
    candidates: int = CANDIDATES,
    rounds: int = _ROUNDS,
) -> AssignmentSolution:
    """Maximise sum_i C[i, p(i)] from rough prices.

    Args:
        similarity: C, shape (n, n), on the CPU.
        prices: rough prices, shape (n,), float64.
        accept: duality gap (relative to the value) at which to stop.
        candidates: columns kept for each row at the start.
        rounds: most rounds of matching and pricing.

    Returns:
        The best permutation met and its prices; the gap is true whatever it is.
    """
    n = similarity.shape[0]
    every = np.arange(n, dtype=np.int64)
    columns = best_columns(similarity, prices, min(candidates, n)).numpy()
    keys = np.union1d(edge_keys(np.repeat(every, columns.shape[1]), columns.ravel(), n), edge_keys(every, every, n))
    edges = Edges.build(similarity, keys)
    best: AssignmentSolution | None = None
    stalled = 0
    for _ in range(rounds):
        matched = match(edges, prices.numpy())
        prices = torch.from_numpy(relax(edges, matched, prices.numpy()))
        permutation = torch.from_numpy(matched)
        slacks = row_slacks(similarity, permutation, prices)
        gap = float(slacks.sum())
        stalled = 0 if best is None or gap < best.gap else stalled + 1
        if best is None or gap < best.gap:
            best = AssignmentSolution(permutation, prices, gap)
        value = float(similarity.gather(1, permutation[:, None]).double().sum())
        if gap <= accept * abs(value) or stalled == _PATIENCE:
            break
        violated = torch.nonzero(slacks > 0)[:, 0]
        added = best_columns(similarity, prices, min(_ADDED, n), violated).numpy()
        fresh = edge_keys(np.repeat(violated.numpy(), added.shape[1]), added.ravel(), n)
        grown = edges.extended(similarity, fresh)
        if len(grown.rows) == len(edges.rows):
            break
        edges = grown
    assert best is not None
    return best
