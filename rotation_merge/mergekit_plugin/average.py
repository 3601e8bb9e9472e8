"""`rotation_merge.average`: its call judged as a recipe is, and its models averaged in memory, without a plan."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, OutputSliceDefinition
from mergekit.merge_methods.base import MergeMethod, ParameterScope
from mergekit.parameter_resolver import resolve_parameters
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.average import averaged
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.models import MergedModels, MergeLog
from rotation_merge.errors import RecipeError, RotationMergeError, nearest, not_written, short
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import as_donor, check_pair, check_shapes
from rotation_merge.matching.statistics import moved_statistics
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.document import METHOD, Document
from rotation_merge.mergekit_plugin.keys import BY_NAME, MERGING, OPTIONS, RELATIONS, UNMOVED
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.labels import LabelRows, in_class_order
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids
from rotation_merge.run.data import unpadded
from rotation_merge.run.functions import Batch
from rotation_merge.run.statistics import Statistics

NOT_IN_PYTHON = ("unsupported", "statistics", "data", "samples")
"""Parameters of merging that Python's call has as arguments of its own, or not at all."""


def delegate_of(method: str) -> MergeMethod:
    """A merge method by its name.

    Raises:
        RecipeError: there is none; names the nearest.
    """
    if not isinstance(method, str):
        problem = f"the method is of type {type(method).__name__}"
        raise RecipeError(problem, remedy="give its name, such as 'linear'; weights are the keyword 'weights'")
    known = delegates.names()
    if method not in known:
        raise RecipeError(f"there is no merge method {method!r}", remedy=nearest(method, known))
    return delegates.get(method)


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


def recipe_of(
    method: str, views: Sequence[View], parameters: Mapping[str, Any], of_model: Sequence[Mapping[str, Any]]
) -> Recipe:
    """A call as the recipe that it amounts to, checked as one.

    Args:
        views: with distinct names, the base first.
        parameters: of the method; a name that is a keyword of Python may end in an underscore.
        of_model: parameters of single models.

    Raises:
        RecipeError: there is no such method or parameter, or a value means nothing.
    """
    delegate = delegate_of(method)
    for name in parameters:
        ours = name in BY_NAME and (name not in MERGING or name in NOT_IN_PYTHON)
        if ours and name not in [spec.name for spec in delegate.spec.parameters]:
            raise _misplaced(name)
    shared = {name.rstrip("_") if keyword.iskeyword(name[:-1]) else name: x for name, x in parameters.items()}
    value = {
        "merge_method": METHOD,
        "base_model": views[0].name,
        "models": [
            {"model": view.name, "parameters": dict(model_parameters)}
            for view, model_parameters in zip(views, of_model, strict=True)
        ],
        "parameters": {**_needed(delegate, shared), **RELATIONS[UNMOVED], **shared, "delegate": method},
    }
    return Recipe.of(Document(value))


def _misplaced(name: str) -> RecipeError:
    """The error for a parameter of recipes that an average does not have."""
    if name in (*OPTIONS, "match_on", "untie"):
        problem = f"'{name}' is an alignment option, but average does not align"
        return RecipeError(problem, remedy="give it to rotation_merge.align, and average alignment.apply(donor)")
    problem = f"'{name}' is a parameter of recipes, which average does not have"
    return RecipeError(problem, remedy="leave it out, or write a recipe for mergekit-yaml")


def _needed(delegate: MergeMethod, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Equal weights where the delegate asks for weights and none are given."""
    specs = [p for p in delegate.spec.parameters if p.name == "weight" and p.scope != ParameterScope.SHARED]
    return {"weight": 1.0} if specs and specs[0].required and "weight" not in parameters else {}


@contextmanager
def python_places() -> Iterator[None]:
    """Errors of recipes, raised within, name the arguments of Python's call."""
    try:
        yield
    except RotationMergeError as error:
        place = re.sub(r"\bparameters\b\.?", "", error.where or "").rstrip(".") or None
        raise type(error)(error.what, where=place, remedy=error.remedy) from None


def resolved(
    recipe: Recipe, reader: ConfigReader, name: str, inputs: Mapping[ModelReference, str]
) -> tuple[dict[str, Any], dict[ModelReference, dict[str, Any]]]:
    """The delegate's parameters for an output tensor, by mergekit: those of all models, and those of each.

    Args:
        inputs: its name in each model.

    Raises:
        RecipeError: a required parameter has no value for the tensor.
    """
    base = None if recipe.plain else recipe.base
    spec, sources, t = recipe.delegate.spec, reader.parameter_sources, reader.t
    try:
        return resolve_parameters(spec, tensor_name=name, inputs=inputs, sources=sources, base_model=base, t=t)
    except RuntimeError as error:
        raise RecipeError(short(error), remedy="give it a value for every tensor") from error


def check_parameters(
    recipe: Recipe, method: OwnMethod, name: str, shared: Mapping[str, Any], weights: Mapping[Any, float]
) -> None:
    """Find what is wrong with a method's parameters for an output tensor.

    Args:
        weights: of the models, as the method knows them.

    Raises:
        RotationMergeError: weights are of no use, or every model keeps its head, and the method transports streams.
    """
    if recipe.value("heads_of") == "each" and shared.get("stream") == "transport":
        problem = "'heads_of: each' puts the body under every donor's head, but plans of the stream do not move heads"
        raise RecipeError(problem, where="parameters", remedy="add 'stream: identity'")
    method.participants(name, weights, shared)


def _tensor_parameters(recipe: Recipe, anchor: View, method: MergeMethod) -> Callable[[str], dict[str, Any]]:
    """Gives the parameters of an output tensor; of those with a value for each model a mapping by their numbers."""
    places, listed = anchor.architecture.places(), recipe.config.models or []
    inputs = OutputSliceDefinition.model_construct(sources=listed, base_model=None, parameters=None)

    def parameters(name: str) -> dict[str, Any]:
        block = places[name][0]
        last = len(anchor.architecture.layers(block.module)) - 1
        t = 0.0 if block.index is None else block.index / last if last else 1.0
        reader = ConfigReader.model_construct(config=recipe.config, t=t, slice_out=inputs, module=None)
        shared, each = resolved(recipe, reader, name, {entry.model: name for entry in listed})
        by_number = {number: each[entry.model] for number, entry in enumerate(listed)}
        names = {key for values in each.values() for key in values}
        of_models = {key: {m: values[key] for m, values in by_number.items() if key in values} for key in names}
        if isinstance(method, OwnMethod):
            check_parameters(recipe, method, name, shared, of_models["weight"])
        return {**shared, **of_models}

    return parameters


def _brought_together(views: Sequence[View], recipe: Recipe) -> tuple[list[View], list[LabelRows], list[str]]:
    """The models with their classes in the anchor's order, what reorders them, and notes for the report.

    Raises:
        RotationMergeError: they do not compute alike, or differ in sizes or tokens.
    """
    anchor, architecture = views[0], views[0].architecture
    donors = [as_donor(anchor, view) for view in views[1:]]
    recipe.settle(views)
    for donor in donors:
        check_shapes(anchor, donor, recipe.excluded)
    together, rows, notes = [anchor], list[LabelRows]([{}]), list[str]()
    for donor in donors:
        pair = check_pair(anchor, donor.as_filed, NOTHING, excluded=recipe.excluded, averaged=True)
        together.append(in_class_order(donor.as_filed, pair.rows))
        rows.append(pair.rows)
        notes += [*pair.warnings, *pair.notes]
    infos = [info for info in architecture.tensors() if info.vocabulary_axis is not None]
    if any(name in anchor and not recipe.excluded(name) for info in infos for name in info.names):
        for donor in together[1:]:
            check_token_ids(anchor, donor)
    return together, rows, notes


def average_views(
    views: Sequence[View],
    recipe: Recipe,
    statistics: Sequence[Statistics] = (),
    samples: Sequence[Batch] = (),
    seed: int = 0,
) -> View:
    """Models in shared coordinates, averaged by a recipe's delegate.

    Args:
        views: with distinct names, the base first.
        statistics: of each model, where the delegate takes them.
        samples: batches for all models, where it does.

    Returns:
        A lazy view of the base's names and dtypes, computed in float32 at least and rounded once.

    Raises:
        RotationMergeError: the models do not fit together, or parameters mean nothing.
    """
    together, rows, notes = _brought_together(views, recipe)
    first, method, log = together[0], recipe.delegate, MergeLog()
    if isinstance(method, OwnMethod):
        measured = [
            moved_statistics(part, first.architecture, {}, rows=order) if order else part
            for part, order in zip(statistics, rows, strict=False)
        ]
        pool = (lambda: unpadded(samples, "samples")) if samples else None
        models = MergedModels.of(together, statistics=dict(enumerate(measured)), samples=pool)
        method, log = method.on(models), models.log
    notes += [*log.lines, *([not_written(first.ignored)] if first.ignored else [])]
    parameters, based = _tensor_parameters(recipe, first, method), not recipe.plain
    for name in (name for name in first.architecture.named() if name in first and not recipe.excluded(name)):
        parameters(name)  # finds what is wrong for any tensor, before one is asked for
    merged = averaged(together, method, parameters, seed=seed, excluded=recipe.excluded, based=based)

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        if not all(name in merged for name in info.names) or (tensor := read_tensor(info, merged)) is None:
            return None
        rounded = dtype or first.dtype or first.stored_dtypes.get(info.name)
        return tensor.to(rounded) if tensor.is_floating_point() and rounded is not None else tensor

    notes = list(dict.fromkeys([*first.notes, *notes, *log.lines]))
    return first.blockwise(compute, first.dtype, left_out=first.left_out, notes=tuple(notes))
