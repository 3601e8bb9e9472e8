"""Deltas and statistics that an alignment moves are those of the moved model, through public calls only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from residual_support import checkpoint
from tiny_models import difference, inputs, outputs
from torch import nn

import rotation_merge as rm

LOCAL = {"heads": "permutation", "scaling": True}
CASES = [
    ("llama", "llama", {**LOCAL, "residual": "rotation"}),
    ("mixtral", "untied", {**LOCAL, "residual": "signed_permutation"}),
    ("vit", "classifier", {**LOCAL, "residual": "rotation"}),
    ("bert", "classifier", {**LOCAL, "residual": "permutation"}),
    ("dinov2", "classifier", {**LOCAL, "residual": "rotation"}),
]
"""RMSNorm folded, experts, LayerNorm folded, value biases that softmax cannot see, layer scales."""


def model(family: str, name: str, folder: Path, seed: int = 0) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A tiny model in float64, and samples of what it takes."""
    stored = checkpoint(family, name, folder / str(seed), seed=seed)
    module = stored.case.model_class.from_pretrained(stored.path, dtype=torch.float64, attn_implementation="eager")
    module.config._experts_implementation = "eager"
    batch = inputs(stored.case, module.eval())
    return module, [batch]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_moved_statistics_are_those_of_the_moved_model(case: tuple[str, str, dict[str, Any]], tmp_path: Path) -> None:
    family, name, options = case
    (anchor, _), (donor, samples) = (model(family, name, tmp_path, seed) for seed in range(2))
    alignment = rm.align(anchor, donor, **options)
    moved = alignment.apply(rm.measure(donor, samples))
    measured = rm.measure(alignment.apply(donor), samples)
    assert moved.keys == measured.keys
    assert agree(moved, measured, ("gram", "count")) >= 8


def agree(moved: rm.Statistics, measured: rm.Statistics, kinds: tuple[str, ...]) -> int:
    """How many tensors of these kinds are compared; all are equal up to rounding."""
    keys = sorted(key for key in measured.keys if key.endswith(kinds))
    largest = max(float(measured[key].abs().max()) for key in keys)
    for key in keys:
        size = float(measured[key].abs().max()) + 1e-6 * largest  # a key's bias has no gradient but rounding
        torch.testing.assert_close(moved[key], measured[key], rtol=1e-4, atol=1e-4 * size, msg=f"'{key}' differs")
    return len(keys)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "classifier"], ids=lambda case: case[0])
def test_fisher_diagonals_move_with_permutations_alone(case: tuple[str, str, dict[str, Any]], tmp_path: Path) -> None:
    family, name, _ = case
    donor, samples = model(family, name, tmp_path)
    order = {"attention": "none", "heads": "permutation", "residual": "permutation"}
    alignment = rm.Alignment.random(donor, **order)
    config = rm.MeasureConfig(kinds=("fisher",))
    moved = alignment.apply(rm.measure(donor, samples, config))
    assert agree(moved, rm.measure(alignment.apply(donor), samples, config), ("fisher",)) >= 8
    turned = rm.Alignment.random(donor, attention="rotation", heads="permutation")
    with pytest.raises(rm.RotationMergeError, match="cannot be kept"):
        dict.fromkeys(turned.apply(rm.measure(donor, samples, config))[key] for key in sorted(moved.keys))


@pytest.mark.slow
@pytest.mark.parametrize("residual", ["none", "rotation"])
def test_moved_statistics_weigh_like_measured_ones(residual: str, tmp_path: Path) -> None:
    (anchor, samples), (donor, _) = (model("llama", "llama", tmp_path, seed) for seed in range(2))
    alignment = rm.align(anchor, donor, heads="permutation", residual=residual)
    models = [alignment.apply_anchor(anchor), alignment.apply(donor)]
    ahead = [alignment.apply_anchor(rm.measure(anchor, samples)), alignment.apply(rm.measure(donor, samples))]
    mean = rm.average(models, "regmean", statistics=ahead)
    again = rm.average(models, "regmean", statistics=[rm.measure(each, samples) for each in models])
    for name, tensor in again.items():
        torch.testing.assert_close(mean[name], tensor, atol=1e-5, rtol=1e-4)
    ahead[1].save(tmp_path / "moved.safetensors")
    kept = rm.average(models, "regmean", statistics=[ahead[0], tmp_path / "moved.safetensors"])
    assert torch.equal(kept["lm_head.weight"], mean["lm_head.weight"])
    with pytest.raises(rm.RotationMergeError, match="other weights"):
        rm.average(models, "regmean", statistics=ahead[::-1])
    with pytest.raises(rm.RotationMergeError, match="one Statistics stands where statistics belong"):
        rm.average(models, "regmean", statistics=ahead[0])
    with pytest.raises(rm.RotationMergeError, match="other weights"):
        alignment.apply(rm.measure(anchor, samples))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [("llama", "llama"), ("vit", "classifier")])
def test_statistics_of_a_folded_anchor_belong_to_its_view(family: str, name: str, tmp_path: Path) -> None:
    """Biases that softmax cannot see are the anchor's own: they take no part in what a folded anchor is known by."""
    (anchor, samples), (donor, _) = (model(family, name, tmp_path, seed) for seed in range(2))
    alignment = rm.align(anchor, donor, residual="rotation")
    models = [alignment.apply_anchor(anchor), alignment.apply(donor)]
    statistics = [alignment.apply_anchor(rm.measure(anchor, samples)), alignment.apply(rm.measure(donor, samples))]
    assert rm.average(models, "regmean", statistics=statistics).state_dict()


def tuned(base: nn.Module, scale: float = 0.01) -> dict[str, torch.Tensor]:
    """A fine-tune: every weight a little different."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: x + scale * torch.randn(x.shape, generator=generator, dtype=x.dtype) if x.is_floating_point() else x
        for name, x in base.state_dict().items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[:1] + CASES[2:4], ids=lambda case: case[0])
def test_a_moved_delta_is_the_difference_of_the_moved_models(
    case: tuple[str, str, dict[str, Any]], tmp_path: Path
) -> None:
    family, name, options = case
    base, samples = model(family, name, tmp_path)
    fine = type(base)(base.config).double().eval()
    fine.load_state_dict(tuned(base))
    alignment = rm.Alignment.random(base, **options)
    delta = alignment.apply(rm.Delta.between(base, fine))
    moved, expected = delta.applied(), alignment.apply(fine, strict=False)
    for key, tensor in expected.items():
        torch.testing.assert_close(moved[key], tensor, atol=1e-5, rtol=1e-5)
    assert difference(outputs(moved.to_module(), samples[0]), outputs(fine, samples[0])) <= 1e-5
    change, start = delta.state_dict(), alignment.apply(base)
    for key, part in change.items():
        torch.testing.assert_close(part, expected[key] - start[key], atol=1e-6, rtol=1e-4)
    back = alignment.inverse().apply(delta)
    assert difference(outputs(back.applied().to_module(), samples[0]), outputs(fine, samples[0])) <= 1e-5


def test_moving_keeps_the_rank_and_the_scale_of_a_delta(tmp_path: Path) -> None:
    base, _ = model("llama", "llama", tmp_path)
    name, state = "model.layers.0.mlp.up_proj.weight", base.state_dict()
    column, row = (torch.randn(size, 1, dtype=torch.float64) for size in state[name].shape)
    delta = rm.Delta.between(base, ({**state, name: state[name] + column @ row.T}, base.config))
    alignment = rm.Alignment.random(base, residual="rotation", heads="permutation")
    moved = alignment.apply(0.5 * delta).state_dict()
    values = torch.linalg.svdvals(moved[name])
    assert values[1] <= 1e-5 * values[0]
    whole = alignment.apply(delta).state_dict()
    torch.testing.assert_close(moved[name], 0.5 * whole[name], atol=1e-8, rtol=1e-6)


def test_a_delta_of_another_base_is_refused(tmp_path: Path) -> None:
    (base, _), (other, _) = (model("llama", "llama", tmp_path, seed) for seed in range(2))
    delta = rm.Alignment.random(base).apply(rm.Delta.between(other, (tuned(other), other.config)))
    with pytest.raises(rm.RotationMergeError, match="is not that of"):
        delta.applied().state_dict()


def test_a_layer_in_two_places_has_inputs_of_its_own_in_each(tmp_path: Path) -> None:
    """Names may change, and a layer may stand twice: each place is moved by the maps that it has there."""
    donor, samples = model("llama", "llama", tmp_path)
    alignment, measured = rm.Alignment.random(donor, heads="permutation"), rm.measure(donor, samples)
    first, second = (f"model.layers.{n}.self_attn.o_proj.weight" for n in (0, 1))
    twice = measured.renamed({first: first, second: first})
    moved, grams = alignment.apply(twice), [twice.gram(name) for name in (first, second)]
    assert len(set(twice.axes.values())) == 2
    assert grams[0] is not None
    assert grams[1] is not None
    assert torch.equal(grams[0].matrix, grams[1].matrix)
    there, again = (moved.gram(name) for name in (first, second))
    assert there is not None
    assert again is not None
    assert not torch.equal(there.matrix, again.matrix)
    alone = alignment.apply(measured).gram(first)
    assert alone is not None
    assert torch.equal(there.matrix, alone.matrix)


def test_moved_numbers_keep_their_type_or_have_the_one_that_is_named(tmp_path: Path) -> None:
    donor, samples = model("llama", "llama", tmp_path)
    alignment, measured = rm.Alignment.random(donor.float()), rm.measure(donor.float(), samples)
    key = next(key for key in measured if key.endswith("attn.o.gram"))
    assert measured[key].dtype == alignment.apply(measured)[key].dtype == torch.float32
    precise = alignment.apply(measured, torch.float64)[key]
    assert precise.dtype == torch.float64
    assert torch.equal(precise.float(), alignment.apply(measured)[key])
