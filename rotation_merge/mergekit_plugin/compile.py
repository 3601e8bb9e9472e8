"""A recipe of ours as the stock recipe of its delegate, which mergekit plans, merges and writes.

Every model stands as a view under a reference of this run; the delegate is a merge method that is told what is copied
from the anchor. Config, tokenizer and small files are the anchor's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from mergekit.architecture import ModelArchitecture
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import InputSliceDefinition, MergeConfiguration
from mergekit.io.tasks import LoaderCache, ReturnTensor
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
from rotation_merge.mergekit_plugin.output import MergeOutput
from rotation_merge.mergekit_plugin.own_methods import ToldMethod
from rotation_merge.mergekit_plugin.refit import RefittedModels
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.vocabulary import check_token_ids


class CompiledRecipe(MergeConfiguration):
    """A stock recipe that takes the architecture of its output along through mergekit's own functions."""

    _architecture: ModelArchitecture | None = PrivateAttr(default=None)

    def referenced_models(self) -> list[ModelReference]:
        """Every model once, the base first."""
        models = [source.model for m in (self.modules or {}).values() for p in m.slices or [] for source in p.sources]
        return list(dict.fromkeys([self.base_model, *models] if self.base_model else models))


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
            else:
                told = self._without_base(group) if self.plain else group
                results += self.inner._execute_resolved((told,), [values], **options)
        return tuple(results)

    def _without_base(self, group: TensorGroup) -> TensorGroup:
        return replace(group, entries=tuple(replace(entry, is_base=False) for entry in group.entries))

    def _execute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("groups are executed once they are resolved")


@dataclass(frozen=True)
class Compiled:
    """A compiled recipe.

    Attributes:
        stock: what mergekit runs.
        architecture: of the output.
        prepare: finds the alignments of whole models, and whatever else is known before single tensors are merged.
    """

    stock: CompiledRecipe
    architecture: ModelArchitecture
    donors: Donors
    prepare: Callable[[], object]


def compiled(session: Session) -> Compiled:
    """Settle a recipe's models, register them and the delegate for this run, and write its stock recipe.

    No weight is read. When the session's run ends, mergekit's registries are as they were.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    recipe, models, run = session.recipe, session.models, session.run
    anchor, number = open_models(session), next(runs)
    name, own_method = f"rotation_merge:{recipe.delegate.spec.name}:{number}", recipe.own_method
    whole = own_method is not None and own_method.whole_models
    inner = passthrough_merge_method if whole else recipe.delegate
    method = Delegated(name, inner, recipe.plain or whole, recipe.excluded)
    _register(session, name, method)
    config = normalised(session, name, describe(anchor.architecture, anchor.config))
    donors = session.donors = Donors.read(config, recipe, models, session.options, run)
    check_meaning(config, donors)
    run.folded = donors.folded
    if left_out := anchor.ignored:
        run.note(not_written(left_out))
    output = MergeOutput(config, recipe, models)
    _check_tokens(session, output)
    parts = RecipeViews(session, donors, output)
    placed = {model: PlacedModel.of(model, number, session.options.transformers_cache) for model in parts.models}
    stock = stock_recipe(config, name, placed, recipe.base, session.options.transformers_cache)
    served = parts.served
    prepare: Callable[[], object] = donors.match_wholes
    if whole:
        refitted = RefittedModels(session, config, donors, parts)
        served, prepare = refitted.served, refitted.prepare
        stock = of_one_model(stock, placed[recipe.base])
    elif own_method is not None:
        stock = stock.model_copy(update={"dtype": None, "out_dtype": stock.out_dtype or stock.dtype})
        method.inner = ToldMethod(session, donors, output, parts, placed, dtype_from_name(stock.out_dtype)).told()
    names = {placed[model]: own_names for model, own_names in parts.own_names.items()}
    stock._architecture = describe(output.architecture, anchor.config, names)
    for model, reference in placed.items():
        LoaderCache.loaders[reference] = ViewLoader(served(model))
        run.endings.append(partial(LoaderCache.loaders.pop, reference, None))
    return Compiled(stock, stock._architecture, donors, prepare)


def of_one_model(stock: CompiledRecipe, model: PlacedModel) -> CompiledRecipe:
    """The same recipe of one model alone, and no parameters."""
    modules = {}
    for name, module in (stock.modules or {}).items():
        pieces = []
        for piece in module.slices or []:
            source = piece.sources[0].model_copy(update={"model": model, "parameters": None})
            pieces.append(piece.model_copy(update={"sources": [source], "parameters": None}))
        modules[name] = module.model_copy(update={"slices": pieces, "parameters": None})
    return stock.model_copy(update={"modules": modules, "parameters": None})


def planner(result: Compiled, options: MergeOptions) -> MergePlanner:
    """mergekit's planner of a compiled recipe."""
    assert result.stock.base_model is not None
    config = result.stock.base_model.config(options.trust_remote_code)
    return MergePlanner(result.stock, result.architecture, options, config)


def tensor_tasks(result: Compiled, options: MergeOptions) -> list[ReturnTensor]:
    """The tasks of a merge in memory (mergekit 0.1.5's own method fails at its own types)."""
    plan, out_dtype = planner(result, options), result.stock.out_dtype
    plan._plan()
    return [ReturnTensor.model_construct(weight_info=w, tensor_task=t, dtype=out_dtype) for w, t in plan._tensors]


def _register(session: Session, name: str, method: MergeMethod) -> None:
    """Make a method known to mergekit until the session ends."""
    registry._METHODS[name] = method
    session.run.endings.append(partial(registry._METHODS.pop, name, None))


def normalised(session: Session, name: str, architecture: ModelArchitecture) -> MergeConfiguration:
    """The recipe as modules with slices, by mergekit; a delegate that merges models only without a base adds none."""
    recipe, cache = session.recipe, session.options.transformers_cache
    placed = {model: StandIn.of(model, cache=cache) for model in recipe.config.referenced_models()}
    config: MergeConfiguration = with_models(recipe.config, lambda model: placed.get(model, model))
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
            count = len(range(*piece.sources[0].layer_range))
            sources = [
                InputSliceDefinition.model_construct(
                    model=placed[source.model], layer_range=(first, first + count), parameters=source.parameters
                )
                for source in piece.sources
            ]
            pieces.append(piece.model_copy(update={"sources": sources, "base_model": None}))
            first += count
        modules[module] = definition.model_copy(update={"slices": pieces, "models": None})
    tokens = {name: with_models(getattr(config, name), stand_in) for name in ("tokenizer", "tokenizer_source")}
    values = {**dict(config), **tokens, "modules": modules, "models": None, "slices": None}
    return CompiledRecipe.model_construct(**{**values, "merge_method": name, "base_model": placed[base]})


def _check_tokens(session: Session, output: MergeOutput) -> None:
    """Check that models whose rows are averaged by token id have the base's ids.

    Raises:
        CheckpointError: names the one that has not.
    """
    recipe, models, donors = session.recipe, session.models, session.donors
    if recipe.config.tokenizer or recipe.config.tokenizer_source:
        return
    checked = {recipe.base}
    for out in output.blocks:
        for info in out.block.tensors:
            if info.vocabulary_axis is None or all(map(recipe.excluded, info.names)):
                continue
            for model in out.sources:
                donor = donors.found.get(model) if donors is not None else None
                carried = donor is not None and donor.origin is not None  # whose change goes by tokens
                if model not in checked and not carried:
                    check_token_ids(models[recipe.base], models[model])
                    checked.add(model)
