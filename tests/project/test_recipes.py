"""Every recipe says what it is for, passes `check`, and runs on tiny checkpoints of the same architecture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from cli_support import output_of, run
from mergekit.evo.config import EvolMergeConfiguration
from programs import run as program
from recipe_models import localised, names, stand_in
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / "recipes"
EVOLVE = FOLDER / "evolve-after-align.yml"
"""For mergekit-evolve alone, over models that are aligned already."""
RECIPES = sorted({*FOLDER.glob("*.yml")} - {EVOLVE})
KINDS = {"regmean": "gram", "fisher": "fisher"}
"""Statistics that delegates read."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prepared(recipe: Path, models: Path, folder: Path) -> Path:
    """The recipe with tiny models, and what it reads: an alignment file, or statistics beside the models."""
    text = recipe.read_text(encoding="utf-8")
    places = [stand_in(name, models) for name in names(text)]
    text = localised(text, models).replace("samples: 64", "samples: 4")
    if "alignment:" in text:
        made = folder / "made.safetensors"
        output_of("align", *places[:2], "--residual", "permutation", "--heads", "permutation", "--alignment", made)
        text = text.replace("multiberts-0-1.safetensors", str(made))
    delegate = next(yaml.safe_load_all(text)).get("parameters", {}).get("delegate")
    tokens = folder / "tokens.jsonl"
    tokens.write_text("\n".join(json.dumps({"input_ids": [3 + i, 9, 4 + i]}) for i in range(8)))
    for place in places if delegate in KINDS else ():
        output_of("measure", place, "--data", tokens, "--kinds", KINDS[delegate])
    out = folder / recipe.name
    out.write_text(text, encoding="utf-8")
    return out


@pytest.mark.parametrize("recipe", [*RECIPES, EVOLVE], ids=lambda path: path.stem)
def test_opens_with_purpose_formula_source_and_what_to_expect(recipe: Path):
    assert len(RECIPES) >= 12
    text = recipe.read_text(encoding="utf-8")
    assert re.findall(r"^# (Purpose|Formula|Source|Expect):", text, re.MULTILINE) == [
        "Purpose",
        "Formula",
        "Source",
        "Expect",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_passes_check_and_runs(recipe: Path, models: Path, tmp_path: Path):
    local, out = prepared(recipe, models, tmp_path), tmp_path / "merged"
    output_of("check", local)
    if "multi" in recipe.stem.split("-"):
        done = program("mergekit-multi", local, "-I", tmp_path / "stages", "--out-path", out)
    else:
        done = program("mergekit-yaml", local, out, "--quiet")
    assert done.code == 0, done.err
    assert (out / "rotation_merge.json").exists()
    for tensor in load_file(out / "model.safetensors").values():
        assert torch.isfinite(tensor).all()


def test_the_search_is_a_file_of_mergekits():
    """`check` names its key, which belongs to another kind of recipe."""
    search = EvolMergeConfiguration.model_validate(yaml.safe_load(EVOLVE.read_text(encoding="utf-8")))
    assert search.genome.merge_method == "linear"
    assert "there is no key 'genome' here" in output_of("check", EVOLVE, code=1)


@pytest.mark.slow
def test_check_reads_hub_names_without_a_network(monkeypatch: pytest.MonkeyPatch):
    """The recipes as they are: their models are not here, which is a note and no fault."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for recipe in RECIPES:
        done = run("check", recipe)
        faults = [line for line in done.output.splitlines() if ": " in line and "(a note)" not in line]
        missing = [line for line in faults if "no such file" in line or "no such directory" in line]
        assert len(faults) == len(missing), done.output
