"""The search of `rotation-merge merge` keeps its deadline; what it found stands in every file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_support import CHECKPOINTS, run
from plugin_support import one_error, state, write_state
from safetensors import safe_open

from rotation_merge.report.files import read_report
from rotation_merge.search import run as searches
from rotation_merge.search.candidates import Candidates
from rotation_merge.search.preparation import FAR, NEAR, SHARED
from rotation_merge.share.push import draft, text_in

BASE, ENGLISH, C = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c"))
TEXTS = ("--data", "demo:english", "--data", "demo:c")
TINY = ("--samples", "16", "--length", "32", "--batch-size", "4", "--anyway")


def kept(out: Path) -> tuple[dict[str, Any], str]:
    """The report and the card of a merge."""
    return json.loads((out / "rotation_merge.json").read_text()), (out / "README.md").read_text()


def test_the_verdict_stands_in_report_and_card(tmp_path: Path, only: Callable[..., None]) -> None:
    only("plain", "regmean")
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    content, card = kept(tmp_path / "out")
    verdict = content["search"]
    for name in ("best", "plain", "ensemble"):
        assert verdict[name]["score"] == found[name]["score"]
        assert f"{verdict[name]['score']:.4f}" in card
    assert {p["name"]: p["score"] for p in verdict["parents"]} == {n: f["score"] for n, f in found["parents"].items()}
    assert [tried["name"] for tried in verdict["tried"]] == [tried["name"] for tried in found["tried"]]
    assert verdict["left_out"] == found["left_out"]
    assert "llama-0-english alone" in card
    assert "Merges tried, with scores on the selection samples:\n" in card
    assert "aligned merges (the models share their coordinates" in card
    assert str(CHECKPOINTS) not in card
    assert "Nothing was matched" not in card
    assert read_report(str(tmp_path / "out" / "rotation_merge.json")).search is not None
    folder = str(tmp_path / "out")
    names = [f"{ENGLISH}=org/english@{'a' * 40}", f"{C}=org/c@{'b' * 40}"]
    staged = draft(folder, "me/out", names, with_data=True).stage(str(tmp_path / "staged"), "main")
    published = text_in(staged["README.md"])
    assert "| org/c@" in published
    assert f"{verdict['best']['score']:.4f}" in published
    assert json.loads(text_in(staged["rotation_merge.json"]))["search"]["parents"][0]["name"].startswith("org/english@")


@pytest.mark.slow
def test_what_the_recipe_names_is_there_and_what_that_was_made_from(tmp_path: Path, only: Callable[..., None]) -> None:
    """Statistics, and the samples that they were measured on; push finds them."""
    only("regmean")
    place = tmp_path / "with ünusual name"
    assert run("merge", ENGLISH, C, place / "out", *TEXTS, *TINY).exit_code == 0
    recipe = yaml.safe_load((place / "out" / "recipe.yml").read_text())
    files = [Path(entry["parameters"]["statistics"]) for entry in recipe["models"]]
    for number, file in enumerate(files):
        with safe_open(file, "pt") as opened:
            samples = Path(json.loads(opened.metadata()["made"])["data"])
        assert samples.name == f"{number}.safetensors"
        assert samples.is_file()
    names = [f"{ENGLISH}=org/english@{'a' * 40}", f"{C}=org/c@{'b' * 40}"]
    published = draft(str(place / "out"), "me/out", names, with_data=True)
    assert {Path(name) for name in published.beside} >= set(files)
    published.stage(str(tmp_path / "staged"), "main")
    published = draft(str(place / "out"), "me/out", names)
    assert not published.beside
    commands = list(published.measurements(published.renaming("main")))
    first = f"org/english@{'a' * 40} --data 0.safetensors"
    assert [first in command for command in commands] == [True, False]
    staged = published.stage(str(tmp_path / "staged"), "main")
    assert not [name for name, path in staged.items() if str(place) in text_in(path)]


@pytest.mark.slow
def test_a_refit_names_its_samples_and_they_are_there(tmp_path: Path, only: Callable[..., None]) -> None:
    only("refit, plain")
    assert run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY).exit_code == 0
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert all(Path(entry["parameters"]["data"]).is_file() for entry in recipe["models"])
    assert sorted(path.name for path in (tmp_path / "out-samples").rglob("*.safetensors")) == [
        "0.safetensors",
        "1.safetensors",
    ]


@pytest.mark.slow
def test_few_samples_do_at_the_default_batch_size(tmp_path: Path, only: Callable[..., None]) -> None:
    only("plain", "regmean")
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, "--samples", 8, "--length", 32, "--anyway", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["tried"]) == 2


# --- folders and time ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_existing_folder_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    code = (
        "import sys; from rotation_merge.cli.app import app\n"
        f"try: app(['merge', {ENGLISH!r}, {C!r}, {str(tmp_path)!r}])\n"
        "except SystemExit as end: print(end.code, {'torch', 'transformers', 'mergekit'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    assert one_error(done.stderr).endswith("already exists; write somewhere else, or --force")


def test_what_a_kill_while_cleaning_up_left_goes_with_the_next_run(tmp_path: Path) -> None:
    """OUT is whole, and of the work only the mark is there, which goes last."""
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    for folder in (out, work):
        folder.mkdir()
    (out / "config.json").write_text("{}")
    (work / "run.txt").write_text("0")
    done = run("merge", ENGLISH, C, out, *TEXTS, *TINY)
    assert "already exists" in one_error(done.output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    work.mkdir()
    (work / "notes.txt").write_text("mine")
    assert run("merge", ENGLISH, C, out, *TEXTS, *TINY).exit_code == 2
    assert (work / "notes.txt").read_text() == "mine"


def test_the_output_in_first_place_is_named(tmp_path: Path) -> None:
    done = run("merge", tmp_path / "best", ENGLISH, C)
    assert done.exit_code == 2
    assert "the directory to write comes last" in done.output


@pytest.mark.slow
def test_after_the_deadline_nothing_new_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge that runs is finished; the others are named."""
    real, clock, calls = searches.merge_recipe, [0.0], list[str]()

    def merging(text: str, out: str, **options: Any) -> None:
        calls.append(text)
        clock[0] += 400.0 * (len(calls) > 1)
        real(text, out, **options)

    monkeypatch.setattr(searches, "merge_recipe", merging)
    monkeypatch.setattr(searches.time, "perf_counter", lambda: clock[0])
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--base", BASE, "--budget", "10m", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {tried["name"] for tried in found["tried"]} == {"plain", "task_arithmetic", "ties"}
    assert {tried["name"]: tried["seconds"] for tried in found["tried"]}["ties"] == 400.0
    assert found["left_out"]["wudi"] == found["left_out"]["regmean"] == "the budget was spent"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_the_first_one_is_tried_without_a_budget(tmp_path: Path) -> None:
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--budget", "0.1s", "--json")
    assert done.exit_code == 0, done.output
    assert [tried["name"] for tried in json.loads(done.stdout)["tried"]] == ["plain"]


# --- what is tried --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_how_models_lie_to_each_other_decides_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps apart: alignment does nothing. A planted permutation of neurons: it does, whatever the cosine says."""
    chosen: list[str] = []

    def planned(self: Candidates) -> list[Any]:
        chosen.append(self.parents.relation)
        return []

    monkeypatch.setattr(Candidates, "all", planned)
    tensors = state(Path(C))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        tensors[key] = tensors[key].flip(1 if name == "down_proj" else 0).contiguous()
    moved = write_state(tensors, Path(C), tmp_path / "moved")
    far = str(CHECKPOINTS / "llama-1")
    for donor, relation in ((C, SHARED), (moved, NEAR), (far, FAR)):
        done = run("merge", ENGLISH, donor, tmp_path / "out", "--data", "demo:c", *TINY)
        assert "no merge could be made" in done.output
        assert chosen.pop() == relation, donor
