"""A linear map fitted to probabilities: the least loss, planted maps, biases and the count of positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rotation_merge.averaging.softmax import softmax_change

RIDGE = 1e-3


def problem(biased: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """A map (5, 7), or (5, 8) with a bias, two batches of inputs, and target logits."""
    draw = torch.Generator().manual_seed(0)
    shapes = (5, 7 + biased), (60, 7), (30, 7), (60, 5), (30, 5)
    weight, *rest = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return weight, rest[:2], rest[2:]


def widened(x: Tensor, weight: Tensor) -> Tensor:
    return x if x.shape[1] == weight.shape[1] else torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)


def loss(weight: Tensor, change: Tensor, inputs: list[Tensor], targets: list[Tensor], ridge: float) -> Tensor:
    x, q = torch.cat(inputs), torch.cat(targets).softmax(-1)
    log_p = (widened(x, weight) @ (weight + change).mT).log_softmax(-1)
    penalty = 0.5 * ridge * x.square().mean() * change[:, : x.shape[1]].square().sum()
    return (q * (q.log() - log_p)).sum(-1).mean() + penalty


@pytest.mark.parametrize("biased", [False, True])
def test_the_gradient_of_the_loss_vanishes(biased: bool) -> None:
    weight, inputs, targets = problem(biased)
    gradients = []
    for start in (
        torch.zeros_like(weight),
        softmax_change(weight, torch.zeros_like(weight), inputs, targets.__getitem__, [1.0, 1.0], RIDGE),
    ):
        change = start.clone().requires_grad_(True)
        gradients.append(torch.autograd.grad(loss(weight, change, inputs, targets, RIDGE), change)[0].norm())
    assert gradients[1] < 1e-2 * gradients[0]


@pytest.mark.parametrize("biased", [False, True])
def test_planted_probabilities(biased: bool) -> None:
    weight, inputs, _ = problem(biased)
    planted = weight + 0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    targets = [widened(x, weight) @ planted.mT for x in inputs]
    change = softmax_change(weight, torch.zeros_like(weight), inputs, targets.__getitem__, [1.0, 1.0], 1e-9)
    before, after = (loss(weight, c, inputs, targets, 0.0) for c in (torch.zeros_like(weight), change))
    assert after < 1e-3 * before


def test_it_is_never_worse_than_the_start() -> None:
    weight, inputs, targets = problem(False)
    start = 30 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2), dtype=weight.dtype)
    change = softmax_change(weight, start, inputs, targets.__getitem__, [1.0, 1.0], RIDGE)
    assert loss(weight, change, inputs, targets, RIDGE) <= loss(weight, start, inputs, targets, RIDGE)


def test_a_batch_that_counts_twice_is_the_batch_two_times() -> None:
    weight, inputs, targets = problem(False)
    start = torch.zeros_like(weight)
    double = softmax_change(weight, start, inputs, targets.__getitem__, [1.0, 2.0], RIDGE)
    repeated = [[*batches, batches[1]] for batches in (inputs, targets)]
    torch.testing.assert_close(
        double, softmax_change(weight, start, repeated[0], repeated[1].__getitem__, [1.0] * 3, RIDGE)
    )


def test_an_impossible_class_changes_nothing() -> None:
    """A row of the vocabulary that neither the map nor the targets ever choose."""
    weight, inputs, targets = problem(True)
    weight[:, -1] = 0.0
    start = torch.zeros_like(weight)
    never = torch.zeros(1, 8, dtype=torch.float64)
    never[0, -1] = -100.0
    more = [torch.cat([target, torch.full((len(target), 1), -100.0, dtype=target.dtype)], 1) for target in targets]
    plain = softmax_change(weight, start, inputs, targets.__getitem__, [1.0, 1.0], RIDGE)
    padded = softmax_change(
        torch.cat([weight, never]), torch.cat([start, never * 0]), inputs, more.__getitem__, [1.0, 1.0], RIDGE
    )
    torch.testing.assert_close(padded[:-1], plain)
    assert float(padded[-1].norm()) < 1e-6
