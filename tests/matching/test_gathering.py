"""How the statistics of streams are gathered: part by part, in slices, from a sample of layers, told as they go on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from residual_support import Checkpoint, case, checkpoint, twin
from tiny_models import make, save

from rotation_merge import AlignConfig
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.match import PARTS, match_model
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.stream import FLOOR, StreamMeasurement, StreamSums
from rotation_merge.matching.visit import Step, Visits
from rotation_merge.model import vocabulary


@pytest.mark.slow
def test_the_objective_that_is_told_is_no_lower_than_that_of_the_maps_found(tmp_path: Path) -> None:
    """What is gathered part by part, under maps that were different, bounds the whole objective under the last ones."""
    anchor, donor = (checkpoint("llama", "llama", tmp_path / str(seed), seed=seed) for seed in range(2))
    options = AlignConfig(heads="permutation", residual="rotation")
    result = match_model(anchor.architecture, anchor.state, donor.state, options)
    maps = {"residual": result.transforms["residual"]}
    still = anchor.architecture.stream_group("residual", "rotation").identity()
    by_block = {block.name: options for block in anchor.architecture.blocks}
    visits = Visits(anchor.architecture, anchor.state, donor.state, by_block, result.folded)
    blocks, weights, told = range(len(anchor.architecture.blocks)), dict[str, float](), list[float]()
    for _ in range(4):  # until weights and local spaces agree
        whole = StreamSums.total(visits.piece(Step(maps, weights), number) for number in blocks)
        weights = whole.weights
        told.append(whole.bound(maps))
        assert whole.bound({"residual": still}) > told[-1]
    history = result.summary["objective"]
    assert isinstance(history, list)
    assert min(told) <= history[-1] <= min(told) * 1.02


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("gpt2", "untied")])
def test_long_vocabularies_are_looked_at_in_slices(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, donor = (checkpoint(family, name, tmp_path / str(seed), seed=seed) for seed in range(2))
    options = AlignConfig(residual="rotation")
    found, seen, measured = [], list[int](), StreamMeasurement.of
    monkeypatch.setattr(StreamMeasurement, "of", lambda info, a, *rest: seen.append(len(a)) or measured(info, a, *rest))
    for most in (vocabulary.LONG, 1000):
        monkeypatch.setattr(vocabulary, "LONG", most)
        seen.clear()
        found.append(match_model(anchor.architecture, anchor.state, donor.state, options))
    assert len(seen) > 4
    maps = [alignment.transforms["residual"].elements["map"].matrices() for alignment in found]
    torch.testing.assert_close(*maps, atol=1e-6, rtol=0)
    whole, sliced = (next(row for row in alignment.rows if row.kind == "stream") for alignment in found)
    for figure in ("distance_before", "distance_after", "anchor_norm"):
        assert getattr(sliced, figure) == pytest.approx(getattr(whole, figure), rel=1e-6)
    outputs = []
    for most in (1 << 25, 1000):
        monkeypatch.setattr(vocabulary, "LONG", most)
        outputs.append(dict(moved_tensors(anchor.architecture, donor.state, found[0].transforms, found[0].folded)))
    assert outputs[0].keys() == outputs[1].keys()
    assert all(torch.allclose(x, outputs[1][n], atol=1e-5) for n, x in outputs[0].items())


@pytest.mark.parametrize("whose", ["anchor", "donor"])
def test_numbers_whose_squares_are_infinite_are_named(whose: str, tmp_path: Path) -> None:
    model = checkpoint("llama", "llama", tmp_path)
    name = "model.embed_tokens.weight"
    states = {"anchor": model.state, "donor": model.state}
    states[whose] = {**model.state, name: model.state[name].float().index_fill(0, torch.tensor([3]), 1e30)}
    with pytest.raises(AlignmentError, match=f"'{name}' of the {whose} holds NaN, infinity, or"):
        match_model(model.architecture, *states.values(), AlignConfig(residual="permutation"))


@pytest.mark.slow
def test_deep_models_compare_starts_on_a_sample_of_layers(tmp_path: Path) -> None:
    shallow = case("llama", "llama")
    deep = dataclasses.replace(shallow, config={**shallow.config, "num_hidden_layers": 10})
    save(make(deep).float(), tmp_path / "anchor")
    anchor = Checkpoint(deep, tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    seen: dict[str, int] = {}
    options = AlignConfig(heads="permutation", residual="rotation")
    found = match_model(
        anchor.architecture, anchor.state, donor.state, options, lambda what, _, total: seen.update({what: total})
    )
    assert seen["embeddings and heads"] == 2
    assert seen["residual, from identity"] == 2 + 4
    assert seen["residual, pass 1"] == 10 + 4 * 2  # between the parts of a pass, embeddings and heads are counted anew
    assert seen["matching"] == 10 + 2
    after = moved_tensors(anchor.architecture, donor.state, found.transforms, found.folded)
    expected = anchor.folded()
    assert max(float((after[n] - expected[n]).norm() / expected[n].norm()) for n in expected) <= 1e-4


@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("vit", "classifier")])
def test_what_nearly_agrees_is_multiplied_in_float64(family: str, name: str, tmp_path: Path) -> None:
    """In float32 the squared distances of twins are lost among the rounding of their squares, and passes end early."""
    anchor = checkpoint(family, name, tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    found = match_model(
        anchor.architecture, anchor.state, donor.state, AlignConfig(heads="permutation", residual="rotation")
    )
    objective = found.summary["objective"]
    assert isinstance(objective, list)
    assert objective[-1] - FLOOR <= 1e-12
    after, expected = moved_tensors(anchor.architecture, donor.state, found.transforms, found.folded), anchor.folded()
    names = [name for name in expected if not name.endswith("bias")]
    assert max(float((after[n] - expected[n]).norm() / expected[n].norm()) for n in names) <= 2e-6


@pytest.mark.slow
def test_progress_counts_every_block_of_every_pass(tmp_path: Path) -> None:
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    seen: dict[str, list[tuple[int, int]]] = {}
    options = AlignConfig(residual="rotation")
    match_model(
        anchor.architecture,
        anchor.state,
        donor.state,
        options,
        lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    blocks, layers = len(anchor.architecture.blocks), len(anchor.architecture.layers("default"))
    visits = layers + 2 * min(layers, PARTS)
    assert seen["matching"] == [(i, blocks) for i in range(blocks + 1)]
    assert seen["residual, pass 2"] == [(i, visits) for i in range(visits + 1)]
