"""Statistics carried along with a donor are those of the donor: over all families, in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_models import ALL, Case, inputs, keep_float64, make
from torch import Tensor

from rotation_merge import AlignConfig, RotationMergeError
from rotation_merge.architecture.model import Architecture, TensorInfo
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
from rotation_merge.run.statistics import Statistics, behind_norm

FAMILIES = list({case.family: case for case in ALL}.values())
EACH_FAMILY = pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case.family)
STILL = ("signed_permutation", "permutation", "none")
LOCAL = {"heads": "permutation"}
State = dict[str, Tensor]


def case_of(family: str, class_name: str = "") -> Case:
    return next(c for c in ALL if c.family == family and class_name in ("", c.class_name))


def measured(model: torch.nn.Module, case: Case, architecture: Architecture, kind: str):
    batches = [inputs(case, model)]
    with keep_float64():
        if kind == "gram":
            return grams(Runner.of_module(model, batches))
        return fisher_diagonals(model, architecture, batches, LabelScores("none"), lambda *_: None)


def maps_of(architecture: Architecture, statistics: Statistics, state: State) -> Iterator[tuple[LinearMap, State]]:
    """The maps that statistics hold, each with the tensors of its block."""
    for block in architecture.blocks:
        tensors = read_block(block, state)
        linears = (linear_map(block, info) for info in block.tensors)
        yield from ((linear, tensors) for linear in linears if linear and linear.info.name in statistics.axes)


def gram_of(statistics: Statistics, linear: LinearMap, tensors: State) -> Tensor:
    """The Gram of (x, 1) of what a map of a model reads, behind its norm's gain and shift."""
    gram, norm = statistics.gram(linear.info.name), linear.norm
    assert gram is not None
    gain = None if norm is None or norm.gain not in tensors else tensors[norm.gain].double() + norm.offset
    shift = None if norm is None or norm.shift is None else tensors.get(norm.shift)
    split = statistics.axes[linear.info.name] in statistics.split
    return behind_norm(gram, linear, gain, shift) if split else gram.double()


def untie_heads(model: torch.nn.Module, architecture: Architecture) -> None:
    """Give every tied head a copy of the embedding's tensor, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for info in architecture.tensors():
        if info.tied and info.name in parameters and any(parameters[info.name] is parameters.get(t) for t in info.tied):
            owner, _, leaf = info.name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(parameters[info.name].detach().clone()))
    model.config.tie_word_embeddings = False


def pair(case: Case, options: AlignConfig):
    """A model, the same moved by a random gauge, and the gauge; both of one class, heads untied."""
    model, other = make(case), make(case)
    for each in (model, other):
        untie_heads(each, architecture_of(model))
    architecture = architecture_of(model, untie=True)
    streams = architecture.folds(dict.fromkeys(architecture.streams, options.residual))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = folded_tensors(architecture, state, streams)
    folded = {name: seen[name] if name in architecture.named() else state[name] for name in state}
    gauge = random_gauge(architecture, options, torch.Generator().manual_seed(3))
    moved = dict(moved_tensors(architecture, folded, gauge))
    other.load_state_dict({name: moved[name].to(tensor.dtype) for name, tensor in other.state_dict().items()})
    return model, other, architecture, gauge, Fold(architecture, streams) if streams else None


def admitted(case: Case, groups: tuple[str, ...]) -> str:
    """The first of some groups that all streams of a family admit, or none."""
    streams = architecture_of(make(case)).stream_groups.values()
    return next((group for group in groups if all(group in admitted for admitted in streams)), "none")


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.slow
@EACH_FAMILY
def test_carrying_equals_measuring_after_alignment(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what norms do, put back by multiplication from what was normalised, is what maps really read."""
    options = AlignConfig(residual=admitted(case, ("rotation", *STILL)), **LOCAL)
    model, twin, architecture, gauge, fold = pair(case, options)
    before, after = (measured(m, case, architecture, "gram") for m in (model, twin))
    with keep_float64(), monkeypatch.context() as patched:
        patched.setattr(WatchedBlocks, "_norm", lambda *_: None)
        raw = measured(model, case, architecture, "gram")
    carried, compared = moved_statistics(before, architecture, gauge, fold.streams if fold else ()), 0
    for linear, tensors in maps_of(architecture, before, twin.state_dict()):
        assert_near(*(gram_of(statistics, linear, tensors) for statistics in (carried, after)), 1e-7)
        compared += 1
    for linear, tensors in maps_of(architecture, before, model.state_dict()):
        assert_near(gram_of(before, linear, tensors), gram_of(raw, linear, {}), 1e-8)
    assert compared >= 4


def gives_logits(case: Case, model: torch.nn.Module) -> bool:
    with keep_float64(), torch.no_grad():
        return any(key.endswith("logits") for key in model(**inputs(case, model)))


def stacked(fishers: State, info: TensorInfo) -> Tensor:
    pieces = [fishers[f"{name}.fisher"] for name in info.names]
    return torch.stack(pieces) if info.stacked else pieces[0]


@EACH_FAMILY
def test_a_fisher_diagonal_survives_permutations_signs_and_scales(case: Case) -> None:
    options = AlignConfig(residual=admitted(case, STILL), attention="none", **LOCAL)
    model, other, architecture, gauge, _ = pair(case, options)
    if not gives_logits(case, model):
        return
    first, second = (measured(m, case, architecture, "fisher") for m in (model, other))
    known = [info for info in architecture.tensors() if f"{info.names[0]}.fisher" in first]
    assert len(known) >= 4
    for info in known:
        before, after = (stacked(fishers, info) for fishers in (first, second))
        atol = 1e-6 * float(after.abs().max().clamp(min=1e-12))
        torch.testing.assert_close(moved_fisher(info, before, gauge), after, rtol=1e-6, atol=atol)


def test_what_a_rotation_destroys_is_refused() -> None:
    _, _, architecture, gauge, _ = pair(case_of("llama"), AlignConfig(**LOCAL))
    info = next(i for i in architecture.tensors() if i.name.endswith("v_proj.weight"))
    with pytest.raises(RotationMergeError, match=r"cannot be kept under a rotation.*attention: none"):
        moved_fisher(info, torch.ones([axis.size for axis in info.axes]), gauge)


def test_expectations_over_labels_are_exact() -> None:
    """Of a classifier's logits the Fisher matrix is diag(p) - p p^T: so is that of its head's bias."""
    case = case_of("bert", "BertForSequenceClassification")
    model = make(case)
    fishers = measured(model, case, architecture_of(model), "fisher")
    with keep_float64(), torch.no_grad():
        p = model(**inputs(case, model)).logits.softmax(-1)
    torch.testing.assert_close(fishers["classifier.bias.fisher"], (p * (1 - p)).mean(0))
