"""Laws and planted truths that single lines of matching hang on: each fails when its line is broken."""

from __future__ import annotations

import pytest
import torch
from matching_support import gen
from test_devices import weights
from test_matching_ffn import block_tensors, mixtral
from tiny_models import ALL, outputs, planted, reload
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture import families, table
from rotation_merge.architecture.build import stream_groups
from rotation_merge.architecture.model import Axis, Block, Norm, Part, Space, TensorInfo
from rotation_merge.architecture.registry import shipped
from rotation_merge.linalg import assignment
from rotation_merge.linalg.polar import nuclear_norm
from rotation_merge.matching.attention import match_attention
from rotation_merge.matching.experts import match_experts
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.match import match_model
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.matching.mean import _relative
from rotation_merge.model.biases import in_coordinates
from rotation_merge.model.fingerprint import Fingerprint
from rotation_merge.model.tensors import mean_of
from rotation_merge.symmetry import DirectSum, Orthogonal, Planar, Scaling
from rotation_merge.symmetry.planar import PlanarGroup
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.translation import TranslationTransform

torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["vit", "gpt_neox", "mixtral"])
def test_relative_frames_undo_the_base_after_the_other(family: str) -> None:
    """A model moved into the common frame and from there into the base's coordinates is moved by the relative frame."""
    architecture = table.sample(shipped()[family])
    options = AlignConfig(heads="permutation", residual=architecture.residual_groups[-1])
    base, other = (random_gauge(architecture, options, gen(seed)) for seed in (1, 2))
    state = {name: x.double() for name, x in weights(architecture, 3).items()}
    common = dict(in_coordinates(architecture, state, other))
    shifts = {name: t for name, t in base.items() if isinstance(t, TranslationTransform)}
    there = dict(in_coordinates(architecture, common, {name: t.inverse() for name, t in shifts.items()}))  # added last
    there = dict(in_coordinates(architecture, there, {n: t.inverse() for n, t in base.items() if n not in shifts}))
    straight = dict(in_coordinates(architecture, state, _relative(architecture, base, other)))
    for name, tensor in there.items():
        torch.testing.assert_close(straight[name], tensor, rtol=1e-9, atol=1e-9)
    assert _relative(architecture, {}, other) == other


def test_sources_of_sources() -> None:
    architecture = table.sample(shipped()["llama"])
    state, name = weights(architecture, 3), "lm_head.weight"
    middle = mean_of([state, {name: 3 * state[name]}])
    torch.testing.assert_close(middle[name], 2 * state[name])
    assert name in middle
    assert "model.norm.weight" not in middle
    moved = in_coordinates(architecture, {**state, "extra": torch.ones(2)}, {})
    assert moved[name] is state[name]
    assert "extra" in moved
    assert torch.equal(moved["extra"], torch.ones(2))


@pytest.mark.parametrize("family", ["deberta_v2", "mpnet", "nomic_bert"])
def test_biases_of_a_tied_head_are_shifted_alone(family: str) -> None:
    """Which pairs of models are refused before; where heads are their own, test_translations.py looks at all of it."""
    model = planted(next(c for c in ALL if c.family == family and c.class_name.endswith("ForMaskedLM")))
    shift = AlignConfig(attention="none", heads="none", ffn="none", scaling=False, shift_head=True)
    after = dict(in_coordinates(model.architecture, model.state, random_gauge(model.architecture, shift, gen(1))))
    assert [n.rpartition(".")[2] for n in after if not torch.equal(after[n], model.state[n])] == ["bias"]
    there = outputs(reload(model.case, model.folder, after), model.given)["logits"]
    assert (there - model.expected["logits"]).abs().max() > 1e-2
    assert (there.log_softmax(-1) - model.expected["logits"].log_softmax(-1)).abs().max() <= 1e-9
    found = match_model(model.architecture, model.state, after, shift)
    back = dict(in_coordinates(model.architecture, after, found.transforms))
    assert all((back[n] - model.state[n]).abs().max() <= 1e-9 for n in back)


def test_experts_that_are_alike_follow_their_router_rows() -> None:
    block, space, infos = mixtral(experts=4, size=6)
    anchor = block_tensors(infos, 0)
    router = next(t.key for t in infos if len(t.axes) == 2)
    for key, tensor in anchor.items():
        if key != router:
            anchor[key] = tensor[:1].expand_as(tensor).clone()
    order = torch.tensor([2, 0, 3, 1])
    donor = {**anchor, router: anchor[router][order.argsort()]}
    match = match_experts(block, space, anchor, donor, {}, AlignConfig())
    assert torch.equal(match.transform.order, order)
    assert match.after == pytest.approx(0.0, abs=1e-12)
    assert match.before > 1.0


def test_the_gap_that_is_told_is_the_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gap together are the bound that the solver's prices prove, whichever way it was asked."""
    monkeypatch.setattr(assignment, "_DENSE_BELOW", 2)
    monkeypatch.setattr(assignment, "_DENSE_AGAIN", 2)
    solve, kept = assignment.solve_sparse, []
    monkeypatch.setattr(
        assignment, "solve_sparse", lambda c, v, a, rounds: kept.append(solve(c, 0 * v, a, 2, 1)) or kept[-1]
    )
    monkeypatch.setattr(assignment, "solve_projected", lambda factors, own: None)
    a, b = (torch.randn(200, 20, generator=gen(seed), dtype=torch.float64) for seed in (0, 1))
    similarity = a @ b.T
    for found in (assignment.assign(similarity), assignment.assign_factored([(a, b)])):
        held = similarity if similarity.dtype == torch.float64 else similarity.double()
        proven = float(held.gather(1, kept[-1].permutation[:, None]).sum()) + kept[-1].gap
        assert kept[-1].gap > 0
        assert kept[-1].gap == pytest.approx(
            assignment.certificate(held, kept[-1].permutation, kept[-1].prices), rel=1e-6
        )
        assert found.value + found.gap * abs(found.value) == pytest.approx(proven, rel=1e-9)


def grams(seed: int, count: int, size: int) -> Grams:
    """Statistics of heads whose norms differ by orders of magnitude."""
    g = gen(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    a, b = ([normal(count, size, 3) * (1.2 * normal(count, 1, 1)).exp() for _ in range(2)] for _ in range(2))
    norms = [x.square().sum(-1) for x in (b[0], b[1], a[0], a[1])]
    return Grams(a[0] @ b[0].mT, a[1] @ b[1].mT, *norms)


def test_map_and_scale_are_optimal_together() -> None:
    """No scale with its best map does better: some of these have a second optimum, far from where a search begins."""
    given = grams(2, 200, 2)
    _, gain = OrthogonalGroup(True).solve(given)
    primal, dual = given.donor_primal.sum(-1), given.donor_dual.sum(-1)
    for log_scale in torch.linspace(-5, 5, 401, dtype=torch.float64):
        a = log_scale.exp()
        best = 2 * nuclear_norm(a * given.primal + given.dual / a) - a**2 * primal - dual / a**2
        assert (best <= gain + 1e-9 * given.norms()).all()


def test_turn_and_scale_of_a_pair_are_optimal_together() -> None:
    g = gen(3)
    z = [torch.randn(400, 2, 3, generator=g, dtype=torch.float64) for _ in range(4)]
    z = [x * (1.2 * torch.randn(400, 1, 1, generator=g, dtype=torch.float64)).exp() for x in z]
    complexes = [torch.complex(x[:, 0], x[:, 1]) for x in z]
    primal, dual = ((a * b.conj()).sum(-1)[:, None] for a, b in (complexes[:2], complexes[2:]))
    norms = [x.square().sum(-1) for x in (z[1], z[3], z[0], z[2])]
    given = Grams(primal, dual, *norms)
    _, gain = PlanarGroup(True).solve(given)
    p, d = given.donor_primal.sum(-1), given.donor_dual.sum(-1)
    for log_scale in torch.linspace(-5, 5, 401, dtype=torch.float64):
        a = log_scale.exp()
        best = 2 * (a * primal + dual / a).abs()[:, 0] - a**2 * p - d / a**2
        assert (best <= gain + 1e-9 * given.norms()).all()


def test_the_distance_of_a_partial_rotary_head_counts_its_parts_by_their_size() -> None:
    turned = Planar(torch.tensor([[torch.pi]]).double(), torch.ones(1, 1).double())  # every pair turned half: 1
    still = Orthogonal.identity(1, 6)
    assert float(DirectSum((turned, still)).distance()) == pytest.approx(2 / 8)
    assert float(DirectSum((still, turned)).distance()) == pytest.approx(2 / 8)
    signs = Scaling(torch.tensor([[-1.0, -1, -1, 1, 1, 1]]).double())  # half of the signs: 1/2
    assert float(DirectSum((turned, signs)).distance()) == pytest.approx((2 * 1 + 6 * 0.5) / 8)


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_what_reads_a_layer_normed_stream_raw_forbids_rotations(layer: bool, raw: bool) -> None:
    """Centring the writers is seen by a reader that no norm stands before."""
    stream = Space("residual", "stream", {"size": 4})

    def info(key: str, role: str) -> TensorInfo:
        return TensorInfo(key, (key,), (Axis(), Axis(((Part(stream, role),),))))

    tensors = [info("norm.weight", "gain"), info("up.weight", "read"), info("probe.weight", "read")]
    norm = Norm("residual", "norm.weight", None, ("up",) if raw else ("up", "probe"), layer, 0.0)
    block = Block("b", "m", None, "before", tuple(tensors), {}, (norm,))
    spec, config = families()["gpt2"], {"architectures": ["GPT2LMHeadModel"]}
    groups = stream_groups(spec, config, "residual", [block])
    assert ("rotation" in groups) == (not (layer and raw))
    assert ("signed_permutation" in groups) == (not layer)


def test_a_fingerprint_is_taken_of_each_tensor_once() -> None:
    state = {str(seed): torch.randn(4, 3, generator=gen(seed)) for seed in range(4)}
    marks = [Fingerprint(), Fingerprint()]
    for name, tensor in state.items():
        marks[0].add(name, tensor)
    for name, tensor in reversed(state.items()):
        marks[1].add(name, tensor)
        marks[1].add(name, torch.zeros(3))
    assert len({mark.hexdigest({}) for mark in marks}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("facts", [{}, {"rotary": 32}, {"norm": "rms_head"}])
def test_heads_that_are_equal_stay_beside_heads_that_are_not(dtype: torch.dtype, facts: dict[str, object]) -> None:
    """Bit for bit, however ill-conditioned: the rounding of their statistics must not turn them."""
    heads, d, width = 4, 32, 1000
    sizes = {"groups": heads, "per_group": 1, "head_dim": d, "value_dim": d}
    space = Space("attn", "attention", sizes, **facts)  # type: ignore[arg-type]
    g, found, equal = gen(30), [], torch.tensor([True, False, True, False])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    for role in ("q", "k", "v", "o"):
        spectrum = torch.logspace(0, -7.2, d, dtype=torch.float64)[:, None]
        x = torch.linalg.qr(normal(heads, d, d))[0] @ (spectrum * normal(heads, d, width))
        anchor = (x * (3 * normal(heads, 1, 1)).exp()).reshape(*space.factors(role), width).to(dtype)
        kept = equal.reshape(heads, *[1] * (anchor.ndim - 1))
        found.append(Side(role, anchor, torch.where(kept, anchor, torch.flip(anchor, [0]))))
    transform = match_attention(space, found, AlignConfig()).transform
    for side in found:
        moved = transform.act(side.donor, side.role, 0)
        assert torch.equal(moved[equal], side.anchor[equal]), side.role
        assert not torch.equal(moved[~equal], side.donor[~equal]) or "norm" in facts
