"""The laws of every group, over the registries."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rotation_merge import RotationMergeError
from rotation_merge.architecture.model import ROLES, Space
from rotation_merge.symmetry import (
    KINDS,
    TRANSFORMS,
    DirectSum,
    Exchange,
    ExpertTransform,
    GroupElement,
    HeadTransform,
    Monomial,
    NeuronTransform,
    Orthogonal,
    Permutation,
    Planar,
    ScaledElement,
    Scaling,
    SpaceTransform,
    StreamTransform,
)
from rotation_merge.symmetry.admitted import GroupOptions, latent
from rotation_merge.symmetry.base import dump, load
from rotation_merge.symmetry.convolution import ConvolutionGroup
from rotation_merge.symmetry.latent import LatentGroup, LatentTransform
from rotation_merge.symmetry.matrix import MatrixElement
from rotation_merge.symmetry.mixer import MixerGroup
from rotation_merge.symmetry.scaled import OrthogonalGroup
from rotation_merge.symmetry.tangent import Freedom
from rotation_merge.symmetry.translation import TranslationGroup

torch.set_num_threads(1)
BATCH, SIZE = 3, 6


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def signed(batch: int, size: int, seed: int) -> Scaling:
    return Scaling.random(batch, size, generator(seed)).compose(Scaling.random_signs(batch, size, generator(seed)))


SPECIAL = {
    "interleaved": lambda seed: Planar(*planar(seed), interleaved=True),
    "signs": lambda seed: signed(BATCH, SIZE, seed),
    "partial_rotary": lambda seed: DirectSum(
        (Planar(*planar(seed, 1), interleaved=True), Orthogonal.random(BATCH, SIZE - 2, generator(seed)))
    ),
}
ELEMENTS = {
    **{kind: lambda seed, cls=cls: cls.random(BATCH, SIZE, generator(seed)) for kind, cls in KINDS.items()},
    **SPECIAL,
}


def planar(seed: int, pairs: int = SIZE // 2) -> tuple[Tensor, Tensor]:
    element = Planar.random(BATCH, 2 * pairs, generator(seed))
    return element.angle, element.scale


elements = pytest.mark.parametrize("make", ELEMENTS.values(), ids=ELEMENTS.keys())


def tensor(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@elements
@pytest.mark.parametrize("dual", [False, True])
def test_element_laws(make, dual):
    g, h, x = make(1), make(2), tensor(BATCH, SIZE, 4)
    close(g.inverse().act(g.act(x, 0, 1, dual), 0, 1, dual), x)
    close(g.act(g.inverse().act(x, 0, 1, dual), 0, 1, dual), x)
    close(g.compose(h).act(x, 0, 1, dual), g.act(h.act(x, 0, 1, dual), 0, 1, dual))
    assert (g.act(x, 0, 1, dual) - x).abs().max() > 1e-3
    assert (g.batch, g.size) == (BATCH, SIZE)


@elements
def test_element_keeps_pairings(make):
    g, q, k = make(3), tensor(BATCH, 5, SIZE), tensor(BATCH, 4, SIZE, seed=8)
    close(g.act(q, 0, 2, dual=True) @ g.act(k, 0, 2).mT, q @ k.mT)


@pytest.mark.parametrize("kind", KINDS)
def test_identity_moves_nothing(kind):
    one, x = KINDS[kind].identity(BATCH, SIZE), tensor(BATCH, SIZE, 4)
    assert one.is_identity()
    assert torch.equal(one.act(x, 0, 1), x)
    assert torch.equal(one.act(x, 0, 1, dual=True), x)
    assert not KINDS[kind].random(BATCH, SIZE, generator()).is_identity()


def test_a_latent_has_all_rotations_as_its_norm_is_an_rmsnorm():
    group = latent(Space("latent", "latent", {"size": 6}), GroupOptions(residual="rotation"))
    ones = torch.ones(1, 6, dtype=torch.float64)
    assert not torch.allclose(group.random(generator()).element.act(ones, 0, 1), ones)


def test_the_farthest_orthogonal_map_has_distance_one():
    close(Orthogonal(-torch.eye(SIZE, dtype=torch.float64)[None]).distance(), torch.ones(1, dtype=torch.float64))


@pytest.mark.parametrize("rescale", [False, True])
def test_what_can_be_learned_from_the_identity_is_what_can_be_learned(rescale: bool):
    group = OrthogonalGroup(rescale=rescale)
    steps = [g.tangent(Freedom()).keys() for g in (group.identity(2, 4), group.random(2, 4, generator()))]
    assert steps[0] == steps[1]
    assert len(steps[0]) == 1 + rescale


@elements
def test_distance_is_zero_only_at_the_identity(make):
    g = make(4)
    assert g.distance().shape == (BATCH,)
    assert (g.distance() >= 0).all()
    assert not g.is_identity()
    close(g.compose(g.inverse()).distance(), torch.zeros(BATCH, dtype=torch.float64))


@elements
def test_select_picks_elements(make):
    g, index = make(5), torch.tensor([2, 0])
    x = tensor(BATCH, SIZE, 4)
    close(g.select(index).act(x[index], 0, 1), g.act(x, 0, 1)[index])


@elements
@pytest.mark.parametrize("dual", [False, True])
@pytest.mark.parametrize(("shape", "batch_dim", "dim"), [((3, 6), 0, 1), ((6, 3), 1, 0), ((2, 6, 5, 3), 3, 1)])
def test_act_on_any_dimension(make, dual, shape, batch_dim, dim):
    g, x = make(6), tensor(*shape)
    moved = g.act(x, batch_dim, dim, dual)
    straight = g.act(x.movedim((batch_dim, dim), (0, 1)).contiguous(), 0, 1, dual)
    close(moved.movedim((batch_dim, dim), (0, 1)), straight)
    assert moved.shape == x.shape


@elements
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_act_keeps_dtype_and_input(make, dtype):
    g, base = make(6), tensor(4, SIZE, BATCH * 2, dtype=dtype)
    strided, before = base[:, :, ::2], base.clone()
    moved = g.act(strided, 2, 1)
    assert (moved.dtype, moved.device) == (dtype, base.device)
    assert torch.equal(base, before)
    exact = g.act(strided.double(), 2, 1)
    assert (moved.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@elements
def test_dump_and_load(make):
    g, x = make(7), tensor(BATCH, SIZE, 4)
    again = load({name: t.clone() for name, t in dump(g).items()})
    assert type(again) is type(g)
    assert torch.equal(again.act(x, 0, 1), g.act(x, 0, 1))
    assert torch.equal(g.to(torch.device("cpu")).act(x, 0, 1), g.act(x, 0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cls", [Orthogonal, ScaledElement])
def test_rounded_maps_come_back_orthogonal(cls, dtype):
    g = cls.random(BATCH, SIZE, generator())
    again = cls.from_tensors({name: t.to(dtype) for name, t in g.tensors().items()})
    eye = torch.eye(SIZE, dtype=torch.float64).expand(BATCH, -1, -1)
    close(again.matrix @ again.matrix.mT, eye)
    assert (again.matrix - g.matrix).abs().max() < 2 * torch.finfo(dtype).eps
    q, k = tensor(BATCH, 5, SIZE), tensor(BATCH, 4, SIZE, seed=8)
    close(again.act(q, 0, 2, dual=True) @ again.act(k, 0, 2).mT, q @ k.mT)


def test_load_refuses_unknown_keys():
    with pytest.raises(RotationMergeError, match="no group element"):
        load({"nonsense:matrix": torch.eye(2)})


def test_hand_computed():
    turn = Planar(torch.tensor([[torch.pi / 2]], dtype=torch.float64), torch.tensor([[2.0]]).double())
    close(turn.act(torch.tensor([[1.0, 0.0]]).double(), 0, 1), torch.tensor([[0.0, 2.0]]).double())
    close(turn.act(torch.tensor([[1.0, 0.0]]).double(), 0, 1, dual=True), torch.tensor([[0.0, 0.5]]).double())
    swap = Monomial(Permutation(torch.tensor([[1, 0]])), Scaling(torch.tensor([[1.0, -2.0]]).double()))
    close(swap.act(torch.tensor([[3.0, 5.0]]).double(), 0, 1), torch.tensor([[5.0, -6.0]]).double())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10**6))
def test_inverse_of_composition(kind, batch, half, seed):
    cls = KINDS[kind]
    g, h = (cls.random(batch, 2 * half, generator(seed + s)) for s in (0, 1))
    x = tensor(batch, 2 * half, 3, seed=seed)
    close(g.compose(h).inverse().act(x, 0, 1), h.inverse().act(g.inverse().act(x, 0, 1), 0, 1))


# --- transforms of spaces


ATTENTION = Space("attn", "attention", {"groups": 3, "per_group": 2, "head_dim": 4, "value_dim": 5})
SPACES = {
    "attention": ATTENTION,
    "ffn": Space("ffn", "ffn", {"size": 7}, gated=True),
    "experts": Space("experts", "experts", {"count": 3, "size": 4}, gated=True),
    "stream": Space("residual", "stream", {"size": 6}),
    "latent": Space("latent", "latent", {"size": 6}),
    "translation": Space("router", "translation", {"size": 6}),
    "mixer": Space("mixer", "mixer", {"groups": 3, "per_group": 2, "shared": 4, "own": 5}),
    "convolution": Space("channels", "convolution", {"size": 6}),
}


def random_transform(kind: str, seed: int, gains: int = 1) -> SpaceTransform:
    g = generator(seed)
    if kind == "attention":
        queries = torch.stack([torch.randperm(2, generator=g) for _ in range(3)])
        qk = DirectSum((Planar.random(3, 2, g), Orthogonal.random(3, 2, g)))
        order, vo = torch.randperm(3, generator=g), ScaledElement.random(3, 5, g)
        return HeadTransform(order, queries, qk, vo, Exchange.random(gains, 4, g))
    if kind == "ffn":
        return NeuronTransform(Monomial(Permutation.random(1, 7, g), signed(1, 7, seed)))
    if kind == "experts":
        return ExpertTransform(torch.randperm(3, generator=g), Monomial.random(3, 4, g), degree=2)
    if kind == "mixer":
        return MixerGroup(3, 2, 4, 5, order=True, channels=True).random(g)
    if kind == "convolution":
        return ConvolutionGroup(6, permute=True, rescale=True).random(g)
    if kind == "translation":
        return TranslationGroup(6).random(g)
    if kind == "latent":
        return LatentGroup("signed_permutation", 6, fixes_ones=False).random(g)
    return StreamTransform(Monomial(Permutation.random(1, 6, g), Scaling.random_signs(1, 6, g)))


def identity_transform(kind: str) -> SpaceTransform:
    if kind == "attention":
        return HeadTransform(
            torch.arange(3), torch.arange(2).repeat(3, 1), Planar.identity(3, 4), Orthogonal.identity(3, 5)
        )
    if kind == "ffn":
        return NeuronTransform(Monomial.identity(1, 7))
    if kind == "experts":
        return ExpertTransform(torch.arange(3), Monomial.identity(3, 4))
    if kind == "mixer":
        return MixerGroup(3, 2, 4, 5, order=True, channels=True).identity()
    if kind == "convolution":
        return ConvolutionGroup(6, permute=True, rescale=True).identity()
    if kind == "translation":
        return TranslationGroup(6).identity()
    if kind == "latent":
        return LatentTransform(Monomial.identity(1, 6))
    return StreamTransform(Monomial.identity(1, 6))


AXES = [(kind, role) for kind in TRANSFORMS for role in ROLES[kind]]


def axis(kind: str, role: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, int]:
    """A tensor with such an axis, and the dimension the axis starts at."""
    factors = SPACES[kind].factors(role)
    front = (3,) if kind == "experts" and role != "index" else (2,)
    return tensor(*front, *factors, 3, dtype=dtype), 1


def test_every_kind_is_covered():
    assert set(SPACES) == set(TRANSFORMS) == set(ROLES) - {"fixed"}


def act_after(t: SpaceTransform, x: Tensor, kind: str, role: str, dim: int) -> Tensor:
    """An axis of experts' neurons moves with the experts that dimension 0 counts, as `transform_tensor` has it."""
    if kind == "experts" and role != "index":
        x = t.act(x, "index", 0)
    return t.act(x, role, dim)


@pytest.mark.parametrize(("kind", "role"), AXES)
def test_transform_laws(kind, role):
    g, h = random_transform(kind, 1), random_transform(kind, 2)
    x, dim = axis(kind, role)
    there = act_after(g, x, kind, role, dim)
    close(act_after(g.inverse(), there, kind, role, dim), x)
    close(act_after(g.compose(h), x, kind, role, dim), act_after(g, act_after(h, x, kind, role, dim), kind, role, dim))
    assert torch.equal(identity_transform(kind).act(x, role, dim), x)
    assert identity_transform(kind).is_identity()
    assert not g.is_identity()


@pytest.mark.parametrize(("kind", "role"), AXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transform_keeps_dtype_and_input(kind, role, dtype):
    x, dim = axis(kind, role, dtype)
    spread = torch.stack([x, x], -1)
    before = spread.clone()
    moved = random_transform(kind, 3).act(spread[..., 0], role, dim)
    assert (moved.dtype, moved.shape) == (dtype, x.shape)
    assert torch.equal(spread, before)


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_transform_serialisation(kind):
    g = random_transform(kind, 4)
    again = TRANSFORMS[kind].from_tensors(g.tensors())
    for role in ROLES[kind]:
        x, dim = axis(kind, role)
        assert torch.equal(again.act(x, role, dim), g.act(x, role, dim))
    assert again.group() == g.group()
    assert again.distances() == g.distances()
    assert not g.to(torch.device("cpu")).is_identity()


def test_translations():
    """Laws of what is added to rows; a softmax over the rows' products does not see it; the means meet."""
    g, h, group = random_transform("translation", 1), random_transform("translation", 2), TranslationGroup(6)
    rows, x = tensor(5, 6), tensor(6, 9, seed=3)
    close(g.inverse().added(g.added(rows)), rows)
    close(g.compose(h).added(rows), g.added(h.added(rows)))
    assert group.identity().is_identity()
    assert not g.is_identity()
    assert torch.equal(g.act(rows, "read", 1), rows)
    close((g.added(rows) @ x).softmax(0), (rows @ x).softmax(0))
    anchor = tensor(5, 6, seed=4)
    found = group.solve(anchor, rows)
    close(found.added(rows).mean(0), anchor.mean(0))
    best = (anchor - found.added(rows)).square().sum()
    assert all((anchor - random_transform("translation", s).added(rows)).square().sum() > best for s in range(9))
    close(group.solve(anchor, g.added(anchor)[torch.randperm(5, generator=generator())]).vector, g.inverse().vector)
    assert group.solve(anchor, anchor).is_identity()
    assert TranslationGroup(6, moves=False).random(generator()).is_identity()
    assert "6 entries" in str(group.refuses(TranslationGroup(7).identity()))
    assert group.refuses(random_transform("stream", 1)) == "it is not a translation"


def test_attention_function_is_kept():
    """Scores and outputs of grouped heads, computed from transformed tensors, are the old ones in the new order."""
    g = random_transform("attention", 5)
    q, k, v, o = (tensor(*ATTENTION.factors(role), 8, seed=s) for s, role in enumerate("qkvo"))
    moved = {role: g.act(x, role, 0) for role, x in zip("qkvo", (q, k, v, o), strict=True)}
    scores = torch.einsum("grdm,gdn->grmn", q, k).flatten(0, 1)
    after = torch.einsum("grdm,gdn->grmn", moved["q"], moved["k"]).flatten(0, 1)
    close(after, scores[g.head_order()])
    outputs = torch.einsum("grdm,gdn->grmn", o, v).flatten(0, 1)
    after = torch.einsum("grdm,gdn->grmn", moved["o"], moved["v"]).flatten(0, 1)
    close(after, outputs[g.head_order()])


@pytest.mark.parametrize("role", ["q_gain", "k_gain"])
def test_gains_of_norms_over_all_heads_follow_their_group(role):
    """Each KV group exchanges its own: laws of an order of heads and the factors inside it."""
    g, h, (x, dim) = random_transform("attention", 1, 3), random_transform("attention", 2, 3), axis("attention", role)
    close(g.inverse().act(g.act(x, role, dim), role, dim), x)
    close(g.compose(h).act(x, role, dim), g.act(h.act(x, role, dim), role, dim))
    assert g.gains.batch == 3


def test_gains_keep_their_products():
    """What the keys' gains win, the queries' lose, also where a norm spans all heads, these in another order."""
    shared, own = random_transform("attention", 3), random_transform("attention", 3, 3)
    q, k = tensor(4, seed=1), tensor(4, seed=2)
    close(shared.act(q, "q_norm", 0) * shared.act(k, "k_norm", 0), q * k)
    q, k = tensor(3, 2, 4, seed=1), tensor(3, 4, seed=2)
    products = own.act(q, "q_gain", 0) * own.act(k, "k_gain", 0)[:, None]
    close(products.flatten(0, 1), (q * k[:, None]).flatten(0, 1)[own.head_order()])


@pytest.mark.parametrize("role", ["head", "kv_head"])
def test_what_no_map_may_touch_follows_its_head(role):
    g = random_transform("attention", 5)
    x = tensor(*ATTENTION.factors(role), 8)
    if role == "head":
        close(g.act(x, role, 0).flatten(0, 1), x.flatten(0, 1)[g.head_order()])
    else:
        close(g.act(x, role, 0), x[g.groups])


def test_planar_commutes_with_rotary():
    for interleaved in (False, True):
        g = Planar(*planar(9), interleaved=interleaved)
        rotary = Planar(
            torch.rand(1, SIZE // 2).double().expand(BATCH, -1) * 6, torch.ones(BATCH, SIZE // 2), interleaved
        )
        x = tensor(BATCH, SIZE, 4)
        close(g.act(rotary.act(x, 0, 1), 0, 1), rotary.act(g.act(x, 0, 1), 0, 1))


def test_gated_neuron_function_is_kept():
    g = random_transform("ffn", 6)
    up, gate, down, x = tensor(7, 5), tensor(7, 5, seed=1), tensor(5, 7, seed=2), tensor(5, 9, seed=3)

    def ffn(up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    close(ffn(g.act(up, "in", 0), g.act(gate, "gate", 0), g.act(down, "out", 1)), ffn(up, gate, down))


def test_registry_holds_every_subclass():
    found = {cls for base in (GroupElement, MatrixElement, Monomial) for cls in base.__subclasses__()}
    found = {cls for cls in found if cls.__module__.startswith("rotation_merge.")}
    assert set(KINDS.values()) == found - {MatrixElement}
    assert all(cls.kind == kind for kind, cls in KINDS.items())
