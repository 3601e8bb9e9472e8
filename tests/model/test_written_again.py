"""A folder that is written again between two calls of one process is read again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from plugin_support import build, make, recipe_for, state, write_adapter

import rotation_merge as rm

SAMPLES = [{"input_ids": torch.arange(24).reshape(3, 8)}]


def merged_by_recipe(changing: str, first: str, second: str, out: Path) -> Mapping[str, Any]:
    recipe = MergeConfiguration.model_validate(recipe_for("linear", first, changing))
    run_merge(recipe, str(out), MergeOptions(quiet=True))
    return state(out)


def aligned_by_command(changing: str, first: str, second: str, out: Path) -> Mapping[str, Any]:
    assert run("align", first, changing, out).exit_code == 0
    return state(out)


def with_adapter(changing: str, first: str, second: str, out: Path) -> Mapping[str, Any]:
    """With an adapter that is trained again in its folder: its factors are numbers of the changing model."""
    weight, module = state(Path(changing))["lm_head.weight"], "base_model.model.lm_head"
    factors = {f"{module}.lora_A.weight": weight[:2], f"{module}.lora_B.weight": weight[:, :2]}
    shutil.rmtree(out.parent / "lora", ignore_errors=True)
    lora = write_adapter({"peft_type": "LORA", "r": 2, "lora_alpha": 2}, factors, out.parent / "lora")
    return rm.average([first, f"{first}+{lora}"]).state_dict()


CALLS: dict[str, Callable[[str, str, str, Path], Mapping[str, Any]]] = {
    "transfer": lambda a, b, c, _: rm.transfer(a, b, c).state_dict(),
    "transfer of files, tuned": lambda a, b, c, _: rm.transfer(a, b, c, rank=2).tensors,
    "transfer of files, old": lambda a, b, c, _: rm.transfer(b, a, c, rank=2).tensors,
    "transfer of files, new": lambda a, b, c, _: rm.transfer(b, c, a, rank=2).tensors,
    "average": lambda a, b, c, _: rm.average([b, a]).state_dict(),
    "align": lambda a, b, c, _: rm.align(b, a).apply(a).state_dict(),
    "evaluate": lambda a, b, c, _: rm.evaluate(a, SAMPLES),
    "barrier": lambda a, b, c, _: {"loss": torch.tensor(rm.barrier(b, a, SAMPLES).loss)},
    "refit": lambda a, b, c, _: rm.refit([b, a], SAMPLES).state_dict(),
    "adapter": with_adapter,
    "recipe": merged_by_recipe,
    "command": aligned_by_command,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(make("llama", folder / str(seed), seed)) for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_folder_written_again_is_read_again(name: str, models: list[str], tmp_path: Path) -> None:
    changing = shutil.copytree(models[0], tmp_path / "changing")
    before = CALLS[name](str(changing), *models[2:], tmp_path / "first")
    build("llama", 1).save_pretrained(changing)
    after = CALLS[name](str(changing), *models[2:], tmp_path / "second")
    torch.testing.assert_close(dict(after), dict(CALLS[name](models[1], *models[2:], tmp_path / "third")))
    assert any(not torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)
