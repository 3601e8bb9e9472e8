"""`inspect` of models, recipes and files of ours: what a config lacks, and what is wrong, in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from cli_support import CHECKPOINTS, parsed, run
from click.testing import CliRunner
from plugin_support import make, recipe_for, twin, write_recipe

LLAMA = CHECKPOINTS / "llama-0-english"


def changed(folder: Path, **entries: Any) -> Path:
    """The Llama with other entries in its config; None: without."""
    shutil.copytree(LLAMA, folder)
    config = {**json.loads((LLAMA / "config.json").read_text()), **entries}
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
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
    "no weights": ("weight: 0.3, ", "", "needs the parameter 'weight'"),
    "too many models": ("linear, weight: 0.3", "slerp, t: 0.5", "requires exactly 2 inputs"),
    "a share beyond one": ("delegate: linear", "delegate: ties, density: 1.5", "'density' is 1.5"),
    "no such dtype": ("float32", "float31", "float31"),
    "no such value": ("preset: far", "residual: rotations", "rotations"),
    "a parameter of another delegate": ("delegate: linear", "delegate: linear, samples: 8", "samples"),
    "a key twice": ("dtype", "dtype: float32\ndtype", "occurs twice"),
}
"""What stands in a recipe instead of something else, and what is said of it."""


def recipe_of(folder: Path, text: str) -> Path:
    (folder / "recipe.yml").write_text(text)
    return folder / "recipe.yml"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_inspected_as_a_merge_reads_them(name: str, tmp_path: Path) -> None:
    words, instead, fault = RECIPES[name]
    done = run("inspect", recipe_of(tmp_path, PLAIN.replace(words, instead) if words else PLAIN), "--json")
    if fault is None:
        assert done.exit_code == 0
        assert [donor["model"] for donor in json.loads(done.stdout)] == [str(CHECKPOINTS / "llama-1"), str(LLAMA)]
    else:
        assert done.exit_code == 2
        assert fault in json.loads(done.stdout)["error"]["what"]


def test_what_is_said_of_models_and_recipes(tmp_path: Path) -> None:
    (found,) = parsed("inspect", LLAMA, "--heads", "permutation")
    assert (found["parameters"], found["disk"]) == (443_232, 2 * 443_232)
    assert found["memory"] > 0
    kinds = {line["kind"]: line for line in found["lines"]}
    assert (kinds["attention"]["count"], "RoPE" in kinds["attention"]["group"]) == (4, True)
    done = run("inspect", recipe_of(tmp_path, PLAIN.replace("preset: far", "attention: none")))
    assert done.exit_code == 0
    assert "residual: none" in done.output
    assert "on disk" in done.output
    other = changed(tmp_path / "other", rms_norm_eps=1e-3)
    assert "rms_norm_eps" in run("inspect", recipe_of(tmp_path, PLAIN.replace(str(LLAMA), str(other)))).stdout
    assert {"slerp", "wudi"} <= {entry["name"] for entry in parsed("inspect", "--methods")["delegates"]}
    assert "finetuned_from" in run("inspect", "--methods").output
    assert "llama" in parsed("inspect", "--architectures")
    assert "LlamaForCausalLM" in run("inspect", "--architectures").output


@pytest.mark.parametrize("tied", [True, False])
def test_what_inspect_recommends_check_admits(tied: bool, tmp_path: Path) -> None:
    """Every `residual:` that is said to match the stream, with `untie` where that is said."""
    anchor, donor = (make("llama", tmp_path / str(seed), seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    (line,) = (line for line in parsed("inspect", anchor)[0]["unaligned"] if "would match it" in line)
    advice = dict(re.findall(r"'residual: (\w+)' would match it( with 'untie: true')?", line))
    assert bool(advice["rotation"]) == tied
    for group, untie in advice.items():
        more = {"residual": group, **({"untie": True} if untie else {})}
        done = run("check", write_recipe(recipe_for("linear", anchor, donor, **more), tmp_path / "recipe.yml"))
        assert done.exit_code == 0, done.output
    untied = parsed("inspect", anchor, "--untie")[0]["unaligned"]
    assert any("'residual: rotation' would match it" in line for line in untied)


# --- files of ours ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    """Anchor, twin, and the merge of both, with what mergekit-yaml said on stderr."""
    from mergekit.io.tasks import LoaderCache
    from mergekit.scripts.run_yaml import main

    folder = tmp_path_factory.mktemp("show")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    recipe = write_recipe(recipe_for("linear", anchor, donor), folder / "recipe.yml")
    LoaderCache.loaders.clear()
    result = CliRunner().invoke(main, [str(recipe), str(folder / "out")])
    assert result.exit_code == 0, result.output
    return anchor, donor, folder / "out", result.stderr


def test_a_merge_ends_with_its_summary_and_its_report_is_shown(merged: tuple[Path, Path, Path, str]) -> None:
    anchor, donor, out, said = merged
    summary = f"aligned to {anchor}, averaged by linear", f"{donor}: relative distance", f"{out}/rotation_merge.json"
    assert all(words in said for words in (*summary, "100% less"))
    result = run("inspect", out / "rotation_merge.json")
    assert result.exit_code == 0
    assert f"Report of a merge into {anchor}" in result.output
    assert "100% less" in result.output
    assert run("inspect", out, "--report").output == result.output


@pytest.mark.parametrize("name", ["maps.safetensors", "maps"])
def test_fingerprints_of_model_and_alignment_agree(
    name: str, merged: tuple[Path, Path, Path, str], tmp_path: Path
) -> None:
    anchor, donor, out, _ = merged
    file = tmp_path / name
    assert run("align", anchor, donor, "--alignment", file).exit_code == 0
    shown = parsed("inspect", file)
    assert shown["is"] == "Alignment"
    assert shown["fingerprints"] == json.loads((out / "rotation_merge.json").read_text())["fingerprints"]
    of_models = [parsed("inspect", model, "--fingerprint") for model in (anchor, donor)]
    assert parsed("inspect", file, "--fingerprint") == shown["fingerprints"] == of_models[0] | of_models[1]
    assert shown["holds"]["spaces"] == {"attention": 2, "ffn": 2}
    assert shown["holds"]["architecture"] == "llama"


def test_statistics_are_shown(tmp_path: Path) -> None:
    file, model = tmp_path / "s.safetensors", CHECKPOINTS / "llama-0"
    assert run("measure", model, "--data", "self", "--samples", "2", "--length", "8", "--out", file).exit_code == 0
    found = parsed("inspect", file)
    assert found["is"] == "Statistics"
    assert found["holds"]["gram"] > 0
    assert found["fingerprints"] == parsed("inspect", model, "--fingerprint")


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}"])
@pytest.mark.parametrize("name", ["x.safetensors", "x.json"])
def test_other_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for question in ((), ("--fingerprint",)):
        result = run("inspect", tmp_path / name, *question)
        assert result.exit_code == 2
        assert name in result.output
        assert "Traceback" not in result.output
