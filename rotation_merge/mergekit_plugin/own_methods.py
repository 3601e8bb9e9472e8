"""What a merge method of our own is told in a recipe: the models as views, their statistics, samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from mergekit.common import ModelReference

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.averaging.models import MergedModels, MergeLog
from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.average import check_parameters, resolved
from rotation_merge.mergekit_plugin.loader import PlacedModel
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.mergekit_plugin.statistics import opened_statistics, output_statistics
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.run.data import read_batches, unpadded
from rotation_merge.run.functions import Batch, load, local_path
from rotation_merge.run.statistics import Statistics

SAMPLES = 200
"""Samples that activations are taken on."""

Placed = Mapping[ModelReference, PlacedModel]
"""The references by which mergekit knows the models of a recipe."""


def told(method: OwnMethod, views: RecipeViews, placed: Placed, dtype: torch.dtype | None) -> OwnMethod:
    """A method of our own, told about the models of a recipe, once nothing speaks against any tensor.

    Args:
        dtype: of the result; None: each tensor has that of the anchor's files.

    Raises:
        RotationMergeError: weights are of no use, statistics or samples are missing.
    """
    base, run, log = views.recipe.base, views.session.run, MergeLog()
    models = MergedModels(
        base=placed[base],
        places=views.architecture.places(),
        tied_head=None if views.recipe.untie else views.base.tied_head,
        views={reference: views.view(model) for model, reference in placed.items()},
        statistics=_statistics(method, views, placed) if method.statistics else {},
        storage=lambda name: dtype or views.recipe.dtype or views.anchor.dtypes.get(name),
        samples=_samples(method, views) if method.on_samples else None,
        log=log,
    )
    method = method.on(models)
    for out in views.blocks:
        for name, values, weights in _resolved(views, out):
            by_id = {placed[model]: weight for model, weight in weights.items()}
            check_parameters(views.recipe, method, name, values, by_id)
    known = tuple(log.lines)
    for line in known:
        run.note(line)
    run.later.append(lambda: [*(line for line in log.lines if line not in known), *method.words()])
    return method


def _resolved(
    views: RecipeViews, out: OutputBlock
) -> Iterator[tuple[str, dict[str, Any], dict[ModelReference, float]]]:
    """Parameters and weights of a block's tensors, by their names."""
    own_names = {model: out.names_in(model) for model in out.sources}
    for name in (name for info in out.block.tensors for name in info.names):
        if not views.recipe.excluded(name):
            inputs = {model: names[name] for model, names in own_names.items()}
            shared, by_model = resolved(views.recipe, out.reader, name, inputs)
            yield name, shared, {model: float(values["weight"]) for model, values in by_model.items()}


def _statistics(method: OwnMethod, views: RecipeViews, placed: Placed) -> dict[Hashable, Statistics]:
    """The statistics of all models that count, moved with them."""
    counting = {
        model: out.reader
        for out in reversed(views.blocks)
        for _, _, weights in _resolved(views, out)
        for model, weight in weights.items()
        if weight != 0
    }
    opened = opened_statistics(views.session, method, counting)
    return {placed[model]: output_statistics(views, model, stored) for model, stored in opened.items()}


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
        batches = read_batches(str(data), local_path(anchor), load(anchor), SAMPLES, seed=seed).batches
        return unpadded(batches, str(data))

    return pool
