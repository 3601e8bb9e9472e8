"""Measures a model: Grams of the inputs of its maps, layer by layer, and Fisher diagonals, into a value or a file.

Statistics go by the names of the checkpoint, which may hold tensors apart or together that the module in memory does
not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import MinLen
from mergekit.common import ModelReference
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor, nn

from rotation_merge.architecture import resolve
from rotation_merge.architecture.model import Architecture
from rotation_merge.config import Config, Count, Length, option
from rotation_merge.errors import StatisticsError
from rotation_merge.files import Store
from rotation_merge.model.card import origins
from rotation_merge.model.forms import names_in, restructured
from rotation_merge.model.tensors import Tensors, as_tensors, by_name
from rotation_merge.model.view import View
from rotation_merge.record import versions
from rotation_merge.run.batches import unpadded, with_small_first_batch
from rotation_merge.run.data import Data, described
from rotation_merge.run.fisher import FISHER, LabelScores, fisher_diagonals
from rotation_merge.run.functions import architecture_of, empty_model, load, streamed_model
from rotation_merge.run.maps import maps_of, same_map
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.runner import Runner
from rotation_merge.run.sample_kinds import SAMPLES, SELF
from rotation_merge.run.statistics import NAME, SPACE, Statistics, first_readers, write_error
from rotation_merge.run.store import StateStore
from rotation_merge.workers import Progress, free_memory

INPUTS = "inputs of the maps"
"""Name of the measurement of Grams, shown as progress."""

FITS = 0.75
"""Of the memory that is free: what a model that is held whole may take."""


@config_dataclass(frozen=True)
class MeasureConfig(Config):
    """Options of measuring a model."""

    kinds: Annotated[tuple[Literal["gram", "fisher"], ...], MinLen(1)] = option(("gram",), "what to measure")
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


def default_statistics_path(reference: ModelReference) -> Path:
    """The default place of a model's statistics: beside it (beside its adapter), otherwise here."""
    folder = Path(reference.lora.path if reference.lora is not None else reference.model.path)
    return folder / NAME if folder.is_dir() else Path(NAME)


def model_for(checkpoint: View, options: MeasureConfig, data: str, device: str, by_layer: bool | None) -> Any:
    """The model as measuring it needs it beside its files: with its weights to write text, and for Fisher diagonals.

    Args:
        by_layer: layers read their weights as they run; None: if the model, in float32, does not fit.

    Raises:
        StatisticsError: its Fisher is to be measured by layer.
        CheckpointError: it cannot be run in that way.
    """
    fisher = "fisher" in options.kinds  # with gradients, and their sums in float64
    if not fisher and data != SELF:
        return empty_model(checkpoint)
    if by_layer is None:
        free = torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else free_memory()
        by_layer = (16 if fisher else 4) * sum(map(math.prod, checkpoint.shapes.values())) > FITS * free
    if by_layer and fisher:
        problem = "a Fisher diagonal needs the whole model in memory"
        remedy = "measure the kind 'gram', or use a machine with more memory ('--whole' tries it on this one)"
        raise StatisticsError(problem, where=str(checkpoint.reference), remedy=remedy)
    return streamed_model(checkpoint, device) if by_layer else load(str(checkpoint.reference)).to(device)


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
    model = empty_model(view) if module is None else module
    result = Statistics(as_tensors({}), {}, frozenset(), frozenset())
    with unfinished(out, metadata) as store:
        if "gram" in options.kinds:
            with closing(StateStore(None if store is None else str(store.path), SPACE)) as states:
                result = grams(Runner(view, with_small_first_batch(batches), states, device=device), store, progress)
        if "fisher" in options.kinds:
            scores = LabelScores(data.task, options.labels == "data", options.seed)
            compute = partial(fisher_diagonals, model, architecture_of(model), batches, scores, progress)
            result = replace(result, tensors=result.tensors.replaced(_part(store, FISHER, compute)))
        statistics = _as_stored(result, model, view, metadata)
        if out is not None:
            statistics.write(out)
    return statistics


@contextmanager
def unfinished(out: Path | None, identity: Mapping[str, Any]) -> Iterator[Store | None]:
    """A store of finished parts beside an output, from which the same command continues; None without an output.

    Args:
        identity: key of all inputs and options of the measurement.

    Raises:
        StatisticsError: it cannot be written.
    """
    if out is None:
        yield None
        return
    with Store(str(out)) as store:
        try:
            store.begin(json.dumps(identity, sort_keys=True, default=str))
            yield store
        except OSError as error:
            raise write_error(out, error) from error


def _part(store: Store | None, name: str, compute: Callable[[], dict[str, Tensor]]) -> Tensors:
    """A part of the results, of an interrupted run or computed; in a store it is read when it is asked for."""
    if store is None:
        return as_tensors(compute())
    if store.get(name, mapped=True) is None:
        store.put(name, compute())
    known = as_tensors(store.get(name, mapped=True))
    return Tensors(known.shapes, known.dtypes, by_name(lambda key: store.get(name, mapped=True)[key]))


# --- Grams -----------------------------------------------------------------------------------------------------------


class GramSums:
    """Sums of ``(x, 1) (x, 1)^T`` over the inputs x of maps, in float64, by (block, axis); their last entry counts.

    Inputs are normalised ones if a norm feeds their maps.

    Args:
        axes: by map, the (block, axis) that it reads; inputs of others are not looked at.
    """

    def __init__(self, watched: WatchedBlocks, axes: Mapping[str, str]) -> None:
        self.watched, self.axes = watched, {name: axis for axis, name in first_readers(axes).items()}
        self.sums: dict[str, Tensor] = {}

    def add(self, name: str, expert: int | None, x: Tensor, _: Tensor) -> None:
        """Add the inputs of a map that has run."""
        if (axis := self.axes.get(name)) is None:
            return
        rows = self.watched.normalised(name, x.detach().flatten(0, -2))
        rows = rows if rows.dtype == torch.float64 else rows.float()
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        if axis not in self.sums:
            experts = () if expert is None else (self.watched.maps[name].info.axes[0].size or 1,)
            size = (*experts, rows.shape[1], rows.shape[1])
            self.sums[axis] = torch.zeros(size, dtype=torch.float64, device=x.device)
        self.sums[axis][... if expert is None else expert] += rows.T @ rows

    def means(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Grams, each divided by its number of rows (for each expert separately; zero without rows), and counts."""
        results: dict[str, Tensor] = {}
        for axis, total in self.sums.items():
            count = total[..., -1, -1]
            results[f"{axis}.gram"] = (total / count.clamp(min=1)[..., None, None]).to(dtype)
            results[f"{axis}.count"] = count.round().long().cpu()
        return results


def grams(runner: Runner, store: Store | None = None, progress: Progress = lambda *_: None) -> Statistics:
    """The Grams of all maps that run, under the names of the runner's model; a block's sums in memory at a time.

    Args:
        runner: about to run on samples without padding.
        store: a block that an interrupted run has measured is only run forward; None: all stays in memory.
    """
    watched, total, tensors = WatchedBlocks(runner), len(runner.architecture.blocks), as_tensors({})
    dtype = torch.promote_types(runner.dtype, torch.float32)
    while (block := watched.advance()) is not None:
        progress(INPUTS, len(runner.opened) - 1, total)
        name = f"{INPUTS} {block.name}"
        sums = GramSums(watched, watched.new_axes if store is None or store.get(name, mapped=True) is None else {})
        watched.run(sums.add)
        tensors = tensors.replaced(_part(store, name, partial(sums.means, dtype)))
    progress(INPUTS, total, total)
    return Statistics(tensors, watched.axes, frozenset(watched.split), watched.uncalled)


# --- under the names of the checkpoint -------------------------------------------------------------------------------


def _as_stored(measured: Statistics, model: nn.Module, view: View, metadata: Mapping[str, Any]) -> Statistics:
    """Statistics of a module under the names of its checkpoint.

    Args:
        metadata: of the result, what it holds of itself left out.
    """
    module, buffers = architecture_of(model), {name for name, _ in model.named_buffers()}
    stored = resolve(dict(view.config), list(view), view.name, untie=True)
    readers, names = _maps(module, stored), names_in(module, stored)
    axes = {name: measured.axes[reader] for name, reader in readers.items() if reader in measured.axes}
    known = first_readers(axes)
    grams = measured.tensors.only(f"{axis}.{kind}" for axis in known for kind in ("gram", "count"))
    fishers = _fishers(measured.tensors, module, stored)
    diagonals = fishers.only(f"{name}.fisher" for name in stored.named() if name in view)
    squares = [float(diagonal.double().square().sum()) for diagonal in diagonals.values()]
    sizes = {axis: grams.shapes[f"{axis}.gram"][-1] for axis in known if f"{axis}.gram" in grams}
    facts = {
        "fisher_norm": sum(squares) ** 0.5 if squares else None,
        "narrow": sorted(known[axis] for axis, size in sizes.items() if int(grams[f"{axis}.count"].min()) < size),
        "buffers": sorted(name for name, module_name in names.items() if module_name in buffers),
    }
    uncalled = frozenset(readers) - axes.keys() if axes else frozenset[str]()
    return Statistics(grams.replaced(fishers), axes, measured.split, uncalled, {**metadata, **facts}, view.name)


def _maps(module: Architecture, stored: Architecture) -> dict[str, str]:
    """By the name of each map in a checkpoint, that of the map in memory that it is, or is a part of."""
    blocks = {(block.module, block.place, block.index): block for block in module.blocks}
    maps: dict[str, str] = {}
    for block in stored.blocks:
        same = blocks.get((block.module, block.place, block.index))
        candidates = maps_of(same) if same else []
        for linear in maps_of(block):
            if (place := same_map(linear, candidates)) is not None:
                maps[linear.info.name] = place[0].info.name
    return maps


def _fishers(tensors: Tensors, module: Architecture, stored: Architecture) -> Tensors:
    """Fisher diagonals of a module, by `TENSOR.fisher`, in the form and under the names of its checkpoint."""
    keys = {key.removesuffix(".fisher"): key for key in tensors if key.endswith(".fisher")}
    diagonals = restructured(tensors.renamed(keys).only(keys), module, stored)
    return diagonals.renamed({f"{name}.fisher": name for name in diagonals}).only(f"{n}.fisher" for n in stored.named())
