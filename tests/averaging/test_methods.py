"""Merge methods of our own, and parts of them alone: groups of tensors, formulas, plans, heads fitted to probabilities,
divergences, and how adapters that are trained begin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mergekit.merge_methods.base import TensorGroup
from plugin_support import build
from rounding import assert_equal_up_to_rounding
from tiny_models import ALL
from tiny_models import make as tiny
from torch import Tensor

import rotation_merge as rm
from rotation_merge.averaging.fisher import Fisher
from rotation_merge.averaging.methods import MergedModels, OwnMethod, Source
from rotation_merge.averaging.ot_fusion import transport
from rotation_merge.averaging.polish import LEAST_GAIN, PolishReport, initialise_along_gradient, with_lora
from rotation_merge.averaging.registry import METHODS
from rotation_merge.averaging.ridge import softmax_change
from rotation_merge.matching.objective import answer, divergence
from rotation_merge.model.open import open_model
from rotation_merge.run.measure import LabelScores

BY_NAME = {method.spec.name: method for method in METHODS if not method.whole_models}
MAP, NORM, EMBEDDING = "model.layers.1.mlp.down_proj.weight", "model.norm.weight", "model.embed_tokens.weight"


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- groups of tensors ------------------------------------------------------------------------------------------------


def views(count: int = 3, **changes: Any) -> list[rm.View]:
    return [open_model(build("llama", seed=seed, **changes), "abc"[seed]) for seed in range(count)]


def bound(name: str, models: list[rm.View], **facts: Any) -> OwnMethod:
    return BY_NAME[name].on(MergedModels.of(models, **facts))


def merged(
    method: OwnMethod, models: list[rm.View], name: str, weight: Any = 1.0, label: str = "", **options: Any
) -> Tensor:
    """One tensor, by mergekit's own call."""
    dtype = options.pop("dtype", torch.float32)
    group = TensorGroup.from_tensors([model[name].to(dtype) for model in models], base_index=0, name=label or name)
    (result,) = method((group,), parameters={"weight": weight}, **options)
    return result


@pytest.mark.parametrize("name", list(BY_NAME))
def test_a_method_without_models_says_so_in_one_line(name: str) -> None:
    with pytest.raises(rm.RotationMergeError, match="use it in a recipe") as error:
        merged(BY_NAME[name], views(), MAP)
    assert "\n" not in str(error.value)


def test_unknown_tensors_tied_embeddings_and_rounding() -> None:
    """An unknown one gets the weighted mean; an embedding that is the head is a map of changes; the result is rounded
    once, to the dtype that the call names, that of the merge's storage, or the first tensor's."""
    models, tied = views(2), views(tie_word_embeddings=True)
    plain, stored = bound("wudi", models), bound("wudi", models, storage=lambda _: torch.bfloat16)
    mean = merged(plain, models, NORM, [1.0, 3.0], label="unknown")
    torch.testing.assert_close(mean, (models[0][NORM] + 3 * models[1][NORM]) / 4)
    as_map, apart = (merged(bound("wudi", tied, **facts), tied, EMBEDDING) for facts in ({}, {"tied_head": None}))
    assert not torch.equal(as_map, apart)
    assert torch.equal(as_map, rm.average(tied, "wudi")[EMBEDDING])
    exact = merged(plain, models, MAP, out_dtype=torch.float64).to(torch.bfloat16)
    assert torch.equal(merged(plain, models, MAP, out_dtype=torch.bfloat16), exact)
    assert torch.equal(merged(stored, models, MAP), exact)
    assert merged(plain, models, MAP, dtype=torch.bfloat16).dtype == torch.bfloat16


# --- formulas ---------------------------------------------------------------------------------------------------------


def test_plans_by_hand() -> None:
    """Two points that change places; a soft plan between equidistant points shares them out."""
    a = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert transport(a, a.flip(0), 0.0).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    soft, even = transport(a, a.flip(0), 0.06), transport(a, a, 100.0)
    torch.testing.assert_close(soft.sum(1), torch.ones(2, dtype=torch.float64))
    assert 0 < float(soft[0, 0]) < 0.1
    torch.testing.assert_close(even, torch.full((2, 2), 0.5, dtype=torch.float64), atol=0.01, rtol=0)


def test_fisher_by_hand() -> None:
    """Shares, norms and the anchor's floor: against the formula, spelled out."""
    sources = []
    for number, share in enumerate((0.2, 0.3, 0.5)):
        known = {"fisher": drawn(3, 4, seed=8 + number).square(), "norm": 3.0 - number}
        sources.append(Source(drawn(3, 4, seed=4 + number), share, known))
    rows = [s.share / s.inputs["norm"] * s.inputs["fisher"].clamp(min=0.4 * (s is sources[0])) for s in sources]
    best = sum(r * s.weight for r, s in zip(rows, sources, strict=True)) / sum(rows)
    torch.testing.assert_close(Fisher().average(sources, {"normalize": True, "floor": 0.4}), best)


@pytest.mark.parametrize("task", ["regression", "labels"])
def test_scores_of_the_datas_own_numbers(task: str) -> None:
    """Of a likelihood that grows where the data are: its gradient by the outputs is what they lack."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 1 if task == "regression" else 3, generator=draw, requires_grad=True)
    labels = torch.rand(5, generator=draw) if task == "regression" else torch.tensor([[1.0, 0, 1]] * 5)
    model = build("bert", num_labels=logits.shape[1])
    (score,) = LabelScores(task, True).of(model, {"logits": logits}, {"labels": labels}, 0)
    outputs = logits if task == "regression" else logits.sigmoid()
    torch.testing.assert_close(torch.autograd.grad(score, logits)[0], labels.reshape(logits.shape) - outputs)


# --- a map fitted to probabilities ------------------------------------------------------------------------------------

Batches = list[Tensor]


def fitted(weight: Tensor, inputs: Batches, targets: Batches, ridge: float = 1e-3, *shares: float) -> Tensor:
    start = torch.zeros_like(weight)
    return softmax_change(weight, start, inputs, targets.__getitem__, shares or [1.0] * len(inputs), ridge)


def loss(weight: Tensor, change: Tensor, inputs: Batches, targets: Batches, ridge: float = 1e-3) -> Tensor:
    x, q = torch.cat(inputs), torch.cat(targets).softmax(-1)
    with_one = x if x.shape[1] == weight.shape[1] else torch.cat([x, x.new_ones(len(x), 1)], 1)
    log_p = (with_one @ (weight + change).mT).log_softmax(-1)
    penalty = 0.5 * ridge * x.square().mean() * change[:, : x.shape[1]].square().sum()
    return (q * (q.log() - log_p)).sum(-1).mean() + penalty


@pytest.mark.parametrize("biased", [False, True])
def test_a_map_fitted_to_probabilities(biased: bool) -> None:
    """The gradient vanishes; planted probabilities are found; a batch that counts twice is the batch two times; a class
    that neither the map nor the targets ever choose changes nothing."""
    shapes = (5, 7 + biased), (60, 7), (30, 7), (60, 5), (30, 5)
    weight, *batches = (drawn(*shape, seed=i) for i, shape in enumerate(shapes))
    inputs, targets = batches[:2], batches[2:]
    if biased:
        weight[-1] = -100.0 * torch.eye(8)[-1]
        for each in targets:
            each[:, -1] = -100.0
        assert float(fitted(weight, inputs, targets)[-1].norm()) < 1e-6
    gradients = []
    for start in (torch.zeros_like(weight), fitted(weight, inputs, targets)):
        change = start.clone().requires_grad_(True)
        gradients.append(torch.autograd.grad(loss(weight, change, inputs, targets), change)[0].norm())
    assert gradients[1] < 1e-2 * gradients[0]
    double = fitted(weight, inputs, targets, 1e-3, 1.0, 2.0)
    torch.testing.assert_close(double, fitted(weight, [*inputs, inputs[1]], [*targets, targets[1]]))
    planted = weight + 0.5 * drawn(*weight.shape, seed=9)
    targets = [(torch.cat([x, x.new_ones(len(x), 1)], 1) if biased else x) @ planted.mT for x in inputs]
    changes = torch.zeros_like(weight), fitted(weight, inputs, targets, 1e-9)
    before, after = (loss(weight, change, inputs, targets, 0.0) for change in changes)
    assert after < 1e-3 * before
    start = 30 * drawn(*weight.shape, seed=9)
    change = softmax_change(weight, start, inputs, targets.__getitem__, [1.0, 1.0], 1e-3)
    assert loss(weight, change, inputs, targets) <= loss(weight, start, inputs, targets)


# --- polish -----------------------------------------------------------------------------------------------------------


class Outputs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def test_divergence_is_that_of_all_classes() -> None:
    """With few classes exactly KL; with many, the classes that were not kept count as one."""
    for classes in (2, 5, 300):
        a, b = (2 * drawn(3, 4, classes, seed=seed).float() for seed in range(2))
        order = a.topk(min(64, classes)).indices
        shares = [x.softmax(-1).gather(-1, order) for x in (a, b)]
        if classes > 64:
            shares = [torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in shares]
        expected = float((shares[0] * (shares[0] / shares[1]).log()).sum(-1).mean())
        assert float(divergence(Outputs(b), answer(Outputs(a)))) == pytest.approx(expected, abs=1e-4)
        assert float(divergence(Outputs(a), answer(Outputs(a)))) == pytest.approx(0.0, abs=1e-5)
    a, b = Outputs(torch.ones(3, 1)), Outputs(torch.full((3, 1), 3.0))  # one number: no distribution
    assert float(divergence(b, answer(a))) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("before", "after", "gained"),
    [
        *((3.0, 3.0 * (1 - share * LEAST_GAIN), share > 1) for share in (-2.0, -0.5, 0.5, 2.0)),
        (-9e-9, -9e-9, False),  # kernels that add in another order leave equal models so far apart, of either sign
        (9e-9, 0.0, False),
        (0.1, 0.09, True),
    ],
)
def test_a_gain_is_more_than_the_margin_and_rounding(before: float, after: float, gained: bool) -> None:
    report = PolishReport(before, after)
    assert report.gained is gained
    assert ("gains nothing" in report.verdict()) is not gained


def family_model(family: str) -> Any:
    return tiny(next(case for case in ALL if case.family == family)).float()


@pytest.mark.parametrize(("family", "head"), [("llama", True), ("qwen2", False), ("gpt2", False)])
def test_a_new_lora_begins_along_the_gradient(family: str, head: bool) -> None:
    """It changes nothing; A's rows are orthonormal, and hold all of a gradient that has no more rows than they are."""
    model = family_model(family) if family == "gpt2" else build(family)
    ids = torch.tensor([[3, 9, 4]])
    model.requires_grad_(True)
    (model(input_ids=ids).logits ** 2).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    before = model(input_ids=ids).logits.detach()
    trained = with_lora(model, 4, 0)
    initialise_along_gradient(trained, lambda: (trained(input_ids=ids).logits ** 2).sum().backward())
    assert_equal_up_to_rounding(trained(input_ids=ids).logits, before)
    layers = {name: module for name, module in model.named_modules() if getattr(module, "lora_A", None)}
    assert any("lm_head" in name for name in layers) is head
    for name, layer in layers.items():
        a, gradient = layer.lora_A["default"].weight.double(), gradients[f"{name}.weight"].double()
        gradient = gradient if gradient.shape[1] == a.shape[1] and not layer.fan_in_fan_out else gradient.mT
        torch.testing.assert_close(a @ a.mT, torch.eye(4, dtype=torch.float64), atol=1e-5, rtol=0)
        assert (gradient - gradient @ a.mT @ a).norm() <= 1e-4 * gradient.norm(), name  # three tokens: three rows


def test_a_lora_leaves_out_what_is_more_than_a_product() -> None:
    """What kernels read past it, and routers."""
    for family in ("falcon_h1", "granitemoehybrid"):
        modules = with_lora(family_model(family), 2, 0).named_modules()
        adapted = {name.rpartition(".")[2] for name, module in modules if getattr(module, "lora_A", None)}
        assert {"in_proj", "q_proj"} <= adapted
        assert not {"out_proj", "conv1d"} & adapted
    model, ids = family_model("llama4"), torch.tensor([[3, 9, 4]])
    before = model(input_ids=ids).logits
    assert_equal_up_to_rounding(with_lora(model, 2, 0)(input_ids=ids).logits, before)
