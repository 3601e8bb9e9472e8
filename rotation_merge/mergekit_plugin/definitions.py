"""Our architectures as mergekit's architecture definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mergekit.architecture.base import ModelArchitecture, ModuleArchitecture, ModuleDefinition, WeightInfo
from transformers import PretrainedConfig

from rotation_merge.architecture import Architecture, find
from rotation_merge.matching.pair import check_depth, check_shapes
from rotation_merge.mergekit_plugin.recipe import tuned_from
from rotation_merge.mergekit_plugin.session import Session
from rotation_merge.model.view import View


class AlignedModule(ModuleArchitecture):
    """One module of one of our architectures, in every model of a recipe: views have the output's names and layers."""

    def __init__(self, architecture: Architecture, module: str) -> None:
        self.architecture, self.module = architecture, module

    def _weights(self, place: str, index: int | None = None) -> list[WeightInfo]:
        return [
            WeightInfo(name=name, vocabulary_axis=info.vocabulary_axis)
            for block in self.architecture.blocks
            if block.module == self.module and block.place == place
            if index is None or block.index == min(index, self.count() - 1)
            for info in block.tensors
            for name in self.architecture.names(info, index)
        ]

    def count(self) -> int:
        return len(self.architecture.layers(self.module))

    def pre_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("before")

    def post_weights(self, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("after")

    def layer_weights(self, index: int, config: PretrainedConfig) -> list[WeightInfo]:
        return self._weights("layer", index)

    def num_layers_config_key(self) -> str:
        return self.architecture.layers_key[self.module]

    def num_layers(self, config: PretrainedConfig) -> int:
        return self.count()


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


def describe(architecture: Architecture, config: Mapping[str, Any]) -> ModelArchitecture:
    """An architecture as mergekit's `ModelArchitecture`."""
    spec = find(config)
    return ModelArchitecture(
        modules={
            module: ModuleDefinition(architecture=AlignedModule(architecture, module))
            for module in architecture.layers_key
        },
        architectures=list(config.get("architectures") or []),
        model_type=str(config.get("model_type")),
        tagalong_files=list(spec.tagalong_files) if spec else None,
        vocab_size_config_key=spec.vocab_size_key if spec else None,
    )
