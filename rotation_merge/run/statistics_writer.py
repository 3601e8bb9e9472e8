"""Measures a model on samples and writes its statistics file: its header and its place.

Statistics go by the names of the checkpoint, which may hold tensors apart or together that the module in memory does
not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from torch import Tensor, nn

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import RotationMergeError
from rotation_merge.files import write_text
from rotation_merge.model.card import MEASURED, kept_figures
from rotation_merge.model.open import open_model
from rotation_merge.model.origin import origins
from rotation_merge.model.view import View
from rotation_merge.record import versions
from rotation_merge.run.data import Data, described, unpadded, with_small_first_batch
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.layers import LayerwiseMeasurement
from rotation_merge.run.maps import LinearMap, linear_map, same_map
from rotation_merge.run.measure import MeasureConfig, MeasuredStatistics, ModelMeasurement
from rotation_merge.run.passes import Progress, UnfinishedMeasurement
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics_file import NAME, SPACE, DeferredTensor, Statistics, write_statistics
from rotation_merge.run.store import StateStore


def checkpoint_of(name: str) -> View:
    """A model as a user names it, its files looked at.

    Raises:
        CheckpointError: it is not there, or not whole.
    """
    return open_model(name, any_base=True)


def default_statistics_path(reference: ModelReference) -> Path:
    """The default place of a model's statistics: beside it (beside its adapter), otherwise here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def record(
    checkpoint: View,
    model: nn.Module | None,
    data: Data,
    source: str,
    options: MeasureConfig,
    out: Path,
    progress: Progress,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure a model and write its statistics; gives the head of the file.

    Args:
        checkpoint: source of the model.
        model: loaded, on the device where it is to run; None: it is run layer by layer, from the files.
        source: name of the data.

    Raises:
        RotationMergeError: the model or the data do not allow it, or there is no place to write; nothing is left behind
            except an earlier run's results.
    """
    batches = unpadded(data.batches, source)
    metadata: dict[str, Any] = {
        "model": str(checkpoint.reference),
        "fingerprint": checkpoint.fingerprint,
        "family": checkpoint.architecture.family,
        "models": origins([checkpoint.reference]),
        **_of_samples(data, source, batches, options),
    }
    os.makedirs(out.resolve().parent, exist_ok=True)
    with UnfinishedMeasurement(out, metadata) as state:
        measured, architecture = _measured(checkpoint, model, batches, data.task, options, state, progress, device)
        whole = resolve(checkpoint.config, checkpoint.names, str(checkpoint.reference), untie=True)
        named = as_stored(measured, architecture, whole)
        write_statistics(out, named.tensors, _head(metadata, measured, named, checkpoint.names))
    return metadata


def measured_in_memory(model: nn.Module, opened: View, data: Data, options: MeasureConfig) -> Statistics:
    """Measure a model that is in memory.

    Args:
        model: in evaluation mode; left as it is.
        opened: the same one; the statistics go by its names.

    Raises:
        RotationMergeError: the model or the data do not allow it.
    """
    batches = unpadded(data.batches, data.source)
    metadata: dict[str, Any] = {
        "model": opened.name,
        "fingerprint": opened.fingerprint,
        "family": opened.architecture.family,
        **_of_samples(data, data.source, batches, options),
    }
    measurement = ModelMeasurement(model, architecture_of(model), batches, data.task)
    measured = measurement.run(options, None, lambda *_: None)
    whole = resolve(dict(opened.config), list(opened.names), opened.name, untie=True)
    named = as_stored(measured, measurement.architecture, whole)
    return Statistics.held(named.tensors, _head(metadata, measured, named, opened.names), opened.name)


def _of_samples(
    data: Data, source: str, batches: Sequence[dict[str, Tensor]], options: MeasureConfig
) -> dict[str, Any]:
    """Header entries of a statistics file on samples and options."""
    return {
        **described(data, source, batches),
        "kinds": sorted(options.kinds),
        "labels": options.labels,
        "seed": options.seed,
        "versions": versions(),
    }


def _head(
    metadata: dict[str, Any], measured: MeasuredStatistics, named: NamedStatistics, names: Sequence[str]
) -> dict[str, str]:
    """The head of a statistics file; completes `metadata`."""
    metadata["fisher_norm"] = _norm(named, names)
    metadata["narrow"] = _narrow(named)
    metadata["buffers"] = sorted(named.buffers)
    return {
        "made": json.dumps(metadata, sort_keys=True, default=str),
        "inputs": json.dumps(named.inputs, sort_keys=True),
        "split": json.dumps(sorted(named.split)),
        "uncalled": json.dumps(sorted(named.uncalled)),
    }


def _measured(
    checkpoint: View,
    model: nn.Module | None,
    batches: Sequence[dict[str, Tensor]],
    task: str,
    options: MeasureConfig,
    state: UnfinishedMeasurement,
    progress: Progress,
    device: str,
) -> tuple[MeasuredStatistics, Architecture]:
    """The measured statistics, and the architecture whose names they have."""
    if model is not None:
        measurement = ModelMeasurement(model, architecture_of(model), batches, task)
        return measurement.run(options, state, progress), measurement.architecture
    states = StateStore(str(state.path), SPACE)
    config = checkpoint.transformers_config
    runner = Runner(
        config, checkpoint.tensors, checkpoint.architecture, with_small_first_batch(batches), states, device=device
    )
    try:
        return LayerwiseMeasurement(runner, state, progress).run(), runner.architecture
    finally:
        states.close()


def _norm(named: NamedStatistics, stored: Sequence[str]) -> float | None:
    """The 2-norm of the Fisher diagonal of all tensors."""
    diagonals = [tensor for key, tensor in named.tensors.items() if key.removesuffix(".fisher") in stored]
    return float(sum(float(t.load().double().square().sum()) for t in diagonals)) ** 0.5 if diagonals else None


def _narrow(named: NamedStatistics) -> list[str]:
    """Maps that saw fewer rows than they have inputs, so that their Gram alone is singular."""

    def few(name: str, gram: DeferredTensor) -> bool:
        count: Tensor = named.tensors[f"{name}.count"].load()
        return bool((count < gram.shape[-1]).any())

    grams = {key.removesuffix(".gram"): tensor for key, tensor in named.tensors.items() if key.endswith(".gram")}
    return sorted(name for name, gram in grams.items() if few(name, gram))


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
    data_facts = {key: facts[key] for key in ("data", "task", "examples")}
    pipeline = PIPELINES.get(str(facts["task"]), f"{'image' if images else 'text'}-classification")
    measurement = {
        **data_facts,
        "pipeline": pipeline,
        "figures": dict(figures),
        "fingerprint": checkpoint_of(name).fingerprint,
    }
    other_data = [entry for entry in kept_figures(name) if entry["data"] != data_facts["data"]]
    write_text(
        os.path.join(name, MEASURED),
        json.dumps([*other_data, {**measurement, "versions": versions()}], indent=1) + "\n",
    )


@dataclass
class NamedStatistics:
    """Statistics under a checkpoint's names; see `file.Statistics`."""

    tensors: dict[str, DeferredTensor]
    inputs: dict[str, str]
    split: list[str]
    uncalled: list[str]
    buffers: list[str]


def as_stored(measured: MeasuredStatistics, module: Architecture, stored: Architecture) -> NamedStatistics:
    """Statistics of a module, `module`, under the names of its checkpoint, `stored`."""
    ours = {(b.module, b.place, b.index): b for b in module.blocks}
    named = NamedStatistics({}, {}, [], [], [])
    leaders: dict[str, str] = {}
    for block in stored.blocks:
        same = ours.get((block.module, block.place, block.index))
        if same is None:
            continue
        candidates = [m for info in same.tensors if (m := linear_map(same, info)) is not None]
        for info in block.tensors:
            linear = linear_map(block, info)
            place = None if linear is None else same_map(linear, candidates)
            if linear is not None and place is not None:
                _name_map(named, measured, leaders, linear, place[0])
            _name_fisher(named, measured, same, info, place)
    return named


def _name_map(
    named: NamedStatistics,
    measured: MeasuredStatistics,
    leaders: dict[str, str],
    linear: LinearMap,
    ours: LinearMap,
) -> None:
    name, tensors = linear.info.name, measured.tensors
    if ours.info.name in measured.uncalled:
        named.uncalled.append(name)
        return
    leader = measured.shared[ours.info.name]
    if leader not in leaders:
        leaders[leader] = name
        for statistic in ("gram", "count"):
            if f"{leader}.{statistic}" in tensors:
                named.tensors[f"{name}.{statistic}"] = tensors[f"{leader}.{statistic}"]
        if leader in measured.split:
            named.split.append(name)
    named.inputs[name] = leaders[leader]


def _name_fisher(
    named: NamedStatistics,
    measured: MeasuredStatistics,
    same: Block,
    info: TensorInfo,
    place: tuple[LinearMap, slice] | None,
) -> None:
    ours = same.tensor(info.key) if place is None else place[0].info
    if ours is None:
        return
    for number, name in enumerate(info.names):
        whole = len(ours.names) != len(info.names)
        module_name = ours.names[0 if whole else number]
        stored = measured.tensors.get(f"{module_name}.fisher")
        if stored is None:
            named.buffers += [name] if module_name in measured.buffers else []
            continue
        if place is not None:
            dim = place[0].gives - (len(stored.shape) != len(ours.axes))
            stored = _cut(stored, dim - len(stored.shape), place[1])
        named.tensors[f"{name}.fisher"] = _row(stored, number) if whole and info.stacked else stored


def _cut(stored: DeferredTensor, dim: int, part: slice) -> DeferredTensor:
    """A piece of a tensor along one (negative) dimension."""
    index: list[slice] = [slice(None)] * len(stored.shape)
    shape = list(stored.shape)
    index[dim] = part
    shape[dim] = len(range(*part.indices(shape[dim])))
    return DeferredTensor(tuple(shape), stored.dtype, _then(stored.load, lambda tensor: tensor[tuple(index)]))


def _row(stored: DeferredTensor, number: int) -> DeferredTensor:
    return DeferredTensor(stored.shape[1:], stored.dtype, _then(stored.load, lambda tensor: tensor[number]))


def _then(load: Callable[[], Tensor], change: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
    return lambda: change(load())
