"""Loss and accuracy of a model, and of the models on the straight path between two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.report.curves import Curve
from rotation_merge.samples.data import Data
from rotation_merge.samples.functions import Batch


@torch.no_grad()
def evaluate(model: Any, data: Data) -> tuple[float, float]:
    """Mean loss in nats (for each token or example) and accuracy.

    Raises:
        DataError: the data have no labels for this model.
    """
    if data.task == "none":
        raise DataError(
            f"{type(model).__name__} has no loss on data without labels", remedy="give labels, or another model class"
        )
    total = right = count = 0.0
    for batch in data.batches:
        logits, labels = _answers(model, batch, data.task)
        kept = labels != -100
        total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        right += float((logits.argmax(-1) == labels)[kept].sum())
        count += float(kept.sum())
    if count == 0:
        raise DataError("no example has a label", remedy="give more data")
    return total / count, right / count


def _answers(model: Any, batch: Batch, task: str) -> tuple[Tensor, Tensor]:
    """Logits (n, classes) and the labels (n,) they should hit."""
    logits = model(**{name: tensor for name, tensor in batch.items() if name != "labels"}).logits
    labels = batch["labels"]
    if task == "next token":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if logits.shape[:-1] != labels.shape:
        raise DataError(
            f"labels have shape {list(labels.shape)}, the model's answers {list(logits.shape)}",
            remedy="give one label for each example (or token)",
        )
    if int(labels.max()) >= logits.shape[-1]:
        raise DataError(f"label {int(labels.max())} is beyond the model's {logits.shape[-1]} classes", remedy="mend it")
    return logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)


def path(
    a: Any, b: Any, data: Data, points: int, name: str, tick: Callable[[str, int, int], None] = lambda *_: None
) -> Curve:
    """Loss and accuracy at equally spaced models from a to b: weights (1 - t) a + t b."""
    between = copy.deepcopy(a)
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    losses, accuracies = [], []
    ts = [i / (points - 1) for i in range(points)]
    for done, t in enumerate(ts):
        tick(f"path, {name}", done, points)
        with torch.no_grad():
            for key, parameter in between.named_parameters():
                parameter.copy_(torch.lerp(first[key], second[key], t))
        loss, accuracy = evaluate(between, data)
        losses.append(loss)
        accuracies.append(accuracy)
    return Curve(name, ts, losses, accuracies)
