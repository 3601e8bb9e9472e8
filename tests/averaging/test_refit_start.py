"""Where a refit starts, what it aims at, and samples held out that judge it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import make, merged, mergekit_yaml, one_error, state, write_state
from torch import Tensor
from transformers import AutoModelForCausalLM

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and two fine-tunes of it, and 40 texts of token ids."""
    folder = tmp_path_factory.mktemp("models")
    base = make("llama", folder / "base")
    paths = {"base": base}
    for seed, name in enumerate(("one", "two")):
        draw = torch.Generator().manual_seed(seed)
        changed = {key: value + 0.02 * torch.randn(value.shape, generator=draw) for key, value in state(base).items()}
        paths[name] = write_state(changed, base, folder / name)
    rows = [torch.randint(3, 40, (12,), generator=torch.Generator().manual_seed(9 + i)).tolist() for i in range(40)]
    paths["texts"] = folder / "texts.jsonl"
    paths["texts"].write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return paths


def recipe(models: dict[str, Path], delegate: str = "refit", **parameters: Any) -> dict[str, Any]:
    samples = {"data": str(models["texts"]), "samples": 24} if delegate == "refit" else {}
    return {
        "merge_method": "rotation_merge",
        "base_model": str(models["base"]),
        "models": [
            {"model": str(models[name]), "parameters": {"weight": weight}}
            for name, weight in (("base", 0.0), ("one", 1.0), ("two", 1.0))
        ],
        "parameters": {"delegate": delegate, **samples, **parameters},
        "dtype": "float32",
    }


def linear_maps(tensors: State) -> State:
    return {name: tensor for name, tensor in tensors.items() if "proj" in name}


@pytest.mark.slow
@pytest.mark.parametrize("start", ["wudi", "tsv", "iso", "task_arithmetic"])
def test_a_ridge_that_lets_nothing_move_gives_the_start(start: str, models: dict[str, Path], tmp_path: Path) -> None:
    """As the delegate of that name, which a recipe may name instead, with its own scale."""
    ours = merged(recipe(models, start=start, ridge=1e12, **{"lambda": 0.7}), tmp_path / "refit")
    theirs = merged(recipe(models, start, **{"lambda": 0.7}), tmp_path / "delegate")
    for name, tensor in linear_maps(theirs).items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_scaled_average(models: dict[str, Path], tmp_path: Path) -> None:
    found = merged(recipe(models, ridge=1e12, **{"lambda": 1.5}), tmp_path / "out")
    base, mean = state(models["base"]), merged(recipe(models, "linear"), tmp_path / "linear")
    for name, tensor in linear_maps(found).items():
        expected = base[name] + 1.5 * (mean[name] - base[name])
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-4)


def loss_of(path: Path, texts: Path, rows: slice) -> float:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([json.loads(line)["input_ids"] for line in texts.read_text().splitlines()])[rows]
    with torch.no_grad():
        return float(model(ids, labels=ids).loss)


@pytest.mark.slow
def test_samples_held_out_are_the_next_of_the_file(models: dict[str, Path], tmp_path: Path) -> None:
    """The losses that the report names are those of the merges on them."""
    merged(recipe(models), tmp_path / "refit")
    merged(recipe(models, "linear"), tmp_path / "linear")
    report = (tmp_path / "refit" / "rotation_merge.json").read_text()
    before = loss_of(tmp_path / "linear", models["texts"], slice(24, 32))
    after = loss_of(tmp_path / "refit", models["texts"], slice(24, 32))
    assert f"was {before:.4f} before the refit and" in report
    if f"and {after:.4f} after" not in report:
        assert "was written" in report
        assert before == pytest.approx(after, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refit_that_is_worse_is_not_written(dtype: str, models: dict[str, Path], tmp_path: Path) -> None:
    """What it started from is. Two words, again and again, are all that the refit sees; what the average itself would
    write judges it, so that every change is for the worse."""
    plain = merged({**recipe(models, "linear"), "dtype": dtype}, tmp_path / "linear")
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "linear", dtype=torch.float32)
    rows = torch.arange(3, 19)[:, None]
    with torch.no_grad():
        while rows.shape[1] < 12:
            rows = torch.cat([rows, average(rows).logits[:, -1:].argmax(-1)], 1)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in [[3, 4] * 6] * 24 + rows.tolist()))
    narrow = recipe({**models, "texts": texts}, ridge=1e-9)
    found = merged({**narrow, "dtype": dtype}, tmp_path / "refit")
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=0.02)
    assert "that is worse, so the average was written" in (tmp_path / "refit" / "rotation_merge.json").read_text()


def test_bad_values_get_one_line(models: dict[str, Path], tmp_path: Path) -> None:
    alone = recipe(models, start="wudi")
    alone["models"] = [{"model": str(models["base"]), "parameters": {"weight": 1.0}}]
    for wrong, named in [
        (recipe(models, ridge=-0.1), "'ridge' is -0.1"),
        (recipe(models, start="wudy"), "wudi"),
        (alone, "'start: wudi' merges task vectors"),
    ]:
        done = mergekit_yaml(wrong, tmp_path / "out")
        assert done.exit_code, wrong
        assert named in one_error(done.output), done.output
        assert not (tmp_path / "out").exists()
