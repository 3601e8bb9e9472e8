"""The parts of a search: the common base, candidates, samples, judges, forgetting, the scale of a change."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, run
from plugin_support import make, state, write_state
from safetensors.torch import load_file

import rotation_merge as rm
from rotation_merge.errors import DataError
from rotation_merge.model.open import open_model
from rotation_merge.model.verdict import sentences
from rotation_merge.record import Score, Verdict, read_as
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import margin, score
from rotation_merge.run.functions import load
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.candidates import SCALES, candidates_of, left_out
from rotation_merge.search.judge import ENSEMBLE, Figures, Judge, forgetting
from rotation_merge.search.parents import FAR, NEAR, SHARED, Parents, SearchConfig, split, write_data
from rotation_merge.search.run import STEP, Outcome, Search, best_scale

BASE, ENGLISH, C, OTHER = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-1"))
LORA = str(CHECKPOINTS / "llama-0-lora-english")
CHANGES = {"task_arithmetic", *SCALES}


def copied(name: str, to: Path, base: str | None = None) -> str:
    shutil.copytree(name, to)
    if base is not None:
        (to / "README.md").write_text(f"---\nbase_model: {base}\n---\n# Card\n")
    return str(to)


def base_of(*models: str, name: str | None = None) -> tuple[str, str] | None:
    """The name of the base, and why it is the base."""
    base = find_base(models, name)
    return None if base is None else (base.name, base.why)


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_base_is_that_of_independent_changes(tmp_path: Path) -> None:
    """A sibling, an independent model and the base itself stand beside: changes to the base alone are unlike."""
    assert base_of(ENGLISH, C) == (BASE, "by its weights")
    models = [copied(name, tmp_path / name[-5:]) for name in (ENGLISH, BASE, C)]
    assert base_of(*models) == (models[1], "by its weights")
    assert base_of(f"{BASE}+{LORA}", C) == (BASE, "base of the adapter (llama-0-lora-english)")


def test_a_card_names_the_base_and_merges_are_none(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    models = [copied(ENGLISH, home / "a", str(away / "base")), copied(C, home / "b")]
    assert base_of(*models) is None
    copied(BASE, away / "base")
    assert base_of(*models) == (str(away / "base"), "the card of a names it")
    copied(BASE, home / "merge")
    shutil.rmtree(away)
    (home / "merge" / "mergekit_config.yml").write_text("merge_method: linear")
    assert base_of(*models) is None


@pytest.mark.parametrize("stored", ["folder", "hub"])
def test_a_config_names_the_model_that_was_trained(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the base only by its weights: a sibling, or a model itself, may stand there as well."""
    models = [copied(ENGLISH, tmp_path / "home" / "a"), copied(C, tmp_path / "home" / "b")]
    snapshot = tmp_path / "cache" / "models--org--base"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    name = copied(BASE, tmp_path / "away") if stored == "folder" else "org/base"
    if stored == "hub":
        copied(BASE, snapshot / "snapshots" / "1")
        (snapshot / "refs").mkdir()
        (snapshot / "refs" / "main").write_text("1")
    config = Path(models[0]) / "config.json"
    for stated, base in ((None, None), (ENGLISH, None), (name, (name, "by its weights"))):
        config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": stated}))
        assert base_of(*models) == base


def test_a_base_in_gguf_is_named(tmp_path: Path) -> None:
    """Files beside the models are not tried, as each would be decoded as a whole."""
    stored = Path(__file__).parents[1] / "model" / "gguf" / "llama.gguf"
    files = {name: str(shutil.copyfile(stored, tmp_path / f"{name}.gguf")) for name in ("base", "a", "b")}
    assert base_of(files["a"], files["b"]) is None
    assert base_of(files["a"], files["b"], name=files["base"]) == (files["base"], "as given")


# --- candidates ------------------------------------------------------------------------------------------------------


def parents(relation: str, base: str | None = None) -> Parents:
    case = object.__new__(Parents)
    case.anchor, case.relation, case.training = open_model(ENGLISH, any_base=True), relation, [None]
    case.base, case.data = base and TaskVectorBase(base, ""), {ENGLISH: "self", C: "self"}
    case.config = SearchConfig(models=(ENGLISH, C), out="out", data=("self",), samples=8)
    return case


SAMPLED = ["regmean", "refit, plain", "refit, whole model", "learned"]
ALIGNED = ["plain", "heads, neurons", "whole model", *SAMPLED]
CHEAP = ["wudi", "plain", "tsv, calibrated", "task_arithmetic", "ties", "tsv"]


@pytest.mark.parametrize(
    ("relation", "base", "names", "reasons"),
    [
        (FAR, None, ALIGNED, ["no common base"]),
        (FAR, BASE, ALIGNED, ["no common base"]),
        (NEAR, None, ALIGNED, ["no common base"]),
        (NEAR, BASE, [*CHEAP, *ALIGNED[1:]], []),
        (SHARED, None, ["plain", "regmean", "refit, plain"], ["share their coordinates", "no common base"]),
        (SHARED, BASE, [*CHEAP, "regmean", "refit, plain"], ["share their coordinates"]),
        (
            SHARED,
            C,
            ["plain", "task_arithmetic", "regmean", "refit, plain"],
            ["share their coordinates", "only one task vector"],
        ),
    ],
)
def test_what_usually_wins_comes_first_and_none_is_the_plain_one_again(
    relation: str, base: str | None, names: list[str], reasons: list[str]
) -> None:
    """Nothing is aligned in shared coordinates; changes need a base, which is none of the merged models."""
    case = parents(relation, base)
    candidates = candidates_of(case)
    assert [candidate.name for candidate in candidates] == names
    assert all(part in reason for part, reason in zip(reasons, left_out(case).values(), strict=True))
    for candidate in candidates:
        recipe = yaml.safe_load(candidate.recipe(None))
        changes, from_changes = candidate.name in CHANGES, "start" in recipe["parameters"]
        counting = [entry["model"] for entry in recipe["models"] if entry["parameters"]["weight"]]
        assert counting == [x for x in (ENGLISH, C) if not changes or x != base]
        assert recipe["base_model"] == (base if changes or from_changes else ENGLISH)
        assert from_changes == (candidate.name == "refit, plain" and "tsv, calibrated" in names)
        assert ("lambda" in recipe["parameters"]) == changes
        if relation == SHARED:
            assert {recipe["parameters"][name] for name in ("attention", "heads", "ffn")} == {"none"}


def test_a_head_apart_and_a_tied_one_meet_untied(tmp_path: Path) -> None:
    tied = [make("qwen2", tmp_path / f"{seed}", seed) for seed in range(2)]
    apart = write_state({**state(tied[1]), "lm_head.weight": torch.randn(40, 32)}, tied[1], tmp_path / "apart")
    for model, untied in ((tied[1], False), (apart, True)):
        case = parents(SHARED)
        case.config = replace(case.config, models=(str(tied[0]), str(model)))
        case.data = dict.fromkeys(case.config.models, "self")
        assert {candidate.parameters.get("untie", False) for candidate in candidates_of(case)} == {untied}


# --- samples ---------------------------------------------------------------------------------------------------------


def test_without_data_fine_tunes_are_judged_by_what_they_have_learned(tmp_path: Path) -> None:
    """A base among the models has learned nothing beside itself: it writes as it does alone."""
    models, modules = (BASE, ENGLISH), {name: load(name) for name in (BASE, ENGLISH)}
    gains = {}
    for base in (None, BASE):
        case = parents(SHARED, base)
        case.config, case._loaded = replace(case.config, models=models, samples=32, length=32), modules
        _, deciding, reporting = case._made_up()
        for number, name in enumerate(models):
            batches = [b for part in (deciding, reporting) for b in part[number].batches]
            losses = [fmean(score(modules[m], Data(batches, "next token", 16)).losses) for m in models]
            gains[name, base] = losses[0] - losses[1]
    assert gains[BASE, BASE] == gains[BASE, None] < 0
    assert gains[ENGLISH, BASE] > gains[ENGLISH, None] + 0.2 > 0.2


def test_a_base_is_loaded_only_where_models_write_text() -> None:
    case = parents(SHARED, BASE)
    case._loaded = {case.config.models[0]: torch.nn.Identity()}
    assert case._base_model() is None
    assert BASE not in case._loaded


def test_samples_are_drawn_from_the_whole_file(tmp_path: Path) -> None:
    """A file that begins with one kind of text says nothing of the other where its first samples are taken."""
    (tmp_path / "x.txt").write_text("a" * 4000 + "b" * 4000)
    model, source = load(BASE), str(tmp_path / "x.txt")
    for mixed, kinds in ((False, {ord("a")}), (True, {ord("a"), ord("b")})):
        data = read_samples(BASE, source, 32, 8, 16, module=model, mixed=mixed)
        assert [set(batch["input_ids"].flatten().tolist()) for batch in data.batches] == [kinds] * 4
        assert data.examples == 32


def test_parts_do_not_overlap_and_files_are_read_back(tmp_path: Path) -> None:
    batches = [{"input_ids": torch.arange(6).reshape(2, 3) + 10 * i} for i in range(16)]
    parts = [part for (part,) in split([Data(batches, "next token", 32)], seed=1)]
    values = [set(batch["input_ids"].flatten().tolist()) for part in parts for batch in part.batches]
    assert sum(map(len, values)) == len(set().union(*values)) == 96
    assert [len(part.batches) for part in parts] == [8, 4, 4]
    few = split([Data(batches[:3], "next token", 6)], seed=1)  # batches are divided
    assert [part.examples for (part,) in few] == [2, 2, 2]
    with pytest.raises(DataError, match="too few"):
        split([Data(batches[:1], "next token", 2)], seed=1)
    rows = [torch.ones(1, length, dtype=torch.int64) for length in (2, 4)]
    uneven = Data([{"input_ids": row, "attention_mask": row} for row in rows], "next token", 2)
    tensors = load_file(write_data(uneven, tmp_path / "d" / "x.safetensors"))
    assert tensors["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_files_of_another_search_are_neither_used_nor_lost(tmp_path: Path) -> None:
    """Files beside OUT are those of these models and samples; a merge that is there keeps what its recipe names."""
    text = tmp_path / "a.txt"
    text.write_text("a" * 4000)
    config = SearchConfig(models=(ENGLISH, C), out=str(tmp_path / "out"), data=(str(text),), samples=8)
    first = Search(config, print)
    assert Search(replace(config, budget=5.0), print).files == first.files
    assert Search(replace(config, seed=1), print).files != first.files
    first.files.mkdir(parents=True)
    (first.files / "statistics-0.safetensors").write_text("mine")
    os.utime(text, ns=(1, 1))
    second = Search(config, print)
    assert second.files != first.files
    second.files.mkdir()
    (second.files / "0.safetensors").write_text("x")
    second.clean()
    assert [path.name for path in (tmp_path / "out-samples").rglob("*.safetensors")] == ["statistics-0.safetensors"]


# --- judges ----------------------------------------------------------------------------------------------------------


def test_judges_count_as_evaluate_does_and_a_parent_does_not_diverge_from_itself() -> None:
    model, stranger = load(BASE), load(OTHER)
    data = read_samples(BASE, "demo:python", 8, 4, 32, module=model)
    judge, scores = Judge([data], labelled=True), score(model, data)
    (losses,) = judge.measure(model).losses
    assert losses == pytest.approx(scores.losses)
    figures = judge.compare({"a": model, "b": model}, parents=True)
    assert {(each.score, each.accuracy) for each in (figures["a"], figures["b"])} == {(fmean(losses), scores.main)}
    assert figures[ENSEMBLE].score == pytest.approx(scores.loss, abs=1e-5)
    judge = Judge([read_samples(BASE, "self", 4, 4, 16, module=model)], labelled=False)
    judge.prepare({"a": model})
    assert judge.measure(model).score == pytest.approx(0.0, abs=1e-6)
    assert judge.measure(stranger).score > 0.01


def test_a_lower_loss_with_fewer_right_answers_is_said() -> None:
    def words(*shares: float | None) -> str:
        parents = [Score(name, 1.0, share) for name, share in zip("ab", shares, strict=False)]
        return repr(Outcome(Verdict("", "accuracy", "", parents, Score("plain", 0.5, shares[2])), [], {}))

    assert words(0.5, 0.25, 0.375).endswith(". Its accuracy is lower than that of a (37.5% against 50.0%).)")
    assert "accuracy" not in words(0.5, 0.25, 0.5) + words(None, None, None)


NO_DIFFERENCE, USE_IT = (
    "No clear difference between the merge 'plain' and a alone",
    "Use the merge 'plain': it is better than each model alone",
)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([0.001, -0.02, 0.015, 0.0008], f"{NO_DIFFERENCE} (1.0008 against 1.0000: 0.0008 ± 0.023); more."),
        ([0.1], f"{NO_DIFFERENCE} (0.9000 against 1.0000: 0.1000 ± an unknown error); more."),
        ([0.5, 0.51, 0.49, 0.5], f"{USE_IT} (0.5000 against 1.0000: 0.5000 ± 0.013)."),
        (
            [-0.5, -0.51, -0.49, -0.5],
            "Use a alone: it is better than every merge (1.0000 against 1.5000: 0.5000 ± 0.013).",
        ),
    ],
)
def test_a_verdict_says_whether_samples_tell_models_apart(
    values: list[float], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By paired differences: the losses of single samples differ by more. The exit code says it, too."""
    losses = [float(2**i) for i in range(len(values))]
    half = margin([[x - value for x, value in zip(losses, values, strict=True)]], [losses])
    best = Score("plain", 1.0 - fmean(values))
    verdict = Verdict("", "", "", [Score("a", 1.0)], best, margin=half, remedy="more")
    assert sentences(verdict)[0].startswith(line)
    assert read_as(Verdict, asdict(verdict)) == verdict
    written = best.score < 1.0
    monkeypatch.setattr(rm, "merge", lambda *_, anyway, **__: Outcome(verdict, [], {}, written=written or anyway))
    done, anyway = (run("merge", ENGLISH, C, tmp_path / "out", "--json", *more) for more in ((), ("--anyway",)))
    facts = json.loads(done.stdout)
    assert (done.exit_code, anyway.exit_code) == (int(USE_IT not in line), 0)
    assert (facts["clear"], facts["margin"]) == (NO_DIFFERENCE not in line, half)
    assert (facts["written"] is not None) == facts["worth_it"] == written


def test_measuring_stops_when_there_is_no_time_and_then_all_models_are_measured_alike() -> None:
    """One forward of each parent for a batch; the ensemble is made of the same answers."""
    model, calls = load(BASE), list[int]()
    model.register_forward_hook(lambda *_: calls.append(1))
    data = read_samples(BASE, "demo:python", 32, 4, 32, module=model)
    judge = Judge([data, data], labelled=True)
    assert (judge.rounds, judge.least, judge.examples) == (8, 1, 64)
    judge.compare({"a": model, "b": model}, lambda: len(calls) < 12, parents=True)
    assert (judge.rounds, judge.examples, len(calls)) == (3, 24, 12)
    assert [len(losses) for losses in judge.measure(model).losses] == [12, 12]
    judge = Judge([data], labelled=True)
    assert (judge.compare({"a": model}, lambda: False)["a"].losses[0].__len__(), judge.rounds) == (8, 2)


def figures(score: float, on_base: float, *texts: float) -> Figures:
    return Figures(score, None, on_base, [*texts])


PLAIN = figures(1.5, 1.05)
FORGETS = [
    (PLAIN, PLAIN, 0.0),
    (figures(1.0, 1.14), PLAIN, 0.0),  # 0.09 more, a tenth of its gain is 0.1
    (figures(1.2, 1.14), PLAIN, 0.01),
    (figures(1.2, 1.14), None, 0.06),
    (figures(1.2, 1.14, 1.0, 1.3), replace(PLAIN, base_texts=[0.98, 0.98]), 0.0),  # by chance
    (figures(1.2, 1.14, 1.0, 1.0), replace(PLAIN, base_texts=[0.98, 0.98]), 0.01),
]
"""A merge, the plain average, and what the merge forgets beyond what it may."""


@pytest.mark.parametrize(("merge", "plain", "excess"), FORGETS)
def test_a_merge_that_forgets_more_than_it_may_does_not_win(
    merge: Figures, plain: Figures | None, excess: float
) -> None:
    more, allowed = forgetting(merge, plain, figures(2.0, 1.0))
    assert max(more - allowed, 0.0) == pytest.approx(excess)


# --- the scale -------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    """An embedding that is the head, too, and a buffer, all of one value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        torch.nn.init.constant_(self.embedding.weight, value)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.full((3,), value))


def line(goal: float, limit: float = 9.0) -> tuple[float, list[float]]:
    """The scale where a model with its values nearest to `goal` is best, and above `limit` forgets; values tried."""
    values, merged, base = [], Tied(2.0), Tied(1.0)

    def measure(model: torch.nn.Module) -> Figures:
        (value,) = {round(float(x), 4) for tensor in model.state_dict().values() for x in tensor.flatten()}
        values.append(value)
        return figures(abs(value - goal), max(value - limit, 0.0))

    scale, best = best_scale(merged, base, 1.0, measure, lambda measured: (measured.on_base or 0.0, measured.score))
    assert all(bool((tensor == 1).all()) for tensor in base.state_dict().values())
    assert best.score == pytest.approx(abs(1 + scale - goal), abs=1e-3)
    return scale, values


@pytest.mark.parametrize("goal", [1.6, 2.0, 2.9])
def test_the_best_scale_lies_on_the_line_from_the_base(goal: float) -> None:
    """Every tensor of the merge moves along it once."""
    scale, values = line(goal)
    assert abs(1 + scale - goal) <= min(abs(value - goal) for value in values) + 1e-3
    assert (goal - 1) / STEP**0.5 < scale < (goal - 1) * STEP**0.5
    assert len(values) == len(set(values)) <= 8
    assert 0.6 < line(goal=2.9, limit=1.7)[0] <= 0.7  # one that forgets comes after every other
