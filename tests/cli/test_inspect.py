"""`inspect` of models, recipes and files of ours: what a config lacks, and what is wrong, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_support import CHECKPOINTS, output_of, parsed, run
from click.testing import CliRunner
from mergekit.scripts.run_yaml import main
from plugin_support import make, recipe_for, twin, write_recipe

LLAMA = CHECKPOINTS / "llama-0-english"


def changed(folder: Path, **entries: Any) -> Path:
    """The Llama with other entries in its config; None: without."""
    shutil.copytree(LLAMA, folder)
    config = {**json.loads((LLAMA / "config.json").read_text()), **entries}
    present = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(present))
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
"""Entries of a config, and the fault; None: transformers' defaults are the model's."""


@pytest.mark.parametrize("name", LACKING)
def test_what_a_config_lacks_is_as_transformers_has_it(name: str, tmp_path: Path) -> None:
    entries, fault = LACKING[name]
    done = run("inspect", changed(tmp_path / "model", **entries), "--json")
    assert done.exit_code == (0 if fault is None else 2)
    if fault is None:
        assert json.loads(done.stdout) == [{**parsed("inspect", LLAMA)[0], "model": str(tmp_path / "model")}]
    else:
        assert fault in json.loads(done.stdout)["error"]["what"]


PLAIN = f"""merge_method: rotation_merge
base_model: {CHECKPOINTS / "llama-0"}
models: [{{model: {CHECKPOINTS / "llama-0"}}}, {{model: {CHECKPOINTS / "llama-1"}}}, {{model: {LLAMA}}}]
parameters: {{delegate: linear, weight: 0.3, preset: far, untie: true}}
dtype: float32
"""
RECIPES: dict[str, tuple[str, str, str | None]] = {
    "plain": ("", "", None),
    "excluded by parts of names": ("linear,", "linear, exclude: 'lm_head, norm', scaling: sequential,", None),
    "one model's own": (f"{{model: {LLAMA}}}", f"{{model: {LLAMA}, parameters: {{heads: none}}}}", None),
    "tokens brought together": ("dtype", "tokenizer: {source: union}\ndtype", None),
    "values by layer": ("weight: 0.3", "weight: [0.3, 0.4]", None),
    "preset by weights": ("preset: far", "preset: auto", None),
    "a stream that is rotated": ("preset: far, untie: true", "residual: rotation", None),
    "two kinds": (str(LLAMA), str(CHECKPOINTS / "vit-0"), "architecture is vit"),
    "a model that is not there": (str(LLAMA), "./nothing", "no such directory"),
    "layers that are not there": ("preset: far", "layers: 0-40", "the model has no layer 4"),
    "misspelt": ("untie", "unite", "there is no parameter 'unite'"),
}
"""What stands in a recipe instead of something else, and the fault."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_inspected_as_a_merge_reads_them(name: str, tmp_path: Path) -> None:
    words, instead, fault = RECIPES[name]
    recipe = write_recipe(PLAIN.replace(words, instead) if words else PLAIN, tmp_path / "recipe.yml")
    done = run("inspect", recipe, "--json")
    assert done.exit_code == (0 if fault is None else 2)
    if fault is None:
        assert [donor["model"] for donor in json.loads(done.stdout)] == [str(CHECKPOINTS / "llama-1"), str(LLAMA)]
    else:
        assert fault in json.loads(done.stdout)["error"]["what"]


def test_models_recipes_and_lists_are_shown(tmp_path: Path) -> None:
    (facts,) = parsed("inspect", LLAMA, "--heads", "permutation")
    assert (facts["parameters"], facts["disk"], facts["memory"] > 0) == (443_232, 2 * 443_232, True)
    kinds = {line["kind"]: line for line in facts["lines"]}
    assert (kinds["attention"]["count"], "RoPE" in kinds["attention"]["group"]) == (4, True)
    other = changed(tmp_path / "other", rms_norm_eps=1e-3)
    text = PLAIN.replace("preset: far", "attention: none").replace(str(LLAMA), str(other))
    output = run("inspect", write_recipe(text, tmp_path / "recipe.yml")).output
    assert all(words in output for words in ("residual: none", "on disk", "rms_norm_eps"))
    assert {"slerp", "wudi"} <= {entry["name"] for entry in parsed("inspect", "--methods")["delegates"]}
    assert "finetuned_from" in run("inspect", "--methods").output
    assert "llama" in parsed("inspect", "--architectures")
    assert "LlamaForCausalLM" in run("inspect", "--architectures").output


@pytest.mark.parametrize("tied", [True, False])
def test_what_inspect_recommends_check_admits(tied: bool, tmp_path: Path) -> None:
    """Every `residual:` that would match the stream, with `untie` where it is needed."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    (line,) = (line for line in parsed("inspect", anchor)[0]["unaligned"] if "would match it" in line)
    advice = dict(re.findall(r"'residual: (\w+)' would match it( with 'untie: true')?", line))
    assert bool(advice["rotation"]) == tied
    for group, untie in advice.items():
        recipe = recipe_for("linear", anchor, donor, residual=group, **({"untie": True} if untie else {}))
        assert run("check", write_recipe(recipe, tmp_path / "recipe.yml")).exit_code == 0
    untied = parsed("inspect", anchor, "--untie")[0]["unaligned"]
    assert any("'residual: rotation' would match it" in line for line in untied)


def test_files_of_ours_and_their_fingerprints(tmp_path: Path) -> None:
    """A merge ends with its summary; its report, an alignment and statistics name the same models."""
    anchor = make("llama", tmp_path / "anchor")
    donor, out = twin(anchor, tmp_path / "donor"), tmp_path / "out"
    recipe = write_recipe(recipe_for("linear", anchor, donor), tmp_path / "recipe.yml")
    said = CliRunner().invoke(main, [str(recipe), str(out)]).stderr
    summary = "averaged by linear", str(anchor), f"{donor}: relative distance", f"{out}/rotation_merge.json"
    assert [words for words in (*summary, "100% less") if words not in said] == []
    report = run("inspect", out, "--report").output
    assert f"Report of a merge into {anchor}" in report
    assert "100% less" in report
    assert run("inspect", out / "rotation_merge.json").output == report
    marks = parsed("inspect", anchor, "--fingerprint") | parsed("inspect", donor, "--fingerprint")
    assert json.loads((out / "rotation_merge.json").read_text())["fingerprints"] == marks
    for name in ("maps.safetensors", "maps"):
        assert run("align", anchor, donor, "--alignment", tmp_path / name).exit_code == 0
        shown = parsed("inspect", tmp_path / name)
        assert shown["is"] == "Alignment"
        assert parsed("inspect", tmp_path / name, "--fingerprint") == shown["fingerprints"] == marks
        assert (shown["holds"]["spaces"], shown["holds"]["architecture"]) == ({"attention": 2, "ffn": 2}, "llama")
    file, few = tmp_path / "statistics", ("--samples", 2, "--length", 8)
    assert run("measure", anchor, "--data", "self", *few, "--out", file).exit_code == 0
    shown = parsed("inspect", file)
    assert (shown["is"], shown["holds"]["gram"] > 0) == ("Statistics", True)
    assert shown["fingerprints"] == parsed("inspect", anchor, "--fingerprint")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.json"])
def test_files_that_are_none_of_ours_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for question in ((), ("--fingerprint",)):
        output = output_of("inspect", tmp_path / name, *question, code=2)
        assert name in output
        assert "Traceback" not in output
