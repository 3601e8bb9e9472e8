"""`preset`: near, far or auto becomes options, the same in merges, commands and reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_support import parsed, run
from plugin_support import make, merged, recipe_for, state, twin, write_recipe, write_state


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An anchor, a fine-tune of it, and a twin with its stream turned, too."""
    folder = tmp_path_factory.mktemp("presets")
    anchor = make("llama", folder / "anchor")
    torch.manual_seed(0)
    noisy = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in state(anchor).items()}
    return {
        "anchor": anchor,
        "tuned": write_state(noisy, anchor, folder / "tuned"),
        "twin": twin(anchor, folder / "twin", heads="permutation", residual="signed_permutation"),
    }


def recipe(models: dict[str, Path], donor: str, **parameters: str) -> dict:
    made = recipe_for("linear", models["anchor"], models[donor])
    return {**made, "parameters": {"delegate": "linear", **parameters}}


@pytest.mark.slow
@pytest.mark.parametrize(("donor", "found"), [("tuned", "near"), ("twin", "far")])
def test_auto_tells_fine_tunes_from_models_in_other_coordinates(models, donor: str, found: str, tmp_path: Path):
    result = merged(recipe(models, donor, preset="auto"), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert any(f"Preset auto: {found}" in note for note in report["notes"])
    assert f"Preset auto: {found}" in (tmp_path / "out" / "README.md").read_text()
    if found == "far":
        folded = merged(recipe(models, "twin", heads="permutation", residual="rotation"), tmp_path / "by-hand")
        assert all(torch.equal(result[name], folded[name]) for name in result)
    (seen,) = parsed("inspect", write_recipe(recipe(models, donor, preset="auto"), tmp_path / "r.yml"))
    assert seen["options"]["residual"] == ("none" if found == "near" else "largest")


def test_what_a_recipe_says_itself_holds(models, tmp_path: Path):
    document = recipe(models, "twin", preset="far", heads="none")
    (seen,) = parsed("inspect", write_recipe(document, tmp_path / "r.yml"))
    assert seen["options"]["heads"] == "none"
    assert seen["options"]["residual"] == "largest"


@pytest.mark.parametrize(("donor", "suggested"), [("tuned", "near"), ("twin", "far")])
def test_check_says_which_fits(models, donor: str, suggested: str, tmp_path: Path):
    path = write_recipe(recipe(models, donor), tmp_path / "r.yml")
    (found,) = parsed("check", path)["presets"]
    assert (found["donor"], found["suggested"], found["preset"]) == (str(models[donor]), suggested, None)
    assert (found["cosine"] > 0.9) == (suggested == "near")
    assert f"'preset: {suggested}' fits" in run("check", path).output
    assert (
        f"'preset: auto' chooses '{suggested}'"
        in run("check", write_recipe(recipe(models, donor, preset="auto"), path)).output
    )
    other = {"near": "far", "far": "near"}[suggested]
    said = run("check", write_recipe(recipe(models, donor, preset=other), path)).output
    assert f"'preset: {suggested}' fits better than '{other}'" in said
