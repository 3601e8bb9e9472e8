"""Losses of models that learn: from several parents, from a teacher's answers on disk, or from labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.files import Store
from rotation_merge.matching.options import Objective
from rotation_merge.run.batches import Batch, inputs_for
from rotation_merge.run.functions import check_answers

MOST = 64
"""Outputs of a prediction that are kept; with so many classes at most, all are."""

Answered = list[tuple[Batch, dict[str, Tensor]]]
"""Batches, each with a teacher's answer (see `answer`)."""


def choose(objective: Objective, batch: Mapping[str, Tensor]) -> str:
    """Settle `auto`: the labels' loss if there are labels, otherwise distillation.

    Raises:
        RecipeError: labels are asked for that are not there.
    """
    if objective == "labels" and "labels" not in batch:
        raise RecipeError("objective 'labels' needs data with labels", remedy="use 'distill'")
    return ("labels" if "labels" in batch else "distill") if objective == "auto" else objective


def main_output(outputs: Any) -> Tensor:
    """Logits where the model has them, else its last hidden state."""
    names = ("logits", "start_logits", "logits_per_image", "last_hidden_state", "pooler_output")
    for value in (getattr(outputs, name, None) for name in names):
        if isinstance(value, Tensor):
            return value
    problem = f"{type(outputs).__name__} holds neither logits nor hidden states to learn from"
    raise RecipeError(problem, remedy="load the models under another class")


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


@torch.no_grad()
def write_answers(model: Any, batches: Sequence[Batch], work: Store, name: str, label: str | None = None) -> Answered:
    """A teacher's samples with its answers to them, which stay in their file.

    Args:
        name: of the part of `work` that holds them.
        label: what the model is called.

    Raises:
        RotationMergeError: it answers with NaN, or there is no space for the answers.
    """
    samples: Answered = []
    for batch in batches:
        answers = answer(model(**inputs_for(model, batch)))
        check_answers(model, answers.values(), label)
        samples.append(({name: tensor.clone() for name, tensor in batch.items()}, answers))
    work.put(name, samples)
    samples = work.get(name, mapped=True)
    return samples


def answer(outputs: Any) -> dict[str, Tensor]:
    """The stored part of a model's outputs.

    Returns:
        Of logits: `index` (..., k), int32; `log` (..., k), their log-probabilities; `rest` (...), the log of the mass
        that is left; `size`, how many outputs there are; of hidden states: `hidden`.
    """
    main = main_output(outputs).float()
    if not is_distribution(outputs) or main.shape[-1] == 1:
        return {"hidden": main.clone()}
    logs = main.log_softmax(-1)
    top = logs.topk(min(MOST, logs.shape[-1]), dim=-1)
    remainder = (1.0 - top.values.exp().sum(-1)).clamp_min(0.0)
    remainder = remainder.log() if logs.shape[-1] > MOST else remainder * 0
    return {"index": top.indices.int(), "log": top.values, "rest": remainder, "size": torch.tensor(logs.shape[-1])}


def divergence(outputs: Any, answers: Mapping[str, Tensor]) -> Tensor:
    """KL(teacher || student) in nats, mean over predictions, with all that was not kept as one class.

    Of hidden states: mean squared difference over the teacher's mean square.
    """
    main = main_output(outputs).float()
    hidden = answers.get("hidden")
    shape = hidden.shape if hidden is not None else (*answers["index"].shape[:-1], int(answers["size"]))
    if tuple(main.shape) != tuple(shape):
        problem = f"answers have shape {list(shape)}, the model's own {list(main.shape)}"
        raise CheckpointError(problem, remedy="give teachers of the same class and size")
    if hidden is not None:
        return (main - hidden).square().mean() / hidden.square().mean().clamp_min(1e-12)
    logs = main.log_softmax(-1).gather(-1, answers["index"].long())
    loss = (answers["log"].exp() * (answers["log"] - logs)).sum(-1)
    if answers["index"].shape[-1] < main.shape[-1]:
        remainder = (1.0 - logs.exp().sum(-1)).clamp_min(1e-9)
        loss = loss + answers["rest"].exp() * (answers["rest"].clamp_min(-60.0) - remainder.log())
    return loss.mean()
