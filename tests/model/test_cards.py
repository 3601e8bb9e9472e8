"""Cards, reports and outputs say what was done: distances, and what was moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import from_file, make, merged, recipe_for, state, write_recipe, write_state

import rotation_merge as rm

Pair = tuple[Path, Path]
STILL: dict[str, Any] = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    return make("llama", folder / "anchor"), make("llama", folder / "donor", seed=1)


def card(out: Path) -> str:
    return (out / "README.md").read_text()


def report(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "rotation_merge.json").read_text())
    return content


@pytest.mark.slow
def test_distances_to_the_mean_are_those_of_the_transforms(tmp_path: Path) -> None:
    """The report's distances are those between the tensors that were merged; the card says what the anchor was."""
    paths, out = [make("llama", tmp_path / str(seed), seed=seed) for seed in range(3)], tmp_path / "out"
    recipe = recipe_for("linear", *paths, heads="permutation", residual="permutation", scaling=False)
    recipe["parameters"] |= {"anchor": "mean", "save_alignment": True}
    merged(recipe, out)
    assert "running mean" in card(out)
    base = state(paths[0])
    for path, name in zip(paths[1:], ("alignment", "alignment-2"), strict=True):
        moved = rm.Alignment.load(out / f"{name}.safetensors").apply(str(path))
        rows = [row for row in report(out)["rows"] if row["donor"] == str(path)]
        assert [row["kind"] for row in rows] == [*["attention", "ffn"] * 2, "stream"]
        for row in rows:
            place = {"attention": "layers.{}.self_attn", "ffn": "layers.{}.mlp", "stream": ""}[row["kind"]]
            names = [name for name in base if place.format(row["layer"]) in name]
            apart = sum(float((moved[name] - base[name]).double().square().sum()) for name in names)
            assert row["distance_after"] == pytest.approx(apart**0.5, rel=1e-5)


@pytest.mark.slow
def test_a_card_of_nothing_claims_nothing(models: Pair, tmp_path: Path) -> None:
    merged(recipe_for("linear", *models, **STILL), tmp_path / "off")
    merged(recipe_for("linear", models[0]), tmp_path / "alone")
    zero = write_state({n: torch.zeros_like(x) for n, x in state(models[0]).items()}, models[0], tmp_path / "zero")
    merged(recipe_for("linear", models[0], zero), tmp_path / "vanished")
    assert "function" not in card(tmp_path / "off").partition("### Configuration")[0].partition("### Alignment")[2]
    assert all("No model was moved" in card(tmp_path / name) for name in ("off", "alone"))
    assert "share their coordinates" not in card(tmp_path / "vanished")


def test_a_card_of_an_alignment_file_without_a_picture(
    models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A picture that cannot be drawn costs no merge."""
    monkeypatch.setattr("rotation_merge.mergekit_plugin.run.save_distances", lambda *_: 1 / 0)
    assert run("align", *models, "--alignment", tmp_path / "map").exit_code == 0
    merged(from_file(recipe_for("linear", *models), tmp_path / "map"), tmp_path / "out")
    text = card(tmp_path / "out")
    assert ".png" not in text
    assert "keep their outputs" in text
    assert "moved by the transforms in map" in text
    assert report(tmp_path / "out")["files"] == {str(models[1]): str(tmp_path / "map")}


@pytest.mark.parametrize("known", [True, False])
def test_what_was_not_aligned_is_listed(known: bool, models: Pair, tmp_path: Path) -> None:
    """With `unsupported: merge`: tensors that the architecture does not know, or all of an unknown one."""
    tensors, pair = {"value_head.weight": torch.randn(3, 5)}, list[Path]()
    for path in models:
        pair.append(write_state({**state(path), **tensors}, path, tmp_path / path.name))
        if not known:
            config = json.loads((path / "config.json").read_text()) | {"architectures": ["NobodysForCausalLM"]}
            (pair[-1] / "config.json").write_text(json.dumps(config))
    recipe = recipe_for("linear", *pair, unsupported="merge")
    file, count = write_recipe(recipe, tmp_path / "recipe.yml"), 1 if known else 1 + len(state(models[0]))
    listed = f"Not aligned, because the architecture does not list them: {count} tensors"
    assert all(listed in " ".join(run(command, file).output.split()) for command in ("check", "inspect"))
    merged(recipe, tmp_path / "out")
    for text in (card(tmp_path / "out"), json.dumps(report(tmp_path / "out"))):
        assert listed in text
        assert ("value_head.weight" if known else "lm_head.weight") in text


PLAIN_WORDS = ("practically the plain one", "this is the plain merge", "mergekit alone")
"""What holds where models were averaged by position only."""


@pytest.mark.parametrize(
    ("delegate", "moved"), [("linear", True), ("linear", False), ("regmean", True), ("refit", False)]
)
def test_only_averages_of_positions_are_called_plain(delegate: str, moved: bool, models: Pair, tmp_path: Path) -> None:
    """Near models: alignment does nothing; methods of the plugin still make another merge than the plain one."""
    near = write_state({n: x + 1e-3 for n, x in state(models[0]).items()}, models[0], tmp_path / "near")
    recipe = recipe_for("linear", models[0], near, **({"attention": "none"} if moved else STILL))
    recipe["parameters"] |= {"delegate": delegate} | ({"samples": 2} if delegate == "refit" else {})
    for number, entry in enumerate(recipe["models"] if delegate == "regmean" else ()):
        file = tmp_path / f"{number}.safetensors"
        flags = ("--data", "self", "--length", 8, "--samples", 8, "--out", file)
        assert run("measure", entry["model"], *flags).exit_code == 0
        entry["parameters"] = {**entry.get("parameters", {}), "statistics": str(file)}
    merged(recipe, tmp_path / "out")
    text, content = card(tmp_path / "out"), report(tmp_path / "out")
    ours, notes = delegate != "linear", " ".join(content["notes"])
    assert content["own_method"] == ("is a method of it" in text) == ours
    assert any(words in text for words in PLAIN_WORDS) != ours
    assert "Nothing was matched" not in text
    assert not ours or "Refit solved" in notes or "by statistics on samples" in notes


@pytest.mark.parametrize("form", ["models", "slices", "relative", "same name"])
def test_a_card_names_no_path_of_this_machine(
    form: str, models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders by their own names, with as much before it as tells them apart; however the recipe names them."""
    shown = ["a/model", "b/model"] if form == "same name" else ["anchor", "donor"]
    for source, name in zip(models, shown, strict=True):
        link = tmp_path / "private" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(source)
    monkeypatch.chdir(tmp_path)
    names = [f"private/{name}" if form == "relative" else str(tmp_path / "private" / name) for name in shown]
    entries: list[dict[str, Any]] = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    sliced = {"slices": [{"sources": [{**entry, "layer_range": [0, 2]} for entry in entries]}]}
    recipe = {key: value for key, value in recipe_for("linear", *names).items() if key != "models"}
    merged(recipe | (sliced if form == "slices" else {"models": entries}), tmp_path / "out")
    text = card(tmp_path / "out")
    assert "private" not in text
    for words in (f"line up with `{shown[0]}`", f"model: {shown[1]}\n", f"| {shown[1]} | "):
        assert words in text
    assert names[1] in (tmp_path / "out" / "mergekit_config.yml").read_text()
