"""`save_alignment: FILE | true`: what a merge used, as the file that recipes and `align` know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import parsed, run
from plugin_support import from_file, make, merged, mergekit_yaml, one_error, recipe_for, state, twin, write_state
from safetensors.torch import load_file
from tiny_models import Case, planted
from variants import ONE

from rotation_merge import Alignment

Pair = tuple[Path, Path]


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def table(out: Path) -> str:
    """What the card says of the alignment, the sentence on files left out."""
    text = (out / "README.md").read_text().partition("### Alignment")[2].partition("### How to run it")[0]
    said = r"moved by the transforms in \S+: |`\S+` was aligned by the file .*| and line up with `\S+`"
    text = re.sub(said, "", text)  # by matching alone does it line up
    return re.sub(r"\n+", "\n", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "residual", "dtype"),
    [
        ("llama", "none", "float32"),
        ("llama", "signed_permutation", "bfloat16"),
        ("llama", "rotation", "bfloat16"),
        ("qwen2", "rotation", "float32"),
        ("bert", "permutation", "bfloat16"),
        ("vit", "rotation", "float32"),
    ],
)
def test_a_merge_from_a_file_is_the_one_that_wrote_it(family: str, residual: str, dtype: str, tmp_path: Path) -> None:
    """The same bytes, and the same figures in report and card; what it keeps is what it was given."""
    anchor, donor = (make(family, tmp_path / f"model-{seed}", seed=seed) for seed in (0, 8))
    options = {"residual": residual, **({"untie": True} if family == "qwen2" else {})}
    recipe = {**recipe_for("linear", anchor, donor, **options), "dtype": dtype}
    out, again = tmp_path / "out", tmp_path / "again"
    kept = out / "kept" / "file.safetensors"
    first = merged({**recipe, "parameters": {**recipe["parameters"], "save_alignment": "kept/file.safetensors"}}, out)
    second = from_file(recipe, kept)
    second["parameters"]["save_alignment"] = "kept/again.safetensors"
    assert equal(merged(second, again), first)
    assert equal(load_file(again / "kept" / "again.safetensors"), load_file(kept))
    made, found = (json.loads((folder / "rotation_merge.json").read_text()) for folder in (out, again))
    assert any("nothing was matched" in note for note in found["notes"])
    assert found["rows"] == made["rows"]
    assert found["whole"] == made["whole"]
    assert table(again) == table(out)


@pytest.mark.slow
@pytest.mark.parametrize("case", ONE, ids=lambda case: case.family)
def test_every_transform_comes_back_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Whatever the layout in memory that a transform had when it was kept, and whatever it is applied to."""
    model = planted(case)
    kept = Alignment.random(model.pair, untie=True, seed=5, heads="permutation", residual="largest").inverse()
    kept.save(tmp_path / "alignment")
    loaded = Alignment.load(tmp_path / "alignment")
    for dtype in (torch.float32, torch.bfloat16):
        donor = {n: (x.abs() + 1 if x.ndim == 1 else x).to(dtype) for n, x in model.state.items()}  # to be folded
        assert equal(*(one.apply((donor, model.config)).state_dict() for one in (kept, loaded)))


@pytest.mark.slow
def test_the_file_is_that_of_align(pair: Pair, tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair, residual="rotation", save_alignment="kept")
    merged(recipe, tmp_path / "out")
    options = ["--heads", "permutation", "--residual", "rotation"]
    assert run("align", *pair, "--alignment", tmp_path / "a.safetensors", *options).exit_code == 0
    ours, theirs = load_file(tmp_path / "out" / "kept"), load_file(tmp_path / "a.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)
    shown = [parsed("inspect", tmp_path / name) for name in ("out/kept", "a.safetensors")]
    for one in shown:
        assert one["made"]["versions"]["torch"] == torch.__version__
        assert one["made"]["options"]["residual"] == "rotation"
        assert set(one["fingerprints"]) == {str(path) for path in pair}
        assert one["made"]["models"] == {str(p): {"hub": None, "revision": None, "license": None} for p in pair}
    assert shown[0]["figures"] == pytest.approx(shown[1]["figures"])


@pytest.mark.slow
def test_two_donors_beside_the_model(pair: Pair, tmp_path: Path) -> None:
    other = twin(pair[0], tmp_path / "other", seed=7)
    merged(recipe_for("linear", *pair, other, save_alignment=True), tmp_path / "out")
    one, two = (load_file(tmp_path / "out" / f"alignment{n}.safetensors") for n in ("", "-2"))
    assert not equal(one, two)
    found = tmp_path / "out" / "alignment-2.safetensors"
    assert run("align", pair[0], other, tmp_path / "x").exit_code == 0
    merged(from_file(recipe_for("linear", pair[0], other), found), tmp_path / "again")


@pytest.mark.slow
def test_a_fine_tune_keeps_the_map_of_its_origin(pair: Pair, tmp_path: Path) -> None:
    tuned = write_state({n: t + 0.01 * torch.randn_like(t) for n, t in state(pair[1]).items()}, pair[0], tmp_path / "t")
    recipe = recipe_for("task_arithmetic", pair[0], tuned, save_alignment="kept")
    recipe["models"][1]["parameters"]["finetuned_from"] = str(pair[1])
    first = merged(recipe, tmp_path / "out")
    again = merged(from_file(recipe, tmp_path / "out" / "kept"), tmp_path / "again")
    assert equal(again, first)
    assert table(tmp_path / "again") == table(tmp_path / "out")


def test_layers_that_change_places_cannot_be_kept(pair: Pair, tmp_path: Path) -> None:
    recipe: dict[str, Any] = recipe_for("slerp", *pair, t=0.5, save_alignment=True)
    ranges = zip(recipe.pop("models"), ([0, 1], [1, 2]), strict=True)
    recipe["slices"] = [{"sources": [{"model": entry["model"], "layer_range": span} for entry, span in ranges]}]
    result = mergekit_yaml(recipe, tmp_path / "out")
    assert result.exit_code == 2
    assert "'save_alignment' cannot be used: the slices pair layers differently" in one_error(result.output)
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


def test_a_file_of_some_layers_holds_the_whole_alignment(tmp_path: Path) -> None:
    """Of a donor that is aligned as a whole: another merge takes all layers from it."""
    anchor, donor = (make("llama", tmp_path / f"model-{seed}", seed=seed) for seed in (0, 8))
    whole = recipe_for("linear", anchor, donor, residual="signed_permutation")
    sources = [{**model, "layer_range": [1, 2]} for model in whole["models"]]
    part = {name: value for name, value in whole.items() if name != "models"} | {"slices": [{"sources": sources}]}
    part["parameters"] = {**whole["parameters"], "save_alignment": "maps.safetensors"}
    merged(part, tmp_path / "part")
    again = merged(from_file(whole, tmp_path / "part" / "maps.safetensors"), tmp_path / "again")
    assert equal(again, merged(whole, tmp_path / "whole"))
