"""Commands and recipes give the same on a GPU as on the CPU, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plugin_support
import pytest
import torch
from cli_support import CHECKPOINTS, TEXTS, parsed, run
from plugin_support import state
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

DEVICES = ("cpu", "cuda")
BASE, ENGLISH, C, OTHER, LORA = (
    CHECKPOINTS / name for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-1", "llama-0-lora-english")
)
VITS = CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1"
SAMPLES = {ENGLISH: TEXTS / "english.txt", C: TEXTS / "c.txt", OTHER: TEXTS / "python.txt", BASE: TEXTS / "python.txt"}
FEW = ("--samples", 16, "--length", 48)
NOT_ALIGNED = {"attention": "none", "ffn": "none", "scaling": False}
EXACT, LEARNED = 1e-4, 2e-2
"""Largest differences, as shares of a tensor's length: of closed forms, and of what many steps have led to."""


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two tensors of a name, over their length."""
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp_min(1e-9)) for n in a)


def same(folders: list[Path], within: float = EXACT) -> None:
    assert distance(*map(state, folders)) < within


def merged(recipe: dict[str, Any], folder: Path) -> list[Path]:
    """A recipe's merges on both devices."""
    outs = [folder / device for device in DEVICES]
    for out, options in zip(outs, ((), ("--cuda",)), strict=True):
        plugin_support.merged(recipe, out, *options)
    return outs


def recipe(models: list[Path], base: Path, of_models: list[dict[str, Any]] | None = None, **parameters: Any) -> Any:
    each = of_models or [{"weight": 1.0}] * len(models)
    entries = [{"model": str(model), "parameters": values} for model, values in zip(models, each, strict=True)]
    return {
        "merge_method": "rotation_merge",
        "base_model": str(base),
        "models": entries,
        "parameters": parameters,
        "dtype": "float32",
    }


@pytest.mark.parametrize(
    "parameters",
    [
        {"delegate": "linear", "heads": "permutation", "residual": "rotation"},
        {"delegate": "ot_fusion", **NOT_ALIGNED},
        {"delegate": "slerp", "t": 0.5},
    ],
    ids=lambda parameters: parameters["delegate"],
)
def test_aligned_merges(parameters: dict[str, Any], tmp_path: Path) -> None:
    weights = [{}, {}] if parameters["delegate"] == "slerp" else None
    same(merged(recipe([BASE, OTHER], BASE, weights, **parameters), tmp_path), 1e-2)


@pytest.mark.parametrize(
    "parameters",
    [
        *({"delegate": delegate} for delegate in ("task_arithmetic", "ties", "wudi", "tsv", "iso")),
        {"delegate": "wudi", "sides": "both"},
    ],
    ids=lambda parameters: " ".join(parameters.values()),
)
def test_merged_changes(parameters: dict[str, Any], tmp_path: Path) -> None:
    each = [{"weight": 1.0, **({"density": 0.5} if parameters["delegate"] == "ties" else {})}] * 2
    ways = merged(recipe([ENGLISH, C], BASE, each, **parameters, **NOT_ALIGNED), tmp_path)
    same(ways, {"ties": 1e-2, "wudi both": 2e-3}.get(" ".join(parameters.values()), EXACT))


@pytest.mark.parametrize("start", ["average", "wudi"])
def test_refit(start: str, tmp_path: Path) -> None:
    each = [{"weight": 0.0, "data": str(SAMPLES[BASE])}]
    each += [{"weight": 1.0, "data": str(SAMPLES[model])} for model in (ENGLISH, C)]
    values = {"delegate": "refit", "samples": 16, "start": start, **NOT_ALIGNED}
    same(merged(recipe([BASE, ENGLISH, C], BASE, each, **values), tmp_path), 1e-3)


def test_statistics(tmp_path: Path) -> None:
    each = []
    for model in (ENGLISH, C):
        files = [tmp_path / f"{model.name}-{device}.safetensors" for device in DEVICES]
        for file, device in zip(files, DEVICES, strict=True):
            kinds = ("--kinds", "gram,fisher", "--samples", 16, "--out", file, "--device", device)
            done = run("measure", model, "--data", SAMPLES[model], *kinds)
            assert done.exit_code == 0, done.output
        assert distance(*(_floating(load_file(file)) for file in files)) < EXACT
        each.append({"weight": 1.0, "statistics": str(files[0])})
    for delegate in ("regmean", "fisher"):
        (tmp_path / delegate).mkdir()
        same(merged(recipe([ENGLISH, C], ENGLISH, each, delegate=delegate, **NOT_ALIGNED), tmp_path / delegate))


def _floating(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("match_on", ["activations", "both"])
def test_matching_on_samples(match_on: str, tmp_path: Path) -> None:
    outs = [tmp_path / device for device in DEVICES]
    options = ("--heads", "permutation", "--match-on", match_on, "--data", SAMPLES[OTHER], "--samples", 16)
    for out, device in zip(outs, DEVICES, strict=True):
        done = run("align", BASE, OTHER, out, *options, "--device", device)
        assert done.exit_code == 0, done.output
    same(outs, 1e-2)


def test_learning(tmp_path: Path) -> None:
    """Only the figures are compared: half precision takes other steps."""
    options = ("--learn", "--data", SAMPLES[OTHER], "--steps", 20, "--limit", 16, "--batch-size", 4)
    figures = [
        parsed("align", BASE, OTHER, *options, "--device", device, "--alignment", tmp_path / f"{device}.safetensors")
        for device in DEVICES
    ]
    assert figures[0]["learned"].keys() == figures[1]["learned"].keys()


@pytest.mark.parametrize("work", [ENGLISH, LORA], ids=["weights", "lora"])
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("weights", ("--scale", "auto")),
        ("refit", ()),
        ("distil", ("--steps", 4)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_carrying(way: str, options: tuple[object, ...], work: Path, tmp_path: Path) -> None:
    lifts, outs = [], [tmp_path / device for device in DEVICES]
    for out, device in zip(outs, DEVICES, strict=True):
        bases = ("--from", BASE, "--to", C, "--data", SAMPLES[ENGLISH], "--samples", 32, "--carry", way)
        done = run("carry", work, out, *bases, *options, "--device", device, "--force")
        assert done.exit_code == 0, done.output
        lifts.append(json.loads((out / "rotation_merge.json").read_text())["lift"])
    near, far = lifts
    assert near["method"] == far["method"]
    assert near["carried"] == pytest.approx(far["carried"], abs=LEARNED)
    if way == "weights" and work == ENGLISH:
        same(outs, 1e-3)


def test_polishing(tmp_path: Path) -> None:
    same_merge = merged(recipe([ENGLISH, C], BASE, delegate="task_arithmetic", **NOT_ALIGNED), tmp_path)[0]
    reports = [
        parsed(
            *("polish", same_merge, tmp_path / f"polished-{device}", "--teachers", ENGLISH, C, "--samples", 32),
            *("--data", SAMPLES[ENGLISH], "--data", SAMPLES[C], "--steps", 5, "--device", device),
        )
        for device in DEVICES
    ]
    assert reports[0]["before"] == pytest.approx(reports[1]["before"], rel=1e-3)
    assert reports[0]["after"] == pytest.approx(reports[1]["after"], rel=LEARNED)


@pytest.mark.parametrize("data", ["text", "self"])
def test_the_best_merge(data: str, tmp_path: Path) -> None:
    """Text that models write differs from the first token that rounding turns."""
    given = [word for model in (ENGLISH, C) for word in ("--data", SAMPLES[model])] if data == "text" else []
    found = []
    for device in DEVICES:
        options = ("--base", BASE, *FEW, "--budget", "5m", "--anyway", "--device", device)
        result = run("merge", ENGLISH, C, tmp_path / device, *given, *options, "--json")
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout))
    scores = [{trial["name"]: trial["figures"]["score"] for trial in each["tried"]} for each in found]
    common = scores[0].keys() & scores[1].keys()
    assert len(common) > 3
    for name in common if data == "text" else ():
        assert scores[0][name] == pytest.approx(scores[1][name], abs=LEARNED), name


def test_classifiers(tmp_path: Path) -> None:
    """Images: merged, judged on noise, and evaluated."""
    result = run("merge", *VITS, tmp_path / "out", "--samples", 8, "--budget", "2m", "--anyway", "--device", "cuda")
    assert result.exit_code == 0, result.output
    losses = [parsed("evaluate", ENGLISH, "--data", SAMPLES[C], "--device", device)[0]["loss"] for device in DEVICES]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
