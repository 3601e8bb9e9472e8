"""A recipe of models on the hub is checked before they are downloaded: by few requests, with all faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import output_of, run
from faults_support import FAULTS, whole
from hub_support import Hub
from huggingface_hub import constants
from mergekit.io.tasks import LoaderCache
from plugin_support import recipe_for, write_recipe
from spoiling import config

from rotation_merge.diagnose.sources import absent_models
from rotation_merge.mergekit_plugin.document import documents

NAMES = ("org/one", "org/two", "org/three")
SMALL, SHARD = 10, 1
"""Requests for a model, and for each of its shards, at most."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> dict[str, Path]:
    """Three whole models of one family, in two shards each, as folders and on the hub."""
    folder = tmp_path_factory.mktemp("published")
    places = {name: whole("llama", folder / name) for name in NAMES}
    for name, place in places.items():
        (place / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
        hub.publish(name, place)
    return places


def checked(tmp_path: Path, *names: str, options: tuple[str, ...] = (), **keys: Any) -> dict[str, Any]:
    recipe = recipe_for("linear", *map(Path, names)) | keys
    return json.loads(run("check", write_recipe(recipe, tmp_path / "recipe.yml"), *options, "--json").stdout)


@pytest.mark.slow
def test_few_requests_and_no_weights(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    """Nothing stays behind, in the cache or among the open models: what is downloaded later is read as it is."""
    cache = constants.HF_HUB_CACHE
    home.asked.clear()
    facts = checked(tmp_path, *NAMES)
    assert facts["ok"], facts
    asked = [line for line in home.asked if any(name in line for name in NAMES)]
    assert len(asked) <= len(NAMES) * (SMALL + 2 * SHARD), asked
    assert not any("tokenizer" in line for line in asked)
    assert facts["faults"] == []  # values are not known, and nothing is said of them
    for name, place in published.items():
        size = sum(path.stat().st_size for path in place.iterdir() if path.suffix != ".md")
        assert facts["needs"]["downloads"][name] == size
    assert set(facts["licences"].values()) == {"apache-2.0"}
    assert facts["needs"]["memory"] > 0
    text = output_of("check", tmp_path / "recipe.yml")
    assert all(words in text for words in ("ready to run", "need weights"))
    assert (cache, False) == (constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE)
    assert not list(Path(cache).glob("models--*"))
    assert not [model for model in LoaderCache.loaders if str(model.model.path) in NAMES]


@pytest.mark.slow
def test_faults_are_found_before_the_download(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    """In config and headers, between models, in the recipe; names that the hub does not know."""
    wrong, lacking, other = (whole(family, tmp_path / str(i)) for i, family in enumerate(("llama", "llama", "qwen3")))
    config(wrong, vocab_size=97)()
    FAULTS["a tensor left out"].plant(lacking)
    for name, place in {"org/wrong": wrong, "org/other": other, "org/lacking": lacking}.items():
        home.publish(name, place)
    nowhere = "its headers cannot be fetched"
    expected = {"org/wrong": "wrong shape", "org/other": "qwen3", "org/lacking": "missing", "org/nowhere": nowhere}
    for name, words in expected.items():
        facts = checked(tmp_path, NAMES[0], name)
        assert not facts["ok"], name
        assert any(words in f"{fault}" for fault in facts["faults"]), (words, facts["faults"])
    assert not checked(tmp_path, *NAMES, wieght=1)["ok"]


def test_offline_as_ever(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    """And headers are asked of the hub for no file."""
    home.asked.clear()
    facts = checked(tmp_path, *NAMES, options=("--offline",))
    assert facts["ok"]
    assert not [line for line in home.asked if "org/" in line]
    assert any("not in the hub's cache" in fault["what"] for fault in facts["faults"])
    text = "merge_method: linear\nbase_model: org/b-GGUF:b.gguf\nmodels:\n- model: org/c\n"
    assert absent_models(documents(text)) == ["org/c"]
