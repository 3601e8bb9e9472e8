"""`rotation-merge merge` writes the best it tried, whose recipe gives the same bytes, or says that none is worth it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cli_support
import pytest
import torch
from cli_support import CHECKPOINTS
from click.testing import Result
from plugin_support import mergekit_yaml, state, write_state
from safetensors.torch import load_file

from rotation_merge.errors import DataError
from rotation_merge.files import read_part
from rotation_merge.model.open import open_model
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import evaluate
from rotation_merge.run.functions import load
from rotation_merge.search.candidates import Candidates
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Figures, Judge
from rotation_merge.search.outcome import Outcome, Trial
from rotation_merge.search.preparation import FAR, NEAR, SHARED, Parents, split, write_data
from rotation_merge.search.run import Search

ENGLISH, C = (str(CHECKPOINTS / f"llama-0-{domain}") for domain in ("english", "c"))
TINY = ("--samples", "8", "--length", "16", "--batch-size", "2")
OTHERS = {"V": "vit-0", "W": "vit-1", "OTHER": "llama-1", "BASE": "llama-0", "LORA": "llama-0-lora-english"}
LORA = CHECKPOINTS / OTHERS["LORA"]
SMALL = ("--samples", "16", "--length", "48", "--batch-size", "4")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def run(*arguments: object) -> Result:
    return cli_support.run("merge", *arguments)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Two near fine-tunes, judged by text that they write themselves."""
    out = tmp_path_factory.mktemp("merge") / "out"
    result = run(ENGLISH, C, f"{out}/", *SMALL, "--budget", "3s", "--anyway", "--json")
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


@pytest.mark.slow
def test_the_best_is_written_and_its_recipe_gives_the_same_bytes(merged: tuple[Path, dict], tmp_path: Path):
    out, found = merged
    forgetful = " ".join(found["notes"])
    rivals = [entry for entry in found["tried"] if f"Not chosen: '{entry['name']}'" not in forgetful]
    scores = [entry["figures"]["score"] for entry in rivals]
    assert found["tried"][0]["figures"]["score"] == min(scores)
    assert "plain" in [entry["name"] for entry in found["tried"]]
    assert (out / "recipe.yml").read_text() == found["tried"][0]["recipe"]
    assert (out / "tokenizer_config.json").exists()
    assert not Path(f"{out}.unfinished").exists()
    result = mergekit_yaml((out / "recipe.yml").read_text(), tmp_path / "again")
    assert result.exit_code == 0, result.output
    first, again = state(out), state(tmp_path / "again")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_figures_are_of_samples_that_nothing_saw(merged: tuple[Path, dict]):
    """Parents diverge from one another, the ensemble less; the merge reported is the one written."""
    _, found = merged
    assert not found["labelled"]
    parents = [figures["score"] for figures in found["parents"].values()]
    assert found["ensemble"]["score"] < max(parents)
    assert found["worth_it"] == (found["best"]["score"] < min(parents))


@pytest.mark.slow
def test_one_parent_alone_is_better_and_nothing_is_written(tmp_path: Path):
    """Independent models, no alignment in the budget: the plain average is worse than either."""
    out = tmp_path / "out"
    pair = [CHECKPOINTS / f"llama-{seed}" for seed in (0, 1)]
    result = run(*pair, out, "--data", "demo:python", *SMALL, "--budget", "1s")
    assert result.exit_code == 1, result.output
    assert "alone: it is better than every merge" in result.output
    assert not out.exists()
    assert not list(tmp_path.iterdir())
    again = run(*pair, out, "--data", "demo:python", *SMALL, "--budget", "1s", "--anyway", "--json")
    assert again.exit_code == 0
    found = json.loads(again.stdout)
    assert found["labelled"]
    assert found["best"]["accuracy"] is not None
    assert (out / "recipe.yml").exists()
    (kept,) = json.loads((out / "evaluation.json").read_text())
    assert kept["figures"] == {"loss": found["best"]["score"], "accuracy": found["best"]["accuracy"]}
    assert kept["fingerprint"] == open_model(str(out), any_base=True).fingerprint
    assert (kept["pipeline"], kept["data"]) == ("text-generation", "demo:python")


def test_the_judge_counts_as_evaluate_does():
    model = load(str(CHECKPOINTS / "llama-0"))
    data = read_samples(str(CHECKPOINTS / "llama-0"), "demo:python", 8, 4, 32, module=model)
    judge = Judge([data], labelled=True)
    loss, accuracy = evaluate(model, data)
    found = judge.measure(model)
    assert found.score == pytest.approx(loss, abs=1e-5)
    assert found.accuracy == pytest.approx(accuracy)
    parents, together = judge.parents({"a": model, "b": model})
    assert parents["a"] == parents["b"] == found
    assert together.score == pytest.approx(loss, abs=1e-5)


def test_divergence_is_zero_for_the_parent_itself():
    model = load(str(CHECKPOINTS / "llama-0"))
    data = read_samples(str(CHECKPOINTS / "llama-0"), "self", 4, 4, 16, module=model)
    judge = Judge([data], labelled=False)
    judge.prepare({"a": model})
    assert judge.measure(model).score == pytest.approx(0.0, abs=1e-6)
    assert judge.measure(load(str(CHECKPOINTS / "llama-1"))).score > 0.01


def test_samples_are_drawn_from_the_whole_file(tmp_path: Path):
    """A file that begins with one kind of text says nothing of the other where its first samples are taken."""
    (tmp_path / "x.txt").write_text("a" * 4000 + "b" * 4000)
    model = load(str(CHECKPOINTS / "llama-0"))
    read = [read_samples(str(CHECKPOINTS / "llama-0"), str(tmp_path / "x.txt"), 32, 8, 16, module=model, mixed=m)
            for m in (False, True)]  # fmt: skip
    kinds = [[set(batch["input_ids"].flatten().tolist()) for batch in data.batches] for data in read]
    assert kinds[0] == [{ord("a")}] * 4
    assert kinds[1] == [{ord("a"), ord("b")}] * 4
    assert [data.examples for data in read] == [32, 32]


def test_parts_do_not_overlap_and_files_are_read_back(tmp_path: Path):
    batches = [{"input_ids": torch.arange(6).reshape(2, 3) + 10 * i} for i in range(16)]
    sets = split([Data(batches, "next token", 32)], seed=1)
    seen = [set(b["input_ids"].flatten().tolist()) for part in (sets.training, sets.deciding, sets.reported)
            for b in part[0].batches]  # fmt: skip
    assert sum(map(len, seen)) == len(set().union(*seen)) == 96
    assert [len(p[0].batches) for p in (sets.training, sets.deciding, sets.reported)] == [8, 4, 4]
    few = split([Data(batches[:3], "next token", 6)], seed=1)  # batches are divided
    assert [p[0].examples for p in (few.training, few.deciding, few.reported)] == [2, 2, 2]
    with pytest.raises(DataError, match="too few"):
        split([Data(batches[:1], "next token", 2)], seed=1)
    ones = [torch.ones(1, length, dtype=torch.int64) for length in (2, 4)]
    uneven = Data([{"input_ids": row, "attention_mask": row} for row in ones], "next token", 2)
    found = load_file(write_data(uneven, tmp_path / "d" / "x.safetensors"))
    assert found["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def spoilt(name: str, folder: Path) -> Path:
    """A model, or an adapter, that a search refuses; any other word as it is."""
    if name not in ("GRANITE", "NAN", "MOVED", "LORA 1", "LORA 2"):
        return Path(name)
    if name.startswith("LORA"):
        return Path(shutil.copytree(LORA, folder / name.replace(" ", "-")))
    tensors, config = state(Path(C)), json.loads((Path(C) / "config.json").read_text())
    if name == "NAN":
        tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))
        return write_state(tensors, Path(C), folder / name)
    shutil.copytree(C, folder / name)
    if name == "GRANITE":  # computes otherwise by a Llama's weights
        config |= {"model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.5}
        (folder / name / "config.json").write_text(json.dumps(config))
    else:  # two words have each other's ids
        content = json.loads((Path(C) / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        first, second, *_ = vocabulary
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (folder / name / "tokenizer.json").write_text(json.dumps(content))
    return folder / name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A", "OUT"], "two or more models"),
        (["A", "B", "OUT", "--budget", "soon"], "a time such as 90s, 10m or 2h"),
        (["A", "nowhere", "OUT"], "no such directory"),
        (["A", "B", "OUT", "--data", "one.txt", "--data", "demo:python", "--data", "demo:c"], "3 data for 2 models"),
        (["A", "B", "OUT", "--data", "self", "--data", "one.txt"], "'self' stands beside other data"),
        (["A", "V", "OUT"], "architecture is"),
        (["A", "B", "FILE"], "is a file"),
        (["A", "B", "/proc/nothing/out"], "cannot be written"),
        (["A", "B", "A", "--force"], "is one of the inputs"),
        (["A", "A/", "OUT"], "is named twice"),
        (["V", "W", "OUT", "--data", __file__], "ViTForImageClassification takes pixel_values"),
        (["A", "B", "OUT", "--dtype", "float31"], "did you mean 'float32'"),
        (["A", "B", "OUT", "--base", "OTHER"], "is not the base of"),
        (["A", "B", "OUT", "--base", "nowhere"], "no such directory"),
        (["A", "B", "OUT", "--base", "V"], "architecture is"),
        (["A", "GRANITE", "OUT"], "attention_multiplier"),
        (["A", "NAN", "OUT"], "holds NaN or infinity"),
        (["A", "MOVED", "OUT"], "merge them by a recipe with 'tokenizer: {source: base}'"),
        (["BASE+LORA", "OTHER+LORA", "OUT"], "is an adapter of llama-0, not of"),
        (["LORA 1", "LORA 2", "OUT"], "is an adapter of llama-0, which is not on this machine; name its folder as"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path):
    places = {"A/": f"{ENGLISH}/", "A": ENGLISH, "B": C, "OUT": str(tmp_path / "out"), "FILE": __file__}
    (tmp_path / "models").mkdir()
    words = [str(spoilt(word, tmp_path / "models")) for word in arguments]
    places |= {word: str(CHECKPOINTS / name) for word, name in OTHERS.items()}
    named = ["+".join(places.get(part, part) for part in word.split("+")) for word in words]
    result = run(*named, *SMALL)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["models"]


def test_a_folder_that_cannot_be_written_into_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path))
    result = run(ENGLISH, C, tmp_path, *SMALL)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {tmp_path}: cannot be written into; write somewhere else\n"


def test_what_another_search_left_is_neither_used_nor_lost(tmp_path: Path):
    """Files beside OUT are those of these models and samples; a merge that is there keeps what its recipe names."""
    text = tmp_path / "a.txt"
    text.write_text("a" * 4000)
    config = SearchConfig(models=(ENGLISH, C), out=str(tmp_path / "out"), data=(str(text),), samples=8)
    first = Search(config, print)
    assert Search(replace(config, budget=5.0), print).files == first.files
    assert Search(replace(config, seed=1), print).files != first.files
    first.files.mkdir(parents=True)
    (first.files / "statistics-0.safetensors").write_text("mine")
    text.write_text("b" * 4000)
    os.utime(text, ns=(1, 1))
    other = Search(config, print)
    assert other.files != first.files
    other.files.mkdir()
    (other.files / "0.safetensors").write_text("x")
    other.clean()
    assert [path.name for path in (tmp_path / "out-samples").rglob("*.safetensors")] == ["statistics-0.safetensors"]


def test_an_output_that_is_there_is_kept(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    result = run(ENGLISH, C, tmp_path / "out", *SMALL)
    assert result.exit_code == 2
    assert "--force" in result.output


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_a_failing_candidate_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A merge that cannot be made does not end the search."""
    from rotation_merge.search import run as search

    real, made = search.merge_recipe, list[str]()

    def merging(text: str, out: str, **options: object) -> None:
        made.append(text)
        if len(made) == 2:
            raise DataError("it cannot be", remedy="try another")
        if len(made) == 3:
            raise KeyboardInterrupt
        real(text, out, **options)

    monkeypatch.setattr(search, "merge_recipe", merging)
    arguments = (ENGLISH, C, tmp_path / "out", "--data", "demo:python", *TINY, "--anyway", "--json")
    assert run(*arguments).exit_code == 130
    (record,) = (tmp_path / "out.unfinished").glob("plain.judged-*.pt")
    assert read_part(record)["name"] == "plain"
    plain = made[0]
    again = run(*arguments, "--budget", "1s")
    assert again.exit_code == 0, again.output
    assert made.count(plain) == 1
    found = json.loads(again.stdout[again.stdout.index("{") :])
    assert found["relations"] == {C: pytest.approx(1.0, abs=0.1)}
    assert found["tried"]


@pytest.mark.slow
def test_a_candidate_too_large_for_the_gpu_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable[..., None]
):
    real = Search._measured

    def measured(self: Search, model: object) -> Figures:
        if self.plain is not None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity")
        return real(self, model)

    only("plain", "task_arithmetic")
    monkeypatch.setattr(Search, "_measured", measured)
    result = run(ENGLISH, C, tmp_path / "out", "--data", "demo:python", *TINY, "--anyway", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [trial["name"] for trial in found["tried"]] == ["plain"]
    assert "the GPU ran out of memory (tried to allocate 2.00 GiB)" in found["left_out"]["task_arithmetic"]


def test_a_folder_that_no_search_wrote_is_refused(tmp_path: Path):
    diary = tmp_path / "out.unfinished" / "diary.txt"
    diary.parent.mkdir()
    diary.write_text("mine")
    result = run(ENGLISH, C, tmp_path / "out", "--data", "demo:python", *TINY, "--anyway")
    assert result.exit_code == 2
    assert "rotation-merge did not write it" in result.output
    assert [path.name for path in tmp_path.rglob("*")] == ["out.unfinished", "diary.txt"]


@pytest.mark.slow
def test_its_recipe_runs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Models and files that were named from where the command was run."""
    from rotation_merge.search import run as search

    real, made = Candidates.all, list[str]()
    monkeypatch.setattr(Candidates, "all", lambda self: [c for c in real(self) if c.needs][:1])
    monkeypatch.setattr(search, "merge_recipe", lambda text, *_, **__: (made.append(text), interrupted()))
    monkeypatch.chdir(CHECKPOINTS)
    place = os.path.relpath(tmp_path / "out")
    assert run(os.path.basename(ENGLISH), os.path.basename(C), place, "--data", "demo:python", *TINY).exit_code == 130
    (text,) = made
    assert f"base_model: {ENGLISH}\n" in text
    assert f"{tmp_path / 'out-samples'}{os.sep}" in text


@pytest.mark.slow
def test_interrupted_while_it_writes_it_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: Callable[..., None]
):
    """Nothing half written, whenever it ends; what is in OUT by then is neither made again nor lost."""
    from rotation_merge.search import run as search

    merging, made = search.merge_recipe, list[str]()
    monkeypatch.setattr(search, "merge_recipe", lambda *given, **more: (made.append(given[1]), merging(*given, **more)))
    only("plain")
    out = tmp_path / "out"
    arguments = (ENGLISH, C, out, "--data", "demo:python", *TINY, "--anyway")
    with monkeypatch.context() as patch:
        patch.setattr(search.Search, "_complete", interrupted)
        assert run(*arguments).exit_code == 130
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(search.Search, "clean", interrupted)
        assert run(*arguments).exit_code == 130
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "recipe.yml", "evaluation.json"} <= names
    weights = (out / "model.safetensors").read_bytes()
    assert "\n# out\n" in (out / "README.md").read_text()
    assert run(*arguments).exit_code == 0
    assert {path.name for path in out.iterdir()} == names
    assert (out / "model.safetensors").read_bytes() == weights
    assert (len(made), [path.name for path in tmp_path.iterdir()]) == (1, ["out"])
    assert "--force" in run(*arguments).output


def planner(relation: str = FAR, base: Any = None) -> Candidates:
    parts: dict[str, Any] = dict.fromkeys(Parents.__dataclass_fields__)
    parts |= {"anchor": open_model(ENGLISH, any_base=True), "relation": relation, "base": base, "training": [None]}
    config = SearchConfig(models=(ENGLISH, C), out="out", data=("self",), samples=8)
    return Candidates(config, Parents(**{**parts, "data": {ENGLISH: "self", C: "self"}}), Path("files"))


def names(relation: str, **values: Any) -> list[str]:
    return [candidate.name for candidate in planner(relation, **values).all()]


def test_cheap_candidates_come_first_and_none_is_the_plain_one_again() -> None:
    """Averages, averages of aligned models, what is made from samples; nothing is aligned in shared coordinates."""
    samples = ["regmean", "refit, plain", "refit, whole model", "learned"]
    assert names(FAR) == names(NEAR) == ["plain", "heads, neurons", "whole model", *samples]
    assert list(planner(FAR).left_out()) == ["averages of task vectors"]
    shared = planner(SHARED)
    assert names(SHARED) == ["plain", "regmean", "refit, plain"]
    for candidate in shared.all():
        assert {candidate.parameters[name] for name in ("attention", "heads", "ffn")} == {"none"}
    assert "share their coordinates" in shared.left_out()["aligned merges"]


def test_a_lower_loss_with_fewer_right_answers_is_said():
    def of(*shares: float | None) -> str:
        parents = {name: Figures(1.0, share, []) for name, share in zip("ab", shares, strict=False)}
        best = Figures(0.5, shares[2], [])
        tried = [Trial("plain", best, 1.0, "")]
        return repr(Outcome(True, tried, parents, best, best, None))

    assert of(0.5, 0.25, 0.375).endswith(". Its accuracy is lower than that of a (37.5% against 50.0%).)")
    assert "accuracy" not in of(0.5, 0.25, 0.5) + of(None, None, None)
