"""The laws of every group: of its elements, of the best one, of membership, of learning, and of files."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from matching_support import gen, normal
from torch import Tensor

from rotation_merge.symmetry import Linear, Stats, Transform
from rotation_merge.symmetry.admitted import SpaceGroup
from rotation_merge.symmetry.element import Element
from rotation_merge.symmetry.group import Group, Monomials, Planar, Rotations, learnable, moved

N, R, D, M = 3, 2, 6, 7
"""Heads, of two query heads each, of six coordinates, read from seven."""

HALVES, NEIGHBOURS = (0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2)
GROUPS: dict[str, Group] = {
    "fixed": Monomials(),
    "signs": Monomials(signed=True),
    "signs of pairs": Monomials(signed=True, ties=HALVES),
    "sign of the head": Monomials(signed=True, ties=(0,) * D),
    "scales": Monomials(signed=True, scaled=True),
    "scales of pairs": Monomials(signed=True, scaled=True, ties=(0, 0, 1, 1)),
    "orders": Monomials(0),
    "orders behind": Monomials(2),
    "orders, signs": Monomials(0, signed=True),
    "orders, scales": Monomials(0, scaled=True),
    "orders, scales, signs": Monomials(0, signed=True, scaled=True),
    "orders, scales of degree 2": Monomials(0, scaled=True, degree=2),
    "maps": Rotations(),
    "maps, scale": Rotations(scaled=True),
    "maps, then scale": Rotations(scaled=True, sequential=True),
    "maps that fix ones": Rotations(fixes_ones=True),
    "planar": Planar(pairs=HALVES),
    "planar, scales": Planar(True, pairs=HALVES),
    "planar, then scales": Planar(True, sequential=True, pairs=NEIGHBOURS),
    "planar, neighbours, scales": Planar(True, pairs=NEIGHBOURS),
    "planar, partial": Planar(True, pairs=(0, 0, 1, 1), unturned=Rotations(scaled=True)),
    "planar, partial, no scale": Planar(pairs=(0, 1, 0, 1), unturned=Rotations()),
}
groups = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- elements


@groups
@pytest.mark.parametrize(("shape", "batch_dim", "dim"), [((D, N), 1, 0), ((2, D, 5, N), 3, 1), ((N, 2, D), 0, -1)])
def test_elements_act_as_their_matrices_along_any_dimension(
    group: Group, shape: tuple[int, ...], batch_dim: int, dim: int
) -> None:
    """Of any strides, dtype kept, nothing changed in place; dual axes by the inverse transpose."""
    g = group.random(N, D, gen(1))
    matrices = {False: g.matrices(), True: torch.linalg.inv(g.matrices()).mT}
    for dtype, dual in itertools.product((torch.float64, torch.bfloat16), matrices):
        base = normal(*shape, 2).to(dtype)
        x, before = base[..., 0], base.clone()
        result = g.act(x, batch_dim, dim, dual)
        assert (result.dtype, result.shape) == (dtype, x.shape)
        assert torch.equal(base, before)
        straight = x.double().movedim((batch_dim, dim), (0, 1))
        straight = (matrices[dual] @ straight.reshape(N, D, -1)).reshape(straight.shape)
        off = (result.double().movedim((batch_dim, dim), (0, 1)) - straight).abs().max()
        assert off <= 8 * torch.finfo(dtype).eps * straight.abs().max()


# --- the best element


@dataclass(frozen=True)
class Pair:
    """Anchor and donor: keys (N, 1, D, M), queries (N, R, D, M), and what only follows the order."""

    anchor: tuple[Tensor, ...]
    donor: tuple[Tensor, ...]

    @classmethod
    def random(cls, seed: int = 0, follow: bool = False) -> Pair:
        shapes = [(N, 1, D, M), (N, R, D, M), (N, R, D, M)][: 2 + follow]
        draws = [
            [(1 + s + k) * normal(*shape, seed=9 * seed + 3 * k + s) for s, shape in enumerate(shapes)] for k in (0, 1)
        ]
        return cls(tuple(draws[0]), tuple(draws[1]))

    @property
    def stats(self) -> Stats:
        products = [torch.einsum("nrdm,nrem->nde", a, b) for a, b in zip(self.anchor, self.donor, strict=True)]
        anchor, donor = ([x.square().sum((1, 3)) for x in model] for model in (self.anchor, self.donor))
        return Stats(tuple(products), tuple(donor), tuple(anchor))

    def gain(self, element: Element) -> Tensor:
        """What an element takes off the squared distance, but for a constant, by applying it."""
        total = torch.zeros(N, dtype=torch.float64)
        for place, (a, b) in enumerate(zip(self.anchor, self.donor, strict=True)):
            total += a.square().sum((1, 2, 3)) - (a - act(element, b, place)).square().sum((1, 2, 3))
        return total


def act(element: Element, x: Tensor, place: int) -> Tensor:
    if place == 2:
        return element.order().act(x, 0, 2)
    return (element.powered() if place else element).act(x, 0, 2, dual=place == 1)


@groups
@pytest.mark.parametrize("follow", [False, True])
def test_no_element_is_better_than_the_best(group: Group, follow: bool) -> None:
    """Neither one drawn from the group nor one nearby; what statistics say of an element is what applying it gains."""
    pair, still = Pair.random(2, follow), group.identity(N, D)
    best = group.solve(pair.stats)
    gain, rivals = pair.gain(best), [still, *(group.random(N, D, gen(seed)) for seed in range(30))]
    for seed in range(5):
        name = "matrix" if isinstance(best, Linear) else "factor"
        value = getattr(best, name)
        rivals.append(group.project(replace(best, **{name: value + 1e-3 * normal(*value.shape, seed=seed)})))
    for element in (best, still):
        close(pair.stats.gain(element), pair.gain(element))
    assert getattr(group, "sequential", False) or all((pair.gain(rival) <= gain + 1e-7).all() for rival in rivals)


@groups
def test_a_planted_element_is_found(group: Group) -> None:
    planted, pair = group.random(N, D, gen(11)), Pair.random()
    pair = Pair(pair.anchor, tuple(act(planted.inverse(), x, place) for place, x in enumerate(pair.anchor)))
    best, norm = group.solve(pair.stats), sum(x.square().sum((1, 2, 3)) for x in pair.anchor)
    if getattr(group, "sequential", False):
        assert (pair.gain(best) > 0.8 * norm).all()
    else:
        close(best.matrices(), planted.matrices(), 1e-7)


@groups
def test_equal_models_and_ties_get_the_identity(group: Group) -> None:
    """To the bit; also where coordinates are zero or equal, where nothing is known, and beside models that differ."""
    pair = Pair.random()
    for x in pair.anchor:
        x[:, :, 1] = x[:, :, 0]
        x[1, :, 2:4] = 0
        x[2] = 0
    nothing, still = torch.zeros(N, D, dtype=torch.float64), group.identity(N, D)
    unknown = Stats((torch.zeros(N, D, D).double(),) * 2, (nothing,) * 2, (nothing,) * 2)
    for stats in (Pair(pair.anchor, pair.anchor).stats, unknown):
        assert torch.equal(group.solve(stats).matrices(), still.matrices())
    stats = Pair.random().stats
    beside, free = (group.solve(s).matrices() for s in (stats.of_equals(torch.tensor([0, 1, 0]) > 0), stats))
    assert torch.equal(beside[1], still.matrices()[1])
    close(beside[[0, 2]], free[[0, 2]])


def test_signed_scaled_orders_against_brute_force() -> None:
    """Every order, each coordinate with the best factor of a fine grid."""
    pair, group = Pair.random(), Monomials(0, signed=True, scaled=True)
    grid = torch.linspace(-4, 4, 2001, dtype=torch.float64).exp()
    grid = torch.cat([grid, -grid])[:, None, None, None]
    (p, d), (m, w) = pair.stats.donor, pair.stats.products
    gain = (2 * grid * m - grid**2 * p[:, None] + 2 * w / grid - d[:, None] / grid**2).amax(0)
    orders = torch.tensor(list(itertools.permutations(range(D))))
    best = gain[:, torch.arange(D), orders].sum(-1).amax(1)
    reached = pair.gain(group.solve(pair.stats))
    assert (reached >= best - 1e-9).all()
    assert (reached <= best + 1e-4 * best.abs()).all()


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_map_and_scale_in_turn_find_what_a_search_finds(spread: float) -> None:
    """For O(2): all angles, orientations and scales. A scale after the map gains less, and leaves the map alone."""
    angle = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)
    turns = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).reshape(-1, 2, 2)
    maps = torch.cat([turns, turns @ torch.diag(torch.tensor([1.0, -1.0]).double())])
    scale = torch.linspace(-3, 3, 301, dtype=torch.float64).exp()
    a, b = (
        [normal(40, 2, 5, seed=k + side) * (spread * normal(40, 1, 1, seed=k + side + 3)).exp() for side in (0, 1)]
        for k in (0, 9)
    )
    donor, anchor = ((x[0].square().sum(-1), x[1].square().sum(-1)) for x in (b, a))
    stats = Stats((a[0] @ b[0].mT, a[1] @ b[1].mT), donor, anchor)
    p, q = (torch.einsum("kij,nij->nk", maps, m)[..., None] for m in stats.products)
    norms = [x.sum(-1)[:, None, None] for x in stats.donor]
    best = (2 * scale * p + 2 * q / scale - scale**2 * norms[0] - norms[1] / scale**2).flatten(1).amax(1)
    solved = [group.solve(stats) for group in (Rotations(True), Rotations(), Rotations(True, sequential=True))]
    reached, turned, later = map(stats.gain, solved)
    size = best.abs() + norms[0][:, 0, 0]
    assert ((best - reached) / size > 1e-9).double().mean() <= 0.05
    assert (turned <= later + 1e-12 * size).all()
    assert (later <= reached + 1e-9 * size).double().mean() >= 0.95
    close(solved[2].matrix / solved[2].matrix.square().sum(-1, keepdim=True).sqrt(), solved[1].matrix)


# --- membership and files


def space_of(group: Group) -> SpaceGroup:
    return SpaceGroup("stream", {"map": (group, N, D)})


def member(element: Any) -> Transform:
    return Transform("stream", {"map": element})


@groups
def test_a_group_admits_its_own_and_nothing_else(group: Group) -> None:
    space, g = space_of(group), group.random(N, D, gen(3))
    for element in (g, g.inverse(), g.compose(group.random(N, D, gen(4))), group.solve(Pair.random().stats)):
        assert space.admits(member(element))
        close(group.project(element).matrices(), element.matrices())
    off = Linear(g.matrices() @ (torch.eye(D, dtype=torch.float64) + 0.2 * normal(N, D, D, seed=4)))
    bad = [off, Linear(off.matrix[:2]), *broken(g), *nearly(g)]
    assert not any(space.admits(member(element)) for element in bad)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):  # what storage has rounded comes back inside
        stored = {n: x.to(dtype) if x.is_floating_point() else x for n, x in member(g).tensors().items()}
        again = space.restored(Transform.from_tensors("stream", stored))
        assert space.admits(again)
        close(again.elements["map"].matrices(), g.matrices(), 4 * torch.finfo(dtype).eps)
    assert not any(space.admits(space.restored(member(x))) for x in [Linear(normal(N, D, D)), *broken(g)])


def nearly(element: Element) -> list[Element]:
    """One wrong entry of one map or of one factor, which no mean over all of them shows."""
    if isinstance(element, Linear):
        x = element.matrix.clone()
        x[0, 0] += 1e-3 * x[0, 1]
        return [Linear(x)]
    f = element.factor.clone()
    f[0, 0] *= -1.001
    return [] if bool((element.factor.abs() != 1).any()) else [replace(element, factor=f)]


def broken(element: Element) -> list[Element]:
    if isinstance(element, Linear):
        x = element.matrix
        return [Linear(bad) for bad in (x * 0, x * math.nan, x / 0, x * 1e9, x[:, :-1, :-1], x.sum(-1, keepdim=True))]
    index, f = element.index, element.factor
    orders = [index[:, :1].expand(index.shape)] * (index.shape[1] > 1) + [index + 1, index[:, :-1]]
    factors = [f * 0, f * math.nan, f * math.inf, f * 1e9, f[:, :-1]]
    of_degree = replace(element, degree=element.degree + 1)
    return [replace(element, index=x) for x in orders] + [replace(element, factor=x) for x in factors] + [of_degree]


# --- learning


@groups
@pytest.mark.parametrize("scales", [False, True])
def test_learning_starts_at_the_element_and_stays_in_the_group(group: Group, scales: bool) -> None:
    g, x = group.random(N, D, gen(3)), normal(N, D, 4)
    step = learnable(group, g, scales)
    assert (step is None) == (learnable(group, group.identity(N, D), scales) is None)
    if step is None:
        return
    for exact in (False, True):
        close(moved(group, g, step, scales, exact).act(x, 0, 1), g.act(x, 0, 1), 1e-12 if exact else 1e-5)
    step = (step + 0.3 * torch.randn(step.shape, generator=gen(0))).requires_grad_(True)
    soft = moved(group, g, step, scales, exact=False)
    assert not soft.is_identity()
    assert not moved(
        group, group.identity(N, D), torch.zeros_like(step).requires_grad_(True), scales, False
    ).is_identity()
    (soft.act(x, 0, 1) * normal(N, D, 4, seed=5)).sum().backward()
    assert step.grad is not None
    assert bool(step.grad.isfinite().all() and step.grad.any())
    with torch.no_grad():
        hard = moved(group, g, step, scales, exact=True)
    assert space_of(group).admits(member(hard))
    for dual in (False, True):
        close(soft.act(x, 0, 1, dual).detach(), hard.act(x, 0, 1, dual), 1e-4)
