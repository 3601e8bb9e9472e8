"""Delegate `refit` in a recipe: which models answer to which samples, and the refitted merge as a View."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from torch import Tensor

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.refit_models import ModelRefit
from rotation_merge.averaging.teachers import Teacher, read_teachers, shares_of, usual_source
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.mergekit_plugin.wholes import progress_bar
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import View


def refitted_view(views: RecipeViews) -> tuple[View, Callable[[], View]]:
    """The merge of a recipe's models, refitted to them, and a function that aligns the models and refits it.

    Samples are read at once. The merge is there until the run ends; the run has its record. What is excluded is the
    anchor's.

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """
    recipe, run, options, readers = views.recipe, views.session.run, views.session.options, views.donors.readers
    values: dict[str, Any] = {name: recipe.value(name) for name in ("targets", "start")}
    first = next(iter(readers.values()))
    values["ridge"] = _number("ridge", first, None, RefitConfig.ridge)
    values["lambda_"] = _number("lambda", first, None, RefitConfig.lambda_)
    refit = RefitConfig(**values, seed=options.random_seed or 0)
    aligned = {model: views.view(model) for model in views.by_model}  # one each: teachers are told by it
    base = aligned[recipe.base]
    try:
        teachers, pooled = read_teachers(base, _teachers(views, readers, aligned), refit)
    except RecipeError as error:
        raise RecipeError(error.what, where=error.where or "parameters", remedy=error.remedy) from None

    @cache
    def merged() -> View:
        views.donors.match_wholes()
        with progress_bar("Refitting", options.quiet) as progress:
            solving = ModelRefit(
                base,
                teachers,
                refit,
                pooled,
                exclude=lambda name: any(part in name for part in recipe.exclude),
                own_heads=recipe.value("heads_of") == "each",
                dtype=recipe.dtype,
                device=str(options.device or "cpu"),
            )
            view = solving.run(progress)
        run.endings.append(solving.store.close)
        run.heads.update(solving.heads)
        for note in solving.notes:
            run.note(note)
        return view

    def read(name: str) -> Tensor:
        return base[name] if recipe.excluded(name) else merged()[name]

    return replace(base, tensors=Tensors(base.shapes, base.dtypes, by_name(read))), merged


def _teachers(
    views: RecipeViews, readers: dict[ModelReference, ConfigReader], aligned: dict[ModelReference, View]
) -> list[Teacher]:
    """The models that answer, with the names of their samples."""
    shares = shares_of([_number("weight", reader, model, 1.0) for model, reader in readers.items()])
    teachers = []
    for (model, reader), share in zip(readers.items(), shares, strict=True):
        if share > 0:
            original = views.session.models[model]
            source = views.recipe.of_model("data", reader, model) or usual_source(original)
            samples = views.recipe.of_model("samples", reader, model)
            teachers.append(Teacher(aligned[model], original, share, source, samples))
            views.session.run.used(f"refit to {model}", str(source), int(samples))
    return teachers


def _number(name: str, reader: ConfigReader, model: ModelReference | None, default: float) -> float:
    """A parameter of the delegate for a whole model."""
    value = next((scope[name] for scope in reader.parameter_sources(model) if scope and name in scope), default)
    if isinstance(value, int | float):
        return float(value)
    problem = f"parameter '{name}' takes no lists or filters with delegate refit"
    raise RecipeError(problem, where=str(model or "parameters"), remedy="give one number")
