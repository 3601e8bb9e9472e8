"""Statistics carried along with a donor are those of the donor: over all families, in float64."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from tiny_models import ALL, Case, inputs, keep_float64, make
from torch import Tensor

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.matching.statistics import moved_fisher, moved_statistics
from rotation_merge.matching.stream import random_gauge
from rotation_merge.model.apply import read_block
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.run.fisher import LabelScores, fisher_diagonals
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.measure import grams
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics import Statistics

FAMILIES = list({case.family: case for case in ALL}.values())
STILL = ("signed_permutation", "permutation", "none")
LOCAL = {"heads": "permutation"}


def measured(model: torch.nn.Module, case: Case, architecture: Architecture, where: Path, kind: str):
    batches = [inputs(case, model)]
    with keep_float64():
        if kind == "gram":
            return grams(Runner.of_module(model, batches))
        return fisher_diagonals(model, architecture, batches, LabelScores("none"), 0, lambda *_: None)


def read(found: Statistics, one: LinearMap, tensors: dict[str, Tensor]) -> Tensor:
    """The Gram of (x, 1) of what a map of a model reads, behind its norm's gain and shift."""
    gram, norm = found.gram(one.info.name), one.norm
    assert gram is not None
    gain = None if norm is None or norm.gain not in tensors else tensors[norm.gain].double() + norm.offset
    shift = None if norm is None or norm.shift is None else tensors.get(norm.shift)
    return gram.behind_norm(one, gain, shift).matrix


def untie_heads(model: torch.nn.Module, architecture: Architecture) -> None:
    """Give every tied head a copy of the embedding's tensor, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for info in architecture.tensors():
        if info.tied and info.name in parameters and any(parameters[info.name] is parameters.get(t) for t in info.tied):
            owner, _, leaf = info.name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(parameters[info.name].detach().clone()))
    model.config.tie_word_embeddings = False


def pair(case: Case, options: AlignConfig, untie: bool = True):
    """A model, the same moved by a random gauge, and the gauge; both of one class, heads untied where need be."""
    model, other = make(case), make(case)
    architecture = architecture_of(model)
    if untie:
        for one in (model, other):
            untie_heads(one, architecture)
        architecture = architecture_of(model, untie=True)
    streams = architecture.folds(dict.fromkeys(architecture.streams, options.residual))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = folded_tensors(architecture, state, streams)
    folded = {name: seen[name] if name in architecture.named() else state[name] for name in state}
    gauge = random_gauge(architecture, options, torch.Generator().manual_seed(3))
    moved = dict(moved_tensors(architecture, folded, gauge))
    other.load_state_dict({name: moved[name].to(tensor.dtype) for name, tensor in other.state_dict().items()})
    return model, other, architecture, gauge, Fold(architecture, streams) if streams else None


def admits(architecture: Architecture, group: str) -> bool:
    return all(group in groups for groups in architecture.stream_groups.values())


def residual_of(case: Case) -> str:
    architecture = architecture_of(make(case))
    return next(
        g for g in ("rotation", "signed_permutation", "permutation", "none") if g == "none" or admits(architecture, g)
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_carrying_equals_measuring_after_alignment(case: Case, tmp_path: Path):
    options = AlignConfig(residual=residual_of(case), **LOCAL)
    model, other, architecture, gauge, fold = pair(case, options)
    own, theirs = (measured(m, case, architecture, tmp_path / str(i), "gram") for i, m in enumerate((model, other)))
    carried = moved_statistics(own, architecture, gauge, fold.streams if fold else ())
    compared = 0
    for block in architecture.blocks:
        after = read_block(block, other.state_dict())
        for info in block.tensors:
            one = linear_map(block, info)
            if one is None or info.name not in own.axes:
                continue
            grams = [read(found, one, after) for found in (carried, theirs)]
            torch.testing.assert_close(*grams, rtol=1e-7, atol=1e-7 * float(grams[1].abs().max()))
            compared += 1
    assert compared >= 4


def gives_logits(case: Case, model: torch.nn.Module) -> bool:
    with keep_float64(), torch.no_grad():
        return any(key.endswith("logits") for key in model(**inputs(case, model)))


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_a_fisher_diagonal_survives_permutations_signs_and_scales(case: Case, tmp_path: Path):
    architecture = architecture_of(make(case))
    residual = next(g for g in STILL if g == "none" or admits(architecture, g))
    options = AlignConfig(residual=residual, heads="permutation", attention="none")
    model, other, architecture, gauge, _ = pair(case, options)
    if not gives_logits(case, model):
        return
    own, theirs = (measured(m, case, architecture, tmp_path / str(i), "fisher") for i, m in enumerate((model, other)))
    compared = 0
    for info in architecture.tensors():
        if f"{info.names[0]}.fisher" not in own:
            continue
        before, after = (_stacked(found, info) for found in (own, theirs))
        carried = moved_fisher(info, before, gauge)
        torch.testing.assert_close(carried, after, rtol=1e-6, atol=1e-6 * float(after.abs().max().clamp(min=1e-12)))
        compared += 1
    assert compared >= 4


def _stacked(found: dict[str, Tensor], info) -> Tensor:
    pieces = [found[f"{name}.fisher"] for name in info.names]
    return torch.stack(pieces) if info.stacked else pieces[0]


def test_what_a_rotation_destroys_is_refused():
    case = next(c for c in FAMILIES if c.family == "llama")
    _, _, architecture, gauge, _ = pair(case, AlignConfig(**LOCAL))
    info = next(i for i in architecture.tensors() if i.name.endswith("v_proj.weight"))
    with pytest.raises(RotationMergeError, match=r"cannot be kept under a rotation.*attention: none"):
        moved_fisher(info, torch.ones([axis.size for axis in info.axes]), gauge)


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
def test_what_norms_do_is_put_back_by_multiplication(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From what was normalised: what maps really read."""
    model = make(case)
    architecture = architecture_of(model)
    own = measured(model, case, architecture, tmp_path / "own", "gram")
    with keep_float64():
        monkeypatch.setattr(WatchedBlocks, "without_gains", lambda *_: contextlib.nullcontext())
        raw = measured(model, case, architecture, tmp_path / "raw", "gram")
    for block in architecture.blocks:
        tensors = read_block(block, model.state_dict())
        for info in block.tensors:
            one = linear_map(block, info)
            if one is None or info.name not in own.axes:
                continue
            found, wanted = read(own, one, tensors), read(raw, one, {})
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))


def test_expectations_over_labels_are_exact(tmp_path: Path):
    """Of a classifier's logits the Fisher matrix is diag(p) - p p^T: so is that of its head's bias."""
    case = next(c for c in ALL if c.family == "bert" and c.class_name == "BertForSequenceClassification")
    model = make(case)
    found = measured(model, case, architecture_of(model), tmp_path / "x", "fisher")
    with keep_float64(), torch.no_grad():
        p = model(**inputs(case, model)).logits.softmax(-1)
    variances = (p * (1 - p)).mean(0)
    torch.testing.assert_close(found["classifier.bias.fisher"], variances)
