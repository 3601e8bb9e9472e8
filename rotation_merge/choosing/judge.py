"""Held-out samples, and what models are worth on them: by labels, or without any by likeness to the parents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rotation_merge.durable import replacing
from rotation_merge.errors import DataError
from rotation_merge.report.curves import FIGURES
from rotation_merge.samples.data import Data
from rotation_merge.samples.evaluate import of_floats
from rotation_merge.samples.functions import Batch

HELD_OUT = 0.5
"""Share of the samples that no merge sees; half of them choose, the other half is reported."""
MOST_KEPT = 1 << 27
"""Numbers that the parents' answers may take in memory."""


@dataclass(frozen=True)
class Figures:
    """What one model is worth.

    Attributes:
        score: what decides, less is better: the mean loss over the sets of samples (nats; squared error; of pairs
            1 - Spearman's correlation), or without labels the mean over the parents of KL(parent || model) on the
            parent's own samples.
        accuracy: where there are labels: share of right answers; of numbers, the correlation.
        each: the score on every set of samples.
    """

    score: float
    accuracy: float | None
    each: list[float]


@dataclass(frozen=True)
class Sets:
    """Samples of every parent (or one set for all), in three parts."""

    training: list[Data]
    deciding: list[Data]
    reported: list[Data]


def split(found: Sequence[Data], seed: int) -> Sets:
    """Every set of samples in its training, deciding and reported part, by whole batches.

    Raises:
        DataError: a set has fewer than four batches.
    """
    parts: list[list[Data]] = [[], [], []]
    for data in found:
        count = len(data.batches)
        if count < 4:
            raise DataError(
                f"{data.examples} samples are too few to hold some out",
                remedy="give more, or smaller batches (--batch-size)",
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
        half = max(1, round(count * HELD_OUT / 2))
        for part, rows in zip(parts, (order[2 * half :], order[:half], order[half : 2 * half]), strict=True):
            batches = [data.batches[i] for i in sorted(rows)]
            part.append(Data(batches, data.task, sum(len(next(iter(b.values()))) for b in batches)))
    return Sets(*parts)


def write_data(data: Data, path: Path) -> Path:
    """Samples as a file that `--data` and recipes read; rows of unequal length are padded and masked."""
    names = list(data.batches[0])
    longest = {n: max(b[n].shape[-1] if b[n].ndim > 1 else 0 for b in data.batches) for n in names}
    arrays = {}
    for name in names:
        fill = -100 if name == "labels" else 0
        rows = [_padded(batch[name], longest[name], fill) for batch in data.batches]
        arrays[name] = torch.cat(rows).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file(arrays, temporary)
    return path


def _padded(tensor: Tensor, length: int, fill: int) -> Tensor:
    if tensor.ndim < 2 or tensor.is_floating_point() or tensor.shape[-1] == length:
        return tensor
    return torch.nn.functional.pad(tensor, (0, length - tensor.shape[-1]), value=fill)


@torch.no_grad()
def answers(model: Any, batch: Batch, task: str) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (n, classes) of what counts, and the labels (n,) where there are any; of numbers (`FLOATS`),
    what the model gives, and what it should.

    Raises:
        DataError: the model has no logits.
    """
    given = {name: value for name, value in batch.items() if name != "labels"}
    logits = getattr(model(**given), "logits", None)
    if not isinstance(logits, Tensor):
        raise DataError(
            f"{type(model).__name__} has no logits to be judged by",
            remedy="name models with their head, or use barrier",
        )
    labels = batch.get("labels") if task != "none" else None
    if task in FLOATS:
        return logits.float(), batch["labels"].float().reshape(len(batch["labels"]), -1)
    if logits.shape[-1] == 1:
        raise DataError(
            f"{type(model).__name__} gives one number, which says nothing without a score to compare it with",
            remedy="give data with labels or scores",
        )
    mask = batch.get("attention_mask")
    if task == "next token":
        logits = logits[:, :-1]
        labels = None if labels is None else labels[:, 1:]
        mask = None if mask is None else mask[:, 1:]
    logs = logits.float().log_softmax(-1).reshape(-1, logits.shape[-1])
    kept = torch.ones(len(logs), dtype=torch.bool)
    if labels is not None:
        kept = labels.reshape(-1) != -100
    elif mask is not None and mask.numel() == len(logs):
        kept = mask.reshape(-1) == 1
    return logs[kept], None if labels is None else labels.reshape(-1)[kept]


FLOATS = ("regression", "labels", "similarity")
"""Tasks whose answers are numbers."""


class Judge:
    """Measures models on samples of the parents.

    Args:
        sets: samples, one set for all parents or one for each.
        labelled: judge by the labels; else by the parents' answers, which `parents` gives.
        parents: each parent's answers on its own samples (see `parents_answers`).
    """

    def __init__(self, sets: Sequence[Data], labelled: bool, parents: Sequence[list[Tensor]] = ()) -> None:
        self.sets, self.labelled, self.parents = sets, labelled, parents

    @property
    def figure(self) -> str:
        """What `Figures.accuracy` is called."""
        return FIGURES.get(self.sets[0].task, "accuracy")

    @property
    def unit(self) -> str:
        """What `Figures.score` is."""
        names = {"regression": "squared error", "similarity": "1 - Spearman"}
        return names.get(self.sets[0].task, "loss (nats)") if self.labelled else "divergence (nats)"

    def measure(self, model: Any) -> Figures:
        """What a model is worth."""
        return self._figures(lambda data, i: (answers(model, batch, data.task)[0] for batch in data.batches))

    def ensemble(self, found: Sequence[Sequence[list[Tensor]]]) -> Figures:
        """What the mean of the parents' probabilities is worth.

        Args:
            found: log-probabilities by parent, set and batch (see `everywhere`).
        """
        count = math.log(len(found))

        def mixed(data: Data, i: int) -> Iterator[Tensor]:
            for batches in zip(*(parent[i] for parent in found), strict=True):
                every = torch.stack(batches)
                yield every.mean(0) if data.task in FLOATS else torch.logsumexp(every, 0) - count

        return self._figures(mixed)

    def everywhere(self, model: Any) -> list[list[Tensor]]:
        """A model's log-probabilities by set and batch."""
        return [[answers(model, batch, data.task)[0] for batch in data.batches] for data in self.sets]

    def _figures(self, given: Any) -> Figures:
        scores, right, count = [], 0.0, 0
        for i, data in enumerate(self.sets):
            total, tokens = 0.0, 0
            if self.labelled and data.task in FLOATS:
                wanted = torch.cat([b["labels"].float().reshape(len(b["labels"]), -1) for b in data.batches])
                found = of_floats(torch.cat(list(given(data, i))), wanted, data.task)
                scores.append(found.loss)
                right, count = right + found.main, count + 1
                continue
            for j, logs in enumerate(given(data, i)):
                if self.labelled:
                    labels = _labels(data, j)
                    total -= float(logs.gather(1, labels[:, None]).sum())
                    right += int((logs.argmax(-1) == labels).sum())
                else:
                    target = self.parents[i][j]
                    total += float((target.exp() * (target - logs)).sum())
                tokens += len(logs)
            count += tokens
            scores.append(total / max(tokens, 1))
        accuracy = right / count if self.labelled and count else None
        return Figures(sum(scores) / len(scores), accuracy, scores)


def _labels(data: Data, j: int) -> Tensor:
    labels = data.batches[j]["labels"]
    labels = labels[:, 1:] if data.task == "next token" else labels
    return labels[labels != -100]


def fits(sets: Sequence[Data], classes: int) -> None:
    """Refuse samples whose answers would not fit into memory.

    Raises:
        DataError: says how many numbers they would be.
    """
    rows = sum(
        b["input_ids"].numel() if "input_ids" in b else len(next(iter(b.values()))) for d in sets for b in d.batches
    )
    if rows * classes > MOST_KEPT:
        raise DataError(
            f"the parents' answers to {rows} tokens of a vocabulary of {classes} do not fit into memory",
            remedy="use fewer samples (--samples)",
        )
