"""Merges in memory: the tasks that a recipe is planned as, done when a tensor is asked for and written nowhere."""

from __future__ import annotations

import keyword
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
from mergekit.merge_methods.base import MergeMethod, ParameterScope
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.errors import RecipeError, RotationMergeError, nearest
from rotation_merge.linalg.seeding import seeded
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.definitions import architecture_info
from rotation_merge.mergekit_plugin.document import METHOD, Document
from rotation_merge.mergekit_plugin.keys import BY_NAME, OPTIONS
from rotation_merge.mergekit_plugin.planning.opened import Loader, Models
from rotation_merge.mergekit_plugin.planning.planner import RotationMergePlanner
from rotation_merge.mergekit_plugin.planning.session import Session, SessionConfiguration
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.view import View

MERGING = ("exclude", "heads_of", "targets", "start", "spill")
"""Our parameters of merging, as opposed to aligning."""

STILL = {"attention": "none", "heads": "none", "ffn": "none", "scaling": False}
"""Models that are averaged stay where they are."""


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


def renamed_views(views: Sequence[View]) -> list[View]:
    """The same with distinct names, without the marks of revisions and adapters."""
    names: list[str] = []
    for view in views:
        plain = re.sub(r"[+@]", " with ", view.name)
        if view.files is None:  # whose name is not to be looked for on the hub
            plain += " (in memory)"
        number = sum(name == plain or name.startswith(f"{plain} (") for name in names)
        names.append(f"{plain} ({number + 1})" if number else plain)
    return [replace(view, name=name) for view, name in zip(views, names, strict=True)]


def merge_views(
    views: Sequence[View],
    named: Sequence[View],
    method: str,
    parameters: Mapping[str, Any] | None,
    of_model: Sequence[Mapping[str, Any]],
    statistics: Sequence[Any],
    samples: Sequence[list[dict[str, Tensor]]],
    seed: int,
) -> View:
    """Models in shared coordinates, merged by a delegate.

    Args:
        views: the first is the base.
        named: the same ones as `renamed_views` gives them.
        method: of mergekit, or our own.
        parameters: of the delegate; a name that is a keyword of Python may end in an underscore.
        of_model: parameters of single models.
        statistics, samples: of each model, where the delegate takes them.

    Raises:
        RotationMergeError: there is no such delegate or parameter, or the models do not fit together.
    """
    delegate = delegate_of(method)
    names = [model.name for model in named]
    models = Models(MergeOptions(quiet=True, random_seed=seed))
    for i, model in enumerate(named):
        reference = models.hold(model)
        if statistics:
            models.statistics[reference] = statistics[i]
        if samples:
            models.samples[reference] = samples[i]
    for name in parameters or {}:
        if name in BY_NAME and name not in MERGING and name not in [p.name for p in delegate.spec.parameters]:
            raise _misplaced(name)
    shared = {name.rstrip("_") if keyword.iskeyword(name[:-1]) else name: x for name, x in (parameters or {}).items()}
    value = {
        "merge_method": METHOD,
        "base_model": names[0],
        "models": [
            {"model": name, "parameters": dict(of_model[i]) if of_model else {}} for i, name in enumerate(names)
        ],
        "parameters": {**_needed(delegate, shared), **STILL, **shared, "delegate": method},
    }
    planned, notes = _plan(Document(value), models, named)
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


def _misplaced(name: str) -> RecipeError:
    """The error for a parameter of recipes that an average does not have."""
    if name in (*OPTIONS, "match_on", "untie"):
        problem = f"'{name}' is an alignment option, but average does not align"
        return RecipeError(problem, remedy="give it to rotation_merge.align, and average alignment.apply(donor)")
    problem = f"'{name}' is a parameter of recipes, which average does not have"
    return RecipeError(problem, remedy="leave it out, or write a recipe for mergekit-yaml")


def delegate_of(method: str) -> MergeMethod:
    """A delegate by its name.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    known = delegates.names()
    if method not in known:
        raise RecipeError(f"there is no merge method {method!r}", remedy=nearest(str(method), known))
    return delegates.get(method)


def _needed(delegate: MergeMethod, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Equal weights where the delegate asks for weights and none are given."""
    specs = [p for p in delegate.spec.parameters if p.name == "weight" and p.scope != ParameterScope.SHARED]
    return {"weight": 1.0} if specs and specs[0].required and "weight" not in parameters else {}


def _plan(document: Document, models: Models, held: Sequence[View]) -> tuple[PlannedMerge, list[str]]:
    """The tasks of a merge of models in memory, and its notes.

    Raises:
        RotationMergeError: as for a recipe, with the places of Python's arguments.
    """
    try:
        recipe = Recipe.of(document)
        session = Session(recipe, models, Run(watched=False))
        session.recipe = replace(recipe, config=_in_slices(recipe.config, held))
        config = SessionConfiguration.of(session)
        options = models.options
        planner = RotationMergePlanner(config, architecture_info(config, options), options, SimpleNamespace())
        return PlannedMerge(planner.plan_in_memory(), held, options.random_seed or 0), session.run.notes
    except RotationMergeError as error:
        place = re.sub(r"\bparameters\b\.?", "", error.where or "").rstrip(".") or None
        raise type(error)(error.what, where=place, remedy=error.remedy) from None


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
