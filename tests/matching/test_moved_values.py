"""Statistics that an alignment moves are those of the moved model: of all families, in float64."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from test_devices import FAMILIES
from tiny_models import ALL, inputs, keep_float64, make
from torch import nn
from variants import ONE

import rotation_merge as rm
from rotation_merge.model.apply import read_block
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.maps import linear_maps
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.statistics import behind_norm

STILL = ("signed_permutation", "permutation", "none")

CASES = {case.family: case for case in ONE}
FEW = [pytest.param(family, marks=[pytest.mark.slow] * (family not in FAMILIES)) for family in CASES]
"""All families, of which those are quick that have spaces of every kind."""

Samples = list[dict[str, torch.Tensor]]
FISHER = rm.MeasureConfig(kinds=("fisher",))


def agree(moved: rm.Statistics, measured: rm.Statistics, *kinds: str) -> int:
    """How many tensors of these kinds are compared; all are equal up to rounding."""
    assert set(moved) == set(measured)
    keys = sorted(key for key in measured if key.endswith(kinds))
    largest = max(float(measured[key].abs().max()) for key in keys)
    for key in keys:
        size = float(measured[key].abs().max()) + 1e-6 * largest  # a key's bias has no gradient but rounding
        torch.testing.assert_close(moved[key], measured[key], rtol=1e-6, atol=1e-6 * size, msg=f"'{key}' differs")
    return len(keys)


def model(family: str, seed: int = 0) -> tuple[nn.Module, Samples]:
    """A tiny model in float64, and samples of what it takes."""
    module = make(CASES[family], seed)
    takes = inspect.signature(module.forward).parameters
    return module, [{name: x for name, x in inputs(CASES[family], module).items() if name in takes}]


def drawn(module: nn.Module, groups: tuple[str, ...], **options: Any) -> rm.Alignment:
    """A random alignment; of the streams by the first of some groups that all of them admit."""
    streams = architecture_of(module).stream_groups.values()
    residual = next((group for group in groups if all(group in admitted for admitted in streams)), "none")
    return rm.Alignment.random(module, heads="permutation", residual=residual, untie=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", CASES)
def test_moved_statistics_are_those_of_the_moved_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what norms do, put back by multiplication from what was normalised, is what maps really read."""
    module, samples = model(family)
    with keep_float64():
        alignment, measured = drawn(module, ("rotation", *STILL)), rm.measure(module, samples)
        again = rm.measure(alignment.apply(module), samples)
        monkeypatch.setattr(WatchedBlocks, "_norm", lambda *_: None)
        raw = rm.measure(module, samples)
    assert agree(alignment.apply(measured), again, "gram", "count") >= 4
    for name, linear in linear_maps(architecture_of(module)).items():
        if measured.axes.get(name) in measured.split:
            norm, tensors = linear.norm, read_block(linear.block, module.state_dict())
            gain, shift = tensors[norm.gain] + norm.offset, tensors.get(norm.shift or "")
            gram, wanted = behind_norm(measured.gram(name), linear, gain, shift), raw.gram(name)
            torch.testing.assert_close(gram, wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", FEW)
def test_fisher_diagonals_move_with_permutations_alone(family: str) -> None:
    module, samples = model(family)
    with keep_float64():
        if not any(key.endswith("logits") for key in module(**samples[0])):
            return
        measured, still = rm.measure(module, samples, FISHER), drawn(module, STILL, attention="none")
        moved, again = still.apply(measured), rm.measure(still.apply(module), samples, FISHER)
        assert agree(moved, again, "fisher") >= 4
        turned = drawn(module, STILL).apply(measured)
        if family in ("llama", "vit", "bert"):
            with pytest.raises(rm.RotationMergeError, match=r"cannot be kept.*attention: none"):
                dict.fromkeys(turned[key] for key in moved)


def test_expectations_over_labels_are_exact() -> None:
    """Of a classifier's logits the Fisher matrix is diag(p) - p p^T: so is that of its head's bias."""
    case = next(case for case in ALL if case.class_name == "BertForSequenceClassification")
    module = make(case)
    with keep_float64(), torch.no_grad():
        fisher = rm.measure(module, [inputs(case, module)], FISHER)["classifier.bias.fisher"]
        p = module(**inputs(case, module)).logits.softmax(-1)
    torch.testing.assert_close(fisher, (p * (1 - p)).mean(0))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "residual"), [("llama", "none"), ("llama", "rotation"), ("vit", "rotation")])
def test_moved_statistics_weigh_like_measured_ones(family: str, residual: str, tmp_path: Path) -> None:
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


def test_a_layer_in_two_places_has_inputs_of_its_own_in_each() -> None:
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


def test_moved_numbers_keep_their_type_or_have_the_one_that_is_named() -> None:
    donor, samples = model("llama")
    alignment, measured = rm.Alignment.random(donor.float()), rm.measure(donor.float(), samples)
    key = next(key for key in measured if key.endswith("attn.o.gram"))
    plain, precise = alignment.apply(measured)[key], alignment.apply(measured, torch.float64)[key]
    assert (measured[key].dtype, plain.dtype, precise.dtype) == (torch.float32, torch.float32, torch.float64)
    assert torch.equal(precise.float(), plain)
