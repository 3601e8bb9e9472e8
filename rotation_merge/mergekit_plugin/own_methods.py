"""What a merge method of our own is told in a recipe: the models as views, their statistics, samples; and refit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.methods import MergedModels, OwnMethod
from rotation_merge.errors import RecipeError, StatisticsError
from rotation_merge.matching.moving import moved_statistics
from rotation_merge.mergekit_plugin.donors import progress_bar
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.run.batches import Batch
from rotation_merge.run.statistics import NAME, Statistics

SAMPLES = 200
"""Samples that activations are taken on."""

Parameters = Mapping[str, Mapping[str, Any]]
"""Parameters of a method by name of an output tensor."""


def bound_method(
    method: OwnMethod,
    views: RecipeViews,
    parameters: Parameters,
    statistics: Mapping[ModelReference, Statistics] | None = None,
    samples: Callable[[], Sequence[Batch]] | None = None,
) -> OwnMethod:
    """A method of our own, told about models in shared coordinates, once nothing speaks against any tensor.

    Its notes are the run's.

    Args:
        parameters: of the method for each tensor.
        statistics: of models, as measured; None: those that the recipe names.
        samples: gives the samples that activations are compared on; None: they are what the recipe names.

    Raises:
        RotationMergeError: weights are of no use, statistics or samples are missing.
    """
    recipe, run = views.recipe, views.session.run
    written = dtype_from_name(recipe.config.out_dtype) or recipe.dtype
    if statistics is None:
        statistics = _statistics(method, views, parameters) if method.statistics else {}
    models = MergedModels(
        base=recipe.base,
        places=views.architecture.places(),
        tied_head=None if recipe.value("untie") else views.base.tied_head,
        views={model: views.view(model) for model in views.stored},
        statistics={model: _moved(views, model, stored) for model, stored in statistics.items()},
        storage=lambda name: written or views.anchor.dtypes.get(name),
        samples=samples or (_samples(method, views) if method.on_samples else None),
        tell=run.note,
    )
    method = method.on(models)
    for name, of_tensor in parameters.items():
        if recipe.value("heads_of") == "each" and of_tensor.get("stream") == "transport":
            problem = "'heads_of: each' puts the body under every donor's head, which plans of the stream do not move"
            raise RecipeError(problem, where="parameters", remedy="add 'stream: identity'")
        method.participants(name, of_tensor.get("weight", {}), of_tensor)
    run.later.append(method.words)
    return method


def _samples(method: OwnMethod, views: RecipeViews) -> Callable[[], Sequence[Batch]] | None:
    """Reads the one pool of samples that activations of all models are compared on; None: weights are compared."""
    data, *further = {views.recipe.value("data", views.blocks[0].reader, model) for model in views.stored}
    if further:
        problem = f"delegate {method.spec.name} compares activations on the same samples, but models have their own"
        remedy = "write 'data' once, under the recipe's parameters"
        raise RecipeError(f"{problem} 'data'", where="parameters", remedy=remedy)
    if data is None:
        return None
    views.session.run.used("matching of activations", str(data), SAMPLES)

    def pool() -> Sequence[Batch]:
        from rotation_merge.run.batches import unpadded
        from rotation_merge.run.data import read_samples

        batches = read_samples(str(views.recipe.base), str(data), SAMPLES, seed=views.session.seed).batches
        return unpadded(batches, str(data))

    return cache(pool)  # written once, where a model writes them


def _statistics(method: OwnMethod, views: RecipeViews, parameters: Parameters) -> dict[ModelReference, Statistics]:
    """The statistics of all models that count, in the files that are named, or in those beside the models."""
    counting = {model for of_tensor in parameters.values() for model, weight in of_tensor["weight"].items() if weight}
    opened, session = dict[ModelReference, Statistics](), views.session
    for model in (model for model in views.readers if model in counting):
        setting = session.recipe.value("statistics", views.readers[model], model)
        opened[model] = statistics = _opened(session.models[model], setting, method)
        source, count = str(statistics.metadata.get("data")), int(statistics.metadata.get("samples") or 0)
        session.run.used(f"statistics of {model}", source, count, None if setting else str(statistics.path))
    return opened


def _opened(model: View, setting: str | None, method: OwnMethod) -> Statistics:
    """A model's statistics, checked.

    Raises:
        StatisticsError: there are none, or they are of no use; says how to measure them.
    """
    reference = model.reference
    folder = reference.lora.path if reference.lora is not None else reference.model.path
    beside = folder if model.files is None or os.path.isdir(folder) else model.files.folder
    places = [*([setting] if setting else []), os.path.join(beside, setting or NAME)]
    path = next(filter(os.path.isfile, places), None)
    if path is None and setting is not None and HubFile.of(setting) is not None:
        path = local_file(setting, model.files.options.transformers_cache if model.files else None)
    kinds = "" if method.statistics == "gram" else f" --kinds {method.statistics}"
    remedy = f"run 'rotation-merge measure {reference} --data DATA{kinds}', and name its --out under 'statistics'"
    if path is None:
        problem = f"there are no statistics at '{places[0]}', delegate {method.spec.name} needs them"
        raise StatisticsError(problem, where=str(reference), remedy=remedy)
    statistics = Statistics.open(path)
    statistics.check(method.statistics, model.fingerprint, str(reference), remedy)
    return statistics


def _moved(views: RecipeViews, model: ModelReference, stored: Statistics) -> Statistics:
    """A model's statistics as measured, by the names of the output; moved, as the model is, when they are asked for."""
    names = {new: old for out in views.blocks_of(model) for new, old in out.names_in(model).items()}
    rows = views.session.models[model].rows
    buffers = [new for new, old in names.items() if old in stored.metadata.get("buffers", ())]
    return moved_statistics(
        replace(stored.renamed(names), metadata={**stored.metadata, "buffers": buffers}),
        views.architecture,
        views.transforms.get(model, {}),
        views.folded,
        {new: rows[old] for new, old in names.items() if old in rows},
        torch.float64,
    )


def refitted_view(views: RecipeViews, parameters: Parameters, samples: Sequence[Any] = ()) -> View:
    """The merge of a recipe's models, refitted to them once they are aligned, before single tensors are merged.

    Samples are read at once. The merge is there until the run ends; the run has its record. What is excluded is the
    anchor's.

    Args:
        parameters: of the delegate, the same for each tensor.
        samples: of each model; empty: what the recipe names.

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """
    from rotation_merge.averaging.refit_models import ModelRefit  # not for every merge: it runs models on samples

    recipe, run, options = views.recipe, views.session.run, views.session.options
    values: dict[str, Any] = dict(next(iter(parameters.values()), {}))
    if any(of_tensor != values for of_tensor in parameters.values()):
        problem = "its parameters hold for whole models and take no lists or filters"
        raise RecipeError(f"delegate refit: {problem}", where="parameters", remedy="give one number for each")
    weights = values.pop("weight", {})
    numbers = {"lambda_" if name == "lambda" else name: value for name, value in values.items()}
    reader = next(iter(views.readers.values()))
    config = RefitConfig(**{**recipe.fields(RefitConfig, reader), **numbers}, seed=views.session.seed)
    aligned = {model: views.view(model) for model in views.stored}  # one each: teachers are told by it
    base = aligned[recipe.base]
    try:
        solving = ModelRefit(
            base,
            _teachers(views, aligned, weights, samples),
            config,
            exclude=lambda name: any(part in name for part in recipe.exclude),
            own_heads=recipe.value("heads_of") == "each",
            dtype=recipe.dtype,
            device=str(options.device or "cpu"),
        )
    except RecipeError as error:
        raise RecipeError(error.what, where=error.where or "parameters", remedy=error.remedy) from None

    @cache
    def merged() -> Tensors:
        with progress_bar("Refitting", options.quiet) as progress:
            tensors = solving.run(progress)
        run.endings.append(solving.store.close)
        run.heads.update(solving.heads)
        for note in solving.notes:
            run.note(note)
        return tensors

    views.preparations.append(merged)
    return replace(base, tensors=Tensors(base.shapes, base.dtypes, lambda names: merged().read(names)))


def _teachers(
    views: RecipeViews, aligned: Mapping[ModelReference, View], weights: Mapping[Any, float], samples: Sequence[Any]
) -> list[Any]:
    """The models that answer, with their samples, or the names of these."""
    from rotation_merge.averaging.refit_models import Teacher, usual_source

    teachers = []
    for number, (model, reader) in enumerate(views.readers.items()):
        if share := float(weights.get(model, 1.0)):
            original, count = views.session.models[model], views.recipe.value("samples", reader, model)
            source = samples[number] if samples else views.recipe.value("data", reader, model) or usual_source(original)
            teachers.append(Teacher(aligned[model], original, share, source, count))
            views.session.run.used(f"refit to {model}", teachers[-1].words, int(count))
    return teachers
