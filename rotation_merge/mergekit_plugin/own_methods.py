"""What a merge method of our own is told in a recipe: the models as views, their statistics, samples; and refit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from torch import Tensor

from rotation_merge.averaging.config import RefitConfig
from rotation_merge.averaging.methods import MergedModels, MergeLog, OwnMethod
from rotation_merge.errors import RecipeError, StatisticsError
from rotation_merge.matching.statistics import moved_statistics
from rotation_merge.mergekit_plugin.donors import progress_bar
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.tensors import Tensors, by_name
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
    dtype: torch.dtype | None = None,
    statistics: Mapping[ModelReference, Statistics] | None = None,
    samples: Callable[[], Sequence[Batch]] | None = None,
) -> OwnMethod:
    """A method of our own, told about models in shared coordinates, once nothing speaks against any tensor.

    Its notes are the run's.

    Args:
        parameters: of the method for each tensor.
        dtype: of the result; None: each tensor has that of the anchor's files.
        statistics: of models, as measured; None: those that the recipe names.
        samples: gives the samples that activations are compared on; None: they are what the recipe names.

    Raises:
        RotationMergeError: weights are of no use, statistics or samples are missing.
    """
    recipe, run, log = views.recipe, views.session.run, MergeLog()
    if statistics is None:
        statistics = _statistics(method, views, parameters) if method.statistics else {}
    if samples is None and method.on_samples:
        samples = _samples(method, views)
    models = MergedModels(
        base=recipe.base,
        places=views.architecture.places(),
        tied_head=None if recipe.value("untie") else views.base.tied_head,
        views={model: views.view(model) for model in views.stored},
        statistics={model: _moved(views, model, stored) for model, stored in statistics.items()},
        storage=lambda name: dtype or recipe.dtype or views.anchor.dtypes.get(name),
        samples=samples,
        log=log,
    )
    method = method.on(models)
    for name, of_tensor in parameters.items():
        if recipe.value("heads_of") == "each" and of_tensor.get("stream") == "transport":
            problem = "'heads_of: each' puts the body under every donor's head, but plans of the stream do not move"
            raise RecipeError(f"{problem} heads", where="parameters", remedy="add 'stream: identity'")
        method.participants(name, of_tensor["weight"], of_tensor)
    known = tuple(log.lines)
    for line in known:
        run.note(line)
    run.later.append(lambda: [*(line for line in log.lines if line not in known), *method.words()])
    return method


def _samples(method: OwnMethod, views: RecipeViews) -> Callable[[], Sequence[Batch]] | None:
    """Reads the one pool of samples that activations of all models are compared on; None: weights are compared."""
    files = {views.recipe.value("data", views.blocks[0].reader, model) for model in views.stored}
    if len(files) > 1:
        problem = f"delegate {method.spec.name} compares activations on the same samples, but models have their own"
        remedy = "write 'data' once, under the recipe's parameters"
        raise RecipeError(f"{problem} 'data'", where="parameters", remedy=remedy)
    data = files.pop()
    if data is None:
        return None
    views.session.run.used("matching of activations", str(data), SAMPLES)
    anchor, seed = str(views.recipe.base), views.session.seed

    def pool() -> Sequence[Batch]:
        from rotation_merge.run.batches import unpadded
        from rotation_merge.run.data import read_samples

        batches = read_samples(anchor, str(data), SAMPLES, seed=seed).batches
        return unpadded(batches, str(data))

    return pool


def _statistics(method: OwnMethod, views: RecipeViews, parameters: Parameters) -> dict[ModelReference, Statistics]:
    """The statistics of all models that count; refuses, together, those that are of no use."""
    counting = {model for of_tensor in parameters.values() for model, weight in of_tensor["weight"].items() if weight}
    opened, wrong, session = dict[ModelReference, Statistics](), list[StatisticsError](), views.session
    for model, reader in views.readers.items():
        if model not in counting:
            continue
        setting = session.recipe.value("statistics", reader, model)
        try:
            opened[model] = statistics = _opened(session.models[model], setting, method)
        except StatisticsError as error:
            wrong.append(error)
            continue
        source, count = str(statistics.metadata.get("data")), int(statistics.metadata.get("samples") or 0)
        session.run.used(f"statistics of {model}", source, count, None if setting else str(statistics.path))
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        problem, remedy = "; ".join(f"{e.where}: {e.what}" for e in wrong), "; ".join(str(e.remedy) for e in wrong)
        raise StatisticsError(problem, remedy=remedy)
    return opened


def _opened(model: View, setting: str | None, method: OwnMethod) -> Statistics:
    """A model's statistics: those in the file that is named, or in the one beside the model."""
    reference = model.reference
    folder = reference.lora.path if reference.lora is not None else reference.model.path
    beside = folder if model.files is None or os.path.isdir(folder) else model.files.folder
    places = [os.path.join(beside, NAME)] if setting is None else [setting, os.path.join(beside, setting)]
    path = next((place for place in places if os.path.isfile(place)), None)
    if setting is not None and HubFile.of(setting) is not None and not os.path.isfile(places[1]):
        path = local_file(setting, model.files.options.transformers_cache if model.files else None)
    kinds = "" if method.statistics == "gram" else f" --kinds {method.statistics}"
    out = f" --out {setting}" if setting and path is None else ""
    hint = ", and name the file that it writes under 'statistics'" if setting and path is not None else ""
    remedy = f"run 'rotation-merge measure {reference} --data DATA{kinds}{out}'{hint}"
    if path is None:
        problem = f"there are no statistics at '{setting}'" if setting else "there are no statistics beside it"
        needs = f"{problem}, delegate {method.spec.name} needs them"
        raise StatisticsError(needs, where=str(reference), remedy=remedy)
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


def refitted_view(views: RecipeViews) -> View:
    """The merge of a recipe's models, refitted to them once they are aligned, before single tensors are merged.

    Samples are read at once. The merge is there until the run ends; the run has its record. What is excluded is the
    anchor's.

    Raises:
        RotationMergeError: models or data that nothing can be refitted to.
    """
    from rotation_merge.averaging.refit_models import ModelRefit  # not for every merge: it runs models on samples

    recipe, run, options = views.recipe, views.session.run, views.session.options
    values: dict[str, Any] = {name: recipe.value(name) for name in ("targets", "start")}
    first = next(iter(views.readers.values()))
    values["ridge"] = _number("ridge", first, None, RefitConfig.ridge)
    values["lambda_"] = _number("lambda", first, None, RefitConfig.lambda_)
    refit = RefitConfig(**values, seed=views.session.seed)
    aligned = {model: views.view(model) for model in views.stored}  # one each: teachers are told by it
    base = aligned[recipe.base]
    try:
        solving = ModelRefit(
            base,
            _teachers(views, aligned),
            refit,
            exclude=lambda name: any(part in name for part in recipe.exclude),
            own_heads=recipe.value("heads_of") == "each",
            dtype=recipe.dtype,
            device=str(options.device or "cpu"),
        )
    except RecipeError as error:
        raise RecipeError(error.what, where=error.where or "parameters", remedy=error.remedy) from None

    @cache
    def merged() -> View:
        with progress_bar("Refitting", options.quiet) as progress:
            view = solving.run(progress)
        run.endings.append(solving.store.close)
        run.heads.update(solving.heads)
        for note in solving.notes:
            run.note(note)
        return view

    def read(name: str) -> Tensor:
        return base[name] if recipe.excluded(name) else merged()[name]

    views.preparations.append(merged)
    return replace(base, tensors=Tensors(base.shapes, base.dtypes, by_name(read)))


def _teachers(views: RecipeViews, aligned: dict[ModelReference, View]) -> list[Any]:
    """The models that answer, with the names of their samples."""
    from rotation_merge.averaging.refit_models import Teacher, shares_of, usual_source

    shares = shares_of([_number("weight", reader, model, 1.0) for model, reader in views.readers.items()])
    teachers = []
    for (model, reader), share in zip(views.readers.items(), shares, strict=True):
        if share > 0:
            original = views.session.models[model]
            source = views.recipe.value("data", reader, model) or usual_source(original)
            samples = views.recipe.value("samples", reader, model)
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
