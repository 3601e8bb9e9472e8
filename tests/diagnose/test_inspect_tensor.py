"""`inspect --tensor`: one tensor of a merge, where it lives, what moved it, what the delegate is given."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_support import parsed, run
from plugin_support import merged, recipe_for, state, write_recipe

Pair = tuple[Path, Path]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def recipe(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = recipe_for("linear", *pair)
    content["models"][1]["parameters"]["weight"] = 0.25
    return write_recipe(content, tmp_path_factory.mktemp("trace") / "recipe.yml")


def test_of_a_recipe(pair: Pair, recipe: Path) -> None:
    found = parsed("inspect", recipe, "--tensor", UP)
    assert found["axes"] == ["layers.1.ffn (in)", "residual (read)"]
    assert [(row["donor"], row["space"]) for row in found["rows"]] == [(str(pair[1]), "layers.1.ffn")]
    anchor, donor = state(pair[0])[UP].double(), state(pair[1])[UP].double()
    mine, its = found["given"]
    assert (mine["model"], mine["before"], mine["after"]) == (str(pair[0]), 0.0, 0.0)
    assert its["model"] == str(pair[1])
    assert its["before"] == pytest.approx(float((donor - anchor).norm() / anchor.norm()))
    assert its["after"] < 1e-3 < its["before"]
    assert (mine["parameters"]["weight"], its["parameters"]["weight"]) == (0.5, 0.25)
    assert found["delegate"] == "linear"


def test_of_what_nothing_moves(recipe: Path) -> None:
    done = run("inspect", recipe, "--tensor", "model.norm.weight")
    assert done.exit_code == 0, done.output
    assert "No transform changes it." in done.output
    assert "Delegate: linear" in done.output


def test_of_a_model_that_nobody_merged(pair: Pair) -> None:
    found = parsed("inspect", pair[0], "--tensor", UP)
    assert (found["axes"], found["rows"], found["delegate"]) == (["layers.1.ffn (in)", "residual (read)"], [], "")
    assert "layers.1.ffn (in)" in run("inspect", pair[0], "--tensor", UP).output


def test_in_words_and_of_a_merged_model(pair: Pair, recipe: Path, tmp_path: Path) -> None:
    donor = tmp_path / "donor"
    shutil.copytree(pair[1], donor)
    merged(recipe.read_text().replace(str(pair[1]), str(donor)), tmp_path / "out")
    for source in (recipe, tmp_path / "out"):
        done = run("inspect", source, "--tensor", UP)
        assert done.exit_code == 0, done.output
        assert "layers.1.ffn" in done.output
        assert "permutation" in done.output
    planned, found = parsed("inspect", recipe, "--tensor", UP), parsed("inspect", tmp_path / "out", "--tensor", UP)
    assert [given["after"] for given in found["given"]] == [given["after"] for given in planned["given"]]
    assert found["note"] == ""

    written = tmp_path / "out" / "rotation_merge.json"
    report = json.loads(written.read_text())
    report["rows"] = [{**row, "distance_before": 1.1 * row["distance_before"]} for row in report["rows"]]
    written.write_text(json.dumps(report))
    assert "have changed since" in parsed("inspect", tmp_path / "out", "--tensor", UP)["note"]

    donor.rename(tmp_path / "elsewhere")
    found = parsed("inspect", tmp_path / "out", "--tensor", UP)
    assert found["given"] == []
    assert f"cannot be found: {donor}" in found["note"]
    assert "Distances of this tensor are not known" in run("inspect", tmp_path / "out", "--tensor", UP).output


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up.weight", "model.layers.7.mlp.up_proj.weight"])
def test_of_a_tensor_that_is_not_there(recipe: Path, name: str) -> None:
    done = run("inspect", recipe, "--tensor", name)
    assert done.exit_code == 2
    assert "the nearest are 'model.layers." in done.output
    assert done.output.count(".weight'") == 4
    assert "Traceback" not in done.output


def test_of_no_recipe(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "none.yml", write_recipe("merge_method: linear\n", tmp_path / "r.yml")):
        done = run("inspect", source, "--tensor", UP)
        assert done.exit_code == 2, done.output
        assert len([line for line in done.output.splitlines() if line.startswith("Error: ")]) == 1, done.output
