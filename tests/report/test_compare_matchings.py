"""`barrier --compare`: several matchings in one picture, by its laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, parsed, run
from plugin_support import make, recipe_for, twin, write_recipe
from safetensors.torch import save_file

Models = dict[str, Path]

WHOLE = {"heads": "permutation", "residual": "signed_permutation"}
TURNED = ("anchor", "turned")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
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
def test_curves_of_one_command_are_those_of_single_ones_in_any_order(models: Models, tmp_path: Path) -> None:
    file, flags = tmp_path / "map.safetensors", ("--heads", "permutation", "--residual", "rotation")
    assert run("align", models["anchor"], models["turned"], *flags, "--alignment", file).exit_code == 0
    (curves,) = barriers(models, *TURNED, options=("--compare", f"local, residual,made={file}"))
    (reverse,) = barriers(models, *TURNED, options=("--compare", f"made={file},plain,residual,local"))
    assert list(curves) == ["plain", "local", "residual", "made"]
    assert all(reverse[name] == alike(losses) for name, losses in curves.items())
    (local,) = barriers(models, *TURNED, options=("--heads", "permutation"))
    (whole,) = barriers(models, *TURNED, options=flags)
    assert local == {"plain": alike(curves["plain"]), "aligned": alike(curves["local"])}
    assert whole["aligned"] == alike(curves["residual"])
    assert curves["made"] == pytest.approx(curves["residual"], abs=1e-4)
    assert rise(curves["residual"]) < 1e-3 < rise(curves["local"])  # what was planted


@pytest.mark.slow
def test_maps_chosen_on_samples(models: Models, tmp_path: Path) -> None:
    """As a curve by name, by --match-on, and where a recipe says so; what was planted is found."""
    (named,) = barriers(models, *TURNED, options=("--compare", "activations,both"))
    assert list(named) == ["plain", "activations", "both"]
    assert all(rise(named[name]) < 1e-3 < rise(named["plain"]) for name in ("activations", "both"))
    flags = ("--heads", "permutation", "--residual", "largest", "--match-on", "activations")
    (by_option,) = barriers(models, *TURNED, options=flags)
    assert by_option["aligned"] == alike(named["activations"])
    document = recipe_for("linear", models["anchor"], models["turned"], residual="largest", match_on="activations")
    (by_recipe,) = barriers(models, write_recipe(document, tmp_path / "recipe.yml"))
    assert by_recipe["aligned"] == pytest.approx(named["activations"], abs=1e-6)
    call = ("barrier", tmp_path / "recipe.yml", "--data", models["data"], "--match-on", "both")
    assert "a recipe already gives the maps" in run(*call).output


@pytest.mark.slow
def test_a_recipe_with_two_donors_and_a_carried_one(models: Models, tmp_path: Path) -> None:
    document, options = (
        recipe_for("linear", *(models[n] for n in (*TURNED, "near")), heads="permutation"),
        ("--compare", "aligned,residual"),
    )
    turned, near = barriers(models, write_recipe(document, tmp_path / "r.yml"), options=options)
    assert rise(turned["residual"]) < 1e-3 < min(rise(turned["plain"]), rise(turned["aligned"]))
    assert max(rise(near["aligned"]), rise(near["residual"])) < 1e-3
    document["models"][-1]["parameters"]["finetuned_from"] = str(models["turned"])
    _, carried = barriers(models, write_recipe(document, tmp_path / "c.yml"), options=options)
    assert carried["aligned"] != carried["residual"]
    assert carried["plain"][0] == pytest.approx(carried["residual"][0], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--compare locals", "did you mean 'local'?"),
        ("--compare learned=", "names no file"),
        ("--compare local,local", "'local' is named twice"),
        (f"--compare {','.join(f'm{i}=x' for i in range(8))}", "holds 8 curves"),
        ("--compare made=./gone", "gone"),
        ("--compare local --residual rotation", "need the curve 'aligned'"),
        ("--alignment x", "two"),
        ("--heads permutation", "measure more of them two by two"),
        ("--plot p.xyz", "end the name in .png"),
    ],
)
def test_bad_input_is_one_line(models: Models, options: str, words: str) -> None:
    three = options.startswith(("--alignment", "--heads"))
    names = (*TURNED, *(["other"] if three else []))
    output = output_of("barrier", *map(models.get, names), "--data", models["data"], *options.split(), code=2)
    assert words in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.usefixtures("drawn")
def test_pictures_hold_every_curve(models: Models, tmp_path: Path) -> None:
    names = "neurons,rotation,paper,permutation,local,residual"
    options = ("--compare", names, "--plot", tmp_path / "p.svg", "--limit", 1)
    (curves,) = barriers(models, "anchor", "near", options=options)
    assert list(curves) == ["plain", *names.split(",")]
    assert (tmp_path / "p.svg").stat().st_size > 0
