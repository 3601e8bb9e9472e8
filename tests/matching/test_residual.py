"""The residual stream through mergekit-yaml: planted truth of every admitted kind, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from plugin_support import merged, mergekit_yaml, one_error
from residual_support import checkpoint, recipe, report, twin

import rotation_merge as rm


@pytest.mark.slow
def test_noise_does_not_hide_the_element(tmp_path: Path) -> None:
    """10% noise on every matrix: the merge is nearer to the anchor than the donor is."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation", noise=0.1, scaling=False)
    merged(recipe(anchor, donor, residual="rotation"), tmp_path / "out")
    assert 0 < report(tmp_path / "out")["summary"][str(donor.path)]["relative_after"] < 0.12


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["signed_permutation", "rotation"])
def test_near_fine_tunes_keep_their_stream(residual: str, tmp_path: Path) -> None:
    """Turning the stream would fit noise: it stays, and no pass is spent."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    generator = torch.Generator().manual_seed(0)
    noisy = {n: x + 0.03 * x.std() * torch.randn(x.shape, generator=generator) for n, x in anchor.state.items()}
    donor = anchor.write(noisy, tmp_path / "donor")
    found = rm.align(anchor.path, donor.path, heads="permutation", residual=residual)
    assert found.summary["passes"] == 0
    assert found.summary["shared"] is True
    assert found.transforms["residual"].is_identity()
    result = merged(recipe(anchor, donor, residual=residual), tmp_path / "out")
    anchor_now = anchor.folded() if residual == "rotation" else anchor.state
    name = "model.layers.0.mlp.up_proj.weight"
    assert float((result[name] - anchor_now[name]).norm() / anchor_now[name].norm()) < 0.05
    summary = report(tmp_path / "out")["summary"][str(donor.path)]
    assert 0.95 * summary["relative_before"] < summary["relative_after"] <= summary["relative_before"]


def test_partly_moved_fine_tune_is_recovered(tmp_path: Path) -> None:
    """A related model whose stream is turned in a few coordinates only: that is no noise."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    state = anchor.state
    order = torch.arange(len(state["model.norm.weight"]))
    order[[0, 1, 2]] = order[[1, 2, 0]]
    writers = ("o_proj.weight", "down_proj.weight", "norm.weight")
    moved = {n: x.index_select(0 if n.endswith(writers) else 1, order) for n, x in state.items()}
    donor = anchor.write(moved, tmp_path / "donor")
    assert anchor.differs(donor.path) <= 1e-6
    after = rm.align(anchor.path, donor.path, residual="signed_permutation").apply(donor.path)
    assert max(float((after[n] - state[n]).norm() / state[n].norm()) for n in state) <= 1e-4


def test_donor_equal_to_the_anchor_is_left_alone(tmp_path: Path) -> None:
    anchor = checkpoint("vit", "classifier", tmp_path / "anchor")
    for group in ("permutation", "rotation"):
        found = rm.align(anchor.path, anchor.path, heads="permutation", residual=group)
        assert all(transform.is_identity() for transform in found.transforms.values())


@pytest.mark.parametrize(
    ("family", "name", "asked", "words"),
    [
        ("bert", "classifier", "rotation", "'residual: permutation'"),
        ("gpt2", "untied", "signed_permutation", "'residual: rotation'"),
        ("gemma2", "tied", "rotation", "'residual: signed_permutation'"),
        ("t5", "plain", "signed_permutation", "'residual: none'"),
        ("vit", "bare", "permutation", "'residual: none'"),
        ("llama", "qwen2", "rotation", "untie: true"),
        ("llama", "qwen2", "rotation", "'residual: signed_permutation'"),
        ("gpt2", "tied", "rotation", "untie: true"),
        ("gpt2", "tied", "rotation", "'residual: permutation'"),
    ],
)
def test_a_group_that_is_not_admitted(family: str, name: str, asked: str, words: str, tmp_path: Path) -> None:
    """The error names the largest that is, and what a tied model needs."""
    anchor, donor = (checkpoint(family, name, tmp_path / n, seed=i) for i, n in enumerate(("anchor", "donor")))
    result = mergekit_yaml(recipe(anchor, donor, residual=asked), tmp_path / "out")
    assert result.exit_code != 0
    message = one_error(result.output)
    assert f"residual: {asked}" in message
    assert words in message


@pytest.mark.slow
def test_what_all_logits_share_does_not_count(tmp_path: Path) -> None:
    """Softmax does not see a constant added to all rows of a head; nor does the map found."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = checkpoint("llama", "llama", tmp_path / "donor", seed=1)
    plain = rm.align(anchor.path, donor.path, residual="rotation")
    states = [dict(anchor.state), dict(donor.state)]
    for seed, state in enumerate(states):
        head = state["lm_head.weight"]
        shift = torch.randn(head.shape[1], generator=torch.Generator().manual_seed(seed))
        state["lm_head.weight"] = head + 3 * head.std() * shift
    shifted = rm.align(*((state, anchor.config) for state in states), residual="rotation")
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
    anchor, donor = (checkpoint(family, name, tmp_path / str(seed), seed=seed) for seed in range(2))
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


@pytest.mark.slow
def test_single_layers_follow_the_stream(tmp_path: Path) -> None:
    """`layers` limits the local spaces; the stream goes through all layers."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation", layers="1")
    merged(recipe(anchor, donor, residual="rotation", layers="1"), tmp_path / "out")
    assert anchor.differs(tmp_path / "out") <= 1e-4
    spaces = {row["space"] for row in report(tmp_path / "out")["rows"]}
    assert not any("layers.0" in space for space in spaces)


@pytest.mark.slow
def test_shifted_slices_with_a_residual_map(tmp_path: Path) -> None:
    """The donor's layers in another order: its local spaces are matched to those they meet, in the stream's map."""
    anchor = checkpoint("llama", "llama", tmp_path / "anchor")
    donor = twin(anchor, tmp_path / "donor", "rotation")
    document = recipe(anchor, donor, residual="rotation")
    models = document.pop("models")

    def piece(first: int, second: int) -> dict[str, object]:
        ranges = zip(models, (first, second), strict=True)
        return {
            "sources": [{**m, "layer_range": [start, start + 1]} for m, start in ranges],
        }

    document["slices"] = [piece(0, 1), piece(1, 0)]
    result = merged(document, tmp_path / "out")
    document["slices"] = [piece(0, 0), piece(1, 1)]
    straight = merged(document, tmp_path / "straight")
    assert anchor.differs(tmp_path / "straight") <= 1e-4
    assert result.keys() == straight.keys()
    for meets, given in ((0, 1), (1, 0)):  # the twin's rows turned back, in an order for the layer they meet
        name = "model.layers.{}.mlp.gate_proj.weight"
        moved = 2 * result[name.format(meets)] - anchor.folded()[name.format(meets)]
        nearest = torch.cdist(moved.double(), anchor.folded()[name.format(given)].double()).min(1)
        assert float(nearest.values.max()) <= 1e-4
        assert len(nearest.indices.unique()) == len(moved)
    outside = "model.embed_tokens.weight"
    torch.testing.assert_close(result[outside], straight[outside])


@pytest.mark.slow
def test_stored_bytes_are_the_same_every_time(tmp_path: Path) -> None:
    anchor = checkpoint("gpt2", "untied", tmp_path / "anchor")
    donor = checkpoint("gpt2", "untied", tmp_path / "donor", seed=1)
    first, second = (merged(recipe(anchor, donor, residual="rotation"), tmp_path / n) for n in ("one", "two"))
    assert all(torch.equal(first[name], second[name]) for name in first)
