"""One merge: every header is read, every architecture laid out, the recipe read once; nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run as command
from mergekit import card, merge
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from plugin_support import from_file, recipe_for, state, write_recipe, write_state
from safetensors.torch import load_file, save_file

import rotation_merge as rm
from rotation_merge.architecture import build, registry
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model import contents

Pair = tuple[Path, Path]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the costly steps are taken."""
    found: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    count(contents.Header, "of")
    count(registry, "lay_out")
    count(build, "_module_blocks")
    monkeypatch.setattr(Recipe, "read", classmethod(_counting_read(found, Recipe.read.__func__)))  # type: ignore[attr-defined]
    return found


def _counting_read(found: Counter[str], real: Any) -> Any:
    def read(cls: Any, config: Any) -> Any:
        found["Recipe.read"] += 1
        return real(cls, config)

    return read


def run(recipe: dict[str, Any], out: Path) -> None:
    LoaderCache.loaders.clear()
    contents._header.cache_clear()
    registry._laid.clear()
    merge.run_merge(MergeConfiguration.model_validate(recipe), str(out), MergeOptions(quiet=True, copy_tokenizer=False))


def test_a_merge_of_two_models_does_everything_once(counted: Counter[str], pair: Pair, tmp_path: Path) -> None:
    """The third header is that of what was written, which is looked at in the end."""
    run(recipe_for("linear", *pair), tmp_path / "out")
    assert counted == {"of": 3, "lay_out": 1, "_module_blocks": 1, "Recipe.read": 1}


def test_a_residual_merge_too(counted: Counter[str], pair: Pair, tmp_path: Path) -> None:
    """A rotation asks whether the head is tied, which is seen in what is known already."""
    run(recipe_for("linear", *pair, residual="rotation"), tmp_path / "out")
    assert counted["of"] == 3
    assert counted["Recipe.read"] == 1
    assert counted["lay_out"] <= 2


def test_a_merge_leaves_mergekits_functions_as_they_are(pair: Pair, tmp_path: Path) -> None:
    before = {module: dict(vars(module)) for module in (card, merge)}
    run(recipe_for("linear", *pair), tmp_path / "out")
    spoilt = write_state({"x": torch.ones(2)}, pair[0], tmp_path / "spoilt")
    with pytest.raises(Exception, match="missing"):
        run(recipe_for("linear", pair[0], spoilt), tmp_path / "none")
    assert all(vars(module) == functions for module, functions in before.items())


@pytest.mark.slow
def test_a_fit_leaves_the_callers_random_numbers_alone() -> None:
    from plugin_support import build as model

    from rotation_merge import FitConfig, fit

    tokens = torch.arange(24).reshape(4, 6)
    anchor, donor = model("llama"), model("llama", seed=1)
    batches = [{"input_ids": row[None]} for row in tokens]
    before = torch.get_rng_state()
    fit(anchor, donor, batches, options=FitConfig(steps=2, seed=3))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_whose_mark_is_taken_elsewhere_is_new_to_the_merge(pair: Pair, tmp_path: Path) -> None:
    """Who loads it for the merge looks whether it holds numbers, whoever has read it for something else."""
    donor, file = tmp_path / "donor", tmp_path / "alignment"
    shutil.copytree(pair[1], donor)
    spoilt = {**load_file(donor / "model.safetensors"), "model.norm.weight": torch.full((32,), torch.nan)}
    save_file(spoilt, donor / "model.safetensors", {"format": "pt"})
    rm.align(str(pair[0]), str(donor)).save(file)
    with pytest.raises(rm.RotationMergeError, match="NaN"):
        run(from_file(recipe_for("linear", pair[0], donor), file), tmp_path / "out")


def test_commands_leave_no_model_in_mergekits_cache(pair: Pair, tmp_path: Path) -> None:
    recipe = write_recipe(recipe_for("ties", *pair), tmp_path / "recipe.yml")
    LoaderCache.loaders.clear()
    for words in (["check", recipe], ["inspect", recipe]):
        assert command(*words).exit_code == 0
        assert not LoaderCache.loaders


def test_the_next_recipe_of_the_process_reads_untouched_weights(pair: Pair, tmp_path: Path) -> None:
    """mergekit's cache of loaders is one for the process: what a donor was moved to is not what others read."""
    stock = {**recipe_for("linear", *pair), "merge_method": "linear", "parameters": {}}
    run(recipe_for("linear", *pair, residual="permutation"), tmp_path / "ours")
    assert not LoaderCache.loaders
    merge.run_merge(MergeConfiguration.model_validate(stock), str(tmp_path / "stock"), MergeOptions(quiet=True))
    ours, plain = state(tmp_path / "ours"), state(tmp_path / "stock")
    parents = [state(path) for path in pair]
    for name, tensor in plain.items():
        assert torch.allclose(tensor, (parents[0][name] + parents[1][name]) / 2, atol=1e-6)
    assert any(not torch.equal(tensor, ours[name]) for name, tensor in plain.items())


@pytest.mark.slow
def test_config_and_small_files_are_the_anchors_whatever_the_order_of_a_set(pair: Pair, tmp_path: Path) -> None:
    """mergekit takes them from the first of a set of models, whose order Python draws anew in every process."""
    anchor, donor = tmp_path / "anchor", tmp_path / "donor"
    for original, folder, word in zip(pair, (anchor, donor), ("anchor", "donor"), strict=True):
        shutil.copytree(original, folder)
        (folder / "generation_config.json").write_text(json.dumps({"note": word}))
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": len(word)}))
    recipe = write_recipe(recipe_for("linear", anchor, donor), tmp_path / "recipe.yml")
    for seed in range(4):
        out = tmp_path / f"out-{seed}"
        command_line = [str(Path(sys.executable).with_name("mergekit-yaml")), str(recipe), str(out), "--quiet"]
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        subprocess.run(command_line, env=environment, check=True, capture_output=True)
        assert json.loads((out / "config.json").read_text())["bos_token_id"] == len("anchor")
        assert json.loads((out / "generation_config.json").read_text())["note"] == "anchor"
