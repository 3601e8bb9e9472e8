"""No method's output alarms `rotation-merge doctor`: mergekit's, our own, and what is made of aligned models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import CHECKPOINTS, parsed, run
from mergekit import merge_methods
from plugin_support import EVERYTHING, make, merged, recipe_for, state, twin, write_state

from rotation_merge.diagnose.doctor import diagnose, open_case

Models = dict[str, Path]

STILL = {"attention": "none", "heads": "permutation", "residual": "signed_permutation"}

PARAMETERS: dict[str, dict[str, Any]] = {
    "slerp": {"t": 0.4},
    "nearswap": {"t": 0.05},
    "dare_ties": {"density": 0.5},
    "dare_linear": {"density": 0.5},
    "ties": {"density": 0.5},
    "della": {"density": 0.5},
    "della_linear": {"density": 0.5},
    "breadcrumbs": {"density": 0.7},
    "breadcrumbs_ties": {"density": 0.7},
    "sce": {"select_topk": 0.5},
    "task_arithmetic": {"lambda": 1.2},
}
METHODS = sorted(m.spec.name for m in merge_methods.registered_methods() if m.spec.name != "rotation_merge")
ALONE = ("linear", "karcher", "multislerp", "nuslerp", "passthrough")
"""Methods that are given no base."""
TWO = ("slerp", "nearswap", "nuslerp", "arcee_fusion")
"""Methods of two models."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A base, two fine-tunes of it, the second in other coordinates as well, and samples."""
    folder = tmp_path_factory.mktemp("methods")
    base, draw = make("llama", folder / "base"), torch.Generator().manual_seed(3)

    def tuned(name: str) -> Path:
        changed = {n: t + 0.02 * torch.randn(t.shape, generator=draw) for n, t in state(base).items()}
        return write_state(changed, base, folder / name)

    found = {"base": base, "one": tuned("one"), "two": tuned("two")}
    found["turned"] = twin(found["two"], folder / "turned", **EVERYTHING, residual="rotation")
    found["far"] = twin(base, folder / "far", **EVERYTHING, residual="rotation")
    found["permuted"] = twin(found["two"], folder / "permuted", **STILL)
    records = [{"input_ids": [(7 * i + j * j) % 40 for j in range(10)]} for i in range(32)]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return {**found, "texts": folder / "texts.jsonl"}


@pytest.fixture(scope="module")
def measured(models: Models) -> Models:
    """The same, statistics beside those that are merged by them."""
    for name in ("base", "turned", "permuted"):
        done = run("measure", models[name], "--data", models["texts"], "--kinds", "gram,fisher")
        assert done.exit_code == 0, done.output
    return models


def found_in(out: Path, *parents: Path) -> list[str]:
    return [str(cause) for cause in diagnose(open_case(str(out), [str(parent) for parent in parents]))]


def copy_settings(models: Models, out: Path) -> None:
    """mergekit leaves generation_config.json behind, which `doctor` rightly says."""
    shutil.copy(models["base"] / "generation_config.json", out)


def plain(method: str, models: Models) -> dict[str, Any]:
    names = ["one", "two"] if method in ALONE else ["base", "one", "two"][: 2 if method in TWO else 3]
    names = names[:1] if method == "passthrough" else names
    weighted = "weight" in [parameter.name for parameter in merge_methods.get(method).spec.parameters]
    own = {"parameters": {"weight": 0.5}} if weighted else {}
    recipe = {"merge_method": method, "models": [{"model": str(models[name]), **own} for name in names]}
    if method not in ALONE:
        recipe["base_model"] = str(models["base"])
    return {**recipe, "parameters": PARAMETERS.get(method, {}), "dtype": "float32"}


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_mergekit(method: str, models: Models, tmp_path: Path) -> None:
    """By the recipe that lies beside the merge."""
    merged(plain(method, models), tmp_path / "out")
    copy_settings(models, tmp_path / "out")
    assert found_in(tmp_path / "out") == []


@pytest.mark.slow
def test_stacks_and_slices(models: Models, tmp_path: Path) -> None:
    """Layers taken over, repeated and scaled; nothing is said of them but that they are stacked."""
    one, base = str(models["one"]), str(models["base"])
    stacked = [{"sources": [{"model": name, "layer_range": r}]} for name, r in ((one, [0, 2]), (base, [1, 2]))]
    scaled = {"scale": [{"filter": "down_proj", "value": 0.0}, {"value": 1.0}]}
    last = [{"sources": [{"model": one, "layer_range": [1, 2], "parameters": scaled}]}]
    merged({"merge_method": "passthrough", "slices": stacked + last, "dtype": "float32"}, tmp_path / "stacked")
    copy_settings(models, tmp_path / "stacked")
    (cause,) = diagnose(open_case(str(tmp_path / "stacked")))
    assert cause.name == "stacked layers"
    both = [{"model": name, "layer_range": [0, 2], "parameters": {"weight": 0.5}} for name in (one, base)]
    halves = [{**source, "layer_range": r} for r in ([0, 1], [1, 2]) for source in both]
    slices = [{"sources": halves[:2]}, {"sources": halves[2:]}]
    merged({"merge_method": "linear", "slices": slices, "dtype": "float32"}, tmp_path / "sliced")
    copy_settings(models, tmp_path / "sliced")
    assert found_in(tmp_path / "sliced") == []


OURS: dict[str, dict[str, Any]] = {
    "near": {"preset": "near"},
    "far": {"preset": "far"},
    "ties, far": {"preset": "far", "delegate": "ties", "density": 0.5},
    "slerp, permuted stream": {"delegate": "slerp", "t": 0.5, **STILL},
    "anchor: mean": {"preset": "far", "anchor": "mean"},
    "regmean": {"preset": "far", "delegate": "regmean"},
    "fisher": {"delegate": "fisher", **STILL},
    "ot_fusion": {"preset": "far", "delegate": "ot_fusion"},
    "refit": {"preset": "far", "delegate": "refit", "samples": 32, "data": "texts"},
    "on activations": {"preset": "far", "match_on": "both", "samples": 32, "data": "texts"},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", OURS)
def test_recipes_of_ours(how: str, measured: Models, tmp_path: Path) -> None:
    """Of models in other coordinates, but for near ones."""
    own = dict(OURS[how])
    own = {**own, "data": str(measured["texts"])} if "data" in own else own
    delegate = own.pop("delegate", "linear")
    donor = "one" if how == "near" else "turned" if "preset" in own else "permuted"
    recipe = recipe_for("linear", measured["base"], measured[donor])
    recipe["parameters"] = {"delegate": delegate, **own}
    if delegate in ("slerp", "ties"):
        for entry in recipe["models"]:
            entry["parameters"] = {"weight": 0.5} if delegate == "ties" else {}
    merged(recipe, tmp_path / "out")
    assert found_in(tmp_path / "out") == []


@pytest.mark.slow
def test_a_carried_change(models: Models, tmp_path: Path) -> None:
    """From a base in other coordinates."""
    recipe = recipe_for("task_arithmetic", models["far"], models["one"], residual="rotation", heads="permutation")
    recipe["models"] = recipe["models"][1:]
    recipe["models"][0]["parameters"] = {"weight": 1.0, "finetuned_from": str(models["base"])}
    merged(recipe, tmp_path / "out")
    assert found_in(tmp_path / "out") == []


COMMANDS: dict[str, Callable[[Models, Path], list[object]]] = {
    "align": lambda m, out: ["align", m["base"], m["turned"], out, "--heads", "permutation", "--residual", "rotation"],
    "polish": lambda m, out: ["polish", m["one"], "--teachers", m["base"], "--data", m["texts"], "--steps", 2, out],
    "merge": lambda m, out: [
        "merge",
        m["base"],
        m["one"],
        out,
        "--data",
        m["texts"],
        "--budget",
        "1s",
        "--anyway",
        "--samples",
        16,
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_ours(name: str, models: Models, tmp_path: Path) -> None:
    parsed(*COMMANDS[name](models, tmp_path / "out"))
    assert found_in(tmp_path / "out", models["base"], models["one"]) == []


@pytest.mark.slow
def test_trained_models(tmp_path: Path) -> None:
    """Two small Llamas trained from other seeds, their heads and neurons matched alone: they shrink, which is said."""
    pair = [Path(CHECKPOINTS) / f"llama-{i}" for i in (0, 1)]
    recipe = recipe_for("linear", *pair)
    recipe["parameters"] = {"delegate": "linear", "preset": "near"}
    merged(recipe, tmp_path / "out")
    names = {cause.name for cause in diagnose(open_case(str(tmp_path / "out")))}
    assert names <= {"other coordinates", "separate training", "vanished variance"}
