r"""Log-probabilities whose squared gradients average to the Fisher matrix.

F = E_x E_{y ~ p(y|x)} (d log p(y|x))^2. Over the labels of a classifier the inner expectation is taken exactly: the
sum over labels c of p_c (d log p_c)^2 is the sum of squared gradients of sqrt(p_c) log p_c with the root held constant
(Matena and Raffel 2022, section 2.2). Over the vocabulary of a language model one label is drawn at each position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError

MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""

KINDS = ("sampled", "data")


def label_kind(logits: Tensor, config: Any, label_source: str) -> str:
    """The source of labels: exact, sampled, data, or gaussian for a regression."""
    if label_source == "data":
        return "data"
    if logits.ndim != 2:
        return "sampled"
    if getattr(config, "problem_type", None) == "regression" or logits.shape[-1] == 1:
        return "gaussian"
    return "exact" if logits.shape[-1] <= MOST_LABELS else "sampled"


def answers(model: Any, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The logits of a model's heads.

    Raises:
        DataError: it has none.
    """
    logits = {k: v for k, v in outputs.items() if k.endswith("logits") and isinstance(v, Tensor)}
    if not logits:
        raise DataError(
            f"{type(model).__name__} has no head that gives probabilities",
            remedy="measure --kinds gram, or a model with its head",
        )
    return logits


def scores(
    model: Any,
    outputs: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    task: str,
    label_source: str,
    draw: torch.Generator,
) -> Iterator[Tensor]:
    """Scalars whose squared gradients, of each example by itself, add up to the example's Fisher matrix.

    Args:
        outputs: of the model for the batch, inside the graph.
        task: what the labels are for (see `samples`).
        label_source: sampled (or exact, where that can be), or data: the labels that came with the samples.
        draw: where drawn labels come from.
    """
    for logits in answers(model, outputs).values():
        logits = logits.float() if logits.dtype != torch.float64 else logits
        kind = label_kind(logits, model.config, label_source)
        multiple = getattr(model.config, "problem_type", None) == "multi_label_classification"
        if kind == "data" and task in ("regression", "labels"):
            yield _of_numbers(logits, batch, task)
        elif kind == "gaussian":
            yield from (logits[:, c].sum() for c in range(logits.shape[1]))
        elif kind == "exact" and multiple:
            spread = (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach()
            yield from ((spread * logits)[:, c].sum() for c in range(logits.shape[1]))
        elif kind == "exact":
            logs = logits.log_softmax(-1)
            weighted = (logs.detach() / 2).exp() * logs
            yield from (weighted[:, c].sum() for c in range(logits.shape[1]))
        else:
            yield _of_labels(logits, batch, task, kind, draw)


def _of_numbers(logits: Tensor, batch: Mapping[str, Tensor], task: str) -> Tensor:
    """The log-probability of the data's numbers (under a normal distribution of variance one), or of all labels."""
    labels = batch["labels"].to(logits).reshape(logits.shape)
    if task == "regression":
        return -(logits - labels).square().sum() / 2
    return -torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _of_labels(logits: Tensor, batch: Mapping[str, Tensor], task: str, kind: str, draw: torch.Generator) -> Tensor:
    """The log-probability of one label for each example or position."""
    labels = batch.get("labels")
    if task == "next token":
        logits = logits[:, :-1]
        labels = None if labels is None else labels[:, 1:]
    if labels is not None and labels.shape != logits.shape[:-1]:
        labels = None
    if kind == "data" and labels is None:
        raise DataError("the samples have no labels for this head", remedy="leave out '--labels data'")
    labelled = torch.ones(logits.shape[:-1], dtype=torch.bool) if labels is None else labels != -100
    logs = logits[labelled].log_softmax(-1)
    if kind == "data" and labels is not None:
        chosen = labels[labelled]
    else:
        chosen = torch.multinomial(logs.detach().exp().cpu(), 1, generator=draw)[:, 0].to(logs.device)
    return logs.gather(-1, chosen[:, None]).sum()
