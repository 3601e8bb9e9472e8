"""`rotation-merge merge` writes the best it tried, whose recipe gives the same bytes, or says that none is worth it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from plugin_support import mergekit_yaml, state
from safetensors.torch import load_file

from rotation_merge.averaging.record import checkpoint_of
from rotation_merge.choosing.judge import Judge, split, write_data
from rotation_merge.cli.app import app
from rotation_merge.errors import DataError
from rotation_merge.samples.data import Data, read_batches
from rotation_merge.samples.demo import CHECKPOINTS
from rotation_merge.samples.evaluate import evaluate
from rotation_merge.samples.functions import load

ENGLISH, C = (str(CHECKPOINTS / f"llama-0-{domain}") for domain in ("english", "c"))
TINY = ("--samples", "8", "--length", "16", "--batch-size", "2")
OTHERS = {"V": "vit-0", "W": "vit-1", "L": "llama-0-lora-english"}
SMALL = ("--samples", "16", "--length", "48", "--batch-size", "4")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["merge", *map(str, arguments)])


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Two near fine-tunes, judged by text that they write themselves."""
    out = tmp_path_factory.mktemp("merge") / "out"
    result = run(ENGLISH, C, f"{out}/", *SMALL, "--budget", "3s", "--anyway", "--json")
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


def test_the_best_is_written_and_its_recipe_gives_the_same_bytes(merged: tuple[Path, dict], tmp_path: Path):
    out, found = merged
    scores = [entry["figures"]["score"] for entry in found["tried"]]
    assert scores == sorted(scores)
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


def test_one_parent_alone_is_better_and_nothing_is_written(tmp_path: Path):
    """Independent models, no alignment in the budget: the plain average is worse than either."""
    out = tmp_path / "out"
    pair = [CHECKPOINTS / f"llama-{seed}" for seed in (0, 1)]
    result = run(*pair, out, "--data", "demo:python", *SMALL, "--budget", "1s")
    assert result.exit_code == 1, result.output
    assert "alone is better than every merge" in result.output
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
    assert kept["fingerprint"] == checkpoint_of(str(out)).fingerprint
    assert (kept["pipeline"], kept["data"]) == ("text-generation", "demo:python")


def test_the_judge_counts_as_evaluate_does():
    model = load(str(CHECKPOINTS / "llama-0"))
    data = read_batches("demo:python", str(CHECKPOINTS / "llama-0"), model, limit=8, batch_size=4, length=32)
    judge = Judge([data], labelled=True)
    loss, accuracy = evaluate(model, data)
    found = judge.measure(model)
    assert found.score == pytest.approx(loss, abs=1e-5)
    assert found.accuracy == pytest.approx(accuracy)
    alone = judge.ensemble([judge.everywhere(model)] * 2)
    assert alone.score == pytest.approx(loss, abs=1e-5)


def test_divergence_is_zero_for_the_parent_itself():
    model = load(str(CHECKPOINTS / "llama-0"))
    data = read_batches("self", str(CHECKPOINTS / "llama-0"), model, limit=4, batch_size=4, length=16)
    bare = Judge([data], labelled=False)
    judge = Judge([data], labelled=False, parents=bare.everywhere(model))
    assert judge.measure(model).score == pytest.approx(0.0, abs=1e-6)
    assert judge.measure(load(str(CHECKPOINTS / "llama-1"))).score > 0.01


def test_samples_are_drawn_from_the_whole_file(tmp_path: Path):
    """A file that begins with one kind of text says nothing of the other where its first samples are taken."""
    (tmp_path / "x.txt").write_text("a" * 4000 + "b" * 4000)
    model = load(str(CHECKPOINTS / "llama-0"))
    read = [read_batches(str(tmp_path / "x.txt"), str(CHECKPOINTS / "llama-0"), model, 32, 8, 16, mixed=m)
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
    with pytest.raises(DataError, match="too few"):
        split([Data(batches[:3], "next token", 6)], seed=1)
    ones = [torch.ones(1, length, dtype=torch.int64) for length in (2, 4)]
    uneven = Data([{"input_ids": row, "attention_mask": row} for row in ones], "next token", 2)
    found = load_file(write_data(uneven, tmp_path / "d" / "x.safetensors"))
    assert found["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A", "OUT"], "two or more models"),
        (["A", "B", "OUT", "--budget", "soon"], "'soon' is no time"),
        (["A", "nowhere", "OUT"], "no such directory"),
        (["A", "B", "OUT", "--data", "one.txt", "--data", "demo:python", "--data", "demo:c"], "3 data for 2 models"),
        (["A", "V", "OUT"], "llama"),
        (["A", "B", "FILE"], "is a file"),
        (["A", "B", "/proc/nothing/out"], "cannot be written"),
        (["A", "B", "A", "--force"], "is one of the models"),
        (["A", "A/", "OUT"], "is named twice"),
        (["A", "L", "OUT"], "is an adapter, no model; write llama-0+"),
        (["V", "W", "OUT", "--data", __file__], "takes images, no text"),
        (["A", "B", "OUT", "--dtype", "float31"], "did you mean 'float32'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path):
    places = {word: str(CHECKPOINTS / name) for word, name in OTHERS.items()}
    names = {**places, "A/": f"{ENGLISH}/", "A": ENGLISH, "B": C, "OUT": str(tmp_path / "out"), "FILE": __file__}
    result = run(*[names.get(word, word) for word in arguments], *SMALL)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_into_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, _: path != str(tmp_path))
    result = run(ENGLISH, C, tmp_path, *SMALL)
    assert result.exit_code == 2
    assert result.stderr == f"Error: {tmp_path}: cannot be written into; write somewhere else\n"


def test_what_another_search_left_is_neither_used_nor_lost(tmp_path: Path):
    """Files beside OUT are those of these models and samples; a merge that is there keeps what its recipe names."""
    from rotation_merge.choosing.making import Wish
    from rotation_merge.choosing.run import Choice

    text = tmp_path / "a.txt"
    text.write_text("a" * 4000)
    wish = Wish((ENGLISH, C), str(tmp_path / "out"), (str(text),), samples=8)
    first = Choice(wish, print)
    assert Choice(replace(wish, budget=5.0), print).files == first.files
    assert Choice(replace(wish, seed=1), print).files != first.files
    first.files.mkdir(parents=True)
    (first.files / "statistics-0.safetensors").write_text("mine")
    text.write_text("b" * 4000)
    os.utime(text, ns=(1, 1))
    other = Choice(wish, print)
    assert other.files != first.files
    other.files.mkdir()
    (other.files / "0.safetensors").write_text("x")
    other.clean(written=False)
    assert [path.name for path in (tmp_path / "out-samples").rglob("*.safetensors")] == ["statistics-0.safetensors"]


def test_an_output_that_is_there_is_kept(tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    result = run(ENGLISH, C, tmp_path / "out", *SMALL)
    assert result.exit_code == 2
    assert "--force" in result.output


def test_an_interrupted_search_goes_on_and_a_failing_candidate_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was announced is of the size of what it took; a merge that cannot be made does not end the search."""
    from rotation_merge.choosing import run as search

    real, made = search.merge_recipe, list[str]()

    def merging(text: str, out: str, **options: object) -> None:
        made.append(text)
        if len(made) == 2:
            raise DataError("it cannot be", remedy="try another")
        if len(made) == 4:
            raise KeyboardInterrupt
        real(text, out, **options)

    monkeypatch.setattr(search, "merge_recipe", merging)
    arguments = (ENGLISH, C, tmp_path / "out", "--data", "demo:python", *TINY, "--anyway", "--json")
    assert run(*arguments).exit_code == 130
    assert list((tmp_path / "out.unfinished").glob("plain-*.json"))
    plain = made[0]
    again = run(*arguments, "--budget", "1s")
    assert again.exit_code == 0, again.output
    assert made.count(plain) == 1
    found = json.loads(again.stdout[again.stdout.index("{") :])
    assert found["relations"] == {C: pytest.approx(1.0, abs=0.1)}
    assert found["tried"]


def test_its_recipe_runs_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Models and files that were named from where the command was run."""
    from rotation_merge.choosing import run as search

    real, made = search.candidates, list[str]()
    monkeypatch.setattr(search, "candidates", lambda *given, **more: [c for c in real(*given, **more) if c.needs][:1])
    monkeypatch.setattr(search, "merge_recipe", lambda text, *_, **__: (made.append(text), interrupted()))
    monkeypatch.chdir(CHECKPOINTS)
    place = os.path.relpath(tmp_path / "out")
    assert run(os.path.basename(ENGLISH), os.path.basename(C), place, "--data", "demo:python", *TINY).exit_code == 130
    (text,) = made
    assert f"base_model: {ENGLISH}\n" in text
    assert f"{tmp_path / 'out-samples'}{os.sep}" in text


def test_interrupted_while_it_writes_it_goes_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing half written, whenever it ends; what was moved to OUT is neither made again nor lost."""
    from rotation_merge.choosing import run as search

    real, merging, made = search.candidates, search.merge_recipe, list[str]()
    monkeypatch.setattr(search, "candidates", lambda *given, **more: real(*given, **more)[:1])
    monkeypatch.setattr(search, "merge_recipe", lambda *given, **more: (made.append(given[1]), merging(*given, **more)))
    out = tmp_path / "out"
    arguments = (ENGLISH, C, out, "--data", "demo:python", *TINY, "--anyway")
    with monkeypatch.context() as patch:
        patch.setattr(search.os, "replace", lambda *given: interrupted() if given[1] == out else os.rename(*given))
        assert run(*arguments).exit_code == 130
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr(search.Choice, "clean", interrupted)
        assert run(*arguments).exit_code == 130
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "recipe.yml", "evaluation.json"} <= whole.keys()
    assert b"\n# out\n" in whole["README.md"]
    assert run(*arguments).exit_code == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    assert (len(made), [path.name for path in tmp_path.iterdir()]) == (1, ["out"])
    assert "--force" in run(*arguments).output


def test_announced_times_follow_what_was_measured():
    from rotation_merge.averaging.record import checkpoint_of
    from rotation_merge.choosing.candidates import candidates
    from rotation_merge.choosing.costs import Costs

    anchor = checkpoint_of(ENGLISH)
    every = candidates([ENGLISH, C], anchor.architecture, False, {"samples": 8}, {ENGLISH: "self", C: "self"}, True)
    by_name = {candidate.name: candidate for candidate in every}
    costs = Costs(anchor.architecture, anchor.shapes, forward=0.5)
    assert costs.expected(by_name["plain"], 60) is None
    costs.took(by_name["plain"], 1.0)
    assert costs.expected(by_name["learned"], 60) == pytest.approx(31.0)
    assert costs.expected(by_name["refit, plain"], 60) == pytest.approx(13.0)
    costs.writing = 4.0
    assert costs.expected(by_name["refit, plain"], 60) == pytest.approx(21.0)
    costs.took(by_name["refit, plain"], 21.0)
    assert costs.expected(by_name["refit, whole model"], 60) > 20
    costs.took(by_name["whole model"], 5.0)
    assert costs.expected(by_name["whole model, by activations"], 60) > 30.0
    assert 1.0 < costs.expected(by_name["attention alone"], 60) < 15.0
    assert [candidate.name for candidate in every][-3:-1] == ["lower layers", "upper layers"]
    assert by_name["lower layers"].parameters["layers"] == "0-1"
    seen = by_name["whole model, by activations"]
    assert (seen.kind, seen.parameters["match_on"], seen.of_model[C]) == ("seen", "both", {"data": "self"})
    assert costs.expected(seen, 60) > costs.expected(by_name["whole model"], 60)


def test_a_soup_keeps_what_helps(monkeypatch: pytest.MonkeyPatch):
    """One after the other, in the order of their worth; what does not help is left out again."""
    from rotation_merge.choosing.candidates import Candidate
    from rotation_merge.choosing.judge import Figures
    from rotation_merge.choosing.making import Wish
    from rotation_merge.choosing.outcome import Tried
    from rotation_merge.choosing.run import Choice

    worth = {"ab": 2.0, "ac": 9.0, "abc": 3.0, "abd": 1.0}
    seen = []

    def trying(candidate: Candidate, *_: object) -> Tried:
        seen.append("".join(sorted(candidate.models)))
        return Tried(candidate.name, Figures(worth[seen[-1]], None, []), 1.0, "")

    choice = Choice(Wish(tuple("abcde"), "out", ("self",)), print)
    choice.order = list("abcde")
    monkeypatch.setattr(choice, "_try", trying)
    worth["abde"] = 5.0
    choice._soup([(Candidate("plain", "b", tuple("bacde"), {}), Tried("plain", Figures(4.0, None, []), 1.0, ""))])
    assert seen == ["ab", "abc", "abd", "abde"]


def test_polish_is_a_step_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The merge stays as its recipe makes it; the trained model stands beside it with figures of its own."""
    from rotation_merge.choosing import run as search
    from rotation_merge.cli import polish
    from rotation_merge.learning.polish import PolishReport

    def polished(merged: str, out: str, teachers: object, sources: list[str], ways: object) -> PolishReport:
        assert (teachers, sources) == ((ENGLISH, C), ["self", "self"])
        shutil.copytree(merged, out)
        return PolishReport(1.0, 0.5)

    real = search.candidates
    monkeypatch.setattr(search, "candidates", lambda *given, **more: real(*given, **more)[:1])
    monkeypatch.setattr(polish, "polished", polished)
    result = run(ENGLISH, C, tmp_path / "out", *TINY, "--anyway", "--polish", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["polished"]
    assert found["out"] == str(tmp_path / "out-polished")
    assert "divergence (nats) on samples that nothing has seen" in found["verdict"]
    assert (tmp_path / "out" / "recipe.yml").exists()


def test_a_lower_loss_with_fewer_right_answers_is_said():
    from rotation_merge.choosing.judge import Figures
    from rotation_merge.choosing.outcome import Outcome
    from rotation_merge.cli.merge import _less_right

    def of(*shares: float | None) -> str:
        figures = [Figures(1.0, share, []) for share in shares]
        return _less_right(Outcome(True, [], {"a": figures[0], "b": figures[1]}, figures[0], figures[2], None))

    assert of(0.5, 0.25, 0.375) == "Its accuracy is lower than that of a (37.5% against 50.0%)."
    assert of(0.5, 0.25, 0.5) == of(None, None, None) == ""
