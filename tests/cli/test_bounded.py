"""Inputs that are beyond bounds end in one line, at once: templates, aliases, shards, shares, data of another kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_support import run
from plugin_support import make, mergekit_yaml, one_error, recipe_for, state, write_recipe
from safetensors.torch import save_file


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two Llamas and a ViT."""
    folder = tmp_path_factory.mktemp("models")
    return make("llama", folder / "a"), make("llama", folder / "b", seed=1), make("vit", folder / "vit")


def refused(recipe: Any, words: str, tmp_path: Path) -> None:
    """By the merge and by `check`."""
    done = mergekit_yaml(recipe, tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert words in one_error(done.output)
    assert not (tmp_path / "out").exists()
    checked = run("check", tmp_path / "out.yml")
    assert checked.exit_code in (1, 2)
    assert words in checked.output


@pytest.mark.parametrize("template", ["nosuch", "chatlm", "{", "x" * 400])
def test_a_chat_template_that_is_none(template: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    refused({**recipe_for("linear", *models[:2]), "chat_template": template}, "no chat template", tmp_path)


@pytest.mark.parametrize("template", ["auto", "chatml", "{% for message in messages %}{{ message }}{% endfor %}"])
def test_a_chat_template_that_is_one(template: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    recipe = {**recipe_for("linear", *models[:2]), "chat_template": template}
    done = run("check", write_recipe(recipe, tmp_path / "recipe.yml"))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("bomb", ["wide", "itself"])
def test_aliases(bomb: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    text = "\n".join(lines) if bomb == "wide" else "a: &a [*a]"
    refused(f"merge_method: rotation_merge\nbase_model: {models[0]}\n{text}\n", "aliases", tmp_path)


def test_aliases_that_are_few(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    text = f"""
merge_method: rotation_merge
base_model: &base {models[0]}
models:
  - {{model: *base, parameters: {{weight: 0.5}}}}
  - {{model: {models[1]}, parameters: {{weight: 0.5}}}}
"""
    done = run("check", write_recipe(text, tmp_path / "recipe.yml"))
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("shard", ["../../secret.safetensors", "/etc/secret.safetensors", "x/../../secret.safetensors"])
def test_a_weight_map_that_leads_elsewhere(shard: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "down" / "model"
    shutil.copytree(models[1], folder)
    (folder / "model.safetensors").unlink()
    (folder / "x").mkdir()
    tensors = state(models[1])
    save_file(tensors, tmp_path / "deep" / "secret.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    refused(recipe_for("linear", models[0], folder), "outside of its directory", tmp_path)


SHARES: dict[str, dict[str, Any]] = {
    "slerp": {"t": 7},
    "ties": {"density": -1},
    "dare_ties": {"density": 1.5},
    "dare_linear": {"density": [0.5, 2]},
}


@pytest.mark.parametrize("delegate", SHARES)
def test_shares_beyond_bounds(delegate: str, models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    refused(recipe_for(delegate, *models[:2], **SHARES[delegate]), "from 0 to 1", tmp_path)


def test_data_of_another_kind(models: tuple[Path, Path, Path]) -> None:
    """Pictures for a language model, text for one that sees."""
    for model, data, word in ((models[0], "demo:digits", "input_ids"), (models[2], "demo:python", "pixel_values")):
        done = run("barrier", model, model, "--data", data)
        assert done.exit_code == 2
        assert word in one_error(done.output)


def test_verify_of_models_of_two_kinds(models: tuple[Path, Path, Path]) -> None:
    for pair in ((models[0], models[2]), (models[2], models[0])):
        done = run("verify", *pair)
        assert done.exit_code == 2
        assert "one class" in one_error(done.output)
