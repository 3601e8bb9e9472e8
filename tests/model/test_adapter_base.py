"""An adapter of another base than the one it is put on is refused on every path; copies of its base are its base."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, write_recipe
from safetensors.torch import save_file

import rotation_merge as rm
from rotation_merge import RotationMergeError

REFUSED = "is an adapter of"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, `own` and `other`, a renamed copy of the first and its adapter."""
    folder = tmp_path_factory.mktemp("bases")
    for seed, name in enumerate(("own", "other")):
        make("llama", folder / name, seed)
    shutil.copytree(folder / "own", folder / "renamed")
    module = "base_model.model.model.layers.1.mlp.up_proj"
    (folder / "lora").mkdir()
    factors = {f"{module}.lora_A.weight": torch.randn(2, 32), f"{module}.lora_B.weight": torch.randn(48, 2)}
    save_file(factors, folder / "lora" / "adapter_model.safetensors")
    say(folder / "lora", str(folder / "own"))
    return folder


def say(adapter: Path, base: str | None) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


def recipes(models: Path, name: str) -> dict[str, dict[str, Any]]:
    """Every place in which a recipe may name a model."""
    adapted, own = Path(f"{models / name}+{models / 'lora'}"), models / "own"
    weighed = {"layer_range": [0, 2], "parameters": {"weight": 0.5}}
    slices = [{"sources": [{"model": str(model), **weighed} for model in (own, adapted)]}]
    tuned = recipe_for("task_arithmetic", own, models / "other")
    tuned["models"][-1]["parameters"]["finetuned_from"] = str(adapted)
    mean = recipe_for("linear", own, adapted)
    mean["parameters"]["anchor"] = "mean"
    return {
        "models": recipe_for("linear", own, adapted),
        "base_model": recipe_for("linear", adapted, own),
        "mean": mean,
        "slices": {**{k: v for k, v in recipe_for("linear", own, adapted).items() if k != "models"}, "slices": slices},
        "finetuned_from": tuned,
    }


@pytest.mark.parametrize("way", ["models", "base_model", "mean", "slices", "finetuned_from"])
def test_every_place_of_a_recipe(models: Path, way: str, tmp_path: Path) -> None:
    file = write_recipe(recipes(models, "other")[way], tmp_path / "recipe.yml")
    done = run("check", file)
    assert done.exit_code == 1, done.output
    assert REFUSED in done.output
    done = mergekit_yaml(recipes(models, "other")[way], tmp_path / "out")
    assert done.exit_code
    assert REFUSED in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_forced(models: Path, tmp_path: Path) -> None:
    """By weights matched now, by an alignment file, and by a carry."""
    recipe = recipes(models, "other")["models"]
    assert merged(recipe, tmp_path / "out", "--allow-crimes")
    file, work = tmp_path / "maps.safetensors", models / "lora"
    say(work, None)
    done = run("align", models / "own", f"{models / 'other'}+{work}", tmp_path / "aligned", "--alignment", file)
    say(work, str(models / "own"))
    assert done.exit_code == 0, done.output
    moved = {**recipe, "parameters": {"delegate": "linear"}}
    moved["models"][-1]["parameters"]["alignment"] = str(file)
    assert merged(moved, tmp_path / "moved", "--allow-crimes")
    asked = ["carry", work, tmp_path / "carried", "--from", models / "other", "--to", models / "own"]
    assert REFUSED in one_error(run(*asked).output)
    done = run(*asked, "--force")
    assert done.exit_code == 0, done.output


def test_copies_of_its_base_are_its_base(models: Path, tmp_path: Path) -> None:
    """By another path, by another name, and by its name alone where its weights are not here."""
    assert run("check", write_recipe(recipes(models, "renamed")["models"], tmp_path / "recipe.yml")).exit_code == 0
    try:
        say(models / "lora", "someone/own")
        assert run("check", write_recipe(recipes(models, "own")["models"], tmp_path / "recipe.yml")).exit_code == 0
        say(models / "lora", None)
        done = run("check", write_recipe(recipes(models, "other")["models"], tmp_path / "recipe.yml"))
        assert done.exit_code == 0, done.output
        assert "does not say which base" in " ".join(done.output.split())
    finally:
        say(models / "lora", str(models / "own"))


def test_commands_and_python(models: Path, tmp_path: Path) -> None:
    anchor, adapted = models / "own", f"{models / 'other'}+{models / 'lora'}"
    done = run("align", anchor, adapted, tmp_path / "out")
    assert done.exit_code == 2
    assert REFUSED in one_error(done.output)
    assert not (tmp_path / "out").exists()
    with pytest.raises(RotationMergeError, match=REFUSED):
        rm.align(str(anchor), adapted)


@pytest.mark.parametrize("command", ["evaluate", "verify", "measure", "polish", "barrier"])
def test_commands_that_run_models(models: Path, command: str, tmp_path: Path) -> None:
    """What an adapter gives on another base is no figure of a model; nothing is written."""
    adapted, out = f"{models / 'other'}+{models / 'lora'}", tmp_path / "out"
    samples = tmp_path / "samples.txt"
    samples.write_text("some words to read\n" * 8)
    asked: dict[str, list[Any]] = {
        "evaluate": ["evaluate", adapted, "--data", samples],
        "verify": ["verify", models / "own", adapted],
        "measure": ["measure", adapted, "--data", samples, "--out", out],
        "polish": ["polish", models / "own", out, "--teachers", models / "own", "--teachers", adapted],
        "barrier": ["barrier", models / "own", adapted, "--data", samples],
    }
    done = run(*asked[command])
    assert done.exit_code, done.output
    assert REFUSED in one_error(done.output)
    assert not out.exists()
