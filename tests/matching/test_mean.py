"""More than two models: aligned to their running mean, in the base's coordinates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plugin_support import merged, mergekit_yaml, one_error
from residual_support import Checkpoint, checkpoint, recipe, report, transport, twin
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.matching import mean, passes
from rotation_merge.matching.alignment import Transforms, aligned_source
from rotation_merge.matching.match import match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.model.biases import AlignedSource
from rotation_merge.model.source import transform_state
from rotation_merge.model.sources import MeanSource

KINDS = [("llama", "llama", "rotation"), ("vit", "classifier", "rotation"), ("bert", "classifier", "permutation")]


def family(folder: Path, kind: tuple[str, str, str], noise: float) -> dict[str, Checkpoint]:
    """An anchor and three twins of it, each with noise of its own."""
    anchor = checkpoint(*kind[:2], folder / "a")
    twins = {n: twin(anchor, folder / n, kind[2], seed, noise, scaling=False) for seed, n in enumerate("bcd", 10)}
    return {"a": anchor, **twins}


def aligned(models: dict[str, Checkpoint], base: str, kind: tuple[str, str, str]) -> dict[str, Transforms]:
    """The maps of all models into the base's coordinates."""
    options = AlignConfig(heads="permutation", residual=kind[2], scaling=False)
    states = {name: model.folded() if kind[2] == "rotation" else model.state for name, model in models.items()}
    found = match_to_mean(models["a"].architecture, states, base, options)
    return {name: alignment.transforms for name, alignment in found.items()}


def largest_difference(models: dict[str, Checkpoint], state: dict[str, Tensor], *maps: Transforms) -> float:
    """Between a model moved by the first map, and by the others one after the other; relative, over all tensors."""
    architecture = models["a"].architecture
    once = transform_state(architecture, state, maps[0])
    twice = state
    for one in maps[1:]:
        twice = transform_state(architecture, twice, one)
    return max(float((once[n] - twice[n]).norm() / state[n].norm().clamp_min(1e-9)) for n in state)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_maps_compose_around_every_cycle(kind: tuple[str, str, str], tmp_path: Path) -> None:
    """c -> b -> a is c -> a, whichever model is the base: the base names the coordinates and nothing else."""
    models = family(tmp_path, kind, noise=0.05)
    to_a, to_b = (aligned(models, base, kind) for base in "ab")
    assert set(to_a) == {"b", "c", "d"}
    assert set(to_b) == {"a", "c", "d"}
    state = {n: x.double() for n, x in (models["c"].folded() if kind[2] == "rotation" else models["c"].state).items()}
    assert largest_difference(models, state, to_a["c"], to_b["c"], to_a["b"]) <= 0.02
    back = {n: x.double() for n, x in (models["a"].folded() if kind[2] == "rotation" else models["a"].state).items()}
    assert largest_difference(models, back, {}, to_b["a"], to_a["b"]) <= 0.02


def test_mean_is_nearer_to_the_truth_than_its_models(tmp_path: Path) -> None:
    """Averaging four noisy twins halves the noise; pairwise errors would add to it."""
    kind = KINDS[0]
    models = family(tmp_path, kind, noise=0.2)
    truth = models["a"].folded()
    maps = aligned(models, "a", kind)
    architecture = models["a"].architecture
    moved = [transform_state(architecture, models[n].folded(), maps[n]) for n in "bcd"]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "lm_head.weight"):
        middle = sum(state[name] for state in moved) / 3
        off = [float((x - truth[name]).norm()) for x in (*(state[name] for state in moved), middle)]
        assert off[-1] < 0.75 * min(off[:-1]), name


def test_spread_falls_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "MOST_PASSES", 4)
    monkeypatch.setattr(mean, "MOST_ROUNDS", 3)
    models = [checkpoint("llama", "llama", tmp_path / str(i), seed=i) for i in range(3)]
    sources = {str(i): one.state for i, one in enumerate(models)}
    options = AlignConfig(heads="permutation", residual="rotation", scaling=False)
    architecture = models[0].architecture
    found = match_to_mean(architecture, sources, "0", options)
    spread = found["1"].summary["spread"]
    assert isinstance(spread, list)
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < spread[0]
    alone = match_model(architecture, sources["0"], sources["1"], options)
    pair = match_to_mean(architecture, {n: sources[n] for n in "01"}, "0", options)["1"]
    first, second = (aligned_source(architecture, sources["1"], alignment) for alignment in (alone, pair))
    for name in sources["1"]:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("kind", [*KINDS, ("gemma2", "tied", "signed_permutation")], ids=lambda kind: kind[0])
def test_planted_twins_through_mergekit(
    kind: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mean, "MOST_ROUNDS", 2)  # enough for what was planted
    models = family(tmp_path, kind, noise=0.0)
    merged(recipe(*models.values(), residual=kind[2], anchor="mean"), tmp_path / "out")
    assert models["a"].differs(tmp_path / "out") <= 1e-4
    whole = report(tmp_path / "out")["whole"]
    assert set(whole) == {str(models[n].path) for n in "bcd"}
    assert all("rounds" in summary for summary in whole.values())


def test_mean_without_a_residual_group(tmp_path: Path) -> None:
    models = family(tmp_path, ("bert", "classifier", "none"), noise=0.0)
    merged(recipe(*models.values(), residual="none", anchor="mean"), tmp_path / "out")
    assert models["a"].differs(tmp_path / "out") <= 1e-4


def test_mean_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    a, b, c = (checkpoint("llama", "llama", tmp_path / str(i), seed=i) for i in range(3))
    result = mergekit_yaml(transport(a, (c, b), residual="rotation", anchor="mean"), tmp_path / "out")
    assert "anchor: base" in one_error(result.output)
    document = recipe(a, b, c, residual="rotation", anchor="mean")
    document["models"][2]["parameters"]["residual"] = "none"
    assert "same options" in one_error(mergekit_yaml(document, tmp_path / "out").output)


def test_sources_of_sources(tmp_path: Path) -> None:
    one = checkpoint("llama", "llama", tmp_path)
    state = one.state
    name = "lm_head.weight"
    middle = MeanSource([state, {n: 3 * x for n, x in state.items() if n == name}])
    torch.testing.assert_close(middle[name], 2 * state[name])
    assert name in middle
    assert "model.norm.weight" not in middle
    moved = AlignedSource(one.architecture, {**state, "extra": torch.ones(2)}, {})
    assert moved[name] is state[name]
    assert "extra" in moved
    assert torch.equal(moved["extra"], torch.ones(2))
