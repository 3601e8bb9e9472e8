"""A recipe of ours as the stock recipe of its delegate, which mergekit plans, merges and writes.

Every model stands as a view under a reference of this run; the delegate is a merge method that is told what is copied
from the anchor. Config, tokenizer and small files are the anchor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import (
    BasePolicy,
    InputContract,
    MergeMethod,
    ParameterScope,
    TensorGroup,
)
from mergekit.merge_methods.passthrough import passthrough_merge_method
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from pydantic import PrivateAttr
from torch import Tensor

from rotation_merge.errors import not_written
from rotation_merge.mergekit_plugin.definitions import describe, open_models
from rotation_merge.mergekit_plugin.document import with_models
from rotation_merge.mergekit_plugin.donor_checks import check_meaning
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.mergekit_plugin.loader import PlacedModel, StandIn, ViewLoader, runs
from rotation_merge.mergekit_plugin.output import OutputBlock, check_tensors, output_blocks
from rotation_merge.mergekit_plugin.own_methods import told
from rotation_merge.mergekit_plugin.refit import refitted_view
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.vocabulary import check_token_ids


class CompiledRecipe(MergeConfiguration):
    """A stock recipe that takes the architecture of its output along through mergekit's own functions.

    Attributes:
        _prepare: finds the alignments of whole models, and whatever else is known before single tensors are merged.
    """

    _architecture: ModelArchitecture = PrivateAttr()
    _prepare: Callable[[], object] = PrivateAttr()

    def referenced_models(self) -> list[ModelReference]:
        """Every model once, the base first."""
        models = [source.model for m in (self.modules or {}).values() for p in m.slices or [] for source in p.sources]
        return list(dict.fromkeys([self.base_model, *models]))

    def prepare(self) -> None:
        """Do what comes before single tensors are merged."""
        self._prepare()

    def planner(self, options: MergeOptions) -> MergePlanner:
        """mergekit's planner of it."""
        assert self.base_model is not None
        config = ModelReference.config(self.base_model, options.trust_remote_code)  # with the output's names
        return MergePlanner(self, self._architecture, options, config)


class Delegated(MergeMethod):
    """The delegate of one recipe, which copies from the anchor what is not to be merged.

    Args:
        name: under which mergekit knows it while the recipe runs.
        inner: the delegate.
        plain: whether it is not told that the anchor is the base.
        copied: says of an output tensor that it is the anchor's; every model then gives the anchor's.
    """

    def __init__(self, name: str, inner: MergeMethod, plain: bool, copied: Callable[[str], bool]) -> None:
        self.inner, self.plain, self.copied = inner, plain, copied
        parameters = tuple(
            replace(p, scope=ParameterScope.INPUT) if plain and p.scope == ParameterScope.NON_BASE else p
            for p in inner.spec.parameters
        )
        contract = InputContract(base=BasePolicy.OPTIONAL, min_inputs=0)
        self.spec = replace(inner.spec, name=name, parameters=parameters, contract=contract)

    def validate_inputs(self, *args: Any, **kwargs: Any) -> None:
        """The recipe's reader has judged numbers of models by the delegate itself."""

    def _execute_resolved(
        self, groups: Sequence[TensorGroup], parameters: list[dict[str, Any]], **options: Any
    ) -> tuple[Tensor, ...]:
        results = []
        for group, values in zip(groups, parameters, strict=True):
            if self.copied(str(group.metadata.name)):
                results.append(group.entries[0].tensor)
                continue
            if self.plain:
                group = replace(group, entries=tuple(replace(entry, is_base=False) for entry in group.entries))
            results += self.inner._execute_resolved((group,), [values], **options)
        return tuple(results)

    def _execute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("groups are executed once they are resolved")


def compiled(session: Session) -> CompiledRecipe:
    """Settle a recipe's models, register them and the delegate for this run, and write its stock recipe.

    No weight is read. When the session's run ends, mergekit's registries are as they were.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    recipe, run, own_method = session.recipe, session.run, session.recipe.own_method
    anchor, number, cache = open_models(session), next(runs), session.options.transformers_cache
    name, whole = f"rotation_merge:{recipe.delegate.spec.name}:{number}", recipe.on_whole_models
    inner = passthrough_merge_method if whole else recipe.delegate
    method = Delegated(name, inner, recipe.plain or whole, recipe.excluded)
    _register(session, registry._METHODS, name, method)
    architecture = describe(anchor.architecture, anchor.config)
    config = normalised(session, recipe.config, architecture, name)
    blocks = output_blocks(config, recipe, session.models)
    donors = session.donors = Donors(session, blocks)
    check_meaning(config, donors)
    run.folded = donors.folded
    if left_out := anchor.ignored:
        run.note(not_written(left_out))
    for out in blocks:
        check_tensors(recipe, session.models, out)
    _check_tokens(session, donors, blocks)
    views = RecipeViews(donors)
    placed = {model: PlacedModel.of(model, number, cache) for model in views.by_model}
    served = {model: views.served(model) for model in views.by_model}
    prepare: Callable[[], object] = donors.match_wholes
    if whole:
        served[recipe.base], prepare = refitted_view(views)
        base, cleared = InputModelDefinition(model=recipe.base), dict.fromkeys(("slices", "modules", "parameters"))
        alone = recipe.config.model_copy(update={**cleared, "models": [base]})
        config = normalised(session, alone, architecture, name)
    stock = stock_recipe(config, name, placed, recipe.base, cache)
    if own_method is not None and not whole:
        stock = stock.model_copy(update={"dtype": None, "out_dtype": stock.out_dtype or stock.dtype})
        method.inner = told(own_method, views, placed, dtype_from_name(stock.out_dtype))
    own_names = {placed[model]: names for model, names in views.own_names.items()}
    stock._architecture, stock._prepare = describe(views.architecture, anchor.config, own_names), prepare
    for model, reference in placed.items():
        _register(session, LoaderCache.loaders, reference, ViewLoader(served[model], views.own_names.get(model)))
    return stock


def _register(session: Session, registered: MutableMapping[Any, Any], name: object, value: object) -> None:
    """Make something known to mergekit until the session ends."""
    registered[name] = value
    session.run.endings.append(partial(registered.pop, name, None))


def normalised(
    session: Session, config: MergeConfiguration, architecture: ModelArchitecture, name: str
) -> MergeConfiguration:
    """A recipe as modules with slices, by mergekit; a delegate that merges models only without a base adds none."""
    recipe, cache = session.recipe, session.options.transformers_cache
    placed = {model: StandIn.of(model, cache=cache) for model in recipe.config.referenced_models()}
    config = with_models(config, lambda model: placed.get(model, model))
    config.merge_method, config.base_model = name, None if recipe.plain else placed[recipe.base]
    MergePlanner(config, architecture, session.options, SimpleNamespace()).normalize_config()
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
) -> CompiledRecipe:
    """The normalised recipe with the models of this run; layers are counted as in the output."""

    def stand_in(model: ModelReference) -> ModelReference:
        return placed[model] if model in placed else StandIn.of(model, cache=cache)

    modules = {}
    for module, definition in (config.modules or {}).items():
        pieces, first = [], 0
        for piece in definition.slices or []:
            last = first + len(range(*piece.sources[0].layer_range))
            sources = [
                InputSliceDefinition.model_construct(
                    model=placed[source.model], layer_range=(first, last), parameters=source.parameters
                )
                for source in piece.sources
            ]
            pieces.append(piece.model_copy(update={"sources": sources, "base_model": None}))
            first = last
        modules[module] = definition.model_copy(update={"slices": pieces, "models": None})
    tokens = {name: with_models(getattr(config, name), stand_in) for name in ("tokenizer", "tokenizer_source")}
    values = {**dict(config), **tokens, "modules": modules, "models": None, "slices": None}
    return CompiledRecipe.model_construct(**{**values, "merge_method": name, "base_model": placed[base]})


def _check_tokens(session: Session, donors: Donors, blocks: Sequence[OutputBlock]) -> None:
    """Check that models whose rows are averaged by token id have the base's ids.

    Raises:
        CheckpointError: names the one that has not.
    """
    recipe, models = session.recipe, session.models
    if recipe.config.tokenizer or recipe.config.tokenizer_source:
        return
    by_id = [
        out
        for out in blocks
        for info in out.block.tensors
        if info.vocabulary_axis is not None and not all(map(recipe.excluded, info.names))
    ]
    for model in dict.fromkeys(model for out in by_id for model in out.sources):
        if model != recipe.base and donors.by_model[model].origin is None:  # whose change goes by tokens
            check_token_ids(models[recipe.base], models[model])
