"""`rotation-merge doctor` finds each cause that is planted, the likeliest first, and none in a sound merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CHECKPOINTS, run
from plugin_support import EVERYTHING, make, state, twin, write_recipe, write_state
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

Tensors = dict[str, torch.Tensor]


def recipe(*models: Path, method: str = "linear", **keys: Any) -> dict[str, Any]:
    share = 1 / len(models)
    listed = [{"model": str(model), "parameters": {"weight": share}} for model in models]
    return {"merge_method": method, "models": listed, "dtype": "float32", **keys}


def words(folder: Path, turn: int = 0) -> None:
    """A tokenizer of 40 words, their ids turned around."""
    vocabulary = {f"w{i}": (i + turn) % 40 for i in range(40)}
    inner = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0").save_pretrained(folder)


def reconfigured(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An anchor, a fine-tune of it, the fine-tune in other coordinates, and a stranger."""
    folder = tmp_path_factory.mktemp("doctor")
    anchor = make("llama", folder / "anchor")
    draw = torch.Generator().manual_seed(5)
    changed = {n: t + 0.01 * torch.randn(t.shape, generator=draw) for n, t in state(anchor).items()}
    tuned = write_state(changed, anchor, folder / "tuned")
    moved = twin(tuned, folder / "moved", **EVERYTHING, residual="permutation")
    return {"anchor": anchor, "tuned": tuned, "moved": moved, "stranger": make("llama", folder / "stranger", seed=9)}


def copy(model: Path, where: Path, **changes: torch.Tensor) -> Path:
    return write_state({**state(model), **changes}, model, where)


def merge(first: Path, second: Path, where: Path, scale: float = 0.5, dtype: torch.dtype = torch.float32) -> Path:
    """A plain merge as mergekit leaves it: weights, and the recipe beside them."""
    a, b = state(first), state(second)
    out = write_state({name: (scale * (a[name] + b[name])).to(dtype) for name in a}, first, where)
    write_recipe(recipe(first, second), out / "mergekit_config.yml")
    return out


def causes(patient: Path | dict[str, Any], tmp_path: Path, *parents: Path) -> dict[str, dict[str, Any]]:
    """What is found, by name, in its order; JSON, words and exit code agree."""
    path = patient if isinstance(patient, Path) else write_recipe(patient, tmp_path / "patient.yml")
    done = run("doctor", path, *parents, "--json")
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)["causes"]
    likelihoods = [cause["likelihood"] for cause in found]
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert done.exit_code == int(any(value >= 0.5 for value in likelihoods))
    assert all(cause["what"] and cause["where"] and cause["remedy"] for cause in found)
    return {cause["name"]: cause for cause in reversed(found)}


@pytest.mark.slow
def test_a_sound_merge_has_none(models: dict[str, Path], tmp_path: Path):
    assert not causes(recipe(models["anchor"], models["tuned"]), tmp_path)
    merged = merge(models["anchor"], models["tuned"], tmp_path / "merged")
    done = run("doctor", merged)
    assert done.exit_code == 0
    assert "No cause of a bad merge" in done.output


@pytest.mark.slow
def test_other_coordinates_and_what_brings_them_together(models: dict[str, Path], tmp_path: Path):
    pair = models["anchor"], models["moved"]
    found = causes(recipe(*pair), tmp_path)
    assert next(iter(reversed(found))) == "other coordinates"
    assert "preset: far" in found["other coordinates"]["remedy"]
    assert "vanished variance" in found
    base = {"merge_method": "rotation_merge", "base_model": str(models["anchor"])}
    whole = {**recipe(*pair), **base, "parameters": {"preset": "far"}}
    assert not causes(whole, tmp_path)
    too_little = {**whole, "parameters": {"preset": "near"}}
    assert "other coordinates" in causes(too_little, tmp_path)
    merged = merge(*pair, tmp_path / "merged")
    found = causes(merged, tmp_path)
    assert {"other coordinates", "vanished variance"} <= set(found)
    assert found["other coordinates"]["word"] == "certain"
    (merged / "mergekit_config.yml").unlink()
    alone = run("doctor", merged)
    assert "Name the parents after it" in alone.output
    assert "other coordinates" in causes(merged, tmp_path, *pair)
    assert not causes(Path(f"{CHECKPOINTS}/llama-0+{CHECKPOINTS}/llama-0-lora-english"), tmp_path)


@pytest.mark.slow
def test_separate_training(models: dict[str, Path], tmp_path: Path):
    found = causes(recipe(models["anchor"], models["stranger"]), tmp_path)
    assert found["separate training"]["where"] == str(models["stranger"])
    assert "samples" in found["separate training"]["remedy"]


def test_tokens_at_other_ids(models: dict[str, Path], tmp_path: Path):
    ours, theirs = (copy(models[name], tmp_path / name) for name in ("anchor", "tuned"))
    words(ours)
    words(theirs, turn=3)
    found = causes(recipe(ours, theirs), tmp_path)
    assert "40 of 40 tokens" in found["tokenizer order"]["what"]
    assert not causes(recipe(ours, theirs, tokenizer={"source": "base"}), tmp_path)


def test_another_rope_base(models: dict[str, Path], tmp_path: Path):
    rope = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "eos_token_id": 7}
    other = reconfigured(copy(models["tuned"], tmp_path / "other"), **rope)
    found = causes(recipe(models["anchor"], other), tmp_path)
    assert "1000000.0" in found["RoPE base"]["what"]
    assert list(found) == ["end of text", "RoPE base"]


def test_a_tied_head(models: dict[str, Path], tmp_path: Path):
    tied = make("llama", tmp_path / "tied", tie_word_embeddings=True)
    assert "tied head" in causes(recipe(tied, models["anchor"]), tmp_path)
    ignored = reconfigured(copy(models["anchor"], tmp_path / "ignored"), tie_word_embeddings=True)
    found = causes(ignored, tmp_path)
    assert found["tied head"]["likelihood"] > 0.9
    assert "lm_head.weight" in found["tied head"]["what"]


def test_nan_and_what_float16_cannot_hold(models: dict[str, Path], tmp_path: Path):
    name, half = "model.layers.1.mlp.down_proj.weight", torch.float16
    weight = state(models["anchor"])[name]
    nan = copy(models["anchor"], tmp_path / "nan", **{name: weight.clone().index_fill(0, torch.tensor([0]), torch.nan)})
    assert name in causes(nan, tmp_path)["NaN"]["what"]
    huge = copy(models["anchor"], tmp_path / "huge", **{name: 1e6 * weight})
    found = causes(recipe(models["anchor"], huge, dtype="float16"), tmp_path)
    assert "65504" in found["dtype overflow"]["what"]
    assert "dtype overflow" not in causes(recipe(models["anchor"], huge, dtype="bfloat16"), tmp_path)
    loud = {n: t.to(half) for n, t in {**state(models["anchor"]), name: 3e4 * weight}.items()}
    found = causes(write_state(loud, models["anchor"], tmp_path / "loud"), tmp_path)
    assert "states reach" in found["dtype overflow"]["what"]


@pytest.mark.slow
def test_layers_that_shrink_and_weights_that_grow(models: dict[str, Path], tmp_path: Path):
    found = causes(merge(models["anchor"], models["stranger"], tmp_path / "faded"), tmp_path)
    assert found["vanished variance"]["where"].startswith("model.layers.")
    assert "fade" in found["vanished variance"]["what"] or "shrink" in found["vanished variance"]["what"]
    grown = merge(models["anchor"], models["tuned"], tmp_path / "grown", scale=1.0)
    assert "2.00" in causes(grown, tmp_path)["scale"]["what"]
    heavy = recipe(models["anchor"], models["tuned"], parameters={"normalize": False})
    heavy["models"][0]["parameters"]["weight"] = 1.0
    assert "add up to 1.5" in causes(heavy, tmp_path)["scale"]["what"]


def test_models_that_do_not_fit_and_those_that_are_not_here(models: dict[str, Path], tmp_path: Path):
    small = make("llama", tmp_path / "small", intermediate_size=32)
    assert "do not fit" in causes(recipe(models["anchor"], small), tmp_path)
    done = run("doctor", write_recipe(recipe(models["anchor"], Path("no/such")), tmp_path / "absent.yml"))
    assert done.exit_code == 0
    assert "no/such cannot be found" in done.output
    layers = [{"sources": [{"model": str(models["anchor"]), "layer_range": [0, 2]}]}] * 2
    stacked = {"merge_method": "passthrough", "slices": layers, "dtype": "float32"}
    assert "stacked layers" in causes(stacked, tmp_path)
    kept = {name: tensor for name, tensor in state(models["anchor"]).items() if "layers.1.mlp.up" not in name}
    broken = write_state(kept, models["anchor"], tmp_path / "broken")
    assert "up_proj" in causes(broken, tmp_path)["missing tensors"]["what"]


@pytest.mark.parametrize(
    ("text", "said"),
    [("models: []\n", "names no merge_method"), ("merge_method: [\n", "not valid YAML"), (None, "no such file")],
)
def test_bad_input_is_one_line(text: str | None, said: str, tmp_path: Path):
    path = tmp_path / "recipe.yml"
    if text is not None:
        path.write_text(text)
    done = run("doctor", path)
    assert done.exit_code == 2
    assert said in done.output
