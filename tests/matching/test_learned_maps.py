"""What a fit is made of: learned transforms and mixes of samples, step by step."""

from __future__ import annotations

import torch
from test_fit import vits as vits

from rotation_merge import AlignConfig
from rotation_merge.matching.between import LearnedTransforms
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.objective import mix
from rotation_merge.matching.stream import random_gauge
from rotation_merge.run.functions import architecture_of


def test_at_zero_steps_it_is_the_start(vits):
    architecture = architecture_of(vits[0])
    start = random_gauge(architecture, AlignConfig(), torch.Generator().manual_seed(0))
    for name, transform in LearnedTransforms(architecture, start).final_transforms().items():
        assert architecture.widest_group(architecture.spaces()[name], transform).admits(transform)
        for part, element in transform.elements.items():
            torch.testing.assert_close(element.matrices(), start[name].elements[part].matrices())


def test_soft_and_hardened_elements_agree(vits):
    """What is trained is what is stored: the differentiable transforms and the exact ones do the same."""
    architecture = architecture_of(vits[0])
    state = {k: v.double() for k, v in vits[0].state_dict().items()}
    start = random_gauge(architecture, AlignConfig(heads="permutation"), torch.Generator().manual_seed(1))
    module = LearnedTransforms(architecture, start)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        soft = dict(moved_tensors(architecture, state, module()))
    hard = dict(moved_tensors(architecture, state, module.final_transforms()))
    for name, tensor in hard.items():
        torch.testing.assert_close(soft[name], tensor, atol=1e-5, rtol=1e-5)
        assert not name.endswith("q_proj.weight") or not torch.equal(tensor, state[name])


def test_mixes_are_convex_combinations():
    first, second = ({"x": x * torch.ones(n, 2), "y": y * torch.ones(n, 1)} for n, x, y in ((4, 0, 5), (3, 4, 2)))
    mixed = mix(first, second, torch.Generator().manual_seed(0))
    share = mixed["x"][:, :1] / 4
    assert mixed["x"].shape == (3, 2)
    assert bool(((share > 0) & (share < 1)).all())
    assert torch.equal(mixed["x"][:, 0], mixed["x"][:, 1])
    torch.testing.assert_close(mixed["y"], (1 - share) * 5 + share * 2)
