"""Scores of models on held-out samples: by labels, or by similarity to the parents."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError
from rotation_merge.run.curves import FIGURES
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import of_floats
from rotation_merge.run.functions import Batch, inputs_for
from rotation_merge.workers import listener

MOST_KEPT = 1 << 27
"""Numbers of the parents' answers that are kept, in half precision; of more, positions evenly spread."""
AT_ONCE = 256
"""Positions whose probabilities are computed together."""
FLOATS = ("regression", "labels", "similarity", "embedding")
"""Tasks whose answers are numbers."""
CERTAIN = 3.5
"""A model that is worse than the best one by so many standard errors of the mean difference cannot win: one in two
hundred would be as bad by chance on eight examples, fewer on more."""
LEAST_EXAMPLES = 8
"""Number of samples before a model may be stopped early."""
LEAST_LOG = -100.0
"""The least log-probability."""


@dataclass(frozen=True)
class Figures:
    """The figures of one model.

    Attributes:
        score: decides, less is better: the mean loss over the sets of samples (nats a token; squared error; of pairs
            1 - Spearman's correlation), or without labels the mean over the parents, on the parent's own samples, of
            KL(parent || model); of embeddings, of 1 - Spearman's correlation of the similarities of texts in both.
        accuracy: where there are labels: share of right answers; of numbers, the correlation.
        each: the score on every set of samples.
        examples: by set, the loss of every example.
        unfinished: whether the model was stopped after its first samples: then the scores are the best model's plus
            the mean difference on these samples, and there is no accuracy.
        on_base: the loss on text that the base wrote, nats a token; None where there is none.
        base_texts: the same of every text.
    """

    score: float
    accuracy: float | None
    each: list[float]
    examples: list[list[float]] = field(default_factory=list, repr=False)
    unfinished: bool = False
    on_base: float | None = None
    base_texts: list[float] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Predictions:
    """A model's answers to one batch.

    Attributes:
        logits: by position (positions, classes), on the model's device; of tasks of numbers, the numbers, on the CPU.
        positions: of those that count.
        examples: for each of these, whose it is.
    """

    logits: Tensor
    positions: Tensor
    examples: Tensor

    def logs(self) -> Iterator[Tensor]:
        """Log-probabilities in chunks of (positions, classes)."""
        for chunk in self.positions.to(self.logits.device).split(AT_ONCE):
            yield self.logits.index_select(0, chunk).float().log_softmax(-1).clamp_min(LEAST_LOG)


@torch.no_grad()
def answers(model: Any, batch: Batch, task: str) -> Predictions:
    """Compute a model's outputs for a batch.

    Raises:
        DataError: the model has no logits.
    """
    outputs = model(**inputs_for(model, batch))
    logits = _cosines(outputs) if task == "embedding" else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        problem = f"{type(model).__name__} has no logits to judge"
        raise DataError(problem, remedy="name models with their head, or use barrier")
    if task in FLOATS:
        rows = torch.arange(len(logits))
        return Predictions(logits.float().cpu(), rows, rows)
    if logits.shape[-1] == 1:
        problem = f"{type(model).__name__} gives one number, so its samples need scores"
        raise DataError(problem, remedy="give data with labels or scores")
    counting = _counting(batch, task, logits)
    if task == "next token":  # positions of the whole tensor, since a part of it would be a copy
        counting = torch.nn.functional.pad(counting, (0, logits.shape[1] - counting.shape[1]))
    flat = logits.reshape(-1, logits.shape[-1])
    positions = counting.reshape(-1).nonzero()[:, 0]
    return Predictions(flat, positions, positions // max(1, counting[0].numel()))


def _counting(batch: Batch, task: str, logits: Tensor) -> Tensor:
    """Mask of the positions that count: those with a label or, without labels, those without padding."""
    labels = labels_of(batch, task)
    if labels is not None:
        return labels != -100
    shape = logits.shape[:-1] if task != "next token" else (logits.shape[0], logits.shape[1] - 1)
    mask = batch.get("attention_mask")
    if mask is None or logits.ndim < 3:
        return torch.ones(shape, dtype=torch.bool)
    mask = mask[:, 1:] if task == "next token" else mask
    return mask == 1 if mask.shape == shape else torch.ones(shape, dtype=torch.bool)


def labels_of(batch: Batch, task: str) -> Tensor | None:
    """Labels shifted to the positions that predict them; None if there are none."""
    labels = batch.get("labels") if task != "none" else None
    return labels[:, 1:] if labels is not None and task == "next token" else labels


def _cosines(outputs: Any) -> Tensor:
    """Cosine similarity of the texts of each pair, (pairs, 1), or of all pairs in a batch of single texts."""
    if "logits" in outputs:
        pairs: Tensor = outputs.logits.float()
        return pairs
    unit = torch.nn.functional.normalize(outputs.text_embeds.float(), dim=-1)
    rows, columns = torch.triu_indices(len(unit), len(unit), 1)
    return (unit @ unit.T)[rows, columns][:, None]


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
        names = {"regression": "squared error", "similarity": "1 - Spearman", "embedding": "1 - Spearman"}
        return names.get(self.task, "loss (nats)" if self.labelled else "divergence (nats)")

    def parents(self, models: Mapping[str, Any]) -> tuple[dict[str, Figures], Figures]:
        """Figures of each parent alone, and of the mean of their probabilities.

        Without labels, the parents' answers become the targets.
        """
        tallies, together = {name: _Tally(self) for name in models}, _Tally(self)
        self.targets = [[] for _ in self.sets]
        for i, j in self._order():
            parent_answers = [self._answers(model, i, j) for model in models.values()]
            if not self.labelled:
                self.targets[i].append(self._kept(parent_answers[i]))
            for tally, predictions in zip(tallies.values(), parent_answers, strict=True):
                tally.add(i, j, predictions)
            together.add(i, j, _Ensemble(parent_answers))
        return {name: tally.figures() for name, tally in tallies.items()}, together.figures()

    def measure(self, model: Any, best: Figures | None = None) -> Figures:
        """Measure a model.

        Args:
            best: of the best model so far: a model that is surely worse is stopped early.
        """
        tally = _Tally(self)
        round_number = 0
        for i, j in self._order():
            if j > round_number and best is not None and cannot_win(tally.examples, best.examples):
                return tally.estimate(best)
            round_number = j
            tally.add(i, j, self._answers(model, i, j))
        return tally.figures()

    def _order(self) -> Iterator[tuple[int, int]]:
        """All batches as (set, number), the first ones of all sets, then the second ones; reports progress."""
        tell = listener()
        places = [(i, j) for i, data in enumerate(self.sets) for j in range(len(data.batches))]
        for done, place in enumerate(sorted(places, key=lambda place: (place[1], place[0]))):
            tell("held-out batches", done, len(places))
            yield place
        tell("held-out batches", len(places), len(places))

    def _answers(self, model: Any, i: int, j: int) -> Predictions:
        predictions = answers(model, self.sets[i].batches[j], self.task)
        if self.labelled or self.task in FLOATS:
            return predictions
        positions = sum(b["input_ids"].numel() if "input_ids" in b else 1 for d in self.sets for b in d.batches)
        step = math.ceil(positions * predictions.logits.shape[-1] / MOST_KEPT)
        return Predictions(predictions.logits, predictions.positions[::step], predictions.examples[::step])

    def _kept(self, predictions: Predictions) -> Tensor:
        if self.task in FLOATS:
            return predictions.logits
        return torch.cat([logs.half() for logs in predictions.logs()])

    def labels(self, i: int, j: int) -> Tensor:
        """The labels that count."""
        labels = labels_of(self.sets[i].batches[j], self.task)
        assert labels is not None
        return labels[labels != -100]

    def numbers(self, i: int) -> Tensor:
        """Targets of a set of samples: labels, or the parent's own outputs if there are none."""
        labels = [b["labels"].float().reshape(len(b["labels"]), -1) for b in self.sets[i].batches if self.labelled]
        targets = torch.cat(labels if self.labelled else self.targets[i])
        if len(targets) < 2:
            raise DataError("embeddings are compared within a batch", remedy="take a batch size of 2 or more")
        return targets


@dataclass(frozen=True)
class _Ensemble:
    """The mean of several models' probabilities; of numbers, the mean."""

    models: Sequence[Predictions]

    @property
    def logits(self) -> Tensor:
        return torch.stack([predictions.logits for predictions in self.models]).mean(0)

    @property
    def examples(self) -> Tensor:
        return self.models[0].examples

    def logs(self) -> Iterator[Tensor]:
        for member_logs in zip(*(predictions.logs() for predictions in self.models), strict=True):
            yield torch.logsumexp(torch.stack(member_logs), 0) - math.log(len(member_logs))


class _Tally:
    """Sums the scores of one model.

    Attributes:
        examples: see `Figures`.
        losses, sizes: by set, sums of losses and of their divisors.
    """

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        count = len(judge.sets)
        self.examples: list[list[float]] = [[] for _ in range(count)]
        self.losses, self.sizes = [0.0] * count, [0.0] * count
        self.right = self.positions = 0.0
        self.values: list[list[Tensor]] = [[] for _ in range(count)]

    def add(self, i: int, j: int, predictions: Predictions | _Ensemble) -> None:
        """Add the predictions for batch j of set i."""
        if self.judge.task in FLOATS:
            self.values[i].append(predictions.logits)
            return
        losses = self._losses(i, j, predictions)
        count = int(predictions.examples.max()) + 1 if len(predictions.examples) else 0
        zeros = torch.zeros(count, dtype=torch.float64)
        sums = zeros.index_add(0, predictions.examples, losses)
        sizes = zeros.index_add(0, predictions.examples, torch.ones_like(losses))
        self.examples[i] += (sums / sizes.clamp_min(1)).tolist()
        self.losses[i] += float(sums.sum())
        self.sizes[i] += float(sizes.sum())

    def _losses(self, i: int, j: int, predictions: Predictions | _Ensemble) -> Tensor:
        """The loss at every position, float64."""
        losses, first = [torch.zeros(0, dtype=torch.float64)], 0
        labels = self.judge.labels(i, j) if self.judge.labelled else None
        for logs in predictions.logs():
            part = slice(first, first + len(logs))
            first = part.stop
            if labels is not None:
                answer = labels[part].to(logs.device)
                losses.append(-logs.gather(1, answer[:, None])[:, 0].double().cpu())
                self.right += float((logs.argmax(-1) == answer).sum())
            else:
                target_logs = self.judge.targets[i][j][part].float().log_softmax(-1)
                losses.append((target_logs.exp() * (target_logs - logs)).sum(-1).double().cpu())
        self.positions += first
        return torch.cat(losses)

    def estimate(self, best: Figures) -> Figures:
        """The figures of a model that is stopped early; see `Figures.unfinished`.

        Its first samples may be harder or easier than the rest: their losses alone would not compare with others.
        """
        shifts = []
        for losses, best_losses in zip(self.examples, best.examples, strict=True):
            shifts.append(sum(x - y for x, y in zip(losses, best_losses, strict=False)) / max(1, len(losses)))
        each = [score + shift for score, shift in zip(best.each, shifts, strict=True)]
        return Figures(sum(each) / len(each), None, each, self.examples, unfinished=True)

    def figures(self) -> Figures:
        """The figures so far."""
        judge = self.judge
        if judge.task in FLOATS:
            per_set = [of_floats(torch.cat(v), judge.numbers(i), judge.task) for i, v in enumerate(self.values)]
            scores = [figures.loss for figures in per_set]
            accuracy = sum(figures.main for figures in per_set) / len(per_set) if judge.labelled else None
            return Figures(sum(scores) / len(scores), accuracy, scores)
        scores = [loss / max(size, 1) for loss, size in zip(self.losses, self.sizes, strict=True)]
        counts = judge.labelled and self.positions
        accuracy = self.right / self.positions if counts else None
        return Figures(sum(scores) / len(scores), accuracy, scores, self.examples)


def cannot_win(examples: Sequence[Sequence[float]], best: Sequence[Sequence[float]]) -> bool:
    """Whether a model is surely worse than the best one, by the losses of their common examples."""
    apart = [
        x - y
        for losses, best_losses in zip(examples, best, strict=False)
        for x, y in zip(losses, best_losses, strict=False)
    ]
    if len(apart) < LEAST_EXAMPLES:
        return False
    return statistics.fmean(apart) > CERTAIN * standard_error(apart)


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; 0 of fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
