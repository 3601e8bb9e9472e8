"""Measures a model, its Grams layer by layer, into a value or a file.

Statistics go by the names of the checkpoint, which may hold tensors apart or together that the module in memory does
not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from torch import nn

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import StatisticsError
from rotation_merge.model.card import origins
from rotation_merge.model.forms import names_in, restructured
from rotation_merge.model.tensors import Tensors, as_tensors
from rotation_merge.model.view import View
from rotation_merge.record import versions
from rotation_merge.run.data import Data, described, unpadded, with_small_first_batch
from rotation_merge.run.functions import Batch, architecture_of, empty_model, load, streamed_model
from rotation_merge.run.generated_samples import SELF
from rotation_merge.run.maps import linear_map, same_map
from rotation_merge.run.measure import FISHER, MeasureConfig, fisher_diagonals, grams, together
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics import NAME, SPACE, Statistics, UnfinishedMeasurement, first_readers
from rotation_merge.run.store import StateStore
from rotation_merge.workers import Progress, free_memory


def default_statistics_path(reference: ModelReference) -> Path:
    """The default place of a model's statistics: beside it (beside its adapter), otherwise here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def fits(shapes: Mapping[str, Sequence[int]], device: str, fisher: bool = False) -> bool:
    """Whether a model takes at most three quarters of the memory that is free.

    Args:
        fisher: with gradients, and their sums in float64, else its weights alone, all in float32.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
    return (16 if fisher else 4) * sum(math.prod(shape) for shape in shapes.values()) <= 0.75 * free


def model_for(checkpoint: View, options: MeasureConfig, data: str, device: str, by_layer: bool | None) -> Any:
    """The model as measuring it needs it beside its files: with its weights to write text, and for Fisher diagonals.

    Args:
        by_layer: layers read their weights as they run; None: if the model does not fit.

    Raises:
        StatisticsError: its Fisher is to be measured by layer.
        CheckpointError: it cannot be run in that way.
    """
    fisher, name = "fisher" in options.kinds, str(checkpoint.reference)
    if not fisher and data != SELF:
        return empty_model(checkpoint.transformers_config)
    streamed = not fits(checkpoint.shapes, device, fisher) if by_layer is None else by_layer
    if streamed and fisher:
        problem = "a Fisher diagonal needs the whole model in memory"
        remedy = "measure the kind 'gram', or use a machine with more memory ('--whole' tries it on this one)"
        raise StatisticsError(problem, where=name, remedy=remedy)
    return streamed_model(checkpoint, device) if streamed else load(name).to(device)


def measured(
    view: View,
    module: nn.Module | None,
    data: Data,
    options: MeasureConfig,
    out: Path | None = None,
    progress: Progress = lambda *_: None,
    device: str = "cpu",
) -> Statistics:
    """Measure a model, under the names of its files.

    Args:
        module: the model in memory, in evaluation mode, for Fisher diagonals.
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
    model = empty_model(view.transformers_config) if module is None else module
    with nullcontext() if out is None else UnfinishedMeasurement(out, metadata) as state:
        result = _measured(view, model, batches, data.task, options, state, progress, device)
        statistics = _as_stored(result, model, view, metadata)
        if out is not None:
            statistics.write(out)
    return statistics


def _measured(
    view: View,
    model: nn.Module,
    batches: Sequence[Batch],
    task: str,
    options: MeasureConfig,
    state: UnfinishedMeasurement | None,
    progress: Progress,
    device: str,
) -> Statistics:
    """Everything that the options ask for, under the names of a module."""
    result = Statistics(together([]), {}, frozenset(), frozenset())
    if "gram" in options.kinds:
        store = StateStore(None if state is None else str(state.path), SPACE)
        try:
            result = grams(Runner(view, with_small_first_batch(batches), store, device=device), state, progress)
        finally:
            store.close()
    if "fisher" in options.kinds:
        diagonals = None if state is None else state.result(FISHER)
        if diagonals is None:
            computed = fisher_diagonals(model, architecture_of(model), batches, task, options, progress)
            diagonals = as_tensors(computed) if state is None else state.done(FISHER, computed)
        result = replace(result, tensors=together([result.tensors, diagonals]))
    return result


def _as_stored(measured: Statistics, model: nn.Module, view: View, metadata: Mapping[str, Any]) -> Statistics:
    """Statistics of a module under the names of its checkpoint.

    Args:
        metadata: of the result, what it holds of itself left out.
    """
    module, buffers = architecture_of(model), {name for name, _ in model.named_buffers()}
    stored = resolve(dict(view.config), view.names, view.name, untie=True)
    readers, names = _maps(module, stored), names_in(module, stored)
    axes = {name: measured.axes[reader] for name, reader in readers.items() if reader in measured.axes}
    inputs = dict.fromkeys(axes.values())
    grams = measured.tensors.only(f"{axis}.{kind}" for axis in inputs for kind in ("gram", "count"))
    fishers = _fishers(measured.tensors, module, stored)
    facts = {
        "fisher_norm": _norm(fishers.only(f"{name}.fisher" for name in stored.named() if name in view)),
        "narrow": _narrow(axes, grams),
        "buffers": sorted(name for name, ours in names.items() if ours in buffers),
    }
    uncalled = frozenset(readers) - axes.keys() if axes else frozenset[str]()
    return Statistics(together([grams, fishers]), axes, measured.split, uncalled, {**metadata, **facts}, view.name)


def _maps(module: Architecture, stored: Architecture) -> dict[str, str]:
    """By the name of each map in a checkpoint, that of the map in memory that it is, or is a part of."""
    blocks = {(block.module, block.place, block.index): block for block in module.blocks}
    maps: dict[str, str] = {}
    for block in stored.blocks:
        same = blocks.get((block.module, block.place, block.index))
        candidates = [m for info in same.tensors if (m := linear_map(same, info)) is not None] if same else []
        for info in block.tensors:
            linear = linear_map(block, info)
            if linear is not None and (place := same_map(linear, candidates)) is not None:
                maps[info.name] = place[0].info.name
    return maps


def _fishers(tensors: Tensors, module: Architecture, stored: Architecture) -> Tensors:
    """Fisher diagonals of a module, by `TENSOR.fisher`, in the form and under the names of its checkpoint."""
    keys = {key.removesuffix(".fisher"): key for key in tensors if key.endswith(".fisher")}
    diagonals = restructured(tensors.renamed(keys).only(keys), module, stored)
    return diagonals.renamed({f"{name}.fisher": name for name in diagonals}).only(f"{n}.fisher" for n in stored.named())


def _norm(diagonals: Tensors) -> float | None:
    """The 2-norm of the Fisher diagonal of all tensors."""
    return float(sum(float(t.double().square().sum()) for t in diagonals.values())) ** 0.5 if diagonals else None


def _narrow(axes: Mapping[str, str], grams: Tensors) -> list[str]:
    """Maps that saw fewer rows than they have inputs, so that their Gram alone is singular; one of each axis."""
    measured = {axis: name for axis, name in first_readers(axes).items() if f"{axis}.gram" in grams}
    few = (axis for axis in measured if bool((grams[f"{axis}.count"] < grams.shapes[f"{axis}.gram"][-1]).any()))
    return sorted(measured[axis] for axis in few)
