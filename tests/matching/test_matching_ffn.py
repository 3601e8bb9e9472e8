"""Matching FFN neurons and experts: optimal against brute force, ties, planted truth; whole blocks."""

import itertools

import pytest
import torch
from matching_support import distance, ffn, gen, left, moved, noisy, planted, sides_of, tensors
from scipy.optimize import linear_sum_assignment

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture.build import build
from rotation_merge.architecture.registry import shipped
from rotation_merge.linalg.assignment import assign_factored
from rotation_merge.matching import experts as experts_module
from rotation_merge.matching.block import STILL, check_finite, match_block, squared_distances
from rotation_merge.matching.experts import _collect, _Layer, match_experts
from rotation_merge.matching.ffn import match_ffn
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.nearest import _open_pairs, _project, _still_open, nearest_order
from rotation_merge.matching.neurons import Neurons
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.biases import block_hidden_biases
from rotation_merge.symmetry import Monomial, NeuronTransform, Permutation, Scaling

KINDS = {"plain": {}, "relu": {"degree": 1}, "relu2": {"degree": 2}, "gated": {"gated": True}}
kinds = pytest.mark.parametrize("facts", KINDS.values(), ids=KINDS.keys())
SCALES = torch.linspace(-3, 3, 2001, dtype=torch.float64).exp()


def grid_costs(anchor, donor, facts, scaling):
    """Squared distance of every pair of neurons at its best scale, by a dense grid over scales (and signs)."""
    scales = torch.ones(1, dtype=torch.float64)
    if scaling and facts:
        scales = torch.cat([SCALES, -SCALES]) if facts.get("gated") else SCALES
    scales = scales[:, None, None]
    n = len(anchor["in"])
    total = torch.zeros(len(scales), n, n, dtype=torch.float64)
    for role, x in anchor.items():
        factor = {"in": scales, "gate": torch.ones_like(scales), "out": scales ** -facts.get("degree", 1)}[role]
        y = donor[role]
        total += x.square().sum(1)[None, :, None] - 2 * factor * (x @ y.T) + factor**2 * y.square().sum(1)
    return total.amin(0)


@kinds
@pytest.mark.parametrize("scaling", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_order_signs_and_scales_against_brute_force(facts, scaling, spread):
    space = ffn(6, **facts)
    for seed in range(3):
        anchor, donor = tensors(space, 5, seed, spread=spread), tensors(space, 5, seed + 50, spread=spread)
        costs = grid_costs(anchor, donor, facts, scaling)
        best = min(float(costs[torch.arange(6), list(p)].sum()) for p in itertools.permutations(range(6)))
        match = match_ffn(space, sides_of(anchor, donor), AlignConfig(scaling=scaling))
        assert match.after <= best * (1 + 1e-9)
        assert match.after == pytest.approx(best, rel=1e-4)
        assert left(anchor, donor, NeuronTransform(match.element, space.degree or 1)) == pytest.approx(
            match.after, rel=1e-9
        )
        assert match.before == pytest.approx(distance(anchor, donor))
        assert match.gap == 0


def test_joint_optimum_beats_balanced_norms():
    """The assignment on balanced norms (each side's in and out norms made equal) is close, not optimal."""
    space, worse, shares = ffn(40, gated=True), 0, []
    for seed in range(6):
        anchor, donor = tensors(space, 30, seed, spread=0.5), tensors(space, 30, seed + 50, spread=0.5)

        def balanced(x):
            b = (x["out"].square().sum(1) / x["in"].square().sum(1)).pow(0.25)[:, None]
            return [x["in"] * b, x["out"] / b]

        pairs = list(zip(balanced(anchor), balanced(donor), strict=True))
        index = assign_factored([(anchor["gate"], donor["gate"])], pairs).permutation
        still = {role: x[index] for role, x in donor.items()}
        rough = match_ffn(space, sides_of(anchor, still), AlignConfig(ffn="none")).after
        joint = match_ffn(space, sides_of(anchor, donor), AlignConfig()).after
        assert joint <= rough * (1 + 1e-12)
        worse += joint < rough * (1 - 1e-9)
        shares.append(rough / joint - 1)
    assert worse >= 4
    assert max(shares) < 0.2


@kinds
def test_larger_problems_attain_the_assignments_bound(facts):
    space = ffn(150, **facts)
    anchor, donor = tensors(space, 20, 0, spread=0.5), tensors(space, 20, 1, spread=0.5)
    match = match_ffn(space, sides_of(anchor, donor), AlignConfig())
    i, j = (x.flatten() for x in torch.meshgrid(torch.arange(150), torch.arange(150), indexing="ij"))
    roles = {r: [(anchor[r], donor[r])] for r in anchor}
    neurons = Neurons(roles["in"], roles.get("gate", []), roles["out"], space.gated, space.degree)
    costs = neurons.pair_distances(i, j).reshape(150, 150)
    rows, columns = linear_sum_assignment(costs.numpy())
    assert match.after == pytest.approx(float(costs[rows, columns].sum()), rel=1e-9)


@kinds
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
def test_planted_neurons_are_recovered(facts, noise):
    space, options = ffn(200, **facts), AlignConfig()
    anchor = tensors(space, 120, 0, spread=0.3)
    truth = planted(space, options, 1)
    donor = moved(noisy(anchor, noise, 2), truth.inverse())
    match = match_ffn(space, sides_of(anchor, donor), options)
    assert torch.equal(match.element.permutation.index, truth.element.permutation.index)
    assert torch.equal(match.element.scaling.factor.sign(), truth.element.scaling.factor.sign())
    assert match.after <= distance(anchor, noisy(anchor, noise, 2)) * (1 + 1e-9) + 1e-14 * match.anchor
    if noise == 0:
        torch.testing.assert_close(match.element.scaling.factor, truth.element.scaling.factor)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_near_models_are_proven_without_all_pairs(facts, dtype):
    """The quick proof finds what the full assignment finds, for the donor's own order and for a planted one."""
    space = ffn(300, **facts)
    anchor = tensors(space, 256, 0, dtype=dtype)
    order = torch.randperm(300, generator=gen(3))
    for index in (torch.arange(300), order):
        donor = {r: x[index.argsort()] for r, x in noisy(anchor, 0.05, 1).items()}
        roles = {r: [(anchor[r], donor[r])] for r in anchor}
        neurons = Neurons(roles["in"], roles.get("gate", []), roles["out"], space.gated, space.degree)
        proven = nearest_order(neurons)
        if facts.get("degree"):
            assert proven is None  # every coordinate may be rescaled: nothing to tell neurons apart by quickly
        else:
            assert torch.equal(proven[0], index)
        found = match_ffn(space, sides_of(anchor, donor), AlignConfig())
        assert torch.equal(found.element.permutation.index[0], index)
        assert found.gap == 0


def test_the_quick_proof_never_accepts_a_wrong_order():
    space = ffn(100)
    anchor = tensors(space, 64, 0)
    donor = noisy(anchor, 0.05, 1)
    for role in donor:
        donor[role][[3, 8]] = donor[role][[8, 3]]
    neurons = Neurons([(anchor["in"], donor["in"])], [], [(anchor["out"], donor["out"])], False, 0)
    assert nearest_order(neurons) is None  # the donor's own order looks right, two neurons are exchanged
    found = match_ffn(space, sides_of(anchor, donor), AlignConfig())
    assert found.element.permutation.index[0, [3, 8]].tolist() == [8, 3]


@pytest.mark.parametrize(("price", "told"), [(1 - 1.8e-5, True), (1 - 5e-5, False)])
def test_pairs_that_rounding_may_hide_stay_open(price: float, told: bool):
    """At a squared distance of four: where that and the price are within 1e-5 of one another, float32 cannot say."""
    left, right = torch.tensor([[0.0], [9.0]]), torch.tensor([[5.0], [2.0]])
    halves, one = torch.full((2,), 2 * price, dtype=torch.float64), torch.tensor([1])
    assert (_open_pairs(left, right, halves, one - 1)[1].tolist() == [1]) == told
    assert (_still_open(left, right, halves, one - 1, one)[1].tolist() == [1]) == told


def test_the_quick_proof_looks_at_the_right_pairs():
    """Six neurons on a ring, each the donor's one place further: only pairs (i, i - 1) tell, and (i - 1, i) do not."""
    space = ffn(100)
    anchor = tensors(space, 64, 0)
    sketch = _project(torch.eye(64, dtype=torch.float64), 0).double()
    plane = (sketch[:, [0, 2]] + sketch[:, [1, 3]]) / 2**0.5  # distances in it outlast the sketch and its folding
    angles = torch.arange(6, dtype=torch.float64) * (torch.pi / 3)
    anchor["in"][:6] = 9 * plane.sum(1) + torch.stack([angles.cos(), angles.sin()], 1) @ plane.T
    anchor["out"][:6] = anchor["out"][0].clone()
    donor = noisy(anchor, 0.01, 1)
    for role in donor:
        donor[role][:6] = anchor[role][:6].roll(-1, 0)
    neurons = Neurons([(anchor["in"], donor["in"])], [], [(anchor["out"], donor["out"])], False, 0)
    assert nearest_order(neurons) is None
    found = match_ffn(space, sides_of(anchor, donor), AlignConfig())
    assert found.element.permutation.index[0, :7].tolist() == [5, 0, 1, 2, 3, 4, 6]


@pytest.mark.parametrize("size", [1, 8, 100])
def test_projections_are_orthonormal_with_signs_of_both_kinds(size):
    """A projected distance is no larger than the distance itself; rows in memory, or columns."""
    for matrix in (torch.eye(size), torch.eye(size).T):  # the second is the same, laid out by columns
        found = _project(matrix, 0)
        torch.testing.assert_close(found.T @ found, torch.eye(found.shape[1]))
        assert size < 100 or found.sign().unique().tolist() == [-1, 0, 1]


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [12, 200])
def test_equal_models_stay_bit_for_bit(facts, dtype, n):
    space = ffn(n, **facts)
    anchor = tensors(space, 33, 0, dtype=dtype)
    for x in anchor.values():
        x[0] = x[1] = 0
        x[3] = x[4] = x[5]
    donor = {r: x.clone() for r, x in anchor.items()}
    match = match_ffn(space, sides_of(anchor, donor), AlignConfig())
    assert match.element.is_identity()
    assert match.gap == 0
    donor["in"][7] *= 1.01
    transform = NeuronTransform(match_ffn(space, sides_of(anchor, donor), AlignConfig()).element)
    kept = torch.arange(n) != 7
    result = moved(donor, transform)
    assert all(torch.equal(result[r][kept], anchor[r][kept]) for r in anchor)


def test_scale_alone_where_no_order_is_asked_for():
    space = ffn(9, gated=True)
    anchor, donor = tensors(space, 5, 0), tensors(space, 5, 1)
    match = match_ffn(space, sides_of(anchor, donor), AlignConfig(ffn="none"))
    assert match.gap is None
    transform = NeuronTransform(match.element)
    assert transform.element.permutation.is_identity()
    element = Monomial(Permutation.identity(1, 9), Scaling(transform.element.scaling.factor * 1.01))
    assert left(anchor, donor, transform) < left(anchor, donor, NeuronTransform(element))


# --- experts


def mixtral(experts=4, hidden=16, size=12, spelling=0, fused=False):
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": hidden,
        "intermediate_size": size, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1,
        "num_local_experts": experts,
    }  # fmt: skip
    spec = shipped()["mixtral"]
    block = build(spec, config, "model.", spec.spellings[spelling]).layers("default")[0]
    space = next(s for s in block.spaces.values() if s.kind == "experts")
    stacked = any("gate_up_proj" in t.key for t in block.tensors)
    keys = [
        t
        for t in block.tensors
        if space in t.spaces() and (not stacked or ("proj" in t.key) == fused or t.key.endswith("gate.weight"))
    ]
    return block, space, [t for t in keys if not t.key.endswith("bias")]


def block_tensors(infos, seed, spread=0.3):
    g = gen(seed)
    return {
        t.key: torch.randn([a.size or 8 for a in t.axes], generator=g, dtype=torch.float64)
        * (spread * torch.randn(t.axes[0].size or 8, *[1] * (len(t.axes) - 1), generator=g, dtype=torch.float64)).exp()
        for t in infos
    }


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scaling", [True, False])
def test_experts_against_all_orders(fused, scaling):
    block, space, infos = mixtral(experts=3, size=6, fused=fused)
    anchor, donor = block_tensors(infos, 0), block_tensors(infos, 1)
    options = AlignConfig(scaling=scaling)
    match = match_experts(block, space, anchor, donor, {}, options)
    alone = [[None] * 3 for _ in range(3)]
    layer = _Layer(space, options, *_collect(block, space, anchor, donor, {}))
    for i, j in itertools.product(range(3), repeat=2):
        alone[i][j] = layer.match(i, j).after + float(layer.routing[i, j])
    best = min(sum(alone[i][p[i]] for i in range(3)) for p in itertools.permutations(range(3)))
    assert match.after == pytest.approx(best, rel=1e-9)
    assert match.notes == []
    after = squared_distances(block, space, anchor, donor, {space.name: match.transform})
    assert after[0] == pytest.approx(match.after, rel=1e-5)
    assert squared_distances(block, space, anchor, donor, {})[0] == pytest.approx(match.before, rel=1e-5)
    assert after[1] == pytest.approx(match.anchor, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 1.0])
def test_planted_experts_are_recovered(fused, noise):
    block, space, infos = mixtral(experts=5, hidden=40, size=20, fused=fused)
    anchor = block_tensors(infos, 0)
    truth = planted(space, AlignConfig(), 3)
    twin = noisy(anchor, noise, 2)
    donor = {t.key: transform_tensor(twin[t.key], t, {space.name: truth.inverse()}) for t in infos}
    match = match_experts(block, space, anchor, donor, {}, AlignConfig())
    assert torch.equal(match.transform.order, truth.order)
    assert torch.equal(match.transform.neurons.permutation.index, truth.neurons.permutation.index)
    assert match.after <= distance(anchor, twin) * (1 + 1e-9) + 1e-12


def test_experts_out_of_budget_say_so(monkeypatch):
    monkeypatch.setattr(experts_module, "MOST_WORK", 0.0)
    block, space, infos = mixtral(experts=6, hidden=8, size=6)
    anchor, donor = block_tensors(infos, 0), block_tensors(infos, 1)
    match = match_experts(block, space, anchor, donor, {}, AlignConfig())
    assert "not proven" in match.notes[0]
    own = match_experts(block, space, anchor, donor, {}, AlignConfig(ffn="none"))
    assert match.after < own.after


# --- whole blocks


def llama_block(dtype=torch.float64, seed=0):
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1,
    }  # fmt: skip
    architecture = build(shipped()["llama"], config, "model.", [])
    block = architecture.layers("default")[0]
    infos = [t for t in block.tensors if not t.optional]
    return architecture, block, {k: x.to(dtype) for k, x in block_tensors(infos, seed).items()}


@pytest.mark.parametrize("heads", ["none", "permutation", "spectral"])
@pytest.mark.parametrize("attention", ["none", "rotation"])
def test_block_records_what_applying_gives(heads, attention):
    _, block, anchor = llama_block()
    _, _, donor = llama_block(seed=1)
    options = AlignConfig(heads=heads, attention=attention)
    match = match_block(block, anchor, donor, options)
    still = (attention, heads) == ("none", "none")
    assert [r.kind for r in match.records] == (["ffn"] if still else ["attention", "ffn"])
    for record in match.records:
        space = next(s for s in block.spaces.values() if s.name == record.space)
        after = squared_distances(block, space, anchor, donor, match.transforms)
        assert after[0] == pytest.approx(record.after, rel=1e-6)
        assert after[1] == pytest.approx(record.anchor, rel=1e-6)
        assert record.after <= record.before * (1 + 1e-12)


def bert_block(seed=0):
    config = {
        "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_hidden_layers": 1, "hidden_act": "gelu",
    }  # fmt: skip
    block = build(shipped()["bert"], config, "bert.", []).layers("default")[0]
    return block, block_tensors(block.tensors, seed)


@pytest.mark.parametrize("heads", ["none", "permutation"])
def test_biases_count(heads):
    """Distances before and after are those of all tensors, biases among them but for those that softmax does not see;
    these alone may tell neurons apart."""
    (block, anchor), (_, donor) = bert_block(), bert_block(seed=1)
    match = match_block(block, anchor, donor, AlignConfig(heads=heads))
    for record in match.records:
        space = next(s for s in block.spaces.values() if s.name == record.space)
        hidden = {bias.info.key for bias in block_hidden_biases(block) if bias.space == space}
        assert len(hidden) == (2 if space.kind == "attention" else 0)
        seen = [{key: x for key, x in side.items() if key not in hidden} for side in (anchor, donor)]
        for transforms, value in (({}, record.before), (match.transforms, record.after)):
            assert squared_distances(block, space, *seen, transforms)[0] == pytest.approx(value, rel=1e-6)
    up = next(t for t in block.tensors if [p.role for a in t.axes for p in a.parts] == ["in", "read"])
    down = next(t for t in block.tensors if [p.role for a in t.axes for p in a.parts] == ["write", "out"])
    anchor[up.key][:], anchor[down.key][:] = 1.0, 1.0
    bias = up.key.replace("weight", "bias")
    order = torch.randperm(len(anchor[bias]), generator=gen(2))
    found = match_block(block, anchor, {**anchor, bias: anchor[bias][order]}, AlignConfig(heads=heads))
    moved = transform_tensor(anchor[bias][order], block.tensor(bias), found.transforms)
    assert torch.equal(moved, anchor[bias])


@pytest.mark.parametrize(
    ("dtype", "noise", "moves"),
    [(torch.bfloat16, 0.003, False), (torch.bfloat16, 0.3, True), (torch.float32, 0.003, True)],
)
def test_what_a_move_gains_is_more_than_what_storing_it_costs(dtype, noise, moves):
    _, block, anchor = llama_block(dtype)
    draw = gen(0)
    donor = {k: (x + noise * x.std() * torch.randn(x.shape, generator=draw)).to(dtype) for k, x in anchor.items()}
    double = [{k: x.double() for k, x in tensors.items()} for tensors in (anchor, donor)]
    best = match_block(block, *double, AlignConfig()).transforms
    for record in match_block(block, anchor, donor, AlignConfig()).records:
        space = next(own for own in block.spaces.values() if own.name == record.space)
        infos = [info for info in block.tensors if info.key in donor]
        stored = {info.key: transform_tensor(double[1][info.key], info, best).to(dtype) for info in infos}
        assert (squared_distances(block, space, anchor, stored, {})[0] < record.before) == moves
        assert (record.after < record.before) == moves
        assert (STILL in record.notes) == (not moves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_block_planted_in_storage_dtypes(dtype):
    architecture, block, anchor = llama_block(dtype)
    options = AlignConfig(heads="permutation")
    gauge = random_gauge(architecture, options, gen(4))
    donor = {t.key: transform_tensor(anchor[t.key], t, gauge).to(dtype) for t in block.tensors if t.key in anchor}
    match = match_block(block, anchor, donor, options)
    for record in match.records:
        assert record.after < (1e-7 if dtype == torch.float32 else 1e-4) * record.anchor


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("whose", ["anchor", "donor"])
def test_bad_values_are_named(bad, whose):
    _, block, anchor = llama_block()
    donor = {k: x.clone() for k, x in anchor.items()}
    broken = {"anchor": anchor, "donor": donor}[whose]
    key = next(k for k in broken if "up_proj" in k)
    check_finite(block, broken, whose)
    broken[key][3, 3] = bad
    with pytest.raises(RotationMergeError, match=rf"up_proj.weight' of the {whose}"):
        check_finite(block, broken, whose)


def test_what_rescaling_leaves_where_it_stands_is_the_very_same_tensor():
    _, block, anchor = llama_block(torch.float32)
    element = Monomial(Permutation.identity(1, 80), Scaling.random(1, 80, gen(0)))
    space = next(space for space in block.spaces.values() if space.kind == "ffn")
    roles = {}
    for info in block.tensors:
        if info.key in anchor and space in info.spaces():
            moved = transform_tensor(anchor[info.key], info, {space.name: NeuronTransform(element)})
            role = next(part.role for axis in info.axes for part in axis.parts if part.space == space)
            roles[role] = moved is anchor[info.key]
    assert roles == {"gate": True, "in": False, "out": False}


def test_inputs_are_not_modified():
    _, block, anchor = llama_block(torch.float32)
    _, _, donor = llama_block(torch.float32, seed=1)
    copies = [{k: x.clone() for k, x in side.items()} for side in (anchor, donor)]
    match_block(block, anchor, donor, AlignConfig(heads="permutation"))
    for side, copy in zip((anchor, donor), copies, strict=True):
        assert all(torch.equal(side[k], copy[k]) for k in side)
