"""The reader of recipes: places of faults, options that have no effect, averages alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import run
from mergekit import config
from mergekit.config import MergeConfiguration
from mergekit.tokenizer import config as tokenizer_config
from plugin_support import recipe_for, write_recipe

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.document import Document, documents, is_ours
from rotation_merge.mergekit_plugin.recipe import Recipe, read
from rotation_merge.mergekit_plugin.schema import classes, every_key

TEXT = """merge_method: rotation_merge
base_model: A
models:
  - model: A
    parameters: {weight: .inf}
  - model: B
    parameters:
      <<: &more {wieght: 1}
      weight: 0.5
parameters:
  delegate: linear
  exclude: 3
  layers: [1, 2]
  residual: [none, rotation]
"""


def test_check_gives_every_fault_its_line(tmp_path: Path) -> None:
    """What a merge key brings in has its place, too."""
    faults = json.loads(run("check", write_recipe(TEXT, tmp_path / "recipe.yml"), "--json").stdout)["faults"]
    assert {5, 8, 12, 13, 14} <= {fault["line"] for fault in faults if fault["error"]}
    assert 1 not in {fault["line"] for fault in faults}


ONE = {"model": "B", "parameters": {"weight": 0.5, "alignment": "file"}}
TWO = {"model": "C", "parameters": {"weight": 0.5}}
BASE = {"model": "A", "parameters": {"weight": 1}}
FFN = {"parameters": {"ffn": "none"}}
FIRST, SECOND = ({"sources": [{**entry, "layer_range": [i, i + 1]}]} for i, entry in enumerate((ONE, TWO)))
CROSSING = [{**BASE, "layer_range": [0, 1]}, {**ONE, "layer_range": [1, 2]}]

IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "beside the file": (
        {"models": [{"model": "B", "parameters": {**ONE["parameters"], "ffn": "none"}}]},
        "models[0].parameters.ffn",
    ),
    "for the only donor": ({"models": [BASE, ONE], "parameters": {"heads": "none"}}, "parameters.heads"),
    "a preset": ({"models": [ONE], "parameters": {"preset": "near"}}, "parameters.preset"),
    "for another donor too": ({"models": [ONE, TWO], **FFN}, ""),
    "no file": ({"models": [{"model": "B", "parameters": {"weight": 1, "alignment": False}}], **FFN}, ""),
    "of the delegate": ({"models": [ONE], "parameters": {"delegate": "dare_linear", "rescale": True}}, ""),
    "a slice": ({"slices": [{**FIRST, **FFN}]}, "slices[0].parameters.ffn"),
    "other layers, which are matched": ({"slices": [{"sources": CROSSING}], **FFN}, ""),
    "one of two slices": ({"slices": [FIRST, SECOND], **FFN}, ""),
}


@pytest.mark.parametrize("case", IDLE)
def test_options_that_do_nothing_beside_alignment_files(case: str) -> None:
    parts, place = IDLE[case]
    document = Document({"merge_method": "rotation_merge", "base_model": "A", **parts})
    read(document)
    idle = [fault.where for fault in document.faults if "has no effect" in fault.what]
    assert idle == ([place] if place else [])


def test_samples_of_carried_donors_may_stand_under_the_recipe() -> None:
    content = recipe_for("linear", Path("A"), Path("B"), data="self", samples=8)
    content["models"][1]["parameters"] |= {"finetuned_from": "C", "carry": "refit"}
    assert Recipe.read(MergeConfiguration(**content)).value("samples") == 8


def test_a_good_recipe_is_read_alike_from_text_and_python(pair: tuple[Path, Path]) -> None:
    content = recipe_for("linear", *pair, exclude="lm_head, norm", residual="permutation")
    content["parameters"]["anchor"] = "mean"
    (document,) = documents(yaml.safe_dump(content))
    text, python = Recipe.of(document), Recipe.read(MergeConfiguration(**content))
    assert (text.config, text.delegate, text.exclude) == (python.config, python.delegate, ("lm_head", "norm"))
    assert text.value("anchor") == "mean"


def alone(method: str, **keys: Any) -> Document:
    return Document({"merge_method": method, "models": [{"model": "B"}, {"model": "A"}], **keys})


def test_an_average_alone_needs_a_base_where_its_contract_does() -> None:
    assert str(Recipe.of(alone("regmean", base_model="A", parameters={"weight": 0.5})).base) == "A"
    recipe = Recipe.of(alone("regmean", parameters={"weight": 0.5}))
    assert (str(recipe.base), recipe.plain) == ("B", True)
    for method, words in (("wudi", "base_model is missing"), ("wudii", "did you mean 'wudi'")):
        with pytest.raises(RecipeError, match=words):
            Recipe.of(alone(method))


def test_ours_are_our_method_as_it_is_meant_and_averages_as_they_are_written() -> None:
    methods = ("rotation_merge", "rotation-merge", "wudi", "wudii", "linear", ["wudi"])
    assert [is_ours({"merge_method": method}) for method in methods] == [True, True, True, False, False, False]
    exact = [is_ours({"merge_method": method}, misspelt=False) for method in methods]
    assert exact == [True, False, True, False, False, False]


def test_keys_are_those_of_mergekits_classes() -> None:
    """They are read from its source."""
    for name, keys in classes().items():
        kind = getattr(config, name, None) or getattr(tokenizer_config, name)
        assert not hasattr(kind, "model_fields") or kind.model_fields.keys() == keys.keys(), name
    assert classes()["MergeConfiguration"]["slices"].kinds == {"OutputSliceDefinition"}
    assert {"tokens", "layer_range", "filter"} < every_key()
