"""A recipe of models on the hub is checked before they are downloaded: by few requests, with all faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import run
from faults_support import FAULTS, edit, whole
from hub_support import Hub
from plugin_support import write_recipe

NAMES = ("org/one", "org/two", "org/three")
SMALL, SHARD = 10, 1
"""Requests for a model, and for each of its shards, at most."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> dict[str, Path]:
    """Three whole models of one family, in two shards each, as folders and on the hub."""
    folder = tmp_path_factory.mktemp("published")
    places = {}
    for name in NAMES:
        places[name] = whole("llama", folder / name)
        (places[name] / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
        hub.publish(name, places[name])
    return places


def recipe(tmp_path: Path, *names: str, method: str = "rotation_merge", **keys: Any) -> Path:
    models = [{"model": name, "parameters": {"weight": 1 / len(names)}} for name in names]
    base = {"base_model": names[0], "parameters": {"delegate": "linear"}} if method == "rotation_merge" else {}
    return write_recipe({"merge_method": method, "models": models, **base, **keys}, tmp_path / "recipe.yml")


def checked(path: Path, *options: str) -> dict[str, Any]:
    return json.loads(run("check", path, *options, "--json").stdout)


@pytest.mark.slow
def test_few_requests_and_no_weights(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    home.asked.clear()
    home.sent = 0
    found = checked(recipe(tmp_path, *NAMES))
    assert found["ok"], found
    asked = [line for line in home.asked if any(name in line for name in NAMES)]
    assert len(asked) <= len(NAMES) * (SMALL + 2 * SHARD), asked
    assert not any("tokenizer" in line for line in asked)
    assert set(found["needs"]["downloads"]) == set(NAMES)
    sizes = {
        name: sum(path.stat().st_size for path in place.iterdir() if path.suffix != ".md")
        for name, place in published.items()
    }
    assert found["needs"]["downloads"] == sizes
    assert set(found["licences"].values()) == {"apache-2.0"}
    assert found["needs"]["memory"] > 0
    text = run("check", recipe(tmp_path, *NAMES)).output
    assert "ready to run" in text
    assert "need weights" in text


@pytest.mark.slow
def test_nothing_stays_behind(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    """Neither in the cache nor among the open models: what is downloaded later is read as it is."""
    from huggingface_hub import constants
    from mergekit.io.tasks import LoaderCache

    cache = constants.HF_HUB_CACHE
    checked(recipe(tmp_path, *NAMES))
    assert cache == constants.HF_HUB_CACHE
    assert not constants.HF_HUB_OFFLINE
    assert not list(Path(cache).glob("models--*"))
    assert not [model for model in LoaderCache.loaders if str(model.model.path) in NAMES]


@pytest.mark.slow
def test_faults_are_found_before_the_download(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    """In config and headers, between models, in the recipe; names that the hub does not know."""
    wrong = whole("llama", tmp_path / "wrong")
    edit(wrong, vocab_size=97)
    home.publish("org/wrong", wrong)
    home.publish("org/other", whole("qwen3", tmp_path / "other"))
    lacking = whole("llama", tmp_path / "lacking")
    FAULTS["a tensor left out"].plant(lacking, lacking)
    home.publish("org/lacking", lacking)
    for name, words in {
        "org/wrong": "wrong shape",
        "org/other": "qwen3",
        "org/lacking": "missing",
        "org/nowhere": "its headers cannot be fetched",
    }.items():
        found = checked(recipe(tmp_path, NAMES[0], name))
        assert not found["ok"], name
        assert any(words in f"{fault}" for fault in found["faults"]), (words, found["faults"])
    found = checked(recipe(tmp_path, *NAMES, wieght=1))
    assert not found["ok"]


def test_offline_as_ever(published: dict[str, Path], home: Hub, tmp_path: Path) -> None:
    home.asked.clear()
    found = checked(recipe(tmp_path, *NAMES), "--offline")
    assert found["ok"]
    assert not [line for line in home.asked if "org/" in line]
    assert any("not in the hub's cache" in fault["what"] for fault in found["faults"])
