"""`save_alignment: FILE | true`: what a merge used, as the file that recipes and `align` know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import make, merged, mergekit_yaml, one_error, recipe_for, state, twin, write_state
from safetensors.torch import load_file

Pair = tuple[Path, Path]


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("residual", ["none", "signed_permutation", "rotation"])
def test_the_file_is_that_of_align_and_gives_the_same_merge(pair: Pair, residual: str, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair, residual=residual)
    kept = tmp_path / "kept" / "file.safetensors"
    first = merged({**recipe, "parameters": {**recipe["parameters"], "save_alignment": str(kept)}}, tmp_path / "out")
    options = [word for name in ("heads", "residual") for word in (f"--{name}", recipe["parameters"][name])]
    assert run("align", *pair, "--alignment", tmp_path / "a.safetensors", *options).exit_code == 0
    ours, theirs = load_file(kept), load_file(tmp_path / "a.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
    recipe["models"][1]["parameters"]["alignment"] = str(kept)
    again = merged(recipe, tmp_path / "again")
    for name, tensor in first.items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-5, atol=1e-5)
    report = json.loads((tmp_path / "again" / "rotation_merge.json").read_text())
    assert any("nothing was matched" in note for note in report["notes"])


def test_two_donors_beside_the_model(pair: Pair, tmp_path: Path) -> None:
    other = twin(pair[0], tmp_path / "other", seed=7)
    merged(recipe_for("linear", *pair, other, save_alignment=True), tmp_path / "out")
    one, two = (load_file(tmp_path / "out" / f"alignment{n}.safetensors") for n in ("", "-2"))
    assert not equal(one, two)
    found = tmp_path / "out" / "alignment-2.safetensors"
    assert run("align", pair[0], other, tmp_path / "x").exit_code == 0
    recipe = recipe_for("linear", pair[0], other)
    recipe["models"][1]["parameters"]["alignment"] = str(found)
    merged(recipe, tmp_path / "again")


def test_a_fine_tune_keeps_the_map_of_its_origin(pair: Pair, tmp_path: Path) -> None:
    tuned = write_state({n: t + 0.01 * torch.randn_like(t) for n, t in state(pair[1]).items()}, pair[0], tmp_path / "t")
    recipe = recipe_for("task_arithmetic", pair[0], tuned, save_alignment=True)
    recipe["models"][1]["parameters"]["finetuned_from"] = str(pair[1])
    first = merged(recipe, tmp_path / "out")
    recipe["models"][1]["parameters"]["alignment"] = str(tmp_path / "out" / "alignment.safetensors")
    del recipe["parameters"]["save_alignment"]
    for name, tensor in merged(recipe, tmp_path / "again").items():
        torch.testing.assert_close(tensor, first[name], rtol=1e-5, atol=1e-5)


def test_layers_that_change_places_cannot_be_kept(pair: Pair, tmp_path: Path) -> None:
    recipe: dict[str, Any] = recipe_for("slerp", *pair, t=0.5, save_alignment=True)
    ranges = zip(recipe.pop("models"), ([0, 1], [1, 2]), strict=True)
    recipe["slices"] = [{"sources": [{"model": entry["model"], "layer_range": span} for entry, span in ranges]}]
    result = mergekit_yaml(recipe, tmp_path / "out")
    assert result.exit_code == 2
    assert "layer 1 of" in one_error(result.output)
    assert not (tmp_path / "out").exists()


def test_nothing_is_kept_where_nobody_asks(pair: Pair, tmp_path: Path) -> None:
    merged(recipe_for("linear", *pair), tmp_path / "out")
    assert not list((tmp_path / "out").glob("alignment*"))


def test_an_untied_head(tmp_path: Path) -> None:
    anchor = make("llama", tmp_path / "anchor", tie_word_embeddings=True)
    recipe = recipe_for("linear", anchor, twin(anchor, tmp_path / "donor"), residual="rotation", untie=True)
    recipe["parameters"]["save_alignment"] = True
    merged(recipe, tmp_path / "out")
    assert any(name.startswith("residual|") for name in load_file(tmp_path / "out" / "alignment.safetensors"))
