"""Biases that softmax cannot see: twins that differ in them alone are left where they are, and merge exactly."""

from __future__ import annotations

import pytest
import torch
from tiny_models import Case, Planted, planted
from torch import Tensor
from variants import ONE

import rotation_merge
from rotation_merge.architectures.model import Block, Part, Space
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import invisible
from rotation_merge.matching.state import transform_state


def _bias(block: Block, space: Space, role: str) -> tuple[str, slice] | None:
    """Name of a role's bias, and where it stands in it; None where it is stored in a more complicated way."""
    for info in block.tensors:
        start = 0
        if len(info.axes) != 1 or info.stacked or info.axes[0].depth:
            continue
        for part in info.axes[0].parts:
            if part.space == space and part.role == role:
                return info.name, slice(start, start + part.size)
            start += part.size
    return None


def twin(model: Planted) -> tuple[dict[str, Tensor], int]:
    """The model with other key biases and with value biases moved into output biases; and how many were changed."""
    state, changed = {name: tensor.clone() for name, tensor in model.state.items()}, 0
    generator = torch.Generator().manual_seed(4)
    for block in model.architecture.blocks:
        for space in block.spaces.values():
            for role in sorted(invisible(block, space)):
                found = _bias(block, space, role)
                if found is None:
                    continue
                name, where = found
                shift = torch.randn(where.stop - where.start, generator=generator, dtype=torch.float64)
                if role == "v":
                    out = next(i for i in block.tensors if any(p == Part(space, "o") for a in i.axes for p in a.parts))
                    bias = out.name.removesuffix("weight") + "bias"
                    if bias not in state or name not in state:
                        continue
                    heads = shift.unflatten(0, space.factors("v"))[:, None].expand(space.factors("o")).flatten()
                    weight = state[out.name]
                    columns = next(d for d, a in enumerate(out.axes) if any(p == Part(space, "o") for p in a.parts))
                    state[bias] = state[bias] - torch.tensordot(weight, heads, dims=([columns], [0]))
                if name in state:
                    state[name][where] += shift
                    changed += 1
    return state, changed


BIASED = ("vit", "bert", "opt", "gpt2", "whisper", "bart", "clip", "distilbert", "siglip", "dinov2", "phi")


@pytest.mark.parametrize("case", [case for case in ONE if not case.images], ids=lambda case: case.family)
def test_a_twin_with_other_invisible_biases_merges_exactly(case: Case) -> None:
    """As it is, and moved by a random gauge besides: the plain average of anchor and aligned donor is the anchor."""
    model = planted(case)
    state, changed = twin(model)
    assert changed or case.family not in BIASED
    if not changed:
        return
    assert model.differs(state) <= 1e-9
    gauge = random_gauge(model.architecture, MatchOptions(heads="permutation"), torch.Generator().manual_seed(2))
    for donor in (state, transform_state(model.architecture, state, gauge)):
        aligned, _ = rotation_merge.align(donor, model.state, model.config, heads="permutation")
        merged = {name: (tensor + aligned[name]) / 2 for name, tensor in model.state.items()}
        assert model.differs(merged) <= 1e-6


def test_disentangled_attention_sees_the_biases_of_keys() -> None:
    model = planted(next(case for case in ONE if case.family == "deberta_v2"))
    assert not any(invisible(b, s) for b in model.architecture.blocks for s in b.spaces.values())
