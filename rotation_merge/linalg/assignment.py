"""Linear assignment: the permutation of largest total similarity, proven optimal or with a bound on the gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotation_merge.errors import RotationMergeError
from rotation_merge.linalg._prices import annealed_prices, planted_prices, row_blocks, row_maxima, row_slacks
from rotation_merge.linalg._projection import Factors, form, solve_projected
from rotation_merge.linalg._sparse import AssignmentSolution, solve_sparse

_DENSE_BELOW = 1500  # smaller problems go to scipy's dense solver at once
_DENSE_AGAIN = 4096  # up to this size a sparse solution with a gap is handed to the dense solver
_FEW_ROUNDS, _MANY_ROUNDS = 6, 12  # of the sparse solver, with and without a dense solver to fall back on
_ACCEPT = 1e-9  # relative gap at which the sparse solver stops
_GOOD = 1e-8  # relative gap that is not worth a dense solve
_USABLE = 1e-3  # relative gap below which prices help the dense solver
_TIE = 1e-12  # relative difference of objectives that counts as a tie with the identity
_TINY = float(np.finfo(np.float64).tiny)
_EPSILON = float(np.finfo(np.float64).eps)


class AssignmentInputError(RotationMergeError, ValueError):
    """The similarity or its factors have the wrong shape or type, or are not finite."""


@dataclass(frozen=True)
class Assignment:
    """An assignment with a bound on its gap to the optimum.

    Attributes:
        permutation: p, int64, shape (n,), on the CPU, with ``aligned[i] = donor[p[i]]``.
        value: sum_i C[i, p[i]], summed in float64.
        gap: certified bound on (optimum - value) / max(|value|, tiny); 0.0 when proven optimal, up to the rounding of
            float64 sums.
        method: the route that ended it: "identity", "dense", "nearest" (planted prices), "sparse" (annealed prices),
            "projection" (similarity never formed).
    """

    permutation: Tensor
    value: float
    gap: float
    method: str


def assign(similarity: Tensor) -> Assignment:
    """Permutation p maximising sum_i C[i, p[i]]; the identity wherever that is optimal too.

    Args:
        similarity: C, shape (n, n), floating, any device; row i an anchor's neuron, column j a donor's.

    Returns:
        The assignment; entries are used as they are (half precision is widened), sums are float64.

    Raises:
        AssignmentInputError: not square, not floating, or not finite.
    """
    matrix = _checked(similarity)
    n = matrix.shape[0]
    identity = torch.arange(n)
    if n < 2:
        return Assignment(identity, float(matrix.double().sum()), 0.0, "identity")
    prices = matrix.diagonal().double() / 2
    if _identity_is_best(matrix, prices):
        return _finished(matrix, AssignmentSolution(identity, prices, 0.0), "identity")
    if n < _DENSE_BELOW:
        return _finished(matrix, _solve_dense(matrix), "dense")
    planted = planted_prices(matrix)
    rough = _better(matrix, annealed_prices(matrix), torch.zeros(n)) if planted is None else planted
    solved = solve_sparse(matrix, rough, _ACCEPT, rounds=_FEW_ROUNDS if n <= _DENSE_AGAIN else _MANY_ROUNDS)
    scale = abs(_value(matrix, solved.permutation))
    if n <= _DENSE_AGAIN and solved.gap > _GOOD * scale:
        dense = _solve_dense(matrix, solved.prices if solved.gap < _USABLE * scale else None)
        if dense.gap < solved.gap:
            return _finished(matrix, dense, "dense")
    return _finished(matrix, solved, "sparse" if planted is None else "nearest")


def assign_factored(plain: Sequence[tuple[Tensor, Tensor]], signed: Sequence[tuple[Tensor, Tensor]] = ()) -> Assignment:
    """``assign`` of C_ij = sum_k <A_k[i], B_k[j]> + |sum_l <S_l[i], T_l[j]>|, formed only where it must be.

    A donor equal to the anchor costs one comparison. Between near fine-tunes projected rows bound C from above and only
    the pairs that the bound leaves open are evaluated, in float64. Otherwise C is formed in float32 (in float64 for
    small float64 factors), the gap is that of the formed matrix, and the value is summed in float64 from the factors.

    Args:
        plain: pairs (A_k of the anchor, B_k of the donor), each (n, d_k), floating.
        signed: pairs (S_l, T_l), each (n, d_l), whose summed inner product counts by its absolute value.

    Returns:
        The assignment.

    Raises:
        AssignmentInputError: no pairs, shapes that differ, or values that are not finite.
    """
    factors = _checked_factors(plain, signed)
    identity = torch.arange(factors.n)
    diagonal = factors.diagonal()
    if not bool(diagonal.isfinite().all()):
        raise AssignmentInputError("the factors of a similarity hold NaN or infinite values, or overflow")
    if factors.n < 2 or factors.equal():
        return Assignment(identity, float(diagonal.sum()), 0.0, "identity")
    if factors.n >= _DENSE_BELOW:
        solved = solve_projected(factors, diagonal)
        if solved is not None:
            return _preferred(factors, diagonal, solved.permutation, solved.gap, "projection")
    result = assign(form(factors))
    gap = result.gap * abs(result.value)
    return _preferred(factors, diagonal, result.permutation, gap, result.method)


def assign_small(values: Tensor) -> Tensor:
    """The best assignment of a small matrix (n, n), the identity on ties; int64 (n,), on the CPU."""
    from scipy.optimize import linear_sum_assignment

    matrix = values.detach().cpu().double()
    index = torch.from_numpy(linear_sum_assignment(matrix.numpy(), maximize=True)[1]).long()
    chosen, trace = float(matrix.gather(1, index[:, None]).sum()), float(matrix.trace())
    return torch.arange(len(index)) if trace >= chosen - _TIE * abs(chosen) else index


def certificate(similarity: Tensor, permutation: Tensor, prices: Tensor) -> float:
    """An upper bound on the gap between the permutation's objective and the optimum, from column prices.

    For any prices v and any permutation q, sum_i C[i, q[i]] <= sum_j v_j + sum_i max_j (C_ij - v_j). The bound minus
    p's objective is summed row by row as max_j (C_ij - v_j) - (C_i,p(i) - v_p(i)), so nothing cancels.

    Args:
        similarity: C, shape (n, n), floating.
        permutation: p, shape (n,), int64.
        prices: v, shape (n,); any finite values give a valid bound, good ones a small one.

    Returns:
        The absolute duality gap, at least 0.0, computed in float64 blocks.
    """
    matrix = _checked(similarity)
    index = permutation.detach().to("cpu", torch.int64)
    if not torch.equal(index.sort().values, torch.arange(matrix.shape[0])):
        raise AssignmentInputError(f"not a permutation of {matrix.shape[0]} items")
    price = prices.detach().to("cpu", torch.float64)
    if price.shape != index.shape or not bool(price.isfinite().all()):
        raise AssignmentInputError(f"prices must be {matrix.shape[0]} finite numbers")
    return float(row_slacks(matrix, index, price).sum())


def _checked(similarity: Tensor) -> Tensor:
    if similarity.ndim != 2 or similarity.shape[0] != similarity.shape[1]:
        raise AssignmentInputError(f"a similarity must be a square matrix; its shape is {tuple(similarity.shape)}")
    if not similarity.is_floating_point():
        raise AssignmentInputError(f"a similarity must be floating; it is {similarity.dtype}")
    matrix = similarity.detach().to("cpu")
    if matrix.dtype not in (torch.float32, torch.float64):
        matrix = matrix.float()
    for block in row_blocks(*matrix.shape):
        # the sum of finite entries may overflow, so a bad sum is looked at again
        if not bool(matrix[block].sum().isfinite()) and not bool(matrix[block].isfinite().all()):
            raise AssignmentInputError("a similarity holds NaN or infinite values")
    return matrix


def _checked_factors(plain: Sequence[tuple[Tensor, Tensor]], signed: Sequence[tuple[Tensor, Tensor]]) -> Factors:
    pairs = [*plain, *signed]
    if not pairs:
        raise AssignmentInputError("a factored similarity needs at least one pair of factors")
    for anchor, donor in pairs:
        if anchor.ndim != 2 or anchor.shape != donor.shape or anchor.shape[0] != pairs[0][0].shape[0]:
            raise AssignmentInputError(
                f"factors must be (n, d) with one n, equal within a pair; found {tuple(anchor.shape)} and "
                f"{tuple(donor.shape)}, n = {pairs[0][0].shape[0]}"
            )
        if not (anchor.is_floating_point() and donor.is_floating_point()):
            raise AssignmentInputError(f"factors must be floating; found {anchor.dtype} and {donor.dtype}")
    return Factors(
        tuple((anchor.detach(), donor.detach()) for anchor, donor in plain),
        tuple((anchor.detach(), donor.detach()) for anchor, donor in signed),
    )


def _value(matrix: Tensor, permutation: Tensor) -> float:
    return float(matrix.gather(1, permutation[:, None]).double().sum())


def _identity_is_best(matrix: Tensor, prices: Tensor) -> bool:
    """Whether the prices prove the identity optimal to within a tie; a few rows are looked at first."""
    n = matrix.shape[0]
    tolerance = _TIE * abs(2.0 * float(prices.sum()))
    probe = torch.arange(0, n, max(1, n // 64))
    if float((row_maxima(matrix[probe], prices) - prices[probe]).sum()) > tolerance:
        return False
    return float(row_slacks(matrix, torch.arange(n), prices).sum()) <= tolerance


def _better(matrix: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The prices, as float64, with the tighter bound on the optimum, judged on some rows."""
    n = matrix.shape[0]
    probe = matrix[:: max(1, n // 1024)]
    share = n / probe.shape[0]
    bounds = [float(row_maxima(probe, p.double()).sum() * share + p.double().sum()) for p in (first, second)]
    return (first if bounds[0] < bounds[1] else second).double()


def _solve_dense(matrix: Tensor, prices: Tensor | None = None) -> AssignmentSolution:
    """scipy's solver on a float64 copy, and prices for its solution; prices known already make its work short."""
    from scipy.optimize import linear_sum_assignment

    costs = matrix.double().neg_() if matrix.dtype == torch.float32 else -matrix
    if prices is not None:
        costs += prices
        costs -= costs.amin(1, keepdim=True)
    _, columns = linear_sum_assignment(costs.numpy())
    chosen = np.asarray(columns, dtype=np.int64)
    dense_prices = _dense_prices(costs.neg_().numpy(), chosen)
    final = torch.from_numpy(dense_prices) if prices is None else prices + torch.from_numpy(dense_prices)
    permutation = torch.from_numpy(chosen)
    return AssignmentSolution(permutation, final, float(row_slacks(matrix, permutation, final).sum()))


def _dense_prices(scores: NDArray[np.float64], permutation: NDArray[np.int64]) -> NDArray[np.float64]:
    """Prices under which each p(i) is a best column of row i.

    Longest paths by Bellman-Ford, where only rows whose own price rose make new offers.
    """
    n = len(permutation)
    owner = np.argsort(permutation)
    attained = scores[np.arange(n), permutation]
    prices = attained[owner] / 2
    tolerance = _EPSILON * float(np.abs(scores).max())
    moved = np.arange(n)
    for _ in range(n):
        offers = scores[moved] + (prices[permutation[moved]] - attained[moved])[:, None]
        best = offers.max(axis=0)
        raised = np.flatnonzero(best > prices + tolerance)
        if not len(raised):
            break
        prices[raised] = best[raised]
        moved = owner[raised]
    return prices


def _finished(matrix: Tensor, solved: AssignmentSolution, method: str) -> Assignment:
    """The assignment moved toward the identity as far as ties allow, with its relative gap."""
    n = matrix.shape[0]
    identity = torch.arange(n)
    permutation = toward_identity(matrix, solved.permutation)
    value = _value(matrix, permutation)
    bound = _value(matrix, solved.permutation) + solved.gap
    trace = float(matrix.diagonal().double().sum())
    if trace >= value - _TIE * abs(value):
        permutation, value, method = identity, trace, "identity"
    scale = float(matrix.gather(1, permutation[:, None]).double().abs().sum() + solved.prices.abs().sum())
    return Assignment(permutation, value, _relative_gap(bound - value, value, scale), method)


def _relative_gap(gap: float, value: float, scale: float) -> float:
    """The gap over |value|; zero for ties and rounding errors of terms whose magnitudes sum to ``scale``."""
    if gap <= max(_TIE * abs(value), 8 * _EPSILON * scale):
        return 0.0
    return gap / max(abs(value), _TINY)


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


def _preferred(factors: Factors, diagonal: Tensor, permutation: Tensor, gap: float, method: str) -> Assignment:
    """The assignment evaluated in float64 from the factors; the identity if it is equally good."""
    identity, trace = torch.arange(factors.n), float(diagonal.sum())
    same = torch.equal(permutation, identity)
    value = trace if same else float(factors.entries(identity, permutation).sum())
    bound = value + gap
    if not same and trace >= value - _TIE * abs(value):
        permutation, value, method = identity, trace, "identity"
    return Assignment(permutation, value, _relative_gap(max(0.0, bound - value), value, 0.0), method)
