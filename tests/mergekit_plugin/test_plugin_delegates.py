"""Every merge method that mergekit registers, as the delegate: moved twins merged with the anchor give it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mergekit import merge_methods
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, relative_distances, state, twin

PARAMETERS = {
    "slerp": {"t": 0.3},
    "nearswap": {"t": 0.1},
    "dare_ties": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "ties": {"density": 0.5},
    "della": {"density": 0.5},
    "sce": {"select_topk": 0.5},
    "passthrough": {"scale": 1.0},
}
DONORS = {"model_stock": 2, "nuslerp": 2}
METHODS = sorted(m.spec.name for m in merge_methods.registered_methods() if m.spec.name != "rotation_merge")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("delegates")
    anchor = make("llama", folder / "anchor")
    return anchor, twin(anchor, folder / "one", seed=1), twin(anchor, folder / "two", seed=2)


@pytest.mark.parametrize("delegate", METHODS)
def test_delegate(models: tuple[Path, Path, Path], delegate: str, tmp_path: Path) -> None:
    anchor, *donors = models
    recipe = recipe_for(delegate, anchor, *donors[: DONORS.get(delegate, 1)], **PARAMETERS.get(delegate, {}))
    if delegate == "passthrough":
        recipe["models"] = recipe["models"][1:]
    distances = relative_distances(merged(recipe, tmp_path / "out"), state(anchor))
    assert max(distances.values()) <= 1e-5, sorted(distances.items(), key=lambda item: -item[1])[:5]


def test_passthrough_gives_the_aligned_donor(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Not the anchor: a layer that is not to be matched stays the donor's."""
    anchor, donor, _ = models
    recipe = recipe_for("passthrough", anchor, donor, layers="0")
    recipe["models"] = recipe["models"][1:]
    distances = relative_distances(merged(recipe, tmp_path / "out"), state(anchor))
    assert distances["model.layers.0.mlp.up_proj.weight"] <= 1e-5
    assert distances["model.layers.1.mlp.up_proj.weight"] > 0.3


@pytest.mark.parametrize(
    ("delegate", "settings", "keeps_base"),
    [
        ("nuslerp", {}, False),
        ("karcher", {}, False),
        ("multislerp", {}, True),
        ("slerp", {"t": 0.3}, True),
        ("task_arithmetic", {}, True),
        ("ties", {"density": 0.5, "rescale": True}, True),
    ],
)
def test_delegate_does_what_mergekit_does(
    models: tuple[Path, Path, Path], delegate: str, settings: dict[str, object], keeps_base: bool, tmp_path: Path
) -> None:
    """Nothing is matched here. A delegate that takes these models only without a base gets the anchor as one of two."""
    anchor, donor, _ = models
    still = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
    recipe = recipe_for(delegate, anchor, donor, **settings, **still)
    ours = merged(recipe, tmp_path / "ours")
    plain = {**recipe, "merge_method": delegate, "parameters": settings}
    if not keeps_base:
        del plain["base_model"]
    theirs = merged(plain, tmp_path / "theirs")
    assert max(relative_distances(ours, state(anchor)).values()) > 0.1
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_equal_models_are_merged_bit_for_bit_as_mergekit_does(tmp_path: Path) -> None:
    anchor = make("llama", tmp_path / "anchor", tie_word_embeddings=True)
    copy = make("llama", tmp_path / "copy", tie_word_embeddings=True)
    for dtype in ("float32", "bfloat16", None):
        recipe = recipe_for("linear", anchor, copy)
        recipe["dtype"] = dtype
        ours = merged(recipe, tmp_path / f"ours-{dtype}")
        recipe = {**recipe, "merge_method": "linear", "parameters": {}}
        theirs = merged(recipe, tmp_path / f"theirs-{dtype}")
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


def test_contract_is_checked(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    result = mergekit_yaml(recipe_for("slerp", *models, t=0.5), tmp_path / "out")
    assert result.exit_code == 2
    assert "exactly 2 inputs" in one_error(result.output)
