"""Bounds from the other side of the joint problem of map and scale: never below a scale's gain, and attained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotation_merge.linalg.polar import nuclear_norm
from rotation_merge.linalg.saddle import joint_ceiling, plane_scale
from rotation_merge.symmetry.planar import PlanarGroup
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.statistics import Grams

GRID = torch.linspace(-5, 5, 301, dtype=torch.float64).exp()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heads(count: int, size: int, shared: float, stretch: float, smaller: float = 1.0) -> Grams:
    """Statistics of heads of an anchor and of a donor that shares some of it, stretched and of another size."""
    sides = []
    for seed, factor in ((1, stretch * smaller), (3, smaller / stretch)):
        anchor = randn(count, size, 20, seed=seed)
        sides.append((anchor, (shared * anchor + (1 - shared) * randn(count, size, 20, seed=seed + 1)) * factor))
    (a_p, b_p), (a_d, b_d) = sides
    norms = (x.square().sum(2) for x in (b_p, b_d, a_p, a_d))
    return Grams(a_p @ b_p.mT, a_d @ b_d.mT, *norms)


def gains(grams: Grams) -> Tensor:
    """What the best maps gain at each scale of the grid, (grid, N)."""
    primal, dual = grams.donor_primal.sum(1), grams.donor_dual.sum(1)
    return torch.stack(
        [2 * nuclear_norm(a * grams.primal + grams.dual / a) - a**2 * primal - dual / a**2 for a in GRID]
    )


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stretch", [1.0, 5.0])
def test_a_ceiling_lies_above_all_scales_and_close_to_the_best(shared: float, stretch: float) -> None:
    grams = heads(20, 12, shared, stretch)
    norms = grams.donor_primal.sum(1), grams.donor_dual.sum(1)
    ceiling, best = joint_ceiling(grams.primal, grams.dual, norms), gains(grams).amax(0)
    assert bool((best <= ceiling).all())
    size = nuclear_norm(grams.primal) / stretch + nuclear_norm(grams.dual) * stretch
    assert float(((ceiling - best) / size).mean()) < 4e-3


@pytest.mark.parametrize("smaller", [0.01, 1.0, 100.0])
def test_every_donor_has_a_ceiling(smaller: float) -> None:
    """Where one side has no finite bound, as for donors much smaller than the anchor, another way finds it."""
    grams = heads(20, 6, 0.2, 3.0, smaller)
    found = joint_ceiling(grams.primal, grams.dual, (grams.donor_primal.sum(1), grams.donor_dual.sum(1)))
    assert bool(found.isinf().any()) == (smaller < 1)
    ceiling = OrthogonalGroup(rescale=True).ceiling(grams)
    assert bool(ceiling.isfinite().all())
    assert bool((OrthogonalGroup(rescale=True).solve(grams)[1] <= ceiling).all())
    empty = Grams(*(torch.zeros_like(x) for x in vars(grams).values() if isinstance(x, Tensor)))
    assert float(OrthogonalGroup(rescale=True).ceiling(empty).abs().max()) == 0


@pytest.mark.parametrize("size", [0.05, 1.0, 20.0])
def test_planes_have_the_best_scale_of_a_grid(size: float) -> None:
    """Between alike models all are proven; whatever is not is found in another way."""
    z, w = (torch.complex(randn(300, seed=s), randn(300, seed=s + 1)) * size for s in (1, 3))
    norms = (randn(300, seed=5).exp() + 0.1, randn(300, seed=6).exp() + 0.1)
    scale, proven = plane_scale(z, w, norms, torch.ones(300, dtype=torch.float64))
    assert float(proven.double().mean()) > (0.95 if size < 1 else 0.5 if size == 1 else -1)
    group = PlanarGroup(rescale=True)
    halves = [torch.stack([x, x], 1) / 2 for x in norms]
    _, gain = group.solve(Grams(z[:, None], w[:, None], *halves, *halves))
    known = [2 * (a * z + w / a).abs() - a**2 * norms[0] - norms[1] / a**2 for a in (*GRID, scale)]
    best = torch.stack(known).amax(0)
    assert bool((gain >= best - 1e-9 * (norms[0] + norms[1])).all())
    assert bool((known[-1] >= best - 1e-9 * (norms[0] + norms[1]))[proven].all())


def test_planes_that_gain_nothing_keep_their_scale() -> None:
    one = torch.ones(4, dtype=torch.float64)
    scale, proven = plane_scale(torch.complex(one, 0 * one), torch.complex(one, 0 * one), (one, one), 2 * one)
    assert torch.equal(scale, one)
    assert bool(proven.all())
    scale, proven = plane_scale(*(torch.complex(one, one),) * 2, (0 * one, one), one)
    assert torch.equal(scale, one)
    assert bool(proven.all())
