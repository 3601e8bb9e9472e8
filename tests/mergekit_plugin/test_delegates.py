"""Delegates: mergekit's methods and averages of our own on moved twins; presets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from mergekit import merge_methods
from plugin_support import (
    make,
    merged,
    recipe_for,
    relative_distances,
    state,
    twin,
    write_recipe,
    write_state,
)

from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.keys import BY_NAME

PARAMETERS: dict[str, dict[str, float]] = {
    "slerp": {"t": 0.3},
    "nearswap": {"t": 0.1},
    "sce": {"select_topk": 0.5},
    "passthrough": {"scale": 1.0},
    **{name: {"density": 0.5} for name in ("dare_ties", "dare_linear", "ties", "della")},
}
DONORS = {"model_stock": 2, "nuslerp": 2}
METHODS = sorted(method.spec.name for method in merge_methods.registered_methods())
STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
Models = tuple[Path, Path, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("delegates")
    anchor = make("llama", folder / "anchor")
    return anchor, twin(anchor, folder / "one", seed=1), twin(anchor, folder / "two", seed=2)


@pytest.mark.parametrize("delegate", METHODS)
def test_moved_twins_merged_with_the_anchor_give_it_back(models: Models, delegate: str, tmp_path: Path) -> None:
    anchor, *donors = models
    recipe = recipe_for(delegate, anchor, *donors[: DONORS.get(delegate, 1)], **PARAMETERS.get(delegate, {}))
    if delegate == "passthrough":
        recipe["models"] = recipe["models"][1:]
    distances = relative_distances(merged(recipe, tmp_path / "out"), state(anchor))
    assert max(distances.values()) <= 1e-5, sorted(distances.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize(
    ("delegate", "settings", "keeps_base"),
    [
        ("nuslerp", {}, False),
        ("karcher", {}, False),
        ("multislerp", {}, True),
        ("slerp", {"t": [{"filter": "mlp", "value": 0.0}, {"value": [0.0, 1.0]}]}, True),
        ("task_arithmetic", {}, True),
        ("ties", {"density": 0.5, "rescale": True}, True),
        ("wudi", {"ridge": 0.2}, True),
    ],
)
def test_a_delegate_does_what_mergekit_does(
    models: Models, delegate: str, settings: dict[str, Any], keeps_base: bool, tmp_path: Path
) -> None:
    """Nothing is matched here; lists and filters mean what they mean in mergekit, and ours do what they do alone.

    A delegate that takes these models only without a base gets the anchor as one of two.
    """
    recipe = recipe_for(delegate, *models[:2], **settings, **STILL)
    ours = merged(recipe, tmp_path / "ours")
    plain = {**recipe, "merge_method": delegate, "parameters": settings}
    if not keeps_base:
        del plain["base_model"]
    stock = merged(plain, tmp_path / "stock")
    assert max(relative_distances(ours, state(models[0])).values()) > 0.1
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_passthrough_gives_the_aligned_donor(models: Models, tmp_path: Path) -> None:
    """Not the anchor: a layer that is not to be matched stays the donor's."""
    recipe = recipe_for("passthrough", *models[:2], layers="0")
    recipe["models"] = recipe["models"][1:]
    distances = relative_distances(merged(recipe, tmp_path / "out"), state(models[0]))
    assert distances["model.layers.0.mlp.up_proj.weight"] <= 1e-5
    assert distances["model.layers.1.mlp.up_proj.weight"] > 0.3


def test_no_parameter_of_ours_has_the_name_of_a_delegates_and_only_we_list_ours() -> None:
    """One value would hold for both."""
    specs = {method.spec.name: method.spec for method in merge_methods.registered_methods()}
    theirs = {(name, parameter.name) for name, spec in specs.items() for parameter in spec.parameters}
    assert not theirs & {(name, key) for key, option in BY_NAME.items() for name in option.delegates or specs}
    assert specs.keys() == set(METHODS)
    listed = json.loads(run("inspect", "--methods", "--json").output)["delegates"]
    assert {entry["name"]: entry["own"] for entry in listed} == dict.fromkeys(METHODS, False) | dict.fromkeys(OWN, True)


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near_and_far(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An anchor, a fine-tune of it, and a twin with its stream turned, too."""
    folder = tmp_path_factory.mktemp("presets")
    anchor, generator = make("llama", folder / "anchor"), torch.Generator().manual_seed(0)
    noisy = {n: x + 0.02 * torch.randn(x.shape, generator=generator) for n, x in state(anchor).items()}
    turned = {"heads": "permutation", "residual": "signed_permutation"}
    tuned, far = write_state(noisy, anchor, folder / "tuned"), twin(anchor, folder / "twin", **turned)
    return {"anchor": anchor, "near": tuned, "far": far}


def with_preset(models: dict[str, Path], donor: str, **parameters: str) -> dict[str, Any]:
    content = recipe_for("linear", models["anchor"], models[donor])
    return {**content, "parameters": {"delegate": "linear", **parameters}}


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["near", "far"])
def test_auto_tells_fine_tunes_from_models_in_other_coordinates(near_and_far, relation: str, tmp_path: Path) -> None:
    document = with_preset(near_and_far, relation, preset="auto")
    result = merged(document, tmp_path / "out")
    for file in ("rotation_merge.json", "README.md"):
        assert f"Preset auto: {relation}" in (tmp_path / "out" / file).read_text()
    if relation == "far":
        by_hand = with_preset(near_and_far, "far", heads="permutation", residual="rotation")
        folded = merged(by_hand, tmp_path / "by-hand")
        assert all(torch.equal(result[name], folded[name]) for name in result)
    stated = with_preset(near_and_far, relation, preset="auto", heads="none")  # which holds
    (seen,) = parsed("inspect", write_recipe(stated, tmp_path / "r.yml"))
    residual = "none" if relation == "near" else "largest"
    assert (seen["options"]["heads"], seen["options"]["residual"]) == ("none", residual)


@pytest.mark.parametrize("relation", ["near", "far"])
def test_check_says_which_fits(near_and_far, relation: str, tmp_path: Path) -> None:
    def output(**parameters: str) -> str:
        return run("check", write_recipe(with_preset(near_and_far, relation, **parameters), tmp_path / "r.yml")).output

    assert f"'preset: {relation}' fits" in output()
    (facts,) = parsed("check", tmp_path / "r.yml")["presets"]
    assert (facts["suggested"], facts["preset"], facts["cosine"] > 0.9) == (relation, None, relation == "near")
    assert f"'preset: auto' chooses '{relation}'" in output(preset="auto")
    opposite = {"near": "far", "far": "near"}[relation]
    assert f"'preset: {relation}' fits better than '{opposite}'" in output(preset=opposite)
