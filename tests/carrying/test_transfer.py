"""`rotation_merge.transfer` and `Delta`: changes as values, of state dicts and modules; between bases that share their
coordinates, by the command, in recipes and in Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from carry_support import carry, lift_of, noisy, texts
from cli_support import output_of, parsed
from plugin_support import (
    make,
    merged,
    recipe_for,
    state,
    twin,
    write_adapter,
    write_recipe,
    write_state,
)
from residual_support import checkpoint
from safetensors.torch import load_file
from tiny_models import ALL
from torch import Tensor

import rotation_merge as rm

LLAMA = next(case for case in ALL if case.family == "llama" and not case.config.get("tie_word_embeddings"))
STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
WORKS = ("tuned", "old", "new")
State = dict[str, Tensor]


def test_a_change_is_a_value(tmp_path: Path) -> None:
    """Scaled, with either sign; its task vector, and the base with it."""
    base = make("llama", tmp_path / "old")
    start, tuned = state(base), state(noisy(base, tmp_path / "tuned", 0.01))
    delta = rm.Delta.between(base, tmp_path / "tuned")
    for factor, change in {1.0: delta, 0.5: 0.5 * delta, -2.0: -delta * 2}.items():
        result = change.applied()
        for name, vector in change.state_dict().items():
            expected = factor * (tuned[name] - start[name])
            torch.testing.assert_close(vector, expected.double(), atol=1e-7, rtol=1e-5)
            torch.testing.assert_close(result[name], start[name] + expected)


@pytest.mark.slow
def test_the_change_of_a_head_takes_the_class_order_of_the_new_base(tmp_path: Path) -> None:
    """As a value, and by `transfer` in memory. A change is moved by an alignment of its own base alone."""
    new, old, foreign = (checkpoint("bert", "classifier", tmp_path / str(seed), seed=seed) for seed in range(3))
    names = [f"class {number}" for number in range(len(new.config["id2label"]))]
    for path, order in {new.path: names, old.path: names[::-1]}.items():
        config = json.loads((path / "config.json").read_text()) | {"id2label": dict(enumerate(order))}
        config["label2id"] = {name: number for number, name in enumerate(order)}
        (path / "config.json").write_text(json.dumps(config))
    name, start = "classifier.weight", old.state
    tuned = old.write({**start, name: start[name] + torch.randn(start[name].shape)}, tmp_path / "tuned")
    delta, alignment = rm.Delta.between(old.path, tuned.path), rm.align(new.path, old.path, **STILL)
    moved = delta.moved(alignment, new.path).applied()
    for result in (moved, rm.transfer(tuned.path, old.path, new.path, **STILL)):
        torch.testing.assert_close(result[name] - new.state[name], (tuned.state[name] - start[name]).flip(0))
    elsewhere = rm.align(new.path, foreign.path, **STILL)
    with pytest.raises(rm.RotationMergeError, match=r"is not that of .*2, which the alignment was made for"):
        delta.moved(elsewhere, new.path).applied().state_dict()
    assert delta.moved(elsewhere, new.path, strict=False).applied().state_dict()


@pytest.mark.slow
def test_results_of_models_in_memory_name_no_temporary_folder(tmp_path: Path) -> None:
    new, old = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    tuned = {name: x + 0.01 * torch.randn_like(x) for name, x in old.state.items()}, old.config
    module = new.case.model_class.from_pretrained(new.path)
    options: dict[str, Any] = {"rank": 2, "residual": "none", **STILL}
    adapter = rm.transfer(tuned, (old.state, old.config), module, **options)
    assert adapter.config["base_model_name_or_path"] == str(new.path)
    assert adapter.report.anchor == "new"
    assert not any("rotation-merge-" in line for line in (*adapter.notes, adapter.report.text(), repr(adapter)))
    nameless = rm.transfer(tuned, old.path, (new.state, new.config), **options)
    assert nameless.config["base_model_name_or_path"] is None
    vit = next(case for case in ALL if (case.family, case.name) == ("vit", "classifier")).model_class
    images = [vit(vit.config_class(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)) for _ in range(2)]
    with pytest.raises(rm.RotationMergeError, match=r"^tuned: ViTForImageClassification writes no text"):
        rm.transfer(images[1], *images, method="refit")


# --- bases that share their coordinates -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, its next release (near), one of moved neurons only, a fine-tune and an adapter of the first; texts."""
    folder = tmp_path_factory.mktemp("near")
    old = make("llama", folder / "old")
    paths = {"old": old, "new": noisy(old, folder / "new", 0.1), "tuned": noisy(old, folder / "tuned", 0.02, seed=3)}
    paths["neurons"] = twin(old, folder / "neurons", attention="none", ffn="permutation", scaling=False)
    module = "base_model.model.model.layers.1.mlp.up_proj"
    factors = {f"{module}.lora_A.weight": torch.randn(2, 32), f"{module}.lora_B.weight": torch.randn(48, 2)}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(old)}
    return {**paths, "adapter": write_adapter(config, factors, folder / "adapter"), "texts": texts(folder)}


def command(models: dict[str, Path], out: Path, *more: object, work: str = "adapter", **bases: str) -> list[object]:
    names = {"old": "old", "new": "new", **bases}
    return [models[work], out, "--from", models[names["old"]], "--to", models[names["new"]], *more]


def assert_added(result: State, models: dict[str, Path]) -> None:
    tuned, old, new = (state(models[name]) for name in WORKS)
    torch.testing.assert_close(
        result, {name: new[name] + tuned[name] - old[name] for name in new}, atol=1e-5, rtol=1e-4
    )


def recipe(models: dict[str, Path], donor: object, origin: str = "old", **options: Any) -> dict[str, Any]:
    document = recipe_for("task_arithmetic", models["new"])
    own = {"weight": 1.0, "finetuned_from": str(models[origin])}
    document["models"] = [{"model": str(donor), "parameters": own}]
    document["parameters"] = {"delegate": "task_arithmetic"} | options
    return document


def test_between_near_bases_a_change_is_added_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    """An adapter's factors stay; by the command, and in Python of files and of models in memory."""
    assert "nothing was matched" in " ".join(carry(*command(models, tmp_path / "lora")).split())
    before, after = (load_file(f / "adapter_model.safetensors") for f in (models["adapter"], tmp_path / "lora"))
    torch.testing.assert_close(after, before, atol=0, rtol=0)
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(models["new"])
    (written,) = parsed("carry", *command(models, tmp_path / "out", work="tuned"))["written"]
    said = " ".join(written["lines"])
    assert "nothing was matched" in said
    assert f"delegate: wudi, base_model: {models['old']}, models" in said
    assert_added(state(tmp_path / "out"), models)
    config = json.loads((models["old"] / "config.json").read_text())
    states = [(state(models[name]), config) for name in WORKS]
    carried = rm.transfer(*states)
    assert_added(carried.state_dict(), models)
    assert "nothing was matched" in " ".join(carried.notes)
    assert "nothing was matched" not in " ".join(rm.transfer(*states, heads="permutation").notes)
    judged = command(models, tmp_path / "judged", "--data", models["texts"], "--samples", 32, "--scale", "auto")
    assert "nothing was matched" not in " ".join(carry(*judged).split())
    assert_added(rm.transfer(*(models[name] for name in WORKS)).state_dict(), models)
    assert not rm.transfer(*states[:2], (state(models["neurons"]), config)).notes


@pytest.mark.slow
def test_recipes_add_the_change_as_it_is(models: dict[str, Path], tmp_path: Path) -> None:
    """And match where they ask for it, which report and `check` do not keep to themselves."""
    assert_added(merged(recipe(models, models["tuned"]), tmp_path / "merged"), models)
    report = (tmp_path / "merged" / "rotation_merge.json").read_text()
    assert "share their coordinates" in report
    assert "is added as it is" in report
    output = output_of(
        "check", write_recipe(recipe(models, models["tuned"], heads="permutation"), tmp_path / "recipe.yml")
    )
    assert "'heads' is set" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.parametrize("apart", [True, False])
def test_a_merge_of_both_changes_is_tried(apart: bool, tmp_path: Path) -> None:
    """By `wudi`: it is plain addition where the changes read from different inputs, and another model where not. GPT-2
    stores (inputs, outputs)."""
    old = checkpoint("gpt2", "untied", tmp_path / "old").path
    draw, paths = torch.Generator().manual_seed(2), {"old": old}
    for number, folder in enumerate(("new", "tuned")):
        tensors = state(old)
        for tensor in (t for n, t in tensors.items() if n.endswith("mlp.c_fc.weight")):
            change = 0.3 * torch.randn(tensor.shape, generator=draw)
            half = len(tensor) // 2
            if apart:
                change.narrow(0, number * half, half).zero_()
            tensor += change
        paths[folder] = write_state(tensors, old, tmp_path / folder)
    data = ("--data", texts(tmp_path), "--samples", 32, "--carry", "refit", "--scale", 1)
    carry(*command(paths, tmp_path / "out", *data, work="tuned"))
    lift = lift_of(tmp_path / "out")
    losses = {**lift["others"], lift["method"]: lift["carried"]}
    assert (losses["wudi"] == pytest.approx(losses["plain addition"], abs=1e-5)) == apart
