"""`inspect` without mergekit and transformers: from config.json and headers alone, with the same result."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import parsed, run
from mergekit.merge_methods.base import ParameterScope

from rotation_merge.checkpoints import glance as module
from rotation_merge.checkpoints.glance import glance, glance_all
from rotation_merge.cli import inspect
from rotation_merge.recipe import delegates
from rotation_merge.recipe.plainly import DELEGATES, LEAST, plain_donors
from rotation_merge.report import estimate

CHECKPOINTS = Path(module.__file__).parents[1] / "samples" / "checkpoints"
LLAMA = CHECKPOINTS / "llama-0-english"


@pytest.fixture(autouse=True)
def speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "flops_per_second", lambda: 1e9)


def changed(folder: Path, **entries: Any) -> Path:
    """The Llama with other entries in its config; None: without."""
    shutil.copytree(LLAMA, folder)
    config = {**json.loads((LLAMA / "config.json").read_text()), **entries}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return folder


def the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "glance_all", lambda *_: None)
    monkeypatch.setattr(inspect, "plain_donors", lambda _: None)


def both_ways(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is printed, which is the same either way."""
    seen = run("inspect", path, "--json")
    the_long_way(monkeypatch)
    whole = run("inspect", path, "--json")
    assert (seen.exit_code, seen.stdout) == (whole.exit_code, whole.stdout)
    return seen


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


def test_models_and_plain_recipes_need_neither_mergekit_nor_transformers(tmp_path: Path) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from rotation_merge.cli.app import app\n"
        f"for what in ({str(LLAMA)!r}, {str(recipe_of(tmp_path, PLAIN))!r}):\n"
        " done = CliRunner().invoke(app, ['inspect', what]); assert done.exit_code == 0, done.output\n"
        "print([name for name in ('mergekit', 'transformers', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("given", [[], ["--untie"], ["--residual", "rotation"], ["--residual", "permutation"]])
@pytest.mark.parametrize("kind", ["llama-0-english", "vit-0"])
def test_both_ways_print_the_same(kind: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = CHECKPOINTS / kind
    seen = run("inspect", path, *given, "--json")
    the_long_way(monkeypatch)
    whole = run("inspect", path, *given, "--json")
    assert (seen.exit_code, seen.stdout) == (whole.exit_code, whole.stdout)


LACKING: dict[str, dict[str, Any]] = {
    "heads of keys": {"num_key_value_heads": None},
    "dimension of heads": {"head_dim": None},
    "whether the head is tied": {"tie_word_embeddings": None},
    "an activation": {"hidden_act": None},
    "width of neurons": {"intermediate_size": None},
    "number of layers": {"num_hidden_layers": None},
    "heads that do not divide": {"num_attention_heads": 7},
    "words for a number": {"rms_norm_eps": "small"},
    "code of its own": {"auto_map": {"AutoConfig": "configuration.Own"}},
}


@pytest.mark.parametrize("entries", LACKING.values(), ids=LACKING)
def test_what_a_config_lacks_is_as_transformers_has_it(
    entries: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_ways(changed(tmp_path / "model", **entries), monkeypatch)


RECIPES = {
    "plain": (PLAIN, True),
    "of a hub's kind": (PLAIN.replace("delegate: linear", "exclude: 'lm_head, norm', rescale: sequential"), True),
    "one model's own": (PLAIN.replace(f"{{model: {LLAMA}}}", f"{{model: {LLAMA}, parameters: {{heads: none}}}}"), True),
    "carried": (
        PLAIN.replace(
            f"{{model: {LLAMA}}}", f"{{model: {LLAMA}, parameters: {{finetuned_from: {CHECKPOINTS / 'llama-0'}}}}}"
        ),
        True,
    ),
    "tokens brought together": (PLAIN + "tokenizer: {source: union}\n", True),
    "two kinds": (PLAIN.replace(str(LLAMA), str(CHECKPOINTS / "vit-0")), True),
    "a model that is not there": (PLAIN.replace(str(LLAMA), "./nothing"), True),
    "layers that are not there": (PLAIN.replace("preset: far", "layers: 0-40"), True),
    "a head that is tied": (PLAIN.replace("preset: far, untie: true", "residual: rotation"), True),
    "values by layer": (PLAIN.replace("weight: 0.3", "weight: [0.3, 0.4]"), False),
    "preset by weights": (PLAIN.replace("preset: far", "preset: auto"), False),
    "misspelt": (PLAIN.replace("untie", "unite"), False),
    "no weights": (PLAIN.replace("weight: 0.3, ", ""), False),
    "too many models": (PLAIN.replace("delegate: linear, weight: 0.3", "delegate: slerp, t: 0.5"), False),
    "a share beyond one": (PLAIN.replace("delegate: linear", "delegate: ties, density: 1.5"), False),
    "no such dtype": (PLAIN.replace("float32", "float31"), False),
    "no such value": (PLAIN.replace("preset: far", "residual: rotations"), False),
    "a parameter of another delegate": (PLAIN.replace("delegate: linear", "delegate: linear, samples: 8"), False),
    "a key twice": (PLAIN + "dtype: float32\n", False),
}
"""Recipes, and whether they are read without mergekit."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_inspected_as_mergekit_reads_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, plain = RECIPES[name]
    path = recipe_of(tmp_path, text)
    assert (plain_donors(path.read_text()) is not None) == plain
    both_ways(path, monkeypatch)


def test_warnings_are_those_of_configs_and_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs that differ are compared as transformers has them, tokenizers that differ by mergekit's way."""
    other = changed(tmp_path / "other", rms_norm_eps=1e-3)
    recipe = recipe_of(tmp_path, PLAIN.replace(str(LLAMA), str(other)))
    both = glance_all([str(LLAMA), str(other)], True)
    assert both is not None
    assert "rope_parameters" in both[str(other)].config
    assert "rms_norm_eps" in both_ways(recipe, monkeypatch).stdout
    (other / "tokenizer_config.json").write_text("{}")
    assert glance_all([str(LLAMA), str(other)], True) is None
    assert glance_all([str(LLAMA), str(other)], False) is not None


@pytest.mark.parametrize("name", DELEGATES)
def test_terms_of_delegates_are_mergekits(name: str) -> None:
    terms, spec = DELEGATES[name], delegates.get(name).spec
    known = {p.name: p for p in spec.parameters}
    required = {p.name: p.scope for p in spec.parameters if p.required}
    asked = {terms.each: ParameterScope.INPUT if terms.base else ParameterScope.NON_BASE}
    assert required == {n: s for n, s in {**asked, terms.shared: ParameterScope.SHARED}.items() if n is not None}
    assert {known[n].value_type for n in (terms.each, terms.shared, *terms.numbers) if n} <= {float}
    assert {known[n].value_type for n in terms.flags} <= {bool}
    contract = spec.contract
    assert contract.min_inputs <= LEAST
    assert (contract.max_inputs or math.inf) == terms.most
    assert (contract.min_non_base, contract.max_non_base) == (None, None)


def test_defaults_that_only_code_gives_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path / "model", auto_map={"AutoConfig": "configuration.Own"})
    with caplog.at_level("INFO"):
        assert glance(str(path)) is not None
        assert "loading transformers" in caplog.text
        caplog.clear()
        assert glance(str(changed(tmp_path / "plain"))) is not None
        assert "loading" not in caplog.text
        (path / "model.safetensors").rename(path / "pytorch_model.bin")
        assert glance(str(path)) is None
    assert "loading mergekit" in caplog.text


def test_a_recipe_names_its_donors_before_models_are_opened(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        f"merge_method: rotation_merge\nbase_model: {LLAMA}\nmodels: [{{model: {LLAMA}}}, {{model: ./nothing}}]\n"
        "parameters: {delegate: linear, weight: 0.5}\ndtype: float32\n"
    )
    done = run("inspect", recipe)
    assert done.exit_code == 2
    assert done.output.splitlines()[0] == f"Donors of {recipe}: ./nothing"
    assert "no such directory" in done.output
    assert parsed("inspect", LLAMA)[0]["family"] == "llama"
