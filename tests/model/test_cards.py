"""Cards, reports and outputs say what was done: distances, what was moved, and no output that is no number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import run
from plugin_support import from_file, make, merged, mergekit_yaml, one_error, recipe_for, state, write_state

import rotation_merge as rm

OWN = ("regmean", "fisher", "refit")
"""Averages that mergekit does not have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make("llama", folder / "anchor"), make("llama", folder / "donor", seed=1)


def card(out: Path) -> str:
    return (out / "README.md").read_text()


def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "rotation_merge.json").read_text())
    return found


def spoilt(model: Path, where: Path, name: str, value: float) -> Path:
    tensors = state(model)
    tensors[name].view(-1)[3] = value
    return write_state(tensors, model, where)


@pytest.mark.parametrize("weights", [(0.5, -0.5), (0.0, 0.0)])
@pytest.mark.parametrize("delegate", ["linear", "slerp", "ties"])
def test_no_output_that_is_no_number(
    delegate: str, weights: tuple[float, float], models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Either the merge is made of numbers, or it ends with a tensor's name and leaves nothing."""
    recipe = recipe_for(delegate, *models)
    if delegate == "slerp":
        recipe["parameters"]["t"] = 1e300
    else:
        for entry, weight in zip(recipe["models"], weights, strict=True):
            entry["parameters"] = {**entry.get("parameters", {}), "weight": weight}
    done = mergekit_yaml(recipe, tmp_path / "out")
    if done.exit_code == 0:
        assert all(bool(x.isfinite().all()) for x in state(tmp_path / "out").values())
        return
    assert done.exit_code == 2
    line = one_error(done.output)
    assert delegate != "linear" or ("would hold NaN or infinity" in line and "weight'" in line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.yml"]


def test_a_dtype_that_cannot_hold_the_values(models: tuple[Path, Path], tmp_path: Path) -> None:
    anchor = spoilt(models[0], tmp_path / "large", "model.layers.0.mlp.up_proj.weight", 1e6)
    recipe = recipe_for("linear", anchor, models[1], ffn="none")
    recipe["out_dtype"] = "float16"
    done = mergekit_yaml(recipe, tmp_path / "out")
    assert done.exit_code == 2
    assert "model.layers.0.mlp.up_proj.weight" in one_error(done.output)
    assert not (tmp_path / "out").exists()


UP, EMBEDDING, NORM = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "model.norm.weight"
LOCAL: dict[str, Any] = {}
RESIDUAL, MEAN = {"residual": "permutation"}, {"anchor": "mean", "heads": "none"}
SPOILT = [
    *(("anchor", UP, LOCAL), ("anchor", NORM, RESIDUAL), ("anchor", EMBEDDING, MEAN)),
    *(("donor", EMBEDDING, LOCAL), ("donor", UP, RESIDUAL), ("donor", NORM, MEAN)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tensor", "options"), SPOILT)
def test_whose_nan_it_is(
    model: str, tensor: str, options: dict[str, Any], models: tuple[Path, Path], tmp_path: Path
) -> None:
    pair = dict(zip(("anchor", "donor"), models, strict=True))
    pair[model] = spoilt(pair[model], tmp_path / "spoilt", tensor, float("nan"))
    third = [make("llama", tmp_path / "third", seed=2)] if options is MEAN else []
    recipe = recipe_for("linear", *pair.values(), *third)
    recipe["parameters"] |= options
    done = mergekit_yaml(recipe, tmp_path / "out")
    assert done.exit_code == 2
    line = one_error(done.output)
    assert str(tmp_path / "spoilt") in line
    assert tensor in line
    assert not any(str(sound) in line for sound in (*models, *third))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_distances_to_the_mean_are_those_of_the_transforms(tmp_path: Path) -> None:
    """The report's distances are those between the tensors that were merged; the card says what the anchor was."""
    paths = [make("llama", tmp_path / str(seed), seed=seed) for seed in range(3)]
    recipe = recipe_for("linear", *paths, heads="permutation", residual="permutation", scaling=False)
    recipe["parameters"] |= {"anchor": "mean", "save_alignment": True}
    merged(recipe, tmp_path / "out")
    assert "running mean" in card(tmp_path / "out")
    base = state(paths[0])
    for path, name in zip(paths[1:], ("alignment", "alignment-2"), strict=True):
        moved = rm.Alignment.load(tmp_path / "out" / f"{name}.safetensors").apply(str(path))
        rows = [row for row in report(tmp_path / "out")["rows"] if row["donor"] == str(path)]
        assert [row["kind"] for row in rows] == [*["attention", "ffn"] * 2, "stream"]
        for row in rows:
            place = {"attention": "layers.{}.self_attn", "ffn": "layers.{}.mlp", "stream": ""}[row["kind"]]
            names = [name for name in base if place.format(row["layer"]) in name]
            apart = sum(float((moved[name] - base[name]).double().square().sum()) for name in names)
            assert row["distance_after"] == pytest.approx(apart**0.5, rel=1e-5)


NOTHING = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}


@pytest.mark.slow
def test_a_card_of_nothing_claims_nothing(models: tuple[Path, Path], tmp_path: Path) -> None:
    merged(recipe_for("linear", *models, exclude="model,lm_head"), tmp_path / "excluded")
    merged(recipe_for("linear", *models, **NOTHING), tmp_path / "off")
    merged(recipe_for("linear", models[0]), tmp_path / "alone")
    merged(recipe_for("linear", *models), tmp_path / "moved")
    assert "function" not in card(tmp_path / "off").partition("### Configuration")[0].partition("### Alignment")[2]
    assert all("No model was moved" in card(tmp_path / name) for name in ("off", "alone"))
    assert "keep their outputs" in card(tmp_path / "moved")


def test_a_picture_that_cannot_be_drawn_costs_no_merge(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotation_merge.mergekit_plugin.run.save_distances", lambda *_: 1 / 0)
    merged(recipe_for("linear", *models), tmp_path / "out")
    assert ".png" not in card(tmp_path / "out")


def test_a_card_of_an_alignment_file(models: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("align", *models, "--alignment", tmp_path / "map").exit_code == 0
    merged(from_file(recipe_for("linear", *models), tmp_path / "map"), tmp_path / "out")
    assert "moved by the transforms in map" in card(tmp_path / "out")
    assert report(tmp_path / "out")["files"] == {str(models[1]): str(tmp_path / "map")}


def test_a_donor_that_has_vanished(models: tuple[Path, Path], tmp_path: Path) -> None:
    zero = write_state(
        {name: torch.zeros_like(x) for name, x in state(models[0]).items()}, models[0], tmp_path / "zero"
    )
    merged(recipe_for("linear", models[0], zero), tmp_path / "out")
    assert "share their coordinates" not in card(tmp_path / "out")


@pytest.mark.parametrize("known", [True, False])
def test_what_was_not_aligned_is_listed(known: bool, models: tuple[Path, Path], tmp_path: Path) -> None:
    """With `unsupported: merge`: tensors that the architecture does not know, or all of an unknown one."""
    pair = []
    for name, path in zip(("anchor", "donor"), models, strict=True):
        tensors = {**state(path), "value_head.weight": torch.randn(3, 5)}
        pair.append(write_state(tensors, path, tmp_path / name))
        if not known:
            config = json.loads((path / "config.json").read_text())
            changed = config | {"architectures": ["NobodysForCausalLM"], "model_type": config["model_type"]}
            (pair[-1] / "config.json").write_text(json.dumps(changed))
    made = recipe_for("linear", *pair, unsupported="merge")
    file = tmp_path / "recipe.yml"
    file.write_text(yaml.safe_dump(made))
    count = 1 if known else len(tensors)
    listed = f"Not aligned, because the architecture does not list them: {count} tensors"
    for command in ("check", "inspect"):
        done = run(command, file)
        assert listed in " ".join(done.output.split()), done.output
    merged(made, tmp_path / "out")
    for path in (tmp_path / "out" / name for name in ("README.md", "rotation_merge.json")):
        assert listed in path.read_text(), path
        assert ("value_head.weight" if known else "lm_head.weight") in path.read_text()


PLAIN_WORDS = ("practically the plain one", "this is the plain merge", "mergekit alone")
"""What holds where models were averaged by position only."""


@pytest.mark.parametrize(
    ("delegate", "moved"),
    [("linear", True), ("linear", False), ("ties", True), ("regmean", False), ("fisher", True), ("refit", False)],
)
def test_only_averages_of_positions_are_called_plain(
    delegate: str, moved: bool, models: tuple[Path, Path], tmp_path: Path
) -> None:
    """Near models: alignment does nothing; methods of the plugin still make another merge than the plain one."""
    options = {"attention": "none"} if moved else NOTHING
    near = write_state({n: x + 1e-3 for n, x in state(models[0]).items()}, models[0], tmp_path / "near")
    recipe = recipe_for(delegate if delegate == "ties" else "linear", models[0], near, **options)
    recipe["parameters"]["delegate"] = delegate
    if delegate in ("regmean", "fisher"):
        for number, entry in enumerate(recipe["models"]):
            file = tmp_path / f"{number}.safetensors"
            flags = ("--data", "self", "--length", 8, "--samples", 8, "--kinds", "gram,fisher", "--out", file)
            assert run("measure", entry["model"], *flags).exit_code == 0
            entry["parameters"] = {**entry.get("parameters", {}), "statistics": str(file)}
    elif delegate == "refit":
        recipe["parameters"] |= {"samples": 2}
    merged(recipe, tmp_path / "out")
    text = card(tmp_path / "out")
    assert any(words in text for words in PLAIN_WORDS) == (delegate not in OWN), text
    assert "Nothing was matched" not in text
    assert ("is a method of it" in card(tmp_path / "out")) == (delegate in OWN)
    notes = " ".join(report(tmp_path / "out")["notes"])
    assert (delegate not in OWN) or "Refit solved" in notes or "by statistics on samples" in notes
    assert report(tmp_path / "out")["own_method"] == (delegate in OWN)


@pytest.mark.parametrize("form", ["models", "slices", "relative", "same name"])
def test_a_card_names_no_path_of_this_machine(
    form: str, models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders by their own names, with as much before it as tells them apart; however the recipe names them."""
    place, pair = tmp_path / "private", [tmp_path / "private" / name for name in ("anchor", "donor")]
    if form == "same name":
        pair = [place / "a" / "model", place / "b" / "model"]
    for source, target in zip(models, pair, strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    monkeypatch.chdir(tmp_path)
    names = [str(path.relative_to(tmp_path) if form == "relative" else path) for path in pair]
    recipe: dict[str, Any] = {**recipe_for("linear", *pair), "base_model": names[0]}
    models_named = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    sources = [{**entry, "layer_range": [0, 2]} for entry in models_named]
    del recipe["models"]
    recipe |= {"slices": [{"sources": sources}]} if form == "slices" else {"models": models_named}
    merged(recipe, tmp_path / "out")
    text = card(tmp_path / "out")
    assert "private" not in text
    shown = ["a/model", "b/model"] if form == "same name" else ["anchor", "donor"]
    assert f" using {shown[0]} as a base." in text
    assert f"* {shown[1]}\n" in text
    assert f"model: {shown[1]}\n" in text
    assert f"| {shown[1]} | " in text
    assert str(pair[1]) in (tmp_path / "out" / "mergekit_config.yml").read_text() or form == "relative"
