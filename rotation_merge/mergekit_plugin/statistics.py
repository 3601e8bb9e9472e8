"""The statistics that a recipe's models bring: where they lie, whether they are of use, and moved with the models."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.errors import StatisticsError
from rotation_merge.matching.statistics import moved_statistics
from rotation_merge.mergekit_plugin.output import names_in
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.hub import HubFile, local_file
from rotation_merge.model.view import View
from rotation_merge.run.statistics import NAME, Statistics


def opened_statistics(
    session: Session, method: OwnMethod, readers: Mapping[ModelReference, ConfigReader]
) -> dict[ModelReference, Statistics]:
    """The statistics of some models that a method asks for.

    Args:
        readers: look up the parameters of each.

    Raises:
        StatisticsError: names every model whose statistics are of no use, with the command that makes them.
    """
    opened, wrong = dict[ModelReference, Statistics](), list[StatisticsError]()
    for model, reader in readers.items():
        setting = session.recipe.of_model("statistics", reader, model)
        try:
            opened[model] = statistics = _open(session.models[model], setting, method)
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


def _open(model: View, setting: str | None, method: OwnMethod) -> Statistics:
    """A model's statistics: those in the file that is named, or in the one beside the model."""
    reference = model.reference
    folder = reference.lora.path if reference.lora is not None else reference.model.path
    beside = folder if model.files is None or os.path.isdir(folder) else model.files.folder
    places = [os.path.join(beside, NAME)] if setting is None else [setting, os.path.join(beside, setting)]
    path = next((place for place in places if os.path.isfile(place)), None)
    if setting is not None and HubFile.of(setting) is not None and not os.path.isfile(places[1]):
        path = local_file(setting, model.options.transformers_cache)
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


def output_statistics(views: RecipeViews, model: ModelReference, stored: Statistics) -> Statistics:
    """The statistics of one model by the names of the output; moved, as the model is, when they are asked for.

    Args:
        stored: of the whole model, as measured.
    """
    names, rows = names_in(model, views.by_model[model]), views.session.models[model].rows
    buffers = [new for new, old in names.items() if old in stored.metadata.get("buffers", ())]
    sources = ({}, {}) if model in views.origins else (views.anchor, views.stored[model])
    anchor, donor = (folded_tensors(views.architecture, source, views.folded) for source in sources)
    return moved_statistics(
        replace(stored.renamed(names), metadata={**stored.metadata, "buffers": buffers}),
        views.architecture,
        views.transforms.get(model, {}),
        views.folded,
        (anchor, donor),
        {new: rows[old] for new, old in names.items() if old in rows},
        torch.float64,
    )
