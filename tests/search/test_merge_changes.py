"""The search among fine-tunes of one base: which base, which scale, what a merge forgets."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli_support import CHECKPOINTS, run
from gguf_support import written
from plugin_support import mergekit_yaml, state
from safetensors.torch import load_file, save_file
from test_merge_command import names, planner

import rotation_merge as rm
from rotation_merge.model.adapter_base import on_base
from rotation_merge.run.functions import load
from rotation_merge.search.base import TaskVectorBase, find_base
from rotation_merge.search.candidates import CHANGES
from rotation_merge.search.judge import Figures, Forgetting
from rotation_merge.search.preparation import FAR, NEAR, SHARED
from rotation_merge.search.scaling import STEP, best_scale

BASE, ENGLISH, C, OTHER = (str(CHECKPOINTS / name) for name in ("llama-0", "llama-0-english", "llama-0-c", "llama-1"))
TINY = ("--samples", "8", "--length", "24", "--batch-size", "4", "--anyway")


def copied(name: str, to: Path, base: str | None = None) -> str:
    shutil.copytree(name, to)
    if base is not None:
        (to / "README.md").write_text(f"---\nbase_model: {base}\n---\n# Card\n")
    return str(to)


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_base_is_found_by_what_was_changed() -> None:
    """A sibling, an independent model and the base itself stand beside: changes to the base alone are unlike."""
    base = find_base([ENGLISH, C])
    assert base is not None
    assert (base.name, base.why) == (BASE, "by its weights")
    assert base.changes.ratio == pytest.approx(1.3, abs=0.05)


def test_one_of_three_models_may_be_the_base(tmp_path: Path) -> None:
    models = [copied(name, tmp_path / name[-5:]) for name in (ENGLISH, BASE, C)]
    base = find_base(models)
    assert base is not None
    assert base.name == models[1]
    assert set(base.changes.lengths) == {models[0], models[2]}


def test_a_card_names_the_base_and_merges_are_none(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    models = [copied(ENGLISH, home / "a", str(away / "base")), copied(C, home / "b")]
    assert find_base(models) is None
    copied(BASE, away / "base")
    base = find_base(models)
    assert base is not None
    assert (base.name, base.why) == (str(away / "base"), "the card of a names it")
    copied(BASE, home / "merge")
    shutil.rmtree(away)
    (home / "merge" / "mergekit_config.yml").write_text("merge_method: linear")
    assert find_base(models) is None


@pytest.mark.parametrize("stored", ["folder", "hub"])
def test_a_config_names_the_model_that_was_trained(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the base only by its weights: a sibling, or a model itself, may stand there as well."""
    models = [copied(ENGLISH, tmp_path / "home" / "a"), copied(C, tmp_path / "home" / "b")]
    assert find_base(models) is None
    snapshot = tmp_path / "cache" / "models--org--base"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    name = copied(BASE, tmp_path / "away") if stored == "folder" else "org/base"
    if stored == "hub":
        copied(BASE, snapshot / "snapshots" / "1")
        (snapshot / "refs").mkdir()
        (snapshot / "refs" / "main").write_text("1")
    for named, known in ((ENGLISH, False), (name, True)):
        config = Path(models[0]) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": named}))
        base = find_base(models)
        assert (base is not None) == known
    assert base is not None
    assert (base.name, base.why) == (name, "by its weights")


def test_a_base_in_gguf_is_named(tmp_path: Path) -> None:
    """Files beside the models are not tried, as each would be decoded as a whole."""
    named = {"base": BASE, "a": ENGLISH, "b": C}
    files = {name: str(written(Path(model), tmp_path / f"{name}.gguf")) for name, model in named.items()}
    models = [files["a"], files["b"]]
    assert find_base(models) is None
    base = find_base(models, files["base"])
    assert base is not None
    assert base.name == files["base"]


def test_an_adapter_stands_on_its_base() -> None:
    base = find_base([f"{BASE}+{CHECKPOINTS / 'llama-0-lora-english'}", C])
    assert base is not None
    assert base.name == BASE
    assert "adapter" in base.why


@pytest.mark.slow
def test_adapters_without_their_base_are_merged_as_models(tmp_path: Path, only: Callable[..., None]) -> None:
    """Their base is the folder that their configs name, beside them, and the base of their changes."""
    only("wudi")
    copied(BASE, tmp_path / "llama-0")
    lora = CHECKPOINTS / "llama-0-lora-english"
    adapters = [copied(str(lora), tmp_path / name) for name in ("one", "two")]
    factors = {name: 2 * x for name, x in load_file(lora / "adapter_model.safetensors").items()}
    save_file(factors, Path(adapters[1]) / "adapter_model.safetensors")
    done = run("merge", *adapters, tmp_path / "out", *TINY, "--data", "demo:english")
    assert done.exit_code == 0, done.output
    assert "rotation-merge lora" in done.stderr
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    base = str(tmp_path / "llama-0")
    assert recipe["base_model"] == base
    assert [entry["model"] for entry in recipe["models"]] == [f"{base}+{adapter}" for adapter in adapters]


def test_an_adapter_stands_on_the_base_that_is_named() -> None:
    lora = str(CHECKPOINTS / "llama-0-lora-english")
    assert on_base(lora, BASE) == f"{BASE}+{lora}"
    assert on_base(BASE) == BASE


# --- what is tried ---------------------------------------------------------------------------------------------------


def test_changes_are_merged_where_there_is_a_base() -> None:
    base = find_base([ENGLISH, C])
    *cheap, costly = CHANGES
    for relation in (SHARED, NEAR):
        order = names(relation, base=base)
        assert order[: 1 + len(cheap)] == ["plain", *cheap]
        assert order[-1] == costly
    assert not {*CHANGES} & {*names(SHARED), *names(FAR, base=base)}
    assert "no base is known" in planner(NEAR).left_out()["averages of task vectors"]
    alone = TaskVectorBase(C, "as given", base.changes if base else None)  # type: ignore[arg-type]
    assert {*CHANGES} & {*names(SHARED, base=alone)} == {"task_arithmetic"}
    assert any("one task vector" in why for why in planner(SHARED, base=alone).left_out().values())


def test_recipes_of_changes_name_the_base_and_leave_it_out_of_the_models() -> None:
    base = find_base([ENGLISH, C])
    for candidate in planner(SHARED, base=base).all():
        recipe = yaml.safe_load(candidate.recipe(None))
        assert [entry["model"] for entry in recipe["models"]] == [ENGLISH, C]
        assert recipe["base_model"] == (BASE if candidate.name in CHANGES else ENGLISH)
        assert ("lambda" in recipe["parameters"]) == (candidate.name in CHANGES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["task_arithmetic", "wudi, both sides"])
def test_the_scale_is_searched_and_the_recipe_makes_the_merge(
    name: str, tmp_path: Path, only: Callable[..., None]
) -> None:
    only(name)
    done = run("merge", ENGLISH, C, tmp_path / "out", *TINY, "--data", "demo:english", "--data", "demo:c", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yml").read_text())
    assert recipe["parameters"]["lambda"] == found["tried"][0]["scale"]
    assert found["base"]["on_base"] < found["best"]["on_base"]
    again = mergekit_yaml((tmp_path / "out" / "recipe.yml").read_text(), tmp_path / "again")
    assert again.exit_code == 0, again.output
    first, second = state(tmp_path / "out"), state(tmp_path / "again")
    assert all(torch.equal(first[key], second[key]) for key in first)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base's own text" in card


# --- the scale -------------------------------------------------------------------------------------------------------


def line(goal: float, limit: float = 9.0) -> tuple[float, list[float]]:
    """The scale found where a model with its weight nearest to `goal` is best, and above `limit` forgets."""
    seen = []

    def measure(model: torch.nn.Linear) -> Figures:
        weight = float(model.weight)
        seen.append(weight)
        return Figures(abs(weight - goal), None, [], on_base=max(weight - limit, 0.0))

    merged, base = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        merged.weight.fill_(2.0)
        base.weight.fill_(1.0)
    return best_scale(merged, base, 1.0, measure, lambda figures: (figures.on_base or 0.0, figures.score))[0], seen


@pytest.mark.parametrize("goal", [1.6, 2.0, 2.9])
def test_the_best_scale_is_found_on_the_line_from_the_base(goal: float) -> None:
    scale, seen = line(goal)
    assert abs(1 + scale - goal) <= min(abs(weight - goal) for weight in seen) + 1e-3
    assert (goal - 1) / STEP**0.5 < scale < (goal - 1) * STEP**0.5
    assert len(seen) == len(set(seen)) <= 8


def test_a_scale_that_forgets_comes_after_every_other() -> None:
    scale, _ = line(goal=2.9, limit=1.7)
    assert 0.6 < scale <= 0.7


class Tied(torch.nn.Module):
    """An embedding that is the head, too, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mean", torch.zeros(3))


def test_scales_move_every_tensor_along_the_line_once() -> None:
    torch.manual_seed(0)
    base, merged = Tied(), Tied()
    merged.mean += 1.0
    change = {name: tensor - base.state_dict()[name] for name, tensor in copy.deepcopy(merged).state_dict().items()}
    visited: list[float] = []

    def measure(model: torch.nn.Module) -> Figures:
        scales = [
            float((tensor - base.state_dict()[name]).flatten() @ change[name].flatten() / change[name].square().sum())
            for name, tensor in model.state_dict().items()
        ]
        torch.testing.assert_close(scales, [scales[0]] * len(scales), atol=1e-5, rtol=0)
        visited.append(scales[0])
        score = (scales[0] - 2.0) ** 2
        return Figures(score, None, [score])

    scale, figures = best_scale(merged, base, 1.0, measure, lambda figures: (0.0, figures.score))
    assert abs(scale - 2.0) < 0.2
    assert figures.score < 0.04
    assert len(set(visited)) == len(visited)


# --- forgetting ------------------------------------------------------------------------------------------------------


def figures(score: float, on_base: float) -> Figures:
    return Figures(score, None, [], on_base=on_base)


def test_a_merge_that_forgets_more_than_it_may_does_not_win() -> None:
    forgetting = Forgetting([], figures(2.0, 1.0))
    plain = figures(1.5, 1.05)
    assert forgetting.excess(plain, plain) == 0
    assert forgetting.excess(figures(1.0, 1.14), plain) == 0  # 0.09 more, a tenth of its gain is 0.1
    assert forgetting.excess(figures(1.2, 1.14), plain) == pytest.approx(0.01)
    assert forgetting.excess(figures(1.2, 1.14), None) == pytest.approx(0.06)
    assert forgetting.excess(Figures(1.2, None, []), plain) == 0
    noisy = replace(figures(1.2, 1.14), base_texts=[1.0, 1.3])  # 0.02 to 0.32 more than the plain average: by chance
    assert forgetting.excess(noisy, replace(plain, base_texts=[0.98, 0.98])) == 0
    surely = replace(noisy, base_texts=[1.0, 1.0])
    assert forgetting.excess(surely, replace(plain, base_texts=[0.98, 0.98])) == pytest.approx(0.01)
    words = forgetting.why("ties", figures(1.2, 1.14), plain)
    assert "'ties' (1.2000 on the selection samples) forgets too much" in words
    assert "0.0900 nats more" in words


@pytest.mark.slow
def test_the_verdict_says_why_a_better_score_was_not_taken(
    tmp_path: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    only("plain", "refit, plain")
    real = Forgetting.measured

    def forgetful(self: Forgetting, model: Any, found: Figures) -> Figures:
        on_base = real(self, model, found)
        plain = found.score > 1.5
        return on_base if plain else replace(on_base, on_base=99.0)

    monkeypatch.setattr(Forgetting, "measured", forgetful)
    values = ("--data", "demo:english", "--data", "demo:c", "--samples", "32", "--length", "64")
    done = run("merge", ENGLISH, C, tmp_path / "out", *TINY, *values)
    assert done.exit_code == 0, done.output
    assert "best merge: plain" in done.stdout
    assert "Not chosen: 'refit, plain'" in done.stdout
    assert "forgets too much" in done.stdout
    assert "forgets too much" in (tmp_path / "out" / "README.md").read_text()


def test_loading_leaves_a_base_as_it_is() -> None:
    """The search for a scale moves the merge alone."""
    base, merged = load(BASE), load(C)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    best_scale(merged, base, 1.0, lambda _: figures(1.0, 0.0), lambda figures: (0.0, figures.score))
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items())


@pytest.mark.slow
def test_python_takes_what_the_command_takes(
    tmp_path: Path, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths, one source for all models, a relative base, the folder of an adapter without its base."""
    only("wudi")
    copied(BASE, tmp_path / "llama-0")
    adapter = copied(str(CHECKPOINTS / "llama-0-lora-english"), tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    config = rm.MergeConfig(samples=8, length=24, batch_size=4, base="llama-0")
    models, out, base = (Path(adapter), Path(C)), tmp_path / "out", str(tmp_path / "llama-0")
    outcome = rm.merge(models, out, "demo:english", config, anyway=True)
    assert [trial.name for trial in outcome.tried] == ["wudi"]
    recipe = yaml.safe_load((out / "recipe.yml").read_text())
    assert recipe["base_model"] == base
    assert [entry["model"] for entry in recipe["models"]] == [f"{base}+{adapter}", C]
    for arguments, words in (
        (([object(), C], tmp_path / "other"), "one model is of type object"),
        ((ENGLISH, tmp_path / "other"), "one str stands where models belong"),
        ((models, tmp_path / "other", 3), "one int stands where data sources belong"),
        ((models, tmp_path / "other", tmp_path / "none.txt"), "none.txt: no such file"),
    ):
        with pytest.raises(rm.RotationMergeError, match=words):
            rm.merge(*arguments)
    assert not (tmp_path / "other").exists()
