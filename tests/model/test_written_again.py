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
from plugin_support import build, make, recipe_for, state
from torch import Tensor

import rotation_merge as rm

SAMPLES = [{"input_ids": torch.arange(24).reshape(3, 8)}]
Call = Callable[[Path, Path, Path, Path], Mapping[str, Any]]


def merged_by_recipe(changing: Path, first: Path, second: Path, out: Path) -> dict[str, Tensor]:
    recipe = MergeConfiguration.model_validate(recipe_for("linear", first, changing))
    run_merge(recipe, str(out), MergeOptions(quiet=True))
    return state(out)


def aligned_by_command(changing: Path, first: Path, second: Path, out: Path) -> dict[str, Tensor]:
    assert run("align", first, changing, out).exit_code == 0
    return state(out)


CALLS: dict[str, Call] = {
    "transfer": lambda a, b, c, _: rm.transfer(str(a), str(b), str(c)).state_dict(),
    "transfer of files, tuned": lambda a, b, c, _: rm.transfer(str(a), str(b), str(c), rank=2).tensors,
    "transfer of files, old": lambda a, b, c, _: rm.transfer(str(b), str(a), str(c), rank=2).tensors,
    "transfer of files, new": lambda a, b, c, _: rm.transfer(str(b), str(c), str(a), rank=2).tensors,
    "average": lambda a, b, c, _: rm.average([str(b), str(a)]).state_dict(),
    "align": lambda a, b, c, _: rm.align(str(b), str(a)).apply(str(a)).state_dict(),
    "evaluate": lambda a, b, c, _: rm.evaluate(str(a), SAMPLES),
    "barrier": lambda a, b, c, _: {"loss": torch.tensor(rm.barrier(str(b), str(a), SAMPLES).loss)},
    "refit": lambda a, b, c, _: rm.refit([str(b), str(a)], SAMPLES).state_dict(),
    "recipe": merged_by_recipe,
    "command": aligned_by_command,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make("llama", folder / str(seed), seed) for seed in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_folder_written_again_is_read_again(name: str, models: list[Path], tmp_path: Path) -> None:
    call, changing, fixed = CALLS[name], tmp_path / "changing", models[2:]
    shutil.copytree(models[0], changing)
    before = call(changing, *fixed, tmp_path / "first")
    build("llama", 1).save_pretrained(changing)
    after = call(changing, *fixed, tmp_path / "second")
    torch.testing.assert_close(dict(after), dict(call(models[1], *fixed, tmp_path / "third")))
    assert any(not torch.equal(torch.as_tensor(before[key]), torch.as_tensor(after[key])) for key in before)
