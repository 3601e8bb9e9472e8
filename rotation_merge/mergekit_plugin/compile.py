"""A recipe of ours as the stock recipe of its delegate, which mergekit plans, merges and writes.

Every model stands as a view under a reference of this run; the delegate is a merge method that is told what is copied
from the anchor. Config, tokenizer and small files are the anchor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import InputSliceDefinition, MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import registry
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr

from rotation_merge.errors import not_written
from rotation_merge.mergekit_plugin.definitions import describe, open_models
from rotation_merge.mergekit_plugin.delegated import Delegated, tensor_parameters
from rotation_merge.mergekit_plugin.document import with_models
from rotation_merge.mergekit_plugin.donor_checks import check_meaning
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.mergekit_plugin.loader import PlacedModel, StandIn, ViewLoader, runs
from rotation_merge.mergekit_plugin.output import check_tensors, output_blocks
from rotation_merge.mergekit_plugin.own_methods import told
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.refit import refitted_view
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.vocabulary import check_token_ids


class CompiledRecipe(MergeConfiguration):
    """A stock recipe that takes the architecture of its output along through mergekit's own functions."""

    _architecture: ModelArchitecture = PrivateAttr()

    def referenced_models(self) -> list[ModelReference]:
        """Every model once, the base first."""
        models = [source.model for m in (self.modules or {}).values() for p in m.slices or [] for source in p.sources]
        return list(dict.fromkeys([self.base_model, *models]))


def compiled(session: Session) -> tuple[CompiledRecipe, Callable[[], object]]:
    """Settle a recipe's models, register them and the delegate for this run, and write its stock recipe.

    No weight is read. When the session's run ends, mergekit's registries are as they were.

    Returns:
        The stock recipe, and a function that does what comes before single tensors are merged: it finds the alignments
        of whole models, and refits.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    config, views = output_views(session)
    recipe, number, cache = session.recipe, next(runs), session.options.transformers_cache
    name, whole = f"rotation_merge:{recipe.delegate.spec.name}:{number}", recipe.on_whole_models
    placed = {model: PlacedModel.of(model, number, cache) for model in views.by_model}
    served = {model: views.served(model) for model in views.by_model}
    prepare: Callable[[], object] = views.donors.match_wholes
    if whole:
        served[recipe.base], prepare = refitted_view(views)
    parameters = {} if whole else tensor_parameters(recipe, views.blocks, placed)
    stock = stock_recipe(config, name, placed, recipe.base, cache, alone=whole)
    inner = recipe.delegate
    if recipe.own_method is not None and not whole:
        stock = stock.model_copy(update={"dtype": None, "out_dtype": stock.out_dtype or stock.dtype})
        inner = told(recipe.own_method, views, placed, parameters, dtype_from_name(stock.out_dtype))
    stock._architecture = describe(views.architecture, views.base.config)
    _register(session, registry._METHODS, name, Delegated(name, inner, recipe.plain, parameters))
    for model, reference in placed.items():
        _register(session, LoaderCache.loaders, reference, ViewLoader(served[model]))
    return stock, prepare


def output_views(session: Session) -> tuple[MergeConfiguration, RecipeViews]:
    """A recipe as modules with slices, and its models as views of its output. No weight is read.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    recipe, anchor = session.recipe, open_models(session)
    config = normalised(recipe, describe(anchor.architecture, anchor.config))
    blocks = output_blocks(config, recipe, session.models)
    donors = session.donors = Donors(session, blocks)
    check_meaning(config, donors)
    session.run.folded = donors.folded
    if left_out := anchor.ignored:
        session.run.note(not_written(left_out))
    for out in blocks:
        check_tensors(recipe, session.models, out)
    _check_tokens(donors)
    return config, RecipeViews(donors)


def _register(session: Session, registered: MutableMapping[Any, Any], name: object, value: object) -> None:
    """Make something known to mergekit until the session ends."""
    registered[name] = value
    session.run.endings.append(partial(registered.pop, name, None))


def normalised(recipe: Recipe, architecture: ModelArchitecture) -> MergeConfiguration:
    """A recipe as modules with slices, by mergekit; a delegate that merges models only without a base adds none."""
    placed = {m: PlacedModel.model_construct(**dict(m), run=0) for m in recipe.config.referenced_models()}
    config = with_models(recipe.config, lambda model: placed.get(model, model))
    config.base_model = None if recipe.plain else placed[recipe.base]
    method = SimpleNamespace(validate_inputs=lambda *args, **kwargs: None)  # numbers of models are the reader's
    planner: Any = SimpleNamespace(config=config, arch_info=architecture, options=MergeOptions(), _method=method)
    MergePlanner.normalize_config(planner)
    originals = {stand_in: model for model, stand_in in placed.items()}
    config = with_models(config, lambda model: originals.get(model, model))
    config.base_model = recipe.base
    return config


def stock_recipe(
    config: MergeConfiguration,
    name: str,
    placed: Mapping[ModelReference, PlacedModel],
    base: ModelReference,
    cache: str | None,
    alone: bool,
) -> CompiledRecipe:
    """The normalised recipe with the models of this run; layers are counted as in the output.

    The delegate knows its parameters.

    Args:
        alone: whether the base is the only model.
    """

    def stand_in(model: ModelReference) -> ModelReference:
        return placed[model] if model in placed else StandIn.of(model, cache=cache)

    modules = {}
    for module, definition in (config.modules or {}).items():
        pieces, first = [], 0
        for piece in definition.slices or []:
            last = first + len(range(*piece.sources[0].layer_range))
            models = [base] if alone else [source.model for source in piece.sources]
            sources = [InputSliceDefinition.model_construct(model=placed[m], layer_range=(first, last)) for m in models]
            pieces.append(piece.model_copy(update={"sources": sources, "base_model": None}))
            first = last
        modules[module] = definition.model_copy(update={"slices": pieces, "models": None})
    tokens = {name: with_models(getattr(config, name), stand_in) for name in ("tokenizer", "tokenizer_source")}
    values = {**dict(config), **tokens, "modules": modules, "models": None, "slices": None}
    return CompiledRecipe.model_construct(**{**values, "merge_method": name, "base_model": placed[base]})


def _check_tokens(donors: Donors) -> None:
    """Check that models whose rows are averaged by token id have the base's ids.

    Raises:
        CheckpointError: names the one that has not.
    """
    recipe, models = donors.recipe, donors.models
    if recipe.config.tokenizer or recipe.config.tokenizer_source:
        return
    by_id = [
        out
        for out in donors.blocks
        for info in out.block.tensors
        if info.vocabulary_axis is not None and not all(map(recipe.excluded, info.names))
    ]
    for model in dict.fromkeys(model for out in by_id for model in out.sources):
        if model != recipe.base and donors.by_model[model].origin is None:  # whose change goes by tokens
            check_token_ids(donors.base, models[model])
