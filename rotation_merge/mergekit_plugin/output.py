"""The blocks of a recipe's output, each with the blocks of the models that go into it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition, MergeConfiguration, OutputSliceDefinition

from rotation_merge.architecture.model import Block, Part, TensorInfo
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.view import View

Sources = dict[ModelReference, Block]
"""By model, its block that goes into a block of the output."""


@dataclass(frozen=True)
class OutputBlock:
    """One block of the output.

    Attributes:
        block: the anchor's under the names of the output; with spaces of its own, where it has another place.
        anchor: the anchor's, whether it is merged or not.
        sources: the block of each model that is merged, by model.
        reader: looks up the parameters that hold here.
    """

    block: Block
    anchor: Block
    sources: Sources
    reader: ConfigReader

    @property
    def label(self) -> str:
        """Sorts blocks in the order in which mergekit asks for their tensors."""
        return min((name for info in self.block.tensors for name in info.names), default="")

    @property
    def spaces(self) -> dict[str, str]:
        """The anchor's names of the local spaces, by their names in the output."""
        return {self.block.spaces[key].name: space.name for key, space in self.anchor.spaces.items()}

    def source(self, model: ModelReference) -> Block:
        """The block of a model; the anchor's, where it is not merged."""
        return self.sources.get(model, self.anchor)

    def names_in(self, model: ModelReference) -> dict[str, str]:
        """By the output's names of its tensors those in one model."""
        pairs = ((info, self.source(model).tensor(info.key) or info) for info in self.block.tensors)
        return {new: old for info, stored in pairs for new, old in zip(info.names, stored.names, strict=True)}


def output_blocks(config: MergeConfiguration, recipe: Recipe, models: Models) -> list[OutputBlock]:
    """All blocks of a recipe's output.

    Args:
        config: normalised: modules with slices.

    Raises:
        RotationMergeError: a layer is missing in a model.
    """
    return [_block(models[recipe.base], recipe.base, *met) for met in _meeting(config, models)]


def names_in(model: ModelReference, outs: Iterable[OutputBlock]) -> dict[str, str]:
    """The same of several blocks."""
    return {new: old for out in outs for new, old in out.names_in(model).items()}


def same_block(model: View, block: Block) -> Block:
    """The corresponding block of another model.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in model.architecture.blocks:
        same = (candidate.module, candidate.place, candidate.index) == (block.module, block.place, block.index)
        if same and (block.index is not None or candidate.name == block.name):
            return candidate
    raise CheckpointError(f"has no block like {block.name}", where=model.name, remedy="merge models of one depth")


def _meeting(config: MergeConfiguration, models: Models) -> Iterator[tuple[int | None, Sources, ConfigReader]]:
    """Number (None outside of the layers), sources and parameters of each block."""
    for name, module in (config.modules or {}).items():
        slices, reader = module.slices or [], ConfigReader(config=config, t=0, module=module)
        numbers = itertools.count()
        for sources in _outside(models, name, "before", slices[0]):
            yield None, sources, reader.for_out_slice(slices[0])
        for piece in slices:
            count = len(range(*piece.sources[0].layer_range))
            for offset in range(count):
                layers = {source.model: _layer(models, source, name, offset) for source in piece.sources}
                t = offset / (count - 1) if count > 1 else 1.0
                yield next(numbers), layers, reader.for_out_slice(piece).with_t(t)
        for sources in _outside(models, name, "after", slices[-1]):
            yield None, sources, reader.for_out_slice(slices[-1])


def _outside(models: Models, module: str, place: str, piece: OutputSliceDefinition) -> list[Sources]:
    """The blocks before or after the layers."""
    blocks: dict[str, Sources] = {}
    for source in piece.sources:
        for block in models[source.model].architecture.blocks:
            if block.module == module and block.place == place:
                blocks.setdefault(block.name, {})[source.model] = block
    return list(blocks.values())


def _layer(models: Models, source: InputSliceDefinition, module: str, offset: int) -> Block:
    layers, number = models[source.model].architecture.layers(module), source.layer_range[0] + offset
    if number >= len(layers):
        problem = f"layer {number} is asked for, the model has {len(layers)}"
        raise RecipeError(problem, where=f"slices, {source.model}", remedy="correct layer_range")
    return layers[number]


def _block(
    base: View, reference: ModelReference, index: int | None, sources: Sources, reader: ConfigReader
) -> OutputBlock:
    anchor = sources.get(reference) or same_block(base, next(iter(sources.values())))
    infos = (replace(info, names=base.architecture.names(info, index)) for info in anchor.tensors)
    block = replace(anchor, index=index, tensors=tuple(infos))
    return OutputBlock(block if index == anchor.index else _with_own_spaces(block), anchor, sources, reader)


def _with_own_spaces(block: Block) -> Block:
    """A block with other names of its local spaces than the anchor's block has, which may stand elsewhere, too."""
    spaces = {key: replace(space, name=f"{space.name} as {block.index}") for key, space in block.spaces.items()}
    renamed = {block.spaces[key].name: space for key, space in spaces.items()}

    def part(known: Part) -> Part:
        return replace(known, space=renamed.get(known.space.name, known.space))

    def named(info: TensorInfo) -> TensorInfo:
        axes = (replace(axis, pieces=tuple(tuple(map(part, piece)) for piece in axis.pieces)) for axis in info.axes)
        common = info.common and renamed.get(info.common.name, info.common)
        return replace(info, axes=tuple(axes), common=common)

    names = {name: space.name for name, space in renamed.items()}
    norms = tuple(replace(norm, stream=names.get(norm.stream, norm.stream)) for norm in block.norms)
    scales = tuple(replace(scale, stream=names.get(scale.stream, scale.stream)) for scale in block.scales)
    return replace(block, tensors=tuple(map(named, block.tensors)), spaces=spaces, norms=norms, scales=scales)


def check_tensors(recipe: Recipe, models: Models, out: OutputBlock) -> None:
    """Check that every model has the tensors of a block, but for those that are left to the anchor.

    Raises:
        CheckpointError: some models have a tensor that others lack.
    """
    anchor, sources = out.anchor, out.sources
    for info in {info.key: info for block in (*sources.values(), anchor) for info in block.tensors}.values():
        holders = [model for model, block in sources.items() if block.tensor(info.key) is not None]
        tied = [model for model in sources if any(name in models[model] for name in info.tied)]
        lacking = [model for model in sources if model not in (*holders, *tied)]
        if anchor.tensor(info.key) is None:
            if info.tied and all(models[model].config.get("tie_word_embeddings") for model in holders):
                continue  # a second copy, which the anchor does not store
            lacking.insert(0, recipe.base)
        if lacking and not recipe.excluded(info.name):
            holder = next(model for model in sources if model not in lacking)
            remedy = "merge models with the same heads, or name the tensor under 'exclude' to copy it from base_model"
            raise CheckpointError(
                f"tensor '{info.name}' is missing, {holder} has it", where=str(lacking[0]), remedy=remedy
            )
