"""Loss and accuracy (of numbers, correlations) of a model, and of the models on the straight path between two."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import DataError, RotationMergeError
from rotation_merge.files import write_text
from rotation_merge.model.card import MEASURED, kept_figures
from rotation_merge.model.open import open_model
from rotation_merge.record import read_as, versions, with_margin
from rotation_merge.run.batches import Batch, check_labels, inputs_for
from rotation_merge.run.data import UNLABELLED, Data
from rotation_merge.run.ledger import NOWHERE, Ledger

LOG = logging.getLogger(__name__)


MOST_LOGITS = 1 << 26
"""Numbers that a model gives in one forward; a batch of more rows is split. Three times as many are in memory."""

NUMBERS = ("regression", "labels", "similarity")
"""Tasks whose labels are a number for each output."""

CONFIDENCE = 0.975
"""Quantile of Student's t at the upper end of a margin: of 95%."""

PATH = "path, "
"""Prefix of progress labels for a path."""


LEAST_GAIN = 1e-4
"""Least gain over the line between the parents that is reported as better."""

FIGURES = {"regression": "Pearson", "similarity": "Spearman"}
"""Name of the figure beside the loss, by task, if it is no accuracy."""


@dataclass(frozen=True)
class Scores:
    """Loss and figures of a model on data.

    Attributes:
        loss: mean, in nats for each token or example; of regressions the mean squared error, of similarities 1 -
            Spearman's correlation.
        figures: accuracy, or correlations; the first is the one that counts.
        losses: of each example, with the mean `loss`, linearised: an example of more tokens weighs more, and of a
            correlation it is the example's influence.
    """

    loss: float
    figures: dict[str, float]
    losses: list[float]

    @property
    def main(self) -> float:
        return next(iter(self.figures.values()))


@torch.no_grad()
def score(model: Any, data: Data) -> Scores:
    """Loss, in nats for each token or example, and every figure that the data's labels admit.

    Raises:
        DataError: the data have no labels for this model.
    """
    if data.task in UNLABELLED:
        problem = f"{type(model).__name__} has no loss on data without labels for every example"
        remedy = "give labels (to sentence encoders columns sentence1, sentence2 and score), or another model class"
        raise DataError(problem, where=data.source or None, remedy=remedy)
    check_labels(data.batches, model, data.task, data.source)
    batches = data.batches if data.task in NUMBERS else _parts(model, data)
    return scores_of(
        [judged(model(**inputs_for(model, batch)).logits, batch, data.task) for batch in batches], data.task
    )


Judged = tuple[Tensor, ...]
"""A batch's answers against its labels: of classes, for each example the sum of losses, the number of positions that
count and of those that are right, (n,) each; of numbers, the predicted and the true ones, (n, outputs) each."""


def judged(logits: Tensor, batch: Batch, task: str) -> Judged:
    """A model's logits against the labels of a batch."""
    if task in NUMBERS:
        numbers = batch["labels"].float().reshape(len(batch["labels"]), -1)
        _check_shape(numbers, logits, logits.shape)
        return logits.float().cpu(), numbers
    labels = batch["labels"].to(logits.device)
    _check_shape(labels, logits, logits.shape[:-1])
    if task == "next token":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.numel() and int(labels.max()) >= logits.shape[-1]:
        problem = f"label {int(labels.max())} is beyond the model's {logits.shape[-1]} classes"
        raise DataError(problem, remedy="correct the labels")
    scores, classes = logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1)
    losses = torch.nn.functional.cross_entropy(scores, classes, ignore_index=-100, reduction="none")
    columns = losses, classes != -100, (scores.argmax(-1) == classes) & (classes != -100)
    return tuple(column.double().reshape(len(labels), -1).sum(1).cpu() for column in columns)


def scores_of(batches: Sequence[Judged], task: str) -> Scores:
    """The scores of a model, from the judged answers to all batches.

    Raises:
        DataError: no example has a label.
    """
    columns = [torch.cat(column) for column in zip(*batches, strict=True)]
    if len(columns) == 2:
        return of_floats(columns[0], columns[1], task)
    sums, counts, hits = columns
    total = float(counts.sum())
    if not total:
        raise DataError("no example has a label", remedy="give more data")
    loss = float(sums.sum()) / total
    losses = loss + (sums - loss * counts) * (len(counts) / total)
    return Scores(loss, {"accuracy": float(hits.sum()) / total}, losses.tolist())


def mean_error(sets: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over sets of the means of their examples' losses (or of paired differences of them).

    Returns:
        None where a set has fewer than two examples.
    """
    if any(len(losses) < 2 for losses in sets):
        return None
    return math.sqrt(sum(variance(losses) / len(losses) for losses in sets)) / len(sets)


def mean_figures(sets: Sequence[Scores]) -> dict[str, float | None]:
    """A model's loss with its standard error, and its other figures, each as the mean over sets of samples."""
    figures = {name: fmean(scores.figures[name] for scores in sets) for name in sets[0].figures}
    error = mean_error([scores.losses for scores in sets])
    return {"loss": fmean(scores.loss for scores in sets), "error": error, **figures}


def margin(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float | None:
    """Half of the 95% interval of the difference of two models' losses, from those of the same examples, set by set.

    Returns:
        None where a set has fewer than two examples.
    """
    from scipy.stats import t

    sets = [[a - b for a, b in zip(*pair, strict=True)] for pair in zip(first, second, strict=True)]
    error, degrees = mean_error(sets), sum(map(len, sets)) - len(sets)
    return None if error is None else error * float(t.ppf(CONFIDENCE, degrees))


def _parts(model: Any, data: Data) -> Iterator[Batch]:
    """The batches, split where they ask for too many logits: those of a vocabulary at every position."""
    config = getattr(model, "config", None)
    vocabulary = 1 if config is None else getattr(config.get_text_config(), "vocab_size", None) or 1
    for batch in data.batches:
        labels = batch["labels"]
        rows = max(1, MOST_LOGITS // (labels[0].numel() * vocabulary if labels.ndim > 1 else 1))
        for start in range(0, len(labels), rows):
            yield {name: tensor[start : start + rows] for name, tensor in batch.items()}


def _check_shape(labels: Tensor, logits: Tensor, shape: torch.Size) -> None:
    if labels.shape != shape:
        problem = f"labels have shape {list(labels.shape)}, the model's answers {list(logits.shape)}"
        raise DataError(problem, remedy="give one label for each example or token, or one number for each output")


def of_floats(logits: Tensor, labels: Tensor, task: str) -> Scores:
    """Scores of predicted numbers against the data's numbers, (n, outputs) each."""
    if task == "labels":
        losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(1)
        hits = ((logits > 0) == (labels > 0.5)).double()
        return Scores(float(losses.mean()), {"accuracy": float(hits.mean())}, losses.tolist())
    columns = list(zip(logits.T, labels.T, strict=True))
    pearson = fmean(float(_influences(x, y).mean()) for x, y in columns)
    ranks = torch.stack([_influences(_ranks(x), _ranks(y)) for x, y in columns]).mean(0)
    spearman = float(ranks.mean())
    if task in ("similarity", "embedding"):
        return Scores(1 - spearman, {"spearman": spearman, "pearson": pearson}, (1 - ranks).tolist())
    losses = torch.nn.functional.mse_loss(logits, labels, reduction="none").mean(1)
    return Scores(float(losses.mean()), {"pearson": pearson, "spearman": spearman}, losses.tolist())


def _influences(x: Tensor, y: Tensor) -> Tensor:
    """Examples' influences on Pearson's correlation of two (n,) vectors, with the correlation as their mean.

    With standardised u and v and the correlation r: r + u v - r (u^2 + v^2) / 2; 0 of constants and single numbers.
    """
    u, v = ((z - z.mean()) / z.std(correction=0) for z in (x.double(), y.double()))
    correlation = (u * v).mean()
    return (correlation + u * v - correlation * (u**2 + v**2) / 2).nan_to_num(0.0)


def _ranks(x: Tensor) -> Tensor:
    """Ranks of (n,) numbers, for Spearman's correlation; ties share one."""
    from scipy.stats import rankdata

    return torch.from_numpy(rankdata(x.numpy()))


# --- paths between models --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One path: positions from 0 (anchor) to 1 (donor), loss in nats and accuracy there.

    Attributes:
        margins: half of the 95% interval of the loss above the straight line between the ends, at each position; None:
            too few samples.
    """

    name: str
    t: list[float]
    loss: list[float]
    accuracy: list[float]
    margins: list[float | None] = field(default_factory=list)

    def _excess(self) -> list[float]:
        """Loss above the straight line between the ends, at each position."""
        first, last = self.loss[0], self.loss[-1]
        return [loss - ((1 - t) * first + t * last) for t, loss in zip(self.t, self.loss, strict=True)]

    def _margin(self, position: int) -> float | None:
        return self.margins[position] if self.margins else 0.0

    def barrier(self) -> float:
        """Largest excess of the loss over the straight line between the ends."""
        return max(self._excess())

    def margin(self) -> float | None:
        """How far the 95% interval of the barrier extends above it; None: too few samples."""
        excess = self._excess()
        highest = max(range(1, len(excess) - 1), key=excess.__getitem__, default=0)
        margin = self._margin(highest)
        return None if margin is None else max(0.0, margin + min(0.0, excess[highest]))

    def gain(self) -> tuple[float, float]:
        """The largest fall of the loss below the straight line between the ends, and its position."""
        return max((-excess, t) for excess, t in zip(self._excess(), self.t, strict=True))

    def verdict(self) -> str | None:
        """A sentence on a path without a clear barrier; None if there is one, or the path is the straight line."""
        (gain, place), barrier, margin = self.gain(), self.barrier(), self.margin()
        of_gain = self._margin(self.t.index(place))
        if gain > barrier and of_gain is not None and gain > max(of_gain, LEAST_GAIN):
            below = f"{with_margin(f'{gain:.4f}', of_gain)} below the straight line between its ends"
            return f"no barrier on the path, {self.name}: at {place:.2g} the loss is {below}"
        if margin is not None and (barrier > margin or max(barrier, margin) < LEAST_GAIN):
            return None
        return f"no clear barrier on the path, {self.name}: {with_margin(f'{barrier:.4f}', margin)}; give more samples"

    def middle(self) -> int:
        return min(range(len(self.t)), key=lambda i: abs(self.t[i] - 0.5))


@dataclass(frozen=True)
class Barrier:
    """Paths between two models, a curve for each matching.

    Attributes:
        anchor, donor: the models at the ends.
        options: of the curve `aligned`, which the recipe or the command asks for; none where it is not there.
        head: of models that keep heads of their own: the one whose head and config all on the paths have.
    """

    anchor: str
    donor: str
    data: str
    task: str
    examples: int
    options: dict[str, Any]
    curves: list[Curve]
    head: str = ""

    @property
    def figure(self) -> str:
        """The name of the figure that `accuracy` holds."""
        return FIGURES.get(self.task, "accuracy")

    def to_dict(self) -> dict[str, Any]:
        measures = {
            c.name: {
                "barrier": c.barrier(),
                "margin": c.margin(),
                "below_line": c.gain()[0],
                "middle_loss": c.loss[c.middle()],
            }
            for c in self.curves
        }
        return {"measures": measures, **asdict(self)}

    def words(self) -> list[str]:
        """Sentences on the curves."""
        return [words for curve in self.curves if (words := curve.verdict())]


def is_barrier(path: str) -> bool:
    """Whether a file was written by `barrier --save`."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return bool(read_as(list[Barrier], content if isinstance(content, list) else [content]))
    except (OSError, ValueError):
        return False


def path(
    a: Any,
    b: Any,
    data: Data,
    points: int,
    name: str,
    tick: Callable[[str, int, int], None] = lambda *_: None,
    ledger: Ledger = NOWHERE,
    head: Any = None,
    head_tensors: Collection[str] = (),
) -> Curve:
    """Loss and accuracy at equally spaced models on the straight path from a to b, weights (1 - t) a + t b.

    Those between compute with a's config, as a merge does; the ends are a and b themselves.

    Args:
        head: a model whose config and head all of them have, as a body merged for several heads does.
        head_tensors: its head's parameters.
        ledger: store of intermediate results, to resume from.
    """
    ts = [i / (points - 1) for i in range(points)]
    points_done: list[tuple[float, float, list[float]]] = ledger.get(PATH) or []
    for done in range(len(points_done) + 1):
        tick(f"{PATH}{name}", done, points)
    between = copy.deepcopy(a if head is None else head)
    for t in ts[len(points_done) :]:
        _place_between(between, a, b, t, head_tensors)
        scores = score(b if t == 1 and head is None else between, data)
        LOG.info("%s, at %.2f: loss %.4f", name, t, scores.loss)
        points_done.append((scores.loss, scores.main, scores.losses))
        ledger.keep(PATH, points_done.copy)
        tick(f"{PATH}{name}", len(points_done), points)
    losses, figures, of_examples = (list(column) for column in zip(*points_done, strict=True))
    return Curve(name, ts, losses, figures, _margins(ts, of_examples))


def _margins(ts: Sequence[float], losses: Sequence[Sequence[float]]) -> list[float | None]:
    """Half of the 95% interval of the loss above the line between the ends, from every example's loss at each t."""
    ends = list(zip(losses[0], losses[-1], strict=True))
    lines = ([(1 - t) * first + t * last for first, last in ends] for t in ts)
    return [margin([of_t], [line]) for of_t, line in zip(losses, lines, strict=True)]


@torch.no_grad()
def _place_between(model: Any, a: Any, b: Any, t: float, head_tensors: Collection[str]) -> None:
    """Give a model the weights (1 - t) a + t b, but for those of its head."""
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    for key, parameter in model.named_parameters():
        if key not in head_tensors:
            parameter.copy_(torch.lerp(first[key], second[key], t))


# --- figures for a card ----------------------------------------------------------------------------------------------

PIPELINES = {"next token": "text-generation", "masked token": "fill-mask", "similarity": "sentence-similarity"}
"""The hub's names of tasks; all others classify."""


def keep_figures(name: str, images: bool, facts: Mapping[str, Any], figures: Mapping[str, float]) -> None:
    """Put figures beside a model, with the fingerprint of the weights they are of; those of the same data go.

    Args:
        name: the folder.
        images: whether it looks at them.
        facts: data, task, examples.

    Raises:
        RotationMergeError: the model is no folder here.
    """
    if not os.path.isdir(name):
        raise RotationMergeError("--keep needs a model folder", where=name, remedy="name a folder")
    pipeline = PIPELINES.get(str(facts["task"]), f"{'image' if images else 'text'}-classification")
    measurement = {key: facts[key] for key in ("data", "task", "examples")} | {
        "pipeline": pipeline,
        "figures": dict(figures),
        "fingerprint": open_model(name, any_base=True).fingerprint,
        "versions": versions(),
    }
    other_data = [entry for entry in kept_figures(name) if entry["data"] != facts["data"]]
    write_text(os.path.join(name, MEASURED), json.dumps([*other_data, measurement], indent=1) + "\n")
