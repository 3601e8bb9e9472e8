"""What an axis of a weight is paired with: activations and gradients move by the inverse transpose."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ALL, make

from rotation_merge import AlignConfig
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.model.apply import transform_axis
from rotation_merge.run.functions import architecture_of
from rotation_merge.symmetry import HeadTransform, NeuronTransform, Orthogonal, Permutation, Planar, Scaling
from rotation_merge.symmetry.base import mixes
from rotation_merge.symmetry.monomial import Monomial

FAMILIES = {case.family: case for case in ALL}


@pytest.mark.parametrize("family", ["llama", "bert", "gpt_neox", "mixtral", "phi3", "qwen3"])
def test_pairing_is_kept(family: str):
    """<w, x> along every axis of every tensor, w moved as weights are and x as what they are paired with."""
    generator = torch.Generator().manual_seed(0)
    architecture = architecture_of(make(FAMILIES[family]))
    gauge = random_gauge(architecture, AlignConfig(heads="permutation", residual="permutation"), generator)
    moved = 0
    for info in architecture.tensors():
        shape = tuple(axis.size or 3 for axis in info.axes)
        if any(part.role == "gain" for axis in info.axes for part in axis.parts):
            continue  # a gain multiplies, it is paired with nothing
        w, x = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
        before = (w * x).sum()
        for dim, axis in [(d, a) for d, a in enumerate(info.axes) if a.parts]:
            w = transform_axis(w, dim, axis, gauge)
            x = transform_axis(x, dim, axis, gauge, dual=True)
        torch.testing.assert_close((w * x).sum(), before)
        moved += 1
    assert moved > 5


def test_only_what_adds_coordinates_up_mixes():
    generator = torch.Generator().manual_seed(0)
    still = Planar.identity(2, 4)
    assert not mixes(still)
    assert not mixes(Planar(still.angle, still.scale * 2))
    assert mixes(Planar(still.angle + 0.1, still.scale))
    assert mixes(Orthogonal.random(2, 4, generator))
    for element in (Permutation, Scaling, Monomial):
        assert not mixes(element.random(1, 4, generator))
    assert not NeuronTransform(Monomial.random(1, 4, generator)).mixes("in")
    heads = HeadTransform(*HeadTransform.identity_order(2, 1), still, Orthogonal.random(2, 4, generator))
    assert heads.mixes("v")
    assert heads.mixes("o")
    assert not heads.mixes("q")
