"""Laws over all families, one config field away from their tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import ALL, Case, difference, inputs, outputs, twin_of
from variants import ONE, fields_of, state_of, switched, try_make, with_field

import rotation_merge as rm

by_family = pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)

BESIDE = ("output_router_logits", "return_dict", "output_attentions", "output_hidden_states", "use_cache")
"""They hand out more than the answer (router logits name experts, which change places), or in another form."""

CANNOT = {
    "falcon": "parallel_attn",
    "gpt2": "reorder_and_upcast_attn",
    "t5": "is_encoder_decoder",
    "whisper": "is_encoder_decoder",
}
"""Switches that transformers itself cannot compute with (in float64, or at all)."""


def wanted(case: Case) -> list[tuple[str, Case]]:
    """The switched cases that compute something else than the answer in another form."""
    left_out = (*BESIDE, CANNOT.get(case.family, "-"))
    return [(what, other) for what, other in switched(case) if not what.startswith(left_out)]


@pytest.mark.slow
@by_family
def test_groups_are_symmetries_whatever_is_switched(case: Case) -> None:
    """Every switch of the config turned round, every activation's degree: outputs stay within 1e-9."""
    options = rm.AlignConfig(heads="permutation", residual="permutation")
    for what, variant in wanted(case):
        model = try_make(variant)
        if model is None:
            continue
        given = inputs(variant, model)
        expected = outputs(model, given)
        pair = state_of(model), {**model.config.to_dict(), "architectures": [case.class_name]}
        try:
            twin = twin_of(pair, options)
        except rm.RotationMergeError:
            continue  # refused is right
        model.load_state_dict(twin)
        assert difference(outputs(model, given), expected) <= 1e-9, what


def told(case: Case, state: dict[str, torch.Tensor], *configs: Any) -> bool:
    """Whether anything is said of two models with the same weights."""
    anchor, donor = ((state, {**config.to_dict(), "architectures": [case.class_name]}) for config in configs)
    try:
        report = rm.align(anchor, donor, attention="none", ffn="none", scaling=False).report
    except rm.RotationMergeError:
        return True
    return any("against" in note for note in report.notes)


@pytest.mark.slow
@by_family
def test_what_is_declared_harmless_is(case: Case) -> None:
    """A field that two models may differ in without a word: the same weights compute the same under either value."""
    model = try_make(case)
    given = inputs(case, model)
    expected, state = outputs(model, given), state_of(model)
    for name in sorted(fields_of(case.class_name)):
        value = model.config.to_dict().get(name)
        if name in (*BESIDE, CANNOT.get(case.family)) or not isinstance(value, bool | float):
            continue
        other = try_make(with_field(case, name, not value if isinstance(value, bool) else value * 1.5 + 0.1))
        if other is None or {k: v.shape for k, v in other.state_dict().items()} != {
            k: v.shape for k, v in state.items()
        }:
            continue  # other tensors: compared as such
        if told(case, state, model.config, other.config):
            continue
        other.load_state_dict(state)
        assert difference(outputs(other, given), expected) <= 1e-9, name


def test_every_class_of_every_family_has_a_case() -> None:
    assert {case.family for case in ONE} == {case.family for case in ALL}
