"""Laws over all families, one config field away from their tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import Case, difference, further, inputs, outputs, twin_of
from variants import FIRST, ONE, fields_of, try_make

import rotation_merge as rm
from rotation_merge.architecture.fields import differences
from rotation_merge.architecture.fields import fields as registered

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


# --- what `fields.json` says of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*FIRST, *further()], ids=lambda case: f"{case.family}-{case.class_name}")
def test_every_field_that_a_class_reads_is_classified(case: Case) -> None:
    assert case.model_class is not None
    lacking = fields_of(case.class_name) - registered().keys()
    assert not lacking, f"say in architecture/fields.json what follows where two models differ in {sorted(lacking)}"


def test_a_difference_is_named_with_both_values() -> None:
    for name in [name for name, field in registered().items() if field.verdict != "harmless"]:
        [named] = differences({name: 1, "x": 0}, {name: 2, "y": 0})
        assert str(named) == f"'{name}' is 2, against 1"
        assert named.field.why
        [nested] = differences({"text_config": {name: None}}, {"text_config": {name: [1]}})
        assert nested.name == f"text_config.{name}"
        assert not list(differences({name: (1, 2)}, {name: [1, 2]}))


@pytest.mark.parametrize("tied", [True, False])
def test_the_note_on_tied_heads_is_true_of_either_anchor(tied: bool) -> None:
    """It says of the anchor's head only what both kinds of anchors are."""
    (named,) = differences({"tie_word_embeddings": tied}, {"tie_word_embeddings": not tied})
    assert "only where the anchor's is" in named.field.why
    assert not named.field.why.endswith("as the anchor does")
