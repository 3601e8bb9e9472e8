"""The reader of recipes: options that have no effect, keys of the table and their values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import run
from mergekit.config import MergeConfiguration
from plugin_support import merged, recipe_for, write_recipe

from rotation_merge.config import EACH, Count, Option
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.document import Document, documents, is_ours
from rotation_merge.mergekit_plugin.keys import BY_NAME, Key
from rotation_merge.mergekit_plugin.recipe import Recipe, read


def recipe(old: str, new: str) -> str:
    models = "models:\n  - model: A\n    parameters: {weight: 0.5}\n  - model: B\n    parameters: {weight: 0.5}\n"
    parameters = "parameters:\n  delegate: linear\n"
    text = f"merge_method: rotation_merge\nbase_model: A\n{models}{parameters}dtype: float32\n"
    old = models + parameters if old == "MODELS" else old
    assert old in text
    return text.replace(old, f"{new}\n" if old.startswith("models:") else new, 1)


def test_check_gives_every_fault_its_line(tmp_path: Path) -> None:
    """Of two faults that were seen by different eyes, none stands at 1:1."""
    text = recipe("delegate: linear", "exclude: 3\n  layers: [1, 2]\n  residual: [none, rotation]")
    path = write_recipe(text.replace("{weight: 0.5}\n  -", "{weight: .inf}\n  -"), tmp_path / "recipe.yml")
    faults = json.loads(run("check", path, "--json").stdout)["faults"]
    assert {5, 9, 10, 11} <= {fault["line"] for fault in faults if fault["error"]}
    assert 1 not in {fault["line"] for fault in faults}


ONE = {"model": "B", "parameters": {"weight": 0.5, "alignment": "file"}}
TWO = {"model": "C", "parameters": {"weight": 0.5}}
BASE = {"model": "A", "parameters": {"weight": 1}}
UNMOVED = {"model": "B", "parameters": {"weight": 1, "alignment": False}}
FFN = {"parameters": {"ffn": "none"}}
MEETING = [{**BASE, "layer_range": [0, 1]}, {**ONE, "layer_range": [1, 2]}]
FIRST, SECOND = ({"sources": [{**entry, "layer_range": [i, i + 1]}]} for i, entry in enumerate((ONE, TWO)))

IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "beside the file": (
        {"models": [{"model": "B", "parameters": {**ONE["parameters"], "ffn": "none"}}]},
        "models[0].parameters.ffn",
    ),
    "for the only donor": ({"models": [ONE], "parameters": {"heads": "none", "untie": True}}, "parameters.heads"),
    "a preset": ({"models": [ONE], "parameters": {"preset": "near"}}, "parameters.preset"),
    "for another donor too": ({"models": [ONE, TWO], **FFN}, ""),
    "for the base": ({"models": [BASE, ONE], "parameters": {"layers": "0"}}, "parameters.layers"),
    "no file": ({"models": [UNMOVED], **FFN}, ""),
    "of the delegate": ({"models": [ONE], "parameters": {"delegate": "dare_linear", "rescale": True}}, ""),
    "a slice": ({"slices": [{**FIRST, **FFN}]}, "slices[0].parameters.ffn"),
    "other layers, which are matched": ({"slices": [{"sources": MEETING}], **FFN}, ""),
    "one of two slices": ({"slices": [FIRST, SECOND], **FFN}, ""),
}


@pytest.mark.parametrize("case", IDLE)
def test_options_that_do_nothing_beside_alignment_files(case: str) -> None:
    parts, place = IDLE[case]
    document = Document({"merge_method": "rotation_merge", "base_model": "A", **parts})
    read(document)
    found = [fault for fault in document.faults if "has no effect" in fault.what]
    assert [fault.where for fault in found] == ([place] if place else [])


def test_samples_of_carried_donors_may_stand_under_the_recipe() -> None:
    """They are for every donor that is carried; beside none they would do nothing."""
    content = recipe_for("linear", Path("A"), Path("B"), data="self", samples=8)
    with pytest.raises(RecipeError, match="'data' has no effect with delegate linear"):
        Recipe.read(MergeConfiguration(**content))
    content["models"][1]["parameters"] |= {"finetuned_from": "C", "carry": "refit"}
    assert Recipe.read(MergeConfiguration(**content)).value("samples") == 8


def test_a_parameter_is_one_line_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key added to the table is read, checked and placed with no further code."""
    each = Key(Option(Count, "how many", scope=EACH, delegates=("linear",)), 64)
    monkeypatch.setitem(BY_NAME, "samples", each)
    (document,) = documents(recipe("{weight: 0.5}\np", "{weight: 0.5, samples: 8}\np"))
    found = read(document)
    assert found is not None, document.faults
    for wrong in ("samples: 0", "samples: many", "samples: [1, 2]", "delegate: karcher, samples: 3"):
        (document,) = documents(recipe("  delegate: linear", f"  {wrong}".replace(", ", "\n  ")))
        assert read(document) is None, wrong


def test_a_good_recipe_is_read_alike_from_text_and_python(pair: tuple[Path, Path]) -> None:
    content = recipe_for("linear", *pair, exclude="lm_head, norm", residual="permutation")
    content["parameters"]["anchor"] = "mean"
    (document,) = documents(yaml.safe_dump(content))
    text, python = read(document), Recipe.read(MergeConfiguration(**content))
    assert text is not None
    assert text.config == python.config
    assert (text.value("anchor"), text.delegate) == ("mean", python.delegate)
    assert text.exclude == ("lm_head", "norm")


@pytest.mark.parametrize("off", [False, "none"])
def test_a_donor_of_no_base_is_merged_as_it_is(off: Any, pair: tuple[Path, Path], tmp_path: Path) -> None:
    plain = recipe_for("linear", *pair)
    content = recipe_for("linear", *pair)
    content["models"][1]["parameters"]["finetuned_from"] = off
    written, expected = merged(content, tmp_path / "off"), merged(plain, tmp_path / "plain")
    assert all(written[name].equal(tensor) for name, tensor in expected.items())


def alone(method: str, **more: Any) -> dict[str, Any]:
    return {"merge_method": method, "base_model": "A", "models": [{"model": "B"}, {"model": "A"}], **more}


def test_an_average_alone_needs_a_base_where_its_contract_does() -> None:
    content = alone("regmean", parameters={"weight": 0.5})
    assert str(Recipe.of(Document(content)).base) == "A"
    del content["base_model"]
    recipe = Recipe.of(Document(content))
    assert (str(recipe.base), recipe.plain) == ("B", True)
    for method, words in (("wudi", "base_model is missing"), ("wudii", "did you mean 'wudi'")):
        with pytest.raises(RecipeError, match=words):
            Recipe.of(Document({**content, "merge_method": method, "parameters": {}}))


@pytest.mark.parametrize("name", ["heads", "preset", "finetuned_from", "alignment", "match_on", "delegate", "anchor"])
def test_options_of_aligning_under_an_average_alone(name: str) -> None:
    content = alone("wudi")
    content["models"][0]["parameters"] = {name: "x"}
    with pytest.raises(RecipeError, match=f"'{name}' does not belong here; .*'merge_method: rotation_merge'"):
        Recipe.of(Document(content))


def test_ours_are_our_method_as_it_is_meant_and_averages_as_they_are_written() -> None:
    methods = ("rotation_merge", "rotation-merge", "wudi", "wudii", "linear", ["wudi"])
    assert [is_ours({"merge_method": method}) for method in methods] == [True, True, True, False, False, False]
    exact = [is_ours({"merge_method": method}, misspelt=False) for method in methods]
    assert exact == [True, False, True, False, False, False]
