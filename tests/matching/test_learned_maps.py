"""What a fit is made of: learned transforms, mixes of samples, layers that are run again; step by step."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from cli_support import CHECKPOINTS
from rounding import assert_equal_up_to_rounding
from safetensors import safe_open
from test_fit import tiny_llama, token_batches
from test_fit import vits as vits

from rotation_merge import AlignConfig, FitConfig, fit
from rotation_merge.architecture import resolve
from rotation_merge.matching.engine import Path as ModelPath
from rotation_merge.matching.engine import checkpointed, renamed
from rotation_merge.matching.fit import LearnedTransforms, identities
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.objective import mix
from rotation_merge.model.biases import in_coordinates
from rotation_merge.run.functions import architecture_of
from rotation_merge.symmetry import Monomial, NeuronTransform


def test_permutations_are_learned_only_when_asked(vits):
    architecture = architecture_of(vits[0])
    start = random_gauge(architecture, AlignConfig(), torch.Generator().manual_seed(0))
    moved = []
    for permutations in (False, True):
        module = LearnedTransforms(architecture, start, permutations=permutations)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.endswith("scores"):
                    parameter.copy_(parameter.roll(1, 0))
        orders = [
            (t.element, module.start[n].element)  # type: ignore[attr-defined]
            for n, t in module.final_transforms().items()
            if isinstance(t, NeuronTransform)
        ]
        assert all(isinstance(a, Monomial) for a, _ in orders)
        moved.append(any(not torch.equal(a.permutation.index, b.permutation.index) for a, b in orders))
    assert moved == [False, True]


def test_soft_and_hardened_elements_agree(vits):
    """What is trained is what is stored: the differentiable transforms and the exact ones do the same."""
    architecture = architecture_of(vits[0])
    state = {k: v.double() for k, v in vits[0].state_dict().items()}
    start = random_gauge(architecture, AlignConfig(heads="permutation"), torch.Generator().manual_seed(1))
    module = LearnedTransforms(architecture, start, permutations=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        soft = dict(in_coordinates(architecture, state, module()))
    hard = dict(in_coordinates(architecture, state, module.final_transforms()))
    for name, tensor in hard.items():
        torch.testing.assert_close(soft[name], tensor, atol=1e-5, rtol=1e-5)
        assert not name.endswith("q_proj.weight") or not torch.equal(tensor, state[name])


def test_identities_move_nothing(vits):
    architecture = architecture_of(vits[0])
    start = random_gauge(architecture, AlignConfig(heads="permutation"), torch.Generator().manual_seed(1))
    assert all(transform.is_identity() for transform in identities(start).values())


def test_names_of_spaces_follow_the_checkpoint(vits):
    own = architecture_of(vits[0])
    config = {**vits[0].config.to_dict(), "architectures": ["ViTForImageClassification"]}
    with safe_open(CHECKPOINTS / "vit-0" / "model.safetensors", framework="pt") as file:
        wanted = resolve(config, list(file.keys()), "vit-0")
    start = random_gauge(own, AlignConfig(), torch.Generator().manual_seed(0))
    names = {space.name for block in wanted.blocks for space in block.spaces.values()}
    assert set(renamed(start, own, wanted)) == names


def test_mixes_are_convex_combinations():
    first, second = ({"x": x * torch.ones(n, 2), "y": y * torch.ones(n, 1)} for n, x, y in ((4, 0, 5), (3, 4, 2)))
    mixed = mix(first, second, torch.Generator().manual_seed(0))
    share = mixed["x"][:, :1] / 4
    assert mixed["x"].shape == (3, 2)
    assert bool(((share > 0) & (share < 1)).all())
    assert torch.equal(mixed["x"][:, 0], mixed["x"][:, 1])
    torch.testing.assert_close(mixed["y"], (1 - share) * 5 + share * 2)


FIRST = {case.family: case for case in reversed(tiny_models.ALL)}


@pytest.mark.parametrize("family", FIRST)
def test_checkpointing_drops_nothing(family: str):
    """Every family, each of its dropouts at one half: a checkpointed copy computes what the model computes."""
    case = FIRST[family]
    model = tiny_models.make(case)
    for module in model.modules():
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.5)
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.5
    if not model.supports_gradient_checkpointing:
        return
    copied = checkpointed(model)
    assert any(getattr(m, "gradient_checkpointing", False) and m.training for m in copied.modules())
    given = tiny_models.inputs(case, model)
    assert_equal_up_to_rounding(tiny_models.outputs(copied, given), tiny_models.outputs(model, given))
    assert any(m.training for m in copied.modules())
    assert not any(m.training for m in model.modules())


@pytest.mark.slow
def test_gradients_under_checkpointing():
    """Layers are run again as gradients flow back: with the weights of the path, not with the model's own."""
    models, batch = [tiny_llama(i) for i in range(2)], token_batches(1)[0]
    architecture = architecture_of(models[0], untie=True)
    states = [dict(model.state_dict()) for model in models]
    found = []
    for model in (models[0], checkpointed(models[0])):
        path = ModelPath.between(model, architecture, states[0], states[1:], (), torch.device("cpu"))
        share = torch.tensor([0.3, 0.7], requires_grad=True)
        weights = path.weights([{}], share)
        with path.holding(weights):
            path.outputs(weights, batch).logits.square().sum().backward()
        found.append(share.grad)
    torch.testing.assert_close(found[1], found[0])
    fit(models[0], models[1], token_batches(), options=FitConfig(steps=2, checkpointing=True))
