"""`inspect` of models, recipes and files of ours: what a config lacks, and what is wrong, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_support import CHECKPOINTS, error_of, output_of, parsed
from plugin_support import make, recipe_for, twin, write_recipe
from programs import run as program
from spoiling import config

LLAMA = CHECKPOINTS / "llama-0-english"
OWN_CODE = {"AutoConfig": "configuration.Own"}


def changed(folder: Path, **entries: Any) -> Path:
    """The Llama with other entries in its config; None: without."""
    shutil.copytree(LLAMA, folder)
    config(folder, **entries)()
    return folder


def test_what_a_config_lacks_is_as_transformers_has_it(tmp_path: Path) -> None:
    """Its defaults are the model's, or the weights are of another size."""
    (expected,) = parsed("inspect", LLAMA)
    for number, name in enumerate(("head_dim", "tie_word_embeddings", "hidden_act", "auto_map")):
        model = changed(tmp_path / str(number), **{name: OWN_CODE if name == "auto_map" else None})
        assert parsed("inspect", model) == [{**expected, "model": str(model)}]
    for name, value, fault in (
        ("num_key_value_heads", None, "its config says 96 x 96"),
        ("intermediate_size", None, "its config says 11008 x 96"),
        ("num_hidden_layers", None, "are missing"),
        ("rms_norm_eps", "small", "its config cannot be loaded"),
    ):
        assert fault in error_of("inspect", changed(tmp_path / name, **{name: value}))


PLAIN = f"""merge_method: rotation_merge
base_model: {CHECKPOINTS / "llama-0"}
models: [{{model: {CHECKPOINTS / "llama-0"}}}, {{model: {CHECKPOINTS / "llama-1"}}}, {{model: {LLAMA}}}]
parameters: {{delegate: linear, weight: 0.3, preset: far, untie: true}}
dtype: float32
"""


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("linear,", "linear, exclude: 'lm_head, norm', scaling: sequential,"),
        (f"{{model: {LLAMA}}}", f"{{model: {LLAMA}, parameters: {{heads: none}}}}"),
        ("dtype", "tokenizer: {source: union}\ndtype"),
        ("weight: 0.3", "weight: [0.3, 0.4]"),
        ("preset: far", "preset: auto"),
        ("preset: far, untie: true", "residual: rotation"),
    ],
)
def test_recipes_are_inspected_as_a_merge_reads_them(words: str, instead: str, tmp_path: Path) -> None:
    donors = parsed("inspect", write_recipe(PLAIN.replace(words, instead), tmp_path / "recipe.yml"))
    assert [donor["model"] for donor in donors] == [str(CHECKPOINTS / "llama-1"), str(LLAMA)]
    for fault in ("layers: 0-40", "unite: true"):
        recipe = write_recipe(PLAIN.replace("preset: far", fault), tmp_path / "recipe.yml")
        assert fault.partition(":")[0] in error_of("inspect", recipe)


def test_models_recipes_and_lists_are_shown(tmp_path: Path) -> None:
    (facts,) = parsed("inspect", LLAMA, "--heads", "permutation")
    assert (facts["parameters"], facts["disk"], facts["memory"] > 0) == (443_232, 2 * 443_232, True)
    kinds = {line["kind"]: line for line in facts["lines"]}
    assert (kinds["attention"]["count"], "RoPE" in kinds["attention"]["group"]) == (4, True)
    other = changed(tmp_path / "other", rms_norm_eps=1e-3)
    text = PLAIN.replace("preset: far", "attention: none").replace(str(LLAMA), str(other))
    output = output_of("inspect", write_recipe(text, tmp_path / "recipe.yml"))
    assert all(words in output for words in ("residual: none", "on disk", "rms_norm_eps"))
    assert "finetuned_from" in output_of("inspect", "--methods")
    assert "llama" in parsed("inspect", "--architectures")
    assert "LlamaForCausalLM" in output_of("inspect", "--architectures")


@pytest.mark.parametrize("tied", [True, False])
def test_what_inspect_recommends_check_admits(tied: bool, tmp_path: Path) -> None:
    """Every `residual:` that would match the stream, with `untie` where it is needed."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    (line,) = (line for line in parsed("inspect", anchor)[0]["unaligned"] if "would match it" in line)
    advice = dict(re.findall(r"'residual: (\w+)' would match it( with 'untie: true')?", line))
    assert bool(advice["rotation"]) == tied
    for group, untie in advice.items():
        recipe = recipe_for("linear", anchor, donor, residual=group, **({"untie": True} if untie else {}))
        output_of("check", write_recipe(recipe, tmp_path / "recipe.yml"))
    untied = parsed("inspect", anchor, "--untie")[0]["unaligned"]
    assert any("'residual: rotation' would match it" in line for line in untied)


def test_files_of_ours_and_their_fingerprints(tmp_path: Path) -> None:
    """A merge ends with its summary; its report, an alignment and statistics name the same models."""
    anchor = make("llama", tmp_path / "anchor")
    donor, out = twin(anchor, tmp_path / "donor"), tmp_path / "out"
    recipe = write_recipe(recipe_for("linear", anchor, donor), tmp_path / "recipe.yml")
    said = program("mergekit-yaml", recipe, out).err
    summary = "averaged by linear", str(anchor), f"{donor}: relative distance", f"{out}/rotation_merge.json"
    assert [words for words in (*summary, "100% less") if words not in said] == []
    report = output_of("inspect", out, "--report")
    assert f"Report of a merge into {anchor}" in report
    assert "100% less" in report
    assert output_of("inspect", out / "rotation_merge.json") == report
    marks = parsed("inspect", anchor, "--fingerprint") | parsed("inspect", donor, "--fingerprint")
    assert json.loads((out / "rotation_merge.json").read_text())["fingerprints"] == marks
    for name in ("maps.safetensors", "maps"):
        output_of("align", anchor, donor, "--alignment", tmp_path / name)
        shown = parsed("inspect", tmp_path / name)
        assert shown["is"] == "Alignment"
        assert parsed("inspect", tmp_path / name, "--fingerprint") == shown["fingerprints"] == marks
        assert (shown["holds"]["spaces"], shown["holds"]["architecture"]) == ({"attention": 2, "ffn": 2}, "llama")
    file = tmp_path / "statistics"
    output_of("measure", anchor, "--data", "self", "--samples", 2, "--length", 8, "--out", file)
    shown = parsed("inspect", file)
    assert (shown["is"], shown["holds"]["gram"] > 0) == ("Statistics", True)
    assert shown["fingerprints"] == parsed("inspect", anchor, "--fingerprint")
