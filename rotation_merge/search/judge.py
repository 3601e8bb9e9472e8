"""Scores of models on held-out samples, by labels or by similarity to the parents, and what they forget of the base."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rotation_merge.errors import DataError
from rotation_merge.run.batches import Batch, inputs_for
from rotation_merge.run.curves import FIGURES
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import of_floats, score
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
        each: the score on every set of samples.
        on_base: the loss on text that the base wrote, nats a token; None where there is none.
        base_texts: the same of every text.
    """

    score: float
    accuracy: float | None
    each: list[float]
    on_base: float | None = None
    base_texts: list[float] = field(default_factory=list, repr=False)


class Judge:
    """Measures models on samples of the parents.

    Args:
        sets: samples, one set for all parents or one for each.
        labelled: judge by the labels; else by each parent's own answers, with a set for each.
    """

    def __init__(self, sets: Sequence[Data], labelled: bool) -> None:
        self.sets, self.labelled = sets, labelled
        self.task = sets[0].task
        self.targets: list[list[Tensor]] = []

    @property
    def figure(self) -> str:
        """Name of `Figures.accuracy`."""
        return FIGURES.get(self.task, "accuracy")

    @property
    def unit(self) -> str:
        """Unit of `Figures.score`."""
        return UNITS.get(self.task, "loss (nats)" if self.labelled else "divergence (nats)")

    def prepare(self, models: Mapping[str, Any]) -> None:
        """Check that the parents can be judged; without labels, their answers become the targets.

        Raises:
            DataError: a model has no logits.
        """
        if self.labelled:
            for model in models.values():
                _logits(model, self.sets[0].batches[0], self.task)
            return
        pairs = zip(models.values(), self.sets, strict=True)
        self.targets = [[self._kept(self._answers(model, batch)) for batch in data.batches] for model, data in pairs]

    def parents(self, models: Mapping[str, Any]) -> tuple[dict[str, Figures], Figures]:
        """Figures of each parent alone, and of the mean of their probabilities."""
        self.prepare(models)
        figures = {name: self.measure(model) for name, model in models.items()}
        return figures, self.measure(_Ensemble(models.values(), self.task))

    def measure(self, model: Any) -> Figures:
        """Measure a model on all sets of samples."""
        each, shares, tell = list[float](), list[float](), listener()
        for number, data in enumerate(self.sets):
            tell("held-out samples, sets", number, len(self.sets))
            if self.labelled:
                scores = score(model, data)
                each.append(scores.loss)
                shares.append(scores.main)
            else:
                each.append(self._divergence(model, number))
        tell("held-out samples, sets", len(self.sets), len(self.sets))
        return Figures(sum(each) / len(each), sum(shares) / len(shares) if shares else None, each)

    def _divergence(self, model: Any, number: int) -> float:
        """How far a model's answers lie from those of the parent whose samples the set holds."""
        targets, batches = self.targets[number], self.sets[number].batches
        if self.task in NUMBERS:
            answers = torch.cat([self._answers(model, batch) for batch in batches])
            if len(answers) < 2:
                raise DataError("embeddings are compared within a batch", remedy="take a batch size of 2 or more")
            return of_floats(answers, torch.cat(targets), self.task).loss
        pairs = zip(batches, targets, strict=True)
        total = sum(_divergence(self._answers(model, batch), target) for batch, target in pairs)
        return total / max(1, sum(map(len, targets)))

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

    def _kept(self, answers: Tensor) -> Tensor:
        return answers if self.task in NUMBERS else answers.half()


class _Ensemble(nn.Module):
    """A model whose probabilities are the mean of several models'; of numbers, the mean."""

    def __init__(self, models: Iterable[Any], task: str) -> None:
        super().__init__()
        self.members, self.task = nn.ModuleList(models), task
        self.config = self.members[0].config

    def forward(self, **batch: Tensor) -> ModelOutput:
        total: Tensor | None = None
        for model in self.members:
            logits = _logits(model, batch, self.task).float()
            if self.task in NUMBERS:
                logits = logits / len(self.members)
                total = logits if total is None else total + logits
            else:
                logs = logits.log_softmax(-1).clamp_min(LEAST_LOG)
                total = logs if total is None else torch.logaddexp(total, logs)
        return ModelOutput(logits=total)


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


@dataclass(frozen=True)
class Forgetting:
    """The base's text, and the base's figures.

    Attributes:
        texts: a set of samples each.
        base: the base on the samples that decide, `on_base` on its own text.
    """

    texts: Sequence[Data]
    base: Figures

    @classmethod
    def of(cls, base: Any, figures: Figures, ids: Any) -> Forgetting:
        """From the base, its figures on the samples that decide, and the texts (texts, tokens) that it wrote."""
        texts = [Data([{"input_ids": row, "labels": row}], "next token", 1) for row in ids.split(1)]
        return cls(texts, cls(texts, figures).measured(base, figures))

    def measured(self, model: Any, figures: Figures) -> Figures:
        """Figures of a model, with its loss on the base's text."""
        losses = [score(model, text).loss for text in self.texts]
        return replace(figures, on_base=statistics.fmean(losses), base_texts=losses)

    def excess(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does, beyond what is `allowed`; at least 0."""
        if figures.on_base is None:
            return 0.0
        return max(self._more(figures, plain) - self.allowed(figures, plain), 0.0)

    def allowed(self, figures: Figures, plain: Figures | None) -> float:
        """`TOLERATED` of a merge's gain, plus the standard error of what it loses more: the texts are few."""
        texts = zip(figures.base_texts, self._reference(plain).base_texts, strict=False)
        return TOLERATED * (self.base.score - figures.score) + _standard_error([x - y for x, y in texts])

    def _more(self, figures: Figures, plain: Figures | None) -> float:
        """Nats that a merge loses more than the plain average does."""
        return (figures.on_base or 0.0) - (self._reference(plain).on_base or 0.0)

    def _reference(self, plain: Figures | None) -> Figures:
        """The plain average; the base where there is none, or where it loses less than the base."""
        return plain if plain is not None and (plain.on_base or 0.0) > (self.base.on_base or 0.0) else self.base

    def why(self, name: str, figures: Figures, plain: Figures | None) -> str:
        """The reason for rejecting a merge with a better score."""
        return (
            f"Not chosen: '{name}' ({figures.score:.4f} on the selection samples) forgets too much. On the base's own "
            f"text it loses {self._more(figures, plain):.4f} nats more than the plain average; "
            f"{self.allowed(figures, plain):.4f} is allowed: a tenth of its gain over the base, and the standard error."
        )


def _standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
