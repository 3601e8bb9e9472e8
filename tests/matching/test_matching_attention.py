"""Matching attention: optimal against brute force, ties, planted truth, comparison variants."""

import dataclasses
import itertools
import math

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

from rotation_merge import AlignConfig
from rotation_merge.matching import head_order as head_order_module
from rotation_merge.matching.attention import match_attention
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.symmetry.admitted import admitted
from rotation_merge.symmetry.ordered import with_orders

KINDS = {
    "plain": {},
    "rotary": {"rotary": 4},
    "interleaved": {"rotary": 4, "interleaved": True},
    "partial": {"rotary": 2},
    "head_norm": {"rotary": 4, "norm": "rms_head"},
    "partial_norm": {"rotary": 2, "norm": "rms_head"},
    "plain_norm": {"norm": "rms_head"},
    "layer_norm": {"norm": "layer_head"},
}
kinds = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS.keys())
SHAPES = [(3, 1), (2, 2), (1, 3)]


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_head_order_and_maps_against_all_orders(facts, scaling, shape):
    """The joint optimum is the best, over every order, of the best maps for that order."""
    space = attention(*shape, 4, **facts)
    options = AlignConfig(heads="permutation", scaling=scaling)
    for seed in range(2):
        anchor, donor = tensors(space, 7, seed, spread=0.4), tensors(space, 7, seed + 50, spread=0.4)
        match = match_attention(space, sides_of(anchor, donor), options)
        fixed = dataclasses.replace(options, heads="none")
        best = min(
            match_attention(space, sides_of(anchor, reordered(space, donor, *order)), fixed).after
            for order in head_orders(*shape)
        )
        turns = facts.get("norm") == "rms_head" and "rotary" not in facts  # heads and coordinates order each other
        assert best * (1 - 1e-9) <= match.after <= best * (1.06 if turns else 1 + 1e-9)
        assert left(anchor, donor, match.transform) == pytest.approx(match.after, rel=1e-9)
        assert distance(anchor, donor) == pytest.approx(match.before, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["rms_head", "rms_all"])
@pytest.mark.parametrize("scaling", [True, False])
def test_one_order_of_normed_coordinates_against_all(norm, scaling):
    """Coordinates that rotary embedding leaves alone: the best order for the heads that share the gains of a norm, with
    these gains in it; of a norm over all heads, each KV group has its own."""
    space = attention(2, 2, 5, rotary=2, norm=norm)
    gains = ("q_norm", "k_norm") if norm == "rms_head" else ("q_gain", "k_gain")
    options = AlignConfig(scaling=scaling)
    anchor, donor = (tensors(space, 7, seed) for seed in (1, 51))
    for given, seed in ((anchor, 2), (donor, 3)):
        given |= {role: torch.randn(*space.factors(role), 1, generator=gen(seed)).double() for role in gains}
    match = match_attention(space, sides_of(anchor, donor), options)
    assert left(anchor, donor, match.transform) == pytest.approx(match.after, rel=1e-9)
    group = admitted(space, options)
    assert group.refuses(match.transform) is None
    best = math.inf
    for orders in itertools.product(itertools.permutations(range(3)), repeat=1 if norm == "rms_head" else 2):
        still = group.identity()
        index = torch.tensor(orders)
        order = dataclasses.replace(still, qk=with_orders(still.qk, index), gains=with_orders(still.gains, index))
        plain = dataclasses.replace(space, norm="rms_clipped")  # signs alone
        beside = match_attention(plain, sides_of(anchor, moved(donor, order)), options)
        if not scaling:
            best = min(best, beside.after)
        else:
            assert match.after <= beside.after
    if not scaling:
        assert match.after == pytest.approx(best, rel=1e-9)
    torn = dataclasses.replace(group.random(gen(4)), qk=group.identity().qk)
    assert "apart from the gains" in group.refuses(torn)


@pytest.mark.parametrize("scaling", [True, False])
def test_query_heads_alone_against_all_orders_of_them(scaling):
    """Where KV heads keep their places, the best is among the orders inside them; the elements stay as good."""
    space = attention(2, 3, 4, norm="shared", values="normed", free_groups=False)
    options = AlignConfig(heads="permutation", scaling=scaling)
    anchor, donor = tensors(space, 7, 1), tensors(space, 7, 51)
    match = match_attention(space, sides_of(anchor, donor), options)
    assert match.transform.groups.tolist() == [0, 1]
    assert match.transform.queries.tolist() != [[0, 1, 2]] * 2
    fixed = dataclasses.replace(options, heads="none")
    best = min(
        match_attention(space, sides_of(anchor, reordered(space, donor, *order)), fixed).after
        for order in head_orders(2, 3)
        if order[0].tolist() == [0, 1]
    )
    assert match.after == pytest.approx(best, rel=1e-9)
    other = admitted(attention(2, 3, 4, norm="shared", values="normed"), options).random(
        torch.Generator().manual_seed(1)
    )
    assert other.groups.tolist() == [1, 0]
    assert "KV heads" in admitted(space, options).refuses(other)


@pytest.mark.slow
def test_alternated_orders_are_never_worse_than_their_starts(monkeypatch):
    space = attention(2, 3, 4, rotary=4)
    monkeypatch.setattr(head_order_module, "MOST_ENUMERATED", 0)
    for seed in range(4):
        anchor, donor = tensors(space, 7, seed), tensors(space, 7, seed + 50)
        match = match_attention(space, sides_of(anchor, donor), AlignConfig(heads="permutation"))
        own = match_attention(space, sides_of(anchor, donor), AlignConfig())
        assert match.after <= own.after * (1 + 1e-12)
        assert head_order_module.ALTERNATED_NOTE in match.notes
        assert left(anchor, donor, match.transform) == pytest.approx(match.after, rel=1e-9)


@pytest.mark.slow
def test_alternated_orders_recover_planted_ones(monkeypatch):
    monkeypatch.setattr(head_order_module, "MOST_ENUMERATED", 0)
    for facts in ({"rotary": 4}, {}, {"rotary": 2}, {"rotary": 4, "norm": "rms_head"}):
        space, options = attention(3, 4, 4, **facts), AlignConfig(heads="permutation")
        anchor = tensors(space, 40, 0)
        truth = planted(space, options, 1)
        match = match_attention(space, sides_of(anchor, noisy(moved(anchor, truth.inverse()), 0.1, 2)), options)
        assert torch.equal(match.transform.head_order(), truth.head_order())


@pytest.mark.slow
def test_planar_with_scale_by_fine_grid():
    space = attention(1, 1, 2, rotary=2)
    angles = torch.linspace(-math.pi, math.pi, 721, dtype=torch.float64)[:, None]
    scales = torch.linspace(-2, 2, 801, dtype=torch.float64).exp()[None]
    for seed in range(6):
        anchor, donor = tensors(space, 5, seed, spread=0.5), tensors(space, 5, seed + 50, spread=0.5)
        z = {r: torch.complex(x[..., 0, :], x[..., 1, :]).flatten() for r, x in anchor.items()}
        w = {r: torch.complex(x[..., 0, :], x[..., 1, :]).flatten() for r, x in donor.items()}
        turn = torch.polar(torch.ones_like(angles), angles)
        cost = sum(
            scales**power * scales**power * w[r].abs().square().sum()
            - 2 * scales**power * (turn * (w[r] * z[r].conj()).sum()).real
            + z[r].abs().square().sum()
            for r, power in (("k", 1), ("q", -1))
        )
        others = [s for s in sides_of(anchor, donor) if s.role in ("q", "k")]
        after = match_attention(space, others, AlignConfig()).after
        assert after <= float(cost.min()) + 1e-12
        assert after == pytest.approx(float(cost.min()), rel=1e-3)


@kinds
def test_joint_scale_is_never_worse_than_the_papers_sequence(facts):
    space, strict = attention(4, 1, 4, **facts), 0
    for seed in range(5):
        anchor, donor = tensors(space, 9, seed, spread=0.5), tensors(space, 9, seed + 50, spread=0.5)
        found = sides_of(anchor, donor)
        joint = match_attention(space, found, AlignConfig()).after
        sequence = match_attention(space, found, AlignConfig(scaling="sequential")).after
        turned = match_attention(space, found, AlignConfig(scaling=False)).after
        assert joint <= sequence * (1 + 1e-12)
        assert sequence <= turned * (1 + 1e-12)
        strict += joint < sequence * (1 - 1e-6)
    assert strict >= 4  # value/output heads are rescaled whatever the norm of queries and keys


def test_joint_map_and_scale_against_a_search():
    """For O(2): all angles, both orientations, all scales."""
    space = attention(1, 1, 2)
    angle = torch.linspace(0, 2 * math.pi, 1441, dtype=torch.float64)
    scale = torch.linspace(-1.5, 1.5, 601, dtype=torch.float64).exp()
    for seed in range(4):
        anchor, donor = tensors(space, 5, seed, spread=0.5), tensors(space, 5, seed + 50, spread=0.5)
        after = match_attention(space, [s for s in sides_of(anchor, donor) if s.role in "vo"], AlignConfig()).after
        m = {r: anchor[r].flatten(0, -3)[0] @ donor[r].flatten(0, -3)[0].T for r in ("v", "o")}
        c, s = angle.cos(), angle.sin()
        turns = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
        maps = torch.cat([turns, turns @ torch.diag(torch.tensor([1.0, -1.0]).double())])
        p, q = ((maps * m[r]).sum((1, 2))[:, None] for r in ("v", "o"))
        norms = {r: (anchor[r].square().sum(), donor[r].square().sum()) for r in ("v", "o")}
        cost = scale**2 * norms["v"][1] + norms["o"][1] / scale**2 - 2 * scale * p - 2 * q / scale
        best = float(cost.min() + norms["v"][0] + norms["o"][0])
        assert after <= best + 1e-10
        assert after == pytest.approx(best, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_joint_head_order_is_never_worse_than_spectral_pairing(shape):
    strictly = 0
    for seed, spread in itertools.product(range(5), (0.1, 0.5)):
        space = attention(*shape, 4)
        anchor, donor = tensors(space, 9, seed, spread=spread), tensors(space, 9, seed + 50, spread=spread)
        spectral = match_attention(space, sides_of(anchor, donor), AlignConfig(heads="spectral"))
        paired = reordered(space, donor, spectral.transform.groups, spectral.transform.queries)
        turned = match_attention(space, sides_of(anchor, paired), AlignConfig()).after
        joint = match_attention(space, sides_of(anchor, donor), AlignConfig(heads="permutation")).after
        assert joint <= turned * (1 + 1e-12)
        assert turned <= spectral.after * (1 + 1e-12)
        assert left(anchor, donor, spectral.transform) == pytest.approx(spectral.after, rel=1e-9)
        strictly += joint < turned * (1 - 1e-6)
    assert strictly >= 5


def test_spectral_pairing_recovers_permuted_heads():
    space = attention(3, 2, 4)
    anchor = tensors(space, 30, 0, spread=0.5)
    order, queries = torch.tensor([2, 0, 1]), torch.tensor([[1, 0], [0, 1], [1, 0]])
    match = match_attention(
        space, sides_of(anchor, reordered(space, anchor, order, queries)), AlignConfig(heads="spectral")
    )
    back = reordered(space, reordered(space, anchor, order, queries), match.transform.groups, match.transform.queries)
    assert distance(anchor, back) == 0
    assert "singular values" in match.notes[0]


@pytest.mark.parametrize("order", ["none", "permutation"])
def test_permutations_of_coordinates_are_recovered(order: str):
    space = attention(3, 2, 4)
    options = AlignConfig(attention="permutation", heads=order)
    planted = admitted(space, options).random(torch.Generator().manual_seed(2))
    anchor = tensors(space, 30, 0, spread=0.5)
    donor = {role: planted.act(x, role, 0) for role, x in anchor.items()}
    match = match_attention(space, sides_of(anchor, donor), options)
    assert match.after <= 1e-12 * match.before
    assert not planted.is_identity()
    assert match.transform.compose(planted).is_identity()


# --- ties and bad input


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("attention_option", ["rotation", "none"])
@pytest.mark.parametrize("heads", ["none", "permutation", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_models_stay_bit_for_bit(facts, attention_option, heads, dtype):
    """Also where heads are zero, equal, or of low rank, and where only some heads of the donor differ."""
    space = attention(4, 2, 4, **facts)
    anchor = tensors(space, 9, 0, dtype=dtype)
    for role, x in anchor.items():
        x[0] = 0
        x[2] = x[1]
        x[3, ..., 1:, :] = 0 if role in "kv" else x[3, ..., 1:, :]
    for touched in (False, True):
        donor = {r: x.clone() for r, x in anchor.items()}
        if touched:
            donor["k"][1, 0] += 0.01
            donor["o"][1, 0] += 0.01
        options = AlignConfig(attention=attention_option, heads=heads)
        transform = match_attention(space, sides_of(anchor, donor), options).transform
        if not touched:
            assert transform.is_identity()
        if heads != "spectral":
            result = moved(donor, transform)
            kept = [g for g in range(4) if not touched or g != 1]
            assert all(torch.equal(result[r][kept], anchor[r][kept]) for r in anchor)


def test_rank_deficient_maps_are_nearest_the_identity():
    """A head of rank 2 that was turned inside its range: the rest of the head's coordinates stays put."""
    space = attention(1, 1, 6)
    anchor = tensors(space, 9, 0)
    for x in anchor.values():
        x[..., 2:, :] = 0
    truth = torch.eye(6, dtype=torch.float64)
    truth[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    donor = {r: truth.T @ x for r, x in anchor.items()}
    for scaling in (True, False):
        turned = match_attention(space, sides_of(anchor, donor), AlignConfig(scaling=scaling)).transform
        for element in (turned.qk, turned.vo):
            torch.testing.assert_close(element.matrix[0], truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@kinds
def test_half_precision_agrees_with_double(facts, dtype):
    space, options = attention(3, 2, 4, **facts), AlignConfig(heads="permutation")
    anchor, donor = tensors(space, 50, 0, dtype=dtype), tensors(space, 50, 1, dtype=dtype)
    low = match_attention(space, sides_of(anchor, donor), options)
    high = match_attention(
        space, [Side(s.role, s.anchor.double(), s.donor.double()) for s in sides_of(anchor, donor)], options
    )
    assert torch.equal(low.transform.head_order(), high.transform.head_order())
    assert low.after == pytest.approx(high.after, rel=1e-5)


# --- planted truth


@kinds
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(6, 1), (3, 2), (2, 6)])
def test_planted_gauge_is_recovered(facts, noise, shape):
    options = AlignConfig(heads="permutation")
    space = attention(*shape, 4, **facts)
    anchor = tensors(space, 60, 0)
    truth = planted(space, options, 5)
    donor = moved(noisy(anchor, noise, 6), truth.inverse())
    match = match_attention(space, sides_of(anchor, donor), options)
    assert torch.equal(match.transform.head_order(), truth.head_order())
    back = left(anchor, donor, match.transform)
    untouched = distance(anchor, noisy(anchor, noise, 6))
    assert back <= untouched * (1 + 1e-9) + 1e-18 * match.anchor  # never farther than the truth
    if noise == 0:
        assert back <= 1e-18 * match.anchor
    eye = torch.eye(4, dtype=torch.float64).repeat(shape[0], 1, 1)
    for name in ("qk", "vo"):
        found, true = (getattr(t, name).act(eye, 0, 1) for t in (match.transform, truth))
        assert float((found - true).norm() / true.norm()) < 1e-7 + 0.5 * noise
