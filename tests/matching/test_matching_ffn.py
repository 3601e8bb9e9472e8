"""Matching FFN neurons, experts and whole blocks: nearly the best of all, planted truths, ties, records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from matching_support import distance, ffn, gen, left, moved, noisy, planted, tensors, views_of
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture.build import lay_out, with_checkpoint_names
from rotation_merge.architecture.model import Architecture, Block, Space, TensorInfo
from rotation_merge.architecture.registry import shipped
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.matching import matrix_pairs, neurons
from rotation_merge.matching.block import STILL, match_block, squared_distances
from rotation_merge.matching.matrix_pairs import views
from rotation_merge.matching.neurons import Neurons, match_neurons, proven_order
from rotation_merge.model.apply import transform_tensor
from rotation_merge.symmetry import Monomial, Transform
from rotation_merge.symmetry.admitted import admitted

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "relu": {"degree": 1},
    "relu2": {"degree": 2},
    "gated": {"gated": True},
}
kinds = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS.keys())
Tensors = dict[str, Tensor]


def match(space: Space, anchor: Tensors, donor: Tensors, **options: Any) -> Transform:
    matched = match_neurons(space, views_of(space, anchor, donor), AlignConfig(**options))
    assert admitted(space, AlignConfig(**options)).admits(matched.transform)
    before, after = distance(anchor, donor), left(anchor, donor, matched.transform)
    assert matched.squares is not None
    assert matched.squares[:2] == pytest.approx((before, after), rel=1e-5, abs=1e-5 * before)
    return matched.transform


def costs(space: Space, anchor: Tensors, donor: Tensors, scaling: bool = True) -> Tensor:
    """Squared distances of all pairs of neurons at their best scale and sign, (n, n)."""
    a, b = ({role: x.double() for role, x in model.items()} for model in (anchor, donor))
    products = {role: a[role] @ b[role].T for role in a}
    norms = {role: b[role].square().sum(1)[None].expand_as(products[role]) for role in a}
    total = sum(x.square().sum(1) for x in a.values())[:, None] + torch.zeros_like(products["in"])
    if "gate" in a:
        total = total + norms["gate"] - 2 * products["gate"]
    problem = norms["in"], norms["out"], products["in"], products["out"]
    free = scaling and space.degree
    scale = best_scale(*problem, space.gated, space.degree) if free else torch.ones_like(total)
    return total + cost(scale, *problem, space.degree or 1)


@kinds
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize(("n", "width", "spread"), [(6, 5, 0.0), (6, 5, 0.5), (120, 30, 0.5)])
def test_the_order_is_nearly_the_best_of_all(
    facts: dict[str, Any], scaling: bool, n: int, width: int, spread: float
) -> None:
    """Of pairs with nothing in common; the best without scales, which are balanced for the order only."""
    space, rows = ffn(n, **facts), torch.arange(n)
    for seed in range(3):
        anchor, donor = (tensors(space, width, s, spread=spread) for s in (seed, seed + 50))
        every = costs(space, anchor, donor, scaling)
        best = float(every[rows, assign(-every)].sum())
        reached = left(anchor, donor, match(space, anchor, donor, scaling=scaling))
        exact = not (scaling and space.degree)
        assert best * (1 - 1e-9) <= reached <= best * (1 + 1e-9 if exact else 1.2)
        in_place = match(space, anchor, donor, scaling=scaling, ffn="none")
        still = left(anchor, donor, in_place)
        assert still == pytest.approx(float(every.trace()))
        assert reached <= still * (1 + 1e-12)
        assert torch.equal(in_place.tensors()["neurons.index"][0], rows)


@kinds
@pytest.mark.parametrize("noise", [0.0, 0.1, 1.0])
def test_planted_neurons_are_found(facts: dict[str, Any], noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the storage and its strides, and in how many parts norms are summed."""
    monkeypatch.setattr(matrix_pairs, "CACHED", 1 << 12)
    space = ffn(200, **facts)
    anchor, truth = tensors(space, 120, 0, spread=0.3), planted(space, AlignConfig(), 1)
    twin = noisy(anchor, noise, 2)
    donor, expected = moved(twin, truth.inverse()), truth.elements["neurons"]
    best = match(space, anchor, donor)
    element = best.elements["neurons"]
    assert isinstance(element, Monomial)
    assert isinstance(expected, Monomial)
    assert torch.equal(element.index, expected.index)
    assert torch.equal(element.factor.sign(), expected.factor.sign())
    assert left(anchor, donor, best) <= distance(anchor, twin) * (1 + 1e-9) + 1e-14 * distance(anchor, donor)
    for dtype in (torch.float32, torch.bfloat16):
        pair = [{role: x.to(dtype).T.contiguous().T for role, x in model.items()} for model in (anchor, donor)]
        again = match(space, *pair).elements["neurons"]
        assert torch.equal(again.index, element.index)  # type: ignore[union-attr]


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("noise", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("order", ["own", "two exchanged", "reversed"])
def test_the_shortcut_is_never_wrong(facts: dict[str, Any], dtype: torch.dtype, noise: float, order: str) -> None:
    """An order that it proves is one of the exact assignment's; it proves one for near models and their twins."""
    space, n = ffn(100, **facts), 100
    places = torch.arange(n).flip(0) if order == "reversed" else torch.arange(n)
    if order == "two exchanged":
        places[[3, 8]] = places[[8, 3]]
    anchor = tensors(space, 256, 0, spread=0.2, dtype=dtype)
    donor = {role: x[places] for role, x in noisy(anchor, noise, 1).items()}
    pairs = tuple([(anchor[role], donor[role])] if role in anchor else [] for role in ("in", "gate", "out"))
    group: Any = admitted(space).groups["neurons"][0]
    if (proven := proven_order(Neurons(pairs, group))) is not None:
        every, rows = costs(space, anchor, donor), torch.arange(n)
        assert every[rows, proven[0]].sum() <= every[rows, assign(-every)].sum() * (1 + 1e-9)
        assert noise > 0.1 or torch.equal(proven[0], places.argsort())
    elif noise < 0.1 and order != "two exchanged":
        assert space.degree
        assert not space.gated


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [12, 200])
def test_equal_neurons_stay_bit_for_bit(facts: dict[str, Any], dtype: torch.dtype, n: int) -> None:
    """Also dead ones, equal ones, and where another one differs."""
    space = ffn(n, **facts)
    anchor = tensors(space, 33, 0, dtype=dtype)
    for x in anchor.values():
        x[0] = x[1] = 0
        x[3] = x[4] = x[5]
    donor = {role: x.clone() for role, x in anchor.items()}
    assert match(space, anchor, donor).is_identity()
    donor["in"][7] *= 1.01
    result, kept = moved(donor, match(space, anchor, donor)), torch.arange(n) != 7
    assert all(torch.equal(result[role][kept], anchor[role][kept]) for role in anchor)


# --- experts


def mixtral(
    experts: int, hidden: int = 16, size: int = 12, fused: bool = False
) -> tuple[Block, Space, list[TensorInfo]]:
    """A layer, its experts, and their tensors: apart, or gate and up fused."""
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": hidden,
        "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
        "num_local_experts": experts,
    }  # fmt: skip
    spec = shipped()["mixtral"]
    block = with_checkpoint_names(lay_out(spec, config), "model.", spec.spellings[0]).layers("default")[0]
    space = next(s for s in block.spaces.values() if s.kind == "experts")
    stacked = any("gate_up_proj" in t.key for t in block.tensors)
    infos = [t for t in block.tensors if space in t.spaces() and not t.key.endswith("bias")]
    chosen = [t for t in infos if not stacked or ("proj" in t.key) == fused or t.key.endswith("gate.weight")]
    return block, space, chosen


def block_tensors(infos: Any, seed: int, spread: float = 0.3) -> Tensors:
    g, result = gen(seed), {}
    for t in infos:
        x = torch.randn([a.size or 8 for a in t.axes], generator=g, dtype=torch.float64)
        norms = torch.randn(t.axes[0].size or 8, *[1] * (len(t.axes) - 1), generator=g, dtype=torch.float64)
        result[t.key] = x * (spread * norms).exp()
    return result


def match_experts(block: Block, space: Space, anchor: Tensors, donor: Tensors, options: AlignConfig) -> Transform:
    return match_neurons(space, views(block, space, anchor, donor, {}), options).transform


@pytest.mark.parametrize(("fused", "scaling"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("noise", [0.0, 0.5, None])
@pytest.mark.parametrize("groups", [1, 2])
def test_experts_are_found_and_never_farther_than_at_their_places(
    fused: bool, scaling: bool, noise: float | None, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the router's rows say nothing; of layers with nothing in common, too, whose likely order is worse."""
    block, space, infos = mixtral(6, *((8, 6) if noise is None else (40, 20)), fused=fused)
    space.sizes["groups"] = groups  # that the router picks them in
    anchor, options, router = block_tensors(infos, 11), AlignConfig(scaling=scaling), infos[0].key
    if noise is None:
        donor = block_tensors(infos, 111)
    else:
        anchor[router][:] = anchor[router] if noise else 1.0
        truth, near = planted(space, options, 3), noisy(anchor, noise, 2)
        donor = {t.key: transform_tensor(near[t.key], t, {space.name: truth.inverse()}) for t in infos}
    best = match_experts(block, space, anchor, donor, options)
    assert admitted(space, options).admits(best)
    assert match_experts(block, space, anchor, anchor, options).is_identity()
    monkeypatch.setattr(neurons, "_in_groups", lambda values, groups: torch.arange(len(values)))
    places = match_experts(block, space, anchor, donor, options)
    reached = [squared_distances(block, anchor, donor, {space.name: t}, [space])[0] for t in (best, places)]
    assert reached[0] <= reached[1]
    if noise is not None:
        assert torch.equal(best.orders[0], truth.orders[0])
        assert torch.equal(best.tensors()["neurons.index"], truth.tensors()["neurons.index"])
        assert reached[0] <= distance(anchor, near) * (1 + 1e-9) + 1e-9


def test_experts_that_are_alike_follow_their_router_rows() -> None:
    block, space, infos = mixtral(experts=4, size=6)
    router, order = next(t.key for t in infos if len(t.axes) == 2), torch.tensor([2, 0, 3, 1])
    anchor = {k: x if k == router else x[:1].expand_as(x).clone() for k, x in block_tensors(infos, 0).items()}
    donor = {**anchor, router: anchor[router][order.argsort()]}
    best = match_experts(block, space, anchor, donor, AlignConfig())
    assert torch.equal(best.orders[0], order)
    assert squared_distances(block, anchor, donor, {space.name: best}, [space])[0] == pytest.approx(0.0, abs=1e-12)


# --- whole blocks

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
LLAMA = {"architectures": ["LlamaForCausalLM"], "intermediate_size": 80, "num_key_value_heads": 2, **SIZES}
BERT = {"architectures": ["BertForMaskedLM"], "intermediate_size": 48, "hidden_act": "gelu", **SIZES}
BERT["model_type"] = "bert"


def layer(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Architecture, Block, Tensors]:
    config, base = (LLAMA, "model.") if family == "llama" else (BERT, "bert.")
    architecture = with_checkpoint_names(lay_out(shipped()[family], config), base, [])
    block = architecture.layers("default")[0]
    infos = [t for t in block.tensors if family == "bert" or not t.optional]
    return architecture, block, {k: x.to(dtype) for k, x in block_tensors(infos, seed).items()}


@pytest.mark.parametrize("heads", ["none", "permutation", "spectral"])
@pytest.mark.parametrize("attention", ["none", "rotation"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_records_say_what_applying_gives(heads: str, attention: str, family: str) -> None:
    """Distances are those of all tensors, biases among them but for those that softmax does not see; inputs stay."""
    (_, block, anchor), (_, _, donor) = (layer(family, seed=seed) for seed in (0, 1))
    unseen = {key: anchor[key] for key in anchor if key.endswith("key.bias")}
    before = [{key: x.clone() for key, x in model.items()} for model in (anchor, donor)]
    match = match_block(block, anchor, donor, AlignConfig(heads=heads, attention=attention))
    assert [row.kind for row in match.rows] == ["attention"] * ((attention, heads) != ("none", "none")) + ["ffn"]
    for row in match.rows:
        space = next(s for s in block.spaces.values() if s.name == row.space)
        seen = [{**model, **dict.fromkeys(unseen, torch.zeros(32))} for model in (anchor, donor)]
        for transforms, value in (({}, row.distance_before), (match.transforms, row.distance_after)):
            apart, norm = squared_distances(block, *seen, transforms, [space])
            assert (apart**0.5, norm**0.5) == pytest.approx((value, row.anchor_norm), rel=1e-6)
        assert row.distance_after <= row.distance_before or heads == "spectral"
    for model, copy in zip((anchor, donor), before, strict=True):
        assert all(torch.equal(model[key], copy[key]) for key in model)


@pytest.mark.parametrize(
    ("dtype", "noise", "moves"),
    [(torch.bfloat16, 0.003, False), (torch.bfloat16, 0.3, True), (torch.float32, 0.003, True)],
)
def test_what_a_move_gains_is_more_than_what_storing_it_costs(dtype: torch.dtype, noise: float, moves: bool) -> None:
    _, block, anchor = layer("llama", dtype)
    draw = gen(0)
    donor = {k: (x + noise * x.std() * torch.randn(x.shape, generator=draw)).to(dtype) for k, x in anchor.items()}
    match = match_block(block, anchor, donor, AlignConfig())
    for row in match.rows:
        assert (row.distance_after < row.distance_before) == moves
        assert (STILL in row.notes) == (not moves)
        assert match.transforms[row.space].is_identity() == (not moves)


def test_blocks_under_turned_streams_are_told_of_too() -> None:
    """Rows of a block that is matched under its streams' maps, as in slices, are those of a donor that was turned."""
    (architecture, block, anchor), (_, _, donor) = (layer("llama", seed=seed) for seed in (0, 1))
    streams = {"residual": architecture.stream_group("residual", "signed_permutation").random(gen(2))}
    turned = {info.key: transform_tensor(donor[info.key], info, streams) for info in block.tensors if info.key in donor}
    told = [
        [replace(row, seconds=0.0) for row in match_block(block, anchor, tensors, AlignConfig(), maps).rows]
        for tensors, maps in ((donor, streams), (turned, {}))
    ]
    assert told[0] == told[1]
    assert [row.kind for row in told[0]] == ["attention", "ffn"]
    assert match_block(block, anchor, donor, AlignConfig(), streams, with_rows=False).rows == []
