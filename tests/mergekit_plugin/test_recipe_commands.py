"""`inspect` and `barrier` on a recipe do what its merge does: task vectors carried over, options block by block."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import output_of, parsed, run
from plugin_support import from_file, lora, make, merged, twin, write_recipe
from plugin_support import recipe_for as local_recipe
from residual_support import Checkpoint, checkpoint, recipe, report, transport
from residual_support import twin as moved
from safetensors.torch import save_file
from test_transport import tuned

import rotation_merge as rm

Trio = tuple[Checkpoint, Checkpoint, Checkpoint, Path]


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    """An anchor, an old base that computes the same in other coordinates, a fine-tune of it; and data."""
    folder = tmp_path_factory.mktemp("trio")
    anchor = checkpoint("llama", "llama", folder / "anchor")
    old = moved(anchor, folder / "old", "rotation")
    save_file({"input_ids": torch.arange(80).view(4, 20) % 40}, folder / "data.safetensors")
    return anchor, old, tuned(old, folder / "fine", size=0.2), folder / "data.safetensors"


def loss(path: Path, data: Path) -> Any:
    """Of the model itself, on the data, to compare with."""
    return pytest.approx(rm.evaluate(path, str(data))["loss"], abs=5e-4)


def test_inspect_says_what_maps_to_what_and_what_it_costs(trio: Trio, tmp_path: Path) -> None:
    anchor, old, fine, _ = trio
    path = write_recipe(transport(anchor, (fine, old), residual="rotation"), tmp_path / "r.yml")
    (facts,) = parsed("inspect", path)
    assert (facts["model"], facts["origin"]) == (str(fine.path), str(old.path))
    plain = write_recipe(recipe(anchor, old, residual="rotation"), tmp_path / "plain.yml")
    (same,) = parsed("inspect", plain)
    assert facts["memory"] > same["memory"]
    assert facts["lines"] == same["lines"]
    by_file = write_recipe(from_file(transport(anchor, (fine, old)), tmp_path / "maps"), tmp_path / "file.yml")
    assert "Nothing is matched" in run("inspect", by_file).output
    for absent in ("fine", "old"):
        text = path.read_text().replace(f"/{absent}\n", "/gone\n")
        assert "gone: no such directory" in output_of("inspect", write_recipe(text, tmp_path / "gone.yml"), code=2)


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["rotation", "none"])
def test_barrier_goes_along_the_task_vector(residual: str, trio: Trio, tmp_path: Path) -> None:
    """Aligned, it ends in the model that the merge at weight 1 makes; plain, in the sum as it stands."""
    anchor, old, fine, data = trio
    document = transport(anchor, (fine, old), residual=residual)
    (facts,) = parsed("barrier", write_recipe(document, tmp_path / "r.yml"), "--data", data, "--points", 3)
    plain, aligned = (curve["loss"] for curve in facts["curves"])
    merged(document, tmp_path / "out")
    states = [model.state for model in (anchor, fine, old)]
    added = {name: states[0][name] + states[1][name] - states[2][name] for name in states[0]}
    assert plain[0] == loss(anchor.path, data)
    assert aligned[0] == loss(anchor.path, data)
    assert aligned[2] == loss(tmp_path / "out", data)
    assert plain[2] == loss(anchor.write(added, tmp_path / "added").path, data)
    assert plain[2] != pytest.approx(aligned[2], abs=1e-3)
    if residual == "rotation":
        assert aligned[2] == loss(fine.path, data)
    assert facts["donor"] == f"{fine.path} (carried over from {old.path})"


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("deep")
    anchor = make("llama", folder / "anchor", num_hidden_layers=4)
    return anchor, twin(anchor, folder / "donor", ffn="permutation", attention="none", scaling=False)


def by_block(deep: tuple[Path, Path], **options: str) -> dict[str, Any]:
    """A recipe that matches the neurons of all layers but one."""
    ffn = [{"filter": "layers.2", "value": "none"}, {"value": "permutation"}]
    still = {"heads": "none", "attention": "none", "scaling": False}
    document = local_recipe("linear", *deep, **still, ffn=ffn)
    document["parameters"] |= options
    return document


@pytest.mark.parametrize("option", [{}, {"residual": "permutation"}, {"anchor": "mean"}], ids=str)
def test_blocks_have_their_own_options(option: dict[str, str], deep: tuple[Path, Path], tmp_path: Path) -> None:
    document = by_block(deep, **option)
    (facts,) = parsed("inspect", write_recipe(document, tmp_path / "r.yml"))
    counts = {line["group"]: line["count"] for line in facts["lines"] if line["kind"] == "ffn"}
    assert counts == {"permutation": 3, "not matched": 1}
    merged(document, tmp_path / "out")
    assert [row["layer"] for row in report(tmp_path / "out")["rows"] if row["kind"] == "ffn"] == [0, 1, 3]


@pytest.mark.slow
def test_barrier_is_measured_on_what_is_merged(trio: Trio, deep: tuple[Path, Path], tmp_path: Path) -> None:
    document = by_block(deep)
    (facts,) = parsed("barrier", write_recipe(document, tmp_path / "r.yml"), "--data", trio[-1], "--points", 3)
    merged(document, tmp_path / "out")
    plain, aligned = (curve["loss"][1] for curve in facts["curves"])
    assert aligned == loss(tmp_path / "out", trio[-1])
    assert aligned != pytest.approx(plain, abs=1e-3)


def test_a_donor_that_equals_its_base_is_said(tmp_path: Path) -> None:
    """With the adapter in its folder that was forgotten: by check, doctor and the report, of any method."""
    base, other = make("llama", tmp_path / "base"), make("llama", tmp_path / "other", seed=1)
    forgotten, plain = (shutil.copytree(base, tmp_path / name) for name in ("forgotten", "plain"))
    lora(forgotten / "lora_adapter", base)
    words = f"equals the base ({base}); an adapter lies in lora_adapter: name {forgotten}+{forgotten}/lora_adapter"
    both = local_recipe("linear", base, forgotten, other)
    for command in ("check", "doctor"):
        output = " ".join(run(command, write_recipe(both, tmp_path / "recipe.yml")).output.split())
        assert words in output
        assert output.count("equals the base") == 1
    merged(both, tmp_path / "out")
    assert f"`{forgotten}` {words}." in json.loads((tmp_path / "out" / "rotation_merge.json").read_text())["notes"]
    stock = {**both, "merge_method": "task_arithmetic", "parameters": {}, "models": both["models"][1:]}
    stock["models"][0]["model"] = str(plain)
    output = run("check", write_recipe(stock, tmp_path / "stock.yml")).output
    assert f"{plain} equals the base ({base}): it brings nothing to the merge" in output
    moved_on = run("carry", forgotten, "--from", base, "--to", other, tmp_path / "moved").output
    assert words in " ".join(moved_on.split())
    carried = local_recipe("linear", other, forgotten)
    carried["models"][1]["parameters"]["finetuned_from"] = str(base)
    assert words in run("check", write_recipe(carried, tmp_path / "carried.yml")).output
