"""Bases that share their coordinates: work is used as it is, by the command, in recipes and in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import (
    make,
    merged,
    mergekit_yaml,
    one_error,
    recipe_for,
    state,
    twin,
    write_adapter,
    write_recipe,
    write_state,
)
from residual_support import checkpoint
from safetensors.torch import load_file

import rotation_merge as rm

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, its next release (near), one of moved neurons only, a fine-tune and an adapter of the first."""
    folder = tmp_path_factory.mktemp("near")
    old = make("llama", folder / "old")
    draw = torch.Generator().manual_seed(2)

    def changed(by: float, name: str) -> Path:
        tensors = {n: t + by * torch.randn(t.shape, generator=draw) for n, t in state(old).items()}
        return write_state(tensors, old, folder / name)

    found = {"old": old, "new": changed(0.1, "new"), "tuned": changed(0.02, "tuned")}
    found["neurons"] = twin(old, folder / "neurons", attention="none", ffn="permutation", scaling=False)
    module = "base_model.model.model.layers.1.mlp.up_proj"
    factors = {f"{module}.lora_A.weight": torch.randn(2, 32), f"{module}.lora_B.weight": torch.randn(48, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(old)}
    write_adapter(config, factors, folder / "adapter")
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return {**found, "adapter": folder / "adapter", "texts": folder / "texts.jsonl"}


def command(models: dict[str, Path], out: Path, *more: object, work: str = "adapter", **changed: str) -> list[object]:
    given = {"old": "old", "new": "new", **changed}
    return ["carry", models[work], out, "--from", models[given["old"]], "--to", models[given["new"]], *more]


def test_an_adapter_is_carried_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    done = run(*command(models, tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert "nothing was matched" in " ".join(done.output.split())
    before, after = (
        load_file(folder / "adapter_model.safetensors") for folder in (models["adapter"], tmp_path / "out")
    )
    assert all(torch.equal(before[name], factor) for name, factor in after.items())
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models["new"])


def test_what_a_fine_tune_changed_is_added(models: dict[str, Path], tmp_path: Path) -> None:
    (written,) = parsed(*command(models, tmp_path / "out", work="tuned"))["written"]
    assert any("nothing was matched" in line for line in written["lines"])
    assert any(f"delegate: wudi, base_model: {models['old']}, models" in line for line in written["lines"])
    assert_added(state(tmp_path / "out"), models)


def added(models: dict[str, Path]) -> Tensors:
    old, new, tuned = (state(models[name]) for name in ("old", "new", "tuned"))
    return {name: new[name] + tuned[name] - old[name] for name in new}


def assert_added(result: Tensors, models: dict[str, Path]) -> None:
    for name, tensor in added(models).items():
        torch.testing.assert_close(result[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("judged", [True, False])
def test_options_of_matching_and_samples_match(judged: bool, models: dict[str, Path], tmp_path: Path) -> None:
    data = ("--data", models["texts"], "--samples", 32, "--scale", "auto")
    done = run(*command(models, tmp_path / "out", *(data if judged else ("--heads", "permutation"))))
    assert done.exit_code == 0, done.output
    assert "nothing was matched" not in " ".join(done.output.split())
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "map_name", "along"), [("llama", "mlp.up_proj", 1), ("gpt2", "mlp.c_fc", 0)])
@pytest.mark.parametrize("apart", [True, False])
def test_a_merge_of_both_changes_is_tried(name: str, map_name: str, along: int, apart: bool, tmp_path: Path) -> None:
    """By `wudi`: it is plain addition where the changes read from different inputs, and another model where not."""
    old = make(name, tmp_path / "old") if name == "llama" else checkpoint(name, "untied", tmp_path / "old").path
    draw = torch.Generator().manual_seed(2)
    for kept, folder in enumerate(("new", "tuned")):
        tensors = state(old)
        for tensor in (t for n, t in tensors.items() if n.endswith(f"{map_name}.weight")):
            change = 0.3 * torch.randn(tensor.shape, generator=draw)
            half = tensor.shape[along] // 2
            if apart:
                change.narrow(along, kept * half, half).zero_()
            tensor += change
        write_state(tensors, old, tmp_path / folder)
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    models = {folder: tmp_path / folder for folder in ("old", "new", "tuned")}
    data = ("--data", tmp_path / "texts.jsonl", "--samples", 32, "--carry", "refit", "--scale", 1)
    done = run(*command(models, tmp_path / "out", *data, work="tuned"))
    assert done.exit_code == 0, done.output
    lift = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["lift"]
    losses = {**lift["others"], lift["method"]: lift["carried"]}
    assert (losses["wudi"] == pytest.approx(losses["plain addition"], abs=1e-5)) == apart


@pytest.mark.slow
def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    """Nothing need turn between bases that share their coordinates, so no head of its own is asked for."""
    old = make("llama", tmp_path / "old", tie_word_embeddings=True)
    draw = torch.Generator().manual_seed(2)
    for name, change in {"new": 0.1, "tuned": 0.02}.items():
        tensors = {n: t + change * torch.randn(t.shape, generator=draw) for n, t in state(old).items()}
        write_state(tensors, old, tmp_path / name)
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = ("--data", tmp_path / "texts.jsonl", "--samples", 32, "--scale", "auto")
    models = {name: tmp_path / name for name in ("old", "new", "tuned")}
    done = run(*command(models, tmp_path / "out", *data, work="tuned"))
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    assert state(tmp_path / "out").keys() == state(old).keys()


@pytest.mark.slow
def test_an_adapter_of_another_base_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    asked = command(models, tmp_path / "out", old="neurons", new="old")
    done = run(*asked)
    assert done.exit_code == 2
    assert f"is an adapter of {models['old']}, not of {models['neurons']}" in one_error(done.output)
    assert not (tmp_path / "out").exists()
    judged = run(*asked, "--data", models["texts"], "--samples", 32, "--scale", "auto")
    assert judged.exit_code == 2
    assert run(*asked, "--force").exit_code == 0
    made = recipe(models, f"{models['neurons']}+{models['adapter']}", "neurons")
    done = mergekit_yaml(made, tmp_path / "merged")
    assert "is an adapter of" in one_error(done.output)
    assert not (tmp_path / "merged").exists()
    checked = run("check", write_recipe(made, tmp_path / "recipe.yml"))
    assert checked.exit_code == 1
    assert "is an adapter of" in checked.output
    assert mergekit_yaml(made, tmp_path / "forced", "--allow-crimes").exit_code == 0


def recipe(models: dict[str, Path], donor: str, origin: str = "old", **options: Any) -> dict[str, Any]:
    made = recipe_for("task_arithmetic", models["new"])
    own = {"weight": 1.0, "finetuned_from": str(models[origin])}
    return {
        **made,
        "models": [{"model": donor, "parameters": own}],
        "parameters": {"delegate": "task_arithmetic"} | options,
    }


@pytest.mark.slow
def test_recipes_add_the_change_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    """And match where they ask for it, which report and `check` do not keep to themselves."""
    assert_added(merged(recipe(models, str(models["tuned"])), tmp_path / "merged"), models)
    report = (tmp_path / "merged" / "rotation_merge.json").read_text()
    assert "share their coordinates" in report
    assert "is added as it is" in report
    asked = recipe(models, str(models["tuned"]), heads="permutation")
    checked = run("check", write_recipe(asked, tmp_path / "recipe.yml"))
    assert checked.exit_code == 0
    assert "'heads' is set" in " ".join(checked.output.split())


def test_python_adds_the_change_as_it_is(models: dict[str, Path]) -> None:
    config = json.loads((models["old"] / "config.json").read_text())
    states = [(state(models[name]), config) for name in ("tuned", "old", "new")]
    carried = rm.transfer(*states)
    assert_added(carried.state_dict(), models)
    assert "nothing was matched" in " ".join(carried.notes)
    assert "nothing was matched" not in " ".join(rm.transfer(*states, heads="permutation").notes)
    assert_added(rm.transfer(*(models[name] for name in ("tuned", "old", "new"))).state_dict(), models)
    far = [(state(models[name]), config) for name in ("tuned", "old", "neurons")]
    assert not rm.transfer(*far).notes


@pytest.mark.slow
def test_python_carries_by_the_alignment_that_is_given(models: dict[str, Path]) -> None:
    """A given alignment is used, and nothing is matched: the identity adds the change as it is, between far bases."""
    far = make("llama", models["old"].parent / "far", seed=5)
    identity = rm.align(far, models["old"], attention="none", ffn="none", scaling=False)
    given = rm.transfer(models["tuned"], models["old"], far, alignment=identity).state_dict()
    matched = rm.transfer(models["tuned"], models["old"], far).state_dict()
    start, old, tuned = state(far), state(models["old"]), state(models["tuned"])
    for name, tensor in given.items():
        torch.testing.assert_close(tensor, start[name] + tuned[name] - old[name], rtol=0, atol=2e-6)
    assert any(not torch.allclose(tensor, matched[name], atol=1e-3) for name, tensor in given.items())
