"""Laws over all families, one config field away from their tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import Case, difference, inputs, outputs, twin_of
from variants import ONE, fields_of, try_make

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

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation", "activation_function")


def with_field(case: Case, name: str, value: Any) -> Case:
    return replace(case, name=f"{case.name}, {name}={value}", config={**case.config, name: value})


def fields(case: Case) -> Iterator[tuple[str, Any]]:
    """Fields that the model reads, with their values, but for those that change no answer or cannot be changed."""
    config = case.model_class.config_class(**case.config).to_dict()
    names = fields_of(case.class_name).difference(BESIDE, [CANNOT.get(case.family)])
    return ((name, config[name]) for name in sorted(names) if name in config)


def switched(case: Case) -> Iterator[Case]:
    """The case with each switch of its config the other way round, and with other activations."""
    for name, value in fields(case):
        if isinstance(value, bool):
            yield with_field(case, name, not value)
        elif name in ACTIVATIONS and isinstance(value, str):
            yield from (with_field(case, name, activation) for activation in ("relu", "relu2", "gelu"))


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.slow
@by_family
def test_groups_are_symmetries_whatever_is_switched(case: Case) -> None:
    """Every switch of the config turned round, every activation's degree: outputs stay within 1e-9."""
    options = rm.AlignConfig(heads="permutation", residual="permutation")
    for variant in switched(case):
        model = try_make(variant)
        if model is None:
            continue
        batch = inputs(variant, model)
        expected = outputs(model, batch)
        pair = state_of(model), {**model.config.to_dict(), "architectures": [case.class_name]}
        try:
            twin = twin_of(pair, options)
        except rm.RotationMergeError:
            continue  # refused is right
        model.load_state_dict(twin)
        assert difference(outputs(model, batch), expected) <= 1e-9, variant.name


def is_told(case: Case, state: dict[str, torch.Tensor], *configs: Any) -> bool:
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
    batch = inputs(case, model)
    expected, state = outputs(model, batch), state_of(model)
    shapes = {name: tensor.shape for name, tensor in state.items()}
    for name, value in fields(case):
        if not isinstance(value, bool | float):
            continue
        second = try_make(with_field(case, name, not value if isinstance(value, bool) else value * 1.5 + 0.1))
        if second is None or {n: tensor.shape for n, tensor in second.state_dict().items()} != shapes:
            continue  # other tensors: compared as such
        if not is_told(case, state, model.config, second.config):
            second.load_state_dict(state)
            assert difference(outputs(second, batch), expected) <= 1e-9, name
