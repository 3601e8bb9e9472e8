"""Procrustes, rescaling and assignment problems: brute force, bounds, the optimum of scipy, ties."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from matching_support import gen, normal
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge.linalg.assignment import LARGE, assign
from rotation_merge.linalg.polar import exp_skew, procrustes, random_orthogonal
from rotation_merge.linalg.scaling import LARGEST_LOG_SCALE, best_scale, cost, limited

close = torch.testing.assert_close


def inner(r: Tensor, m: Tensor) -> Tensor:
    return (r * m).sum((-2, -1))


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (6, 0), (6, 1), (6, 3), (6, 5), (6, 6), (16, 16)])
def test_procrustes_attains_its_bound_and_ties_go_to_the_identity(size: int, rank: int) -> None:
    """No orthogonal map exceeds the nuclear norm; other optima differ on the null spaces, and are no nearer."""
    a = normal(2, size, size)[..., :rank] @ normal(2, size, 9, seed=1)[:, :rank]
    assert torch.equal(procrustes(a @ a.mT), torch.eye(size, dtype=torch.float64).expand(2, size, size))
    m = a @ normal(2, size, 9, seed=2).mT if rank < size else normal(2, size, size, seed=2)
    r = procrustes(m)
    close(r @ r.mT, torch.eye(size, dtype=r.dtype).expand_as(r), rtol=0, atol=1e-12)
    close(inner(r, m), torch.linalg.matrix_norm(m, "nuc"))
    u, _, vh = torch.linalg.svd(m)
    for k, seed in product(range(2), range(20)):
        turn = random_orthogonal(1, size - rank, gen(seed))[0]
        other = u[k, :, :rank] @ vh[k, :rank] + u[k, :, rank:] @ turn @ vh[k, rank:]
        close(inner(other, m[k]), torch.linalg.matrix_norm(m[k], "nuc"))
        assert r[k].trace() >= other.trace() - 1e-9


def test_float32_products_of_low_rank_leave_the_null_space_alone() -> None:
    a = (normal(4, 16, 5) @ normal(4, 5, 60, seed=1)).float()
    assert (procrustes(torch.bmm(a, a.mT), rank_tolerance=1e-6) - torch.eye(16)).abs().max() < 2e-3


@pytest.mark.parametrize("size", [0.0, 0.01, 1.0, 30.0])
def test_the_exponential_of_skew_matrices_and_its_gradient(size: float) -> None:
    a = normal(2, 8, 8)
    weight, skew = normal(2, 8, 8, seed=1), size * (a - a.mT) / torch.linalg.matrix_norm(a - a.mT, 2)[:, None, None]
    results = []
    for exponential, dtype in ((torch.matrix_exp, torch.float64), (exp_skew, torch.float32)):
        x = skew.to(dtype, copy=True).requires_grad_(True)
        y = exponential(x)
        (y * weight.to(dtype)).sum().backward()
        assert x.grad is not None
        results.append((y.detach().double(), x.grad.double()))
    for exact, fast in zip(*results, strict=True):
        close(fast, exact, rtol=0, atol=3e-6 * max(1.0, size))


PROBLEMS = [(False, 1), (True, 1), (False, 2), (False, 3)]


def problems(degree: int, n: int = 400) -> list[Tensor]:
    """P, D, p and q: sides of any ratio, near and far pairs, products of either sign."""
    primal, dual = (3 * normal(n, seed=1)).exp(), (3 * normal(n, seed=2)).exp()
    balance = (dual / primal) ** (0.5 / (1 + degree))
    u, v = (3 * normal(n, seed=s) * normal(n, seed=s + 1).exp() for s in (3, 5))
    return [primal, dual, u * balance * primal, v * dual / balance**degree]


@pytest.mark.parametrize(("signed", "degree"), PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_best_scale_is_as_good_as_any_of_a_grid(signed: bool, degree: int, dtype: torch.dtype) -> None:
    rounded = [x.to(dtype) for x in problems(degree)]
    scale = best_scale(*rounded, signed=signed, degree=degree)
    assert scale.dtype == dtype
    assert signed or bool((scale > 0).all())
    primal, dual, p, q = (x.double() for x in rounded)
    grid = torch.linspace(-7, 7, 4001, dtype=torch.float64)[:, None] + (dual / primal).log() / (2 + 2 * degree)
    grid = grid.clamp(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE).exp()
    best = cost(torch.cat([grid, -grid]) if signed else grid, primal, dual, p, q, degree).amin(0)
    reached = cost(scale.double(), primal, dual, p, q, degree)
    terms = cost(scale.double().abs(), primal, dual, -p.abs(), -q.abs(), degree)
    assert (reached <= best + (1e-12 if dtype == torch.float64 else 1e-5) * terms).all()
    assert (reached <= cost(torch.ones_like(primal), primal, dual, p, q, degree)).all()


@pytest.mark.parametrize(("signed", "degree"), PROBLEMS)
def test_scales_of_equal_and_of_dead_sides_are_one(signed: bool, degree: int) -> None:
    zero, x, y = torch.zeros(9, dtype=torch.float64), normal(9).square(), normal(9, seed=1).square()
    for sides in ((x, y), (zero, y), (x, zero), (zero, zero)):
        assert torch.equal(best_scale(*sides, *sides, signed=signed, degree=degree), torch.ones_like(x))


def test_scales_stop_at_a_limit() -> None:
    one = torch.ones(2, dtype=torch.float64)
    scale = best_scale(torch.tensor([1e-30, 1.0]).double(), torch.tensor([1.0, 1e-30]).double(), 1e-15 * one, 0 * one)
    close(scale.log().abs(), LARGEST_LOG_SCALE * one)
    assert bool(limited(scale).all())
    assert not bool(limited(best_scale(*problems(1))).all())


# --- assignment


def instance(kind: str, n: int) -> Tensor:
    draw = gen()
    few, x, y = torch.randint(0, max(1, n // 3), (n,), generator=draw), normal(n, 2 * n), normal(n, 8, seed=1)
    return {
        "normal": lambda: x[:, :n],
        "bfloat16": lambda: x[:, :n].bfloat16(),
        "integers": lambda: torch.randint(0, 4, (n, n), generator=draw),
        "minute, offset": lambda: x[:, :n] * 1e-20 + 1e-14,
        "heavy tailed": lambda: x[:, :n] ** 3 * (2 * y[:, :1]).exp() * (2 * y[:, 1]).exp(),
        "duplicates": lambda: y[few] @ y[few.flip(0)].T,
        "strided": lambda: x[:, ::2].T,
    }[kind]()


KINDS = ["normal", "bfloat16", "integers", "minute, offset", "heavy tailed", "duplicates", "strided"]


def value(similarity: Tensor, order: Tensor) -> float:
    assert torch.equal(order.sort().values, torch.arange(len(similarity)))
    return float(similarity.double()[torch.arange(len(order)), order].sum())


@pytest.mark.parametrize(("kind", "n"), [*product(KINDS, (1, 6, 150)), *product(KINDS[:3], [LARGE])])
def test_the_optimum_of_scipy(kind: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows go to lapx, in single precision."""
    similarity = instance(kind, n)
    before = similarity.clone()
    best = value(similarity, torch.tensor(linear_sum_assignment(similarity.double().numpy(), maximize=True)[1]))
    if n == LARGE:
        monkeypatch.setattr("scipy.optimize.linear_sum_assignment", None)
    order = assign(similarity)
    assert torch.equal(similarity, before)
    assert value(similarity, order) >= best - (1e-6 if n == LARGE else 1e-11) * abs(best)


@pytest.mark.parametrize("n", [6, 60, LARGE])
def test_ties_of_assignments_go_to_the_identity(n: int) -> None:
    """Equal rows and columns, dead ones, a planted order beside them: what may stay at its place does."""
    x = torch.randn(n, 20, generator=gen(1), dtype=torch.float64)
    x[1] = x[2] = x[0]
    x[3] = 0
    assert torch.equal(assign(x @ x.T), torch.arange(n))
    assert torch.equal(assign(torch.zeros(n, n)), torch.arange(n))
    y = x.clone()
    y[[4, 5]] = y[[5, 4]]
    assert assign(x @ y.T).tolist() == [0, 1, 2, 3, 5, 4, *range(6, n)]
