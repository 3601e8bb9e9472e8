"""What a recipe says of how a task vector is carried is what the command does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import run
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, state
from recipe_models import stand_in

import rotation_merge as rm


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Path]]:
    """Texts, and stand-ins for two bases and a fine-tune of the first."""
    folder = tmp_path_factory.mktemp("carry")
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return str(folder / "texts.jsonl"), {name: stand_in(f"org/{name}", folder) for name in ("old", "new", "tuned")}


def recipe(models: dict[str, Path], **parameters: Any) -> dict[str, Any]:
    made = recipe_for("task_arithmetic", models["new"], models["tuned"])
    made["models"] = made["models"][1:]
    made["models"][0]["parameters"] = {"weight": 1.0, "finetuned_from": str(models["old"]), **parameters}
    return made


@pytest.mark.slow
def test_a_scale_multiplies_the_change(models: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    there = models[1]
    merged(recipe(there), tmp_path / "whole")
    merged(recipe(there, carry_scale=0.5), tmp_path / "half")
    new, whole, half = (state(path) for path in (there["new"], tmp_path / "whole", tmp_path / "half"))
    for name, tensor in half.items():
        torch.testing.assert_close(tensor, (new[name] + whole[name]) / 2, atol=1e-6, rtol=1e-5)
    assert any(not torch.equal(whole[name], new[name]) for name in new)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parameters", "flags"),
    [
        ({"carry": "refit", "carry_scale": 1.0}, ("--carry", "refit", "--scale", 1)),
        ({"carry": "distil", "carry_scale": 1.0, "steps": 2}, ("--steps", 2, "--scale", 1)),
        ({"carry_scale": "auto"}, ("--scale", "auto")),
    ],
)
def test_recipe_and_command_agree(
    parameters: dict[str, Any], flags: tuple[object, ...], models: tuple[str, dict[str, Path]], tmp_path: Path
) -> None:
    data, there = models
    merged(recipe(there, data=data, samples=32, **parameters), tmp_path / "merged")
    pair = ("--from", there["old"], "--to", there["new"], "--residual", "none", "--heads", "permutation")
    done = run("carry", there["tuned"], *pair, tmp_path / "out", "--data", data, "--samples", 32, *flags)
    assert done.exit_code == 0, done.output
    assert "Loss on the judging samples" in (tmp_path / "merged" / "rotation_merge.json").read_text()
    mine, its = state(tmp_path / "merged"), state(tmp_path / "out")
    for name, tensor in its.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_the_report_has_the_lift_of_each_donor(models: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    """As `rotation_merge.json` of the command and the report of the Python call have it."""
    data, there = models
    made = recipe(there, data=data, samples=32, carry="refit", carry_scale=1.0)
    merged(made, tmp_path / "merged")
    lifts = json.loads((tmp_path / "merged" / "rotation_merge.json").read_text())["lift"]
    assert list(lifts) == [str(there["tuned"])]
    lift = lifts[str(there["tuned"])]
    assert lift["method"] == "refit"
    options: dict[str, Any] = {"data": data, "samples": 32, "method": "refit", "scale": 1.0, "heads": "permutation"}
    for rank in (0, 2):
        carried = rm.transfer(there["tuned"], there["old"], there["new"], residual="none", rank=rank, **options)
        assert carried.report is not None
        assert carried.report.lift is not None
        assert carried.report.lift["method"] == "refit"
        assert "ecovered lift" in carried.notes[-1]
        assert rank or carried.report.lift["carried"] == pytest.approx(lift["carried"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"carry": "refit", "steps": 4}, "carrying by refit takes no steps"),
    ],
)
def test_options_that_are_gone_or_without_effect_are_refused(
    options: dict[str, Any], words: str, models: tuple[str, dict[str, Path]], tmp_path: Path
) -> None:
    done = mergekit_yaml(recipe(models[1], **options), tmp_path / "out")
    assert done.exit_code == 2
    assert re.search(words, one_error(done.output))
    assert not (tmp_path / "out").exists()
    names = {"carry": "method", "carry_scale": "scale"}
    values = {names.get(name, name): value for name, value in options.items()}
    with pytest.raises(rm.RotationMergeError, match=words):
        rm.transfer(models[1]["tuned"], models[1]["old"], models[1]["new"], **values)


def test_samples_need_a_change_to_carry(models: tuple[str, dict[str, Path]], tmp_path: Path) -> None:
    made = recipe(models[1], carry="refit")
    del made["models"][0]["parameters"]["finetuned_from"]
    done = mergekit_yaml(made, tmp_path / "out")
    assert done.exit_code != 0
    assert "finetuned_from" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_samples_without_labels_say_what_to_do(tmp_path: Path) -> None:
    old, new, tuned = (make("vit", tmp_path / name, seed) for seed, name in enumerate(("old", "new", "tuned")))
    config = json.loads((old / "config.json").read_text())
    pixels = np.zeros((32, config["num_channels"], config["image_size"], config["image_size"]), dtype=np.float32)
    np.savez(tmp_path / "images.npz", pixel_values=pixels)
    asked = ("--from", old, "--to", new, "--carry", "refit", "--data", tmp_path / "images.npz", "--samples", 32)
    done = run("carry", tuned, tmp_path / "out", *asked)
    assert done.exit_code == 2
    assert "carry by weights alone" in done.output
    assert not (tmp_path / "out").exists()
