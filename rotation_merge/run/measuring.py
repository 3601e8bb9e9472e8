"""From a model and samples to its statistics file: what is written at the head, and where the file lies."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.options import MergeOptions
from torch import Tensor, nn

from rotation_merge.architecture import Architecture, resolve
from rotation_merge.errors import RotationMergeError
from rotation_merge.files.durable import write_text
from rotation_merge.model.card import MEASURED, measured_in
from rotation_merge.model.checkpoint import Model, Models, parse_reference
from rotation_merge.model.opened import OpenedModel
from rotation_merge.model.origin import origins
from rotation_merge.record import versions
from rotation_merge.run.data import Data, described, first_apart, unpadded
from rotation_merge.run.functions import architecture_of
from rotation_merge.run.layers import ByLayer
from rotation_merge.run.measure import MeasureConfig, Measured, Measurement
from rotation_merge.run.naming import Named, as_stored
from rotation_merge.run.passes import Progress, Unfinished
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics_file import NAME, SPACE, Statistics, Stored, write_statistics
from rotation_merge.run.store import Store


def checkpoint_of(name: str) -> Model:
    """A model as a user names it, its files looked at.

    Raises:
        CheckpointError: it is not there, or not whole.
    """
    found = Models(MergeOptions())[parse_reference(name)]
    found.check_files()
    return found


def place_beside(reference: ModelReference) -> Path:
    """Where a model's statistics lie if nothing else is said: beside it (beside its adapter), else here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def record(
    checkpoint: Model,
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
        checkpoint: what the model was loaded from.
        model: loaded, on the device where it is to run; None: it is run layer by layer, from the files.
        source: what the data are called.

    Raises:
        RotationMergeError: the model or the data do not allow it, or there is no place to write; nothing is left behind
            but what an earlier run had done.
    """
    batches = unpadded(data.batches, source)
    made: dict[str, Any] = {
        "model": str(checkpoint.reference),
        "fingerprint": checkpoint.fingerprint,
        "family": checkpoint.architecture.family,
        "models": origins([checkpoint.reference]),
        **described(data, source, batches),
        "kinds": sorted(options.kinds),
        "rank": options.rank,
        "labels": options.labels,
        "seed": options.seed,
        "versions": versions(),
    }
    os.makedirs(out.resolve().parent, exist_ok=True)
    with Unfinished(out, made) as state:
        measured, own = _measured(checkpoint, model, batches, data.task, options, state, progress, device)
        whole = resolve(checkpoint.config, checkpoint.names, str(checkpoint.reference), untie=True)
        named = as_stored(measured, own, whole)
        write_statistics(out, named.tensors, _head(made, measured, named, checkpoint.names))
    return made


def measured_in_memory(model: nn.Module, opened: OpenedModel, data: Data, options: MeasureConfig) -> Statistics:
    """Measure a model that is in memory.

    Args:
        model: in evaluation mode; left as it is.
        opened: the same one; the statistics go by its names.

    Raises:
        RotationMergeError: the model or the data do not allow it.
    """
    batches = unpadded(data.batches, data.source)
    made: dict[str, Any] = {
        "model": opened.name,
        "fingerprint": opened.mark.hexdigest(opened.config),
        "family": opened.architecture.family,
        **described(data, data.source, batches),
        "kinds": sorted(options.kinds),
        "rank": options.rank,
        "labels": options.labels,
        "seed": options.seed,
        "versions": versions(),
    }
    measurement = Measurement(model, architecture_of(model), batches, data.task)
    measured = measurement.run(options, None, lambda *_: None)
    whole = resolve(dict(opened.config), list(opened.names), opened.name, untie=True)
    named = as_stored(measured, measurement.architecture, whole)
    return Statistics.held(named.tensors, _head(made, measured, named, opened.names), opened.name)


def _head(made: dict[str, Any], measured: Measured, named: Named, names: Sequence[str]) -> dict[str, str]:
    """The head of a statistics file; completes `made`."""
    made["loss_scale"] = measured.loss_scale
    made["fisher_norm"] = _norm(named, names)
    made["narrow"] = _narrow(named)
    made["buffers"] = sorted(named.buffers)
    return {
        "made": json.dumps(made, sort_keys=True, default=str),
        "inputs": json.dumps(named.inputs, sort_keys=True),
        "split": json.dumps(sorted(named.split)),
        "behind": json.dumps(sorted(named.behind)),
        "uncalled": json.dumps(sorted(named.uncalled)),
    }


def _measured(
    checkpoint: Model,
    model: nn.Module | None,
    batches: Sequence[dict[str, Tensor]],
    task: str,
    options: MeasureConfig,
    state: Unfinished,
    progress: Progress,
    device: str,
) -> tuple[Measured, Architecture]:
    """What was found, and the architecture by whose names it goes."""
    if model is not None:
        measurement = Measurement(model, architecture_of(model), batches, task)
        return measurement.run(options, state, progress), measurement.architecture
    states = Store(str(state.folder), SPACE)
    config = checkpoint.transformers_config
    runner = Runner(config, checkpoint, checkpoint.architecture, first_apart(batches), states, device=device)
    try:
        return ByLayer(runner, options, state, progress).run(), runner.architecture
    finally:
        states.close()


def _norm(named: Named, stored: Sequence[str]) -> float | None:
    """The 2-norm of the whole Fisher diagonal."""
    found = [tensor for key, tensor in named.tensors.items() if key.removesuffix(".fisher") in stored]
    return float(sum(float(t.load().double().square().sum()) for t in found)) ** 0.5 if found else None


def _narrow(named: Named) -> list[str]:
    """Maps that saw fewer rows than they have inputs, so that their Gram alone is singular."""

    def few(name: str, gram: Stored) -> bool:
        count: Tensor = named.tensors[f"{name}.count"].load()
        return bool((count < gram.shape[-1]).any())

    grams = {key.removesuffix(".gram"): tensor for key, tensor in named.tensors.items() if key.endswith(".gram")}
    return sorted(name for name, gram in grams.items() if few(name, gram))


PIPELINES = {"next token": "text-generation", "masked token": "fill-mask", "similarity": "sentence-similarity"}
"""What the hub calls tasks; all others classify."""


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
        raise RotationMergeError("figures are kept beside a model", where=name, remedy="name a folder")
    own = {key: facts[key] for key in ("data", "task", "examples")}
    pipeline = PIPELINES.get(str(facts["task"]), f"{'image' if images else 'text'}-classification")
    one = {**own, "pipeline": pipeline, "figures": dict(figures), "fingerprint": checkpoint_of(name).fingerprint}
    kept = [other for other in measured_in(name) if other["data"] != own["data"]]
    write_text(os.path.join(name, MEASURED), json.dumps([*kept, {**one, "versions": versions()}], indent=1) + "\n")
