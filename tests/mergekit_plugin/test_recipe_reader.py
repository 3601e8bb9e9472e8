"""One reader: a faulty recipe gives the same first fault in mergekit-yaml, in `check` and from Python.

`check` gives all of them, each with its place; what is wrong with files is in `test_cli_bad_inputs.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import run
from mergekit.config import MergeConfiguration
from plugin_support import mergekit_yaml, one_error, recipe_for, write_recipe

from rotation_merge.config import EACH, FILE, Option
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.recipe.document import Document, documents
from rotation_merge.mergekit_plugin.recipe.names import BY_NAME, KEYS, Key
from rotation_merge.mergekit_plugin.recipe.reading import Recipe, read
from rotation_merge.mergekit_plugin.recipe.settings import check_settings

LAYERS = "slices: [{sources: [{model: A, layer_range: [0, 2]}, {model: B, layer_range: [0, 1]}]}]"

FAULTS: dict[str, tuple[str, str, str]] = {
    "infinite weight": ("{weight: 0.5}\n  -", "{weight: .inf}\n  -", "'weight' is inf"),
    "infinite weight as a word": ("{weight: 0.5}\n  -", "{weight: inf}\n  -", "'weight' is 'inf'"),
    "infinity behind a filter": ("{weight: 0.5}\n  -", "{weight: [{filter: x, value: .inf}]}\n  -", "'weight' is inf"),
    "a list for residual": ("delegate: linear", "residual: [none, rotation]", "'residual' applies to the whole model"),
    "a filter on layers": (
        "delegate: linear",
        "layers: [{filter: x, value: 0-3}, {value: all}]",
        "'layers' applies to the whole model",
    ),
    "a number for exclude": ("delegate: linear", "exclude: 3", "'exclude' is 3"),
    "a number for finetuned_from": ("{weight: 0.5}\np", "{weight: 0.5, finetuned_from: 3}\np", "'finetuned_from' is 3"),
    "a list for an alignment": ("{weight: 0.5}\np", "{weight: 0.5, alignment: [a, b]}\np", "'alignment' applies"),
    "unequal slices": ("MODELS", LAYERS, "its sources have 2, 1 layers"),
    "a slice that ends before it begins": ("MODELS", LAYERS.replace("[0, 2]", "[2, 0]"), "layer_range is [2, 0]"),
    "a slice without sources": ("MODELS", "slices: [{sources: []}]", "it has no sources"),
    "another base for a slice": (
        "MODELS",
        "slices: [{base_model: C, sources: [{model: A, layer_range: [0, 2]}]}]",
        "base_model is C, that of the recipe is A",
    ),
    "three models for slerp in a slice": (
        "MODELS",
        "slices: [{sources: [{model: A, layer_range: [0, 1]}]}]\nparameters: {delegate: slerp, t: 0.5}",
        "delegate slerp: requires at least 2 inputs",
    ),
    "a delegate's parameter missing in a module": (
        "MODELS",
        "modules: {default: {models: [{model: A, parameters: {weight: 1}}, {model: B}]}}",
        "delegate linear needs the parameter 'weight' for B",
    ),
    "integer dtype": ("dtype: float32", "dtype: int64", "dtype is 'int64', weights are floating-point numbers"),
    "out_dtype that does not exist": ("dtype: float32", "out_dtype: half16", "out_dtype is 'half16'"),
    "unknown delegate": ("delegate: linear", "delegate: mean", "no merge method 'mean' to delegate to"),
    "unknown parameter": ("delegate: linear", "density: 0.5", "there is no parameter 'density'"),
    "no base": ("base_model: A\n", "", "base_model is missing"),
    "word for a switch": ("delegate: linear", "untie: yes please", "'untie' is 'yes please'"),
    "parameter of the merge under a model": (
        "{weight: 0.5}\np",
        "{weight: 0.5, untie: true}\np",
        "does not belong here",
    ),
    "misspelt delegate": ("delegate: linear", "delegate: linaer", "did you mean 'linear'?"),
    "delegate to itself": ("delegate: linear", "delegate: rotation_merge", "no merge method"),
    "misspelt parameter": ("delegate: linear", "delegat: linear", "did you mean 'delegate'?"),
    "misspelt weight": ("{weight: 0.5}\n  -", "{wieght: 0.5}\n  -", "did you mean 'weight'?"),
    "weight is a word": ("{weight: 0.5}\n  -", "{weight: half}\n  -", "'weight' is 'half'; it must be a number"),
    "weight is missing": ("{weight: 0.5}\n  -", "{}\n  -", "needs the parameter 'weight'"),
    "value that the delegate does not know": (
        "delegate: linear",
        "{delegate: ties, density: 0.5, rescale: sequential}",
        "'rescale' is 'sequential'; it must be true or false",
    ),
    "unknown group": ("delegate: linear", "attention: rotate", "did you mean 'rotation'?"),
    "group of another kind": ("delegate: linear", "ffn: rotation", "permutation"),
    "a list in the place of a word": ("delegate: linear", "delegate: [linear]", "no merge method"),
    "layers upside down": ("delegate: linear", "layers: 5-2", "all, or ranges"),
    "report is a word": ("delegate: linear", "report: maybe", "true or false"),
    "donor's option in the wrong place": ("delegate: linear", "finetuned_from: x", "one donor's 'parameters'"),
    "unknown dtype": ("dtype: float32", "dtype: float31", "did you mean 'float32'?"),
    "no models": ("models:", "modells:", "did you mean 'models'?"),
    "two faults, the misspelt word first": (
        "delegate: linear",
        "exclude: 3\n  attention: rotate",
        "'attention' is 'rotate'",
    ),
    "misspelt top-level key": ("base_model:", "base_mode:", "did you mean 'base_model'?"),
    "misspelt method": ("rotation_merge", "rotation_merg", "did you mean 'rotation_merge'?"),
    "slerp without t": (
        "MODELS",
        "models: [{model: A}, {model: B}]\nparameters: {delegate: slerp}",
        "needs the parameter 't'",
    ),
    "model_stock with two models": (
        "MODELS",
        "models: [{model: A}, {model: B}]\nparameters: {delegate: model_stock}",
        "at least 3",
    ),
    "option at the top": ("dtype: float32", "dtype: float32\nresidual: none", "under 'parameters'"),
    "key twice": ("dtype: float32", "dtype: float32\ndtype: bfloat16", "occurs twice"),
    "misspelt filter": ("delegate: linear", "ffn: [{filtre: x, value: none}]", "did you mean 'filter'?"),
    "alignment file is not there": (
        "{weight: 0.5}\np",
        "{weight: 0.5, alignment: a.st}\np",
        "no such file",
    ),
    "old base is not there": ("{weight: 0.5}\np", "{weight: 0.5, finetuned_from: ./gone}\np", "gone"),
}
"""A text, what stands in its place (MODELS: for models and parameters), and how the fault begins or what it holds."""
BY_CHECK = ("misspelt method", "alignment file is not there", "old base is not there")
"""What `check` alone says: of a recipe that mergekit does not take for ours, and of files before any is opened."""
DROPPED = ("misspelt top-level key", "option at the top", "key twice", "misspelt filter")
"""Faults that a configuration made in Python does not have: YAML's reader and mergekit's classes leave them out."""


def recipe(old: str, new: str) -> str:
    models = "models:\n  - model: A\n    parameters: {weight: 0.5}\n  - model: B\n    parameters: {weight: 0.5}\n"
    parameters = "parameters:\n  delegate: linear\n"
    text = f"merge_method: rotation_merge\nbase_model: A\n{models}{parameters}dtype: float32\n"
    old = models + parameters if old == "MODELS" else old
    assert old in text
    return text.replace(old, f"{new}\n" if old.startswith("models:") else new, 1)


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_first_fault_both_ways(name: str, tmp_path: Path) -> None:
    old, new, words = FAULTS[name]
    text = recipe(old, new)
    path = write_recipe(text, tmp_path / "recipe.yml")
    done, checked = (run("check", path, *more) for more in ((), ("--json",)))
    assert done.exit_code == checked.exit_code == 1, done.output
    assert words in done.output
    assert all(line.startswith(f"{path}:") for line in done.output.splitlines()[:-1]), done.output
    faults = [fault for fault in json.loads(checked.stdout)["faults"] if fault["error"]]
    if name in BY_CHECK:
        return
    result = mergekit_yaml(text, tmp_path / "out")
    assert result.exit_code == 2
    stopped = one_error(result.output)
    assert words in stopped, stopped
    first = next(fault for fault in faults if fault["what"] in stopped)
    assert words in f"{first['what']}; {first['remedy']}"
    place = ", ".join(filter(None, (f"line {first['line']}", f"column {first['column']}", first["where"])))
    assert f"{place}: {first['what']}" in stopped
    assert (first["line"], first["column"]) != (1, 1) or name in ("no base",)
    python = python_way(yaml.safe_load(text)) if name not in DROPPED else None
    if python is not None:
        assert python.what == first["what"]
        assert python.where == (first["where"] or "recipe")


def python_way(content: dict[str, Any]) -> RecipeError | None:
    """What the reader says of a configuration made in Python; None where mergekit makes none of it."""
    try:
        config = MergeConfiguration(**content)
    except (ValueError, RuntimeError):
        return None
    with pytest.raises(RecipeError) as found:
        Recipe.read(config)
    return found.value


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
    check_settings(document)
    found = [fault for fault in document.faults if "has no effect" in fault.what]
    assert [fault.where for fault in found] == ([place] if place else [])


def test_samples_of_carried_donors_may_stand_under_the_recipe() -> None:
    """They are for every donor that is carried; beside none they would do nothing."""
    content = recipe_for("linear", Path("A"), Path("B"), data="self", samples=8)
    with pytest.raises(RecipeError, match="'data' has no effect with delegate linear"):
        Recipe.read(MergeConfiguration(**content))
    content["models"][1]["parameters"] |= {"finetuned_from": "C", "carry": "refit"}
    assert Recipe.read(MergeConfiguration(**content)).value("samples") == 8


def test_a_recipe_of_another_method_ends_as_without_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a path in it, or its base, is called like our method."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else transformers asks for it
    for folder in ("rotation_merge", "x/rotation_merge-out"):
        stock = {"merge_method": "linear", "base_model": folder, "models": [{"model": str(tmp_path / folder)}]}
        result = mergekit_yaml({**stock, "parameters": {"unknown": 1}}, tmp_path / "out")
        assert result.exit_code == 1
        assert result.exception is not None
        assert not isinstance(result.exception, SystemExit)
        assert "Error: " not in result.output


def test_a_stock_recipe_with_broken_yaml_ends_as_without_us(tmp_path: Path) -> None:
    result = mergekit_yaml("merge_method: linear\nmodels: [rotation_merge/a\n", tmp_path / "out")
    assert isinstance(result.exception, yaml.YAMLError)


def test_a_parameter_is_one_line_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key added to the table is read, checked and placed with no further code."""
    each = Key("samples", Option("how many", int, low=1, scope=EACH, delegates=("linear",)), 64)
    monkeypatch.setitem(BY_NAME, "samples", each)
    monkeypatch.setattr("rotation_merge.mergekit_plugin.recipe.names.KEYS", (*KEYS, each))
    (document,) = documents(recipe("{weight: 0.5}\np", "{weight: 0.5, samples: 8}\np"))
    found = read(document)
    assert found is not None, document.faults
    for wrong in ("samples: 0", "samples: many", "samples: [1, 2]", "delegate: karcher, samples: 3"):
        (document,) = documents(recipe("  delegate: linear", f"  {wrong}".replace(", ", "\n  ")))
        assert read(document) is None, wrong


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        (Option("", FILE, words=(True,)), ["a.st", True], [3, 1, False, " ", None]),
        (Option("", float, words=("auto",)), [0.5, 1, "auto"], ["half", float("inf"), True]),
        (Option("", str, choices=("own", "mean")), ["own"], ["owm", 1]),
    ],
)
def test_values_of_a_key(option: Option, good: list[Any], bad: list[Any]) -> None:
    key = Key("key", option, default=0)
    for value in good:
        assert key.check(value) == value
    for value in bad:
        with pytest.raises(RecipeError, match="parameter 'key' is"):
            key.check(value)


def test_a_good_recipe_is_read_alike_from_text_and_python(pair: tuple[Path, Path]) -> None:
    content = recipe_for("linear", *pair, exclude="lm_head, norm", residual="permutation")
    content["parameters"]["anchor"] = "mean"
    (document,) = documents(yaml.safe_dump(content))
    text, python = read(document), Recipe.read(MergeConfiguration(**content))
    assert text is not None
    assert (text.exclude, text.mean, text.base, text.values) == (
        python.exclude,
        python.mean,
        python.base,
        python.values,
    )
    assert text.exclude == ("lm_head", "norm")
