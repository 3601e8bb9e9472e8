"""Spaces that span layers: layers that meet the keys and values of one of them move as that one, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import merged, recipe_for
from safetensors.torch import save_file
from tiny_models import ALL, Planted, planted

import rotation_merge as rm
from rotation_merge.matching.fit import LearnedTransforms
from rotation_merge.matching.layer_spans import inconsistent_space, matched_spans
from rotation_merge.matching.match import match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import VaryingOptions
from rotation_merge.model.source import transform_state

FIRST, LAST = "layers.2.attn", "layers.4.attn"
"""A layer of the tiny model and the one that meets its keys and values."""


@pytest.fixture(scope="module")
def model() -> Planted:
    """Five layers: the last two meet the keys and values of the second and third; in the third, keys are values."""
    return planted(next(case for case in ALL if (case.family, case.name) == ("gemma4", "shared keys")))


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(state: dict[str, torch.Tensor], seed: int, size: float = 0.5) -> dict[str, torch.Tensor]:
    """A model with weights of its own."""
    return {n: x + size * torch.randn(x.shape, generator=draw(seed), dtype=x.dtype) for n, x in state.items()}


def apart(_: str, place: float) -> rm.AlignConfig:
    return rm.AlignConfig(heads="permutation", attention="none" if place == 1.0 else "rotation")


OPTIONS = {
    "all": rm.AlignConfig(heads="permutation", residual="signed_permutation"),
    "no order": rm.AlignConfig(residual="none"),
    "order alone": rm.AlignConfig(attention="none", heads="permutation"),
    "by singular values": rm.AlignConfig(heads="spectral"),
    "without the last layer": rm.AlignConfig(heads="permutation", layers="0-3"),
    "the last layer by itself": VaryingOptions(rm.AlignConfig(heads="permutation"), apart),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whatever_is_matched_donors_compute_what_they_did(model: Planted, options: rm.AlignConfig) -> None:
    """Of models with nothing in common; a layer that is left out holds those that it shares keys with."""
    donor = noisy(model.state, 3)
    before = model.differs(donor)
    found = match_model(model.architecture, model.state, donor, options)
    moved = transform_state(model.architecture, donor, found.transforms)
    assert inconsistent_space(model.architecture, found.transforms) is None
    assert model.differs(moved) == pytest.approx(before, abs=1e-8)
    spans = matched_spans(model.architecture, options)
    assert len(spans) == (1 if "last layer" in next(k for k, v in OPTIONS.items() if v is options) else 2)
    known = [block.name for block in model.architecture.blocks]
    places = [known.index(block.name) for block, records in found.records if not records or records[0].kind != "stream"]
    assert places == sorted(places)


def test_planted_twins_are_found_by_everything_that_matches(model: Planted) -> None:
    """One donor, and several aligned to their mean; the order of query heads is each layer's own."""
    options, base = rm.AlignConfig(heads="permutation"), (model.state, model.config)
    draws = [rm.Alignment.random(base, options, seed=seed) for seed in (1, 2)]
    first, last = (draws[0].transforms[name] for name in (FIRST, LAST))
    assert torch.equal(first.groups, last.groups)
    assert not torch.equal(first.queries, last.queries)
    one, two = (draw.apply(base).state_dict() for draw in draws)
    together = match_to_mean(model.architecture, {"base": model.state, "one": one, "two": two}, "base", options)
    alone = rm.align(base, (one, model.config), options)
    for twin, transforms in ((one, alone.transforms), *zip((one, two), maps_of(together), strict=True)):
        back = replace(alone, transforms=transforms).apply((twin, model.config), strict=False)
        assert max(float((back[n] - model.state[n]).abs().max()) for n in back) <= 1e-6


def maps_of(alignments: Mapping[str, rm.Alignment]) -> list[Any]:
    """The transforms of those that are not the base; only recipes align several donors to their mean."""
    return [alignments[name].transforms for name in ("one", "two")]


def test_learning_leaves_them_together(model: Planted) -> None:
    drawn = rm.Alignment.random((model.state, model.config), heads="permutation", seed=1)
    learned = LearnedTransforms(model.architecture, drawn.transforms)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.1)
    after = learned.final_transforms()
    assert inconsistent_space(model.architecture, after) is None
    assert model.differs(transform_state(model.architecture, model.state, after)) <= 1e-9


def test_a_file_that_tears_them_is_refused(model: Planted, tmp_path: Path) -> None:
    draw = rm.Alignment.random((model.state, model.config), seed=1)
    lead, last = draw.transforms[FIRST], draw.transforms[LAST]
    for number, change in enumerate(({LAST: replace(last, qk=last.qk.still())}, {LAST: None}, {FIRST: None})):
        torn_apart = {name: t for name, t in (draw.transforms | change).items() if t is not None}
        replace(draw, transforms=torn_apart).save(tmp_path / str(number))
        with pytest.raises(rm.RotationMergeError, match=f"space '{LAST}' does not move with its keys and values"):
            rm.Alignment.load(tmp_path / str(number))
    draw.save(tmp_path / "file")
    assert rm.Alignment.load(tmp_path / "file").transforms[FIRST].group() == lead.group()


def test_slices_that_make_up_the_whole(model: Planted, tmp_path: Path) -> None:
    """mergekit puts the model together of pieces; layers of two of them meet the same keys."""
    whole = model.state, model.config
    twin = rm.Alignment.random(whole, heads="permutation", seed=1).apply(whole).state_dict()
    for name, state in (("anchor", model.state), ("donor", twin)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((model.folder / "config.json").read_text())
        save_file({n: x.float() for n, x in state.items()}, tmp_path / name / "model.safetensors")
    recipe = recipe_for("linear", tmp_path / "anchor", tmp_path / "donor")
    sources = recipe.pop("models")
    pieces = [[{**source, "layer_range": part} for source in sources] for part in ([0, 3], [3, 5])]
    recipe["slices"] = [{"sources": piece} for piece in pieces]
    result = merged(recipe, tmp_path / "out")
    assert max(float((result[n] - model.state[n]).abs().max()) for n in result) <= 1e-4
