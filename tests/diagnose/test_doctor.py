"""`rotation-merge doctor` finds each cause that is planted, the likeliest first, and none in a sound merge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CHECKPOINTS, output_of, run
from plugin_support import EVERYTHING, make, state, twin, write_recipe, write_state
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rotation_merge.diagnose.doctor import open_case

Models = dict[str, Path]
Recipe = dict[str, Any]
DOWN = "model.layers.1.mlp.down_proj.weight"


def recipe(*models: Path | str, **keys: Any) -> Recipe:
    listed = [{"model": str(model), "parameters": {"weight": 1 / len(models)}} for model in models]
    return {"merge_method": "linear", "models": listed, "dtype": "float32", **keys}


def ours(models: Models, preset: str) -> Recipe:
    base = {"merge_method": "rotation_merge", "base_model": str(models["anchor"])}
    return {**recipe(models["anchor"], models["moved"]), **base, "parameters": {"preset": preset}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An anchor, a fine-tune of it, the fine-tune in other coordinates, and a stranger."""
    folder = tmp_path_factory.mktemp("doctor")
    anchor, draw = make("llama", folder / "anchor"), torch.Generator().manual_seed(5)
    changed = {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in state(anchor).items()}
    tuned = write_state(changed, anchor, folder / "tuned")
    moved = twin(tuned, folder / "moved", **EVERYTHING, residual="permutation")
    return {"anchor": anchor, "tuned": tuned, "moved": moved, "stranger": make("llama", folder / "stranger", seed=9)}


def changed(model: Path, where: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    out = write_state({**state(model), **tensors}, model, where)
    path = out / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(config or {})}))
    return out


def merged(first: Path, second: Path, where: Path, scale: float = 0.5) -> Path:
    """A plain merge as mergekit leaves it: weights, and the recipe beside them."""
    b = state(second)
    out = write_state({name: scale * (tensor + b[name]) for name, tensor in state(first).items()}, first, where)
    write_recipe(recipe(first, second), out / "mergekit_config.yml")
    return out


def causes(patient: Path | Recipe, tmp_path: Path, *parents: Path) -> dict[str, dict[str, Any]]:
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


def worded(folder: Path, turn: int) -> Path:
    """With a tokenizer of 40 words, their ids turned around."""
    inner = Tokenizer(WordLevel({f"w{i}": (i + turn) % 40 for i in range(40)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)
    return folder


def of_tokens(m: Models, out: Path, **keys: Any) -> Recipe:
    return recipe(
        *(worded(changed(m[name], out / name), 3 * turn) for turn, name in enumerate(("anchor", "tuned"))), **keys
    )


def of_weights(m: Models, out: Path, values: torch.Tensor, dtype: str) -> Recipe:
    return recipe(m["anchor"], changed(m["anchor"], out / "odd", **{DOWN: values}), dtype=dtype)


def of_large_states(m: Models, out: Path) -> Path:
    halves = {n: t.half() for n, t in {**state(m["anchor"]), DOWN: 3e4 * state(m["anchor"])[DOWN]}.items()}
    return write_state(halves, m["anchor"], out / "loud")


def heavy(m: Models, out: Path) -> Recipe:
    document = recipe(m["anchor"], m["tuned"], parameters={"normalize": False})
    document["models"][0]["parameters"]["weight"] = 1.0
    return document


def huge(m: Models) -> torch.Tensor:
    return 1e6 * state(m["anchor"])[DOWN]


def rope(m: Models, out: Path) -> Recipe:
    config = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "eos_token_id": 7}
    return recipe(m["anchor"], changed(m["tuned"], out / "other", config))


def stacked(m: Models, out: Path) -> Recipe:
    layers = [{"sources": [{"model": str(m["anchor"]), "layer_range": [0, 2]}]}] * 2
    return {"merge_method": "passthrough", "slices": layers, "dtype": "float32"}


def without_a_tensor(m: Models, out: Path) -> Path:
    kept = {name: tensor for name, tensor in state(m["anchor"]).items() if "layers.1.mlp.up" not in name}
    return write_state(kept, m["anchor"], out / "broken")


CAUSES: dict[str, tuple[Callable[[Models, Path], Path | Recipe], dict[str, str]]] = {
    "a sound recipe": (lambda m, out: recipe(m["anchor"], m["tuned"]), {}),
    "a sound merge": (lambda m, out: merged(m["anchor"], m["tuned"], out / "merged"), {}),
    "an adapter": (lambda m, out: Path(f"{CHECKPOINTS}/llama-0+{CHECKPOINTS}/llama-0-lora-english"), {}),
    "other coordinates": (
        lambda m, out: recipe(m["anchor"], m["moved"]),
        {"other coordinates": "preset: far", "vanished variance": "fade"},
    ),
    "aligned": (lambda m, out: ours(m, "far"), {}),
    "aligned too little": (lambda m, out: ours(m, "near"), {"other coordinates": "preset: far"}),
    "a merge of other coordinates": (
        lambda m, out: merged(m["anchor"], m["moved"], out / "merged"),
        {"other coordinates": "certain", "vanished variance": "model.layers."},
    ),
    "separate training": (
        lambda m, out: recipe(m["anchor"], m["stranger"]),
        {"separate training": "samples", "vanished variance": ""},
    ),
    "a merge of strangers": (
        lambda m, out: merged(m["anchor"], m["stranger"], out / "faded"),
        {"separate training": "stranger", "vanished variance": "fade"},
    ),
    "tokens at other ids": (of_tokens, {"tokenizer order": "40 of 40 tokens"}),
    "tokens that a recipe matches": (lambda m, out: of_tokens(m, out, tokenizer={"source": "base"}), {}),
    "another RoPE base": (rope, {"RoPE base": "1000000.0", "end of text": "7"}),
    "one tied head": (
        lambda m, out: recipe(make("llama", out / "tied", tie_word_embeddings=True), m["anchor"]),
        {"tied head": "untie", "config": ""},
    ),
    "a head that is ignored": (
        lambda m, out: changed(m["anchor"], out / "ignored", {"tie_word_embeddings": True}),
        {"tied head": "lm_head.weight", "tied head stored": ""},
    ),
    "NaN": (
        lambda m, out: changed(
            m["anchor"], out / "nan", **{DOWN: torch.full_like(state(m["anchor"])[DOWN], torch.nan)}
        ),
        {"NaN": DOWN},
    ),
    "numbers beyond float16": (lambda m, out: of_weights(m, out, huge(m), "float16"), {"dtype overflow": "65504"}),
    "numbers within bfloat16": (lambda m, out: of_weights(m, out, huge(m), "bfloat16"), {}),
    "states beyond float16": (of_large_states, {"dtype overflow": "states reach", "dtype": ""}),
    "weights that grow": (lambda m, out: merged(m["anchor"], m["tuned"], out / "grown", 1.0), {"scale": "2.00"}),
    "weights that add up to more": (heavy, {"scale": "add up to 1.5"}),
    "another size": (
        lambda m, out: recipe(m["anchor"], make("llama", out / "small", intermediate_size=32)),
        {"do not fit": ""},
    ),
    "layers on layers": (stacked, {"stacked layers": "training"}),
    "a tensor that is missing": (without_a_tensor, {"missing tensors": "up_proj"}),
}
SLOW = {
    "separate training",
    "a merge of strangers",
    "other coordinates",
    "aligned",
    "aligned too little",
    "a merge of other coordinates",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CAUSES])
def test_causes(name: str, models: Models, tmp_path: Path) -> None:
    """These and no others, each with words that name it."""
    patient, expected = CAUSES[name]
    listed = causes(patient(models, tmp_path), tmp_path)
    assert set(listed) == set(expected), listed
    for cause, words in expected.items():
        assert words in str(listed[cause]), listed[cause]


def test_parents_that_are_not_known_or_not_here(models: Models, tmp_path: Path) -> None:
    alone = merged(models["anchor"], models["tuned"], tmp_path / "merged")
    assert "No cause of a bad merge" in run("doctor", alone).output
    (alone / "mergekit_config.yml").unlink()
    assert "Name the parents after it" in run("doctor", alone).output
    assert not causes(alone, tmp_path, models["anchor"], models["tuned"])
    assert "no/such cannot be found" in output_of(
        "doctor", write_recipe(recipe(models["anchor"], "no/such"), tmp_path / "absent.yml")
    )


def test_a_parent_by_two_paths_is_one_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The recipe names it by its whole path, the user by a short one."""
    pair = [str(CHECKPOINTS / name) for name in ("llama-0", "llama-1")]
    path = write_recipe(recipe(*pair), tmp_path / "recipe.yml")
    monkeypatch.chdir(CHECKPOINTS)
    assert open_case(str(path), ["llama-0"]).parents == ("llama-0", pair[1])
