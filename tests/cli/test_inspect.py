"""`inspect` of models and recipes: what a config lacks, and what is wrong with either, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_support import CHECKPOINTS, parsed, run
from plugin_support import make

LLAMA = CHECKPOINTS / "llama-0-english"


def changed(folder: Path, **entries: Any) -> Path:
    """The Llama with other entries in its config; None: without."""
    shutil.copytree(LLAMA, folder)
    config = {**json.loads((LLAMA / "config.json").read_text()), **entries}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


LACKING: dict[str, tuple[dict[str, Any], str | None]] = {
    "heads of keys": ({"num_key_value_heads": None}, "its config says 96 x 96"),
    "dimension of heads": ({"head_dim": None}, None),
    "whether the head is tied": ({"tie_word_embeddings": None}, None),
    "an activation": ({"hidden_act": None}, None),
    "width of neurons": ({"intermediate_size": None}, "its config says 11008 x 96"),
    "number of layers": ({"num_hidden_layers": None}, "are missing"),
    "heads that do not divide": ({"num_attention_heads": 7}, "its config"),
    "words for a number": ({"rms_norm_eps": "small"}, "its config cannot be loaded"),
    "code of its own": ({"auto_map": {"AutoConfig": "configuration.Own"}}, None),
}
"""Entries of a config, and what is said of them; None: transformers' defaults are the model's."""


@pytest.mark.parametrize("name", LACKING)
def test_what_a_config_lacks_is_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    entries, fault = LACKING[name]
    done = run("inspect", changed(tmp_path / "model", **entries), "--json")
    if fault is None:
        assert json.loads(done.stdout) == [{**parsed("inspect", LLAMA)[0], "model": str(tmp_path / "model")}]
    else:
        assert done.exit_code == 2
        assert fault in json.loads(done.stdout)["error"]["what"]


def recipe_of(folder: Path, text: str) -> Path:
    path = folder / "recipe.yml"
    path.write_text(f"merge_method: rotation_merge\n{text}")
    return path


PLAIN = f"""
base_model: {CHECKPOINTS / "llama-0"}
models: [{{model: {CHECKPOINTS / "llama-0"}}}, {{model: {CHECKPOINTS / "llama-1"}}}, {{model: {LLAMA}}}]
parameters: {{delegate: linear, weight: 0.3, preset: far, untie: true}}
dtype: float32
"""

RECIPES: dict[str, tuple[str, str | None]] = {
    "plain": (PLAIN, None),
    "excluded by parts of names": (
        PLAIN.replace("delegate: linear", "delegate: linear, exclude: 'lm_head, norm', scaling: sequential"),
        None,
    ),
    "one model's own": (PLAIN.replace(f"{{model: {LLAMA}}}", f"{{model: {LLAMA}, parameters: {{heads: none}}}}"), None),
    "tokens brought together": (PLAIN + "tokenizer: {source: union}\n", None),
    "values by layer": (PLAIN.replace("weight: 0.3", "weight: [0.3, 0.4]"), None),
    "preset by weights": (PLAIN.replace("preset: far", "preset: auto"), None),
    "two kinds": (PLAIN.replace(str(LLAMA), str(CHECKPOINTS / "vit-0")), "architecture is vit"),
    "a model that is not there": (PLAIN.replace(str(LLAMA), "./nothing"), "no such directory"),
    "layers that are not there": (PLAIN.replace("preset: far", "layers: 0-40"), "the model has no layer 4"),
    "a stream that is rotated": (PLAIN.replace("preset: far, untie: true", "residual: rotation"), None),
    "misspelt": (PLAIN.replace("untie", "unite"), "there is no parameter 'unite'"),
    "no weights": (PLAIN.replace("weight: 0.3, ", ""), "needs the parameter 'weight'"),
    "too many models": (
        PLAIN.replace("delegate: linear, weight: 0.3", "delegate: slerp, t: 0.5"),
        "requires exactly 2 inputs",
    ),
    "a share beyond one": (PLAIN.replace("delegate: linear", "delegate: ties, density: 1.5"), "'density' is 1.5"),
    "no such dtype": (PLAIN.replace("float32", "float31"), "float31"),
    "no such value": (PLAIN.replace("preset: far", "residual: rotations"), "rotations"),
    "a parameter of another delegate": (PLAIN.replace("delegate: linear", "delegate: linear, samples: 8"), "samples"),
    "a key twice": (PLAIN + "dtype: float32\n", "occurs twice"),
}
"""Recipes, and what is said of them."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_inspected_as_a_merge_reads_them(name: str, tmp_path: Path) -> None:
    text, fault = RECIPES[name]
    done = run("inspect", recipe_of(tmp_path, text), "--json")
    if fault is None:
        assert done.exit_code == 0
        assert [donor["model"] for donor in json.loads(done.stdout)] == [str(CHECKPOINTS / "llama-1"), str(LLAMA)]
    else:
        assert done.exit_code == 2
        assert fault in json.loads(done.stdout)["error"]["what"]


def test_configs_that_differ_are_warned_of(tmp_path: Path) -> None:
    other = changed(tmp_path / "other", rms_norm_eps=1e-3)
    done = run("inspect", recipe_of(tmp_path, PLAIN.replace(str(LLAMA), str(other))), "--json")
    assert "rms_norm_eps" in done.stdout


@pytest.mark.parametrize("tied", [True, False])
def test_what_inspect_recommends_check_admits(tied: bool, tmp_path: Path) -> None:
    """Every `residual:` that is said to match the stream, with `untie` where that is said."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    (line,) = (line for line in parsed("inspect", anchor)[0]["unaligned"] if "would match it" in line)
    advice = dict(re.findall(r"'residual: (\w+)'( only with 'untie: true')?", line))
    assert bool(advice["rotation"]) == tied
    for group, untie in advice.items():
        parameters = f"delegate: linear, weight: 0.5, residual: {group}{', untie: true' if untie else ''}"
        models = f"base_model: {anchor}\nmodels: [{{model: {anchor}}}, {{model: {donor}}}]"
        done = run("check", recipe_of(tmp_path, f"{models}\nparameters: {{{parameters}}}\ndtype: float32\n"))
        assert done.exit_code == 0, done.output
    untied = parsed("inspect", anchor, "--untie")[0]["unaligned"]
    assert any("'residual: rotation' would match it" in line for line in untied)
