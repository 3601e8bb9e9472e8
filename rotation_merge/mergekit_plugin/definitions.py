"""Our architectures as mergekit's architecture definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergekit.architecture.base import ModelArchitecture, ModuleArchitecture, ModuleDefinition, WeightInfo
from mergekit.common import ModelReference
from transformers import PretrainedConfig

from rotation_merge.architecture import Architecture, find
from rotation_merge.matching.pair import check_depth, check_shapes
from rotation_merge.mergekit_plugin.recipe import tuned_from
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.view import View

Names = Mapping[ModelReference, Mapping[str, str]]
"""By model, the own name of each output tensor that is called otherwise in the model."""


def read_as(name: str, stored_name: str) -> str:
    """The name under which a model gives an output tensor that it calls otherwise."""
    return f"{name} of {stored_name}"


class AlignedModule(ModuleArchitecture):
    """One module of one of our architectures.

    Args:
        own_names: by which recipes' filters know tensors of single models, where slices renumber layers.
    """

    def __init__(self, architecture: Architecture, module: str, own_names: Names) -> None:
        self.architecture, self.module, self.own_names = architecture, module, own_names

    def _weights(self, place: str, index: int | None, stored_names: Mapping[str, str]) -> list[WeightInfo]:
        return [
            WeightInfo(
                name=stored_names.get(name, name),
                aliases=(read_as(name, stored_names[name]),) if name in stored_names else None,
                vocabulary_axis=info.vocabulary_axis,
            )
            for block in self.architecture.blocks
            if block.module == self.module and block.place == place
            if index is None or block.index == min(index, self.count() - 1)
            for info in block.tensors
            for name in self.architecture.names(info, index)
        ]

    def count(self) -> int:
        return len(self.architecture.layers(self.module))

    def pre_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("before", None, {})

    def post_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("after", None, {})

    def layer_weights(self, index: int, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("layer", index, self.own_names.get(getattr(config, "placed_model", None), {}))

    def num_layers_config_key(self) -> str:
        return self.architecture.layers_key[self.module]

    def num_layers(self, config: PretrainedConfig) -> int:
        part, _, nested = self.num_layers_config_key().partition(".")
        half = bool(nested) and not hasattr(config, part)  # of a text-only model that is a language half
        return self.count() if half or not part else super().num_layers(config)


def open_models(session: Session) -> View:
    """Open a recipe's models, and check them together with it; returns the anchor.

    Raises:
        RotationMergeError: the recipe or a model is at fault.
    """
    recipe, models = session.recipe, session.models
    config, references = recipe.config, recipe.config.referenced_models()
    models.together(recipe.base, references)
    anchor = models[recipe.base]
    recipe.settle([anchor, *map(models.__getitem__, references)])
    for part in (config, *(config.modules or {}).values()):
        whole = [models[model.model] for model in part.models or []]
        for model in whole:
            check_depth(whole[0], model, "pair the layers under 'slices'")
    resized = bool(config.tokenizer or config.tokenizer_source or session.options.unsafe_truncate_embeddings)
    carried = tuned_from(config)
    for reference in references:
        check_shapes(anchor, models[reference], recipe.excluded, resized or reference in carried)
    return anchor


def describe(
    architecture: Architecture, config: Mapping[str, Any], own_names: Names | None = None
) -> ModelArchitecture:
    """An architecture as mergekit's `ModelArchitecture`; `own_names` as of `AlignedModule`."""
    spec = find(config)
    return ModelArchitecture(
        modules={
            module: ModuleDefinition(architecture=AlignedModule(architecture, module, own_names or {}))
            for module in architecture.layers_key
        },
        architectures=list(config.get("architectures") or []),
        model_type=str(config.get("model_type")),
        tagalong_files=list(spec.tagalong_files) if spec else None,
        vocab_size_config_key=spec.vocab_size_key if spec else None,
    )
