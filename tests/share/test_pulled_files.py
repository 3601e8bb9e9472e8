"""What `pull` takes of a published folder, and in which order; what it refuses is in the table of bad inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import run
from hub_support import MANIFEST_FILE, Hub, publish_as_push_does
from plugin_support import files_of, one_error

from rotation_merge import RotationMergeError
from rotation_merge.config import FILE, FOLDER, MODEL, NEW_FILE
from rotation_merge.mergekit_plugin.keys import BY_NAME
from rotation_merge.share.contents import belongs, is_weights
from rotation_merge.share.paths import check_paths

REPO = "org/merge"
HONEST = {"config.json": b"{}", "README.md": b"# x\n", "alignment/0-maps.safetensors": b"maps"}


def test_what_is_honest_is_taken(home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, HONEST)
    assert run("pull", REPO, tmp_path / "out").exit_code == 0
    assert files_of(tmp_path / "out").keys() == {*HONEST, MANIFEST_FILE}


MEASURED = {
    **{"file": "0-s.safetensors", "model": "org/a@1", "kinds": ["gram"], "data": "my texts.txt", "data_hash": "0" * 40},
    **{"samples": 8, "seed": 0, "length": 16, "batch_size": 4, "labels": "sampled"},
}


def test_no_command_of_a_manifest_is_shown(home: Hub, tmp_path: Path) -> None:
    recipe = {"recipe.yml": b"merge_method: linear\nmodels: [{model: org/a}]\n"}
    publish_as_push_does(home, REPO, {**HONEST, **recipe}, statistics=[{**MEASURED, "command": "curl evil"}])
    done = run("pull", REPO, tmp_path / "out")
    assert "evil.txt" not in done.output
    assert "curl" not in done.output
    made = "measure org/a@1 --data 'my texts.txt' --kinds gram --samples 8 --seed 0 --length 16 --batch-size 4"
    assert f"rotation-merge {made} --out 0-s.safetensors" in done.output


def test_a_user_may_include_a_file(home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, {**HONEST, "plots/a.svg": b"x", "notes.pdf": b"y"})
    assert "'plots/a.svg'" in one_error(run("pull", REPO, tmp_path / "out", "--include", "*.pdf").output)
    assert run("pull", REPO, tmp_path / "out", "--include", "*.pdf", "--include", "plots/*").exit_code == 0
    assert files_of(tmp_path / "out").keys() == {*HONEST, "plots/a.svg", "notes.pdf", MANIFEST_FILE}


def test_force_replaces_a_model_and_keeps_what_else_is_there(home: Hub, tmp_path: Path) -> None:
    """In every folder that both have; the old model goes, with shards that the new one does not have."""
    out = tmp_path / "out"
    kept = {"notes.txt": b"a", "alignment/keep.txt": b"b", "alignment/9-mine.safetensors": b"c", "docs/keep.txt": b"d"}
    kept |= {".git/HEAD": b"e", "heads/mine/model.safetensors": b"f", ".gitignore": b"g"}
    old = {"config.json": b"old", "model-00001-of-00002.safetensors": b"old", "README.md": b"old"}
    for place, content in {**kept, **old}.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        (out / place).write_bytes(content)
    files = {**HONEST, "model.safetensors": b"new", "heads/a/config.json": b"{}", "heads/a/model.safetensors": b"new"}
    publish_as_push_does(home, REPO, files)
    assert "already exists" in one_error(run("pull", REPO, out).output)
    assert run("pull", REPO, out, "--force").exit_code == 0
    found = files_of(out)
    found.pop(MANIFEST_FILE)
    assert found == {**kept, **files}


def test_what_belongs_to_a_merge() -> None:
    """Among others: every file that a tokenizer or processor of transformers is saved to."""
    for place in ("model-00001-of-00002.safetensors", "heads/a b/model.safetensors", "2_Dense/model.safetensors"):
        assert belongs(place), place
        assert is_weights(place), place
    for place in (
        "data/0-x.jsonl",
        "alignment-2.safetensors",
        "heads/a/config.json",
        "spiece.model",
        "1_Pooling/config.json",
    ):
        assert belongs(place), place
        assert not is_weights(place), place
    for place in (
        "optimizer.safetensors",
        "heads/config.json",
        "heads/a/heads/b/config.json",
        "config.json/x",
        "x/README.md",
    ):
        assert not belongs(place), place


@pytest.mark.parametrize("place", ["modeling_llama.py", ".git/config"])
def test_nothing_is_fetched_that_a_merge_does_not_have(place: str, home: Hub, tmp_path: Path) -> None:
    publish_as_push_does(home, REPO, {**HONEST, place: b"x"})
    asked = len(home.asked)
    assert run("pull", REPO, tmp_path / "out").exit_code == 2
    assert not any(place in line for line in home.asked[asked:])


def test_recipes_are_checked_before_weights_are_fetched(home: Hub, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"", "recipe.yml": b"base_model: ../x\n"}
    publish_as_push_does(home, REPO, files)
    asked = len(home.asked)
    assert run("pull", REPO, tmp_path / "out").exit_code == 2
    assert not any("model.safetensors" in line for line in home.asked[asked:])


# --- recipes -----------------------------------------------------------------------------------------------------

A, B = "org/a@main", "org/b@main+org/lora@v1"


def recipe(**changes: Any) -> dict[str, Any]:
    """A recipe as `push` writes it, but for some of its entries."""
    models = [{"model": A}, {"model": B, "parameters": {"alignment": "org/m/alignment/0-x.safetensors@0f"}}]
    return {
        "merge_method": "rotation_merge",
        "base_model": A,
        "models": models,
        "parameters": {"delegate": "regmean", "statistics": "statistics-0.safetensors", "data": "datasets/o/d/x.txt@1"},
        "tokenizer": {"source": "base", "tokens": {"</s>": {"source": A}}},
        "chat_template": "/{{ messages }}/../",
        "dtype": "bfloat16",
        **changes,
    }


def test_what_push_writes_is_taken() -> None:
    check_paths(yaml.safe_dump(recipe()), "recipe.yml")
    for entry in (
        {"save_alignment": True},
        {"save_alignment": "maps.safetensors"},
        {"data": "demo:c"},
        {"data": "self"},
    ):
        check_paths(yaml.safe_dump(recipe(parameters=entry)), "recipe.yml")
    two = [recipe(name="first"), recipe(base_model="first", slices=[{"sources": [{"model": "first"}]}])]
    check_paths(yaml.safe_dump_all(two), "recipe.yml")


KEYS = [name for name, key in BY_NAME.items() if key.option.kind in (FILE, NEW_FILE, FOLDER, MODEL)]


@pytest.mark.parametrize("key", KEYS)
def test_no_key_leads_out(key: str) -> None:
    """Every parameter that names a file, a folder or a model: under the recipe or a model, in a list or a filter."""
    for value in ("/etc/passwd", ["/etc/passwd"], [{"filter": "mlp", "value": "/etc/passwd"}]):
        for entries in (
            {"parameters": {key: value}},
            {"models": [{"model": A, "parameters": {key: value}}]},
            {"slices": [{"sources": [{"model": A, "parameters": {key: value}}]}]},
        ):
            with pytest.raises(RotationMergeError, match="ask its publisher"):
                check_paths(yaml.safe_dump(recipe(**entries)), "recipe.yml")
