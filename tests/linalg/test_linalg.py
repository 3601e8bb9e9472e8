"""Procrustes and rescaling problems against brute force and bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rotation_merge.linalg.polar import complement_of_ones, nuclear_norm, procrustes, random_orthogonal
from rotation_merge.linalg.scaling import LARGEST_LOG_SCALE, best_scale, cost, joint_scale, least_cost, scale_ceiling
from rotation_merge.symmetry.tangent import exp_skew

torch.set_num_threads(1)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=gen(seed), dtype=torch.float64)


def orthogonal_error(r: Tensor) -> float:
    return float((r @ r.mT - torch.eye(r.shape[-1])).abs().max())


def inner(r: Tensor, m: Tensor) -> Tensor:
    return (r * m).sum((-2, -1))


@pytest.mark.parametrize("d", [1, 2, 5, 16])
def test_procrustes_attains_the_dual_bound(d):
    m = randn(4, d, d)
    r = procrustes(m)
    assert orthogonal_error(r) < 1e-12
    torch.testing.assert_close(inner(r, m), nuclear_norm(m))  # no orthogonal map exceeds the nuclear norm


def test_procrustes_against_brute_force_in_the_plane():
    m = randn(50, 2, 2)
    angle = torch.linspace(0, 2 * math.pi, 20001, dtype=torch.float64)
    c, s = angle.cos(), angle.sin()
    turns = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
    flips = turns @ torch.diag(torch.tensor([1.0, -1.0]).double())
    best = torch.einsum("aij,nij->na", torch.cat([turns, flips]), m).amax(1)
    value = inner(procrustes(m), m)
    assert (value >= best - 1e-12).all()
    torch.testing.assert_close(value, best, rtol=1e-6, atol=1e-6)


def test_procrustes_finds_a_planted_map():
    b, r = randn(3, 6, 40), random_orthogonal(3, 6, gen(1))
    torch.testing.assert_close(procrustes(b @ (r @ b).mT), r.mT, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_rank_deficient_ties_go_to_the_identity(rank):
    a = randn(2, 6, 6)[..., :rank] @ randn(2, 6, 9, seed=1)[:, :rank]
    assert torch.equal(procrustes(a @ a.mT), torch.eye(6, dtype=torch.float64).expand(2, 6, 6))
    m = a @ randn(2, 6, 9, seed=2).mT
    r = procrustes(m)
    assert orthogonal_error(r) < 1e-12
    torch.testing.assert_close(inner(r, m), nuclear_norm(m))
    u, s, vh = torch.linalg.svd(m)
    for k in range(2):  # any other optimum differs on the null spaces, and is no nearer to the identity
        for seed in range(20):
            turn = random_orthogonal(1, 6 - rank, gen(seed))[0]
            other = u[k, :, :rank] @ vh[k, :rank] + u[k, :, rank:] @ turn @ vh[k, rank:]
            torch.testing.assert_close(inner(other, m[k]), s[k].sum())
            assert r[k].trace() >= other.trace() - 1e-9


def test_float32_products_of_low_rank_leave_the_null_space_alone():
    a = (randn(4, 16, 5) @ randn(4, 5, 60, seed=1)).float()
    r = procrustes(torch.bmm(a, a.mT), rank_tolerance=1e-6)
    assert (r - torch.eye(16)).abs().max() < 2e-3


def test_nuclear_norm_and_complement():
    torch.testing.assert_close(nuclear_norm(torch.diag(torch.tensor([3.0, -4.0]))), torch.tensor(7.0).double())
    basis = complement_of_ones(7)
    torch.testing.assert_close(basis.T @ basis, torch.eye(6, dtype=torch.float64))
    assert basis.sum(0).abs().max() < 1e-14


finite = st.floats(-10, 10, allow_nan=False)
positive = st.floats(0.01, 100, allow_nan=False)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(positive, positive, finite, finite, st.booleans(), st.sampled_from([1, 1, 2, 3]))
def test_best_scale_by_dense_grid(primal, dual, p, q, signed, degree):
    signed = signed and degree == 1
    args = [torch.tensor([x], dtype=torch.float64) for x in (primal, dual, p, q)]
    a = best_scale(*args, signed=signed, degree=degree)
    grid = torch.linspace(-LARGEST_LOG_SCALE, LARGEST_LOG_SCALE, 4001, dtype=torch.float64).exp()
    if signed:
        grid = torch.cat([grid, -grid])
    best = cost(grid, *args, degree).min()
    found = float(cost(a, *args, degree))
    if float(a.abs().log().abs()) < LARGEST_LOG_SCALE - 1e-6:
        assert found <= float(best) + 1e-9 * (primal + dual)
    assert found <= float(cost(torch.ones(1).double(), *args))
    assert signed or float(a) > 0


def test_best_scale_is_a_root_of_the_papers_quartic():
    primal, dual = randn(1000).square() + 0.1, randn(1000, seed=1).square() + 0.1
    p, q = primal * (1 + 0.5 * randn(1000, seed=2)), dual * (1 + 0.5 * randn(1000, seed=3))
    a = best_scale(primal, dual, p, q)
    residual = primal * a**4 - p * a**3 + q * a - dual
    assert (residual.abs() / (primal * a**4 + dual)).max() < 1e-12


def test_float32_finds_the_best_scale_of_higher_degrees():
    known = [x(2000, seed=i) for i, x in enumerate((randn, randn, randn, randn))]
    known = [known[0].square() + 0.01, known[1].square() + 0.01, 2 * known[2], 2 * known[3]]
    for degree in (2, 3):
        exact, rough = best_scale(*known, degree=degree), best_scale(*(x.float() for x in known), degree=degree)
        lost = cost(rough.double(), *known, degree) - cost(exact, *known, degree)
        assert (lost / (known[0] + known[1] + cost(exact, *known, degree).abs())).max() < 1e-5


def test_best_scale_ties():
    one = torch.ones(3, dtype=torch.float64)
    assert torch.equal(best_scale(2 * one, 3 * one, 2 * one, 3 * one, signed=True), one)  # donor equals anchor
    zero = torch.zeros(3, dtype=torch.float64)
    for args in ((zero, one, zero, one), (one, zero, one, zero), (zero, zero, zero, zero)):
        assert torch.equal(best_scale(*args, signed=True), one)  # dead sides keep their scale


def joint(m_primal: Tensor, m_dual: Tensor, primal: Tensor, dual: Tensor, guess: Tensor) -> Tensor:
    def mix(a: Tensor) -> Tensor:
        return a[:, None, None] * m_primal + m_dual / a[:, None, None]

    def best(a: Tensor) -> tuple[Tensor, Tensor]:
        r = procrustes(mix(a))
        return inner(r, m_primal), inner(r, m_dual)

    bounds = nuclear_norm(m_primal), nuclear_norm(m_dual)
    return joint_scale(lambda a: nuclear_norm(mix(a)), best, primal, dual, guess, bounds)


@pytest.mark.parametrize("scale", [1.0, 0.3, 8.0])
@pytest.mark.parametrize("far", [False, True])
def test_joint_scale_by_dense_grid(scale, far):
    heads, d, m = 6, 4, 12
    a_p, a_d = randn(heads, d, m), randn(heads, d, m, seed=1)
    if far:
        b_p, b_d = randn(heads, d, m, seed=2) / scale, randn(heads, d, m, seed=3) * scale
    else:
        r = random_orthogonal(heads, d, gen(4))
        b_p, b_d = r @ a_p / scale + 0.2 * randn(heads, d, m, seed=2), r @ a_d * scale
    m_p, m_d = a_p @ b_p.mT, a_d @ b_d.mT
    primal, dual = b_p.square().sum((1, 2)), b_d.square().sum((1, 2))
    found = joint(m_p, m_d, primal, dual, torch.ones(heads, dtype=torch.float64))

    def value(a: Tensor) -> Tensor:
        return a**2 * primal + dual / a**2 - 2 * nuclear_norm(a[:, None, None] * m_p + m_d / a[:, None, None])

    grid = torch.linspace(-4, 4, 1601, dtype=torch.float64).exp()
    best = torch.stack([value(a.expand(heads)) for a in grid]).amin(0)
    assert (value(found) <= best + 1e-10 * (primal + dual)).all()


@pytest.mark.slow
def test_joint_scale_finds_the_better_one_of_two_optima():
    """Extreme heads, whose objective has a second optimum beside the one that lies next to the best start."""
    draw, shape = gen(6), (200, 4, 4)
    sides = []
    for _ in range(2):
        u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64, generator=draw))
        sides.append(u * (2 * torch.randn(200, 1, 4, dtype=torch.float64, generator=draw)).exp() @ v)
    m_p, m_d = sides
    primal, dual = (
        nuclear_norm(m) * (0.5 * torch.randn(200, dtype=torch.float64, generator=draw)).exp() for m in sides
    )
    m_p = m_p * torch.randn(200, dtype=torch.float64, generator=draw).exp()[:, None, None]
    found = joint(m_p, m_d, primal, dual, (dual / primal) ** 0.25)

    def value(a: Tensor) -> Tensor:
        return a**2 * primal + dual / a**2 - 2 * nuclear_norm(a[:, None, None] * m_p + m_d / a[:, None, None])

    grid = torch.linspace(-4, 4, 401, dtype=torch.float64).exp()
    best = torch.stack([value(a.expand(200)) for a in grid]).amin(0)
    assert (value(found) <= best + 1e-6 * (primal + dual)).all()


def test_joint_scale_keeps_one():
    a = randn(2, 3, 9)
    gram, norm = a @ a.mT, a.square().sum((1, 2))
    one = torch.ones(2, dtype=torch.float64)
    assert torch.equal(joint(gram, gram, norm, norm, one), one)
    zero = torch.zeros_like(norm)
    assert torch.equal(joint(gram * 0, gram * 0, zero, zero, one), one)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("size", [0.03, 1.0, 100.0, 1e8])
def test_least_cost_is_the_cost_of_the_best_scale(size: float, degree: int, signed: bool) -> None:
    """Whatever way it takes: quick, or by the scale where that might have to be limited or a side is empty."""
    signed = signed and degree == 1
    primal, dual = randn(1, 40, seed=1).exp(), randn(1, 40, seed=2).exp()
    p, q = size * randn(30, 40, seed=3), size * randn(30, 40, seed=4)
    for norms in ((primal, dual), (primal * (primal > 1), dual)):
        wanted = cost(best_scale(*norms, p, q, signed, degree), *norms, p, q, degree)
        found = least_cost(*norms, p, q, signed, degree)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.95])
def test_a_ceiling_of_the_joint_problem_is_never_below_what_a_grid_finds(shared: float) -> None:
    """Above every scale's value, and hardly so where it is the best one's."""
    heads, d, m = 40, 6, 20
    primal, dual = (
        (a := randn(heads, d, m, seed=s), shared * a + (1 - shared) * randn(heads, d, m, seed=s + 1)) for s in (1, 3)
    )
    stretch = randn(heads, 1, 1, seed=9).exp()
    m_p, m_d = primal[0] @ primal[1].mT * stretch, dual[0] @ dual[1].mT / stretch
    squares = (primal[1] * stretch).square().sum((1, 2)), (dual[1] / stretch).square().sum((1, 2))

    def h(a: Tensor) -> Tensor:
        return nuclear_norm(a[:, None, None] * m_p + m_d / a[:, None, None])

    reach = tuple(d**0.5 * torch.linalg.matrix_norm(x) for x in (m_p, m_d))
    ceiling = scale_ceiling(h, *squares, reach)
    grid = torch.linspace(-6, 6, 601, dtype=torch.float64).exp()
    gains = torch.stack([2 * h(a.expand(heads)) - a**2 * squares[0] - squares[1] / a**2 for a in grid])
    size = 2 * h(torch.ones(heads))
    assert bool((gains <= ceiling).all())
    assert float(((ceiling - gains.amax(0)) / size).median()) < 2e-3


@pytest.mark.parametrize("size", [0.0, 1e-4, 0.5, 3.0, 40.0])
def test_exponentials_and_their_gradients_are_torchs(size: float):
    turn = randn(3, 12, 12)
    turn = size * (turn - turn.mT) / torch.linalg.matrix_norm(turn - turn.mT, 2).amax()
    weight, found = randn(3, 12, 12, seed=1), []
    for exponential, dtype in ((torch.matrix_exp, torch.float64), (exp_skew, torch.float32)):
        given = turn.to(dtype, copy=True).requires_grad_(True)
        made = exponential(given)
        (made * weight.to(dtype)).sum().backward()
        assert given.grad is not None
        found += [made.detach().double(), given.grad.double()]
    for mine, wanted in zip(found[2:], found[:2], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=3e-6 * max(1.0, size))
