"""The ends of `barrier`'s paths are the parents, each under its own config, and its own head where it keeps that."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_support import output_of, parsed, run
from plugin_support import make as tiny_checkpoint
from plugin_support import merged, recipe_for, state, write_recipe
from tiny_models import ALL, make, save

import rotation_merge as rm

DIFFERENT = {"rope_parameters": {"rope_theta": 20.0, "rope_type": "default"}, "rms_norm_eps": 0.5}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """An anchor, a donor whose config differs where a merge becomes questionable, and data."""
    folder = tmp_path_factory.mktemp("ends")
    case = next(case for case in ALL if case.family == "llama" and not case.config.get("tie_word_embeddings"))
    for seed, name in enumerate(("anchor", "donor")):
        save(make(case, seed).float(), folder / name)
    file = folder / "donor" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **DIFFERENT}))
    np.savez(folder / "data.npz", input_ids=np.arange(40).reshape(2, 20) % 30 + 3)
    return folder / "anchor", folder / "donor", folder / "data.npz"


def loss(path: Path, data: Path, config: Path | None = None) -> float:
    """Of a model on its own, or with the weights of one and the config of another."""
    if config is None:
        return rm.evaluate(path, str(data))["loss"]
    batch = {"input_ids": torch.from_numpy(np.load(data)["input_ids"])}
    return rm.evaluate((state(path), json.loads((config / "config.json").read_text())), [batch])["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "permutation", "rotation"])
def test_each_end_is_the_parent_under_its_own_config(residual: str, two: tuple[Path, Path, Path]) -> None:
    anchor, donor, data = two
    own = loss(anchor, data), loss(donor, data)
    assert abs(loss(donor, data, config=anchor) - own[1]) > 1e-2  # its config matters
    for first, second, ends in ((anchor, donor, own), (donor, anchor, own[::-1])):
        found = parsed("barrier", first, second, "--data", data, "--points", 3, "--residual", residual)[0]
        for curve in found["curves"]:
            assert (curve["loss"][0], curve["loss"][-1]) == pytest.approx(ends, abs=1e-4), curve["name"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """Classifiers with heads of two, three and four classes, and data of each one's task."""
    folder = tmp_path_factory.mktemp("tasks")
    models = [tiny_checkpoint("bert", folder / str(n), seed=n, num_labels=n) for n in (2, 3, 4)]
    draw = np.random.default_rng(0)
    for n in (2, 3, 4):
        np.savez(folder / f"{n}.npz", input_ids=draw.integers(3, 40, (12, 6)), labels=draw.integers(0, n, 12))
    return models, [folder / f"{n}.npz" for n in (2, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_models_that_keep_heads_of_other_sizes(
    residual: str, tasks: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    """Each task under its own head: the ends are the parent, and the middle is what a merge writes."""
    models, data = (found[:2] for found in tasks)
    recipe = recipe_for("linear", *models, heads_of="each", residual=residual)
    merged(recipe, tmp_path / "out")
    given = [part for file in data for part in ("--data", file)]
    found = parsed("barrier", write_recipe(recipe, tmp_path / "recipe.yml"), *given, "--points", 3)
    assert [(one["data"], one["head"]) for one in found] == [
        (str(d), str(m)) for d, m in zip(data, models, strict=True)
    ]
    wholes = tmp_path / "out", tmp_path / "out" / "heads" / "3"
    for number, (one, model, whole) in enumerate(zip(found, models, wholes, strict=True)):
        for curve in one["curves"]:
            assert curve["loss"][-number] == pytest.approx(loss(model, data[number]), abs=1e-5)
        assert one["curves"][1]["loss"][1] == pytest.approx(loss(whole, data[number]), abs=1e-4)


@pytest.mark.slow
def test_several_models_that_keep_their_heads(tasks: tuple[list[Path], list[Path]], tmp_path: Path) -> None:
    """Data are counted, and a path has the tasks of its ends."""
    models, data = tasks
    given = [part for file in data for part in ("--data", file)]
    recipe = write_recipe(recipe_for("linear", *models, heads_of="each"), tmp_path / "recipe.yml")
    found = parsed("barrier", recipe, *given, "--points", 3)
    places = [(one["donor"], one["head"], one["data"]) for one in found]
    names, files = list(map(str, models)), list(map(str, data))
    assert places == [(names[d], names[n], files[n]) for d in (1, 2) for n in (0, d)]
    assert "2 models keep heads of their own, data are given 1 times; give it once for each model" in output_of(
        "barrier", *models[:2], *given[:2], "--heads-of", "each", "--points", 3, code=2
    )
    other = run("barrier", *models[:2], *given[:2], "--points", 3)
    assert other.exit_code == 2
    assert "heads_of: each" in other.output
