"""Biases of keys that softmax cannot see do not steer matching, and a donor keeps its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import planted, twin_of
from torch import Tensor
from variants import ONE

import rotation_merge as rm
from rotation_merge.matching.matrix_pairs import axis_views

CASES = {case.family: case for case in ONE}
BIASED = ("vit", "bert", "opt", "gpt2", "bart", "clip", "distilbert", "siglip", "dinov2")


def unseen(model: Any) -> dict[str, Tensor]:
    """By name, which entries of a tensor are biases of keys that softmax cannot see."""
    result = {}
    for info in (info for info in model.architecture.tensors() if len(info.axes) == 1 and info.name in model.state):
        hidden = torch.zeros_like(model.state[info.name], dtype=torch.bool)
        for part, _, entries, _ in axis_views(hidden, hidden, 0, info.axes[0]) if info.axes[0].parts else ():
            entries |= part.role == "k" and part.space.hides_key_bias
        if bool(hidden.any()):
            result[info.name] = hidden
    return result


@pytest.mark.parametrize("family", BIASED)
def test_large_ones_leave_a_twins_map_as_it_is(family: str) -> None:
    model = planted(CASES[family])
    entries = unseen(model)
    assert entries
    draw = torch.Generator().manual_seed(4)
    noisy = {
        name: torch.where(entries[name], 30 * torch.randn(x.shape, generator=draw, dtype=x.dtype), x)
        if name in entries
        else x
        for name, x in model.state.items()
    }
    assert model.differs(noisy) <= 1e-9
    donor = twin_of((noisy, model.config), heads="permutation")
    aligned = rm.align((model.state, model.config), (donor, model.config), heads="permutation")
    moved = aligned.apply((donor, model.config)).state_dict()
    assert model.differs(moved) <= 1e-9
    for name, x in model.state.items():
        seen = ~entries.get(name, torch.zeros_like(x, dtype=torch.bool))
        torch.testing.assert_close(moved[name][seen], x[seen], atol=1e-6, rtol=1e-6)
    assert any(bool((moved[name] - model.state[name])[entry].abs().max() > 1) for name, entry in entries.items())


def test_rotary_positions_and_disentangled_attention_see_them() -> None:
    for family in ("phi", "gpt_neox", "deberta_v2"):
        assert not unseen(planted(CASES[family]))
