"""Commands and recipes give the same on a GPU as on the CPU, up to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plugin_support
import pytest
import torch
from cli_support import CHECKPOINTS, TEXTS, output_of, parsed
from plugin_support import state
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

DEVICES = ("cpu", "cuda")
BASE, ENGLISH, C, OTHER, LORA = (
    CHECKPOINTS / name for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-1", "llama-0-lora-english")
)
VITS = CHECKPOINTS / "vit-0", CHECKPOINTS / "vit-1"
SAMPLES = {ENGLISH: TEXTS / "english.txt", C: TEXTS / "c.txt", OTHER: TEXTS / "python.txt", BASE: TEXTS / "python.txt"}
PLAIN = {"attention": "none", "ffn": "none", "scaling": False}
EXACT, LEARNED = 1e-4, 2e-2
"""Largest differences, as shares of a tensor's length: of closed forms, and of what many steps have led to."""


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two floating tensors of a name, over their length."""
    assert a.keys() == b.keys()
    floating = [name for name, tensor in a.items() if tensor.is_floating_point()]
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp_min(1e-9)) for n in floating)


def merges(folder: Path, models: tuple[Path, ...], of_each: list[dict[str, Any]], **parameters: Any) -> list[Path]:
    """The merges of a recipe, whose base is the first model, on both devices."""
    entries = [{"model": str(m), "parameters": values} for m, values in zip(models, of_each, strict=True)]
    recipe = {"merge_method": "rotation_merge", "base_model": str(models[0]), "models": entries, "dtype": "float32"}
    for device in DEVICES:
        options = ("--cuda",) if device == "cuda" else ()
        plugin_support.merged({**recipe, "parameters": parameters}, folder / device, *options)
    return [folder / device for device in DEVICES]


def outputs(folder: Path, *arguments: object) -> list[Path]:
    """The outputs of a command that writes a folder `OUT`, on both devices."""
    places = [folder / device for device in DEVICES]
    for place, device in zip(places, DEVICES, strict=True):
        output_of(*(place if word == "OUT" else word for word in arguments), "--device", device)
    return places


TUNED = (BASE, ENGLISH, C)
RECIPES: dict[str, tuple[tuple[Path, ...], dict[str, Any], float]] = {
    "linear": ((BASE, OTHER), {"weight": 0.5, "heads": "permutation", "residual": "rotation"}, 1e-2),
    "ot_fusion": ((BASE, OTHER), {"weight": 0.5, **PLAIN}, 1e-2),
    "slerp": ((BASE, OTHER), {"t": 0.5}, 1e-2),
    "task_arithmetic": (TUNED, {"weight": 1.0, **PLAIN}, EXACT),
    "ties": (TUNED, {"weight": 1.0, "density": 0.5, **PLAIN}, 1e-2),
    "wudi": (TUNED, {"weight": 1.0, **PLAIN}, EXACT),
    "tsv": (TUNED, {"weight": 1.0, **PLAIN}, EXACT),
    "iso": (TUNED, {"weight": 1.0, **PLAIN}, EXACT),
    "refit": (TUNED, {"samples": 16, "start": "average", **PLAIN}, 1e-3),
    "refit, from wudi": (TUNED, {"samples": 16, "start": "wudi", **PLAIN}, 1e-3),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name: str, tmp_path: Path) -> None:
    models, parameters, within = RECIPES[name]
    delegate, _, _ = name.partition(",")
    of_each: list[dict[str, Any]] = [{}] * len(models)
    if delegate == "refit":
        of_each = [{"data": str(SAMPLES[model]), "weight": float(model != BASE)} for model in models]
    ways = merges(tmp_path, models, of_each, delegate=delegate, **parameters)
    assert distance(*map(state, ways)) < within


def test_statistics(tmp_path: Path) -> None:
    files: dict[Path, list[Path]] = {}
    for model in (ENGLISH, C):
        options = ("--data", SAMPLES[model], "--kinds", "gram,fisher", "--samples", 16, "--out", "OUT")
        files[model] = outputs(tmp_path / model.name, "measure", model, *options)
        assert distance(*map(load_file, files[model])) < EXACT
    of_each = [{"weight": 1.0, "statistics": str(paths[0])} for paths in files.values()]
    for delegate in ("regmean", "fisher"):
        ways = merges(tmp_path / delegate, (ENGLISH, C), of_each, delegate=delegate, **PLAIN)
        assert distance(*map(state, ways)) < EXACT


@pytest.mark.parametrize("match_on", ["activations", "both"])
def test_matching_on_samples(match_on: str, tmp_path: Path) -> None:
    options = ("--heads", "permutation", "--match-on", match_on, "--data", SAMPLES[OTHER], "--samples", 16)
    assert distance(*map(state, outputs(tmp_path, "align", BASE, OTHER, "OUT", *options))) < 1e-2


def test_learning(tmp_path: Path) -> None:
    """Half precision takes other steps."""
    options = ("--learn", "--data", SAMPLES[OTHER], "--steps", 20, "--limit", 16, "--batch-size", 4)
    outputs(tmp_path, "align", BASE, OTHER, *options, "--alignment", "OUT")


@pytest.mark.parametrize("work", [ENGLISH, LORA], ids=["weights", "lora"])
@pytest.mark.parametrize(
    "way", [("weights", "--scale", "auto"), ("refit",), ("distil", "--steps", 4)], ids=lambda w: w[0]
)
def test_carrying(way: tuple[object, ...], work: Path, tmp_path: Path) -> None:
    options = ("--from", BASE, "--to", C, "--data", SAMPLES[ENGLISH], "--samples", 32, "--force", "--carry", *way)
    outs = outputs(tmp_path, "carry", work, "OUT", *options)
    near, far = (json.loads((out / "rotation_merge.json").read_text())["lift"] for out in outs)
    assert near["method"] == far["method"]
    assert near["carried"] == pytest.approx(far["carried"], abs=LEARNED)
    if way[0] == "weights" and work == ENGLISH:
        assert distance(*map(state, outs)) < 1e-3


def test_polishing(tmp_path: Path) -> None:
    merge = merges(tmp_path, TUNED, [{}] * 3, delegate="task_arithmetic", weight=1.0, **PLAIN)[0]
    data = ("--data", SAMPLES[ENGLISH], "--data", SAMPLES[C], "--samples", 32, "--steps", 5)
    near, far = (
        parsed("polish", merge, tmp_path / f"polished-{device}", "--teachers", ENGLISH, C, *data, "--device", device)
        for device in DEVICES
    )
    assert near["before"] == pytest.approx(far["before"], rel=1e-3)
    assert near["after"] == pytest.approx(far["after"], rel=LEARNED)


@pytest.mark.parametrize("data", ["text", "self"])
def test_the_best_merge(data: str, tmp_path: Path) -> None:
    """Text that models write differs from the first token that rounding turns."""
    words = [word for model in (ENGLISH, C) for word in ("--data", SAMPLES[model])] if data == "text" else []
    options = ("--base", BASE, "--samples", 16, "--length", 48, "--budget", "5m", "--anyway")
    results = [parsed("merge", ENGLISH, C, tmp_path / d, *words, *options, "--device", d) for d in DEVICES]
    near, far = ({trial["name"]: trial["figures"]["score"] for trial in each["tried"]} for each in results)
    common = near.keys() & far.keys()
    assert len(common) > 3
    for name in common if data == "text" else ():
        assert near[name] == pytest.approx(far[name], abs=LEARNED), name


def test_classifiers_and_losses(tmp_path: Path) -> None:
    parsed("merge", *VITS, tmp_path / "out", "--samples", 8, "--budget", "2m", "--anyway", "--device", "cuda")
    near, far = (parsed("evaluate", ENGLISH, "--data", SAMPLES[C], "--device", device)[0] for device in DEVICES)
    assert near["loss"] == pytest.approx(far["loss"], rel=1e-4)
