"""Figures of merit of predictions: accuracy, F1, correlations."""

from __future__ import annotations

import torch
from torch import Tensor

CLASSES = ("accuracy", "macro_f1", "micro_f1", "matthews")
NUMBERS = ("pearson", "spearman")


def of_classes(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, macro and micro F1, and Matthews' correlation, of one class for each example.

    Args:
        predicted, labels: int64, (n,).

    Macro F1 is the mean over the classes that are predicted or true; micro F1 with one class an example is the
    accuracy. Matthews' correlation is that of Gorodkin 2004 for any number of classes; 0 where it is not defined.
    """
    size = int(torch.maximum(predicted.max(), labels.max())) + 1
    table = torch.bincount(labels * size + predicted, minlength=size * size).view(size, size).double()
    hits, true, guessed = table.diagonal(), table.sum(1), table.sum(0)
    count = table.sum()
    f1 = 2 * hits / (true + guessed).clamp(min=1)
    covariance = hits.sum() * count - (true * guessed).sum()
    spread = ((count**2 - guessed.square().sum()) * (count**2 - true.square().sum())).sqrt()
    return {
        "accuracy": float(hits.sum() / count),
        "macro_f1": float(f1[true + guessed > 0].mean()),
        "micro_f1": float(hits.sum() / count),
        "matthews": float(covariance / spread) if float(spread) > 0 else 0.0,
    }


def of_labels(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy, macro and micro F1 where an example has any number of labels; bool, (n, labels)."""
    hits = (predicted & labels).sum(0).double()
    total = (predicted.sum(0) + labels.sum(0)).double()
    labelled = total > 0
    return {
        "accuracy": float((predicted == labels).double().mean()),
        "macro_f1": float((2 * hits[labelled] / total[labelled]).mean()) if bool(labelled.any()) else 0.0,
        "micro_f1": float(2 * hits.sum() / total.sum()) if bool(labelled.any()) else 0.0,
    }


def of_numbers(predicted: Tensor, labels: Tensor) -> dict[str, float]:
    """Pearson's correlation, and Spearman's: that of the ranks, which ties share; (n,) each. 0 of constants."""
    return {"pearson": _correlation(predicted, labels), "spearman": _correlation(_ranks(predicted), _ranks(labels))}


def _correlation(x: Tensor, y: Tensor) -> float:
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    spread = float(x.norm() * y.norm())
    return float(x @ y) / spread if spread > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    _, place, counts = torch.unique(x, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts.double() - 1) / 2)[place]
