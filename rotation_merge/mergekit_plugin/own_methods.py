"""What a merge method of our own is told in a recipe: the models as views, their statistics, samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from mergekit.common import ModelReference

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.models import MergedModels, MergeLog
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.delegated import Parameters
from rotation_merge.mergekit_plugin.statistics import opened_statistics, output_statistics
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.run.data import read_samples, unpadded
from rotation_merge.run.functions import Batch
from rotation_merge.run.statistics import Statistics

SAMPLES = 200
"""Samples that activations are taken on."""

Ids = Mapping[ModelReference, Hashable]
"""By what a method knows the models of a recipe."""


def told(
    method: OwnMethod,
    views: RecipeViews,
    ids: Ids,
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
    run, log = views.session.run, MergeLog()
    if statistics is None:
        statistics = _statistics(method, views, ids, parameters) if method.statistics else {}
    if samples is None and method.on_samples:
        samples = _samples(method, views)
    models = MergedModels(
        base=ids[views.recipe.base],
        places=views.architecture.places(),
        tied_head=None if views.recipe.untie else views.base.tied_head,
        views={number: views.view(model) for model, number in ids.items()},
        statistics={ids[model]: output_statistics(views, model, stored) for model, stored in statistics.items()},
        storage=lambda name: dtype or views.recipe.dtype or views.anchor.dtypes.get(name),
        samples=samples,
        log=log,
    )
    method = method.on(models)
    for name, of_tensor in parameters.items():
        if views.recipe.value("heads_of") == "each" and of_tensor.get("stream") == "transport":
            problem = (
                "'heads_of: each' puts the body under every donor's head, but plans of the stream do not move heads"
            )
            raise RecipeError(problem, where="parameters", remedy="add 'stream: identity'")
        method.participants(name, of_tensor["weight"], of_tensor)
    known = tuple(log.lines)
    for line in known:
        run.note(line)
    run.later.append(lambda: [*(line for line in log.lines if line not in known), *method.words()])
    return method


def _statistics(
    method: OwnMethod, views: RecipeViews, ids: Ids, parameters: Parameters
) -> dict[ModelReference, Statistics]:
    """The statistics of all models that count."""
    counting = {model for of_tensor in parameters.values() for model, weight in of_tensor["weight"].items() if weight}
    readers = {model: reader for model, reader in views.donors.readers.items() if ids[model] in counting}
    return opened_statistics(views.session, method, readers)


def _samples(method: OwnMethod, views: RecipeViews) -> Callable[[], Sequence[Batch]] | None:
    """Reads the one pool of samples that activations are compared on; None: weights are compared.

    Raises:
        RecipeError: models have samples of their own.
    """
    files = {views.recipe.of_model("data", views.blocks[0].reader, model) for model in views.by_model}
    if len(files) > 1:
        problem = f"delegate {method.spec.name} compares activations on the same samples, but models have their own"
        remedy = "write 'data' once, under the recipe's parameters"
        raise RecipeError(f"{problem} 'data'", where="parameters", remedy=remedy)
    data = files.pop()
    if data is None:
        return None
    views.session.run.used("matching of activations", str(data), SAMPLES)
    anchor, seed = str(views.recipe.base), views.session.options.random_seed or 0

    def pool() -> Sequence[Batch]:
        batches = read_samples(anchor, str(data), SAMPLES, seed=seed).batches
        return unpadded(batches, str(data))

    return pool
