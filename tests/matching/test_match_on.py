"""Matching on activations: twins are found by what their maps read and give, and compute what they computed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import run
from plugin_support import make as checkpoint
from plugin_support import merged, mergekit_yaml, one_error, recipe_for, state
from plugin_support import twin as twin_of
from residual_support import report
from tiny_models import ALL, Case, difference, inputs, keep_float64, outputs, planted

import rotation_merge as rm

FIRST = list({case.family: case for case in reversed(ALL)}.values())
KINDS = ("llama", "gpt2", "bert", "vit", "t5", "whisper", "gemma2", "gpt_neox", "mixtral", "deepseek", "falcon_h1")
"""A family for each kind of layer."""
LLAMA = next(case for case in FIRST if case.family == "llama")


def twins(case: Case, scaling: bool = True) -> tuple[Any, Any, rm.AlignConfig]:
    """A tiny model, and it in other coordinates of every space, its streams without rotations (gains stay)."""
    model = planted(case).made
    admitted = planted(case).architecture.stream_groups
    groups = {name: [group for group in known if group != "rotation"][-1] for name, known in admitted.items()}
    residual = ",".join(f"{name}={group}" for name, group in groups.items()) or "none"
    options = rm.AlignConfig(heads="permutation", scaling=scaling, residual=residual)
    other = copy.deepcopy(model)
    moved = rm.Alignment.random(model, options, seed=1).apply(model).state_dict()
    other.load_state_dict(moved, strict=False)
    other.tie_weights()
    return model, other, options


def aligned(model: Any, other: Any, how: str, options: rm.AlignConfig, samples: Any) -> rm.Alignment:
    with keep_float64():
        return rm.align(model, other, options, match_on=how, samples=samples)


def match(case: Case, how: str, batches: int = 6) -> tuple[Any, Any, rm.Alignment]:
    model, other, options = twins(case)
    with keep_float64():
        samples = [inputs(case, model, seed) for seed in range(2, 2 + batches)]
    return model, other, aligned(model, other, how, options, samples)


def left(alignment: rm.Alignment) -> float:
    """The largest share of a space's squared distance that is left."""
    return max((m.distance_after / m.distance_before) ** 2 for m in alignment.rows if m.distance_before > 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in FIRST if c.family in KINDS], ids=lambda case: case.family)
def test_a_twin_is_found_again_from_activations(case: Case) -> None:
    _, _, alignment = match(case, "activations")
    assert left(alignment) < 1e-6


@pytest.mark.slow
def test_the_aligned_donor_computes_what_it_did() -> None:
    """Also where samples are too few to say anything: another choice of element never changes the function."""
    _, other, alignment = match(LLAMA, "activations", batches=1)
    other.lm_head.weight.data += 1.0  # so that it is no twin
    given = planted(LLAMA).given
    before = outputs(other, given)
    moved = alignment.apply(other, strict=False).state_dict()
    other.load_state_dict(moved, strict=False)
    assert difference(outputs(other, given), before) < 1e-9
    assert any("do not span" in note for note in alignment.notes) == (14 < 16)
    assert "matched on activations" in alignment.notes[0]


@pytest.mark.slow
def test_nothing_depends_on_the_order_of_samples() -> None:
    model, other, options = twins(LLAMA)
    given = [inputs(LLAMA, model, seed) for seed in range(2, 8)]
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=noise, dtype=parameter.dtype)
    reversed_samples = [{"input_ids": torch.cat([b["input_ids"] for b in reversed(given)]).flip(0)}]
    alignments = [aligned(model, other, "both", options, order) for order in (given, reversed_samples)]
    one, two = (alignment.apply(other).state_dict() for alignment in alignments)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama and a twin of it, as checkpoints."""
    folder = tmp_path_factory.mktemp("pair")
    anchor = checkpoint("llama", folder / "anchor")
    return anchor, twin_of(anchor, folder / "donor")


@pytest.mark.slow
def test_align_on_activations(pair: tuple[Path, Path], tmp_path: Path) -> None:
    anchor, donor = pair
    done = run("align", anchor, donor, tmp_path / "out", "--heads", "permutation", "--match-on", "activations")
    assert done.exit_code == 0, done.output
    assert "matched on activations" in done.output
    for name, tensor in state(anchor).items():
        torch.testing.assert_close(state(tmp_path / "out")[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_recipes_match_on_activations(pair: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = recipe_for("linear", *pair, heads="permutation", match_on="both", samples=16)
    result = merged(recipe, tmp_path / "out")
    for name, tensor in state(pair[0]).items():
        torch.testing.assert_close(result[name], tensor, rtol=1e-3, atol=1e-3)
    made = report(tmp_path / "out")
    assert any("matched on weights and activations" in note for note in made["notes"])
    assert made["data"] == [{"of": f"matching {pair[1]}", "source": "self", "samples": 16}]
    mean = recipe_for("linear", *pair, match_on="both")
    mean["parameters"]["anchor"] = "mean"
    assert "'match_on' cannot be used: 'anchor: mean'" in one_error(mergekit_yaml(mean, tmp_path / "mean").output)


@pytest.mark.slow
def test_the_api_matches_on_activations() -> None:
    model, other, _ = twins(LLAMA)
    samples = [inputs(LLAMA, model, seed) for seed in range(2, 8)]
    wanted = {"heads": "permutation", "residual": "signed_permutation"}
    alignment = rm.align(model, other, match_on="activations", samples=samples, **wanted)
    moved = alignment.apply(other).state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(moved[name], tensor, rtol=1e-4, atol=1e-4)
    assert any("matched on activations" in note for note in alignment.report.notes)
    state = other.state_dict(), other.config
    again = rm.align(model, state, match_on="activations", samples=samples, **wanted).apply(state)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again[name], tensor, rtol=1e-4, atol=1e-4)
    with pytest.raises(rm.RotationMergeError, match="one of: weights, activations, both"):
        rm.align(model, other, match_on="inputs")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--samples", 8), "uses no samples"),
        (("--match-on", "both", "--data", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_what_cannot_be_matched_so(given: tuple[Any, ...], words: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = run("align", *pair, tmp_path / "out", *given)
    assert done.exit_code == 2
    assert words in one_error(done.output)
    assert not (tmp_path / "out").exists()
