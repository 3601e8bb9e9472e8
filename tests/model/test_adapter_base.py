"""An adapter of another base than the one it is put on is refused on every path; copies of its base are its base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import error_of, output_of, run
from plugin_support import from_file, make, merged, mergekit_yaml, one_error, recipe_for, write_adapter, write_recipe

import rotation_merge as rm

REFUSED = "is an adapter of"
MODULE = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, `own` and `other`, how these are aligned, a renamed copy of the first and its adapter."""
    folder = tmp_path_factory.mktemp("bases")
    for seed, name in enumerate(("own", "other")):
        make("llama", folder / name, seed)
    rm.align(folder / "own", folder / "other").save(folder / "maps.safetensors")
    shutil.copytree(folder / "own", folder / "renamed")
    adapter_of(str(folder / "own"), folder / "lora")
    return folder


def adapter_of(base: str | None, folder: Path) -> Path:
    """The same adapter each time, which names a base."""
    a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 32), (48, 2)))
    factors = {f"{MODULE}.lora_A.weight": a, f"{MODULE}.lora_B.weight": b}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": base}
    return write_adapter(config, factors, folder)


def recipes(models: Path, name: str, adapter: Path | None = None) -> dict[str, dict[str, Any]]:
    """Every place in which a recipe may name a model."""
    adapted, own = Path(f"{models / name}+{adapter or models / 'lora'}"), models / "own"
    weighed = {"layer_range": [0, 2], "parameters": {"weight": 0.5}}
    slices = [{"sources": [{"model": str(model), **weighed} for model in (own, adapted)]}]
    tuned, recipe = recipe_for("task_arithmetic", own, models / "other"), recipe_for("linear", own, adapted)
    tuned["models"][-1]["parameters"]["finetuned_from"] = str(adapted)
    return {
        "models": recipe,
        "base_model": recipe_for("linear", adapted, own),
        "mean": {**recipe, "parameters": {**recipe["parameters"], "anchor": "mean"}},
        "slices": {**{key: value for key, value in recipe.items() if key != "models"}, "slices": slices},
        "finetuned_from": tuned,
        "alignment": from_file(recipe_for("linear", own, adapted), models / "maps.safetensors"),
    }


@pytest.mark.parametrize("place", ["models", "base_model", "mean", "slices", "finetuned_from", "alignment"])
def test_every_place_of_a_recipe(models: Path, place: str, tmp_path: Path) -> None:
    recipe = recipes(models, "other")[place]
    for code, done in ((2, mergekit_yaml(recipe, tmp_path / "out")), (1, run("check", tmp_path / "out.yml"))):
        assert done.exit_code == code, done.output
        assert REFUSED in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_forced(models: Path, tmp_path: Path) -> None:
    """By weights matched now, by an alignment file, and by a carry."""
    recipe, file = recipes(models, "other")["models"], tmp_path / "maps.safetensors"
    assert merged(recipe, tmp_path / "out", "--allow-crimes")
    nameless = f"{models / 'other'}+{adapter_of(None, tmp_path / 'lora')}"
    output_of("align", models / "own", nameless, tmp_path / "aligned", "--alignment", file)
    recipe["parameters"], recipe["models"][-1]["parameters"]["alignment"] = {"delegate": "linear"}, str(file)
    assert merged(recipe, tmp_path / "moved", "--allow-crimes")
    carry = ["carry", models / "lora", tmp_path / "carried", "--from", models / "other", "--to", models / "own"]
    assert REFUSED in error_of(*carry)
    output_of(*carry, "--force")


@pytest.mark.parametrize(
    ("base", "stated", "note"),
    [("renamed", "{own}", ""), ("own", "someone/own", ""), ("other", None, "does not say which base")],
)
def test_copies_of_its_base_are_its_base(
    base: str, stated: str | None, note: str, models: Path, tmp_path: Path
) -> None:
    """By another path, by another name, and by its name alone where its weights are not here."""
    adapter = adapter_of(stated and stated.format(own=models / "own"), tmp_path / "lora")
    output = output_of("check", write_recipe(recipes(models, base, adapter)["models"], tmp_path / "recipe.yml"))
    assert note in " ".join(output.split())


COMMANDS = (
    "align {own} {adapted} {out}",
    "evaluate {adapted} --data {data}",
    "verify {own} {adapted}",
    "measure {adapted} --data {data} --out {out}",
    "polish {own} {out} --teachers {own} --teachers {adapted}",
    "barrier {own} {adapted} --data {data}",
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" ")[0])
def test_commands_and_python(models: Path, command: str, tmp_path: Path) -> None:
    """The outputs of an adapter on another base are no figure of a model; nothing is written."""
    out, data, adapted = tmp_path / "out", tmp_path / "samples.txt", f"{models / 'other'}+{models / 'lora'}"
    data.write_text("some words to read\n" * 8)
    done = run(*command.format(own=models / "own", adapted=adapted, out=out, data=data).split())
    assert done.exit_code, done.output
    assert REFUSED in one_error(done.output)
    assert not out.exists()
    if command.startswith("align"):
        with pytest.raises(rm.RotationMergeError, match=REFUSED):
            rm.align(str(models / "own"), adapted)
