"""Scores of models on held-out samples, by labels or by similarity to the parents, and what they forget of the base."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rotation_merge.errors import DataError
from rotation_merge.run.batches import Batch, inputs_for
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import FIGURES, Scores, of_floats, score
from rotation_merge.workers import listener

MOST_KEPT = 1 << 27
"""Numbers of the parents' answers that are kept, in half precision; of more, positions evenly spread."""
NUMBERS = ("regression", "labels", "similarity", "embedding")
"""Tasks whose answers are numbers."""
UNITS = {"regression": "squared error", "similarity": "1 - Spearman", "embedding": "1 - Spearman"}
LEAST_LOG = -100.0
"""The least log-probability."""
TOLERATED = 0.1
"""Tolerated loss on the base's own text, as a share of the gain over the base."""


@dataclass(frozen=True)
class Figures:
    """The figures of one model.

    Attributes:
        score: decides, less is better: the mean loss over the sets of samples (nats a token; squared error; of pairs
            1 - Spearman's correlation), or without labels the mean over the parents, on the parent's own samples, of
            KL(parent || model); of embeddings, of 1 - Spearman's correlation of the similarities of texts in both.
        accuracy: where there are labels: share of right answers; of numbers, the correlation.
        on_base: the loss on text that the base wrote, nats a token; None where there is none.
        base_texts: the same of every text.
    """

    score: float
    accuracy: float | None
    on_base: float | None = None
    base_texts: list[float] = field(default_factory=list, repr=False)


class Judge:
    """Measures models on samples of the parents.

    Args:
        sets: samples, one set for all parents or one for each.
        labelled: judge by the labels; else by each parent's own answers, with a set for each.
        texts: that the base wrote, a set each.
    """

    def __init__(self, sets: Sequence[Data], labelled: bool, texts: Sequence[Data] = ()) -> None:
        self.sets, self.labelled, self.texts = sets, labelled, texts
        self.task = sets[0].task
        self.figure = FIGURES.get(self.task, "accuracy")
        self.unit = UNITS.get(self.task, "loss (nats)" if labelled else "divergence (nats)")
        self.targets: list[list[Tensor]] = []

    def prepare(self, models: Mapping[str, Any]) -> None:
        """Check that the parents can be judged; without labels, their answers become the targets.

        Raises:
            DataError: a model has no logits.
        """
        if self.labelled:
            for model in models.values():
                _logits(model, self.sets[0].batches[0], self.task)
            return
        half = torch.float32 if self.task in NUMBERS else torch.float16
        pairs = zip(models.values(), self.sets, strict=True)
        self.targets = [[self._answers(model, batch).to(half) for batch in data.batches] for model, data in pairs]

    def measure(self, model: Any) -> Figures:
        """Measure a model on all sets of samples, and on the base's text."""
        scores, tell = list[Scores](), listener()
        for number, data in enumerate(self.sets, 1):
            scores.append(score(model, data) if self.labelled else self._divergence(model, number - 1))
            tell("held-out samples, sets", number, len(self.sets))
        losses = [score(model, text).loss for text in self.texts]
        accuracy = fmean(measured.main for measured in scores) if self.labelled else None
        return Figures(fmean(measured.loss for measured in scores), accuracy, fmean(losses) if losses else None, losses)

    def _divergence(self, model: Any, number: int) -> Scores:
        """How far a model's answers lie from those of the parent whose samples the set holds."""
        targets, answers = self.targets[number], (self._answers(model, batch) for batch in self.sets[number].batches)
        if self.task not in NUMBERS:
            total = sum(_divergence(logs, target) for logs, target in zip(answers, targets, strict=True))
            return Scores(total / max(1, sum(map(len, targets))), {})
        if len(similarities := torch.cat(list(answers))) < 2:
            raise DataError("embeddings are compared within a batch", remedy="take a batch size of 2 or more")
        return of_floats(similarities, torch.cat(targets), self.task)

    def _answers(self, model: Any, batch: Batch) -> Tensor:
        """Log-probabilities (positions, classes) of a batch, on the model's device; of numbers, the numbers.

        Raises:
            DataError: the model has no logits, or gives one number.
        """
        logits = _logits(model, batch, self.task)
        if self.task in NUMBERS:
            return logits.float().cpu()
        if logits.shape[-1] == 1:
            problem = f"{type(model).__name__} gives one number, so its samples need scores"
            raise DataError(problem, remedy="give data with labels or scores")
        positions = sum(b["input_ids"].numel() if "input_ids" in b else 1 for d in self.sets for b in d.batches)
        step = math.ceil(positions * logits.shape[-1] / MOST_KEPT)
        return _counting(logits, batch, self.task)[::step].float().log_softmax(-1).clamp_min(LEAST_LOG)


class Ensemble(nn.Module):
    """A model whose probabilities are the mean of several models'; of numbers, the mean."""

    def __init__(self, models: Iterable[Any], task: str) -> None:
        super().__init__()
        self.members, self.task = nn.ModuleList(models), task
        self.config = self.members[0].config

    def forward(self, **batch: Tensor) -> ModelOutput:
        logits = torch.stack([_logits(model, batch, self.task).float() for model in self.members])
        if self.task in NUMBERS:
            return ModelOutput(logits=logits.mean(0))
        return ModelOutput(logits=logits.log_softmax(-1).clamp_min(LEAST_LOG).logsumexp(0))


@torch.no_grad()
def _logits(model: Any, batch: Batch, task: str) -> Tensor:
    """A model's logits for a batch.

    Raises:
        DataError: it has none.
    """
    outputs = model(**inputs_for(model, batch))
    logits = _cosines(outputs) if task == "embedding" else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        problem = f"{type(model).__name__} has no logits to judge"
        raise DataError(problem, remedy="name models with their head, or use barrier")
    return logits


def _cosines(outputs: Any) -> Tensor:
    """Cosine similarity of the texts of each pair, (pairs, 1), or of all pairs in a batch of single texts."""
    if "logits" in outputs:
        pairs: Tensor = outputs.logits.float()
        return pairs
    unit = nn.functional.normalize(outputs.text_embeds.float(), dim=-1)
    rows, columns = torch.triu_indices(len(unit), len(unit), 1)
    return (unit @ unit.T)[rows, columns][:, None]


def _counting(logits: Tensor, batch: Batch, task: str) -> Tensor:
    """Logits (positions, classes) of the positions that count: with a label or, without labels, without padding."""
    mask = batch["labels"] != -100 if "labels" in batch and task != "none" else batch.get("attention_mask")
    if task == "next token":
        logits, mask = logits[:, :-1], None if mask is None else mask[:, 1:]
    if mask is None or mask.shape != logits.shape[:-1]:
        return logits.flatten(0, -2)
    return logits[mask.to(logits.device) == 1]


def _divergence(logs: Tensor, target: Tensor) -> float:
    """Sum of KL(target || model) over positions, from the logarithms of both."""
    target = target.float().log_softmax(-1)
    return float((target.exp() * (target - logs)).sum(-1).double().sum())


def forgetting(figures: Figures, plain: Figures | None, base: Figures) -> tuple[float, float]:
    """Nats that a merge loses more on the base's text than the plain average does, and how many it may.

    Allowed are `TOLERATED` of the merge's gain over the base and the standard error of the difference: the texts are
    few. The base stands for the plain average where there is none, or where that loses less than the base.
    """
    reference = plain if plain is not None and (plain.on_base or 0.0) > (base.on_base or 0.0) else base
    more = [x - y for x, y in zip(figures.base_texts, reference.base_texts, strict=False)]
    error = stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return (figures.on_base or 0.0) - (reference.on_base or 0.0), TOLERATED * (base.score - figures.score) + error
