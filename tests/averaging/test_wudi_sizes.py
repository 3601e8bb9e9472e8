"""`wudi` of maps whose Grams are solved in float32, against its equation solved in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rotation_merge.averaging.sliced import SlicedMatrix
from rotation_merge.averaging.wudi import SINGLE, Wudi, closed_form, prior_of

WITHIN = 2e-5
"""Of the length of the merged change."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def low_rank(outputs: int, inputs: int, seed: int) -> Tensor:
    """Of rank 8."""
    return random(outputs, 8, seed=seed) @ random(8, inputs, seed=seed + 1)


def rounded(outputs: int, inputs: int, seed: int) -> Tensor:
    """Rank 8 with noise, between models in bfloat16."""
    base, change = random(outputs, inputs).bfloat16(), low_rank(outputs, inputs, seed) + random(outputs, inputs, seed=9)
    return (base.double() + 0.01 * change).bfloat16().double() - base.double()


CHANGES: dict[str, Any] = {
    "rank 8": lambda *size: [low_rank(*size, seed=1), low_rank(*size, seed=3)],
    "rank 8 and noise in bfloat16": lambda *size: [rounded(*size, seed=1), rounded(*size, seed=3)],
    "nearly the same": lambda *size: [rounded(*size, seed=1), rounded(*size, seed=1) + 1e-6 * random(*size)],
    "one is zero": lambda *size: [random(*size), 0.0 * random(*size)],
    "of very unequal lengths": lambda *size: [1e-25 * random(*size), random(*size, seed=1)],
}


def shares_of(changes: list[Tensor]) -> list[float]:
    return [1 / float(d.square().sum()) if d.any() else 0.0 for d in changes]


def solved(changes: list[Tensor], prior: Tensor, ridge: float) -> Tensor:
    """The minimum of ``sum_t a_t |(D - D_t) D_t^T|^2 + l |D - M|^2``, by its normal equation."""
    grams = [share * (d.mT @ d) for share, d in zip(shares_of(changes), changes, strict=True)]
    total = sum(grams, torch.zeros_like(grams[0]))
    penalty = ridge * total.square().sum() / total.trace()
    right = sum((d @ gram for d, gram in zip(changes, grams, strict=True)), penalty * prior)
    return torch.linalg.solve(total + penalty * torch.eye(len(total), dtype=torch.float64), right, left=False)


class Systems(TorchDispatchMode):
    """Notes the type and the size of every matrix that is decomposed by Cholesky."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[tuple[torch.dtype, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "linalg_cholesky" in str(func):
            self.seen.append((args[0].dtype, len(args[0])))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [(1040, 1024), (520, 1060)], ids=["by inputs", "by outputs"])
@pytest.mark.parametrize("kind", CHANGES)
def test_large_maps_in_float32(kind: str, size: tuple[int, int]) -> None:
    """Any prior; the smaller of the two systems is solved."""
    changes, prior = CHANGES[kind](*size), random(*size, seed=5)
    prior *= changes[0].norm() / prior.norm()
    with Systems() as systems:
        result = closed_form(changes, shares_of(changes), prior, 0.05)
    assert systems.seen == [(torch.float32, min(size[1], 2 * size[0]))]
    expected = solved(changes, prior, 0.05)
    assert float((result - expected).norm() / expected.norm()) < WITHIN


@pytest.mark.parametrize(("size", "ridge"), [((1024, 1024), 0.009), ((500, 1010), 0.05), ((511, 1200), 0.05)])
def test_small_ridges_and_maps_in_float64(size: tuple[int, int], ridge: float) -> None:
    changes, prior = [low_rank(*size, seed=1), low_rank(*size, seed=3)], random(*size, seed=5)
    result, expected = closed_form(changes, shares_of(changes), prior, ridge), solved(changes, prior, ridge)
    assert float((result - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.parametrize(("size", "count"), [((9, 14), 2), ((12, 14), 2), ((5, 14), 3), ((20, 14), 3), ((4, 14), 3)])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_every_way_solves_the_same_equation(size: tuple[int, int], count: int, ridge: float) -> None:
    """By inputs, through either side of a change, and by outputs. Without a ridge the prior counts where no change has
    inputs."""
    changes, prior = [random(*size, seed=seed) for seed in range(count)], random(*size, seed=9)
    if not ridge:
        kernel = random(3, size[1], seed=8)
        kernel = torch.linalg.qr(kernel.mT)[0]
        changes = [d - d @ kernel @ kernel.mT for d in changes]
    result = closed_form(changes, shares_of(changes), prior, ridge)
    if ridge:
        torch.testing.assert_close(result, solved(changes, prior, ridge), atol=1e-10, rtol=1e-10)
    else:
        torch.testing.assert_close(result @ kernel, prior @ kernel, atol=1e-8, rtol=1e-8)
        rest = sum(share * (result - d) @ d.mT @ d for share, d in zip(shares_of(changes), changes, strict=True))
        torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-8, rtol=0)


@pytest.mark.parametrize("size", [(1040, 1024), (520, 1060)], ids=["by inputs", "by outputs"])
@pytest.mark.parametrize("count", [1, 2])
def test_equal_changes_stay_as_they_are(count: int, size: tuple[int, int]) -> None:
    change = rounded(*size, seed=1)
    matrices, parameters = [SlicedMatrix.of(change)] * count, {"ridge": 0.05}
    assert torch.equal(Wudi().change(matrices, [1.0] * count, parameters).whole(), change)


def test_slices_in_float32() -> None:
    changes, parameters = [random(2500, SINGLE, seed=seed) for seed in range(2)], {"ridge": 0.05}
    parts = [slice(0, 1400), slice(1400, 2500)]
    matrices = [SlicedMatrix(lambda part, d=d: d[part], parts) for d in changes]
    with Systems() as systems:
        result = Wudi().change(matrices, [1.0, 1.0], parameters).whole()
    assert [dtype for dtype, _ in systems.seen] == [torch.float32]
    expected = solved(changes, prior_of(matrices, [1.0, 1.0])(changes), 0.05)
    assert float((result - expected).norm() / expected.norm()) < WITHIN
