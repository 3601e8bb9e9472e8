"""Deltas and statistics that an alignment moves are those of the moved model, through public calls only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from residual_support import checkpoint
from tiny_models import inputs
from torch import nn

import rotation_merge as rm

LOCAL = {"heads": "permutation", "scaling": True}
CASES = {
    "llama": ("llama", {**LOCAL, "residual": "rotation"}),
    "mixtral": ("untied", {**LOCAL, "residual": "signed_permutation"}),
    "vit": ("classifier", {**LOCAL, "residual": "rotation"}),
    "bert": ("classifier", {**LOCAL, "residual": "permutation"}),
    "dinov2": ("classifier", {**LOCAL, "residual": "rotation"}),
}
"""RMSNorm folded, experts, LayerNorm folded, value biases that softmax cannot see, layer scales."""

Samples = list[dict[str, torch.Tensor]]
Models = Callable[[str, int], tuple[nn.Module, Samples]]
FISHER = rm.MeasureConfig(kinds=("fisher",))


@pytest.fixture
def model(tmp_path: Path) -> Models:
    """Makes a tiny model in float64, and samples of what it takes."""

    def make(family: str, seed: int = 0) -> tuple[nn.Module, Samples]:
        stored = checkpoint(family, CASES[family][0], tmp_path / str(seed), seed=seed)
        module = stored.case.model_class.from_pretrained(stored.path, dtype=torch.float64, attn_implementation="eager")
        module.config._experts_implementation = "eager"
        return module, [inputs(stored.case, module.eval())]

    return make


def agree(moved: rm.Statistics, measured: rm.Statistics, *kinds: str) -> int:
    """How many tensors of these kinds are compared; all are equal up to rounding."""
    keys = sorted(key for key in measured if key.endswith(kinds))
    largest = max(float(measured[key].abs().max()) for key in keys)
    for key in keys:
        size = float(measured[key].abs().max()) + 1e-6 * largest  # a key's bias has no gradient but rounding
        torch.testing.assert_close(moved[key], measured[key], rtol=1e-4, atol=1e-4 * size, msg=f"'{key}' differs")
    return len(keys)


# --- statistics


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_moved_statistics_are_those_of_the_moved_model(family: str, model: Any) -> None:
    (anchor, _), (donor, samples) = (model(family, seed) for seed in range(2))
    alignment = rm.align(anchor, donor, **CASES[family][1])
    moved, measured = alignment.apply(rm.measure(donor, samples)), rm.measure(alignment.apply(donor), samples)
    assert set(moved) == set(measured)
    assert agree(moved, measured, "gram", "count") >= 8


@pytest.mark.parametrize("family", ["vit", "bert", "dinov2"])
def test_fisher_diagonals_move_with_permutations_alone(family: str, model: Any) -> None:
    donor, samples = model(family)
    alignment = rm.Alignment.random(donor, attention="none", heads="permutation", residual="permutation")
    moved = alignment.apply(rm.measure(donor, samples, FISHER))
    assert agree(moved, rm.measure(alignment.apply(donor), samples, FISHER), "fisher") >= 8
    for turned in ({"attention": "rotation"}, {"attention": "none", "residual": CASES[family][1]["residual"]}):
        if turned["attention"] == "none" and family == "bert":  # whose stream keeps its gains
            continue
        again = rm.Alignment.random(donor, **turned).apply(rm.measure(donor, samples, FISHER))
        with pytest.raises(rm.RotationMergeError, match="cannot be kept"):
            dict.fromkeys(again[key] for key in moved)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "residual"), [("llama", "none"), ("llama", "rotation"), ("vit", "rotation")])
def test_moved_statistics_weigh_like_measured_ones(family: str, residual: str, model: Any, tmp_path: Path) -> None:
    """Those of a folded anchor belong to its view: biases that softmax cannot see are its own."""
    (anchor, samples), (donor, _) = (model(family, seed) for seed in range(2))
    alignment = rm.align(anchor, donor, heads="permutation", residual=residual)
    models = [alignment.apply_anchor(anchor), alignment.apply(donor)]
    ahead = [alignment.apply_anchor(rm.measure(anchor, samples)), alignment.apply(rm.measure(donor, samples))]
    mean = rm.average(models, "regmean", statistics=ahead)
    for name, tensor in rm.average(models, "regmean", statistics=[rm.measure(m, samples) for m in models]).items():
        torch.testing.assert_close(mean[name], tensor, atol=1e-5, rtol=1e-4)
    ahead[1].save(tmp_path / "moved.safetensors")
    kept = rm.average(models, "regmean", statistics=[ahead[0], tmp_path / "moved.safetensors"])
    assert torch.equal(kept[next(iter(mean))], mean[next(iter(mean))])
    for call, words in (
        (lambda: rm.average(models, "regmean", statistics=ahead[::-1]), "other weights"),
        (lambda: rm.average(models, "regmean", statistics=ahead[0]), "one Statistics stands where statistics belong"),
        (lambda: alignment.apply(rm.measure(anchor, samples)), "other weights"),
    ):
        with pytest.raises(rm.RotationMergeError, match=words):
            call()


def test_a_layer_in_two_places_has_inputs_of_its_own_in_each(model: Any) -> None:
    """Names may change, and a layer may stand twice: each place is moved by the maps that it has there."""
    donor, samples = model("llama")
    alignment, measured = rm.Alignment.random(donor, heads="permutation"), rm.measure(donor, samples)
    names = [f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1)]
    twice = measured.renamed(dict.fromkeys(names, names[0]))
    assert len(set(twice.axes.values())) == 2
    stored, moved = ([part.gram(name) for name in names] for part in (twice, alignment.apply(twice)))
    assert torch.equal(*stored)
    assert not torch.equal(*moved)
    assert torch.equal(moved[0], alignment.apply(measured).gram(names[0]))


def test_moved_numbers_keep_their_type_or_have_the_one_that_is_named(model: Any) -> None:
    donor, samples = model("llama")
    alignment, measured = rm.Alignment.random(donor.float()), rm.measure(donor.float(), samples)
    key = next(key for key in measured if key.endswith("attn.o.gram"))
    plain, precise = alignment.apply(measured)[key], alignment.apply(measured, torch.float64)[key]
    assert (measured[key].dtype, plain.dtype, precise.dtype) == (torch.float32, torch.float32, torch.float64)
    assert torch.equal(precise.float(), plain)


# --- changes


def tuned(base: nn.Module, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """A fine-tune: every weight a little different."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: x + scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.is_floating_point() else x
        for name, x in base.state_dict().items()
    }


def test_moving_keeps_the_rank_and_the_scale_of_a_delta(model: Any) -> None:
    base, _ = model("llama")
    name, state = "model.layers.0.mlp.up_proj.weight", base.state_dict()
    column, row = (torch.randn(size, 1, dtype=torch.float64) for size in state[name].shape)
    delta = rm.Delta.between(base, ({**state, name: state[name] + column @ row.T}, base.config))
    alignment = rm.Alignment.random(base, residual="rotation", heads="permutation")
    moved, whole = (alignment.apply(change).state_dict()[name] for change in (0.5 * delta, delta))
    values = torch.linalg.svdvals(moved)
    assert values[1] <= 1e-5 * values[0]
    torch.testing.assert_close(moved, 0.5 * whole, atol=1e-8, rtol=1e-6)


def test_a_delta_of_another_base_is_refused(model: Any) -> None:
    (base, _), (other, _) = (model("llama", seed) for seed in range(2))
    delta = rm.Alignment.random(base).apply(rm.Delta.between(other, (tuned(other), other.config)))
    with pytest.raises(rm.RotationMergeError, match="is not that of"):
        delta.applied().state_dict()
