"""The laws of every group that acts inside heads, of the groups of whole spaces, and which space admits which."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from rotation_merge import RotationMergeError
from rotation_merge.architecture import families, table
from rotation_merge.architecture.model import Space
from rotation_merge.architecture.schema import ArchitectureSpec
from rotation_merge.matching.pairing import Pairing
from rotation_merge.matching.products import HeadProjections
from rotation_merge.symmetry import KINDS, GroupElement, StreamGroup
from rotation_merge.symmetry.admitted import QUERIES, VALUES, GroupOptions, admitted, heads, neurons
from rotation_merge.symmetry.base import proven_maps
from rotation_merge.symmetry.direct_sum import SplitGroup
from rotation_merge.symmetry.experts import ExpertGroup
from rotation_merge.symmetry.gains import CoordinateExchange, PairExchange
from rotation_merge.symmetry.group import GROUPS, Group
from rotation_merge.symmetry.monomial import CoordinateOrder, GatedOrder
from rotation_merge.symmetry.ordered import OrderedExchange, OrderedSigns
from rotation_merge.symmetry.planar import PlanarGroup
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.signs import CoordinateSigns, HeadSign, IdentityGroup, PairSigns
from rotation_merge.symmetry.stream import STREAM_GROUPS
from rotation_merge.symmetry.tangent import Freedom

torch.set_num_threads(1)
N, R, D, M = 3, 2, 4, 5

ALL: dict[str, Group] = {
    "fixed": IdentityGroup(),
    "orthogonal": OrthogonalGroup(),
    "orthogonal, scaled": OrthogonalGroup(True),
    "orthogonal, then scaled": OrthogonalGroup("sequential"),
    "planar": PlanarGroup(),
    "planar, scaled, neighbours": PlanarGroup(True, interleaved=True),
    "planar, then scaled": PlanarGroup("sequential"),
    "pair signs": PairSigns(),
    "pair signs, neighbours": PairSigns(interleaved=True),
    "coordinate signs": CoordinateSigns(),
    "head sign": HeadSign(),
    "gains, by pairs": PairExchange(),
    "gains, by neighbours": PairExchange(interleaved=True),
    "gains, by coordinates": CoordinateExchange(),
    "coordinate order": CoordinateOrder(),
    "gated order": GatedOrder(),
    "gated order, scaled": GatedOrder(True),
    "ordered signs": OrderedSigns(),
    "order, no signs": OrderedSigns(signs=False),
    "ordered gains": OrderedExchange(),
    "ordered gains, exchanged": OrderedExchange(True),
}
groups = pytest.mark.parametrize("group", ALL.values(), ids=ALL.keys())


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=gen(seed), dtype=torch.float64)


def pairing(group: Group, donor: tuple[Tensor, Tensor] | None = None, seed: int = 0) -> Pairing:
    """N anchor heads, keys (N, 1, D, M) and queries (N, R, D, M), against those given or random ones."""
    anchor = normal(N, 1, D, M, seed=seed), normal(N, R, D, M, seed=seed + 1)
    donor = donor or (normal(N, 1, D, M, seed=seed + 2), 1.5 * normal(N, R, D, M, seed=seed + 3))
    sides = [
        HeadProjections([(a, b)], tuple(a.shape[:3]), group.statistic, group.interleaved)
        for a, b in zip(anchor, donor, strict=True)
    ]
    return Pairing("qk", group, *sides)


def gain(given: Pairing, element: GroupElement) -> Tensor:
    """What an element takes off the squared distance, a constant left out, by applying it."""
    total = torch.zeros(N, dtype=torch.float64)
    for half, dual in ((given.primal, False), (given.dual, True)):
        a, b = half.pairs[0]
        moved = element.act(b, 0, 2, dual)
        total += (a.square() - (a - moved).square()).sum((1, 2, 3))
    return total


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def check_group(group: Group) -> None:
    """What holds of every group: see the tests of docs/add-group.md, too."""
    given = pairing(group)
    grams = given.grams()
    element, found = group.solve(grams)
    close(found, gain(given, element))
    close(group.gain_as_it_stands(grams), gain(given, group.identity(N, D)))
    if group.rescale != "sequential":
        for seed in range(30):
            assert (gain(given, group.random(N, D, gen(seed))) <= found + 1e-9).all()
    eye = torch.eye(D, dtype=torch.float64).repeat(N, 1, 1)
    assert group.admits(group.random(N, D, gen(5)).act(eye, 0, 1))
    assert not group.admits(normal(N, D, D, seed=6))
    assert group.identity(N, D).is_identity()
    assert group.words
    assert group.symbol
    check_membership(group)
    check_bound(group)
    check_agreement(group)
    check_planted(group)


def check_membership(group: Group) -> None:
    """What the group draws and finds is of it; what lies beside it is not, and what keeps no pairing is of none."""
    found = group.solve(pairing(group).grams())[0]
    for element in (group.identity(N, D), group.random(N, D, gen(1)), found):
        maps = proven_maps(element)
        assert maps is not None
        assert group.admits(maps)
        off = maps @ (torch.eye(D, dtype=torch.float64) + 0.2 * normal(N, D, D, seed=4))
        assert not group.admits(off)


def check_bound(group: Group) -> None:
    """From what each side's products could give at most follows what both could."""
    given = pairing(group)
    grams, best = given.grams(), group.solve(given.grams())[1]
    if group.statistic == "full":
        reach = [torch.linalg.svdvals(x).sum(-1) for x in (grams.primal, grams.dual)]
    else:
        reach = [group.reach(x) for x in (grams.primal, grams.dual)]
    assert (group.bound(reach[0], reach[1], grams) >= best - 1e-9).all()


def check_agreement(group: Group) -> None:
    """<A_a, g^-T B_b> for every pair of query heads, as acting on them gives it."""
    given = pairing(group)
    element, (a, b) = group.random(N, D, gen(3)), given.dual.pairs[0]
    singles = [
        [
            HeadProjections([(a[:, i : i + 1], b[:, j : j + 1])], (N, 1, D), group.statistic, group.interleaved)
            for j in range(R)
        ]
        for i in range(R)
    ]
    products = torch.stack([torch.stack([half.products() for half in row], 1) for row in singles], 1)
    expected = torch.einsum("nadm,nbdm->nab", a, element.act(b, 0, 2, dual=True))
    close(group.agreement(element, products), expected)


def check_planted(group: Group) -> None:
    """A twin moved by a random element is brought back."""
    base = pairing(group)
    planted = group.random(N, D, gen(11))
    twin = tuple(planted.inverse().act(h.pairs[0][0], 0, 2, dual) for h, dual in ((base.primal, 0), (base.dual, 1)))
    given = pairing(group, twin)
    grams = given.grams()
    _, found = group.solve(grams)
    everything = given.anchor_norm()
    if group.rescale == "sequential":
        assert (found > 0.8 * everything).all()
    else:
        close(found, everything, 1e-8)


@groups
def test_laws(group: Group) -> None:
    check_group(group)


def test_gates_that_follow_values_count_in_the_gain() -> None:
    """What the identity gains is what the squared distance lacks of the anchor's norm, rows of gates included."""
    base = pairing(GatedOrder(True))
    gate = HeadProjections([(normal(N, R, D, M, seed=8), normal(N, R, D, M, seed=9))], (N, R, D), "full", False)
    given = Pairing("vo", base.group, base.primal, base.dual, gate)
    grams = given.grams()
    close(given.anchor_norm() - given.group.gain_as_it_stands(grams), given.distance())
    assert (given.group.solve(grams)[1] >= given.group.gain_as_it_stands(grams)).all()


def test_every_group_has_its_laws_tested() -> None:
    ours = {kind for kind, cls in GROUPS.items() if cls.__module__.startswith("rotation_merge.")}
    assert {group.kind for group in ALL.values()} | {"split"} == ours


def test_a_split_group_is_its_parts() -> None:
    group = SplitGroup(PlanarGroup(True), OrthogonalGroup(), 2)
    assert [(part.kind, where) for part, where in group.parts(6)] == [
        ("planar", slice(0, 2)),
        ("orthogonal", slice(2, 6)),
    ]
    element = group.random(2, 6, gen())
    assert [part.size for part in element.parts] == [2, 4]
    assert group.identity(2, 6).is_identity()
    with pytest.raises(TypeError, match="part by part"):
        group.solve(pairing(IdentityGroup()).grams())


# --- which space admits which


def attention(**facts: object) -> Space:
    sizes = {"groups": 2, "per_group": 3, "head_dim": 4, "value_dim": 6}
    return Space("layers.0.attn", "attention", sizes, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "wanted", "qk", "vo"),
    [
        ({}, {}, OrthogonalGroup(True), OrthogonalGroup(True)),
        ({}, {"scaling": False}, OrthogonalGroup(False), OrthogonalGroup(False)),
        ({}, {"attention": "none"}, IdentityGroup(), IdentityGroup()),
        ({"rotary": 4}, {}, PlanarGroup(True), OrthogonalGroup(True)),
        (
            {"rotary": 2, "interleaved": True},
            {},
            SplitGroup(PlanarGroup(True, True), OrthogonalGroup(True), 2),
            OrthogonalGroup(True),
        ),
        ({"rotary": 4, "norm": "rms_head"}, {}, PairSigns(), OrthogonalGroup(True)),
        ({"rotary": 2, "norm": "rms_all"}, {}, SplitGroup(PairSigns(), OrderedSigns(), 2), OrthogonalGroup(True)),
        ({"rotary": 4, "norm": "rms_turned"}, {}, PairSigns(), OrthogonalGroup(True)),
        (
            {"rotary": 2, "norm": "rms_clipped"},
            {},
            SplitGroup(PairSigns(), CoordinateSigns(), 2),
            OrthogonalGroup(True),
        ),
        ({"norm": "l2_head"}, {}, OrthogonalGroup(False), OrthogonalGroup(True)),
        ({"norm": "l2_head", "rotary": 4}, {}, PlanarGroup(False), OrthogonalGroup(True)),
        ({"norm": "rms_head"}, {}, OrderedSigns(), OrthogonalGroup(True)),
        ({"values": "gated"}, {}, OrthogonalGroup(True), GatedOrder(True)),
        ({"norm": "layer_head", "rotary": 4}, {}, HeadSign(), OrthogonalGroup(True)),
        ({"norm": "affine_head"}, {}, IdentityGroup(), OrthogonalGroup(True)),
        ({"values": "fixed"}, {}, OrthogonalGroup(True), IdentityGroup()),
        ({"values": "normed"}, {}, OrthogonalGroup(True), OrthogonalGroup(False)),
        ({}, {"attention": "permutation"}, CoordinateOrder(), CoordinateOrder()),
        ({"rotary": 4, "values": "gated"}, {"attention": "permutation"}, IdentityGroup(), GatedOrder(False)),
        ({"norm": "rms_head"}, {"attention": "permutation"}, OrderedSigns(False), CoordinateOrder()),
        (
            {"rotary": 2},
            {"attention": "permutation"},
            SplitGroup(IdentityGroup(), CoordinateOrder(), 2),
            CoordinateOrder(),
        ),
        ({}, {"heads": "spectral"}, CoordinateOrder(), CoordinateOrder()),
        ({"rotary": 4}, {"heads": "spectral"}, IdentityGroup(), CoordinateOrder()),
    ],
)
def test_what_heads_admit(facts: dict, wanted: dict, qk: Group, vo: Group) -> None:
    found = heads(attention(**facts), GroupOptions(**wanted))
    assert (found.qk, found.vo) == (qk, vo)


@pytest.mark.parametrize(("free", "asked", "order"), [(True, "permutation", "permutation"), (False, "none", "none")])
def test_the_order_of_heads(free: bool, asked: str, order: str) -> None:
    assert heads(attention(free_order=free), GroupOptions(heads=asked)).order == order
    assert heads(attention(free_order=False), GroupOptions(heads="permutation")).order == "fixed"


@pytest.mark.parametrize(
    ("facts", "wanted", "words"),
    [
        ({"gated": True, "degree": 1}, {}, "permutation, signed rescaling"),
        ({"degree": 2}, {}, "permutation, positive rescaling"),
        ({"degree": 1}, {"ffn": "none"}, "positive rescaling"),
        ({"degree": 1}, {"scaling": False}, "permutation"),
        ({}, {"ffn": "none"}, "none"),
    ],
)
def test_what_neurons_admit(facts: dict, wanted: dict, words: str) -> None:
    assert admitted(Space("ffn", "ffn", {"size": 5}, **facts), GroupOptions(**wanted)).words == words
    experts = admitted(Space("moe", "experts", {"size": 5, "count": 3}, **facts), GroupOptions(**wanted))
    assert experts.words == ("order of experts, " if words.startswith("permutation") else "") + words
    moved = experts.random(gen(2))
    factor = moved.neurons.scaling.factor
    assert moved.neurons.batch == 3
    assert bool((factor < 0).any()) == ("signed" in words)
    assert bool((factor != 1).any()) == ("rescaling" in words)
    assert experts.identity().is_identity()


@pytest.mark.parametrize(
    ("space", "word"),
    [
        (attention(norm="cosine"), "norm 'cosine'"),
        (attention(values="mixed"), "values 'mixed'"),
        (Space("layers.0.mixer", "recurrence", {}), "kind 'recurrence'"),
    ],
)
def test_what_is_unknown_is_named(space: Space, word: str) -> None:
    """No gauge is drawn, nothing is matched and nothing estimated in the place of a group that nobody knows."""
    with pytest.raises(RotationMergeError, match=word):
        admitted(space, GroupOptions())


def test_an_architecture_file_with_an_unknown_word_is_refused() -> None:
    """It would otherwise pass for no norm at all, and be turned."""
    spec = families()["qwen3"].model_dump()
    spec["modules"]["default"]["layer"]["spaces"]["attn"]["norm"] = "rms_haed"
    with pytest.raises(RotationMergeError, match=r"'rms_haed' is not a known word.*'rms_head'"):
        table.sample(ArchitectureSpec.model_validate(spec))


def test_every_row_of_the_tables_gives_a_group_with_words() -> None:
    for known, fact in ((QUERIES, "norm"), (VALUES, "values")):
        for word in known:
            for rotary in (0, 2, 4):
                found = heads(attention(**{fact: word, "rotary": rotary}))
                assert found.words
                assert found.random(gen()).distances()["heads"] >= 0
                assert found.identity().is_identity()


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("scaling", [True, False])
def test_groups_refuse_nothing_that_they_give(degree: int, scaling: bool) -> None:
    wanted = GroupOptions(heads="permutation", scaling=scaling)
    spaces = [
        Space("ffn", "ffn", {"size": 5}, degree=degree),
        Space("moe", "experts", {"size": 5, "count": 4}, degree=degree),
        attention(rotary=2),
        Space("mixer", "mixer", {"groups": 3, "per_group": 2, "shared": 4, "own": 5}),
        Space("channels", "convolution", {"size": 5}),
    ]
    for group in [*(admitted(space, wanted) for space in spaces), *STREAMS[2:]]:
        assert group.refuses(group.identity()) is None
        assert group.refuses(group.random(gen(3))) is None


@pytest.mark.parametrize(("norm", "each"), [("rms_head", 1), ("rms_all", 2)])
def test_gains_are_of_each_group_of_heads_where_the_norm_is_of_all_heads(norm: str, each: int) -> None:
    found = admitted(attention(norm=norm)).random(gen(1))
    assert found.gains.batch == each


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_neurons_of_any_degree_keep_their_function(degree: int) -> None:
    g = admitted(Space("ffn", "ffn", {"size": 5}, degree=degree)).random(gen(2))
    up, down, x = normal(5, 4, seed=1), normal(3, 5, seed=2), normal(4, 7, seed=3)
    after = g.act(down, "out", 1) @ (g.act(up, "in", 0) @ x).relu() ** degree
    close(after, down @ (up @ x).relu() ** degree)


def test_experts_that_leave_their_routing_group_are_refused() -> None:
    group = ExpertGroup(neurons(Space("moe", "experts", {"size": 3, "count": 4})), 2)
    assert group.refuses(group.random(gen(1))) is None
    for order, fits in (([3, 2, 0, 1], True), ([0, 2, 1, 3], False)):
        moved = dataclasses.replace(group.identity(), order=torch.tensor(order))
        assert (group.refuses(moved) is None) == fits


# --- residual streams

STREAMS = [StreamGroup(kind, 6, ones) for kind in STREAM_GROUPS for ones in (False, True)]
streams = pytest.mark.parametrize("group", STREAMS, ids=lambda g: f"{g.kind}-{g.fixes_ones}")


@streams
def test_streams(group: StreamGroup) -> None:
    """The best element is no worse than any other, is found again, and leaves the all-ones vector where it must."""
    assert group.identity().is_identity()
    products, gains = normal(6, 6, seed=1), normal(6, 6, seed=2)

    def overlap(transform) -> float:
        return transform.overlap(products, "read") + transform.overlap(gains, "gain")

    best = group.solve(products, gains)
    for seed in range(30):
        other = group.random(gen(seed))
        assert overlap(other) <= overlap(best) + 1e-9
        ones = torch.ones(6, dtype=torch.float64)
        if group.fixes_ones and group.kind != "signed_permutation":
            close(other.act(ones, "read", 0), ones)
            close(best.act(ones, "read", 0), ones)
    x, planted = normal(6, 9, seed=4), group.random(gen(7))
    if group.fixes_ones and group.kind == "rotation":
        x = x - x.mean(0)
    found = group.solve(x @ planted.inverse().act(x, "read", 0).T, torch.zeros(6, 6))
    close(found.act(x, "read", 0), planted.act(x, "read", 0))


def test_an_unknown_residual_group_is_named() -> None:
    with pytest.raises(RotationMergeError, match="'rotate'"):
        StreamGroup("rotate", 6, False)


def test_rounded_stream_rotations_come_back() -> None:
    group = StreamGroup("rotation", 6, True)
    planted = group.random(gen(1))
    stored = type(planted).from_tensors({k: t.half() for k, t in planted.tensors().items()})
    ones, back = torch.ones(6, dtype=torch.float64), group.restored(stored)
    close(back.act(ones, "read", 0), ones)
    close(back.element.matrix @ back.element.matrix.mT, torch.eye(6, dtype=torch.float64)[None])
    close(back.element.matrix, planted.element.matrix, 2e-3)


# --- learning


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exact", [True, False])
def test_learning_starts_at_the_element_and_stays_in_the_group(kind: str, exact: bool) -> None:
    """Zero parameters are the element itself; any others leave pairings as they are and have gradients."""
    batch = 1 if kind == "monomial" else 2
    element = KINDS[kind].random(batch, 6, gen(3))
    freedom = Freedom(permutations=True)
    steps = element.tangent(freedom)
    if not steps:
        return
    x = normal(batch, 6, 3, seed=5)
    close(element.along(steps, freedom, exact).act(x, 0, 1), element.act(x, 0, 1), 1e-12 if exact else 1e-5)
    moved = {
        name: step + 0.3 * torch.randn(step.shape, generator=gen(i)) for i, (name, step) in enumerate(steps.items())
    }
    for step in moved.values():
        step.requires_grad_(not exact)
    there = element.along(moved, freedom, exact)
    q, k = normal(batch, 5, 6, seed=1), normal(batch, 4, 6, seed=2)
    pairs = there.act(q, 0, 2, dual=True) @ there.act(k, 0, 2).mT
    close(pairs, q @ k.mT, 1e-10 if exact else 1e-3)
    if not exact:
        assert not there.is_identity()
        there.act(x, 0, 1).square()[..., 0].sum().backward()
        assert all(math.isfinite(float(step.grad.abs().sum())) for step in moved.values())


def test_learned_maps_of_layer_normed_streams_fix_the_all_ones_vector() -> None:
    element, freedom = StreamGroup("rotation", 6, True).random(gen(1)).element, Freedom(fixes_ones=True)
    turn = torch.randn(1, 5, 5, generator=gen(2))
    assert element.tangent(freedom)["turn"].shape == turn.shape
    ones = torch.ones(1, 6, dtype=torch.float64)
    close(element.along({"turn": turn}, freedom, exact=True).act(ones, 0, 1), ones, 1e-12)
    close(element.along({"turn": turn}, freedom, exact=False).act(ones, 0, 1), ones, 1e-5)


def test_a_learned_permutation_follows_the_one_it_starts_from() -> None:
    """What the scores exchange is exchanged after the start's own order: the aligned neurons change places."""
    start = KINDS["monomial"].random(1, 5, gen(1))
    exchanged = torch.eye(5)[torch.tensor([1, 0, 2, 4, 3])]
    x = normal(1, 5, 3, seed=2)
    unscaled = start.permutation.act(x, 0, 1)
    for exact in (True, False):
        there = start.along({"scores": exchanged}, Freedom(scales=False, permutations=True), exact)
        close(there.permutation.act(x, 0, 1), unscaled[:, [1, 0, 2, 4, 3]], 1e-6)


def test_identity_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An element of a wide stream is asked for every tensor of the model."""
    for kind, cls in KINDS.items():
        element, calls = cls.identity(1, 6), []
        seen = cls.distance
        monkeypatch.setattr(cls, "distance", lambda self, seen=seen, calls=calls: calls.append(1) or seen(self))
        assert all(element.is_identity() for _ in range(3)), kind
        assert len(calls) <= 1, kind


def test_elements_being_learned_are_never_taken_for_the_identity() -> None:
    element = KINDS["orthogonal"].identity(1, 4)
    learned = dataclasses.replace(element, matrix=element.matrix.clone().requires_grad_(True))
    assert element.is_identity()
    assert not learned.is_identity()
