"""A misspelt path gets the nearest one beside it, in commands and in recipes, whether or not it names a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_support import CHECKPOINTS, run
from plugin_support import one_error

RECIPE = """merge_method: rotation_merge
base_model: {base}
models:
  - model: {donor}
    parameters: {{weight: 1.0}}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: two models, a recipe of them, and texts."""
    monkeypatch.chdir(tmp_path)
    for name in ("llama-0", "llama-1"):
        shutil.copytree(CHECKPOINTS / name, name)
    Path("lama-1.log").touch()  # a file is no model
    Path("recipe.yml").write_text(RECIPE.format(base="llama-0", donor="llama-1"))
    Path("texts.txt").write_text("a text\n")
    Path("whole.gguf").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("align", "lama-0", "llama-1", "out"), "./llama-0"),
        (("align", "llama-0", "./lama-1", "out"), "./llama-1"),
        (("evaluate", "lama-0", "--data", "texts.txt"), "./llama-0"),
        (("evaluate", "llama-0", "--data", "text.txt"), "./texts.txt"),
        (("measure", "lama-0/", "--data", "self", "--out", "out"), "./llama-0"),
        (("polish", "llama-0", "out", "--teachers", "lama-1"), "./llama-1"),
        (("check", "recipes.yml"), "./recipe.yml"),
        (("doctor", "recipes.yml"), "./recipe.yml"),
        (("inspect", "recipes.yml"), "./recipe.yml"),
        (("inspect", "lama-0"), "./llama-0"),
        (("inspect", "./llama-0/model.safetensor"), "./llama-0/model.safetensors"),
        (("gguf", "lama-0", "out.gguf"), "./llama-0"),
        (("gguf", "wole.gguf", "out.gguf"), "./whole.gguf"),
        (("align", "llama-0", "wole.gguf", "out"), "./whole.gguf"),
        (("barrier", "llama-0", "llama-1", "--data", "texts.txt", "--save", "lama-1"), "./llama-1"),
    ],
)
def test_commands_name_the_nearest_path(arguments: tuple[str, ...], meant: str, here: Path) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert one_error(done.output).endswith(f"; did you mean '{meant}'?")
    assert not any(Path(name).exists() for name in ("out", "out.gguf", "lama-1"))


@pytest.mark.parametrize("place", ["base", "donor", "tokenizer"])
def test_recipes_name_it_at_its_place(place: str, here: Path) -> None:
    names = {"base": "llama-0", "donor": "llama-1", place: "./lama-1" if place == "tokenizer" else "lama-1"}
    text = RECIPE.format(**names) + (f"tokenizer_source: {names[place]}\n" if place == "tokenizer" else "")
    Path("recipe.yml").write_text(text)
    done = run("check", "recipe.yml")
    assert done.exit_code == 1
    assert f" {names[place]}: no such directory; did you mean './llama-1'?\n" in done.output


@pytest.mark.parametrize("name", ["nowhere", "nowhere.yml", "folder/nowhere.yml", "./nowhere.safetensors"])
def test_inspect_says_that_neither_is_there(name: str, here: Path) -> None:
    done = run("inspect", name)
    assert done.exit_code == 2
    assert one_error(done.output) == f"Error: {name}: no such file or directory; check the path"
