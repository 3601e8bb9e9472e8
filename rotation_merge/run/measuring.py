"""Measures the model of a checkpoint: in memory or layer by layer, into a value or a file.

Statistics go by the names of the checkpoint, which may hold tensors apart or together that the module in memory does
not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from torch import Tensor, nn

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.model.forms import names_in, restructured
from rotation_merge.model.origin import origins
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.record import versions
from rotation_merge.run.data import Data, described, unpadded, with_small_first_batch
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.layers import LayerwiseMeasurement
from rotation_merge.run.maps import linear_map, same_map
from rotation_merge.run.measure import MeasureConfig, ModelMeasurement
from rotation_merge.run.passes import Progress, UnfinishedMeasurement, together
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics import NAME, SPACE, Statistics
from rotation_merge.run.store import StateStore
from rotation_merge.run.sums import first_readers

Batches = Sequence[dict[str, Tensor]]


def default_statistics_path(reference: ModelReference) -> Path:
    """The default place of a model's statistics: beside it (beside its adapter), otherwise here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def record(
    checkpoint: View,
    module: nn.Module | None,
    data: Data,
    source: str,
    options: MeasureConfig,
    out: Path,
    progress: Progress,
    device: str = "cpu",
) -> Statistics:
    """Measure a model and write its statistics; what was interrupted continues.

    Args:
        module: the model, loaded, on the device where it is to run; None: it is run layer by layer, from the files.
        source: name of the data.

    Raises:
        RotationMergeError: the model or the data do not allow it, or there is no place to write; nothing is left behind
            except an earlier run's results.
    """
    batches = unpadded(data.batches, source)
    origin = {"model": str(checkpoint.reference), "models": origins([checkpoint.reference])}
    metadata = _metadata(checkpoint, origin, data, source, batches, options)
    os.makedirs(out.resolve().parent, exist_ok=True)
    with UnfinishedMeasurement(out, metadata) as state:
        if module is None:
            measured, architecture = _by_layer(checkpoint, batches, state, progress, device)
        else:
            measurement = ModelMeasurement(module, architecture_of(module), batches, data.task)
            measured, architecture = measurement.run(options, state, progress), measurement.architecture
        statistics = as_stored(measured, architecture, checkpoint, metadata)
        statistics.write(out)
    return statistics


def measured_in_memory(module: nn.Module, opened: View, data: Data, options: MeasureConfig) -> Statistics:
    """Measure a model that is in memory.

    Args:
        module: in evaluation mode; left as it is.
        opened: the same one; the statistics go by its names.

    Raises:
        RotationMergeError: the model or the data do not allow it.
    """
    batches = unpadded(data.batches, data.source)
    measurement = ModelMeasurement(module, architecture_of(module), batches, data.task)
    measured = measurement.run(options, None, lambda *_: None)
    metadata = _metadata(opened, {}, data, data.source, batches, options)
    return as_stored(measured, measurement.architecture, opened, metadata)


def _metadata(
    view: View, origin: Mapping[str, Any], data: Data, source: str, batches: Batches, options: MeasureConfig
) -> dict[str, Any]:
    """What statistics are of: model, samples and options."""
    return {
        "model": view.name,
        "fingerprint": view.fingerprint,
        "family": view.architecture.family,
        **origin,
        **described(data, source, batches),
        "kinds": sorted(options.kinds),
        "labels": options.labels,
        "seed": options.seed,
        "versions": versions(),
    }


def _by_layer(
    checkpoint: View, batches: Batches, state: UnfinishedMeasurement, progress: Progress, device: str
) -> tuple[Statistics, Architecture]:
    """The statistics, and the architecture whose names they have."""
    states = StateStore(str(state.path), SPACE)
    config, batches = checkpoint.transformers_config, with_small_first_batch(batches)
    runner = Runner(config, checkpoint.tensors, checkpoint.architecture, batches, states, device=device)
    try:
        return LayerwiseMeasurement(runner, state, progress).run(), runner.architecture
    finally:
        states.close()


def as_stored(measured: Statistics, module: Architecture, view: View, metadata: Mapping[str, Any]) -> Statistics:
    """Statistics of a module under the names of its checkpoint.

    Args:
        module: whose names they have.
        metadata: of the result, what it holds of itself left out.
    """
    stored = resolve(dict(view.config), view.names, view.name, untie=True)
    readers, names = _maps(module, stored), names_in(module, stored)
    axes = {name: measured.axes[reader] for name, reader in readers.items() if reader in measured.axes}
    inputs = dict.fromkeys(axes.values())
    grams = measured.tensors.only(f"{axis}.{kind}" for axis in inputs for kind in ("gram", "count"))
    fishers, buffers = _fishers(measured.tensors, module, stored), measured.metadata.get("buffers", ())
    facts = {
        "fisher_norm": _norm(fishers.only(f"{name}.fisher" for name in stored.named() if name in view)),
        "narrow": _narrow(axes, grams),
        "buffers": sorted(name for name, ours in names.items() if ours in buffers),
    }
    uncalled = frozenset(readers) - axes.keys()
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
