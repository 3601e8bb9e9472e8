"""The blocks of a recipe's output, each with the blocks of the models that go into it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputModelDefinition, InputSliceDefinition, OutputSliceDefinition

from rotation_merge.architecture.model import Block, Part, TensorInfo
from rotation_merge.errors import CheckpointError, RecipeError, nearest
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Models
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


def readers_of(blocks: Iterable[OutputBlock]) -> dict[ModelReference, ConfigReader]:
    """The lookup of each model's parameters, in the first block that it goes into."""
    readers: dict[ModelReference, ConfigReader] = {}
    for out in blocks:
        for model in out.sources:
            readers.setdefault(model, out.reader.with_t(0))
    return readers


def layers_of(model: ModelReference, blocks: Iterable[OutputBlock]) -> dict[str, list[tuple[int, int]]]:
    """By module, which of the anchor's layers meets which layer of a model."""
    layers: dict[str, list[tuple[int, int]]] = {}
    for out in blocks:
        block = out.sources.get(model)
        if block is not None and block.index is not None and out.anchor.index is not None:
            layers.setdefault(block.module, []).append((out.anchor.index, block.index))
    return layers


def output_blocks(recipe: Recipe, models: Models) -> list[OutputBlock]:
    """All blocks of a recipe's output, in their order; refuses layers and modules that a model lacks."""
    base, blocks = models[recipe.base], list[OutputBlock]()
    for name, slices, reader in _modules(recipe, base):
        numbers = itertools.count()
        for number, piece in enumerate(slices):
            of_piece, count = reader.for_out_slice(piece), len(range(*piece.sources[0].layer_range))
            if number == 0:
                blocks += [_block(recipe, base, *met, of_piece) for met in _outside(models, name, "before", piece)]
            for offset in range(count):
                layers = {source.model: _layer(models, source, name, offset) for source in piece.sources}
                of_layer = of_piece.with_t(offset / (count - 1) if count > 1 else 1.0)
                blocks.append(_block(recipe, base, next(numbers), layers, of_layer))
            if piece is slices[-1]:
                blocks += [_block(recipe, base, *met, of_piece) for met in _outside(models, name, "after", piece)]
    return blocks


def _modules(recipe: Recipe, base: View) -> Iterator[tuple[str, list[OutputSliceDefinition], ConfigReader]]:
    """Each module of the output: its name, its slices, and the lookup of its parameters."""
    config, known = recipe.config, base.architecture.layers_key
    if config.slices and len(known) > 1:
        remedy = f"write slices for each under 'modules': {', '.join(known)}"
        raise RecipeError(f"the model has {len(known)} modules", where="slices", remedy=remedy)
    for name in config.modules or known:
        if name not in known:
            raise RecipeError(f"there is no module '{name}'", where="modules", remedy=nearest(name, known))
        module = (config.modules or {}).get(name)
        part = module or config
        slices = part.slices or [_whole(recipe, part.models or [], len(base.architecture.layers(name)))]
        yield name, slices, ConfigReader(config=config, t=0, module=module)


def _whole(recipe: Recipe, entries: Sequence[InputModelDefinition], count: int) -> OutputSliceDefinition:
    """Whole models as a slice; a base that is not listed joins them, if the delegate takes a base."""
    models = {entry.model: entry.parameters for entry in entries}
    if not recipe.plain:
        models.setdefault(recipe.base, None)
    sources = [
        InputSliceDefinition.model_construct(model=model, layer_range=(0, count), parameters=parameters)
        for model, parameters in models.items()
    ]
    return OutputSliceDefinition.model_construct(sources=sources)


def same_block(model: View, block: Block) -> Block:
    """The corresponding block of another model, which is refused if it has none."""
    for candidate in model.architecture.blocks:
        same = (candidate.module, candidate.place, candidate.index) == (block.module, block.place, block.index)
        if same and (block.index is not None or candidate.name == block.name):
            return candidate
    raise CheckpointError(f"has no block like {block.name}", where=model.name, remedy="merge models of one depth")


def _outside(models: Models, module: str, place: str, piece: OutputSliceDefinition) -> list[tuple[None, Sources]]:
    """The blocks before or after the layers, which have no number, with their sources."""
    blocks: dict[str, Sources] = {}
    for source in piece.sources:
        for block in models[source.model].architecture.blocks:
            if block.module == module and block.place == place:
                blocks.setdefault(block.name, {})[source.model] = block
    return [(None, sources) for sources in blocks.values()]


def _layer(models: Models, source: InputSliceDefinition, module: str, offset: int) -> Block:
    layers, number = models[source.model].architecture.layers(module), source.layer_range[0] + offset
    if number >= len(layers):
        problem = f"layer {number} is asked for, the model has {len(layers)}"
        raise RecipeError(problem, where=f"slices, {source.model}", remedy="correct layer_range")
    return layers[number]


def _block(recipe: Recipe, base: View, index: int | None, sources: Sources, reader: ConfigReader) -> OutputBlock:
    anchor = sources.get(recipe.base) or same_block(base, next(iter(sources.values())))
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
    """Refuse models that lack a tensor of a block which others have, unless it is left to the anchor."""
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
