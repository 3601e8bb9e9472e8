"""Recipes name alignment files, statistics and data by repository and revision; the cache of the hub keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli_support import parsed, run
from hub_support import Hub
from plugin_support import from_file, make, merged, mergekit_yaml, one_error, recipe_for, twin, write_recipe

from rotation_merge.model.hub import HubFile


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, bytes]:
    """Two models, and the transforms that bring the second to the first."""
    folder = tmp_path_factory.mktemp("pair")
    anchor = make("llama", folder / "anchor")
    donor = twin(anchor, folder / "donor")
    done = run("align", anchor, donor, "--alignment", folder / "map", "--heads", "permutation")
    assert done.exit_code == 0, done.output
    return anchor, donor, (folder / "map").read_bytes()


@pytest.mark.slow
def test_an_alignment_of_the_hub_at_its_revision(home: Hub, pair: tuple[Path, Path, bytes], tmp_path: Path) -> None:
    anchor, donor, content = pair
    first = home.commit("models/org/maps", {"sub/a.safetensors": content})
    home.commit("models/org/maps", {"sub/a.safetensors": b"something else"})
    name = f"org/maps/sub/a.safetensors@{first}"
    recipe = from_file(recipe_for("linear", anchor, donor), Path(name))
    path = write_recipe(recipe, tmp_path / "r.yml")
    asked = len(home.asked)
    notes = parsed("check", path)
    assert len(home.asked) == asked, "check downloads nothing"
    assert [(f["error"], f["where"]) for f in notes["faults"]] == [(False, "models[1].parameters.alignment")]
    found = merged(recipe, tmp_path / "out")
    local = merged(from_file(recipe_for("linear", anchor, donor), _kept(content, tmp_path)), tmp_path / "local")
    assert all(torch.equal(found[n], x) for n, x in local.items())
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert report["files"] == {str(donor): name}
    assert parsed("check", path)["faults"] == []
    asked = len(home.asked)
    merged(recipe, tmp_path / "again")
    assert len(home.asked) == asked, "a pinned file is read from the cache"
    unpinned = from_file(recipe_for("linear", anchor, donor), Path("org/maps/sub/a.safetensors"))
    assert "cannot be read" in one_error(mergekit_yaml(unpinned, tmp_path / "other").output)


def _kept(content: bytes, folder: Path) -> Path:
    (folder / "kept.safetensors").write_bytes(content)
    return folder / "kept.safetensors"


@pytest.mark.parametrize("name", ["org/gone/a.safetensors", "org/maps/gone.safetensors", "org/maps/x@0000", "./x/y/z"])
def test_files_that_are_nowhere_are_one_line(
    name: str, home: Hub, pair: tuple[Path, Path, bytes], tmp_path: Path
) -> None:
    home.commit("models/org/maps", {"sub/a.safetensors": b""})
    done = mergekit_yaml(from_file(recipe_for("linear", *pair[:2]), Path(name)), tmp_path / "out")
    assert done.exit_code == 2
    assert name.removeprefix("./") in one_error(done.output)
    assert not (tmp_path / "out").exists()


def test_statistics_and_data_of_the_hub(home: Hub, tmp_path: Path) -> None:
    from cli_support import CHECKPOINTS

    model, text = CHECKPOINTS / "llama-0", b"def f(x):\n    return x + 1\n" * 20
    name = home.commit("datasets/org/text", {"code.txt": text})
    source = f"datasets/org/text/code.txt@{name}"
    done = run("measure", model, "--data", source, "--length", "8", "--samples", "8", "--out", tmp_path / "s")
    assert done.exit_code == 0, done.output
    home.commit("models/org/stats", {"s.safetensors": (tmp_path / "s").read_bytes()})
    recipe = recipe_for("linear", model)
    recipe["parameters"] = {"delegate": "regmean", "statistics": "org/stats/s.safetensors", "exclude": "embed"}
    merged(recipe, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "rotation_merge.json").read_text())
    assert report["data"] == [{"of": f"statistics of {model}", "source": source, "samples": 8}]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/a/b.safetensors", HubFile("model", "org/a", "b.safetensors", None)),
        ("datasets/org/a/b/c.txt@v1.0", HubFile("dataset", "org/a", "b/c.txt", "v1.0")),
        ("org/a", None),
        ("a.safetensors", None),
        ("./org/a/b", None),
        ("/org/a/b", None),
        ("~/a/b/c", None),
        ("org/../b/c", None),
        ("org/a/../c", None),
    ],
)
def test_words_that_name_a_file_of_the_hub(text: str, wanted: HubFile | None) -> None:
    assert HubFile.of(text) == wanted


def test_a_folder_that_is_here_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maps").mkdir()
    monkeypatch.chdir(tmp_path)
    assert HubFile.of("maps/a/b.safetensors") is None
    assert HubFile.of("maps/a/b.safetensors@main") is not None
