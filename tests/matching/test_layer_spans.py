"""Spaces that span layers: layers that meet the keys and values of one of them move as that one, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plugin_support import merged, recipe_for, write_state
from tiny_models import ALL, Planted, make, planted

import rotation_merge as rm

FIRST, LAST = "layers.2.attn", "layers.4.attn"
"""A layer of the tiny model and the one that meets its keys and values."""


@pytest.fixture(scope="module")
def model() -> Planted:
    """Five layers: the last two meet the keys and values of the second and third; in the third, keys are values."""
    return planted(next(case for case in ALL if (case.family, case.name) == ("gemma4", "shared keys")))


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def donor(model: Planted) -> dict[str, torch.Tensor]:
    """A model with weights of its own."""
    draws = {n: torch.randn(x.shape, generator=draw(3), dtype=x.dtype) for n, x in model.state.items()}
    return {name: tensor + 9 * draws[name] for name, tensor in model.state.items()}


OPTIONS: dict[str, dict[str, object]] = {
    "all": {"heads": "permutation", "residual": "signed_permutation"},
    "no order": {},
    "order alone": {"attention": "none", "heads": "permutation"},
    "by singular values": {"heads": "spectral"},
    "without the last layer": {"heads": "permutation", "layers": "0-3"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_whatever_is_matched_donors_compute_what_they_did(
    model: Planted, donor: dict[str, torch.Tensor], options: dict[str, object], tmp_path: Path
) -> None:
    """Of models with nothing in common; a layer that is left out holds those that it shares keys with."""
    found = rm.align(model.pair, (donor, model.config), **options)
    moved = found.apply((donor, model.config)).state_dict()
    assert model.differs(moved) == pytest.approx(model.differs(donor), abs=1e-8)
    found.save(tmp_path / "file")
    assert rm.Alignment.load(tmp_path / "file").transforms.keys() == found.transforms.keys()  # not refused as torn
    still = [name for name in ("layers.1.attn", FIRST) if found.transforms[name].is_identity()]
    assert still == ([FIRST] if "layers" in options else [])
    known = [block.name for block in rm.average([model.pair]).architecture.blocks]
    places = [known.index(block.name) for block, records in found.records if not records or records[0].kind != "stream"]
    assert places == sorted(places)


def written(model: Planted, state: dict[str, torch.Tensor], where: Path) -> Path:
    return write_state({name: tensor.float() for name, tensor in state.items()}, model.folder, where)


@pytest.mark.slow
def test_layers_with_options_of_their_own_hold_them(
    model: Planted, donor: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A recipe that matches the last layer by itself; the donor alone is merged."""
    paths = [written(model, state, tmp_path / name) for name, state in (("anchor", model.state), ("donor", donor))]
    recipe = recipe_for("linear", *paths, save_alignment="file")
    for entry, weight in zip(recipe["models"], (0.0, 1.0), strict=True):
        entry["parameters"]["weight"] = weight
    recipe["parameters"]["attention"] = [{"filter": "layers.4", "value": "none"}, {"value": "rotation"}]
    moved = {name: tensor.double() for name, tensor in merged(recipe, tmp_path / "out").items()}
    assert model.differs(moved) == pytest.approx(model.differs(donor), abs=1e-3)
    transforms = rm.Alignment.load(tmp_path / "out" / "file").transforms
    assert transforms[FIRST].is_identity()
    assert not transforms["layers.1.attn"].is_identity()


@pytest.mark.slow
def test_planted_twins_are_found_by_everything_that_matches(model: Planted, tmp_path: Path) -> None:
    """One donor, and several aligned to their mean; the order of query heads is each layer's own."""
    draws = [rm.Alignment.random(model.pair, heads="permutation", seed=seed) for seed in (1, 2)]
    first, last = (draws[0].transforms[name] for name in (FIRST, LAST))
    assert torch.equal(first.groups, last.groups)
    assert not torch.equal(first.queries, last.queries)
    twins = [draw.apply(model.pair).state_dict() for draw in draws]
    back = rm.align(model.pair, (twins[0], model.config), heads="permutation").apply((twins[0], model.config))
    assert max(float((back[n] - model.state[n]).abs().max()) for n in back) <= 1e-6
    paths = [written(model, state, tmp_path / str(n)) for n, state in enumerate((model.state, *twins))]
    for donors in ([1, 2], [2, 1]):
        recipe = recipe_for("linear", paths[0], *(paths[n] for n in donors))
        recipe["parameters"]["anchor"] = "mean"
        result = merged(recipe, tmp_path / f"out-{donors[0]}")
        assert max(float((result[n] - model.state[n]).abs().max()) for n in result) <= 1e-4


@pytest.mark.slow
def test_learning_leaves_them_together(model: Planted, tmp_path: Path) -> None:
    models = [make(model.case, seed) for seed in (0, 1)]
    tokens = [torch.randint(3, 40, (2, 6), generator=draw(seed)) for seed in range(3)]
    batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
    (learned,) = rm.fit(*models, batches, options=rm.FitConfig(steps=4, start="identity")).alignments
    assert not learned.transforms["layers.0.attn"].is_identity()
    learned.save(tmp_path / "file")
    moved = rm.Alignment.load(tmp_path / "file").apply(models[0], strict=False)
    assert model.differs({name: moved[name] for name in model.state}) <= 1e-9


def test_a_file_that_tears_them_is_refused(model: Planted, tmp_path: Path) -> None:
    drawn = rm.Alignment.random(model.pair, seed=1)
    lead, last = drawn.transforms[FIRST], drawn.transforms[LAST]
    for number, change in enumerate(({LAST: replace(last, qk=last.qk.still())}, {LAST: None}, {FIRST: None})):
        torn_apart = {name: t for name, t in (drawn.transforms | change).items() if t is not None}
        replace(drawn, transforms=torn_apart).save(tmp_path / str(number))
        with pytest.raises(rm.RotationMergeError, match=f"space '{LAST}' does not move with its keys and values"):
            rm.Alignment.load(tmp_path / str(number))
    drawn.save(tmp_path / "file")
    assert rm.Alignment.load(tmp_path / "file").transforms[FIRST].group() == lead.group()


@pytest.mark.slow
def test_slices_that_make_up_the_whole(model: Planted, tmp_path: Path) -> None:
    """mergekit puts the model together of pieces; layers of two of them meet the same keys."""
    pair = [written(model, state, tmp_path / str(n)) for n, state in enumerate((model.state, model.twin(seed=1)))]
    recipe = recipe_for("linear", *pair)
    sources = recipe.pop("models")
    pieces = [[{**source, "layer_range": part} for source in sources] for part in ([0, 3], [3, 5])]
    recipe["slices"] = [{"sources": piece} for piece in pieces]
    result = merged(recipe, tmp_path / "out")
    assert max(float((result[n] - model.state[n]).abs().max()) for n in result) <= 1e-4
