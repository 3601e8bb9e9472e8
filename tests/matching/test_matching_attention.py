"""Matching the heads of a layer: planted truths, no order and no element better, bounds, ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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

from rotation_merge import AlignConfig
from rotation_merge.architecture.model import Space
from rotation_merge.matching.heads import match_heads
from rotation_merge.matching.matrix_pairs import Side
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


def after(space: Space, anchor: Tensors, donor: Tensors, **options: Any) -> float:
    return left(anchor, donor, match(space, anchor, donor, **options))


@kinds
@every
@pytest.mark.parametrize("shape", [(5, 1), (3, 2), (1, 4)])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_planted_element_is_found(
    facts: dict[str, Any], options: dict[str, Any], shape: tuple[int, int], noise: float
) -> None:
    """The order of heads, and what is left is no more than the noise."""
    space, config = attention(*shape, 4, **facts), AlignConfig(heads="permutation", **options)
    anchor = tensors(space, 60, 0, spread=0.1)
    truth, twin = planted(space, config, 5), noisy(anchor, noise, 6)
    donor = moved(twin, truth.inverse())
    best = match(space, anchor, donor, **options)
    order = best.head_order()
    assert order is not None
    assert torch.equal(order, truth.head_order())
    if config.scaling != "sequential":
        assert left(anchor, donor, best) <= distance(anchor, twin) * (1 + 1e-9) + 1e-14 * distance(
            anchor, moved(anchor, truth)
        )


@kinds
@every
@pytest.mark.parametrize("shape", [(3, 1), (2, 2), (1, 3)])
def test_no_order_is_better(facts: dict[str, Any], options: dict[str, Any], shape: tuple[int, int]) -> None:
    """Of pairs with nothing in common. Query heads inside groups are found in turn with the maps, nearly the best."""
    space = attention(*shape, 4, **facts)
    anchor, donor = tensors(space, 7, 0, spread=0.4), tensors(space, 7, 50, spread=0.4)
    reached = after(space, anchor, donor, **options)
    orders = [reordered(space, donor, *order) for order in head_orders(*shape)]
    others = [after(space, anchor, other, **{**options, "heads": "none"}) for other in orders]
    exact = shape[1] == 1 and options.get("scaling", True) is False
    assert reached <= others[0] * (1 + 1e-9)
    assert reached <= min(others) * (1 + (1e-9 if exact else 0.05))


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
            assert after(space, anchor, donor, heads=heads) < distance(anchor, donor)


def test_orders_that_are_not_free_stay() -> None:
    fixed = attention(3, 2, 4, free_order=False)
    anchor, donor = tensors(fixed, 9, 0), tensors(fixed, 9, 1)
    found = match_heads(fixed, sides_of(anchor, donor), AlignConfig(heads="permutation"))
    assert found.transform.head_order().tolist() == list(range(6))  # type: ignore[union-attr]
    assert "fixed" in found.notes[0]
    inside = attention(2, 3, 4, free_groups=False)
    anchor, donor = tensors(inside, 9, 0), tensors(inside, 9, 1)
    best = match(inside, anchor, donor)
    assert best.orders[0].tolist() == [0, 1]
    assert best.orders[1].tolist() != [[0, 1, 2]] * 2


@kinds
@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_equal_heads_stay_bit_for_bit(facts: dict[str, Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also where heads are zero, equal or of low rank, and where another head of the donor differs."""
    space = attention(4, 2, 4, **facts)
    anchor = tensors(space, 9, 0, dtype=dtype)
    for role, x in anchor.items():
        x[0] = 0
        x[2] = x[1]
        x[3, ..., 1:, :] = 0 if role in "kv" else x[3, ..., 1:, :]
    for touched in (False, True):
        donor = {role: x.clone() for role, x in anchor.items()}
        if touched:
            donor["k"][1, 0] += 0.01
            donor["o"][1, 0] += 0.01
        transform = match(space, anchor, donor, **options)
        assert transform.is_identity() or touched
        kept = [g for g in range(4) if not touched or g != 1]
        assert all(torch.equal(moved(donor, transform)[role][kept], x[kept]) for role, x in anchor.items())


@pytest.mark.parametrize("scaling", [True, False])
def test_rank_deficient_maps_are_nearest_the_identity(scaling: bool) -> None:
    """A head of rank 2 that was turned inside its range: the rest of the head's coordinates stays put."""
    space, truth = attention(1, 1, 6), torch.eye(6, dtype=torch.float64)
    anchor = tensors(space, 9, 0)
    for x in anchor.values():
        x[..., 2:, :] = 0
    truth[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    turned = match(space, anchor, {role: truth.T @ x for role, x in anchor.items()}, scaling=scaling)
    for name in ("qk", "vo"):
        torch.testing.assert_close(turned.elements[name].matrices()[0], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds
def test_storage_and_strides_do_not_matter(facts: dict[str, Any], dtype: torch.dtype) -> None:
    space = attention(3, 2, 4, **facts)
    models = [tensors(space, 50, seed, dtype=dtype) for seed in (0, 1)]
    double = [{role: x.double() for role, x in model.items()} for model in models]
    strided = [{role: x.mT.contiguous().mT for role, x in model.items()} for model in models]
    best = match(space, *double)
    for pair in (models, strided):
        again = match(space, *pair)
        assert torch.equal(again.head_order(), best.head_order())
        assert left(*double, again) == pytest.approx(left(*double, best), rel=1e-5)
    mixed = [Side(role, models[0][role], double[1][role]) for role in models[0]]
    found = match_heads(space, mixed, AlignConfig(heads="permutation"))
    assert torch.equal(found.transform.head_order(), best.head_order())


def test_gains_of_norms_are_exchanged_by_their_own_heads() -> None:
    """Those that all heads share, and those of a norm over all heads, which follow the order of the groups."""
    for norm, roles in (("rms_head", ("q_norm", "k_norm")), ("rms_all", ("q_gain", "k_gain"))):
        space = attention(3, 2, 4, rotary=4, norm=norm)
        anchor = tensors(space, 40, 0)
        anchor |= {
            role: torch.randn(*space.factors(role), 1, generator=gen(n)).double() for n, role in enumerate(roles)
        }
        truth = planted(space, AlignConfig(heads="permutation"), 3)
        donor = moved(anchor, truth.inverse())
        best = match(space, anchor, donor)
        assert left(anchor, donor, best) <= 1e-18 * distance(anchor, donor)
        assert not best.elements["gains"].is_identity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("facts", [{}, {"rotary": 32}, {"norm": "rms_head"}])
def test_heads_that_are_equal_stay_beside_heads_that_are_not(dtype: torch.dtype, facts: dict[str, object]) -> None:
    """Bit for bit, however ill-conditioned: the rounding of their statistics must not turn them."""
    heads, d, width = 4, 32, 1000
    sizes = {"groups": heads, "per_group": 1, "head_dim": d, "value_dim": d}
    space = Space("attn", "attention", sizes, **facts)  # type: ignore[arg-type]
    g, sides, equal = gen(30), [], torch.tensor([True, False, True, False])

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    for role in ("q", "k", "v", "o"):
        spectrum = torch.logspace(0, -7.2, d, dtype=torch.float64)[:, None]
        x = torch.linalg.qr(normal(heads, d, d))[0] @ (spectrum * normal(heads, d, width))
        anchor = (x * (3 * normal(heads, 1, 1)).exp()).reshape(*space.factors(role), width).to(dtype)
        kept = equal.reshape(heads, *[1] * (anchor.ndim - 1))
        sides.append(Side(role, anchor, torch.where(kept, anchor, torch.flip(anchor, [0]))))
    transform = match_heads(space, sides, AlignConfig()).transform
    for side in sides:
        after = transform.act(side.donor, side.role, 0)
        assert torch.equal(after[equal], side.anchor[equal]), side.role
        assert not torch.equal(after[~equal], side.donor[~equal]) or "norm" in facts
