"""`rotation-merge merge` writes the best it tried, whose recipe gives the same bytes, or says that none is worth it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cli_support
import pytest
import torch
import yaml
from cli_support import CHECKPOINTS
from click.testing import Result
from plugin_support import mergekit_yaml, one_error, state, write_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import rotation_merge as rm
from rotation_merge.errors import DataError
from rotation_merge.files import read_part
from rotation_merge.model.open import open_model
from rotation_merge.report.files import read_report
from rotation_merge.search import run as search
from rotation_merge.search.candidates import Candidates
from rotation_merge.search.judge import Figures, Forgetting
from rotation_merge.search.preparation import FAR, NEAR, SHARED
from rotation_merge.share.push import draft, text_in

BASE, ENGLISH, C, LORA = (
    str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-0-lora-english")
)
TEXTS = ("--data", "demo:english", "--data", "demo:c")
TINY = ("--samples", "8", "--length", "24", "--batch-size", "4")
HUB = [f"{ENGLISH}=org/english@{'a' * 40}", f"{C}=org/c@{'b' * 40}"]


def run(*arguments: object, code: int = 0) -> Result:
    result = cli_support.run("merge", *TINY, *arguments)
    assert result.exit_code == code, result.output
    return result


def outcome(*arguments: object) -> dict[str, Any]:
    """What a search prints as JSON; the best merge is written in any case."""
    content: dict[str, Any] = json.loads(run(*arguments, "--anyway", "--json").stdout)
    return content


def again_the_same(out: Path, folder: Path) -> None:
    result = mergekit_yaml((out / "recipe.yml").read_text(), folder)
    assert result.exit_code == 0, result.output
    first, second = state(out), state(folder)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


# --- what is written -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two near fine-tunes, judged by text that they write themselves."""
    out = tmp_path_factory.mktemp("merge") / "out"
    return out, outcome(ENGLISH, C, f"{out}/", "--budget", "3s")


@pytest.mark.slow
def test_the_best_is_written_and_its_recipe_gives_the_same_bytes(merged: tuple[Path, dict], tmp_path: Path) -> None:
    """Parents diverge from one another on samples that nothing saw, the ensemble less."""
    out, found = merged
    forgetful = " ".join(found["notes"])
    rivals = [entry for entry in found["tried"] if f"Not chosen: '{entry['name']}'" not in forgetful]
    best = found["tried"][0]
    assert best["figures"]["score"] == min(entry["figures"]["score"] for entry in rivals)
    assert "plain" in [entry["name"] for entry in found["tried"]]
    assert (out / "recipe.yml").read_text() == best["recipe"]
    assert (out / "tokenizer_config.json").exists()
    assert not Path(f"{out}.unfinished").exists()
    again_the_same(out, tmp_path / "again")
    parents = [figures["score"] for figures in found["parents"].values()]
    assert not found["labelled"]
    assert found["ensemble"]["score"] < max(parents)
    assert found["worth_it"] == (found["best"]["score"] < min(parents))


@pytest.mark.slow
def test_one_parent_alone_is_better_and_nothing_is_written(tmp_path: Path) -> None:
    """Independent models, no alignment in the budget: the plain average is worse than either."""
    out = tmp_path / "out"
    arguments = (CHECKPOINTS / "llama-0", CHECKPOINTS / "llama-1", out, "--data", "demo:python", "--budget", "1s")
    assert "alone: it is better than every merge" in run(*arguments, code=1).output
    assert not list(tmp_path.iterdir())
    found = outcome(*arguments)
    assert found["labelled"]
    assert (out / "recipe.yml").exists()
    (kept,) = json.loads((out / "evaluation.json").read_text())
    assert kept["figures"] == {"loss": found["best"]["score"], "accuracy": found["best"]["accuracy"]}
    assert kept["fingerprint"] == open_model(str(out), any_base=True).fingerprint
    assert (kept["pipeline"], kept["data"]) == ("text-generation", "demo:python")


def test_the_verdict_stands_in_report_and_card_and_what_is_published(tmp_path: Path, only: Callable) -> None:
    only("plain", "regmean")
    out = tmp_path / "out"
    found = outcome(ENGLISH, C, out, *TEXTS)
    verdict, card = json.loads((out / "rotation_merge.json").read_text())["search"], (out / "README.md").read_text()
    staged = draft(str(out), "me/out", HUB, with_data=True).stage(str(tmp_path / "staged"), "main")
    published = text_in(staged["README.md"])
    for name in ("best", "plain", "ensemble"):
        assert verdict[name]["score"] == found[name]["score"]
        assert f"{verdict[name]['score']:.4f}" in card
    assert {p["name"]: p["score"] for p in verdict["parents"]} == {n: f["score"] for n, f in found["parents"].items()}
    assert [trial["name"] for trial in verdict["tried"]] == [trial["name"] for trial in found["tried"]]
    assert verdict["left_out"] == found["left_out"]
    for words in ("llama-0-english alone", "Merges tried, with scores on the selection samples:\n"):
        assert words in card
    assert "aligned merges (the models share their coordinates" in card
    assert str(CHECKPOINTS) not in card
    assert read_report(str(out / "rotation_merge.json")).search is not None
    assert "| org/c@" in published
    assert f"{verdict['best']['score']:.4f}" in published
    assert json.loads(text_in(staged["rotation_merge.json"]))["search"]["parents"][0]["name"].startswith("org/english@")


@pytest.mark.slow
def test_what_the_recipe_names_is_there_and_what_that_was_made_from(tmp_path: Path, only: Callable) -> None:
    """Statistics, and the samples that they were measured on; push finds them."""
    only("regmean")
    out = tmp_path / "with ünusual name" / "out"
    run(ENGLISH, C, out, *TEXTS, "--anyway")
    recipe = yaml.safe_load((out / "recipe.yml").read_text())
    files = [Path(entry["parameters"]["statistics"]) for entry in recipe["models"]]
    for number, file in enumerate(files):
        with safe_open(file, "pt") as opened:
            samples = Path(json.loads(opened.metadata()["made"])["data"])
        assert (samples.name, samples.is_file()) == (f"{number}.safetensors", True)
    with_data, without = (draft(str(out), "me/out", HUB, with_data) for with_data in (True, False))
    assert {Path(name) for name in with_data.beside} >= set(files)
    assert not without.beside
    commands = list(without.measurements(without.renaming("main")))
    assert [f"org/english@{'a' * 40} --data 0.safetensors" in line for line in commands] == [True, False]
    for plan in (with_data, without):
        staged = plan.stage(str(tmp_path / "staged"), "main")
        assert not [name for name, path in staged.items() if str(out.parent) in text_in(path)]


@pytest.mark.slow
def test_a_refit_names_its_samples_and_they_are_there(tmp_path: Path, only: Callable) -> None:
    only("refit, plain")
    run(ENGLISH, C, tmp_path / "out", *TEXTS, "--anyway")
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert all(Path(entry["parameters"]["data"]).is_file() for entry in recipe["models"])
    samples = sorted(path.name for path in (tmp_path / "out-samples").rglob("*.safetensors"))
    assert samples == ["0.safetensors", "1.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task_arithmetic", "wudi, both sides"])
def test_the_scale_is_searched_and_the_recipe_makes_the_merge(name: str, tmp_path: Path, only: Callable) -> None:
    only(name)
    out = tmp_path / "out"
    found = outcome(ENGLISH, C, out, *TEXTS)
    assert yaml.safe_load((out / "recipe.yml").read_text())["parameters"]["lambda"] == found["tried"][0]["scale"]
    assert found["base"]["on_base"] < found["best"]["on_base"]
    again_the_same(out, tmp_path / "again")
    assert "base's own text" in (out / "README.md").read_text()


@pytest.mark.slow
def test_the_verdict_says_why_a_better_score_was_not_taken(
    tmp_path: Path, only: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    only("plain", "refit, plain")
    real = Forgetting.measured

    def forgetful(self: Forgetting, model: Any, found: Figures) -> Figures:
        on_base = real(self, model, found)
        return on_base if found.score > 1.5 else replace(on_base, on_base=99.0)

    monkeypatch.setattr(Forgetting, "measured", forgetful)
    said = run(ENGLISH, C, tmp_path / "out", *TEXTS, "--anyway", "--samples", "32", "--length", "64").stdout
    assert "best merge: plain" in said
    for text in (said, (tmp_path / "out" / "README.md").read_text()):
        assert "Not chosen: 'refit, plain'" in text
        assert "forgets too much" in text


# --- adapters, Python ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters_without_their_base_are_merged_as_models(tmp_path: Path, only: Callable) -> None:
    """Their base is the folder that their configs name, beside them, and the base of their changes."""
    only("wudi")
    base, *adapters = (
        shutil.copytree(name, tmp_path / to) for name, to in ((BASE, "llama-0"), (LORA, "one"), (LORA, "two"))
    )
    factors = {name: 2 * x for name, x in load_file(Path(LORA) / "adapter_model.safetensors").items()}
    save_file(factors, adapters[1] / "adapter_model.safetensors")
    said = run(*adapters, tmp_path / "out", "--data", "demo:english", "--anyway").stderr
    assert "rotation-merge lora" in said
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert recipe["base_model"] == str(base)
    assert [entry["model"] for entry in recipe["models"]] == [f"{base}+{adapter}" for adapter in adapters]


@pytest.mark.slow
def test_python_takes_what_the_command_takes(tmp_path: Path, only: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, one source for all models, a relative base, the folder of an adapter without its base."""
    only("wudi")
    base, adapter = (shutil.copytree(name, tmp_path / to) for name, to in ((BASE, "llama-0"), (LORA, "adapter")))
    monkeypatch.chdir(tmp_path)
    config = rm.MergeConfig(samples=8, length=24, batch_size=4, base="llama-0")
    result = rm.merge((adapter, Path(C)), tmp_path / "out", "demo:english", config, anyway=True)
    assert [trial.name for trial in result.tried] == ["wudi"]
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert recipe["base_model"] == str(base)
    assert [entry["model"] for entry in recipe["models"]] == [f"{base}+{adapter}", C]


# --- bad input, folders ----------------------------------------------------------------------------------------------


def spoilt(name: str, folder: Path) -> Path:
    """A model, or an adapter, that a search refuses; any other word as it is."""
    if name.startswith("LORA "):
        return shutil.copytree(LORA, folder / name.replace(" ", "-"))
    if name not in ("GRANITE", "NAN", "MOVED"):
        return Path(name)
    if name == "NAN":
        tensors = state(Path(C))
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))
        return write_state(tensors, Path(C), folder / name)
    shutil.copytree(C, folder / name)
    file = folder / name / ("config.json" if name == "GRANITE" else "tokenizer.json")
    content = json.loads(file.read_text())
    if name == "GRANITE":  # computes otherwise by a Llama's weights
        content |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.5}
    else:  # two words have each other's ids
        words = content["model"]["vocab"]
        first, second, *_ = words
        words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(content))
    return folder / name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("A OUT", "two or more models"),
        ("nowhere A B", "the directory to write comes last"),
        ("A B OUT --budget soon", "a time such as 90s, 10m or 2h"),
        ("A nowhere OUT", "no such directory"),
        ("A B OUT --data one.txt --data demo:python --data demo:c", "3 data for 2 models"),
        ("A B OUT --data self --data one.txt", "'self' stands beside other data"),
        ("A V OUT", "architecture is"),
        ("A B FILE", "is a file"),
        ("A B /proc/nothing/out", "cannot be written"),
        ("A B A --force", "is one of the inputs"),
        ("A A/ OUT", "is named twice"),
        ("V W OUT --data FILE", "ViTForImageClassification takes pixel_values"),
        ("A B OUT --dtype float31", "did you mean 'float32'"),
        ("A B OUT --base OTHER", "is not the base of"),
        ("A B OUT --base nowhere", "no such directory"),
        ("A B OUT --base V", "architecture is"),
        ("A GRANITE OUT", "attention_multiplier"),
        ("A NAN OUT", "holds NaN or infinity"),
        ("A MOVED OUT", "merge them by a recipe with 'tokenizer: {source: base}'"),
        ("BASE+LORA OTHER+LORA OUT", "is an adapter of llama-0, not of"),
        ("LORA_1 LORA_2 OUT", "is an adapter of llama-0, which is not on this machine; name its folder as"),
    ],
)
def test_bad_input_is_one_line(arguments: str, said: str, tmp_path: Path) -> None:
    places = {"A/": f"{ENGLISH}/", "A": ENGLISH, "B": C, "OUT": str(tmp_path / "out"), "FILE": __file__}
    shipped = {"V": "vit-0", "W": "vit-1", "OTHER": "llama-1", "BASE": "llama-0", "LORA": "llama-0-lora-english"}
    places |= {word: str(CHECKPOINTS / name) for word, name in shipped.items()}
    places["nowhere"] = str(tmp_path / "nowhere") if arguments.startswith("nowhere") else "nowhere"
    (tmp_path / "models").mkdir()
    words = [str(spoilt(word.replace("_", " "), tmp_path / "models")) for word in arguments.split()]
    result = run(*("+".join(places.get(part, part) for part in word.split("+")) for word in words), code=2)
    assert said in result.output
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_what_others_wrote_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is there, and a folder beside it that no search wrote."""
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    out.mkdir()
    (out / "mine").write_text("x")
    assert "already exists; write somewhere else, or --force" in one_error(run(ENGLISH, C, out, code=2).output)
    work.mkdir()
    (work / "diary.txt").write_text("mine")
    other = run(ENGLISH, C, out, "--data", "demo:python", "--anyway", "--force", code=2)
    assert "rotation-merge did not write it" in other.output
    assert [path.name for path in tmp_path.rglob("*.*")] == ["out.unfinished", "diary.txt"]
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path))
    said = f"Error: {tmp_path}: cannot be written into; write somewhere else\n"
    assert run(ENGLISH, C, tmp_path, "--force", code=2).stderr == said


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


# --- time, interruptions ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_after_the_deadline_nothing_new_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge that runs is finished, the others are named; the first one is tried without a budget."""
    real, clock, calls = search.merge_recipe, [0.0], list[str]()

    def merging(text: str, out: str, **options: Any) -> None:
        calls.append(text)
        clock[0] += 400.0 * (len(calls) > 1)
        real(text, out, **options)

    monkeypatch.setattr(search, "merge_recipe", merging)
    monkeypatch.setattr(search.time, "perf_counter", lambda: clock[0])
    found = outcome(ENGLISH, C, tmp_path / "out", *TEXTS, "--base", BASE, "--budget", "10m")
    seconds = {trial["name"]: trial["seconds"] for trial in found["tried"]}
    assert (set(seconds), seconds["ties"]) == ({"plain", "task_arithmetic", "ties"}, 400.0)
    assert found["left_out"]["wudi"] == found["left_out"]["regmean"] == "the budget was spent"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    monkeypatch.undo()
    found = outcome(ENGLISH, C, tmp_path / "other", *TEXTS, "--budget", "0.1s")
    assert [trial["name"] for trial in found["tried"]] == ["plain"]


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_a_failing_candidate_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that cannot be made does not end the search."""
    real, made = search.merge_recipe, list[str]()

    def merging(text: str, out: str, **options: Any) -> None:
        made.append(text)
        if len(made) == 2:
            raise DataError("it cannot be", remedy="try another")
        if len(made) == 3:
            raise KeyboardInterrupt
        real(text, out, **options)

    monkeypatch.setattr(search, "merge_recipe", merging)
    arguments = (ENGLISH, C, tmp_path / "out", "--data", "demo:python")
    run(*arguments, "--anyway", code=130)
    (record,) = (tmp_path / "out.unfinished").glob("plain.judged-*.pt")
    assert read_part(record)["name"] == "plain"
    plain = made[0]
    found = outcome(*arguments, "--budget", "1s")
    assert made.count(plain) == 1
    assert found["relations"] == {C: pytest.approx(1.0, abs=0.1)}
    assert found["tried"]


@pytest.mark.slow
def test_a_candidate_too_large_for_the_gpu_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable
) -> None:
    real = search.Search._measured

    def measured(self: search.Search, model: object) -> Figures:
        if self.plain is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        return real(self, model)

    only("plain", "task_arithmetic")
    monkeypatch.setattr(search.Search, "_measured", measured)
    found = outcome(ENGLISH, C, tmp_path / "out", "--data", "demo:python")
    assert [trial["name"] for trial in found["tried"]] == ["plain"]
    assert "the GPU ran out of memory (tried to allocate 2.00 GiB)" in found["left_out"]["task_arithmetic"]


@pytest.mark.slow
def test_its_recipe_runs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models and files that were named from where the command was run."""
    real, made = Candidates.all, list[str]()
    monkeypatch.setattr(Candidates, "all", lambda self: [c for c in real(self) if c.needs][:1])
    monkeypatch.setattr(search, "merge_recipe", lambda text, *_, **__: (made.append(text), interrupted()))
    monkeypatch.chdir(CHECKPOINTS)
    place = os.path.relpath(tmp_path / "out")
    run(os.path.basename(ENGLISH), os.path.basename(C), place, "--data", "demo:python", code=130)
    (text,) = made
    assert f"base_model: {ENGLISH}\n" in text
    assert f"{tmp_path / 'out-samples'}{os.sep}" in text


@pytest.mark.slow
def test_interrupted_while_it_writes_it_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable
) -> None:
    """Nothing half written, whenever it ends; what is in OUT by then is neither made again nor lost."""
    merging, made = search.merge_recipe, list[str]()
    monkeypatch.setattr(search, "merge_recipe", lambda *given, **more: (made.append(given[1]), merging(*given, **more)))
    only("plain")
    out, arguments = tmp_path / "out", (ENGLISH, C, tmp_path / "out", "--data", "demo:python", "--anyway")
    for step, there in (("_complete", False), ("clean", True)):
        with monkeypatch.context() as patch:
            patch.setattr(search.Search, step, interrupted)
            run(*arguments, code=130)
        assert out.exists() == there
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "recipe.yml", "evaluation.json"} <= names
    weights = (out / "model.safetensors").read_bytes()
    assert "\n# out\n" in (out / "README.md").read_text()
    run(*arguments)
    assert {path.name for path in out.iterdir()} == names
    assert (out / "model.safetensors").read_bytes() == weights
    assert (len(made), [path.name for path in tmp_path.iterdir()]) == (1, ["out"])
    assert "--force" in run(*arguments, code=2).output


def test_what_a_kill_while_cleaning_up_left_goes_with_the_next_run(tmp_path: Path) -> None:
    """OUT is whole, and of the work only the mark is there, which goes last."""
    out, work = tmp_path / "out", tmp_path / "out.unfinished"
    for folder in (out, work):
        folder.mkdir()
    (out / "config.json").write_text("{}")
    (work / "run.txt").write_text("0")
    assert "already exists" in one_error(run(ENGLISH, C, out, *TEXTS, code=2).output)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    work.mkdir()
    (work / "notes.txt").write_text("mine")
    run(ENGLISH, C, out, *TEXTS, code=2)
    assert (work / "notes.txt").read_text() == "mine"


# --- what is tried ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_how_models_lie_to_each_other_decides_what_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps apart: alignment does nothing. A planted permutation of neurons: it does, whatever the cosine says."""
    chosen: list[str] = []
    monkeypatch.setattr(Candidates, "all", lambda self: chosen.append(self.parents.relation) or [])
    tensors = state(Path(C))
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.1.mlp.{name}.weight"
        tensors[key] = tensors[key].flip(1 if name == "down_proj" else 0).contiguous()
    moved = write_state(tensors, Path(C), tmp_path / "moved")
    for donor in (C, moved, CHECKPOINTS / "llama-1"):
        said = run(ENGLISH, donor, tmp_path / "out", "--data", "demo:c", code=2).output
        assert "no merge could be made" in said
    assert chosen == [SHARED, NEAR, FAR]
