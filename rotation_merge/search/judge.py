"""Scores of models on held-out samples, by labels or by similarity to the parents, and what they forget of the base."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import DataError
from rotation_merge.run.batches import Batch, examples_in, holds_pairs, inputs_for
from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import FIGURES, Judged, Scores, judged, score, scores_of
from rotation_merge.workers import listener

MOST_KEPT = 1 << 27
"""Numbers of the parents' answers that are kept, in half precision; of more, positions evenly spread."""
NUMBERS = ("regression", "labels", "similarity", "embedding")
"""Tasks whose answers are numbers."""
UNITS = {"regression": "squared error", "similarity": "1 - Spearman", "embedding": "1 - Spearman"}
ENSEMBLE = "ensemble"
"""Name of the mean of the parents' answers among the models that are measured."""
FEWEST = 8
"""Fewer examples than these are never measured, if there are as many."""
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
        losses: of every example of every set, as those of `Scores`.
    """

    score: float
    accuracy: float | None
    on_base: float | None = None
    base_texts: list[float] = field(default_factory=list, repr=False)
    losses: list[list[float]] = field(default_factory=list, repr=False)


class Judge:
    """Measures models on samples of the parents, all of them on the same ones.

    Args:
        sets: samples, one set for all parents or one for each.
        labelled: judge by the labels; else by each parent's own answers.
        texts: that the base wrote.
        owners: parents whose answers are a set's targets: all of them, if there is one set; else 1.

    Attributes:
        rounds: how many batches of each set are measured; the first measurement may lower it.
    """

    def __init__(self, sets: Sequence[Data], labelled: bool, texts: Data | None = None, owners: int = 1) -> None:
        self.sets, self.labelled, self.texts, self.owners = sets, labelled, texts, owners
        self.task = sets[0].task
        self.figure = FIGURES.get(self.task, "accuracy")
        self.unit = UNITS.get(self.task, "loss (nats)" if labelled else "divergence (nats)")
        self.targets: dict[tuple[int, int], list[Tensor]] = {}
        self.rounds = max(len(data.batches) for data in sets)
        counts = accumulate(sum(map(examples_in, self._round(number))) for number in range(self.rounds))
        self.least = next((number for number, count in enumerate(counts, 1) if count >= FEWEST), self.rounds)

    @property
    def examples(self) -> int:
        """How many examples are measured."""
        return sum(examples_in(batch) for number in range(self.rounds) for batch in self._round(number))

    def _round(self, number: int) -> list[Batch]:
        return [data.batches[number] for data in self.sets if number < len(data.batches)]

    def prepare(self, models: Mapping[str, Any]) -> None:
        """Without labels, the parents' answers on their own samples become the targets.

        Raises:
            DataError: a model has no logits.
        """
        parents = list(models.values())
        for number, data in enumerate(self.sets):
            owners = parents[number : number + self.owners]
            for place, batch in enumerate(data.batches):
                self._keep(number, place, [_logits(model, batch, self.task) for model in owners])
            self._check_pairs(kept[0] for (of_set, _), kept in self.targets.items() if of_set == number)

    def _check_pairs(self, answers: Iterable[Tensor]) -> None:
        """Check that embeddings of a set have similarities to compare.

        Raises:
            DataError: they have not.
        """
        if self.task == "embedding" and sum(map(len, answers)) < 2:
            raise DataError("embeddings are compared within a batch", remedy="take a batch size of 2 or more")

    def _keep(self, number: int, place: int, owners: Iterable[Tensor]) -> None:
        """Keep the owners' answers to a batch of a set, from their logits."""
        half, batch = torch.float32 if self.task in NUMBERS else torch.float16, self.sets[number].batches[place]
        self.targets[number, place] = [self._answers(logits, batch).to(half) for logits in owners]

    def measure(self, model: Any, more: Callable[[], bool] = lambda: True) -> Figures:
        """Measure a model on all sets of samples, and on the base's text."""
        figures, texts = self.compare({"": model}, more)[""], self.on_text(model)
        return replace(figures, on_base=fmean(texts) if texts else None, base_texts=texts)

    def on_text(self, model: Any) -> list[float]:
        """A model's losses on the base's texts."""
        texts = self.texts
        return [] if texts is None else score(model, texts.with_batches(texts.batches[: self.rounds])).losses

    @torch.no_grad()
    def compare(
        self, models: Mapping[str, Any], more: Callable[[], bool] = lambda: True, parents: bool = False
    ) -> dict[str, Figures]:
        """Measure models on all sets of samples, with one forward of each for a batch.

        Args:
            more: whether there is time for another batch of each set, once there are `least`; later measurements take
                as many batches.
            parents: the models are all parents: their ensemble is measured, too, and unknown targets are kept.
        """
        done, tell = 0, listener()
        results: dict[tuple[str, int, int], list[Judged]] = {}
        while done < self.rounds and (done < self.least or more()):
            for number, data in enumerate(self.sets):
                if done < len(data.batches):
                    self._judge(models, number, done, parents, results)
            done += 1
            tell("held-out samples, batches", done, self.rounds)
        self.rounds = done
        return {name: self._figures(name, results) for name in dict.fromkeys(name for name, *_ in results)}

    def _judge(
        self,
        models: Mapping[str, Any],
        number: int,
        place: int,
        parents: bool,
        results: dict[tuple[str, int, int], list[Judged]],
    ) -> None:
        """Add the models' judged answers to a batch of a set to the results, by model, set and target."""
        batch = self.sets[number].batches[place]
        logits = {name: _logits(model, batch, self.task) for name, model in models.items()}
        if parents:
            owners = list(logits.values())
            if not self.labelled and (number, place) not in self.targets:
                self._keep(number, place, owners[number : number + self.owners])
            logits[ENSEMBLE] = ensemble(owners, self.task)
        for name, answer in logits.items():
            if self.labelled:
                results.setdefault((name, number, 0), []).append(judged(answer, batch, self.task))
                continue
            answers = self._answers(answer, batch)
            for target, kept in enumerate(self.targets[number, place]):
                judgement = (answers, kept) if self.task in NUMBERS else self._divergences(answers, kept, answer, batch)
                results.setdefault((name, number, target), []).append(judgement)

    def _figures(self, name: str, results: Mapping[tuple[str, int, int], list[Judged]]) -> Figures:
        """A model's figures, from the judged answers by model, set and target."""
        sets, losses = dict[int, list[Scores]](), list[list[float]]()
        for (_, number, _), batches in ((key, batches) for key, batches in results.items() if key[0] == name):
            self._check_pairs(answers for answers, *_ in batches)
            sets.setdefault(number, []).append(scores_of(batches, self.task))
        for number, of_targets in sets.items():
            means = [*map(fmean, zip(*(scores.losses for scores in of_targets), strict=True))]
            apart = self.task != "embedding" or holds_pairs(self.sets[number].batches[0])
            losses.append(
                means if apart else by_batch(means, [len(answers) for answers, _ in results[name, number, 0]])
            )
        accuracy = fmean(scores.main for (scores,) in sets.values()) if self.labelled else None
        return Figures(fmean(map(fmean, losses)), accuracy, losses=losses)

    def _divergences(self, answers: Tensor, target: Tensor, logits: Tensor, batch: Batch) -> Judged:
        """KL(target || model) summed over each example's positions, and their number."""
        target = target.float().log_softmax(-1)
        divergences = (target.exp() * (target - answers)).sum(-1).double().cpu()
        shape = logits.shape[:-1]
        rows = torch.arange(shape[0]).view(-1, *(1 for _ in shape)).expand(*shape, 1)
        rows = _counting(rows, batch, self.task)[:: self._step(logits)].flatten()
        counts = torch.bincount(rows, minlength=shape[0]).double()
        return torch.zeros_like(counts).index_add(0, rows, divergences), counts, torch.zeros_like(counts)

    def _answers(self, logits: Tensor, batch: Batch) -> Tensor:
        """Log-probabilities (positions, classes) of a batch, on the model's device; of numbers, the numbers.

        Raises:
            DataError: the model gives one number.
        """
        if self.task in NUMBERS:
            return logits.float().cpu()
        if logits.shape[-1] == 1:
            problem = "a model with one output gives a number, so its samples need scores"
            raise DataError(problem, remedy="give data with labels or scores")
        return _counting(logits, batch, self.task)[:: self._step(logits)].float().log_softmax(-1).clamp_min(LEAST_LOG)

    def _step(self, logits: Tensor) -> int:
        """Of so many positions one is kept."""
        positions = sum(b["input_ids"].numel() if "input_ids" in b else 1 for d in self.sets for b in d.batches)
        return math.ceil(positions * self.owners * logits.shape[-1] / MOST_KEPT)


def by_batch(losses: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Losses that depend on each other within a batch, as one for each batch, with the same mean."""
    starts, mean = [0, *accumulate(sizes)], fmean(losses)
    sums = [sum(losses[start : start + size]) for start, size in zip(starts, sizes, strict=False)]
    return [mean + (total - mean * size) * len(sizes) / len(losses) for total, size in zip(sums, sizes, strict=True)]


def ensemble(logits: Sequence[Tensor], task: str) -> Tensor:
    """Logits of the mean of several models' probabilities; of numbers, their mean."""
    stacked = torch.stack([each.float() for each in logits])
    return stacked.mean(0) if task in NUMBERS else stacked.log_softmax(-1).clamp_min(LEAST_LOG).logsumexp(0)


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


def forgetting(figures: Figures, plain: Figures | None, base: Figures) -> tuple[float, float]:
    """Nats that a merge loses more on the base's text than the plain average does, and how many it may.

    Allowed are `TOLERATED` of the merge's gain over the base and the standard error of the difference: the texts are
    few. The base stands for the plain average where there is none, or where that loses less than the base.
    """
    reference = plain if plain is not None and (plain.on_base or 0.0) > (base.on_base or 0.0) else base
    more = [x - y for x, y in zip(figures.base_texts, reference.base_texts, strict=False)]
    error = stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    return (figures.on_base or 0.0) - (reference.on_base or 0.0), TOLERATED * (base.score - figures.score) + error
