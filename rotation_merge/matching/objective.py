"""Losses of models between parents: distillation from the parents, or the models' own loss on labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rotation_merge.errors import RecipeError

Objective = Literal["auto", "distill", "labels"]
"""distill: the parents' outputs (no labels needed); labels: the model's own loss on the labels in the data."""


def choose(objective: Objective, batch: Mapping[str, Tensor]) -> str:
    """Settle `auto`: the labels' loss if there are labels, otherwise distillation.

    Raises:
        RecipeError: labels are asked for that are not there.
    """
    if objective == "labels" and "labels" not in batch:
        raise RecipeError("objective 'labels' needs data with labels", remedy="use 'distill'")
    if objective == "auto":
        return "labels" if "labels" in batch else "distill"
    return objective


def main_output(outputs: Any) -> Tensor:
    """Logits where the model has them, else its last hidden state."""
    for name in ("logits", "start_logits", "logits_per_image", "last_hidden_state", "pooler_output"):
        value = getattr(outputs, name, None)
        if isinstance(value, Tensor):
            return value
    raise RecipeError(
        f"{type(outputs).__name__} holds neither logits nor hidden states to learn from",
        remedy="load the models under another class",
    )


def is_distribution(outputs: Any) -> bool:
    return isinstance(getattr(outputs, "logits", None), Tensor)


def taught_output(outputs: Any) -> Tensor:
    """What a parent teaches: probabilities for logits, else its main output; float32."""
    output = main_output(outputs).float()
    return functional.softmax(output, dim=-1) if is_distribution(outputs) else output


def mix(first: Mapping[str, Tensor], second: Mapping[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """Convex combinations of the samples of two batches, with a random share for each pair (mixup, 2018)."""
    rows = min(len(next(iter(first.values()))), len(next(iter(second.values()))))
    share = torch.rand(rows, generator=generator)
    order = torch.randperm(rows, generator=generator)
    result = {}
    for name, tensor in first.items():
        a = share.to(tensor).reshape(-1, *[1] * (tensor.ndim - 1))
        result[name] = a * tensor[:rows] + (1 - a) * second[name][order.to(tensor.device)]
    return result


def distillation(outputs: Any, taught: Sequence[Tensor], coefficients: Tensor, mask: Tensor | None = None) -> Tensor:
    """Distance from the parents' mean output (see `taught_output`), weighted as the parents are in the model.

    For logits: KL(mean of the parents' distributions || model), in nats, mean over predictions that `mask` (of shape
    logits.shape[:-1]) allows. For hidden states: mean squared difference over that of the parents' mean from zero.
    """
    student = main_output(outputs).float()
    target = coefficients[0] * taught[0]
    for share, parent_output in zip(coefficients[1:], taught[1:], strict=True):
        target = target.addcmul_(share, parent_output)
    if not is_distribution(outputs):
        return (student - target).square().mean() / target.square().mean().clamp_min(1e-12)
    divergence = functional.kl_div(functional.log_softmax(student, dim=-1), target, reduction="none").sum(-1)
    if mask is not None and mask.shape == divergence.shape:
        return (divergence * mask).sum() / mask.sum().clamp_min(1)
    return divergence.mean()


def labels_loss(outputs: Any) -> Tensor:
    """The model's own loss on labels.

    Raises:
        RecipeError: the model gives none.
    """
    loss = getattr(outputs, "loss", None)
    if loss is None:
        raise RecipeError(f"{type(outputs).__name__} has no loss for these labels", remedy="use objective 'distill'")
    return loss
