"""Delegates that merge task vectors, in recipes; their rules: test_task_vector_rules.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import run
from plugin_support import merged, mergekit_yaml, one_error, write_adapter
from residual_support import Checkpoint, checkpoint, twin

NAMES = ("wudi", "tsv", "iso")


def tuned(base: Checkpoint, where: Path, seed: int, noise: float = 0.01) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    moved = {name: x + noise * torch.randn(x.shape, generator=generator) for name, x in base.state.items()}
    return base.write(moved, where)


def recipe(base: Path, *models: Path | str, dtype: str | None = "float32", **parameters: Any) -> dict[str, Any]:
    return {
        "merge_method": "rotation_merge",
        "base_model": str(base),
        "models": [{"model": str(model)} for model in models],
        "parameters": {"attention": "none", "ffn": "none", "scaling": False, **parameters},
        "dtype": dtype,
    }


@pytest.fixture
def three(tmp_path: Path) -> list[Checkpoint]:
    """A base and two fine-tunes of it."""
    base = checkpoint("llama", "llama", tmp_path / "base")
    return [base, tuned(base, tmp_path / "one", 1), tuned(base, tmp_path / "two", 2)]


def test_equal_models_stay_bit_for_bit(three: list[Checkpoint], tmp_path: Path) -> None:
    base = three[0]
    copies = [base.write(base.state, tmp_path / name) for name in ("copy", "another")]
    result = merged(recipe(base.path, *(copy.path for copy in copies), delegate="wudi"), tmp_path / "out")
    assert all(torch.equal(result[name], tensor) for name, tensor in base.state.items())


@pytest.mark.slow
def test_a_twins_fine_tune_is_merged_as_if_made_in_the_anchors_coordinates(tmp_path: Path) -> None:
    base = checkpoint("llama", "llama", tmp_path / "base")
    models = [tuned(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    moved = twin(models[1], tmp_path / "moved", "permutation", attention="rotation")
    plain = merged(recipe(base.path, *(m.path for m in models), delegate="wudi"), tmp_path / "plain")
    asked = {"attention": "rotation", "ffn": "permutation", "heads": "permutation", "residual": "permutation"}
    aligned = recipe(base.path, models[0].path, moved.path, delegate="wudi", scaling=True, **asked)
    found = merged(aligned, tmp_path / "aligned")
    name = "model.layers.0.mlp.up_proj.weight"
    change = (plain[name] - base.state[name]).norm()
    assert float((found[name] - plain[name]).norm() / change) < 0.2  # the match is of noisy weights


def test_storage_is_rounded_once_and_weights_count(three: list[Checkpoint], tmp_path: Path) -> None:
    base, one, two = (c.path for c in three)
    entry = recipe(base, one, two, dtype="bfloat16", delegate="wudi")
    entry["models"][1]["parameters"] = {"weight": 0.0}
    result = merged(entry, tmp_path / "out")
    state = three[1].state
    for name, tensor in result.items():
        torch.testing.assert_close(tensor, state[name].bfloat16(), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_result_is_rounded(name: str, three: list[Checkpoint], tmp_path: Path) -> None:
    """Of changes that are rounded before they are merged, some entries vanish and others double."""
    base, one, two = (c.path for c in three)
    exact = merged(recipe(base, one, two, delegate=name), tmp_path / "exact")
    rounded = merged(recipe(base, one, two, dtype="bfloat16", delegate=name), tmp_path / "rounded")
    for tensor, values in exact.items():
        assert torch.equal(rounded[tensor], values.bfloat16()), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_adapters_of_a_base_in_bfloat16_are_merged_unrounded(name: str, tmp_path: Path) -> None:
    whole = checkpoint("llama", "llama", tmp_path / "whole")
    base = whole.write({key: x.bfloat16() for key, x in whole.state.items()}, tmp_path / "base")
    maps = [key.removesuffix(".weight") for key, x in base.state.items() if x.ndim == 2 and "layers" in key]
    models = []
    for seed in (1, 2):
        generator, factors = torch.Generator().manual_seed(seed), {}
        for key in maps:
            outputs, inputs = base.state[f"{key}.weight"].shape
            factors[f"base_model.model.{key}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
            factors[f"base_model.model.{key}.lora_B.weight"] = 1e-3 * torch.randn(outputs, 2, generator=generator)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": str(base.path)}
        models.append(f"{base.path}+{write_adapter(config, factors, tmp_path / f'adapter-{seed}')}")
    exact = merged(recipe(base.path, *models, delegate=name), tmp_path / "exact")
    for dtype in ("bfloat16", None):
        asked = recipe(base.path, *models, dtype=dtype, delegate=name)
        rounded = merged({key: x for key, x in asked.items() if x is not None}, tmp_path / str(dtype))
        for tensor, values in exact.items():
            assert torch.equal(rounded[tensor], values.bfloat16()), tensor


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"lengths": "evn"}, "'lengths' is 'evn'.*auto, keep"),
        ({"ridge": -1}, "'ridge' is -1"),
        ({"sides": "two"}, "'sides' is 'two'.*one, both"),
        ({"others": "median"}, "'others' is 'median'"),
    ],
)
def test_bad_values_are_one_line(
    parameters: dict[str, Any], words: str, three: list[Checkpoint], tmp_path: Path
) -> None:
    base, one, two = (c.path for c in three)
    result = mergekit_yaml(recipe(base, one, two, delegate="wudi", **parameters), tmp_path / "out")
    assert result.exit_code == 2
    import re

    assert re.search(words, one_error(result.output))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("delegate", "name"), [("wudi", "lambda"), ("iso", "others"), ("ties", "lambda")])
def test_parameters_of_the_whole_merge_under_one_model_are_one_line(
    delegate: str, name: str, three: list[Checkpoint], tmp_path: Path
) -> None:
    """Where nothing reads them."""
    asked = recipe(three[0].path, three[1].path, three[2].path, delegate=delegate, weight=1.0, density=0.5)
    asked["parameters"] = {k: v for k, v in asked["parameters"].items() if delegate == "ties" or k != "density"}
    asked["models"][1]["parameters"] = {name: 0.5}
    result = mergekit_yaml(asked, tmp_path / "out")
    assert result.exit_code == 2
    assert f"'{name}' of delegate {delegate} has no effect under one model" in one_error(result.output)
    assert "move it under the recipe's 'parameters'" in result.output


def test_the_base_is_required_and_alone_no_merge(three: list[Checkpoint], tmp_path: Path) -> None:
    base = three[0].path
    result = mergekit_yaml(recipe(base, base, delegate="tsv"), tmp_path / "out")
    assert result.exit_code == 2
    assert "delegate tsv" in one_error(result.output)


@pytest.mark.parametrize("name", ["wudi", "linear"])
@pytest.mark.parametrize("expert", [0, 1])
def test_single_experts_may_be_excluded(expert: int, name: str, tmp_path: Path) -> None:
    base = checkpoint("mixtral", "untied", tmp_path / "base")
    models = [tuned(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    asked = recipe(base.path, *(m.path for m in models), delegate=name, exclude=f"experts.{expert}.")
    if name == "linear":
        asked["models"] = [{"model": str(m.path), "parameters": {"weight": 0.5}} for m in (base, *models)]
    start, result = base.state, merged(asked, tmp_path / "out")
    kept = {tensor for tensor in start if ".experts." in tensor and torch.equal(result[tensor], start[tensor])}
    assert kept == {tensor for tensor in start if f".experts.{expert}." in tensor}


def test_delegates_are_listed() -> None:
    result = run("inspect", "--methods")
    assert all(name in result.output for name in NAMES)


def written(recipe: dict[str, Any], path: Path) -> str:
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


@pytest.mark.parametrize(("name", "words"), [("wudi", "share in the mean"), ("ties", "'weight'")])
def test_check_says_how_long_the_changes_are(name: str, words: str, tmp_path: Path) -> None:
    base = checkpoint("llama", "llama", tmp_path / "base")
    short, long = tuned(base, tmp_path / "short", 1, 0.01), tuned(base, tmp_path / "long", 2, 0.05)
    path = written(recipe(base.path, short.path, long.path, delegate=name, weight=1.0), tmp_path / "r.yml")
    found = json.loads(run("check", path, "--json").stdout)["changes"]
    assert found["ratio"] == pytest.approx(5, rel=0.1)
    assert found["lengths"][str(long.path)] == pytest.approx(5 * found["lengths"][str(short.path)], rel=0.1)
    assert words in run("check", path).output
    linear = written(recipe(base.path, short.path, long.path, delegate="linear", weight=0.5), tmp_path / "l.yml")
    assert "changes" not in json.loads(run("check", linear, "--json").stdout)


def test_inspect_says_what_the_averaging_costs(three: list[Checkpoint], tmp_path: Path) -> None:
    """More with more models; nothing of a delegate that merges no changes."""
    base, one, two = (c.path for c in three)
    third = tuned(three[0], tmp_path / "third", 3).path

    def cost(*models: Path, **parameters: Any) -> dict[str, Any]:
        path = written(recipe(base, *models, **parameters), tmp_path / "r.yml")
        result = run("inspect", path, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)[0].get("averaging", {})

    wudi = cost(one, two, delegate="wudi")
    assert wudi["delegate"] == "wudi"
    assert cost(one, two, third, delegate="wudi")["memory"] > wudi["memory"]
    assert not cost(one, two, delegate="linear", weight=0.5)
    path = written(recipe(base, one, two, delegate="tsv"), tmp_path / "r.yml")
    assert "Delegate tsv: " in run("inspect", path).output


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_no_numbers_are_named_in_one_line(name: str, three: list[Checkpoint], tmp_path: Path) -> None:
    base, one, two = three
    spoilt = dict(two.state)
    tensor = "model.layers.0.mlp.up_proj.weight"
    spoilt[tensor] = torch.full_like(spoilt[tensor], float("nan"))
    other = base.write(spoilt, tmp_path / "spoilt")
    result = mergekit_yaml(recipe(base.path, one.path, other.path, delegate=name), tmp_path / "out")
    assert result.exit_code != 0
    assert tensor in one_error(result.stderr)
    assert not (tmp_path / "out").exists()
