"""`rotation-merge doctor` finds each cause that is planted, the likeliest first, and none in a sound merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import noisy
from cli_support import CHECKPOINTS, output_of, run
from plugin_support import EVERYTHING, make, state, twin, with_tokenizer, write_recipe, write_state
from spoiling import config

from rotation_merge.diagnose.doctor import open_case

Models = dict[str, Path]
DOWN = "model.layers.1.mlp.down_proj.weight"


def recipe(*models: Path | str, weight: float = 0.5, **keys: Any) -> dict[str, Any]:
    """A linear merge; all models but the last have this weight."""
    listed = [{"model": str(model), "parameters": {"weight": weight}} for model in models]
    listed[-1]["parameters"] = {"weight": 0.5}
    return {"merge_method": "linear", "models": listed, "dtype": "float32", **keys}


def changed(model: Path, where: Path, entries: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    out = write_state({**state(model), **tensors}, model, where)
    config(out, **(entries or {}))()
    return out


def merged(first: Path, second: Path, where: Path) -> Path:
    """A plain merge as mergekit leaves it: weights, and the recipe beside them."""
    b = state(second)
    out = write_state({name: (tensor + b[name]) / 2 for name, tensor in state(first).items()}, first, where)
    write_recipe(recipe(first, second), out / "mergekit_config.yml")
    return out


def worded(folder: Path, turn: int) -> Path:
    """With a tokenizer of 40 words, their ids turned around."""
    with_tokenizer([f"w{(i - turn) % 40}" for i in range(40)], folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An anchor, a fine-tune of it, the fine-tune in other coordinates, a stranger; odd ones, and plain merges."""
    folder = tmp_path_factory.mktemp("doctor")
    anchor, stranger = make("llama", folder / "anchor"), make("llama", folder / "stranger", seed=9)
    tuned = noisy(anchor, folder / "tuned", 0.01, seed=5)
    moved, down = twin(tuned, folder / "moved", **EVERYTHING, residual="permutation"), state(anchor)[DOWN]
    halves = {name: tensor.half() for name, tensor in {**state(anchor), DOWN: 3e4 * down}.items()}
    rope = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "eos_token_id": 7}
    odd = {
        "worded": worded(changed(anchor, folder / "worded"), 0),
        "reworded": worded(changed(tuned, folder / "reworded"), 3),
        "rope": changed(tuned, folder / "rope", rope),
        "tied": make("llama", folder / "tied", tie_word_embeddings=True),
        "ignored": changed(anchor, folder / "ignored", {"tie_word_embeddings": True}),
        "nan": changed(anchor, folder / "nan", **{DOWN: torch.full_like(down, torch.nan)}),
        "huge": changed(anchor, folder / "huge", **{DOWN: 1e6 * down}),
        "loud": write_state(halves, anchor, folder / "loud"),
        "small": make("llama", folder / "small", intermediate_size=32),
        "adapter": Path(f"{CHECKPOINTS}/llama-0+{CHECKPOINTS}/llama-0-lora-english"),
    }
    plain = {f"{x.name} merged": merged(anchor, x, folder / f"{x.name}-merged") for x in (tuned, moved, stranger)}
    return {"anchor": anchor, "tuned": tuned, "moved": moved, "stranger": stranger, **odd, **plain}


def causes(patient: Path | dict[str, Any], tmp_path: Path, *parents: Path) -> dict[str, dict[str, Any]]:
    """What is found, by name, the likeliest first; JSON, words and exit code agree."""
    path = patient if isinstance(patient, Path) else write_recipe(patient, tmp_path / "patient.yml")
    done = run("doctor", path, *parents, "--json")
    assert done.exit_code in (0, 1), done.output
    listed = json.loads(done.stdout)["causes"]
    likelihoods = [cause["likelihood"] for cause in listed]
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert done.exit_code == int(any(value >= 0.5 for value in likelihoods))
    assert all(cause["what"] and cause["where"] and cause["remedy"] for cause in listed)
    return {cause["name"]: cause for cause in listed}


CAUSES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "a sound recipe": ("anchor, tuned", {}, {}),
    "a sound merge": ("tuned merged", {}, {}),
    "an adapter": ("adapter", {}, {}),
    "other coordinates": (
        "anchor, moved",
        {},
        {"other coordinates": "preset: far", "vanished variance": "fade"},
    ),
    "aligned": ("anchor, moved", {"parameters": {"preset": "far"}}, {}),
    "aligned too little": ("anchor, moved", {"parameters": {"preset": "near"}}, {"other coordinates": "preset: far"}),
    "a merge of other coordinates": (
        "moved merged",
        {},
        {"other coordinates": "certain", "vanished variance": "model.layers."},
    ),
    "separate training": ("anchor, stranger", {}, {"separate training": "samples", "vanished variance": ""}),
    "a merge of strangers": ("stranger merged", {}, {"separate training": "stranger", "vanished variance": "fade"}),
    "tokens at other ids": ("worded, reworded", {}, {"tokenizer order": "40 of 40 tokens"}),
    "tokens that a recipe matches": ("worded, reworded", {"tokenizer": {"source": "base"}}, {}),
    "another RoPE base": ("anchor, rope", {}, {"RoPE base": "1000000.0", "end of text": "7"}),
    "one tied head": ("tied, anchor", {}, {"tied head": "untie", "config": ""}),
    "a head that is ignored": ("ignored", {}, {"tied head": "set 'tie_word_embeddings': false"}),
    "NaN": ("nan", {}, {"NaN": DOWN}),
    "numbers beyond float16": ("anchor, huge", {"dtype": "float16"}, {"dtype overflow": "65504"}),
    "numbers within bfloat16": ("anchor, huge", {"dtype": "bfloat16"}, {}),
    "states beyond float16": ("loud", {}, {"dtype overflow": "states reach", "dtype": ""}),
    "weights that add up to more": (
        "anchor, tuned",
        {"weight": 1.0, "parameters": {"normalize": False}},
        {"scale": "add up to 1.5"},
    ),
    "another size": ("anchor, small", {}, {"do not fit": ""}),
}
"""Models (of a recipe where there are several), what the recipe says more, and the causes with words of each."""
SLOW = (
    *("separate training", "a merge of strangers", "other coordinates", "a merge of other coordinates"),
    *("aligned", "aligned too little"),
)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CAUSES])
def test_causes(name: str, models: Models, tmp_path: Path) -> None:
    """These and no others, each with words that name it."""
    names, keys, expected = CAUSES[name]
    places = [models[name] for name in names.split(", ")]
    if "preset" in keys.get("parameters", {}):
        keys = {**keys, "merge_method": "rotation_merge", "base_model": str(places[0])}
    patient = places[0] if len(places) == 1 else recipe(*places, **keys)
    listed = causes(patient, tmp_path)
    assert set(listed) == set(expected), listed
    for cause, words in expected.items():
        assert words in str(listed[cause]), listed[cause]


def test_parents_that_are_not_known_or_not_here(models: Models, tmp_path: Path) -> None:
    alone = merged(models["anchor"], models["tuned"], tmp_path / "merged")
    assert "No cause of a bad merge" in run("doctor", alone).output
    (alone / "mergekit_config.yml").unlink()
    assert "Name the parents after it" in run("doctor", alone).output
    assert not causes(alone, tmp_path, models["anchor"], models["tuned"])
    absent = write_recipe(recipe(models["anchor"], "no/such"), tmp_path / "absent.yml")
    assert "no/such cannot be found" in output_of("doctor", absent)


def test_a_parent_by_two_paths_is_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The recipe names it by its whole path, the user by a short one."""
    pair = [str(CHECKPOINTS / name) for name in ("llama-0", "llama-1")]
    path = write_recipe(recipe(*pair), tmp_path / "recipe.yml")
    monkeypatch.chdir(CHECKPOINTS)
    assert open_case(str(path), ["llama-0"]).parents == ("llama-0", pair[1])
