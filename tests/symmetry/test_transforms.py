"""Transforms of spaces: the laws of every kind and role, the functions that they keep, and which space admits which."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from matching_support import gen, normal
from test_groups import GROUPS as ELEMENTS
from test_groups import broken, close
from torch import Tensor

from rotation_merge import RotationMergeError
from rotation_merge.architecture import families, table
from rotation_merge.architecture.model import Architecture, Space
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.symmetry import ROLES, Transform, orders_of
from rotation_merge.symmetry.admitted import (
    QUERIES,
    STREAM_GROUPS,
    VALUES,
    WIDEST,
    GroupOptions,
    SpaceGroup,
    admitted,
    stream_group,
)
from rotation_merge.symmetry.group import Group, Monomials, Planar, Rotations
from rotation_merge.symmetry.transform import ORDERS

ORDERED = GroupOptions(heads="permutation")
EMPTY = Architecture("none", {}, {}, (), {})


def attention(groups: int = 3, per_group: int = 2, **facts: Any) -> Space:
    sizes = {"groups": groups, "per_group": per_group, "head_dim": 4, "value_dim": 6}
    return Space("layers.0.attn", "attention", sizes, **facts)


SPACES = {
    "attention": attention(),
    "one group": attention(1, 3, rotary=4),
    "one head each": attention(3, 1, rotary=2),
    "norms of heads": attention(rotary=4, norm="rms_head"),
    "norm of all heads": attention(rotary=2, norm="rms_all"),
    "gated values": attention(values="gated"),
    "queries alone": attention(free_groups=False),
    "ffn": Space("ffn", "ffn", {"size": 7}, gated=True, degree=1),
    "relu squared": Space("ffn", "ffn", {"size": 7}, degree=2),
    "experts": Space("experts", "experts", {"count": 3, "size": 4}, gated=True, degree=1),
    "routed experts": Space("experts", "experts", {"count": 4, "groups": 2, "size": 3}),
    "latent": Space("latent", "latent", {"size": 6}),
    "translation": Space("router", "translation", {"size": 6}),
}
GROUPS: dict[str, SpaceGroup] = {name: admitted(space, ORDERED) for name, space in SPACES.items()}
GROUPS |= {f"stream, {kind}": stream_group(kind, 6, fixes_ones=True) for kind in STREAM_GROUPS if kind != "none"}
GROUPS |= {name: SpaceGroup("stream", {"map": (group, 1, 6)}) for name, group in ELEMENTS.items() if name != "fixed"}
spaces = pytest.mark.parametrize("name", GROUPS)


def axes(name: str) -> dict[str, tuple[Tensor, int]]:
    """A tensor with an axis of each role of a space's kind, and the dimension the axis starts at."""
    space, result = SPACES.get(name, Space("residual", "stream", {"size": 6})), {}
    batch = GROUPS[name].groups.get("gains", (None, 0))[1]
    gains = {0: [], 1: ["k_gain", "q_gain"]}.get(batch, ["k_norm", "q_norm"])
    for role in (role for role in ROLES[space.kind] if role not in gains):
        front = space.sizes["count"] if space.kind == "experts" and role != "index" else 2
        result[role] = (normal(front, *space.factors(role), 3), 1)
    return result


def act(t: Transform, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
    """Experts' neurons move after the experts, which dimension 0 counts, as `transform_tensor` has it."""
    stacked = t.kind == "experts" and role != "index"
    return t.act(t.act(x, "index", 0) if stacked else x, role, dim, dual)


@spaces
def test_transforms_are_a_group(name: str) -> None:
    group = GROUPS[name]
    g, h, still = group.random(gen(2)), group.random(gen(3)), group.identity()
    assert (still.is_identity(), g.is_identity(), still.words == "identity", g.words == "identity") == (True, False) * 2
    assert all(group.admits(t) for t in (g, g.inverse(), g.compose(h), still))
    assert max(g.inverse().compose(g).distances().values()) < 1e-9 < sum(g.distances().values())
    copies = Transform.from_tensors(g.kind, dict(reversed(g.tensors().items()))), pickle.loads(pickle.dumps(g))
    for role, (x, dim) in axes(name).items():
        assert torch.equal(still.act(x, role, dim), x)
        for dual in (False, True):
            close(act(g.inverse(), act(g, x, role, dim, dual), role, dim, dual), x)
            close(act(g.compose(h), x, role, dim, dual), act(g, act(h, x, role, dim, dual), role, dim, dual))
        assert g.moves(role) == (not torch.equal(act(g, x, role, dim), x)) or g.kind == "experts"
        assert not still.moves(role)
        for again in copies:
            assert torch.equal(again.act(x, role, dim), g.act(x, role, dim))
        half, before = g.act(x.bfloat16(), role, dim), x.clone()
        assert (half.dtype, half.shape) == (torch.bfloat16, x.shape)
        assert torch.equal(x, before)


@spaces
def test_what_is_not_in_the_group_is_refused(name: str) -> None:
    group = GROUPS[name]
    g = group.random(gen(5))
    bad = [replace(g, kind="mixer"), replace(g, elements={})]
    if g.shift is not None:
        bad = [replace(g, shift=x) for x in (g.shift[:-1], g.shift / 0, g.shift.repeat(2), None)]
    for part, element in g.elements.items():
        bad += [replace(g, elements={**g.elements, part: x}) for x in broken(element)]
        if part not in ORDERS:
            with pytest.raises(RotationMergeError, match="no group element"):
                Transform.from_tensors(g.kind, {**g.tensors(), f"{part}.more": torch.zeros(2)})
    assert not any(group.admits(transform) for transform in bad)


def ordered(group: SpaceGroup, order: Tensor) -> Transform:
    """Groups (or experts) in another order, and nothing else."""
    still = group.identity()
    return replace(still, elements={**still.elements, **orders_of(order)})


def test_orders_that_are_not_free_are_refused() -> None:
    free, held = admitted(attention(), ORDERED), admitted(attention(free_groups=False), ORDERED)
    g = ordered(free, torch.tensor([1, 0, 2]))
    never = admitted(attention(free_order=False), ORDERED)
    assert [group.admits(g) for group in (free, held, never)] == [True, False, False]
    assert held.random(gen()).orders[0].tolist() == [0, 1, 2]
    routed = GROUPS["routed experts"]
    for order, fits in (([3, 2, 0, 1], True), ([0, 2, 1, 3], False)):
        assert routed.admits(ordered(routed, torch.tensor(order))) == fits


# --- functions that are kept


def test_translations() -> None:
    """A softmax over the rows' products does not see them."""
    g, h = (GROUPS["translation"].random(gen(seed)) for seed in (1, 2))
    rows, x = normal(5, 6, seed=2), normal(6, 4, seed=3)
    close(g.inverse().added(g.added(rows)), rows)
    close(g.compose(h).added(rows), g.added(h.added(rows)))
    close((g.added(rows) @ x).softmax(0), (rows @ x).softmax(0))
    assert g.added(rows.bfloat16()).dtype == torch.bfloat16


# --- which space admits which

HALVES, PARTIAL = (0, 1, 0, 1), Planar(True, pairs=(0, 0), unturned=Rotations(True))


@pytest.mark.parametrize(
    ("facts", "options", "qk", "vo"),
    [
        ({}, {}, Rotations(True), Rotations(True)),
        ({}, {"scaling": False}, Rotations(), Rotations()),
        ({}, {"scaling": "sequential"}, Rotations(True, True), Rotations(True, True)),
        ({}, {"attention": "none"}, Monomials(), Monomials()),
        ({"rotary": 4}, {}, Planar(True, pairs=HALVES), Rotations(True)),
        ({"rotary": 2, "interleaved": True}, {}, PARTIAL, Rotations(True)),
        ({"rotary": 4, "interleaved": True}, {}, Planar(True, pairs=(0, 0, 1, 1)), Rotations(True)),
        ({"rotary": 4, "rotary_parts": 2}, {}, Planar(True, pairs=(0, 0, 1, 1)), Rotations(True)),
        ({"rotary": 4, "norm": "rms_head"}, {}, Monomials(signed=True, ties=HALVES), Rotations(True)),
        ({"rotary": 2, "norm": "rms_all"}, {}, Monomials(signed=True, ties=(0, 0)), Rotations(True)),
        ({"norm": "rms_head"}, {}, Monomials(signed=True), Rotations(True)),
        ({"norm": "l2_head"}, {}, Rotations(), Rotations(True)),
        ({"norm": "l2_head", "rotary": 4}, {}, Planar(pairs=HALVES), Rotations(True)),
        ({"norm": "layer_head", "rotary": 4}, {}, Monomials(signed=True, ties=(0, 0, 0, 0)), Rotations(True)),
        ({"norm": "affine_head"}, {}, Monomials(), Rotations(True)),
        ({"norm": "shared"}, {}, Monomials(), Rotations(True)),
        ({"values": "gated"}, {}, Rotations(True), Monomials(0, signed=True, scaled=True)),
        ({"values": "fixed"}, {}, Rotations(True), Monomials()),
        ({"values": "normed"}, {}, Rotations(True), Rotations()),
        ({}, {"attention": "permutation"}, Monomials(0), Monomials(0)),
        ({"rotary": 4, "values": "gated"}, {"attention": "permutation"}, Monomials(), Monomials(0)),
        ({"rotary": 2}, {"heads": "spectral"}, Monomials(2), Monomials(0)),
    ],
)  # fmt: skip
def test_what_heads_admit(facts: dict[str, Any], options: dict[str, Any], qk: Group, vo: Group) -> None:
    group = admitted(attention(**facts), GroupOptions(**options))
    assert (group.groups["qk"], group.groups["vo"]) == ((qk, 3, 4), (vo, 3, 6))


def test_what_gains_admit() -> None:
    for norm, batch, ties in (("rms_head", 1, HALVES), ("rms_all", 3, HALVES), ("rms_turned", 1, ())):
        gains, normed = Monomials(signed=True, scaled=True, ties=ties), attention(rotary=4, norm=norm)
        assert admitted(normed).groups["gains"] == (gains, batch, 4)
        assert admitted(normed, GroupOptions(scaling=False)).groups["gains"][0].words == "none"


@pytest.mark.parametrize(
    ("facts", "options", "words"),
    [
        ({"gated": True, "degree": 1}, {}, "permutation, signed rescaling"),
        ({"degree": 2}, {}, "permutation, positive rescaling"),
        ({"degree": 1}, {"ffn": "none"}, "positive rescaling"),
        ({"degree": 1}, {"scaling": False}, "permutation"),
        ({}, {"ffn": "none"}, "none"),
    ],
)
def test_what_neurons_admit(facts: dict[str, Any], options: dict[str, Any], words: str) -> None:
    assert admitted(Space("ffn", "ffn", {"size": 5}, **facts), GroupOptions(**options)).words == words
    group = admitted(Space("moe", "experts", {"size": 5, "count": 3}, **facts), GroupOptions(**options))
    assert group.words == ("order of experts, " if words.startswith("permutation") else "") + words
    factor = group.random(gen(2)).elements["neurons"].factor  # type: ignore[union-attr]
    assert (bool((factor < 0).any()), bool((factor != 1).any())) == ("signed" in words, "rescaling" in words)


@pytest.mark.parametrize(
    ("entry", "word"), [("norm", "rms_haed"), ("norm", "'cosine' if hidden_size else None"), ("values", "mixed")]
)
def test_an_architecture_file_with_an_unknown_word_is_refused(entry: str, word: str) -> None:
    """It would otherwise pass for no norm at all, and be turned."""
    spec = families()["qwen3"].model_dump()
    spec["modules"]["default"]["layer"]["spaces"]["attn"][entry] = word
    with pytest.raises(RotationMergeError, match=r"'(rms_haed|cosine|mixed)' is not a known word"):
        table.sample(ArchitectureSpec.model_validate(spec))


@pytest.mark.parametrize(
    "options", [GroupOptions(), GroupOptions(scaling=False), GroupOptions(heads="spectral"), WIDEST]
)
def test_files_may_hold_what_any_recipe_gives(options: GroupOptions) -> None:
    table = [attention(norm=norm, rotary=rotary) for norm in QUERIES for rotary in (0, 2, 4)]
    table += [attention(values=values, free_groups=free) for values in VALUES for free in (True, False)]
    for space in [*table, *SPACES.values()]:
        group = admitted(space, options)
        for transform in (group.identity(), group.random(gen(1))):
            assert group.admits(transform)
            assert EMPTY.widest_group(space, transform).admits(transform)


def test_a_latent_has_all_rotations_as_its_norm_is_an_rmsnorm() -> None:
    turned, ones = admitted(SPACES["latent"], GroupOptions(residual="rotation")).random(gen()), torch.ones(6).double()
    assert not torch.allclose(turned.act(ones, "read", 0), ones)
    assert EMPTY.widest_group(SPACES["latent"], turned).admits(turned)
