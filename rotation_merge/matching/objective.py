"""Losses of models on the path: distillation from the parents, labels, next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotation_merge.errors import RecipeError
from rotation_merge.matching.engine import Batch
from rotation_merge.run.functions import predicts_next, unlabelled

Objective = Literal["auto", "distill", "labels"]
OBJECTIVES = get_args(Objective)
"""distill: the parents' outputs (no labels needed); labels: the model's own loss on the labels in the data."""


def choose(objective: str, batch: Batch) -> str:
    """Settle `auto`: the labels' loss if there are labels, otherwise distillation.

    Raises:
        RecipeError: an objective that does not exist, or labels asked for that are not there.
    """
    if objective not in OBJECTIVES:
        raise RecipeError(f"there is no objective '{objective}'", remedy=f"known: {', '.join(OBJECTIVES)}")
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


KEPT = 1 << 30
"""Bytes of the parents' outputs that are kept."""


class ParentOutputs:
    """The parents' outputs on every batch, as probabilities for logits.

    Stored while memory lasts (`KEPT`), else computed again on access.
    """

    def __init__(self, parents: Sequence[Callable[..., Any]], device: torch.device) -> None:
        self.parents, self.device = parents, device
        self._kept: dict[int, list[Tensor]] = {}
        self._size = 0

    @torch.no_grad()
    def __call__(self, index: int, batch: Batch) -> list[Tensor]:
        if index in self._kept:
            return self._kept[index]
        outputs = self.answer(unlabelled(batch))
        size = sum(tensor.numel() * 4 for tensor in outputs)
        if self._size + size <= KEPT:
            self._size += size
            self._kept[index] = outputs
        return outputs

    @torch.no_grad()
    def answer(self, batch: Batch) -> list[Tensor]:
        """The parents' outputs on a batch that is used once."""
        if not len(next(iter(batch.values()))):
            return []
        return [_output_of(parent(**batch)).to(self.device) for parent in self.parents]


def _output_of(outputs: Any) -> Tensor:
    output = main_output(outputs).float()
    return functional.softmax(output, dim=-1) if is_distribution(outputs) else output


def mix(first: Batch, second: Batch, generator: torch.Generator) -> dict[str, Tensor]:
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
    """Distance from the parents' mean output (see `ParentOutputs`), weighted as the parents are in the model.

    For logits: KL(mean of the parents' distributions || model), in nats, mean over predictions that `mask` (of shape
    logits.shape[:-1]) allows. For hidden states: mean squared difference over that of the parents' mean from zero.
    """
    student = main_output(outputs).float()
    if not is_distribution(outputs):
        target = sum(c * t for c, t in zip(coefficients, taught, strict=True))
        return (student - target).square().mean() / torch.as_tensor(target).square().mean().clamp_min(1e-12)
    target = coefficients[0] * taught[0]
    for share, parent_output in zip(coefficients[1:], taught[1:], strict=True):
        target = target.addcmul_(share, parent_output)
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


def loss_weight(
    model: nn.Module, outputs: Any, batch: Batch, taught: Sequence[Tensor] | None, coefficients: Tensor
) -> Tensor:
    """Total weight of the rows behind a mean loss, for combining parts of a batch.

    Raises:
        RecipeError: they cannot.
    """
    rows = torch.tensor(float(next(iter(batch.values())).shape[0]))
    if isinstance(getattr(outputs, "logits_per_image", None), Tensor):
        problem = f"{type(model).__name__} compares all examples of a batch, so processes cannot share it"
        raise RecipeError(problem, remedy="fit it in one process, without torchrun")
    if taught is None:
        labels = batch["labels"]
        counted = labels[:, 1:] if labels.ndim > 1 and predicts_next(model) else labels
        return rows if labels.is_floating_point() else (counted != -100).sum()
    if not is_distribution(outputs):
        target = sum(c * t for c, t in zip(coefficients, taught, strict=True))
        return torch.as_tensor(target).double().square().sum()
    mask = attention_mask(batch)
    return mask.sum() if mask is not None and mask.shape == taught[0].shape[:-1] else rows


def attention_mask(batch: Mapping[str, Tensor]) -> Tensor | None:
    return batch.get("attention_mask")
