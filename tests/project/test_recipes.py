"""Every recipe says what it is for, passes `check`, and runs on tiny checkpoints of the same architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from cli_support import output_of, run
from click.testing import CliRunner
from mergekit.scripts.multimerge import main as mergekit_multi
from mergekit.scripts.run_yaml import main as mergekit_yaml
from recipe_models import localised, names, stand_in
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / "recipes"
EVOLVE = FOLDER / "evolve-after-align.yml"
"""For mergekit-evolve alone, over models that are aligned already."""
RECIPES = sorted({*FOLDER.glob("*.yml")} - {EVOLVE})
HEADINGS = ("# Purpose:", "# Formula:", "# Source:", "# Expect:")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def prepared(recipe: Path, models: Path, folder: Path) -> Path:
    """The recipe with tiny models, and the alignment file that it names, if any, beside it."""
    text = localised(recipe.read_text(encoding="utf-8"), models).replace("samples: 64", "samples: 4")
    if "alignment:" in text:
        anchor, donor = (str(stand_in(name, models)) for name in names(recipe.read_text(encoding="utf-8"))[:2])
        made = folder / "made.safetensors"
        options = ["--residual", "permutation", "--heads", "permutation", "--alignment", str(made)]
        output_of("align", anchor, donor, *options)
        text = text.replace("multiberts-0-1.safetensors", str(made))
    delegate = next(yaml.safe_load_all(text)).get("parameters", {}).get("delegate")
    if delegate in ("regmean", "fisher"):
        for name in names(recipe.read_text(encoding="utf-8")):
            measure(stand_in(name, models), "gram" if delegate == "regmean" else delegate)
    out = folder / recipe.name
    out.write_text(text, encoding="utf-8")
    return out


def measure(model: Path, kind: str) -> None:
    """Statistics beside a tiny checkpoint, on what it writes itself, or on random tokens."""
    data = "self"
    if "CausalLM" not in (model / "config.json").read_text():
        data = str(model / "tokens.jsonl")
        Path(data).write_text("\n".join(json.dumps({"input_ids": [3 + i, 9, 4 + i]}) for i in range(8)))
    options = ["--kinds", kind, "--samples", "8", "--length", "16"]
    output_of("measure", model, "--data", data, *options)


def test_there_are_at_least_twelve():
    assert len(RECIPES) >= 12


@pytest.mark.parametrize("recipe", [*RECIPES, EVOLVE], ids=lambda path: path.stem)
def test_opens_with_purpose_formula_source_and_what_to_expect(recipe: Path):
    lines = recipe.read_text(encoding="utf-8").splitlines()
    found = [next((h for h in HEADINGS if line.startswith(h)), None) for line in lines]
    assert [heading for heading in found if heading] == list(HEADINGS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_passes_check_and_runs(recipe: Path, models: Path, tmp_path: Path):
    local = prepared(recipe, models, tmp_path)
    output_of("check", local)
    out = tmp_path / "merged"
    if "multi" in recipe.stem.split("-"):
        done = CliRunner().invoke(mergekit_multi, [str(local), "-I", str(tmp_path / "stages"), "--out-path", str(out)])
    else:
        done = CliRunner().invoke(mergekit_yaml, [str(local), str(out), "--quiet"])
    assert done.exit_code == 0, done.output
    assert (out / "rotation_merge.json").exists()
    for tensor in load_file(out / "model.safetensors").values():
        assert torch.isfinite(tensor).all()


def test_the_search_is_a_file_of_mergekits():
    from mergekit.evo.config import EvolMergeConfiguration

    search = EvolMergeConfiguration.model_validate(yaml.safe_load(EVOLVE.read_text(encoding="utf-8")))
    assert search.genome.merge_method == "linear"


def test_check_names_the_key_of_another_kind_of_recipe():
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
