"""No method's output alarms `rotation-merge doctor`: mergekit's, our own, and what is made of aligned models."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from carry_support import noisy, texts
from cli_support import output_of, parsed
from mergekit import merge_methods
from plugin_support import EVERYTHING, make, merged, recipe_for, twin

from rotation_merge.diagnose.doctor import diagnose, open_case

Models = dict[str, Path]

WHOLE = {**EVERYTHING, "residual": "rotation"}
STILL = {"attention": "none", "heads": "permutation", "residual": "signed_permutation"}
PARAMETERS: dict[str, dict[str, Any]] = {
    **{name: {"density": 0.5} for name in ("ties", "dare_ties", "dare_linear", "della", "della_linear")},
    **{name: {"density": 0.7} for name in ("breadcrumbs", "breadcrumbs_ties")},
    **{"slerp": {"t": 0.4}, "nearswap": {"t": 0.05}, "sce": {"select_topk": 0.5}, "task_arithmetic": {"lambda": 1.2}},
}
METHODS = sorted(m.spec.name for m in merge_methods.registered_methods() if m.spec.name != "rotation_merge")
ALONE = ("linear", "karcher", "multislerp", "nuslerp", "passthrough")
"""Methods that are given no base."""
TWO = ("slerp", "nearswap", "nuslerp", "arcee_fusion")
"""Methods of two models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A base, two fine-tunes of it, the second in other coordinates as well, and samples."""
    folder = tmp_path_factory.mktemp("methods")
    base = make("llama", folder / "base")
    one, two = (noisy(base, folder / name, 0.02, seed) for seed, name in enumerate(("one", "two")))
    places = {"base": base, "one": one, "two": two, "texts": texts(folder)}
    for name, source, options in (("turned", "two", WHOLE), ("far", "base", WHOLE), ("permuted", "two", STILL)):
        places[name] = twin(places[source], folder / name, **options)
    return places


@pytest.fixture(scope="module")
def measured(models: Models) -> Models:
    """The same, statistics beside those that are merged by them."""
    for name in ("base", "turned"):
        output_of("measure", models[name], "--data", models["texts"], "--kinds", "gram")
    return models


def causes(out: Path, *parents: Path) -> list[str]:
    return [str(cause) for cause in diagnose(open_case(str(out), list(map(str, parents))))]


def assert_sound(recipe: dict[str, Any], models: Models, out: Path, said: str = "") -> None:
    """By the recipe that lies beside the merge; mergekit leaves generation_config.json behind, which doctor says."""
    merged(recipe, out)
    shutil.copy(models["base"] / "generation_config.json", out)
    listed = causes(out)
    assert len(listed) == bool(said), listed
    assert said in " ".join(listed)


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_mergekit(method: str, models: Models, tmp_path: Path) -> None:
    names = ["one", "two"] if method in ALONE else ["base", "one", "two"][: 2 if method in TWO else 3]
    weighted = "weight" in [parameter.name for parameter in merge_methods.get(method).spec.parameters]
    listed = [{"model": str(models[name]), **({"parameters": {"weight": 0.5}} if weighted else {})} for name in names]
    recipe = {"merge_method": method, "models": listed[: 1 if method == "passthrough" else None], "dtype": "float32"}
    recipe |= {} if method in ALONE else {"base_model": str(models["base"])}
    assert_sound({**recipe, "parameters": PARAMETERS.get(method, {})}, models, tmp_path / "out")


@pytest.mark.slow
def test_stacks_and_slices(models: Models, tmp_path: Path) -> None:
    """Layers taken over, repeated and scaled; nothing is said of them but that they are stacked."""
    one, base = str(models["one"]), str(models["base"])
    stacked = [{"sources": [{"model": name, "layer_range": r}]} for name, r in ((one, [0, 2]), (base, [1, 2]))]
    scaled = {"scale": [{"filter": "down_proj", "value": 0.0}, {"value": 1.0}]}
    last = [{"sources": [{"model": one, "layer_range": [1, 2], "parameters": scaled}]}]
    whole = {"merge_method": "passthrough", "slices": stacked + last, "dtype": "float32"}
    assert_sound(whole, models, tmp_path / "stacked", said="stacked layers")
    both = [{"model": name, "parameters": {"weight": 0.5}} for name in (one, base)]
    slices = [{"sources": [{**source, "layer_range": r} for source in both]} for r in ([0, 1], [1, 2])]
    assert_sound({"merge_method": "linear", "slices": slices, "dtype": "float32"}, models, tmp_path / "sliced")


OURS: dict[str, dict[str, Any]] = {
    "near": {"preset": "near"},
    "far": {"preset": "far"},
    "slerp, permuted stream": {"delegate": "slerp", "t": 0.5, **STILL},
    "anchor: mean": {"preset": "far", "anchor": "mean"},
    "regmean": {"preset": "far", "delegate": "regmean"},
    "ot_fusion": {"preset": "far", "delegate": "ot_fusion"},
    "refit": {"preset": "far", "delegate": "refit", "samples": 8, "data": "texts"},
    "on activations": {"preset": "far", "match_on": "both", "samples": 8, "data": "texts"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", OURS)
def test_recipes_of_ours(how: str, measured: Models, tmp_path: Path) -> None:
    """Of models in other coordinates, but for near ones."""
    parameters = {"delegate": "linear", **OURS[how]}
    parameters |= {"data": str(measured["texts"])} if "data" in parameters else {}
    donor = "one" if how == "near" else "turned" if "preset" in parameters else "permuted"
    recipe = recipe_for("linear", measured["base"], measured[donor]) | {"parameters": parameters}
    for entry in recipe["models"] if parameters["delegate"] == "slerp" else ():
        entry["parameters"] = {}
    assert_sound(recipe, measured, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("delegate", ["task_arithmetic", "tsv"])
def test_calibrated_merges(delegate: str, models: Models, tmp_path: Path) -> None:
    recipe = recipe_for(delegate, models["base"], models["one"], models["two"], **STILL, calibrate="svc")
    assert_sound(recipe, models, tmp_path / "out")


@pytest.mark.slow
def test_a_carried_change(models: Models, tmp_path: Path) -> None:
    """From a base in other coordinates."""
    recipe = recipe_for("task_arithmetic", models["far"], models["one"], residual="rotation", heads="permutation")
    parameters = {"weight": 1.0, "finetuned_from": str(models["base"])}
    recipe["models"] = [{**recipe["models"][1], "parameters": parameters}]
    assert_sound(recipe, models, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "align base turned OUT --heads permutation --residual rotation",
        "polish one OUT --teachers base --data texts --steps 2",
        "merge base one OUT --data texts --budget 1s --anyway --samples 16",
    ],
)
def test_commands_of_ours(line: str, models: Models, tmp_path: Path) -> None:
    parsed(*({**models, "OUT": tmp_path / "out"}.get(word, word) for word in line.split()))
    assert causes(tmp_path / "out", models["base"], models["one"]) == []
