"""`rotation-merge merge` writes the best it tried, whose recipe gives the same bytes, or says that none is worth it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_support
import pytest
import torch
import yaml
from cli_support import CHECKPOINTS
from click.testing import Result
from plugin_support import mergekit_yaml, one_error, state, write_state

import rotation_merge as rm
from rotation_merge.errors import DataError
from rotation_merge.model.open import open_model
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import Scores, score
from rotation_merge.search import judge
from rotation_merge.search import run as search
from rotation_merge.search.parents import FAR, NEAR, SHARED
from rotation_merge.share.push import Publication, text_in

BASE, ENGLISH, C, LORA = (
    str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-0-lora-english")
)
TEXTS = ("--data", "demo:english", "--data", "demo:c")
TINY = ("--samples", "8", "--length", "24", "--batch-size", "4")
HUB = [f"{model}=org/{name}@{'a' * 40}" for model, name in ((BASE, "base"), (ENGLISH, "english"), (C, "c"))]


def run(*arguments: object, code: int = 0) -> Result:
    result = cli_support.run("merge", *TINY, *arguments)
    assert result.exit_code == code, result.output
    return result


def outcome(*arguments: object) -> dict[str, Any]:
    """What a search prints as JSON; the best merge is written in any case."""
    content: dict[str, Any] = json.loads(run(*arguments, "--anyway", "--json").stdout)
    return content


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("winner", ["regmean", "refit, plain", "task_arithmetic"])
def test_the_best_is_written_and_its_recipe_gives_the_same_bytes(
    winner: str, tmp_path: Path, only: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was named from where the command was run; files that the recipe names stay, and what made them."""
    only(winner)
    monkeypatch.chdir(CHECKPOINTS)
    out = tmp_path / "with ünusual name" / "out"
    facts = outcome(os.path.basename(ENGLISH), os.path.basename(C), f"{os.path.relpath(out)}/", *TEXTS)
    best, text = facts["tried"][0], (out / "recipe.yml").read_text()
    recipe = yaml.safe_load(text)
    assert (best["name"], best["recipe"], recipe["parameters"].get("lambda")) == (winner, text, best["scale"])
    assert {path.name for path in out.parent.iterdir()} <= {"out", "out-samples"}
    assert mergekit_yaml(text, tmp_path / "again").exit_code == 0
    first, second = state(out), state(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())
    _check_verdict(out, facts)
    files = {e["parameters"][key] for e in recipe["models"] for key in ("statistics", "data") if key in e["parameters"]}
    samples = [path for path in (out.parent / "out-samples").rglob("*.safetensors") if path.stem.isdigit()]
    assert (all(map(os.path.isfile, files)), len(samples)) == (True, 0 if winner == "task_arithmetic" else 2)
    plan = Publication(str(out), "me/out", HUB, with_data=True)
    assert set(plan.beside) >= files
    report = json.loads(text_in(plan.stage(str(tmp_path / "staged"))["rotation_merge.json"]))
    assert report["search"]["parents"][0]["name"].startswith("org/english@")


def _check_verdict(out: Path, facts: dict[str, Any]) -> None:
    """The verdict stands in the report and in the card."""
    verdict, card = json.loads((out / "rotation_merge.json").read_text())["search"], (out / "README.md").read_text()
    assert {name: verdict[name] for name in ("best", "ensemble", "left_out", "notes")}.items() <= facts.items()
    assert {parent["name"]: parent for parent in verdict["parents"]} == facts["parents"]
    for figures in (verdict["best"], verdict["ensemble"], *verdict["tried"]):
        assert f"{figures['score']:.4f}" in card
    assert (facts["labelled"], facts["base"].keys()) == (True, {"score", "accuracy", "on_base"})
    assert all(trial["figures"].keys() == facts["base"].keys() for trial in facts["tried"])
    for words in ("# out\n", "llama-0-english alone", "base's own text", "aligned merges (the models share"):
        assert words in card
    assert str(CHECKPOINTS) not in card
    assert facts["worth_it"] == (verdict["best"]["score"] < min(p["score"] for p in verdict["parents"]))


@pytest.mark.slow
def test_one_parent_alone_is_better_and_nothing_is_written(tmp_path: Path, only: Callable) -> None:
    """Independent models: the plain average is worse than either."""
    only("plain")
    out = tmp_path / "out"
    arguments = (BASE, CHECKPOINTS / "llama-1", out, "--data", "demo:python")
    assert "alone: it is better than every merge" in run(*arguments, code=1).output
    assert not list(tmp_path.iterdir())
    best = outcome(*arguments)["best"]
    (entry,) = json.loads((out / "evaluation.json").read_text())
    assert entry["figures"] == {"loss": best["score"], "accuracy": best["accuracy"]}
    assert entry["fingerprint"] == open_model(str(out), any_base=True).fingerprint
    assert (entry["pipeline"], entry["data"]) == ("text-generation", "demo:python")


@pytest.mark.slow
def test_the_verdict_says_why_a_better_score_was_not_taken(
    tmp_path: Path, only: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("plain", "refit, plain")
    monkeypatch.setattr(
        search, "forgetting", lambda figures, plain, _: (float(plain is not None and figures.score < plain.score), 0.5)
    )
    facts = outcome(ENGLISH, C, tmp_path / "out", *TEXTS, "--samples", "32", "--length", "64")
    assert facts["best"]["name"] == facts["plain"]["name"] == "plain"
    (note,) = facts["notes"]
    assert "Not chosen: 'refit, plain'" in note
    assert "loses 1.0000 nats more than the plain average; 0.5000 is allowed" in note
    assert note in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_python_takes_what_the_command_takes(tmp_path: Path, only: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, one source for all models, a relative base, adapters without their base, which are merged as models."""
    only("task_arithmetic")
    base, *adapters = (shutil.copytree(x, tmp_path / to) for x, to in ((BASE, "llama-0"), (LORA, "one"), (LORA, "two")))
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []
    for models, name in ((adapters, None), ((adapters[0], Path(C)), "llama-0")):
        config = rm.MergeConfig(samples=8, length=24, batch_size=4, base=name)
        result = rm.merge(models, tmp_path / "out", "demo:english", config, anyway=True, force=True, watch=lines.append)
        assert repr(result).startswith(("Outcome(Use ", "Outcome(No clear difference "))
        recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
        named = [str(model) if str(model) == C else f"{base}+{model}" for model in models]
        assert (recipe["base_model"], [entry["model"] for entry in recipe["models"]]) == (str(base), named)
    assert sum("rotation-merge lora" in line for line in lines) == 1


# --- folders ---------------------------------------------------------------------------------------------------------


def test_an_output_that_is_there_stays(tmp_path: Path) -> None:
    """Nothing is loaded before."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    code = (
        "import sys; from rotation_merge.cli.app import app\n"
        f"try: app(['merge', {ENGLISH!r}, {C!r}, {str(out)!r}])\n"
        "except SystemExit as end: print(end.code, {'torch', 'transformers', 'mergekit'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 set()\n"
    assert one_error(done.stderr).endswith("already exists; write somewhere else, or --force")


# --- time, interruptions ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "data", "tried"), [("10m", "demo:c", ["wudi", "plain", "task_arithmetic"]), ("0.1s", "self", ["wudi"])]
)
def test_after_the_deadline_nothing_new_is_tried(
    budget: str, data: str, tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable
) -> None:
    """The merge that runs is finished, the others are named; the first one is tried without a budget."""
    real, clock = search.merge_recipe, [0.0]

    def merging(*arguments: Any, **options: Any) -> None:
        clock[0] += 250.0
        real(*arguments, **options)

    only("plain", "task_arithmetic", "ties", "wudi", "regmean")
    monkeypatch.setattr(search, "merge_recipe", merging)
    monkeypatch.setattr(search.time, "perf_counter", lambda: clock[0])
    facts = outcome(ENGLISH, C, tmp_path / "out", "--data", data, "--base", BASE, "--budget", budget)
    assert {trial["name"]: trial["seconds"] for trial in facts["tried"]} == dict.fromkeys(tried, 250.0)
    assert facts["left_out"]["ties"] == facts["left_out"]["regmean"] == "the budget was spent"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (facts["unit"] == "divergence (nats)") == (data == "self")
    assert facts["ensemble"]["score"] < max(parent["score"] for parent in facts["parents"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "count", "best_scale"), [(360, 4, False), (900, 6, True), (60, 1, False)])
def test_most_of_the_budget_goes_into_merging(
    budget: int, count: int, best_scale: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine, on which a merge takes 20 s, or 86, and a model 0.9 s for an example."""
    clock, spoken, real = [0.0], dict[str, float](), {"merging": search.merge_recipe, "logits": judge._logits}

    def merging(text: str, *arguments: Any, **options: Any) -> None:
        clock[0] += 86.0 if "delegate: wudi" in text else 20.0
        real["merging"](text, *arguments, **options)

    def logits(model: Any, batch: Any, task: str) -> torch.Tensor:
        clock[0] += 0.9 * len(batch["input_ids"])
        return real["logits"](model, batch, task)

    def loss(model: Any, data: Data) -> Scores:
        clock[0] += 0.9 * data.examples
        return score(model, data)

    monkeypatch.setattr(search, "merge_recipe", merging)
    monkeypatch.setattr(judge, "_logits", logits)
    monkeypatch.setattr(judge, "score", loss)
    monkeypatch.setattr(search.time, "perf_counter", lambda: clock[0])
    config = rm.MergeConfig(samples=32, length=24, batch_size=2, base=BASE, budget=budget)
    data, out = ["demo:english", "demo:c"], tmp_path / "out"
    result = rm.merge([ENGLISH, C], out, data, config, anyway=True, watch=lambda text: spoken.update({text: clock[0]}))
    names = [text.removesuffix(" ...") for text in spoken]
    order = ["wudi", "plain", "tsv, calibrated", "task_arithmetic", "ties", "tsv", "regmean"][:count]
    assert [name for name in names if name in order] == order
    assert {trial.name for trial in result.tried} == set(order)
    assert any(trial.searched for trial in result.tried) == best_scale
    assert clock[0] < budget + 90
    assert clock[0] - spoken["measuring 2 models and the merge ..."] < budget / 3 + 30
    alone = "No other merge than 'wudi' was tried before the deadline."
    assert (alone in result.verdict.notes) == (alone in (out / "README.md").read_text()) == (count == 1)


@pytest.mark.slow
def test_an_interrupted_search_keeps_scores_and_a_failing_candidate_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable
) -> None:
    """A merge that cannot be made, or is too large for the GPU, does not end the search; nothing is half written."""
    real, recipes = search.merge_recipe, list[str]()
    errors = {
        "ties": DataError("it cannot be", remedy="try another"),
        "wudi": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity"),
        "tsv": KeyboardInterrupt(),
    }

    def merging(text: str, out: str, **options: Any) -> None:
        recipes.append(text)
        if error := errors.get(yaml.safe_load(text)["parameters"].get("delegate")):
            raise error
        real(text, out, **options)

    only("plain", *errors)
    monkeypatch.setattr(search, "merge_recipe", merging)
    out, arguments = tmp_path / "out", (ENGLISH, C, tmp_path / "out", "--data", "demo:python")
    run(*arguments, "--anyway", code=130)
    del errors["tsv"]
    for step, written in (("_complete", False), ("clean", True)):
        with monkeypatch.context() as patch:
            patch.setattr(search.Search, step, interrupted)
            run(*arguments, "--anyway", code=130)
        assert out.exists() == written
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "recipe.yml", "evaluation.json"} <= names
    facts = outcome(*arguments)
    assert {path.name for path in out.iterdir()} == names
    assert [recipes.count(recipe) for recipe in (recipes[1], recipes[-1])] == [1, 4]
    assert facts["relations"] == {C: pytest.approx(1.0, abs=0.1)}
    assert facts["left_out"]["ties"] == "it cannot be; try another"
    assert "the GPU ran out of memory" in facts["left_out"]["wudi"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert "--force" in run(*arguments, code=2).output


# --- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_how_models_lie_to_each_other_decides_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps apart: alignment does nothing. A planted permutation of neurons: it does, whatever the cosine says."""
    relations: list[str] = []
    monkeypatch.setattr(search, "candidates_of", lambda parents: relations.append(parents.relation) or [])
    tensors = state(Path(C))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        tensors[key] = tensors[key].flip(1 if name == "down_proj" else 0).contiguous()
    moved = write_state(tensors, Path(C), tmp_path / "moved")
    for donor in (C, moved, CHECKPOINTS / "llama-1"):
        assert "no merge could be made" in run(ENGLISH, donor, tmp_path / "out", "--data", "demo:c", code=2).output
    assert relations == [SHARED, NEAR, FAR]
