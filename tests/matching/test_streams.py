"""The residual stream: planted truth of every admitted kind, how its statistics are gathered, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_support import merged, mergekit_yaml, one_error
from residual_support import Checkpoint, case, checkpoint, recipe, report, twin
from tiny_models import make, save

import rotation_merge as rm
from rotation_merge.architecture import families
from rotation_merge.architecture.build import Scope, stream_groups
from rotation_merge.architecture.model import Axis, Block, Norm, Part, Space, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.match import match_model
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.stream import FLOOR, StreamMeasurement, random_gauge
from rotation_merge.model import vocabulary

TURNED = rm.AlignConfig(heads="permutation", residual="rotation")


def two(family: str, name: str, folder: Path) -> tuple[Checkpoint, Checkpoint]:
    first, second = (checkpoint(family, name, folder / str(seed), seed=seed) for seed in range(2))
    return first, second


def farthest(anchor: Checkpoint, donor: Checkpoint, found: rm.Alignment) -> float:
    """The largest relative distance of a moved donor's matrix and gains from the folded anchor's."""
    after, expected = moved_tensors(anchor.architecture, donor.state, found.transforms, found.folded), anchor.folded()
    names = [name for name in expected if not name.endswith("bias")]
    return max(float((after[n] - expected[n]).norm() / expected[n].norm()) for n in names)


# --- what is found


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["signed_permutation", "rotation"])
def test_near_fine_tunes_keep_their_stream(residual: str, tmp_path: Path) -> None:
    """Turning the stream would fit noise: it stays, and no pass is spent."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    generator = torch.Generator().manual_seed(0)
    noisy = {n: x + 0.03 * x.std() * torch.randn(x.shape, generator=generator) for n, x in anchor.state.items()}
    donor = anchor.write(noisy, tmp_path / "donor")
    found = rm.align(anchor.path, donor.path, heads="permutation", residual=residual)
    assert (found.summary["passes"], found.summary["shared"]) == (0, True)
    assert found.transforms["residual"].is_identity()
    before, after = found.report.relative_distances(str(donor.path))
    assert 0.95 * before < after <= before


def test_partly_moved_fine_tune_is_recovered(tmp_path: Path) -> None:
    """A related model whose stream is turned in a few coordinates only: that is no noise."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    state, writers = anchor.state, ("o_proj.weight", "down_proj.weight", "norm.weight")
    order = torch.arange(len(state["model.norm.weight"]))
    order[[0, 1, 2]] = order[[1, 2, 0]]
    moved = {n: x.index_select(0 if n.endswith(writers) else 1, order) for n, x in state.items()}
    donor = anchor.write(moved, tmp_path / "donor")
    assert anchor.differs(donor.path) <= 1e-6
    after = rm.align(anchor.path, donor.path, residual="signed_permutation").apply(donor.path)
    assert max(float((after[n] - state[n]).norm() / state[n].norm()) for n in state) <= 1e-4


def test_donor_equal_to_the_anchor_is_left_alone(tmp_path: Path) -> None:
    for family, name in (("vit", "classifier"), ("llama", "llama")):
        anchor = checkpoint(family, name, tmp_path / family)
        for group in ("none", "permutation", "rotation"):
            found = rm.align(anchor.path, anchor.path, heads="permutation", residual=group)
            assert all(transform.is_identity() for transform in found.transforms.values())
            assert all(row.distance_before == row.distance_after == 0 for row in found.rows)


@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("vit", "classifier")])
def test_what_nearly_agrees_is_multiplied_in_float64(family: str, name: str, tmp_path: Path) -> None:
    """In float32 the squared distances of twins are lost among the rounding of their squares, and passes end early."""
    anchor = checkpoint(family, name, tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    found = match_model(anchor.architecture, anchor.state, donor.state, TURNED)
    objective: Any = found.summary["objective"]
    assert objective[-1] - FLOOR <= 1e-12
    assert farthest(anchor, donor, found) <= 2e-6


@pytest.mark.slow
def test_what_all_logits_share_does_not_count(tmp_path: Path) -> None:
    """Softmax does not see a constant added to all rows of a head; nor does the map found."""
    models = two("llama", "llama", tmp_path)
    plain, states = rm.align(*(m.path for m in models), residual="rotation"), [dict(m.state) for m in models]
    for seed, state in enumerate(states):
        head = state["lm_head.weight"]
        shift = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(seed))
        state["lm_head.weight"] = head + 3 * head.std() * shift
    shifted = rm.align(*((state, models[0].config) for state in states), residual="rotation")
    assert plain.summary["passes"] == shifted.summary["passes"]
    first, second = (x.transforms["residual"].elements["map"].matrices() for x in (plain, shifted))
    torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "residual"),
    [
        ("llama", "llama", "permutation"),
        ("llama", "llama", "signed_permutation"),
        ("llama", "llama", "rotation"),
        ("vit", "classifier", "rotation"),
    ],
)
def test_objective_never_rises(family: str, name: str, residual: str, tmp_path: Path) -> None:
    """Maps of a stream behind LayerNorm fix the all-ones vector; all keep lengths."""
    anchor, donor = two(family, name, tmp_path)
    found = rm.align(anchor.path, donor.path, heads="permutation", residual=residual)
    history, starts = found.summary["objective"], found.summary["starts"]
    assert len(history) >= 2 or residual != "rotation"
    assert all(b <= a for a, b in itertools.pairwise(history)), history
    assert history[0] <= min(starts.values()) * (1 + 1e-12)
    matrix = found.transforms["residual"].elements["map"].matrices()[0]
    ones, eye = torch.ones(len(matrix), dtype=matrix.dtype), torch.eye(len(matrix), dtype=matrix.dtype)
    torch.testing.assert_close(matrix @ matrix.T, eye)
    assert float((matrix - eye).norm()) > 1
    assert torch.allclose(matrix @ ones, ones) == (family == "vit" or residual == "permutation")


# --- how it is gathered


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("gpt2", "untied")])
def test_long_vocabularies_are_looked_at_in_slices(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor, donor = two(family, name, tmp_path)
    found, moved, seen, measured = [], [], list[int](), StreamMeasurement.of
    monkeypatch.setattr(StreamMeasurement, "of", lambda info, a, *rest: seen.append(len(a)) or measured(info, a, *rest))
    for most in (vocabulary.LONG, 1000):
        monkeypatch.setattr(vocabulary, "LONG", most)
        seen.clear()
        options = rm.AlignConfig(residual="rotation")
        found.append(match_model(anchor.architecture, anchor.state, donor.state, options))
        moved.append(dict(moved_tensors(anchor.architecture, donor.state, found[0].transforms, found[0].folded)))
    assert len(seen) > 4
    torch.testing.assert_close(*(x.transforms["residual"].elements["map"].matrices() for x in found), atol=1e-6, rtol=0)
    whole, sliced = (next(row for row in alignment.rows if row.kind == "stream") for alignment in found)
    for figure in ("distance_before", "distance_after", "anchor_norm"):
        assert getattr(sliced, figure) == pytest.approx(getattr(whole, figure), rel=1e-6)
    assert all(torch.allclose(x, moved[1][n], atol=1e-5) for n, x in moved[0].items())


@pytest.mark.slow
def test_deep_models_compare_starts_on_a_sample_of_layers(tmp_path: Path) -> None:
    """Progress counts every block of every pass."""
    shallow = case("llama", "llama")
    deep = dataclasses.replace(shallow, config={**shallow.config, "num_hidden_layers": 10})
    save(make(deep).float(), tmp_path / "anchor")
    anchor = Checkpoint(deep, tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    seen: dict[str, list[tuple[float, float]]] = {}

    def watch(task: str, done: float, total: float) -> None:
        seen.setdefault(task, []).append((done, total))

    found = match_model(anchor.architecture, anchor.state, donor.state, TURNED, watch)
    blocks = {"embeddings and heads": 2, "residual, from identity": 4, "residual, pass 1": 10, "matching": 10 + 2}
    for task, count in blocks.items():
        times = 2 if task == "embeddings and heads" else 1  # again in float64, once the models nearly agree
        assert seen[task] == times * [(done, count) for done in range(count + 1)]
    assert farthest(anchor, donor, found) <= 1e-4


# --- through recipes


@pytest.mark.slow
def test_single_layers_follow_the_stream(tmp_path: Path) -> None:
    """`layers` limits the local spaces; the stream goes through all layers."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation", layers="1")
    merged(recipe(anchor, donor, residual="rotation", layers="1"), tmp_path / "out")
    assert anchor.differs(tmp_path / "out") <= 1e-4
    assert not any("layers.0" in row["space"] for row in report(tmp_path / "out")["rows"])


@pytest.mark.slow
def test_shifted_slices_with_a_residual_map(tmp_path: Path) -> None:
    """The donor's layers in another order: its local spaces are matched to those they meet, in the stream's map."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    document, results = recipe(anchor, donor, residual="rotation"), {}
    models = document.pop("models")
    for name, order in {"out": (1, 0), "straight": (0, 1)}.items():
        spans = [[[place, place + 1], [given, given + 1]] for place, given in enumerate(order)]
        sources = [[{**m, "layer_range": s} for m, s in zip(models, pair, strict=True)] for pair in spans]
        document["slices"] = [{"sources": pair} for pair in sources]
        results[name] = merged(document, tmp_path / name)
    result, straight = results.values()
    assert anchor.differs(tmp_path / "straight") <= 1e-4
    for meets, given in ((0, 1), (1, 0)):  # the twin's rows turned back, in an order for the layer they meet
        name = "model.layers.{}.mlp.gate_proj.weight"
        moved = 2 * result[name.format(meets)] - anchor.folded()[name.format(meets)]
        nearest = torch.cdist(moved.double(), anchor.folded()[name.format(given)].double()).min(1)
        assert float(nearest.values.max()) <= 1e-4
        assert len(nearest.indices.unique()) == len(moved)
    torch.testing.assert_close(result["model.embed_tokens.weight"], straight["model.embed_tokens.weight"])


# --- what is refused


@pytest.mark.parametrize("whose", ["anchor", "donor"])
def test_numbers_whose_squares_are_infinite_are_named(whose: str, tmp_path: Path) -> None:
    model, name = checkpoint("llama", "llama", tmp_path), "model.embed_tokens.weight"
    states = {"anchor": model.state, "donor": model.state}
    states[whose] = {**model.state, name: model.state[name].double().index_fill(0, torch.tensor([3]), 1e160)}
    with pytest.raises(AlignmentError, match=f"'{name}' of the {whose} holds NaN, infinity, or"):
        match_model(model.architecture, *states.values(), rm.AlignConfig(residual="permutation"))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("residual", ["none", "permutation"])
def test_numbers_whose_squares_are_infinite_in_float32_are_matched(name: str, residual: str, tmp_path: Path) -> None:
    """Products are formed in float64 there: the planted map is found."""
    model, options = checkpoint("llama", "llama", tmp_path), rm.AlignConfig(heads="permutation", residual=residual)
    anchor = {**model.state, name: model.state[name].float() * 1e25}
    gauge = random_gauge(model.architecture, options, torch.Generator().manual_seed(3))
    gauge = {space: transform for space, transform in gauge.items() if transform.kind in ("stream", "ffn")}
    alignment = match_model(model.architecture, anchor, moved_tensors(model.architecture, anchor, gauge), options)
    moved = moved_tensors(model.architecture, moved_tensors(model.architecture, anchor, gauge), alignment.transforms)
    for key, tensor in anchor.items():
        assert float((moved[key].double() - tensor.double()).norm()) <= 1e-5 * float(tensor.double().norm()), key


@pytest.mark.parametrize(
    ("family", "name", "asked", "words"),
    [
        ("bert", "classifier", "rotation", ["'residual: permutation'"]),
        ("gpt2", "untied", "signed_permutation", ["'residual: rotation'"]),
        ("gemma2", "tied", "rotation", ["'residual: signed_permutation'"]),
        ("t5", "plain", "signed_permutation", ["'residual: none'"]),
        ("vit", "bare", "permutation", ["'residual: none'"]),
        ("whisper", "generation", "rotation", ["'residual: encoder=none,decoder=rotation'"]),
        ("llama", "qwen2", "rotation", ["untie: true", "'residual: signed_permutation'"]),
        ("gpt2", "tied", "rotation", ["untie: true", "'residual: permutation'"]),
    ],
)
def test_a_group_that_is_not_admitted(family: str, name: str, asked: str, words: list[str], tmp_path: Path) -> None:
    """The error names the largest that is, and what a tied model needs."""
    result = mergekit_yaml(recipe(*two(family, name, tmp_path), residual=asked), tmp_path / "out")
    assert result.exit_code != 0
    message = one_error(result.output)
    assert all(word in message for word in [f"residual: {asked}", *words]), message


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("raw", [True, False])
def test_what_reads_a_layer_normed_stream_raw_forbids_rotations(layer: bool, raw: bool) -> None:
    """Centring the writers is seen by a reader that no norm stands before."""
    stream = Space("residual", "stream", {"size": 4})

    def info(key: str, role: str) -> TensorInfo:
        return TensorInfo(key, (key,), (Axis(), Axis(((Part(stream, role),),))))

    tensors = [info("norm.weight", "gain"), info("up.weight", "read"), info("probe.weight", "read")]
    norm = Norm("residual", "norm.weight", None, ("up",) if raw else ("up", "probe"), layer, 0.0)
    block = Block("b", "m", None, "before", tuple(tensors), {}, (norm,))
    spec, config = families()["gpt2"], {"architectures": ["GPT2LMHeadModel"]}
    groups = stream_groups(Scope(spec, config, "", {}), "residual", [block])
    assert ("rotation" in groups) == (not (layer and raw))
    assert ("signed_permutation" in groups) == (not layer)
