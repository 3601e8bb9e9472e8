"""Laws of the assignment solver: optimal against brute force and scipy, certified, and the identity where it ties."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge import RotationMergeError
from rotation_merge.linalg import _projection
from rotation_merge.linalg import assignment as module
from rotation_merge.linalg._projection import Factors, form
from rotation_merge.linalg.assignment import Assignment, assign, assign_factored, certificate


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(params=["dense", "sparse"])
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both routes, whatever the size."""
    monkeypatch.setattr(module, "_DENSE_BELOW", 1500 if request.param == "dense" else 2)
    return str(request.param)


def _optimum(similarity: Tensor) -> float:
    scores = similarity.double().numpy()
    rows, columns = linear_sum_assignment(scores, maximize=True)
    return float(scores[rows, columns].sum())


def _check(similarity: Tensor, found: Assignment) -> None:
    n = similarity.shape[0]
    assert found.permutation.dtype == torch.int64
    assert torch.equal(found.permutation.sort().values, torch.arange(n))
    value = similarity.double()[torch.arange(n), found.permutation].sum().item()
    assert found.value == pytest.approx(value, rel=1e-14, abs=1e-300)
    assert 0.0 <= found.gap <= 1e-8
    assert found.value >= _optimum(similarity) - (found.gap + 1e-12) * abs(found.value)


def _instance(kind: str, n: int, generator: torch.Generator) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def flags(share: float) -> Tensor:
        return (torch.rand(n, 1, generator=generator) > share).float()

    copies = torch.randint(0, max(1, n // 3), (n,), generator=generator)
    return {
        "normal": lambda: normal(n, n),
        "float64": lambda: normal(n, n).double(),
        "positive": lambda: normal(n, n).abs(),
        "negative": lambda: -normal(n, n).abs(),
        "offset": lambda: normal(n, n) + 1e6,
        "minute": lambda: normal(n, n) * 1e-20,
        "heavy tailed": lambda: normal(n, n) ** 3 * torch.exp(2 * normal(n, 1)) * torch.exp(2 * normal(1, n)),
        "small integers": lambda: torch.randint(0, 4, (n, n), generator=generator).float(),
        "integers": lambda: torch.randint(-50, 50, (n, n), generator=generator).double(),
        "duplicates": lambda: normal(n, 8)[copies] @ normal(n, 8)[copies.flip(0)].T,
        "dead": lambda: (normal(n, 8) * flags(0.4)) @ (normal(n, 8) * flags(0.4)).T,
        "rank one": lambda: normal(n, 1) @ normal(1, n),
        "one row and column": lambda: torch.cat([normal(n, 1), torch.zeros(n, n - 1)], 1),
        "zero": lambda: torch.zeros(n, n),
        "constant": lambda: torch.full((n, n), -3.0),
    }[kind]()


KINDS = [
    "normal",
    "float64",
    "positive",
    "negative",
    "offset",
    "minute",
    "heavy tailed",
    "small integers",
    "integers",
    "duplicates",
    "dead",
    "rank one",
    "one row and column",
    "zero",
    "constant",
]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_brute_force_agrees(n: int, route: str, generator: torch.Generator) -> None:
    for kind in KINDS:
        scores = _instance(kind, n, generator)
        best = max(sum(float(scores[i, j]) for i, j in enumerate(p)) for p in permutations(range(n)))
        assert assign(scores).value == pytest.approx(best, rel=1e-12, abs=1e-300), kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [17, 120, 300])
def test_the_optimum_of_scipy_is_reached(kind: str, n: int, route: str, generator: torch.Generator) -> None:
    similarity = _instance(kind, n, generator)
    before = similarity.clone()
    found = assign(similarity)
    _check(similarity, found)
    assert torch.equal(similarity, before)
    again = assign(similarity)
    assert torch.equal(again.permutation, found.permutation)
    assert (again.value, again.gap, again.method) == (found.value, found.gap, found.method)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "heavy tailed", "small integers", "integers", "duplicates", "dead"])
def test_the_sparse_route_at_its_own_size(kind: str, generator: torch.Generator) -> None:
    similarity = _instance(kind, 2000, generator)
    found = assign(similarity)
    _check(similarity, found)
    assert found.method in ("sparse", "dense")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_and_layout(dtype: torch.dtype, generator: torch.Generator) -> None:
    wide = torch.randn(50, 80, generator=generator).to(dtype)
    similarity = wide.T[::2][:25, ::2][:, :25]
    _check(similarity, assign(similarity))
    assert torch.equal(assign(similarity.contiguous()).permutation, assign(similarity).permutation)


def test_float64_differences_count() -> None:
    similarity = torch.ones(3, 3, dtype=torch.float64)
    similarity[0, 1] += 1e-10  # lost in float32
    found = assign(similarity)
    assert found.permutation[0] == 1
    assert found.value == 3 + 1e-10


def test_empty_and_single() -> None:
    assert assign(torch.zeros(0, 0)).permutation.shape == (0,)
    assert assign(torch.zeros(0, 0)).value == 0.0
    found = assign(torch.tensor([[-2.5]]))
    assert (found.permutation.tolist(), found.value, found.gap) == ([0], -2.5, 0.0)


def test_identity_is_kept_where_it_ties(route: str, generator: torch.Generator) -> None:
    for n in (2, 7, 60, 200):
        rows = torch.randn(n, 5, generator=generator)
        rows[n // 2 :] = rows[: n - n // 2].clone()
        rows[:: max(2, n // 5)] = 0
        equal = [rows.double() @ rows.double().T, torch.zeros(n, n), torch.full((n, n), 2.0)]
        column = torch.randint(-2, 3, (n, 1), generator=generator).float()
        integers = torch.randint(-3, 3, (n, 4), generator=generator).float()
        for similarity in [*equal, column @ column.T, integers @ integers.T]:
            found = assign(similarity)
            assert torch.equal(found.permutation, torch.arange(n))
            assert found.gap == 0.0
        for factor in (rows, column, integers, rows.half()):
            for arguments in ([(factor, factor)], []), ([], [(factor, factor)]):
                found = assign_factored(*arguments)
                assert torch.equal(found.permutation, torch.arange(n))
                assert found.gap == 0.0


def test_identity_is_kept_although_no_diagonal_price_proves_it() -> None:
    similarity = torch.tensor([[0.0, 5.0], [-5.0, 0.0]])
    assert assign(similarity).permutation.tolist() == [0, 1]


def test_dead_neurons_stay_where_the_rest_moves(route: str, generator: torch.Generator) -> None:
    n = 120
    rows = torch.randn(n, 16, generator=generator)
    rows[60:] = 0
    order = torch.arange(n)
    order[:30] = torch.randperm(30, generator=generator)
    found = assign(rows @ rows[order].T)
    assert torch.equal(found.permutation, torch.argsort(order))


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("factored", [False, True])
def test_a_planted_permutation_is_found(noise: float, factored: bool, generator: torch.Generator) -> None:
    n, d = 1600, 256
    anchor = torch.randn(n, d, generator=generator) * torch.exp(0.5 * torch.randn(n, 1, generator=generator))
    moved = anchor + noise * torch.randn(n, d, generator=generator) * anchor.norm(dim=1, keepdim=True) / d**0.5
    order = torch.randperm(n, generator=generator)
    found = assign_factored([(anchor, moved[order])]) if factored else assign(anchor @ moved[order].T)
    assert torch.equal(found.permutation, torch.argsort(order))
    assert found.gap == 0.0
    if factored and noise == 0.1:
        assert found.method == "projection"


def test_certificate_bounds_the_optimum_for_any_prices(generator: torch.Generator) -> None:
    for n in (1, 2, 5, 40, 150):
        similarity = torch.randn(n, n, generator=generator)
        optimum = _optimum(similarity)
        for _ in range(5):
            permutation = torch.randperm(n, generator=generator)
            value = similarity.double()[torch.arange(n), permutation].sum().item()
            prices = torch.randn(n, generator=generator, dtype=torch.float64) * 3
            gap = certificate(similarity, permutation, prices)
            assert gap >= 0.0
            assert value + gap >= optimum - 1e-12 * n
            bound = prices.sum() + (similarity.double() - prices).amax(1).sum()
            assert value + gap == pytest.approx(bound.item(), rel=1e-12, abs=1e-12)


def test_certificate_is_zero_for_optimal_prices() -> None:
    similarity = torch.tensor([[3.0, 1.0], [4.0, 3.0]])
    assert certificate(similarity, torch.tensor([0, 1]), torch.tensor([1.0, 0.0])) == 0.0
    assert certificate(similarity, torch.tensor([1, 0]), torch.tensor([1.0, 0.0])) == 1.0


def test_a_gap_is_told_when_the_rounds_run_out(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    monkeypatch.setattr(module, "_DENSE_BELOW", 2)
    monkeypatch.setattr(module, "_DENSE_AGAIN", 2)
    solve = module.solve_sparse
    monkeypatch.setattr(module, "solve_sparse", lambda c, v, accept, rounds: solve(c, 0 * v, accept, 2, 1))
    similarity = torch.randn(300, 20, generator=generator) @ torch.randn(20, 300, generator=generator)
    found = assign(similarity)
    assert found.gap > 0.0
    assert found.value < _optimum(similarity) <= found.value * (1 + found.gap)


@pytest.mark.parametrize("noise", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("signs", [False, True])
def test_factored_equals_formed(
    noise: float, dtype: torch.dtype, signs: bool, monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    monkeypatch.setattr(module, "_DENSE_BELOW", 100)
    n = 220

    def pair(d: int) -> tuple[Tensor, Tensor]:
        left = torch.randn(n, d, generator=generator) + torch.randn(d, generator=generator)
        left[::20] = 0
        right = left + noise * torch.randn(n, d, generator=generator)
        return left.to(dtype), right.to(dtype)

    plain = [pair(33), pair(130)]
    signed = [pair(50), pair(7)] if signs else []
    flips = torch.randint(0, 2, (n, 1), generator=generator).mul(2).sub(1).to(dtype)
    signed = [(left, right * flips) for left, right in signed]
    found = assign_factored(plain, signed)
    similarity = sum(left.double() @ right.double().T for left, right in plain)
    if signed:
        similarity = similarity + sum(left.double() @ right.double().T for left, right in signed).abs()
    assert found.gap <= 1e-8
    assert found.value == pytest.approx(_optimum(similarity), rel=1e-7)
    value = similarity[torch.arange(n), found.permutation].sum().item()
    assert found.value == pytest.approx(value, rel=1e-12)
    if noise < 0.1:
        assert found.method in ("projection", "identity")


def test_projection_repairs_a_few_wrong_neighbours(monkeypatch: pytest.MonkeyPatch, generator: torch.Generator) -> None:
    monkeypatch.setattr(_projection, "_GATHER_COST", 0.0)
    n, d = 400, 300
    left = torch.randn(n, d, generator=generator)
    left[20:40] = left[:20] + 0.01 * torch.randn(20, d, generator=generator)  # twins, exchanged by the noise
    right = left + 0.15 * torch.randn(n, d, generator=generator)
    factors = Factors(((left, right),), ())
    solved = _projection.solve_projected(factors, factors.diagonal())
    assert solved is not None
    assert not torch.equal(solved.permutation, torch.arange(n))
    formed = left.double() @ right.double().T
    value = formed[torch.arange(n), solved.permutation].sum().item()
    assert value == pytest.approx(_optimum(formed), rel=1e-9)
    assert solved.gap <= 1e-8 * value


def test_projection_bounds_hold(generator: torch.Generator) -> None:
    n = 150
    plain = ((torch.randn(n, 37, generator=generator), torch.randn(n, 37, generator=generator)),)
    signed = ((torch.randn(n, 300, generator=generator), torch.randn(n, 300, generator=generator)),)
    factors = Factors(plain, signed)
    exact = form(factors).double()
    sketches = [_projection._sketch_side(factors, side) for side in (0, 1)]
    for _ in range(6):
        left, right = (sketch.side() for sketch in sketches)
        bound = left[0] @ right[0].T + (left[1] @ right[1].T).abs()
        assert bool((bound.double() >= exact - 1e-6).all())
        sketches = [sketch.halved() for sketch in sketches]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    similarity = torch.zeros(4, 4)
    similarity[2, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        assign(similarity)
    with pytest.raises(RotationMergeError, match="NaN or infinite"):
        assign_factored([(similarity, similarity)])


def test_wrong_shapes_and_types_are_refused() -> None:
    square, row = torch.zeros(3, 3), torch.zeros(3)
    with pytest.raises(ValueError, match="square"):
        assign(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="floating"):
        assign(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one pair"):
        assign_factored([])
    with pytest.raises(ValueError, match="equal within a pair"):
        assign_factored([(square, torch.zeros(3, 2))])
    with pytest.raises(ValueError, match="one n"):
        assign_factored([(square, square)], [(torch.zeros(2, 2), torch.zeros(2, 2))])
    with pytest.raises(ValueError, match="not a permutation"):
        certificate(square, torch.tensor([0, 0, 1]), row)
    with pytest.raises(ValueError, match="finite numbers"):
        certificate(square, torch.arange(3), row * float("nan"))


def test_large_finite_entries_are_no_error() -> None:
    similarity = torch.full((4, 4), 3e38)
    found = assign(similarity)
    assert np.isfinite(found.value)
    assert torch.equal(found.permutation, torch.arange(4))
