"""Laws over all families, one config field away from their tiny models: `fields.json` says what a field means."""

from __future__ import annotations

import pytest
from tiny_models import ALL, Case, difference, further, inputs, outputs, twin_of
from variants import FIRST, ONE, fields_of, state_of, switched, try_make, with_field

import rotation_merge as rm
from rotation_merge.architecture.fields import differences, fields

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


@by_family
def test_what_is_declared_harmless_is(case: Case) -> None:
    """A field that two models may differ in without a word: the same weights compute the same under either value."""
    model = try_make(case)
    given = inputs(case, model)
    expected, state = outputs(model, given), state_of(model)
    for name in sorted(fields_of(case.class_name)):
        value = model.config.to_dict().get(name)
        silent = name in fields() and fields()[name].verdict == "harmless" and name not in BESIDE
        if not silent or name == CANNOT.get(case.family) or not isinstance(value, bool | float):
            continue
        other = try_make(with_field(case, name, not value if isinstance(value, bool) else value * 1.5 + 0.1))
        if other is None or {k: v.shape for k, v in other.state_dict().items()} != {
            k: v.shape for k, v in state.items()
        }:
            continue  # other tensors: compared as such
        other.load_state_dict(state)
        assert difference(outputs(other, given), expected) <= 1e-9, name


@pytest.mark.parametrize("case", [*FIRST, *further()], ids=lambda case: f"{case.family}-{case.class_name}")
def test_every_field_that_a_class_reads_is_classified(case: Case) -> None:
    assert case.model_class is not None
    lacking = fields_of(case.class_name) - fields().keys()
    assert not lacking, f"say in architecture/fields.json what follows where two models differ in {sorted(lacking)}"


@pytest.mark.parametrize("name", [name for name, field in fields().items() if field.verdict != "harmless"])
def test_a_difference_is_named_with_both_values(name: str) -> None:
    [found] = differences({name: 1, "x": 0}, {name: 2, "y": 0})
    assert str(found) == f"'{name}' is 2, against 1"
    assert found.field.why
    [nested] = differences({"text_config": {name: None}}, {"text_config": {name: [1]}})
    assert nested.name == f"text_config.{name}"
    assert not list(differences({name: (1, 2)}, {name: [1, 2]}))


def test_every_class_of_every_family_has_a_case() -> None:
    assert {case.family for case in ONE} == {case.family for case in ALL}
