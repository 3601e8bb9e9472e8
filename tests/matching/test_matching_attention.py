"""Matching the heads of a layer: planted truths, no order and no element better, ties."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from cli_support import CHECKPOINTS
from matching_support import (
    attention,
    distance,
    gen,
    head_orders,
    left,
    moved,
    noisy,
    planted,
    reordered,
    sides_of,
    tensors,
)
from torch import Tensor

import rotation_merge as rm
from rotation_merge import AlignConfig
from rotation_merge.architecture.model import Space
from rotation_merge.matching.heads import HeadPart, match_heads
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.admitted import admitted

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary": 4},
    "interleaved": {"rotary": 4, "interleaved": True},
    "partial": {"rotary": 2},
    "head norm": {"rotary": 4, "norm": "rms_head"},
    "layer norm": {"norm": "layer_head"},
    "gated": {"values": "gated"},
    "shared": {"norm": "shared", "values": "normed"},
}
kinds = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS.keys())
OPTIONS: dict[str, dict[str, Any]] = {
    "scaled": {},
    "unscaled": {"scaling": False},
    "sequential": {"scaling": "sequential"},
    "coordinates permuted": {"attention": "permutation"},
    "order alone": {"attention": "none"},
}
every = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
Tensors = dict[str, Tensor]


def match(space: Space, anchor: Tensors, donor: Tensors, **options: Any) -> Transform:
    config = AlignConfig(**{"heads": "permutation", **options})
    found = match_heads(space, sides_of(anchor, donor), config)
    assert admitted(space, config).admits(found.transform)
    before, norm = distance(anchor, donor), sum(float(x.double().square().sum()) for x in anchor.values())
    after = left(anchor, donor, found.transform)
    assert found.squares == pytest.approx((before, after, norm), rel=1e-5, abs=1e-5 * before + 1e-9)
    return found.transform


@kinds
@every
@pytest.mark.parametrize(
    ("shape", "noise"), [((3, 1), None), ((2, 2), None), ((1, 3), None), ((3, 1), 0.05), ((2, 2), 0.3), ((1, 3), 0.0)]
)
def test_no_order_is_better(
    facts: dict[str, Any], options: dict[str, Any], shape: tuple[int, int], noise: float | None
) -> None:
    """Of pairs with nothing in common, too. Query heads inside groups are found in turn with the maps, nearly the best.

    Heads of near models are at their places, and those of a planted twin are found: only the noise is left.
    """
    space, config = attention(*shape, 4, **facts), AlignConfig(heads="permutation", **options)
    anchor, truth = tensors(space, 20, 0, spread=0.3), planted(space, config, 5)
    near = tensors(space, 20, 50, spread=0.3) if noise is None else noisy(anchor, noise, 6)
    for donor in (near, *([] if noise is None else [moved(near, truth.inverse())])):
        best = left(anchor, donor, match(space, anchor, donor, **options))
        orders = [reordered(space, donor, *order) for order in head_orders(*shape)]
        others = [left(anchor, x, match(space, anchor, x, **{**options, "heads": "none"})) for x in orders]
        exact = shape[1] == 1 and options.get("scaling", True) is False
        assert best <= others[0] * (1 + 1e-9)
        assert best <= min(others) * (1 + (1e-9 if exact else 0.05)) + 1e-14 * distance(anchor, donor)
        if noise is not None and config.scaling != "sequential":
            assert best <= distance(anchor, near) * (1 + 1e-9) + 1e-14 * distance(anchor, donor)


@kinds
def test_near_heads_are_told_without_products_of_other_pairs(
    facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadPart, "tables", property(lambda part: pytest.fail("not at home")))
    space = attention(4, 2, 16, **{name: 4 * x if name == "rotary" else x for name, x in facts.items()})
    anchor = tensors(space, 60, 0, spread=0.3, dtype=torch.bfloat16)
    assert match(space, anchor, noisy(anchor, 0.02, 2)).head_order().tolist() == list(range(8))  # type: ignore[union-attr]


@pytest.mark.parametrize("free", [True, False])
def test_spectral_pairing_finds_permuted_heads(free: bool) -> None:
    space = attention(3, 2, 4, free_groups=free)
    anchor = tensors(space, 30, 0, spread=0.5)
    order, queries = torch.tensor([2, 0, 1] if free else [0, 1, 2]), torch.tensor([[1, 0], [0, 1], [1, 0]])
    donor = reordered(space, anchor, order, queries)
    found = match_heads(space, sides_of(anchor, donor), AlignConfig(heads="spectral"))
    assert left(anchor, donor, found.transform) == 0
    assert "singular values" in found.notes[0]


def test_one_side_alone_is_matched() -> None:
    """Of multi-head latent attention, whose keys are shared, only the queries' axes may live in the space."""
    for roles in ("qv", "kvo", "o"):
        space = attention(3, 2, 4)
        anchor, donor = ({r: x for r, x in tensors(space, 9, seed).items() if r in roles} for seed in (0, 1))
        for heads in ("none", "permutation", "spectral"):
            best = match(space, anchor, donor, heads=heads)
            assert left(anchor, donor, best) < distance(anchor, donor)


def test_orders_that_are_not_free_stay() -> None:
    fixed, inside = attention(3, 2, 4, free_order=False), attention(2, 3, 4, free_groups=False)
    found = match_heads(fixed, sides_of(tensors(fixed, 9, 0), tensors(fixed, 9, 1)), AlignConfig(heads="permutation"))
    assert found.transform.head_order().tolist() == list(range(6))  # type: ignore[union-attr]
    assert "fixed" in found.notes[0]
    best = match(inside, tensors(inside, 9, 0), tensors(inside, 9, 1))
    assert best.orders[0].tolist() == [0, 1]
    assert best.orders[1].tolist() != [[0, 1, 2]] * 2


@kinds
@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_heads_stay_bit_for_bit(facts: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also where heads are zero, equal, of low rank or ill-conditioned, and where another head of the donor differs."""
    space = attention(4, 2, 4, **facts)
    anchor = tensors(space, 1000, 0, dtype=dtype)
    for role, x in anchor.items():
        x *= torch.logspace(0, -7.2, 4, dtype=dtype)[:, None]
        x.copy_(torch.einsum("de,...em->...dm", torch.linalg.qr(torch.randn(4, 4, generator=gen(3)))[0].to(dtype), x))
        x[0] = 0
        x[2] = x[1]
        x[3, ..., 1:, :] = 0 if role in "kv" else x[3, ..., 1:, :]
    assert match(space, anchor, {role: x.clone() for role, x in anchor.items()}, **options).is_identity()
    donor, kept = {role: x.clone() for role, x in anchor.items()}, [0, 2, 3]
    donor["k"][1, 0] += 0.01
    donor["o"][1, 0] += 0.01
    after = moved(donor, match(space, anchor, donor, **options))
    assert all(torch.equal(after[role][kept], x[kept]) for role, x in anchor.items())


@kinds
def test_storage_and_strides_do_not_matter(facts: dict[str, Any]) -> None:
    space = attention(3, 2, 4, **facts)
    models = [tensors(space, 50, seed, dtype=torch.bfloat16) for seed in (0, 1)]
    double = [{role: x.double() for role, x in model.items()} for model in models]
    strided = [{role: x.mT.contiguous().mT for role, x in model.items()} for model in models]
    best = match(space, *double)
    for pair in (models, strided, (models[0], double[1])):
        again = match(space, *pair)
        assert torch.equal(again.head_order(), best.head_order())  # type: ignore[arg-type]
        assert left(*double, again) == pytest.approx(left(*double, best), rel=1e-5)


# --- trained weights


@cache
def after(name: str, **options: Any) -> dict[str, float]:
    """Squared distances left in every space of two shipped models, by space name."""
    alignment = rm.align(*(CHECKPOINTS / f"{name}-{seed}" for seed in (0, 1)), **options)
    return {row.space: row.distance_after**2 for row in alignment.rows}


def of_attention(distances: dict[str, float]) -> float:
    return sum(value for name, value in distances.items() if "ffn" not in name and "mlp" not in name)


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_every_step_of_the_ladder_pays(name: str) -> None:
    """none > rotation > the paper's sequence > joint scale > joint head order, in every layer, better than spectral."""
    ladder = [
        after(name, scaling=False),
        after(name, scaling="sequential"),
        after(name),
        after(name, heads="permutation"),
    ]
    spectral = after(name, heads="spectral")
    for wider, narrower in (*zip(ladder[1:], ladder, strict=False), (ladder[-1], spectral)):
        assert all(wider[space] <= narrower[space] * (1 + 1e-6) for space in narrower)
    totals = [of_attention(step) for step in ladder]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] > totals[2] * (1 + 1e-5)  # the joint scale is strictly better than the sequence
    assert totals[2] > totals[3] * (1 + 1e-3)  # and so is the joint head order than none
    assert totals[3] < 0.95 * of_attention(spectral)
