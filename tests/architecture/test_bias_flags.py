"""Biases that a config promises and the weights do not hold are told, of an anchor and of a donor."""

from __future__ import annotations

import pytest
import tiny_models as tiny
from plugin_support import build

import rotation_merge as rm

FLAGS = ("attention_bias", "qkv_bias", "use_qkv_bias", "mlp_bias", "use_bias", "bias")
PROMISING = [case for case in tiny.ALL if any(case.config.get(flag) for flag in FLAGS)]
WORDS = "is true, but no such bias is stored for"


@pytest.mark.parametrize("case", PROMISING, ids=lambda case: f"{case.family}-{case.name}")
def test_models_that_transformers_makes_keep_the_promise(case: tiny.Case) -> None:
    """Also where only some of the linear maps have a bias; without their biases some of the promise is broken."""
    model = case.model_class(case.model_class.config_class(**case.config))
    config, state = {**model.config.to_dict(), "architectures": [case.model_class.__name__]}, model.state_dict()
    bare = {name: tensor for name, tensor in state.items() if not name.endswith(".bias")}
    notes = [" ".join(rm.Alignment.random((tensors, config)).notes) for tensors in (state, bare)]
    assert [WORDS in text for text in notes] == [False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_it_is_told_of_an_anchor_and_of_a_donor(order: int) -> None:
    models = [(model.state_dict(), model.config.to_dict()) for model in (build("llama"), build("llama", 1))]
    models[1][1]["attention_bias"] = True
    report = rm.align(*models[::order]).report
    assert report is not None
    assert any(f"'attention_bias' {WORDS}" in note for note in report.notes)
