"""Matching the channels of a gated convolution: planted twins, noise, certificates, what is not asked for."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture.model import Space
from rotation_merge.matching.convolution import match_convolution
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.symmetry.convolution import FACTORS, ConvolutionGroup, ConvolutionTransform

COLUMNS = {"first": 7, "second": 7, "filter": 3, "shift": 1, "third": 7, "out": 6}


def rows(n: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {role: torch.randn(n, width, dtype=torch.float64, generator=g) for role, width in COLUMNS.items()}


def moved(transform: ConvolutionTransform, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {role: transform.act(x, role, 0) for role, x in tensors.items()}


def left(anchor: dict[str, Tensor], donor: dict[str, Tensor]) -> float:
    return float(sum((anchor[role] - donor[role]).square().sum() for role in anchor))


def matched(
    anchor: dict[str, Tensor], donor: dict[str, Tensor], **options: object
) -> tuple[ConvolutionTransform, float]:
    space = Space("channels", "convolution", {"size": len(anchor["out"])})
    sides = [Side(role, anchor[role], donor[role]) for role in FACTORS]
    return match_convolution(space, sides, AlignConfig(**options))


def test_the_product_does_not_change() -> None:
    """out @ (third x * filter(first x * second x) + shift) of any element, as LFM2 computes it."""
    own, x = rows(5, 1), torch.randn(4, 7, dtype=torch.float64)
    twin = moved(ConvolutionGroup(5, True, True).random(torch.Generator().manual_seed(2)), own)

    def computed(w: dict[str, Tensor]) -> Tensor:
        inner = (x @ w["first"].T) * (x @ w["second"].T)
        return (x @ w["third"].T * (inner * w["filter"].sum(1) + w["shift"][:, 0])) @ w["out"]

    torch.testing.assert_close(computed(twin), computed(own))


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_planted_order_with_its_factors_is_found(noise: float) -> None:
    anchor, other = rows(9, 1), rows(9, 5)
    there = ConvolutionGroup(9, True, True).random(torch.Generator().manual_seed(2))
    noisy = {role: x + noise * other[role] for role, x in anchor.items()}
    found, gap = matched(anchor, moved(there, noisy))
    both = found.compose(there)
    assert both.element.permutation.is_identity()
    after = left(anchor, moved(found, moved(there, noisy)))
    assert after <= 1e-20 if noise == 0 else after < left(anchor, noisy)
    assert gap <= 1e-3


@pytest.mark.slow
def test_the_gap_holds_for_every_order() -> None:
    """Of strangers: no order with factors found from many starts is nearer than what the gap leaves open."""
    anchor, donor = rows(4, 1), rows(4, 2)
    found, gap = matched(anchor, donor)
    after = left(anchor, moved(found, donor))
    norm = sum(float(x.square().sum()) for x in anchor.values())
    assert after <= left(anchor, donor)
    g = torch.Generator().manual_seed(0)
    for order in permutations(range(4)):
        picked = {role: x[list(order)] for role, x in donor.items()}
        for _ in range(3):
            tried = ConvolutionGroup(4, False, True).random(g)
            refined = tried.compose(ConvolutionGroup(4, True, True).identity())
            best, _ = matched(anchor, moved(refined, picked), ffn="none")
            assert left(anchor, moved(best, moved(refined, picked))) >= after - gap * norm - 1e-9


def test_what_is_not_asked_for_stays() -> None:
    anchor = rows(6, 1)
    donor = moved(ConvolutionGroup(6, True, False).random(torch.Generator().manual_seed(2)), anchor)
    found, _ = matched(anchor, donor, scaling=False)
    assert left(anchor, moved(found, donor)) == 0
    assert found.element.scaling.is_identity()
    found, _ = matched(anchor, donor, ffn="none")
    assert found.element.permutation.is_identity()
    assert not found.element.scaling.is_identity()


def test_equal_models_and_channels_of_zeros_keep_their_places() -> None:
    anchor = rows(5, 1)
    assert matched(anchor, anchor)[0].is_identity()
    empty = {role: x.clone() for role, x in anchor.items()}
    for x in empty.values():
        x[2] = 0
    found, _ = matched(empty, {role: x.clone() for role, x in empty.items()} | {"out": empty["out"] * 1.0})
    assert found.is_identity()
    nearly = {**empty, "out": empty["out"] + 1e-3}
    found, _ = matched(empty, nearly)
    assert bool(found.element.scaling.factor.isfinite().all())
    assert left(empty, moved(found, nearly)) <= left(empty, nearly)
