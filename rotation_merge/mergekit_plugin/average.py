"""`rotation_merge.average`: its call judged as a recipe is, and its models averaged in memory, without a plan."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from mergekit.merge_methods.base import MergeMethod, ParameterScope
from mergekit.options import MergeOptions
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.average import averaged
from rotation_merge.averaging.config import CalibrationConfig
from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.errors import RecipeError, RotationMergeError, nearest
from rotation_merge.mergekit_plugin import METHOD, delegates
from rotation_merge.mergekit_plugin.compile import output_views, tensor_parameters
from rotation_merge.mergekit_plugin.document import Document
from rotation_merge.mergekit_plugin.keys import BY_NAME, PRESETS, UNMOVED
from rotation_merge.mergekit_plugin.own_methods import bound_method, refitted_view
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import FURTHER, View, stored_dtype
from rotation_merge.model.writing import free_name
from rotation_merge.run.batches import unpadded
from rotation_merge.run.statistics import Statistics

IN_PYTHON = ("exclude", "heads_of", "samples", "targets", "start", *CalibrationConfig.options())
"""Parameters of recipes that the call has, too."""


def delegate_of(method: str) -> MergeMethod:
    """A merge method by its name; an unknown one is refused with the nearest."""
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
    for view in views:  # one in memory has a name that is not to be looked for on the hub
        plain = re.sub(r"[+@]", " with ", view.name) + ("" if view.files is not None else " (in memory)")
        names.append(free_name(plain, names.__contains__))
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
    specs = {spec.name: spec for spec in delegate_of(method).spec.parameters}
    for name in parameters:
        if name in BY_NAME and name not in (*IN_PYTHON, *specs):
            remedy = "give options of aligning to rotation_merge.align; all others need a recipe for mergekit-yaml"
            raise RecipeError(f"'{name}' is a parameter of recipes, which average does not have", remedy=remedy)
    shared = {name.rstrip("_") if keyword.iskeyword(name[:-1]) else name: x for name, x in parameters.items()}
    weight = specs.get("weight")
    if weight is not None and weight.required and weight.scope != ParameterScope.SHARED:
        shared = {"weight": 1.0, **shared}
    value = {
        "merge_method": METHOD,
        "base_model": views[0].name,
        "models": [{"model": view.name, "parameters": dict(x)} for view, x in zip(views, of_model, strict=True)],
        "parameters": {**PRESETS[UNMOVED], **shared, "delegate": method},
    }
    return Recipe.of(Document(value))


@contextmanager
def python_places() -> Iterator[None]:
    """Errors of recipes, raised within, name the arguments of Python's call."""
    try:
        yield
    except RotationMergeError as error:
        place = re.sub(r"\bparameters\b\.?", "", error.where or "").rstrip(".") or None
        raise type(error)(error.what, where=place, remedy=error.remedy) from None


def average_views(
    views: Sequence[View],
    recipe: Recipe,
    statistics: Sequence[Statistics] = (),
    samples: Sequence[Any] = (),
    seed: int = 0,
) -> View:
    """Models in shared coordinates, averaged by a recipe's delegate.

    Args:
        views: with distinct names, the base first.
        statistics: of each model, where the delegate takes them.
        samples: batches for all models, where it takes these; of one that works on whole models those of each.

    Returns:
        A lazy view of the base's names and dtypes, computed in float32 at least and rounded once.

    Raises:
        RotationMergeError: the models do not fit together, or parameters mean nothing.
    """
    first, references = views[0], [entry.model for entry in recipe.config.models or []]
    session = Session(recipe, MergeOptions(random_seed=seed, quiet=True), watched=False)
    session.models.update(zip(references, views, strict=True))
    in_output = output_views(session)
    parameters, method = tensor_parameters(recipe, in_output.blocks), recipe.delegate
    if isinstance(method, OwnMethod) and not method.whole_models:
        pool = (lambda: unpadded(samples, "samples")) if samples else None
        measured = dict(zip(references, statistics, strict=False))
        method = bound_method(method, in_output, parameters, statistics=measured, samples=pool)
    if recipe.on_whole_models:
        merged: Tensors = refitted_view(in_output, parameters, samples)
    else:
        merged = averaged(
            [in_output.view(model) for model in references],
            method,
            parameters.__getitem__,
            ids=references,
            seed=seed,
            excluded=recipe.excluded,
            based=not recipe.plain,
        )

    def compute(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        if not all(name in merged for name in info.names) or (tensor := read_tensor(info, merged)) is None:
            return None
        return tensor.to(stored_dtype(tensor, dtype or first.dtype or first.stored_dtypes.get(info.name)))

    further = tuple(out.block for out in in_output.blocks if out.block.name == FURTHER and out.sources)
    notes = dict.fromkeys([*first.notes, *session.run.notes])
    return first.blockwise(compute, first.dtype, further, left_out=first.left_out, notes=tuple(notes))
