"""A recipe of ours as the stock recipe of its delegate, which mergekit plans, merges and writes.

Every model stands as a view under a reference of this run; the delegate is a merge method that is told what is copied
from the anchor. Config, tokenizer and small files are the anchor's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mergekit import merge
from mergekit.architecture.base import ModelArchitecture, ModuleArchitecture, ModuleDefinition, WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import InputSliceDefinition, MergeConfiguration, OutputModuleDefinition, OutputSliceDefinition
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import InputContract, MergeMethod, TensorGroup
from mergekit.options import MergeOptions
from mergekit.parameter_resolver import resolve_parameters
from pydantic import PrivateAttr
from torch import Tensor
from transformers import PretrainedConfig

from rotation_merge.architecture import find
from rotation_merge.architecture.expression import evaluate
from rotation_merge.architecture.model import Block
from rotation_merge.averaging.average import check_merged
from rotation_merge.errors import ArchitectureError, CheckpointError, RecipeError, named, not_written, short
from rotation_merge.matching.options import NOTHING
from rotation_merge.matching.pair import check_depth, check_pair, check_shapes
from rotation_merge.mergekit_plugin.document import with_models
from rotation_merge.mergekit_plugin.donors import check_meaning, settled_donors
from rotation_merge.mergekit_plugin.loader import StandIn, ViewLoader, decoded, runs
from rotation_merge.mergekit_plugin.output import (
    OutputBlock,
    check_tensors,
    further_block,
    layers_of,
    output_blocks,
    readers_of,
)
from rotation_merge.mergekit_plugin.own_methods import Parameters, bound_method, refitted_view
from rotation_merge.mergekit_plugin.recipe import Recipe, tuned_from
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.mergekit_plugin.stock_heads import check_heads
from rotation_merge.mergekit_plugin.views import RecipeViews
from rotation_merge.model.folder import fetched
from rotation_merge.model.sentence import in_module
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import check_token_ids
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import listener


class CompiledRecipe(MergeConfiguration):
    """A stock recipe that takes the architecture of its output along through mergekit's own functions."""

    _architecture: ModelArchitecture = PrivateAttr()

    def referenced_models(self) -> list[ModelReference]:
        """Every model once, the base first."""
        models = [source.model for m in (self.modules or {}).values() for p in m.slices or [] for source in p.sources]
        return list(dict.fromkeys([self.base_model, *models]))


class AlignedModule(ModuleArchitecture):
    """One module of the output, in every model of a recipe: views have the output's names and layers.

    Attributes:
        apart: says of a tensor that it is written to a file of its own; for mergekit such a one is optional.
    """

    def __init__(self, blocks: Sequence[Block], layers_key: str, apart: Callable[[str], bool]) -> None:
        self.blocks, self.layers_key, self.apart = blocks, layers_key, apart

    def _weights(self, place: str, index: int | None = None) -> list[WeightInfo]:
        return [
            WeightInfo(name=name, vocabulary_axis=info.vocabulary_axis, optional=self.apart(name))
            for block in self.blocks
            if (block.place, block.index) == (place, index)
            for info in block.tensors
            for name in info.names
        ]

    def pre_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("before")

    def post_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("after")

    def layer_weights(self, index: int, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("layer", index)

    def num_layers_config_key(self) -> str:
        return self.layers_key


def described(views: RecipeViews) -> ModelArchitecture:
    """The architecture of a recipe's output as mergekit's `ModelArchitecture`."""
    architecture, config, spec = views.architecture, views.base.config, find(views.base.config)
    apart = partial(in_module, modules=views.base.modules)
    modules = {}
    for name, key in architecture.layers_key.items():
        blocks = [block for block in architecture.blocks if block.module == name]
        # not where the config counts layers that share one stored layer
        counts = bool(key) and evaluate(key, config) == len(views.base.architecture.layers(name))
        modules[name] = ModuleDefinition(architecture=AlignedModule(blocks, key if counts else "", apart))
    return ModelArchitecture(
        modules=modules,
        architectures=list(config.get("architectures") or []),
        model_type=str(config.get("model_type")),
        tagalong_files=list(spec.tagalong_files) if spec else None,
        vocab_size_config_key=spec.vocab_size_key if spec else None,
    )


def tensor_parameters(recipe: Recipe, blocks: Iterable[OutputBlock]) -> dict[str, dict[str, Any]]:
    """The delegate's parameters for each tensor of the output that is merged, by its name, as mergekit resolves them.

    Filters see the name that a tensor has in each model.

    Raises:
        RecipeError: a required parameter has no value for a tensor.
    """
    spec, base, parameters = recipe.delegate.spec, None if recipe.plain else recipe.base, dict[str, dict[str, Any]]()
    for out in (out for out in blocks if out.sources):
        own_names, reader = {model: out.names_in(model) for model in out.sources}, out.reader
        for name in (name for info in out.block.tensors for name in info.names if not recipe.excluded(name)):
            inputs, sources = {model: names[name] for model, names in own_names.items()}, reader.parameter_sources
            try:
                shared, each = resolve_parameters(
                    spec, tensor_name=name, inputs=inputs, sources=sources, base_model=base, t=reader.t
                )
            except RuntimeError as error:
                raise RecipeError(short(error), remedy="give it a value for every tensor") from error
            by_model = {
                known.name: {m: v[known.name] for m, v in each.items() if known.name in v}
                for known in spec.input_parameters
            }
            parameters[name] = {**shared, **by_model}
    return parameters


class Delegated(MergeMethod):
    """The delegate of one run, with the parameters of each tensor that it merges; all others are passed on.

    Tensors of the result are rounded, and refused if they hold NaN; those that have files of their own are kept apart.

    Args:
        name: under which mergekit knows it while the recipe runs.
        inner: the delegate.
        parameters: of each tensor that is merged, by its name.
        dtype: of the result; None: as the delegate gives it.
    """

    def __init__(
        self, session: Session, name: str, inner: MergeMethod, parameters: Parameters, dtype: torch.dtype | None
    ) -> None:
        self.session, self.inner, self.parameters, self.dtype = session, inner, parameters, dtype
        self.written, self.tell = itertools.count(1), listener()
        any_models = InputContract(min_inputs=0)  # the recipe's reader has judged them by the delegate's contract
        self.spec = replace(inner.spec, name=name, parameters=(), contract=any_models)

    def _execute_resolved(
        self, groups: Sequence[TensorGroup], parameters: list[dict[str, Any]], **options: Any
    ) -> tuple[Tensor | None, ...]:
        return tuple(self._finished(str(group.metadata.name), self._merged(group, options)) for group in groups)

    def _merged(self, group: TensorGroup, options: dict[str, Any]) -> Tensor:
        if (parameters := self.parameters.get(str(group.metadata.name))) is None:
            return group.entries[0].tensor  # the anchor's, which every model gives
        based = not self.session.recipe.plain
        entries = (replace(e, id=e.id.original, is_base=e.is_base and based) for e in group.entries)
        return self.inner((replace(group, entries=tuple(entries)),), parameters=parameters, **options)[0]

    def _finished(self, name: str, tensor: Tensor) -> Tensor | None:
        base, written = self.session.base, next(self.written)
        self.tell("writing tensors", written, max(written, len(base)))
        tensor = check_merged(tensor if self.dtype is None else tensor.to(self.dtype), name)
        if not in_module(name, base.modules):
            return tensor
        self.session.apart[name] = tensor.detach().cpu().clone()
        return None

    def _execute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError("groups are executed once they are resolved")


def compiled(session: Session) -> tuple[CompiledRecipe, RecipeViews]:
    """Settle a recipe's models, register them and the delegate for this run, and write its stock recipe.

    No weight is read. When the session's run ends, mergekit's registries are as they were.

    Returns:
        The stock recipe, and the views that stand for its models; they are prepared before single tensors are merged.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    views, recipe, number = output_views(session), session.recipe, next(runs)
    name, inner, parameters = f"rotation_merge:{number}", recipe.delegate, tensor_parameters(recipe, views.blocks)
    models = session.models
    placed = {m: StandIn.of(m, models[m].folder, number, models[m].untie) for m in views.stored}
    served = {model: views.served(model) for model in views.stored}
    stock = stock_recipe(views, name, placed)
    if recipe.on_whole_models:
        served[recipe.base], parameters = refitted_view(views, parameters), {}
    elif recipe.own_method is not None:
        stock = stock.model_copy(update={"dtype": None, "out_dtype": stock.out_dtype or stock.dtype})
        inner = bound_method(recipe.own_method, views, parameters)
    stock._architecture = described(views)
    delegated = Delegated(session, name, inner, parameters, dtype_from_name(stock.out_dtype))
    loaders = {reference: ViewLoader(served[model]) for model, reference in placed.items()}
    for registered, values in ((registry._METHODS, {name: delegated}), (LoaderCache.loaders, loaders)):
        registered.update(values)
        session.run.endings += [partial(registered.pop, key, None) for key in values]
    return stock, views


def output_views(session: Session) -> RecipeViews:
    """The models of a recipe as views of its output; refuses what is at fault, and reads no weight."""
    anchor = _open_models(session)
    blocks = output_blocks(session.recipe, session.models)
    donors = settled_donors(session, blocks)
    check_meaning(session, blocks, donors)
    session.run.folded = tuple(dict.fromkeys(stream for donor in donors.values() for stream in donor.folded))
    moved = [model for model, donor in donors.items() if donor.origin is not None or donor.moves_streams]
    further = None if session.run.folded else further_block(session.models, session.recipe.base, blocks, moved)
    blocks += [] if further is None else [further]
    kept = set() if further is None else {info.name for info in further.block.tensors}
    donors_have = [name for model in donors for name in session.models[model].predicting_ahead]
    if left_out := [name for name in dict.fromkeys([*anchor.ignored, *donors_have]) if name not in kept]:
        session.run.note(not_written(left_out))
    if further is not None and not further.sources and kept.intersection(donors_have):
        session.run.note(f"Layers that predict further tokens are not merged, but the anchor's: {named(sorted(kept))}.")
    for out in blocks:
        check_tensors(session.recipe, session.models, out)
    _check_tokens(session, blocks, [model for model, donor in donors.items() if donor.origin is None])
    return RecipeViews(session, blocks, donors)


def check_stock(session: Session) -> None:
    """Refuse models that a recipe of another method cannot merge, or would merge into one that nobody means.

    No weight is read. A frankenmerge may take layers of models of other depths.

    Raises:
        RotationMergeError, RuntimeError: ours, or mergekit's on architectures; name the model and what differs.
    """
    recipe, models, config = session.recipe, session.models, session.recipe.config
    _check_classes(session)
    base = _open_models(session)
    if find(base.config) is None or not set(config.modules or ()) <= set(base.architecture.layers_key):
        return
    merged = [out for out in output_blocks(recipe, models) if len(out.sources) > 1]
    for out in merged:
        check_tensors(recipe, models, out)
    for first in dict.fromkeys(next(iter(out.sources)) for out in merged):
        _check_meeting(session, models[first], [out for out in merged if next(iter(out.sources)) == first])
    _check_tokens(session, merged, readers_of(merged))
    check_heads(config, session.options, models)


def _check_classes(session: Session) -> None:
    """Refuse models of different classes where mergekit does."""
    recipe, models = session.recipe, session.models
    try:
        with decoded(recipe.config, session.options) as readable:
            merge.get_architecture_info(readable, session.options)
    except RuntimeError as error:
        kind = models[recipe.base].config.get("architectures")
        unlike = [m for m in recipe.config.referenced_models() if models[m].config.get("architectures") != kind]
        if not unlike:
            raise
        other = min(unlike, key=str)
        problem = f"its class is {models[other].config.get('architectures')}, that of {recipe.base} is {kind}"
        remedy = "merge models of one class, or run mergekit-yaml with --allow-crimes"
        raise ArchitectureError(problem, where=str(other), remedy=remedy) from error


def _check_meeting(session: Session, first: View, blocks: Sequence[OutputBlock]) -> None:
    """Refuse models whose layers, shapes or vocabularies differ from those of the first one that they meet."""
    recipe, names = session.recipe, {name for out in blocks for info in out.anchor.tensors for name in info.names}
    for reference in readers_of(blocks):
        if (model := session.models[reference]) is not first:
            check_pair(first, model, NOTHING, layers=layers_of(reference, blocks), excluded=recipe.excluded)
            check_shapes(first, model, lambda name: name not in names, recipe.new_tokens)


@contextmanager
def opened_views(recipe: Recipe, ledger: Ledger = NOWHERE) -> Iterator[RecipeViews]:
    """The models of a recipe as its merge sees them, without a merge; errors as of the merge.

    Args:
        ledger: store of matching's intermediate results, to resume from.
    """
    session = Session(recipe, MergeOptions(quiet=True), watched=False)
    session.run.ledger = ledger
    try:
        yield output_views(session)
    finally:
        session.run.end()


def _open_models(session: Session) -> View:
    """Open a recipe's models, and check them together with it; returns the anchor."""
    recipe, models = session.recipe, session.models
    config, references = recipe.config, recipe.config.referenced_models()
    models.together(recipe.base, references)
    recipe.settle([session.base, *(models[reference] for reference in references)])
    for part in (config, *(config.modules or {}).values()):
        whole = [models[model.model] for model in part.models or []]
        for model in whole:
            check_depth(whole[0], model, "pair the layers under 'slices'")
    resized, carried = recipe.new_tokens or session.options.unsafe_truncate_embeddings, tuned_from(config)
    resized = resized or (recipe.stock and not config.models)  # such as layers of a model with more tokens
    for reference in references:
        check_shapes(session.base, models[reference], recipe.excluded, resized or reference in carried)
        if config.models and not recipe.stock and find(session.base.config) is None:
            _check_same_names(session.base, models[reference], recipe)
    return session.base


def _check_same_names(base: View, model: View, recipe: Recipe) -> None:
    """Refuse models of an unknown class whose tensors differ in name; they are merged by names alone."""
    if odd := sorted(name for name in set(base) ^ set(model) if not recipe.excluded(name)):
        problem = f"tensor '{odd[0]}' is only in one of it and {base.name}, and no architecture file describes them"
        remedy = "merge models of one class, or name it under 'exclude' to copy it from base_model"
        raise CheckpointError(problem, where=model.name, remedy=remedy)


def _check_tokens(session: Session, blocks: Iterable[OutputBlock], averaged: Collection[ModelReference]) -> None:
    """Refuse models whose rows are averaged by token id without having the base's ids; changes go by tokens."""
    recipe = session.recipe
    rows = [
        out
        for out in blocks
        if any(i.vocabulary_axis is not None and not all(map(recipe.excluded, i.names)) for i in out.block.tensors)
    ]
    for model in dict.fromkeys(model for out in rows for model in out.sources) if not recipe.new_tokens else ():
        if model in averaged:
            check_token_ids(session.base, session.models[model])


def stock_recipe(views: RecipeViews, name: str, placed: Mapping[ModelReference, StandIn]) -> CompiledRecipe:
    """The recipe with the models of this run, layer by layer as in the output, under the delegate's name there."""
    recipe, config, cache = views.recipe, views.recipe.config, views.session.options.transformers_cache
    modules: dict[str, OutputModuleDefinition] = {}
    for out in views.blocks:
        if (index := out.block.index) is None:
            continue
        layers = index, index + 1
        models = [recipe.base] if recipe.on_whole_models else out.sources
        sources = [InputSliceDefinition.model_construct(model=placed[model], layer_range=layers) for model in models]
        module = modules.setdefault(out.block.module, OutputModuleDefinition.model_construct(slices=[]))
        module.slices.append(OutputSliceDefinition.model_construct(sources=sources))

    def stand_in(model: ModelReference) -> ModelReference:
        return placed[model] if model in placed else StandIn.of(model, fetched(model.model, cache))

    tokens = {key: with_models(getattr(config, key), stand_in) for key in ("tokenizer", "tokenizer_source")}
    values = {**dict(config), **tokens, "modules": modules, "models": None, "slices": None}
    return CompiledRecipe.model_construct(**{**values, "merge_method": name, "base_model": placed[recipe.base]})
