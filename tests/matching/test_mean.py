"""More than two models: aligned to their running mean, in the base's coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matching_support import gen
from plugin_support import merged
from residual_support import Checkpoint, case, recipe, report, twin
from test_devices import weights
from tiny_models import make, save
from torch import Tensor

import rotation_merge as rm
from rotation_merge.architecture import table
from rotation_merge.architecture.registry import shipped
from rotation_merge.matching.moving import moved_tensors, relative
from rotation_merge.matching.stream import random_gauge

Kind = tuple[str, str, str]
KINDS = [("llama", "llama", "rotation"), ("vit", "classifier", "rotation"), ("bert", "classifier", "permutation")]


def checkpoint(kind: Kind, where: Path, seed: int = 0) -> Checkpoint:
    """A model with one layer."""
    whole = case(*kind[:2])
    small = replace(whole, config={**whole.config, "num_hidden_layers": 1})
    save(make(small, seed).float(), where)
    return Checkpoint(small, where)


def family(folder: Path, kind: Kind, noise: float, names: str = "bcd") -> dict[str, Checkpoint]:
    """An anchor and twins of it, each with noise of its own."""
    anchor = checkpoint(kind, folder / "a")
    twins = {n: twin(anchor, folder / n, kind[2], seed, noise, scaling=False) for seed, n in enumerate(names, 10)}
    return {"a": anchor, **twins}


def aligned(models: dict[str, Checkpoint], base: str, kind: Kind) -> dict[str, rm.Alignment]:
    """The maps of all models into the base's coordinates, as a merge keeps them."""
    donors, out = [name for name in models if name != base], models["a"].path.parent / f"to-{base}"
    options: dict[str, Any] = {"residual": kind[2], "scaling": False, "anchor": "mean", "save_alignment": True}
    merged(recipe(models[base], *(models[name] for name in donors), **options), out)
    files = [out / f"alignment{number}.safetensors" for number in ("", "-2", "-3")]
    return {name: rm.Alignment.load(file) for name, file in zip(donors, files[: len(donors)], strict=True)}


def largest_difference(once: Mapping[str, Tensor], twice: Mapping[str, Tensor]) -> float:
    """Between a model moved in one step and in two; relative, over all tensors."""
    return max(float((x - twice[name]).norm() / x.norm().clamp_min(1e-9)) for name, x in once.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind[0])
def test_maps_compose_around_every_cycle(kind: Kind, tmp_path: Path) -> None:
    """c -> b -> a is c -> a, whichever model is the base: the base names the coordinates and nothing else."""
    models = family(tmp_path, kind, noise=0.05)
    to_a, to_b = (aligned(models, base, kind) for base in "ab")
    for name, once in (("c", to_a["c"].apply(models["c"].path)), ("a", to_a["b"].apply_anchor(models["a"].path))):
        there = to_b[name].apply(models[name].path)
        assert largest_difference(there, once) > 0.5
        assert largest_difference(once, to_a["b"].apply(there, strict=False)) <= 0.02


@pytest.mark.parametrize("family", ["vit", "gpt_neox", "mixtral"])
def test_relative_frames_undo_the_base_after_the_other(family: str) -> None:
    """A model moved into the common frame and from there into the base's coordinates is moved by the relative frame.

    The base itself comes back.
    """
    architecture = table.sample(shipped()[family])
    options = rm.AlignConfig(heads="permutation", residual=architecture.residual_groups[-1])
    base, other = (random_gauge(architecture, options, gen(seed)) for seed in (1, 2))
    state = {name: x.double() for name, x in weights(architecture, 3).items()}
    moved = partial(moved_tensors, architecture)
    back, straight = relative(architecture, base), moved(state, relative(architecture, base, other))
    for model, wanted in ((moved(moved(state, base), back), state), (moved(moved(state, other), back), straight)):
        for name in wanted:
            torch.testing.assert_close(model[name], wanted[name], rtol=1e-9, atol=1e-9)
    assert relative(architecture, {}, other) == other


@pytest.mark.slow
def test_spread_falls_round_by_round(tmp_path: Path) -> None:
    """And a pair is aligned as two models are without a mean."""
    models = [checkpoint(KINDS[0], tmp_path / str(seed), seed=seed) for seed in range(3)]
    options = {"residual": "rotation", "scaling": False}
    merged(recipe(*models, anchor="mean", **options), tmp_path / "out")
    spread = report(tmp_path / "out")["whole"][str(models[1].path)]["spread"]
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < spread[0]
    first, second = (merged(recipe(*models[:2], anchor=how, **options), tmp_path / how) for how in ("base", "mean"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], ("mixtral", "untied", "rotation")], ids=lambda kind: kind[0])
def test_moved_models_lie_around_their_mean_as_the_report_says(kind: Kind, tmp_path: Path) -> None:
    """In the base's coordinates as in those of the mean: rows of routers with the vectors that are added to them."""
    models = {name: checkpoint(kind, tmp_path / name, seed=seed) for seed, name in enumerate("abc")}
    maps = aligned(models, "a", kind)
    moved = [maps["b"].apply_anchor(models["a"].path), *(maps[name].apply(models[name].path) for name in "bc")]
    whole = report(tmp_path / "to-a")["whole"]
    assert whole.keys() == {str(models[name].path) for name in "bc"}
    spread = whole[str(models["b"].path)]["spread"]
    assert spread[-1] < 0.99 * spread[0]
    off = 0.0
    for name in moved[0]:
        middle = sum(state[name].double() for state in moved) / len(moved)
        off += sum(float((state[name] - middle).square().sum()) for state in moved)
    assert off == pytest.approx(spread[-1], rel=1e-5)
