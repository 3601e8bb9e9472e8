"""Refits in memory: the tasks that a recipe is planned as, done when a tensor is asked for and written nowhere."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from mergekit.config import (
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.graph import Task
from mergekit.io.tasks import LoaderCache, ReturnTensor
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.definitions import architecture_info
from rotation_merge.mergekit_plugin.planning.opened import Loader, Models
from rotation_merge.mergekit_plugin.planning.planner import RotationMergePlanner
from rotation_merge.mergekit_plugin.planning.session import Session, SessionConfiguration
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask
from rotation_merge.mergekit_plugin.recipe.document import Document
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.view import View


class PlannedMerge:
    """A merge that is planned, its tensors computed when they are asked for.

    Args:
        tasks: of all output tensors.
        models: in memory.
        seed: of what delegates draw; each tensor draws its own numbers, in whatever order tensors are asked for.
    """

    def __init__(self, tasks: Sequence[ReturnTensor], models: Sequence[View], seed: int = 0) -> None:
        self.tasks = {task.weight_info.name: task for task in tasks}
        self.models, self.seed = models, seed
        self._whole: dict[Task[Any], Any] = {}
        self._block: dict[Task[Any], Any] = {}
        self._label: str | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.tasks

    def __getitem__(self, name: str) -> Tensor:
        task = self.tasks[name]
        if (label := _block_label(name)) != self._label:
            self._block, self._label = {}, label
        with self._loaders(), seeded(zlib.crc32(f"{self.seed} {name}".encode())):
            tensor: Tensor = self._result(task)
        return tensor

    def _result(self, task: Task[Any]) -> Any:
        """Result of a task. Results for whole models, and those shared by a block's tensors, are computed once."""
        for known in (self._whole, self._block):
            if task in known:
                return known[task]
        result = task.execute(**{name: self._result(needed) for name, needed in task.arguments().items()})
        if task.main_thread_only():
            self._whole[task] = result
        elif isinstance(task, KeyedTask) and "tensors" not in task.arguments():  # shared by tensors
            self._block[task] = result
        return result

    @contextmanager
    def _loaders(self) -> Iterator[None]:
        """Within the block, mergekit's tasks read these models; afterwards its cache is restored."""
        before = {model.reference: LoaderCache.loaders.get(model.reference) for model in self.models}
        LoaderCache.loaders.update({model.reference: Loader(model, wide=True) for model in self.models})
        try:
            yield
        finally:
            for reference, loader in before.items():
                if loader is None:
                    LoaderCache.loaders.pop(reference, None)
                else:
                    LoaderCache.loaders[reference] = loader


def _block_label(name: str) -> str:
    """The common prefix of a layer's tensor names, up to the layer's number."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


def merge_views(
    views: Sequence[View],
    named: Sequence[View],
    document: Document,
    samples: Sequence[list[dict[str, Tensor]]],
    seed: int,
) -> View:
    """Models in shared coordinates, merged by the delegate refit.

    Args:
        views: the first is the base.
        named: the same ones with distinct names.
        document: the recipe.
        samples: of each model.
    """
    models = Models(MergeOptions(quiet=True, random_seed=seed))
    for i, model in enumerate(named):
        models.samples[models.hold(model)] = samples[i]
    planned, notes = _plan(document, models, named)
    first = views[0]

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        stored = [first.stored_dtypes.get(name) for name in info.names]
        pieces = []
        for name, stored_dtype in zip(info.names, stored, strict=True):
            if stored_dtype is not None and not stored_dtype.is_floating_point:
                pieces.append(first[name])
            elif name in planned:
                pieces.append(planned[name])
        if len(pieces) < len(info.names):
            return None
        tensor = torch.stack(pieces) if info.stacked else pieces[0]
        result_dtype = dtype or first.dtype or stored[0]
        return tensor.to(result_dtype) if tensor.is_floating_point() and result_dtype is not None else tensor

    return first.blockwise(compute, first.dtype, left_out=first.left_out, notes=(*first.notes, *notes))


def _plan(document: Document, models: Models, held: Sequence[View]) -> tuple[PlannedMerge, list[str]]:
    """The tasks of a merge of models in memory, and its notes.

    Raises:
        RotationMergeError: as for a recipe, with the places of Python's arguments.
    """
    recipe = Recipe.of(document)
    session = Session(recipe, models, Run(watched=False))
    session.recipe = replace(recipe, config=_in_slices(recipe.config, held))
    config = SessionConfiguration.of(session)
    options = models.options
    planner = RotationMergePlanner(config, architecture_info(config, options), options, SimpleNamespace())
    return PlannedMerge(planner.plan_in_memory(), held, options.random_seed or 0), session.run.notes


def _in_slices(config: MergeConfiguration, held: Sequence[View]) -> MergeConfiguration:
    """The recipe with all layers of all models as slices, for which mergekit needs no files."""
    modules = {}
    for module in held[0].architecture.layers_key:
        sources = [
            InputSliceDefinition(
                model=entry.model,
                layer_range=(0, len(model.architecture.layers(module))),
                parameters=entry.parameters,
            )
            for entry, model in zip(config.models or [], held, strict=True)
        ]
        modules[module] = OutputModuleDefinition(slices=[OutputSliceDefinition(sources=sources)])
    return config.model_copy(update={"models": None, "modules": modules})
