r"""Measuring a model: Grams of the inputs of its maps on samples, and squared gradients of its outputs.

The Fisher matrix is the mean of squared gradients of log-probabilities: F = E_x E_{y ~ p(y|x)} (d log p(y|x))^2. Over
the labels of a classifier the inner expectation is taken exactly: the sum over labels c of p_c (d log p_c)^2 is the sum
of squared gradients of sqrt(p_c) log p_c with the root held constant (Matena and Raffel 2022, section 2.2). Over the
vocabulary of a language model one label is drawn at each position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.config import Config, Count, Length, option
from rotation_merge.errors import DataError
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.run.arrays import by_rows
from rotation_merge.run.functions import Batch, check_answers, inputs_for
from rotation_merge.run.maps import LinearMap
from rotation_merge.run.recorder import WatchedBlocks, Watcher
from rotation_merge.run.runner import Runner
from rotation_merge.run.sample_kinds import SAMPLES, Statistic
from rotation_merge.run.statistics import Statistics, UnfinishedMeasurement, first_readers
from rotation_merge.workers import Progress

INPUTS, FISHER = "inputs of the maps", "Fisher"
"""Names of the parts of a measurement, shown as progress."""


@config_dataclass(frozen=True)
class MeasureConfig(Config):
    """Options of measuring a model."""

    kinds: Annotated[tuple[Statistic, ...], MinLen(1)] = option(("gram",), "what to measure")
    labels: Literal["sampled", "data"] = option(
        "sampled",
        "labels of the gradients: sampled from the model (exact for classifiers), or those of the data",
    )
    seed: int = option(0, "seed of the samples that the model writes and of sampled labels")
    samples: Count | None = option(
        None, f"largest number of samples. Not given: all of a file, {SAMPLES} of `self` and `synthetic`"
    )
    batch_size: Count = option(16, "examples in a batch")
    length: Length = option(128, "tokens in a window of text")


class GramSums(Watcher):
    """Sums of ``(x, 1) (x, 1)^T`` over the inputs x of maps, in float64, and their numbers, by (block, axis).

    Inputs are normalised ones if a norm feeds their maps.

    Args:
        maps: by name.
        axes: by map, the (block, axis) that it reads; inputs of others are not looked at.
    """

    def __init__(self, maps: Mapping[str, LinearMap], axes: Mapping[str, str]) -> None:
        self.maps, self.axes = maps, {name: axis for axis, name in first_readers(axes).items()}
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        if (axis := self.axes.get(name)) is None:
            return
        rows = x.detach().flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        if axis not in self.sums:
            experts = () if expert is None else (self.maps[name].info.axes[0].size or 1,)
            size = (*experts, rows.shape[1], rows.shape[1])
            self.sums[axis] = torch.zeros(size, dtype=torch.float64, device=x.device)
            self.counts[axis] = torch.zeros(experts, dtype=torch.int64)
        place = ... if expert is None else expert
        self.sums[axis][place] += rows.T @ rows
        self.counts[axis][place] += len(rows)

    def means(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Grams, each divided by its number of rows (for each expert separately; zero without rows), and counts."""
        results: dict[str, Tensor] = {}
        for axis, total in self.sums.items():
            divisor = self.counts[axis].clamp(min=1).double().to(total.device)
            results[f"{axis}.gram"] = (total / divisor[..., None, None]).to(dtype)
            results[f"{axis}.count"] = self.counts[axis]
        return results


def together(parts: Iterable[Tensors]) -> Tensors:
    """The tensors of several sources under one."""
    sources = {key: part for part in parts for key in part}
    shapes = {key: part.shapes[key] for key, part in sources.items()}
    dtypes = {key: part.dtypes[key] for key, part in sources.items()}
    return Tensors(shapes, dtypes, by_name(lambda key: sources[key][key]))


def grams(runner: Runner, state: UnfinishedMeasurement | None, progress: Progress) -> Statistics:
    """The Grams of all maps that run, under the names of the runner's model; a block's sums in memory at a time.

    Args:
        runner: about to run on samples without padding.
        state: a block that an interrupted run has measured is only run forward; None: all stays in memory.
    """
    watched, total = WatchedBlocks(runner), len(runner.architecture.blocks)
    dtype, parts = torch.promote_types(runner.dtype, torch.float32), list[Tensors]()
    while (block := watched.advance()) is not None:
        progress(INPUTS, len(parts), total)
        results = None if state is None else state.result(f"{INPUTS} {block.name}")
        sums = GramSums(watched.maps, watched.new_axes if results is None else {})
        with watched.by(sums):
            for batch in range(len(runner.batches)):
                runner.run(batch, record=True)
        if results is None:
            means = sums.means(dtype)
            results = as_tensors(means) if state is None else state.done(f"{INPUTS} {block.name}", means)
        parts.append(results)
    progress(INPUTS, total, total)
    return Statistics(together(parts), watched.axes, frozenset(watched.split), watched.uncalled)


def fisher_diagonals(
    model: nn.Module,
    architecture: Architecture,
    batches: Sequence[Batch],
    task: str,
    options: MeasureConfig,
    progress: Progress,
) -> dict[str, Tensor]:
    """Fisher diagonals of a model's parameters, `TENSOR.fisher` by its own names.

    Args:
        model: in evaluation mode.
        architecture: under the names of its state dict.
        batches: without padding.
        task: of their labels.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    weights = {name: parameters[name].requires_grad_() for name in architecture.named() if name in parameters}
    sums: dict[str, Tensor] = {}
    examples = [example for batch in batches for example in by_rows(batch)]
    for number, example in enumerate(examples):
        progress(FISHER, number, len(examples))
        draw = torch.Generator().manual_seed(options.seed * 1_000_003 + number)
        _add_squares(sums, model, weights, example, task, options.labels, draw)
    progress(FISHER, len(examples), len(examples))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return {f"{name}.fisher": (total / len(examples)).to(dtype) for name, total in sums.items()}


def _add_squares(
    sums: dict[str, Tensor],
    model: nn.Module,
    weights: Mapping[str, Tensor],
    example: Batch,
    task: str,
    labels: str,
    draw: torch.Generator,
) -> None:
    """Add the squared gradients of one example's scores to the sums of the weights that they reach."""
    dtype = next(model.parameters()).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs_for(model, example).items()}
    with torch.enable_grad():
        result = model(**inputs)
        check_answers(model, (x for x in result.values() if isinstance(x, Tensor)))
        label_scores = list(scores(model, result, example, task, labels, draw))
    for number, score in enumerate(label_scores, 1):
        again = number < len(label_scores)
        gradients = torch.autograd.grad(score, list(weights.values()), retain_graph=again, allow_unused=True)
        for name, gradient in zip(weights, gradients, strict=True):
            if gradient is not None:
                squares = gradient.double().square()
                sums[name] = sums[name].add_(squares) if name in sums else squares


MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""


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
        task: task of the labels (see `samples`).
        label_source: sampled (or exact, where that can be), or data: the labels that came with the samples.
        draw: where drawn labels come from.

    Raises:
        DataError: the model has no head that gives probabilities, or the samples have no labels for it.
    """
    heads = [x for name, x in outputs.items() if name.endswith("logits") and isinstance(x, Tensor)]
    if not heads:
        problem = f"{type(model).__name__} has no head that gives probabilities"
        raise DataError(problem, remedy="measure the kind 'gram', or a model with its head")
    from_data, kind = label_source == "data", getattr(model.config, "problem_type", None)
    for logits in (x if x.dtype == torch.float64 else x.float() for x in heads):
        regression = kind == "regression" or logits.shape[-1] == 1
        if from_data and task in ("regression", "labels"):
            yield _of_numbers(logits, batch, task)
        elif from_data or logits.ndim != 2 or (logits.shape[-1] > MOST_LABELS and not regression):
            yield _of_labels(logits, batch, task, from_data, draw)
        else:
            weighted = logits if regression else _weighted(logits, kind == "multi_label_classification")
            yield from (weighted[:, label].sum() for label in range(logits.shape[1]))


def _weighted(logits: Tensor, several: bool) -> Tensor:
    """Log-probabilities times the roots of their probabilities, (n, labels), so that a sum over labels is expected.

    Args:
        several: whether an example may have several labels.
    """
    if several:
        return (logits.sigmoid() * (-logits).sigmoid()).sqrt().detach() * logits
    logs = logits.log_softmax(-1)
    return (logs.detach() / 2).exp() * logs


def _of_numbers(logits: Tensor, batch: Mapping[str, Tensor], task: str) -> Tensor:
    """The log-probability of the data's numbers (under a normal distribution of variance one), or of all labels."""
    labels = batch["labels"].to(logits).reshape(logits.shape)
    if task == "regression":
        return -(logits - labels).square().sum() / 2
    return -torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")


def _of_labels(
    logits: Tensor, batch: Mapping[str, Tensor], task: str, from_data: bool, draw: torch.Generator
) -> Tensor:
    """The log-probability of one label for each example or position."""
    labels = batch.get("labels")
    if task == "next token":
        logits = logits[:, :-1]
        labels = None if labels is None else labels[:, 1:]
    if labels is not None and labels.shape != logits.shape[:-1]:
        labels = None
    if from_data and labels is None:
        raise DataError("the samples have no labels for this head", remedy="leave out 'labels: data'")
    labelled = torch.ones(logits.shape[:-1], dtype=torch.bool) if labels is None else labels != -100
    logs = logits[labelled].log_softmax(-1)
    if from_data and labels is not None:
        chosen = labels[labelled]
    else:
        chosen = torch.multinomial(logs.detach().exp().cpu(), 1, generator=draw)[:, 0].to(logs.device)
    return logs.gather(-1, chosen[:, None]).sum()
