"""`barrier`: what was planted is found on the path, by options, files, samples and recipes alike; its ends are the
parents, each under its own config, and its own head where it keeps that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import output_of, parsed
from plugin_support import build, from_file, make, merged, recipe_for, save, state, twin, write_recipe
from safetensors.torch import load_file, save_file

import rotation_merge as rm

Models = dict[str, Path]

WHOLE = {"heads": "permutation", "residual": "signed_permutation"}
TURNED = ("anchor", "turned")
BESIDE = ("--compare", "aligned,residual")
FAST = {"rope_theta": 20.0, "rope_type": "default"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """An anchor, a twin in other coordinates (of the stream, too), one by local groups alone, one whose config
    differs where a merge becomes questionable; data."""
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor", num_hidden_layers=1)
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    strange = build("llama", seed=3, num_hidden_layers=1, rms_norm_eps=0.5, rope_parameters=FAST)
    return {
        "anchor": anchor,
        "turned": twin(anchor, folder / "turned", **WHOLE),
        "near": twin(anchor, folder / "near", heads="permutation"),
        "strange": save(strange, folder / "strange"),
        "data": folder / "data.safetensors",
    }


def barriers(models: Models, *names: str | Path, options: tuple[object, ...] = ()) -> list[dict[str, list[float]]]:
    """Losses by the name of the curve, of each path; a curve looks the same in every command."""
    places = (models.get(str(name), name) for name in names)
    listed = parsed("barrier", *places, "--data", models["data"], "--points", 3, *options)
    return [{curve["name"]: curve["loss"] for curve in barrier["curves"]} for barrier in listed]


def rise(losses: list[float]) -> float:
    """How far the loss goes up and down on a path; random models, which are surely wrong, are better on average."""
    return max(losses) - min(losses)


def alike(losses: list[float], rel: float = 1e-6) -> Any:
    return pytest.approx(losses, rel=rel)


@pytest.mark.slow
def test_options_and_files_align_alike(models: Models, tmp_path: Path) -> None:
    file, flags = tmp_path / "map.safetensors", ("--heads", "permutation", "--residual", "rotation")
    output_of("align", models["anchor"], models["turned"], *flags, "--alignment", file, "--half")
    ways = (("--heads", "permutation"), flags, ("--alignment", file))
    (local,), (whole,), (by_file,) = (barriers(models, *TURNED, options=options) for options in ways)
    assert list(local) == ["plain", "aligned"]
    assert all(curves["plain"] == alike(local["plain"]) for curves in (whole, by_file))
    assert by_file["aligned"] == pytest.approx(whole["aligned"], abs=1e-3)
    assert rise(whole["aligned"]) < 1e-3 < rise(local["aligned"])
    (named,) = barriers(models, *TURNED, options=("--compare", f"local,residual,made={file},activations,both"))
    assert list(named) == ["plain", "local", "residual", "made", "activations", "both"]
    assert [named[n] for n in ("plain", "local")] == [alike(local[n]) for n in ("plain", "aligned")]
    assert [named[n] for n in ("residual", "made")] == [alike(curves["aligned"]) for curves in (whole, by_file)]
    assert max(rise(named["activations"]), rise(named["both"])) < 1e-3
    call = ("barrier", models["turned"], models["anchor"], "--data", models["data"], "--alignment", file)
    assert "other weights" in output_of(*call, code=2)
    recipe = from_file(recipe_for("linear", models["anchor"], models["turned"]), file)
    output_of("check", write_recipe(recipe, tmp_path / "recipe.yml"))


@pytest.mark.slow
@pytest.mark.parametrize("match_on", ["activations", "both"])
def test_maps_chosen_on_samples(match_on: str, models: Models, tmp_path: Path) -> None:
    """By --match-on, and where a recipe says so."""
    flags = ("--heads", "permutation", "--residual", "largest", "--match-on", match_on)
    (by_option,) = barriers(models, *TURNED, options=flags)
    assert rise(by_option["aligned"]) < 1e-3 < rise(by_option["plain"])
    values = {"heads": "permutation", "residual": "largest", "match_on": match_on}
    document = recipe_for("linear", models["anchor"], models["turned"], **values)
    (by_recipe,) = barriers(models, write_recipe(document, tmp_path / "recipe.yml"))
    assert by_recipe["aligned"] == pytest.approx(by_option["aligned"], abs=1e-6)
    call = ("barrier", tmp_path / "recipe.yml", "--data", models["data"], "--match-on", "both")
    assert "a recipe already gives the maps" in output_of(*call, code=2)


@pytest.mark.slow
def test_a_recipe_with_two_donors_and_a_carried_one(models: Models, tmp_path: Path) -> None:
    document = recipe_for("linear", *(models[n] for n in (*TURNED, "near")), heads="permutation")
    turned, near = barriers(models, write_recipe(document, tmp_path / "r.yml"), options=BESIDE)
    assert max(rise(turned["residual"]), rise(near["residual"])) < 1e-3
    assert rise(near["aligned"]) < 1e-3 < min(rise(turned["plain"]), rise(turned["aligned"]))
    document["models"][-1]["parameters"]["finetuned_from"] = str(models["turned"])
    _, carried = barriers(models, write_recipe(document, tmp_path / "c.yml"), options=BESIDE)
    assert carried["aligned"] != carried["residual"]
    assert carried["aligned"] != carried["plain"]
    assert carried["plain"][0] == pytest.approx(carried["aligned"][0], abs=1e-4)


# --- ends ------------------------------------------------------------------------------------------------------------


def loss(path: Path, data: Path, config: Path | None = None) -> float:
    """Of a model on its own, or with the weights of one and the config of another."""
    if config is None:
        return rm.evaluate(path, str(data))["loss"]
    return rm.evaluate((state(path), json.loads((config / "config.json").read_text())), [load_file(data)])["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_each_end_is_the_parent_under_its_own_config(residual: str, models: Models) -> None:
    anchor, donor, data = models["anchor"], models["strange"], models["data"]
    ends = loss(anchor, data), loss(donor, data)
    assert abs(loss(donor, data, config=anchor) - ends[1]) > 1e-2  # its config matters
    for names, expected in ((("anchor", "strange"), ends), (("strange", "anchor"), ends[::-1])):
        (curves,) = barriers(models, *names, options=("--residual", residual))
        for name, losses in curves.items():
            assert (losses[0], losses[-1]) == pytest.approx(expected, abs=1e-4), name


@pytest.mark.slow
def test_models_that_keep_heads_of_other_sizes(tmp_path: Path) -> None:
    """Each task under its own head: the ends are the parent, and the middle is what a merge writes. Data are counted,
    and a path has the tasks of its ends."""
    draw, data = np.random.default_rng(0), [tmp_path / f"{classes}.npz" for classes in (2, 3, 4)]
    models = [make("bert", tmp_path / str(n), seed=n, num_labels=n) for n in (2, 3, 4)]
    for classes, file in zip((2, 3, 4), data, strict=True):
        np.savez(file, input_ids=draw.integers(3, 40, (12, 6)), labels=draw.integers(0, classes, 12))
    recipe = recipe_for("linear", *models, heads_of="each", residual="permutation")
    words = [part for file in data for part in ("--data", file)]
    paths = parsed("barrier", write_recipe(recipe, tmp_path / "recipe.yml"), *words, "--points", 3)
    tasks = [(d, n) for d in (1, 2) for n in (0, d)]
    assert [(path["donor"], path["head"], path["data"]) for path in paths] == [
        (str(models[d]), str(models[n]), str(data[n])) for d, n in tasks
    ]
    merged(recipe_for("linear", *models[:2], heads_of="each", residual="permutation"), tmp_path / "out")
    for number, whole in enumerate((tmp_path / "out", tmp_path / "out" / "heads" / "3")):
        plain, aligned = paths[number]["curves"]
        for curve in (plain, aligned):
            assert curve["loss"][-number] == pytest.approx(loss(models[number], data[number]), abs=1e-5)
        assert aligned["loss"][1] == pytest.approx(loss(whole, data[number]), abs=1e-4)
    call = ("barrier", *models[:2], *words[:2], "--points", 3)
    assert "2 models keep heads of their own, data are given 1 times; give it once for each model" in output_of(
        *call, "--heads-of", "each", code=2
    )
    assert "heads_of: each" in output_of(*call, code=2)
