r"""Fisher diagonals of a model: squared gradients of its outputs.

The Fisher matrix is the mean of squared gradients of log-probabilities: F = E_x E_{y ~ p(y|x)} (d log p(y|x))^2. Over
the labels of a classifier the inner expectation is taken exactly: the sum over labels c of p_c (d log p_c)^2 is the sum
of squared gradients of sqrt(p_c) log p_c with the root held constant (Matena and Raffel 2022, section 2.2). Over the
vocabulary of a language model one label is drawn at each position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import DataError
from rotation_merge.run.batches import Batch, by_rows, inputs_for
from rotation_merge.run.functions import check_answers
from rotation_merge.workers import Progress

FISHER = "Fisher"
"""Name of this part of a measurement, shown as progress."""

MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""


def fisher_diagonals(
    model: nn.Module,
    architecture: Architecture,
    batches: Sequence[Batch],
    scores: LabelScores,
    seed: int,
    progress: Progress,
) -> dict[str, Tensor]:
    """Fisher diagonals of a model's parameters, `TENSOR.fisher` by its own names.

    Args:
        model: in evaluation mode.
        architecture: under the names of its state dict.
        batches: without padding.
        seed: of sampled labels.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: parameters[name].requires_grad_() for name in architecture.named() if name in parameters}
    sums: dict[str, Tensor] = {}
    examples = [example for batch in batches for example in by_rows(batch)]
    for number, example in enumerate(examples):
        progress(FISHER, number, len(examples))
        draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
        _add_squares(sums, model, weights, example, scores, draw)
    progress(FISHER, len(examples), len(examples))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return {f"{name}.fisher": (total / len(examples)).to(dtype) for name, total in sums.items()}


def _add_squares(
    sums: dict[str, Tensor],
    model: nn.Module,
    weights: Mapping[str, Tensor],
    example: Batch,
    scores: LabelScores,
    draw: torch.Generator,
) -> None:
    """Add the squared gradients of one example's scores to the sums of the weights that they reach."""
    dtype = next(model.parameters()).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs_for(model, example).items()}
    with torch.enable_grad():
        result = model(**inputs)
        check_answers(model, (x for x in result.values() if isinstance(x, Tensor)))
        label_scores = list(scores.of(model, result, example, draw))
    for number, score in enumerate(label_scores, 1):
        again = number < len(label_scores)
        gradients = torch.autograd.grad(score, list(weights.values()), retain_graph=again, allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                squares = gradient.double().square()
                sums[name] = sums[name].add_(squares) if name in sums else squares


@dataclass(frozen=True)
class LabelScores:
    """Scalars whose squared gradients, of each example by itself, add up to the example's Fisher matrix.

    Attributes:
        task: of the labels (see `Data`).
        from_data: whether they are those that came with the samples; else sampled (or exact, where that can be).
    """

    task: str
    from_data: bool = False

    def of(self, model: Any, outputs: Mapping[str, Any], batch: Batch, draw: torch.Generator) -> Iterator[Tensor]:
        """The scores of a batch.

        Args:
            outputs: of the model for the batch, inside the graph.
            draw: where drawn labels come from.

        Raises:
            DataError: the model has no head that gives probabilities, or the samples have no labels for it.
        """
        heads = [x for name, x in outputs.items() if name.endswith("logits") and isinstance(x, Tensor)]
        if not heads:
            problem = f"{type(model).__name__} has no head that gives probabilities"
            raise DataError(problem, remedy="measure the kind 'gram', or a model with its head")
        kind = getattr(model.config, "problem_type", None)
        for logits in (x if x.dtype == torch.float64 else x.float() for x in heads):
            regression = kind == "regression" or logits.shape[-1] == 1
            if self.from_data and self.task in ("regression", "labels"):
                yield self._of_numbers(logits, batch)
            elif self.from_data or logits.ndim != 2 or (logits.shape[-1] > MOST_LABELS and not regression):
                yield self._of_labels(logits, batch, draw)
            else:
                weighted = logits if regression else _weighted(logits, kind == "multi_label_classification")
                yield from (weighted[:, label].sum() for label in range(logits.shape[1]))

    def _of_numbers(self, logits: Tensor, batch: Batch) -> Tensor:
        """The log-probability of the data's numbers (under a normal distribution of variance one), or of all labels."""
        labels = batch["labels"].to(logits).reshape(logits.shape)
        if self.task == "regression":
            return -(logits - labels).square().sum() / 2
        return -torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")

    def _of_labels(self, logits: Tensor, batch: Batch, draw: torch.Generator) -> Tensor:
        """The log-probability of one label for each example or position."""
        labels = batch.get("labels")
        if self.task == "next token":
            logits = logits[:, :-1]
            labels = None if labels is None else labels[:, 1:]
        if labels is not None and labels.shape != logits.shape[:-1]:
            labels = None
        if self.from_data and labels is None:
            raise DataError("the samples have no labels for this head", remedy="leave out 'labels: data'")
        labelled = torch.ones(logits.shape[:-1], dtype=torch.bool) if labels is None else labels != -100
        logs = logits[labelled].log_softmax(-1)
        if self.from_data and labels is not None:
            chosen = labels[labelled]
        else:
            chosen = torch.multinomial(logs.detach().exp().cpu(), 1, generator=draw)[:, 0].to(logs.device)
        return logs.gather(-1, chosen[:, None]).sum()


def _weighted(logits: Tensor, several: bool) -> Tensor:
    """Log-probabilities times the roots of their probabilities, (n, labels), so that a sum over labels is expected.

    Args:
        several: whether an example may have several labels.
    """
    if several:
        return (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach() * logits
    logs = logits.log_softmax(-1)
    return (logs.detach() / 2).exp() * logs
