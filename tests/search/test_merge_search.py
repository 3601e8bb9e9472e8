"""The search of `rotation-merge merge` keeps its budget and says how far it is; what it found stands in every file."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, run
from plugin_support import one_error, state, write_state
from safetensors import safe_open

from rotation_merge.report.files import read_report
from rotation_merge.run.data import read_batches
from rotation_merge.run.functions import load
from rotation_merge.search import clock as clocks
from rotation_merge.search import run as searches
from rotation_merge.search.candidates import FAR, NEAR, SHARED, Planner
from rotation_merge.search.clock import Clock, OutOfTime
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Judge, cannot_win
from rotation_merge.search.preparation import Preparation
from rotation_merge.share.push import draft
from rotation_merge.workers import listener

ENGLISH, C = (str(CHECKPOINTS / f"llama-0-{domain}") for domain in ("english", "c"))
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
    assert "Merges tried, with scores on the selection samples: " in card
    assert "aligned merges (the models share their coordinates" in card
    assert str(CHECKPOINTS) not in card
    assert "Nothing was matched" not in card
    assert read_report(str(tmp_path / "out" / "rotation_merge.json")).search is not None
    folder = str(tmp_path / "out")
    names = [f"{ENGLISH}=org/english@{'a' * 40}", f"{C}=org/c@{'b' * 40}"]
    items = {item.place: item for item in draft(folder, "me/out", names, with_data=True).items("main")}
    published = items["README.md"].text
    assert "| org/c@" in published
    assert f"{verdict['best']['score']:.4f}" in published
    assert json.loads(items["rotation_merge.json"].text)["search"]["parents"][0]["name"].startswith("org/english@")


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
    published.items("main")
    published = draft(str(place / "out"), "me/out", names)
    assert not published.beside
    commands = [measurement.command for measurement in published.statistics(published._renaming("main"))]
    first = f"org/english@{'a' * 40} --data 0.safetensors"
    assert [first in command for command in commands] == [True, False]
    items = {item.place: item.source for item in published.items("main")}
    assert not [name for name, source in items.items() if isinstance(source, bytes) and str(place).encode() in source]


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


# --- time -----------------------------------------------------------------------------------------------------------


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


def slow_merge(seconds: float, only_after: int = 1) -> Callable[..., None]:
    """A merge in the place of the real one that takes its time, and tells of its progress; the first ones do not."""
    real, calls = searches.merge_recipe, list[str]()

    def merging(text: str, out: str, **options: Any) -> None:
        calls.append(text)
        tell, begin = listener(), time.perf_counter()
        while len(calls) > only_after and time.perf_counter() - begin < seconds:
            tell("working", time.perf_counter() - begin, seconds)
            time.sleep(0.02)
        real(text, out, **options)

    return merging


@pytest.mark.slow
def test_a_budget_holds_and_no_number_is_negative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that takes longer than was thought is ended in time for the rest; what has been made is kept."""
    monkeypatch.setattr(searches, "merge_recipe", slow_merge(120))
    budget = 8.0
    begin = time.perf_counter()
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--budget", f"{budget:.0f}s", "--json")
    assert time.perf_counter() - begin < 1.1 * budget + 0.5
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [tried["name"] for tried in found["tried"]] == ["plain"]
    assert "left of the budget" in found["left_out"]["wudi"]
    assert not re.search(r"-\d+(\.\d+)? s", done.stderr)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.slow
def test_the_one_that_always_runs_does_so_without_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--budget", "0.1s", "--json")
    assert done.exit_code == 0, done.output
    assert [tried["name"] for tried in json.loads(done.stdout)["tried"]] == ["plain"]
    assert not re.search(r"-\d+(\.\d+)? s", done.stderr)


@pytest.mark.slow
def test_signs_of_life_come_at_least_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the work tells of nothing; with what is left of it, which is never negative."""
    monkeypatch.setattr(clocks, "EVERY", 0.3)
    shown: list[tuple[float, str]] = []
    with Clock(60.0, print, lambda text: shown.append((time.perf_counter(), text))) as clock:
        with clock.step("silent", expected=0.5):
            begin = time.perf_counter()
            while time.perf_counter() - begin < 2.0:
                sum(range(1000))
        with clock.step("telling"):
            for i in range(100):
                clock.tick("parts", i, 100)
                time.sleep(0.01)
    times = [at for at, _ in shown]
    assert all(after - before < 1.0 for before, after in itertools.pairwise(times))
    assert len(times) >= 5
    assert "silent, " in shown[0][1]
    assert any(re.search(r"telling, parts \d+ of 100, \d+ s so far", text) for _, text in shown)
    assert not any("-" in text for _, text in shown)


def test_an_image_is_read_in_one_piece_not_as_a_text_of_many_tokens(tmp_path: Path) -> None:
    """Else a refit of vision models on noise seems to take as many times too long."""
    models = tuple(str(CHECKPOINTS / f"vit-{seed}") for seed in range(2))
    config = SearchConfig(
        models=models, out=str(tmp_path / "out"), data=("synthetic",), samples=8, batch_size=4, budget=60.0
    )
    with Clock(60.0, lambda _: None, lambda _: None) as clock:
        parents = Preparation(config, clock, tmp_path).run()
    assert parents.costs.tokens == 8


def test_a_clock_ends_work_that_tells_of_itself() -> None:
    def work() -> None:
        while True:
            listener()("parts", 0, 0)
            time.sleep(0.01)

    with Clock(60.0, print, print) as clock:
        with pytest.raises(OutOfTime), clock.step("work", within=0.2):
            work()
        listener()("parts", 0, 0)  # the deadline was that of the step
        assert 0 < clock.left < 60
    spent = Clock(0.0, print, print)
    assert spent.left == 0


# --- what is tried --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_how_models_lie_to_each_other_decides_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps apart: alignment does nothing. A planted permutation of neurons: it does, whatever the cosine says."""
    chosen: list[str] = []

    def planned(self: Planner) -> list[Any]:
        chosen.append(self.relation)
        return []

    monkeypatch.setattr(Planner, "candidates", planned)
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


def test_a_merge_that_cannot_win_is_given_up(tmp_path: Path, only: Callable[..., None]) -> None:
    """By its first batches; one that is as good is measured to the end."""
    model, path = load(C), C
    data = read_batches("demo:c", path, model, 48, 4, 32)
    judge = Judge([data], labelled=True)
    best = judge.measure(model)
    again = judge.measure(model, best=best)
    assert again == best
    ruined = load(C)
    with torch.no_grad():
        ruined.model.layers[0].mlp.down_proj.weight.mul_(8)
    given_up = judge.measure(ruined, best=best)
    assert given_up.unfinished
    assert 8 <= len(given_up.examples[0]) < 48
    seen = len(given_up.examples[0])
    worse = [x - y for x, y in zip(given_up.examples[0], best.examples[0][:seen], strict=True)]
    assert given_up.score == pytest.approx(best.score + sum(worse) / seen)  # whatever its first samples are like
    assert given_up.score > best.score
    assert not judge.measure(ruined).unfinished


def test_few_examples_prove_nothing() -> None:
    assert not cannot_win([[9.0] * 7], [[1.0] * 7])
    assert cannot_win([[9.0, 9.1] * 4], [[1.0] * 8])
    assert not cannot_win([[1.0, 3.0] * 8], [[2.0, 1.9] * 8])
    sets = [[9.0, 9.5] * 8, [1.0, 1.2] * 8]  # worse on one domain, better on the other
    assert not cannot_win(sets, [[2.0] * 16, [7.0] * 16])


@pytest.mark.slow
def test_what_was_given_up_is_said_and_ranks_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Planner.candidates

    def with_a_bad_one(self: Planner) -> list[Any]:
        plain = real(self)[0]
        return [plain, replace(plain, name="bad", of_model={ENGLISH: {"weight": 5.0}, C: {"weight": -4.0}})]

    monkeypatch.setattr(Planner, "candidates", with_a_bad_one)
    done = run("merge", ENGLISH, C, tmp_path / "out", *TEXTS, *TINY, "--samples", "48", "--json")
    assert done.exit_code == 0, done.output
    tried = json.loads(done.stdout)["tried"]
    assert [(one["name"], one["figures"]["unfinished"]) for one in tried] == [("plain", False), ("bad", True)]
    assert "estimated from its first samples, stopped early" in done.stderr
    assert re.search(
        r"; bad [\d.]+ estimated from its first samples, stopped early", (tmp_path / "out" / "README.md").read_text()
    )
