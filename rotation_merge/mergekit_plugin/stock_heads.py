"""Heads that mergekit's own methods lose: what it knows of a class may lack its head, or its tie to the embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mergekit import merge
from mergekit.architecture.base import WeightInfo
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from rotation_merge.errors import ArchitectureError
from rotation_merge.mergekit_plugin.loader import decoded
from rotation_merge.model.open import differing_head
from rotation_merge.model.view import View


def check_heads(config: MergeConfiguration, options: MergeOptions, models: Mapping[ModelReference, View]) -> None:
    """Refuse a recipe of a method of mergekit's whose result has another head than the average of its models' heads.

    mergekit merges the tensors that it lists for a class. Without the head among them, the result's head is the
    embedding; without its tie, models that store no head are left out of the head's average.

    Raises:
        ArchitectureError: names the model whose head is lost; heads that equal the embedding are not.
    """
    if not any(map(_stored_head, models.values())):
        return
    listed, method = _listed(config, options), config.merge_method
    for views in ([models[reference] for reference in references] for references in _meeting(config)):
        stored = {view.name: name for view in views if (name := _stored_head(view))}
        names = set(map(_ending, stored.values()))
        if not names & listed.keys():
            lost = next((view for view in views if view.name in stored and differing_head(view)), None)
            problem = f"its head differs from the embedding, and '{method}' does not merge heads of this class"
        else:
            alone = any(name in listed and not listed[name].tied_names for name in names)
            lost = next((view for view in views if alone and view.name not in stored), None)
            problem = f"its head is the embedding, and '{method}' leaves it out of the merge of heads"
        if lost is not None:
            remedy = f"use 'merge_method: rotation_merge' with 'delegate: {method}' and 'untie: true'"
            raise ArchitectureError(problem, where=lost.name, remedy=remedy)


def _stored_head(view: View) -> str:
    """The name of a stored head that could share the embedding's tensor; empty without one."""
    return next((info.name for info in view.architecture.heads() if info.name in view), "")


def _ending(name: str) -> str:
    """A tensor's name without the modules around its own, which may go by other names."""
    return ".".join(name.split(".")[-2:])


def _listed(config: MergeConfiguration, options: MergeOptions) -> dict[str, WeightInfo]:
    """What mergekit merges outside of layers, by the ends of names."""
    with decoded(config, options) as readable:
        first = readable.base_model or readable.referenced_models()[0]
        values = first.config(trust_remote_code=options.trust_remote_code)
        parts = [part.architecture for part in merge.get_architecture_info(readable, options).modules.values()]
    weights = [weight for part in parts for weight in (*part.pre_weights(values), *part.post_weights(values))]
    return {_ending(name): weight for weight in weights for name in (weight.name, *(weight.aliases or ()))}


def _meeting(config: MergeConfiguration) -> Iterator[Sequence[ModelReference]]:
    """Models whose heads meet: all, or those of the last slice."""
    for part in (config, *(config.modules or {}).values()):
        if part.models:
            yield list(dict.fromkeys([*filter(None, [config.base_model]), *(model.model for model in part.models)]))
        elif part.slices:
            yield [source.model for source in part.slices[-1].sources]
