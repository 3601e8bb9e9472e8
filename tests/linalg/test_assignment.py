"""Laws of the assignment solver: the optimum of brute force and of scipy, and the identity wherever that is one."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge.linalg.assignment import LARGE, assign


def instance(kind: str, n: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    copies = torch.randint(0, max(1, n // 3), (n,), generator=draw)
    return {
        "normal": lambda: normal(n, n),
        "float32": lambda: normal(n, n).float(),
        "bfloat16": lambda: normal(n, n).bfloat16(),
        "offset": lambda: normal(n, n) + 1e6,
        "minute": lambda: normal(n, n) * 1e-20,
        "heavy tailed": lambda: normal(n, n) ** 3 * (2 * normal(n, 1)).exp() * (2 * normal(1, n)).exp(),
        "integers": lambda: torch.randint(0, 4, (n, n), generator=draw),
        "duplicates": lambda: normal(n, 8)[copies] @ normal(n, 8)[copies.flip(0)].T,
        "rank one": lambda: normal(n, 1) @ normal(1, n),
        "zero": lambda: torch.zeros(n, n),
        "strided": lambda: normal(n, 2 * n)[:, ::2].T,
    }[kind]()


KINDS = [
    *("normal", "float32", "bfloat16", "offset", "minute", "heavy tailed", "integers", "duplicates", "rank one"),
    *("zero", "strided"),
]


def value(similarity: Tensor, order: Tensor) -> float:
    assert torch.equal(order.sort().values, torch.arange(len(similarity)))
    return float(similarity.double()[torch.arange(len(order)), order].sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, 6])
def test_the_optimum_of_brute_force(kind: str, n: int) -> None:
    similarity = instance(kind, n)
    best = max(value(similarity, torch.tensor(order)) for order in permutations(range(n)))
    assert value(similarity, assign(similarity)) == pytest.approx(best, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimum_of_scipy(kind: str) -> None:
    similarity = instance(kind, 150)
    before = similarity.clone()
    order = assign(similarity)
    assert torch.equal(similarity, before)
    best = value(similarity, torch.tensor(linear_sum_assignment(similarity.double().numpy(), maximize=True)[1]))
    assert value(similarity, order) >= best - 1e-11 * abs(best)


@pytest.mark.parametrize("kind", ["normal", "float32", "bfloat16", "integers"])
def test_many_rows_go_to_lapx(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    similarity = instance(kind, LARGE)
    best = value(similarity, torch.tensor(linear_sum_assignment(similarity.double().numpy(), maximize=True)[1]))
    monkeypatch.setattr("scipy.optimize.linear_sum_assignment", None)
    assert value(similarity, assign(similarity)) >= best * (1 - 1e-6)


@pytest.mark.parametrize("n", [6, 60, LARGE])
def test_ties_go_to_the_identity(n: int) -> None:
    """Equal rows and columns, dead ones, a planted order beside them: what may stay at its place does."""
    x = torch.randn(n, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[1] = x[2] = x[0]
    x[3] = 0
    assert torch.equal(assign(x @ x.T), torch.arange(n))
    assert torch.equal(assign(torch.zeros(n, n)), torch.arange(n))
    y = x.clone()
    y[[4, 5]] = y[[5, 4]]
    assert assign(x @ y.T).tolist() == [0, 1, 2, 3, 5, 4, *range(6, n)]
