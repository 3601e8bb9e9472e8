r"""Measures a model: Grams of the inputs of its maps, layer by layer, and Fisher diagonals, into a value or a file.

Statistics go by the names of the checkpoint, which may hold tensors apart or together that the module in memory does
not.

The Fisher matrix is the mean of squared gradients of log-probabilities: F = E_x E_{y ~ p(y|x)} (d log p(y|x))^2. Over
the labels of a classifier the inner expectation is taken exactly: the sum over labels c of p_c (d log p_c)^2 is the sum
of squared gradients of sqrt(p_c) log p_c with the root held constant (Matena and Raffel 2022, section 2.2). Over the
vocabulary of a language model one label is drawn at each position.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import Tensor, nn

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import DataError, StatisticsError
from rotation_merge.files import CONTINUES, Store
from rotation_merge.model.card import origins
from rotation_merge.model.forms import names_in, paired, restructured
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.model.view import View, stored_dtype
from rotation_merge.record import versions
from rotation_merge.run.batches import Batch, by_rows, inputs_for, unpadded, with_small_first_batch
from rotation_merge.run.config import MeasureConfig
from rotation_merge.run.data import Data, described
from rotation_merge.run.functions import architecture_of, check_answers, empty_model, in_memory, streamed_model
from rotation_merge.run.maps import maps_of, same_map
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.runner import Runner, StateStore
from rotation_merge.run.sample_kinds import SELF
from rotation_merge.run.statistics import NAME, Statistics, first_readers
from rotation_merge.workers import Progress, free_memory

INPUTS, FISHER = "inputs of the maps", "Fisher"
"""Names of the measurements of Grams and of Fisher diagonals, shown as progress."""

MOST_LABELS = 100
"""Classifiers with more labels have one drawn for each example."""

FITS = 0.75
"""Of the memory that is free: what a model that is held whole may take."""


def default_statistics_path(reference: ModelReference) -> Path:
    """The default place of a model's statistics: beside it (beside its adapter), otherwise here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def model_for(view: View, options: MeasureConfig, data: str, device: str, by_layer: bool | None) -> Any:
    """The model as measuring it needs it beside its tensors: with weights to write text, and for Fisher diagonals.

    Args:
        by_layer: layers read their weights as they run; None: if the model, in float32, does not fit.

    Raises:
        StatisticsError: its Fisher is to be measured by layer.
        CheckpointError: it cannot be run in that way.
    """
    fisher = "fisher" in options.kinds  # with gradients, and their sums in float64
    if not fisher and data != SELF:
        return empty_model(view)
    if by_layer is None:
        free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
        by_layer = (16 if fisher else 4) * sum(map(math.prod, view.shapes.values())) > FITS * free
    if by_layer and fisher:
        problem = "a Fisher diagonal needs the whole model in memory"
        remedy = "measure the kind 'gram', or use a machine with more memory ('--whole' tries it on this one)"
        raise StatisticsError(problem, where=view.name, remedy=remedy)
    return streamed_model(view, device) if by_layer else in_memory(view).to(device)


def measured(
    view: View,
    module: nn.Module,
    data: Data,
    options: MeasureConfig,
    out: Path | None = None,
    progress: Progress = lambda *_: None,
    device: str = "cpu",
) -> Statistics:
    """Measure a model, under the names of its files.

    Args:
        module: see `model_for`.
        out: the statistics are written to, beside which finished parts and hidden states wait; what was interrupted
            continues. None: all stays in memory.

    Raises:
        RotationMergeError: the model or the data do not allow it, or there is no place to write; nothing is left behind
            except an earlier run's results.
    """
    batches = unpadded(data.batches, data.source)
    origin = {} if out is None else {"model": str(view.reference), "models": origins([view.reference])}
    metadata = {
        "model": view.name,
        "fingerprint": view.fingerprint,
        "family": view.architecture.family,
        **origin,
        **described(data, batches),
        "kinds": sorted(options.kinds),
        "labels": options.labels,
        "seed": options.seed,
        "versions": versions(),
    }
    result = Statistics(as_tensors({}), {}, frozenset(), frozenset())
    with nullcontext() if out is None else Store(str(out)) as store:
        if store is not None:
            store.begin(json.dumps(metadata, sort_keys=True, default=str))
        if "gram" in options.kinds:
            with closing(StateStore(None if store is None else str(store.path), CONTINUES)) as states:
                result = grams(Runner(view, with_small_first_batch(batches), states, device=device), store, progress)
        if "fisher" in options.kinds:
            scores = LabelScores(data.task, options.labels == "data", options.seed)
            compute = partial(fisher_diagonals, module, architecture_of(module), batches, scores, progress)
            result = replace(result, tensors=result.tensors.replaced(_part(store, FISHER, compute)))
        statistics = _as_stored(result, module, view, metadata)
        if out is not None:
            statistics.write(out)
    return statistics


def _part(store: Store | None, name: str, compute: Callable[[], dict[str, Tensor]]) -> Tensors:
    """A part of the results, of an interrupted run or computed; in a store it is read when it is asked for."""
    if store is None:
        return as_tensors(compute())
    if store.get(name, mapped=True) is None:
        store.put(name, compute())
    known = as_tensors(store.get(name, mapped=True))
    return Tensors(known.shapes, known.dtypes, by_name(lambda key: store.get(name, mapped=True)[key]))


# --- Grams -----------------------------------------------------------------------------------------------------------


def grams(runner: Runner, store: Store | None = None, progress: Progress = lambda *_: None) -> Statistics:
    """The Grams of all maps that run, under the names of the runner's model; a block's sums in memory at a time.

    Args:
        runner: about to run on samples without padding.
        store: a block that an interrupted run has measured is only run forward; None: all stays in memory.
    """
    watched, total, tensors = WatchedBlocks(runner), len(runner.architecture.blocks), as_tensors({})
    while (block := watched.advance()) is not None:
        progress(INPUTS, len(runner.opened) - 1, total)
        name = f"{INPUTS} {block.name}"
        if store is not None and store.get(name, mapped=True) is not None:
            watched.run(lambda *_: None)
        tensors = tensors.replaced(_part(store, name, partial(_block_grams, watched)))
    progress(INPUTS, total, total)
    return Statistics(tensors, watched.axes, frozenset(watched.split), watched.uncalled)


def _block_grams(watched: WatchedBlocks) -> dict[str, Tensor]:
    """Run a block, and take the means of ``(x, 1) (x, 1)^T`` over the inputs x of maps, summed in float64.

    Inputs are normalised ones if a norm feeds their maps.

    Returns:
        `AXIS.gram` by (block, axis), for each expert separately (zero without rows), and `AXIS.count`, of the rows.
    """
    axes, sums = {name: axis for axis, name in first_readers(watched.new_axes).items()}, dict[str, Tensor]()

    def add(name: str, expert: int | None, x: Tensor, _: Tensor) -> None:
        if (axis := axes.get(name)) is None:
            return
        rows = watched.normalised(name, x.detach().flatten(0, -2))
        rows = torch.nn.functional.pad(rows if rows.dtype == torch.float64 else rows.float(), (0, 1), value=1.0)
        if axis not in sums:
            experts = () if expert is None else (watched.maps[name].info.axes[0].size or 1,)
            sums[axis] = rows.new_zeros(*experts, rows.shape[1], rows.shape[1], dtype=torch.float64)
        sums[axis][... if expert is None else expert] += rows.T @ rows

    watched.run(add)
    dtype, results = torch.promote_types(watched.runner.dtype, torch.float32), dict[str, Tensor]()
    for axis, total in sums.items():
        count = total[..., -1, -1]
        results[f"{axis}.gram"] = (total / count.clamp(min=1)[..., None, None]).to(dtype)
        results[f"{axis}.count"] = count.round().long().cpu()
    return results


# --- Fisher diagonals ------------------------------------------------------------------------------------------------


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


# --- under the names of the checkpoint -------------------------------------------------------------------------------


def _as_stored(measured: Statistics, model: nn.Module, view: View, metadata: Mapping[str, Any]) -> Statistics:
    """Statistics of a module under the names of its checkpoint.

    Args:
        metadata: of the result, what it holds of itself left out.
    """
    module, buffers = architecture_of(model), {name for name, _ in model.named_buffers()}
    stored = resolve(dict(view.config), list(view), view.name, untie=True)
    readers = _maps(module, stored)
    axes = {name: measured.axes[reader] for name, reader in readers.items() if reader in measured.axes}
    known = first_readers(axes)
    grams = measured.tensors.only(f"{axis}.{kind}" for axis in known for kind in ("gram", "count"))
    fishers = _fishers(measured.tensors, module, stored)
    fishers = fishers.only(f"{name}.fisher" for name in stored.named() if name in view)
    squares = [float(diagonal.double().square().sum()) for diagonal in fishers.values()]
    counts = {axis: int(grams[f"{axis}.count"].min()) for axis in known}
    facts = {
        "fisher_norm": sum(squares) ** 0.5 if squares else None,
        "narrow": sorted(known[axis] for axis, count in counts.items() if count < grams.shapes[f"{axis}.gram"][-1]),
        "buffers": sorted(name for name, of_module in names_in(module, stored).items() if of_module in buffers),
    }
    uncalled = frozenset(readers) - axes.keys() if axes else frozenset[str]()
    return Statistics(grams.replaced(fishers), axes, measured.split, uncalled, {**metadata, **facts}, view.name)


def _maps(module: Architecture, stored: Architecture) -> dict[str, str]:
    """By the name of each map in a checkpoint, that of the map in memory that it is, or is a part of."""
    pairs = [(linear, maps_of(known)) for known, block in paired(module, stored) for linear in maps_of(block)]
    places = {linear.info.name: same_map(linear, candidates) for linear, candidates in pairs}
    return {name: place[0].info.name for name, place in places.items() if place is not None}


def _fishers(tensors: Tensors, module: Architecture, stored: Architecture) -> Tensors:
    """Fisher diagonals of a module, by `TENSOR.fisher`, in the form and under the names of its checkpoint."""
    keys = {key.removesuffix(".fisher"): key for key in tensors if key.endswith(".fisher")}
    diagonals = restructured(tensors.renamed(keys).only(keys), module, stored)
    return diagonals.renamed({f"{name}.fisher": name for name in diagonals})
