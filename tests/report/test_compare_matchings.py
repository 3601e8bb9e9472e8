"""`barrier --compare`: several matchings in one picture, by its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import make, recipe_for, twin, write_recipe
from safetensors.torch import save_file

WHOLE = {"heads": "permutation", "residual": "signed_permutation"}
FEW = ("--points", 3)


def rise(curve: dict[str, Any]) -> float:
    """How far the loss goes up and down on a path; random models, which are surely wrong, are better on average."""
    return max(curve["loss"]) - min(curve["loss"])


def assert_alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Curves of one name and the same points, but for what rounding does to the figures."""
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert found[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, list) else value), key


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An anchor, a twin in other coordinates (of the stream, too), one by local groups alone, a stranger; data."""
    folder = tmp_path_factory.mktemp("models")
    anchor = make("llama", folder / "anchor", num_hidden_layers=1)
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    return {
        "anchor": anchor,
        "turned": twin(anchor, folder / "turned", **WHOLE),
        "near": twin(anchor, folder / "near", heads="permutation"),
        "other": make("llama", folder / "other", seed=7, num_hidden_layers=1),
        "data": folder / "data.safetensors",
    }


def barriers(models: dict[str, Path], *names: str, options: tuple[object, ...] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parsed("barrier", *map(models.get, names), "--data", models["data"], *FEW, *options)
    return found


@pytest.mark.slow
def test_curves_of_one_command_are_those_of_single_ones_in_any_order(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "map.safetensors"
    flags = ("--heads", "permutation", "--residual", "rotation")
    assert run("align", models["anchor"], models["turned"], *flags, "--alignment", file).exit_code == 0
    pair = ("anchor", "turned")
    (together,) = barriers(models, *pair, options=("--compare", f"local, residual,made={file}"))
    (reverse,) = barriers(models, *pair, options=("--compare", f"made={file},plain,residual,local"))
    curves = {curve["name"]: curve for curve in together["curves"]}
    assert list(curves) == ["plain", "local", "residual", "made"]
    assert together["options"] == {}, "they describe no curve here"
    for curve in reverse["curves"]:
        assert_alike(curve, curves[curve["name"]])
    (local,) = barriers(models, *pair, options=("--heads", "permutation"))
    (whole,) = barriers(models, *pair, options=flags)
    assert_alike(local["curves"][0], curves["plain"])
    assert local["curves"][1]["loss"] == pytest.approx(curves["local"]["loss"], rel=1e-6)
    assert whole["curves"][1]["loss"] == pytest.approx(curves["residual"]["loss"], rel=1e-6)
    assert curves["made"]["loss"] == pytest.approx(curves["residual"]["loss"], abs=1e-4)
    assert rise(curves["residual"]) < 1e-3 < rise(curves["local"])  # what was planted


@pytest.mark.slow
def test_maps_chosen_on_samples(models: dict[str, Path], tmp_path: Path) -> None:
    """As a curve by name, by --match-on, and where a recipe says so; what was planted is found."""
    pair = ("anchor", "turned")
    (named,) = barriers(models, *pair, options=("--compare", "activations,both"))
    assert [curve["name"] for curve in named["curves"]] == ["plain", "activations", "both"]
    assert all(rise(curve) < 1e-3 < rise(named["curves"][0]) for curve in named["curves"][1:])
    flags = ("--heads", "permutation", "--residual", "largest")
    (asked,) = barriers(models, *pair, options=(*flags, "--match-on", "activations"))
    assert asked["curves"][1]["loss"] == pytest.approx(named["curves"][1]["loss"], rel=1e-6)
    made = recipe_for("linear", models["anchor"], models["turned"], residual="largest", match_on="activations")
    (told,) = barriers({**models, "recipe": write_recipe(made, tmp_path / "recipe.yml")}, "recipe")
    assert told["curves"][1]["loss"] == pytest.approx(named["curves"][1]["loss"], abs=1e-6)
    given = ("barrier", tmp_path / "recipe.yml", "--data", models["data"], "--match-on", "both")
    assert "a recipe already gives the maps" in run(*given).output


@pytest.mark.slow
def test_a_recipe_with_two_donors_and_a_carried_one(models: dict[str, Path], tmp_path: Path) -> None:
    document = recipe_for("linear", models["anchor"], models["turned"], models["near"], heads="permutation")
    path = write_recipe(document, tmp_path / "r.yml")
    ends = ("--data", models["data"], *FEW)
    found = parsed("barrier", path, *ends, "--compare", "aligned,residual")
    assert [(b["anchor"], b["donor"]) for b in found] == [
        (str(models["anchor"]), str(models[name])) for name in ("turned", "near")
    ]
    plain, aligned, residual = found[0]["curves"]
    assert rise(residual) < 1e-3 < min(rise(plain), rise(aligned))
    assert all(rise(curve) < 1e-3 for curve in found[1]["curves"][1:])
    document["models"][-1]["parameters"]["finetuned_from"] = str(models["turned"])
    carried = parsed("barrier", write_recipe(document, tmp_path / "c.yml"), *ends, "--compare", "aligned,residual")
    plain, aligned, residual = (curve["loss"] for curve in carried[1]["curves"])
    assert aligned != residual
    assert plain[0] == pytest.approx(residual[0], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compare", "locals"), "did you mean 'local'?"),
        (("--compare", "learned="), "names no file"),
        (("--compare", "local,local"), "'local' is named twice"),
        (("--compare", ",".join(f"m{i}=x" for i in range(8))), "holds 8 curves"),
        (("--compare", "made=./gone"), "gone"),
        (("--compare", "local", "--residual", "rotation"), "need the curve 'aligned'"),
        (("--alignment", "x"), "or two models"),
        (("--heads", "permutation"), "measure more of them two by two"),
        (("--plot", "p.xyz"), "end the name in .png"),
    ],
)
def test_bad_input_is_one_line(models: dict[str, Path], options: tuple[str, ...], words: str) -> None:
    names = ("anchor", "turned", *(["other"] if {"--alignment", "--heads"} & {*options} else []))
    done = run("barrier", *map(models.get, names), "--data", models["data"], *options)
    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_pictures_hold_every_curve(models: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = "neurons,rotation,paper,permutation,local,residual"
    options = ("--compare", names, "--plot", tmp_path / "p.svg", "--limit", 1)
    (found,) = barriers(models, "anchor", "near", options=options)
    assert [curve["name"] for curve in found["curves"]] == ["plain", *names.split(",")]
    assert (tmp_path / "p.svg").exists()
    assert (tmp_path / "p.svg").stat().st_size > 0
