"""`inspect` without mergekit and transformers: from config.json and headers alone, with the same result."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_support import parsed, run

from rotation_merge.checkpoints import glance as module
from rotation_merge.checkpoints.glance import glance
from rotation_merge.cli import inspect
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


def test_a_llama_needs_neither_mergekit_nor_transformers() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from rotation_merge.cli.app import app; "
        f"done = CliRunner().invoke(app, ['inspect', {str(LLAMA)!r}]); assert done.exit_code == 0, done.output; "
        "print([name for name in ('mergekit', 'transformers', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("given", [[], ["--untie"], ["--residual", "rotation"], ["--residual", "permutation"]])
@pytest.mark.parametrize("kind", ["llama-0-english", "vit-0"])
def test_both_ways_print_the_same(kind: str, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = CHECKPOINTS / kind
    seen = run("inspect", path, *given, "--json")
    monkeypatch.setattr(inspect, "glance", lambda _: None)
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
    path = changed(tmp_path / "model", **entries)
    seen = run("inspect", path, "--json")
    monkeypatch.setattr(inspect, "glance", lambda _: None)
    whole = run("inspect", path, "--json")
    assert (seen.exit_code, seen.stdout) == (whole.exit_code, whole.stdout)


def test_defaults_that_only_code_gives_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = changed(tmp_path / "model", auto_map={"AutoConfig": "configuration.Own"})
    with caplog.at_level("INFO"):
        assert glance(str(path)) is None
    assert "loading transformers and mergekit" in caplog.text
    assert glance(str(changed(tmp_path / "plain"))) is not None


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
