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
from rotation_merge.model.view import stored_dtype
from rotation_merge.run.batches import Batch, by_rows, inputs_for
from rotation_merge.run.functions import check_answers
from rotation_merge.workers import Progress

FISHER = "Fisher"
"""Name of this part of a measurement, shown as progress."""

MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""


@dataclass(frozen=True)
class LabelScores:
    """Scalars whose squared gradients, of each example by itself, add up to the example's Fisher matrix.

    Attributes:
        task: of the labels (see `Data`).
        from_data: whether they are those that came with the samples; else sampled (or exact, where that can be).
        seed: of sampled labels.
    """

    task: str
    from_data: bool = False
    seed: int = 0

    def of(self, model: Any, outputs: Mapping[str, Any], batch: Batch, number: int) -> Iterator[Tensor]:
        """The scores of a batch.

        Args:
            outputs: of the model for the batch, inside the graph.
            number: of the batch, which has its own drawn labels.

        Raises:
            DataError: the model has no head that gives probabilities, or the samples have no labels for it.
        """
        heads = [x for name, x in outputs.items() if name.endswith("logits") and isinstance(x, Tensor)]
        if not heads:
            problem = f"{type(model).__name__} has no head that gives probabilities"
            raise DataError(problem, remedy="measure the kind 'gram', or a model with its head")
        kind, draw = getattr(model.config, "problem_type", None), torch.Generator()
        draw.manual_seed(self.seed * 1_000_003 + number)
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
            logits, labels = logits[:, :-1], None if labels is None else labels[:, 1:]
        if labels is None or labels.shape != logits.shape[:-1]:
            if self.from_data:
                raise DataError("the samples have no labels for this head", remedy="leave out 'labels: data'")
            labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
        logs, chosen = logits[labels != -100].log_softmax(-1), labels[labels != -100]
        if not self.from_data:
            chosen = torch.multinomial(logs.detach().exp().cpu(), 1, generator=draw)[:, 0]
        return logs.gather(-1, chosen[:, None].to(logs.device)).sum()


def _weighted(logits: Tensor, several: bool) -> Tensor:
    """Log-probabilities times the roots of their probabilities, (n, labels), so that a sum over labels is expected.

    Args:
        several: whether an example may have several labels.
    """
    if several:
        return (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach() * logits
    logs = logits.log_softmax(-1)
    return (logs.detach() / 2).exp() * logs


def fisher_diagonals(
    model: nn.Module, architecture: Architecture, batches: Sequence[Batch], scores: LabelScores, progress: Progress
) -> dict[str, Tensor]:
    """Fisher diagonals of a model's parameters, `TENSOR.fisher` by its own names.

    Args:
        model: in evaluation mode.
        architecture: under the names of its state dict.
        batches: without padding.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: parameters[name].requires_grad_() for name in architecture.named() if name in parameters}
    examples, sums = [example for batch in batches for example in by_rows(batch)], dict[str, Tensor]()
    for number, example in enumerate(examples):
        progress(FISHER, number, len(examples))
        for name, squares in _squared_gradients(model, weights, example, scores, number):
            sums[name] = sums[name].add_(squares) if name in sums else squares
    progress(FISHER, len(examples), len(examples))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return {f"{name}.fisher": (total / len(examples)).to(dtype) for name, total in sums.items()}


def _squared_gradients(
    model: nn.Module, weights: Mapping[str, Tensor], example: Batch, scores: LabelScores, number: int
) -> Iterator[tuple[str, Tensor]]:
    """The squared gradients of one example's scores, float64, by the names of the weights that they reach."""
    dtype = next(model.parameters()).dtype
    inputs = {name: x.to(stored_dtype(x, dtype)) for name, x in inputs_for(model, example).items()}
    with torch.enable_grad():
        result = model(**inputs)
        check_answers(model, (x for x in result.values() if isinstance(x, Tensor)))
        label_scores = list(scores.of(model, result, example, number))
    for score in label_scores:
        again = score is not label_scores[-1]
        gradients = torch.autograd.grad(score, list(weights.values()), retain_graph=again, allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                yield name, gradient.double().square()
