"""Rejects donors that a delegate of our own does not support, before any weight is read."""

from __future__ import annotations

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration

from rotation_merge.errors import RecipeError
from rotation_merge.mergekit_plugin.donors import Donors
from rotation_merge.model.vocabulary import shared_rows

CARRY_FIRST = "carry the donor first ('rotation-merge carry') and {} the output, or use delegate task_arithmetic"


def check_meaning(config: MergeConfiguration, donors: Donors) -> None:
    """
    Raises:
        RecipeError: no maps are known, a donor's statistics say nothing of the tensors that are averaged, or its
            coordinates are the anchor's and there is nothing to transport.
    """
    recipe, method = donors.recipe, donors.recipe.own_method
    if method is None:
        return
    name = f"delegate {method.spec.name}"
    method.check_known(donors.base)
    words = [t.name for t in donors.base.architecture.tensors() if t.vocabulary_axis is not None]
    by_row = bool(method.statistics) and not method.maps_only and not all(map(recipe.excluded, words))
    rearranged = config.tokenizer or config.tokenizer_source or donors.options.unsafe_truncate_embeddings
    if method.whole_models:
        _check_layers(config, donors)
    for model, donor in donors.by_model.items():
        if method.whole_models and donor.origin is None:
            _one_vocabulary(donors, model, f"{name} runs all models on one set of token ids", "use another delegate")
        if method.statistics and donor.carried is not None:
            problem = f"{name} needs statistics of the carried model, but these are the donor's"
            raise RecipeError(problem, where=str(model), remedy=CARRY_FIRST.format("measure and merge"))
        if by_row and rearranged:
            _one_vocabulary(donors, model, f"{name} weighs the row of every token", "use delegate regmean")
        if method.on_samples and recipe.of_model("data", donors.readers[model], model) is not None:
            remedy = "leave 'data' out: plans then come from weights"
            _one_vocabulary(donors, model, f"{name} compares activations on the same tokens", remedy)
        if method.no_changes and donor.origin is not None:
            raise RecipeError(f"{name} {method.no_changes}", where=str(model), remedy=CARRY_FIRST.format("merge"))


def _check_layers(config: MergeConfiguration, donors: Donors) -> None:
    """Check that every model gives all of its layers in their order."""
    base = donors.models[donors.recipe.base].architecture
    for name, module in (config.modules or {}).items():
        numbers: dict[ModelReference, list[int]] = {}
        for source in (source for piece in module.slices or [] for source in piece.sources):
            numbers.setdefault(source.model, []).extend(range(*source.layer_range))
        for model, layers in numbers.items():
            if layers != list(range(len(base.layers(name)))):
                problem = f"delegate refit runs whole models, but the slices take layers {layers}"
                remedy = "take all layers in their order ('models:'), or another delegate"
                raise RecipeError(problem, where=str(model), remedy=remedy)


def _one_vocabulary(donors: Donors, model: ModelReference, why: str, remedy: str) -> None:
    base = donors.models[donors.recipe.base]
    if shared_rows([base, donors.models[model]]) is not None:
        raise RecipeError(f"{why}, but its tokens are not those of {base.reference}", where=str(model), remedy=remedy)
