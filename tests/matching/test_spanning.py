"""Spaces that span layers: layers that meet the keys and values of one of them move as that one, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matching_support import save_for
from plugin_support import merged, recipe_for
from safetensors.torch import save_file
from tiny_models import ALL, Planted, planted

from rotation_merge.errors import AlignmentError
from rotation_merge.matching.alignment import Alignment, load_alignment
from rotation_merge.matching.fit import LearnedTransforms
from rotation_merge.matching.gauge import random_gauge
from rotation_merge.matching.match import match_model
from rotation_merge.matching.mean import match_to_mean
from rotation_merge.matching.options import AlignConfig, VaryingOptions
from rotation_merge.matching.spanning import torn, whole_spans
from rotation_merge.model.source import transform_state
from rotation_merge.symmetry import HeadTransform

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


def apart(_: str, place: float) -> AlignConfig:
    return AlignConfig(heads="permutation", attention="none" if place == 1.0 else "rotation")


OPTIONS = {
    "all": AlignConfig(heads="permutation", residual="signed_permutation"),
    "no order": AlignConfig(residual="none"),
    "order alone": AlignConfig(attention="none", heads="permutation"),
    "by singular values": AlignConfig(heads="spectral"),
    "without the last layer": AlignConfig(heads="permutation", layers="0-3"),
    "the last layer by itself": VaryingOptions(AlignConfig(heads="permutation"), apart),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whatever_is_matched_donors_compute_what_they_did(model: Planted, options: AlignConfig) -> None:
    """Of models with nothing in common; a layer that is left out holds those that it shares keys with."""
    donor = noisy(model.state, 3)
    before = model.differs(donor)
    found = match_model(model.architecture, model.state, donor, options)
    moved = transform_state(model.architecture, donor, found.transforms)
    assert torn(model.architecture, found.transforms) is None
    assert model.differs(moved) == pytest.approx(before, abs=1e-8)
    spans = whole_spans(model.architecture, options)
    assert len(spans) == (1 if "last layer" in next(k for k, v in OPTIONS.items() if v is options) else 2)
    known = [block.name for block in model.architecture.blocks]
    places = [known.index(block.name) for block, records in found.records if not records or records[0].kind != "stream"]
    assert places == sorted(places)


def test_planted_twins_are_found_by_everything_that_matches(model: Planted) -> None:
    """One donor, and several aligned to their mean; the order of query heads is each layer's own."""
    options = AlignConfig(heads="permutation")
    gauge = random_gauge(model.architecture, options, draw(1))
    first, last = gauge[FIRST], gauge[LAST]
    assert isinstance(first, HeadTransform)
    assert isinstance(last, HeadTransform)
    assert torch.equal(first.groups, last.groups)
    assert not torch.equal(first.queries, last.queries)
    twins = {"base": model.state, "one": transform_state(model.architecture, model.state, gauge)}
    gauge = random_gauge(model.architecture, options, draw(2))
    twins["two"] = transform_state(model.architecture, model.state, gauge)
    alone = match_model(model.architecture, model.state, twins["one"], options)
    together = match_to_mean(model.architecture, twins, "base", options)
    for name, alignment in (("one", alone), *together.items()):
        back = transform_state(model.architecture, twins[name], alignment.transforms)
        assert max(float((back[n] - model.state[n]).abs().max()) for n in back) <= 1e-6


def test_learning_leaves_them_together(model: Planted) -> None:
    gauge = random_gauge(model.architecture, AlignConfig(heads="permutation"), draw(1))
    learned = LearnedTransforms(model.architecture, gauge)
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.add_(0.1)
    after = learned.hardened()
    assert torn(model.architecture, after) is None
    assert model.differs(transform_state(model.architecture, model.state, after)) <= 1e-9


def test_a_file_that_tears_them_is_refused(model: Planted, tmp_path: Path) -> None:
    gauge = random_gauge(model.architecture, AlignConfig(), draw(1))
    lead, own = gauge[FIRST], gauge[LAST]
    assert isinstance(own, HeadTransform)
    for change in ({LAST: replace(own, qk=own.qk.still())}, {LAST: None}, {FIRST: None}):
        torn_apart = {name: t for name, t in (gauge | change).items() if t is not None}
        save_for(tmp_path / "file", Alignment(torn_apart), model.architecture, "a", "b")
        with pytest.raises(AlignmentError, match=f"space '{LAST}' moves apart from its keys and values"):
            load_alignment(tmp_path / "file", model.architecture)
    save_for(tmp_path / "file", Alignment(gauge), model.architecture, "a", "b")
    assert load_alignment(tmp_path / "file", model.architecture).alignment.transforms[FIRST].group() == lead.group()


def test_slices_that_make_up_the_whole(model: Planted, tmp_path: Path) -> None:
    """mergekit puts the model together of pieces; layers of two of them meet the same keys."""
    twin = transform_state(
        model.architecture, model.state, random_gauge(model.architecture, AlignConfig(heads="permutation"), draw(1))
    )
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
