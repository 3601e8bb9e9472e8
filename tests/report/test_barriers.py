"""`barrier`: what was planted is found on the path, by options, files, samples and recipes alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, parsed, run
from plugin_support import from_file, make, recipe_for, twin, write_recipe
from safetensors.torch import save_file

Models = dict[str, Path]

WHOLE = {"heads": "permutation", "residual": "signed_permutation"}
TURNED = ("anchor", "turned")
BESIDE = ("--compare", "aligned,residual")


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
def test_options_and_files_align_alike(models: Models, tmp_path: Path) -> None:
    file, flags = tmp_path / "map.safetensors", ("--heads", "permutation", "--residual", "rotation")
    assert run("align", models["anchor"], models["turned"], *flags, "--alignment", file, "--half").exit_code == 0
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
    assert "a recipe already gives the maps" in run(*call).output


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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--alignment x", "two"),
        ("--heads permutation", "measure more of them two by two"),
        ("--plot p.xyz", "end the name in .png"),
        ("--plot p.png --compare locals", "did you mean 'local'?"),
        ("--plot p.png --compare learned=", "names no file"),
        ("--plot p.png --compare local,local", "'local' is named twice"),
        (f"--plot p.png --compare {','.join(f'm{i}=x' for i in range(8))}", "holds 8 curves"),
        ("--plot p.png --compare made=./gone", "gone"),
        ("--plot p.png --compare local --residual rotation", "need the curve 'aligned'"),
    ],
)
def test_bad_input_is_one_line(models: Models, options: str, words: str) -> None:
    names = TURNED if options.startswith("--plot") else (*TURNED, "other")
    output = output_of("barrier", *map(models.get, names), "--data", models["data"], *options.split(), code=2)
    assert words in output
    assert "Traceback" not in output
