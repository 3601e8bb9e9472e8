"""The parts of a search: the common base, candidates, samples, judges, forgetting, the scale of a change."""

from __future__ import annotations

import copy
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS
from gguf_support import written
from safetensors.torch import load_file

from rotation_merge.errors import DataError
from rotation_merge.model.adapter_base import on_base
from rotation_merge.model.open import open_model
from rotation_merge.run.data import Data, read_samples
from rotation_merge.run.evaluate import score
from rotation_merge.run.functions import load
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.candidates import CHANGES, Candidates
from rotation_merge.search.job import SearchConfig
from rotation_merge.search.judge import Figures, Forgetting, Judge
from rotation_merge.search.outcome import Outcome, Trial
from rotation_merge.search.preparation import FAR, NEAR, SHARED, Parents, split, write_data
from rotation_merge.search.run import Search
from rotation_merge.search.scaling import STEP, best_scale

BASE, ENGLISH, C, OTHER = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-1"))
LORA = str(CHECKPOINTS / "llama-0-lora-english")


def copied(name: str, to: Path, base: str | None = None) -> str:
    shutil.copytree(name, to)
    if base is not None:
        (to / "README.md").write_text(f"---\nbase_model: {base}\n---\n# Card\n")
    return str(to)


def base_of(*models: str, name: str | None = None) -> tuple[str, str] | None:
    """The name of the base that is found, and why it is the base."""
    base = find_base(models, name)
    return None if base is None else (base.name, base.why)


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_base_is_found_by_what_was_changed(tmp_path: Path) -> None:
    """A sibling, an independent model and the base itself stand beside: changes to the base alone are unlike."""
    base = find_base([ENGLISH, C])
    assert base is not None
    assert (base.name, base.why) == (BASE, "by its weights")
    assert base.changes.ratio == pytest.approx(1.3, abs=0.05)
    models = [copied(name, tmp_path / name[-5:]) for name in (ENGLISH, BASE, C)]
    among = find_base(models)
    assert among is not None
    assert (among.name, set(among.changes.lengths)) == (models[1], {models[0], models[2]})
    assert base_of(f"{BASE}+{LORA}", C) == (BASE, "base of the adapter (llama-0-lora-english)")
    assert on_base(LORA, BASE) == f"{BASE}+{LORA}"
    assert on_base(BASE) == BASE


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
    stored = {"base": BASE, "a": ENGLISH, "b": C}
    files = {name: str(written(Path(model), tmp_path / f"{name}.gguf")) for name, model in stored.items()}
    assert base_of(files["a"], files["b"]) is None
    assert base_of(files["a"], files["b"], name=files["base"]) == (files["base"], "as given")


# --- candidates ------------------------------------------------------------------------------------------------------


def candidates(relation: str, base: Any = None) -> Candidates:
    parts: dict[str, Any] = dict.fromkeys(Parents.__dataclass_fields__)
    parts |= {"anchor": open_model(ENGLISH, any_base=True), "relation": relation, "base": base, "training": [None]}
    config = SearchConfig(models=(ENGLISH, C), out="out", data=("self",), samples=8)
    return Candidates(config, Parents(**{**parts, "data": {ENGLISH: "self", C: "self"}}), Path("files"))


def names(relation: str, base: Any = None) -> list[str]:
    return [candidate.name for candidate in candidates(relation, base).all()]


def test_cheap_candidates_come_first_and_none_is_the_plain_one_again() -> None:
    """Averages, averages of aligned models, what is made from samples; nothing is aligned in shared coordinates."""
    samples = ["regmean", "refit, plain", "refit, whole model", "learned"]
    assert names(FAR) == names(NEAR) == ["plain", "heads, neurons", "whole model", *samples]
    assert names(SHARED) == ["plain", "regmean", "refit, plain"]
    for candidate in candidates(SHARED).all():
        assert {candidate.parameters[name] for name in ("attention", "heads", "ffn")} == {"none"}
    assert "share their coordinates" in candidates(SHARED).left_out()["aligned merges"]
    assert list(candidates(FAR).left_out()) == ["averages of task vectors"]
    assert "no base is known" in candidates(NEAR).left_out()["averages of task vectors"]


def test_changes_are_merged_where_there_is_a_base() -> None:
    """Their recipes name the base, which is none of their models."""
    base = find_base([ENGLISH, C])
    *cheap, costly = CHANGES
    for relation in (SHARED, NEAR):
        order = names(relation, base)
        assert (order[: 1 + len(cheap)], order[-1]) == (["plain", *cheap], costly)
    assert not {*CHANGES} & {*names(SHARED), *names(FAR, base)}
    alone = TaskVectorBase(C, "as given", base.changes if base else None)  # type: ignore[arg-type]
    assert {*CHANGES} & {*names(SHARED, alone)} == {"task_arithmetic"}
    assert any("one task vector" in why for why in candidates(SHARED, alone).left_out().values())
    for candidate in candidates(SHARED, base).all():
        recipe = yaml.safe_load(candidate.recipe(None))
        assert [entry["model"] for entry in recipe["models"]] == [ENGLISH, C]
        assert recipe["base_model"] == (BASE if candidate.name in CHANGES else ENGLISH)
        assert ("lambda" in recipe["parameters"]) == (candidate.name in CHANGES)


# --- samples ---------------------------------------------------------------------------------------------------------


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
    sets = split([Data(batches, "next token", 32)], seed=1)
    parts = [part[0] for part in (sets.training, sets.deciding, sets.reported)]
    seen = [set(batch["input_ids"].flatten().tolist()) for part in parts for batch in part.batches]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 96
    assert [len(part.batches) for part in parts] == [8, 4, 4]
    few = split([Data(batches[:3], "next token", 6)], seed=1)  # batches are divided
    assert [part[0].examples for part in (few.training, few.deciding, few.reported)] == [2, 2, 2]
    with pytest.raises(DataError, match="too few"):
        split([Data(batches[:1], "next token", 2)], seed=1)
    ones = [torch.ones(1, length, dtype=torch.int64) for length in (2, 4)]
    uneven = Data([{"input_ids": row, "attention_mask": row} for row in ones], "next token", 2)
    tensors = load_file(write_data(uneven, tmp_path / "d" / "x.safetensors"))
    assert tensors["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_what_another_search_left_is_neither_used_nor_lost(tmp_path: Path) -> None:
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
    other = Search(config, print)
    assert other.files != first.files
    other.files.mkdir()
    (other.files / "0.safetensors").write_text("x")
    other.clean()
    assert [path.name for path in (tmp_path / "out-samples").rglob("*.safetensors")] == ["statistics-0.safetensors"]


# --- judges ----------------------------------------------------------------------------------------------------------


def test_the_judge_counts_as_evaluate_does() -> None:
    model = load(BASE)
    data = read_samples(BASE, "demo:python", 8, 4, 32, module=model)
    judge = Judge([data], labelled=True)
    scores = score(model, data)
    parents, together = judge.parents({"a": model, "b": model})
    assert judge.measure(model) == parents["a"] == parents["b"]
    assert parents["a"].accuracy == pytest.approx(scores.main)
    assert [parents["a"].score, together.score] == pytest.approx([scores.loss] * 2, abs=1e-5)


def test_divergence_is_zero_for_the_parent_itself() -> None:
    model = load(BASE)
    judge = Judge([read_samples(BASE, "self", 4, 4, 16, module=model)], labelled=False)
    judge.prepare({"a": model})
    assert judge.measure(model).score == pytest.approx(0.0, abs=1e-6)
    assert judge.measure(load(OTHER)).score > 0.01


def test_a_lower_loss_with_fewer_right_answers_is_said() -> None:
    def of(*shares: float | None) -> str:
        parents = {name: Figures(1.0, share, []) for name, share in zip("ab", shares, strict=False)}
        best = Figures(0.5, shares[2], [])
        return repr(Outcome(True, [Trial("plain", best, 1.0, "")], parents, best, best, None))

    assert of(0.5, 0.25, 0.375).endswith(". Its accuracy is lower than that of a (37.5% against 50.0%).)")
    assert "accuracy" not in of(0.5, 0.25, 0.5) + of(None, None, None)


def figures(score: float, on_base: float, *texts: float) -> Figures:
    return Figures(score, None, [], on_base=on_base, base_texts=[*texts])


PLAIN = figures(1.5, 1.05)
FORGETS = [
    (PLAIN, PLAIN, 0.0),
    (figures(1.0, 1.14), PLAIN, 0.0),  # 0.09 more, a tenth of its gain is 0.1
    (figures(1.2, 1.14), PLAIN, 0.01),
    (figures(1.2, 1.14), None, 0.06),
    (Figures(1.2, None, []), PLAIN, 0.0),
    (figures(1.2, 1.14, 1.0, 1.3), replace(PLAIN, base_texts=[0.98, 0.98]), 0.0),  # by chance
    (figures(1.2, 1.14, 1.0, 1.0), replace(PLAIN, base_texts=[0.98, 0.98]), 0.01),
]
"""A merge, the plain average, and what the merge forgets beyond what it may."""


@pytest.mark.parametrize(("merge", "plain", "excess"), FORGETS)
def test_a_merge_that_forgets_more_than_it_may_does_not_win(
    merge: Figures, plain: Figures | None, excess: float
) -> None:
    forgetting = Forgetting([], figures(2.0, 1.0))
    assert forgetting.excess(merge, plain) == pytest.approx(excess)
    words = forgetting.why("ties", figures(1.2, 1.14), PLAIN)
    assert "'ties' (1.2000 on the selection samples) forgets too much" in words
    assert "0.0900 nats more" in words


# --- the scale -------------------------------------------------------------------------------------------------------


def line(goal: float, limit: float = 9.0) -> tuple[float, list[float]]:
    """The scale where a model with its weight nearest to `goal` is best, and above `limit` forgets; weights tried."""
    seen = []

    def measure(model: torch.nn.Linear) -> Figures:
        weight = float(model.weight.detach())
        seen.append(weight)
        return figures(abs(weight - goal), max(weight - limit, 0.0))

    merged, base = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(merged.weight, 2.0)
    torch.nn.init.constant_(base.weight, 1.0)
    return best_scale(merged, base, 1.0, measure, lambda found: (found.on_base or 0.0, found.score))[0], seen


@pytest.mark.parametrize("goal", [1.6, 2.0, 2.9])
def test_the_best_scale_is_found_on_the_line_from_the_base(goal: float) -> None:
    scale, seen = line(goal)
    assert abs(1 + scale - goal) <= min(abs(weight - goal) for weight in seen) + 1e-3
    assert (goal - 1) / STEP**0.5 < scale < (goal - 1) * STEP**0.5
    assert len(seen) == len(set(seen)) <= 8
    assert 0.6 < line(goal=2.9, limit=1.7)[0] <= 0.7  # one that forgets comes after every other


class Tied(torch.nn.Module):
    """An embedding that is the head, too, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(3))


def test_scales_move_every_tensor_of_the_merge_along_the_line_once() -> None:
    torch.manual_seed(0)
    base, merged = Tied(), Tied()
    merged.mean += 1.0
    before = copy.deepcopy(base.state_dict())
    change = {name: tensor - before[name] for name, tensor in copy.deepcopy(merged).state_dict().items()}
    visited: list[float] = []

    def measure(model: torch.nn.Module) -> Figures:
        moved = {name: tensor - before[name] for name, tensor in model.state_dict().items()}
        scales = [float((moved[name].flatten() @ x.flatten()) / x.square().sum()) for name, x in change.items()]
        torch.testing.assert_close(scales, [scales[0]] * len(scales), atol=1e-5, rtol=0)
        visited.append(scales[0])
        return figures((scales[0] - 2.0) ** 2, 0.0)

    scale, best = best_scale(merged, base, 1.0, measure, lambda found: (0.0, found.score))
    assert abs(scale - 2.0) < 0.2
    assert best.score < 0.04
    assert len(set(visited)) == len(visited)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())
