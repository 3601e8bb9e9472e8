"""Linear assignment: the permutation of largest total similarity, by exact solvers of libraries."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LARGE = 1500
"""From so many rows on lapx solves (Jonker and Volgenant, 1987), below scipy."""
TIE = 1e-12
"""Relative difference of objectives that counts as a tie with the identity."""


def assign(similarity: Tensor) -> Tensor:
    """The permutation p that maximises sum_i C[i, p[i]]; the identity wherever that is optimal, too.

    Args:
        similarity: C, shape (n, n), floating and finite, on any device; row i an anchor's, column j a donor's.

    Returns:
        p, int64, (n,), on the CPU, with ``aligned[i] = donor[p[i]]``.
    """
    matrix = similarity.detach().cpu()
    if matrix.dtype != torch.float64:
        matrix = matrix.float() if len(matrix) >= LARGE and matrix.is_floating_point() else matrix.double()
    index = toward_identity(matrix, torch.from_numpy(_solved(matrix)))
    chosen = float(matrix.gather(1, index[:, None]).double().sum())
    trace = float(matrix.diagonal().double().sum())
    return torch.arange(len(index)) if trace >= chosen - TIE * abs(chosen) else index


def _solved(matrix: Tensor) -> NDArray[np.int64]:
    """The columns of the rows."""
    if len(matrix) < LARGE:
        from scipy.optimize import linear_sum_assignment

        return np.asarray(linear_sum_assignment(matrix.numpy(), maximize=True)[1], dtype=np.int64)
    from lap import lapjvr

    costs = matrix.neg_()  # in place: it may be as large as a layer
    columns = np.asarray(lapjvr(costs.numpy(), return_cost=False)[1], dtype=np.int64)
    costs.neg_()
    return columns


def toward_identity(matrix: Tensor, permutation: Tensor) -> Tensor:
    """The permutation after all swaps of two rows that put one in its place at no cost."""
    scores = matrix.numpy()
    chosen = permutation.numpy().copy()
    n = len(chosen)
    owner = np.argsort(chosen)
    rows = np.flatnonzero(chosen != np.arange(n))
    while len(rows):
        columns, owners = chosen[rows], owner[rows]
        gain = scores[rows, rows].astype(np.float64) + scores[owners, columns]
        gain -= scores[rows, columns].astype(np.float64) + scores[owners, rows]
        moves = 0
        for row in rows[gain >= 0]:
            column, previous = chosen[row], owner[row]
            before = float(scores[row, column]) + float(scores[previous, row])
            if column != row and float(scores[row, row]) + float(scores[previous, column]) >= before:
                chosen[row], chosen[previous] = row, column
                owner[row], owner[column] = row, previous
                moves += 1
        if not moves:
            break
        rows = np.flatnonzero(chosen != np.arange(n))
    return torch.from_numpy(chosen)
