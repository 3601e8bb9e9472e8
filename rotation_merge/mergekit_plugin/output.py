"""The blocks of a recipe's output, each with the blocks of the models that go into it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputModelDefinition, InputSliceDefinition, OutputSliceDefinition

from rotation_merge.architecture.model import Block
from rotation_merge.errors import CheckpointError, RecipeError, nearest
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Models
from rotation_merge.model.view import FURTHER, View

Sources = dict[ModelReference, Block]
"""By model, its block that goes into a block of the output."""


@dataclass(frozen=True)
class OutputBlock:
    """One block of the output.

    Attributes:
        block: the anchor's under the names of the output; with spaces of its own, where it has another place.
        anchor: the anchor's, whether it is merged or not.
        sources: the block of each model that is merged, by model; none where all is copied from the anchor.
        reader: looks up the parameters that hold here.
    """

    block: Block
    anchor: Block
    sources: Sources
    reader: ConfigReader

    @property
    def spaces(self) -> dict[str, str]:
        """The anchor's names of the local spaces, by their names in the output."""
        return {self.block.spaces[key].name: space.name for key, space in self.anchor.spaces.items()}

    def names_in(self, model: ModelReference, view: View | None = None) -> dict[str, str]:
        """By the output's names of its tensors those in one model; of one that is not merged the anchor's.

        Args:
            view: read for the model; what it lacks is left out then, and what it has under a tied name stands there.
        """
        block, names = self.sources.get(model, self.anchor), dict[str, str]()
        block = block if view is None or block.name == FURTHER else same_block(view, block)
        for info in self.block.tensors:
            stored = block.tensor(info.key) or info
            for new, old in zip(info.names, stored.names, strict=True):
                known = next((name for name in (old, *stored.tied) if view is None or name in view), None)
                if known is not None:
                    names[new] = known
        return names


def further_block(
    models: Models, base: ModelReference, blocks: Sequence[OutputBlock], moved: Collection[ModelReference]
) -> OutputBlock | None:
    """The anchor's layers that predict further tokens, averaged if no model's stream moves and all have these layers.

    They read the last layer's output, so that none are taken to an output of another depth.

    Args:
        blocks: all others of the output.
        moved: models whose streams move, or whose changes come from other models.
    """
    anchor, last = models[base], blocks[-1]
    names, depth = anchor.predicting_ahead, len(anchor.architecture.layers(last.block.module))
    if not names or depth != sum(
        out.block.module == last.block.module and out.block.index is not None for out in blocks
    ):
        return None
    block = anchor.further_block
    views = [models[model] for model in last.sources]
    same = all(view.shapes.get(name) == anchor.shapes[name] for view in views for name in names)
    sources = dict.fromkeys(last.sources, block) if same and not any(model in moved for model in last.sources) else {}
    return OutputBlock(block, block, sources, last.reader)


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


PLACES = ("before", "layer", "after")


def output_blocks(recipe: Recipe, models: Models) -> list[OutputBlock]:
    """All blocks of a recipe's output, in their order; refuses layers and modules that a model lacks."""
    base, blocks = models[recipe.base], list[OutputBlock]()
    for module, slices, reader in _modules(recipe, base):
        numbers = itertools.count()
        for piece in slices:
            ends = piece is slices[0], True, piece is slices[-1]
            places = [place for place, present in zip(PLACES, ends, strict=True) if present]
            parts = {source.model: _part(models[source.model], module, source, places) for source in piece.sources}
            meeting: dict[str | int, Sources] = {}
            for model, part in parts.items():
                for key, block in part.items():
                    meeting.setdefault(key, {})[model] = block
            last, of_piece = len(range(*piece.sources[0].layer_range)) - 1, reader.for_out_slice(piece)
            in_order = sorted(meeting.items(), key=lambda item: PLACES.index(next(iter(item[1].values())).place))
            for key, sources in in_order:
                of_layer = of_piece.with_t(key / last if last else 1.0) if isinstance(key, int) else of_piece
                index = next(numbers) if isinstance(key, int) else None
                blocks.append(_block(recipe, base, index, sources, of_layer))
    return blocks


def _part(model: View, module: str, source: InputSliceDefinition, places: Sequence[str]) -> dict[str | int, Block]:
    """The blocks of a model in a slice: layers by their number there, those before and after them by name."""
    blocks = [block for block in model.architecture.blocks if block.module == module]
    layers, (first, end) = model.architecture.layers(module), source.layer_range
    if end > len(layers):
        problem = f"layers {first} to {end - 1} are asked for, the model has {len(layers)}"
        raise RecipeError(problem, where=f"slices, {source.model}", remedy="correct layer_range")
    part: dict[str | int, Block] = dict(enumerate(layers[first:end]))
    part.update((block.name, block) for block in blocks if block.index is None and block.place in places)
    return part


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
        slices = part.slices or [whole_slice(recipe, part.models or [], len(base.architecture.layers(name)))]
        yield name, slices, ConfigReader(config=config, t=0, module=module)


def whole_slice(recipe: Recipe, entries: Sequence[InputModelDefinition], count: int) -> OutputSliceDefinition:
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


def _block(recipe: Recipe, base: View, index: int | None, sources: Sources, reader: ConfigReader) -> OutputBlock:
    """A block of the output; the same of the anchor may stand elsewhere, too, and its spaces get names of their own."""
    first = next(iter(sources.values()))  # of other methods any model's layers may stand alone
    anchor = sources.get(recipe.base) or (first if recipe.stock else same_block(base, first))
    infos = (replace(info, names=base.architecture.names(info, index)) for info in anchor.tensors)
    block = replace(anchor, index=index, tensors=tuple(infos))
    names = {space.name: f"{space.name} as {index}" for space in anchor.spaces.values()}
    return OutputBlock(block if index == anchor.index else _renamed(block, names), anchor, sources, reader)


def _renamed(part: Any, names: Mapping[str, str]) -> Any:
    """A block, or a part of one, with other names of spaces."""
    if isinstance(part, str):
        return names.get(part, part)
    if isinstance(part, tuple):
        return tuple(_renamed(item, names) for item in part)
    if isinstance(part, dict):
        return {key: _renamed(item, names) for key, item in part.items()}
    if not is_dataclass(part):
        return part
    entries = {field.name: _renamed(getattr(part, field.name), names) for field in fields(part) if field.init}
    return replace(part, **entries)  # type: ignore[type-var]


def check_tensors(recipe: Recipe, models: Models, out: OutputBlock) -> None:
    """Refuse models that lack a tensor of a block which others have, unless it is left to the anchor."""
    anchor, sources = out.anchor, out.sources
    for info in {info.key: info for block in (*sources.values(), anchor) for info in block.tensors}.values():
        holders = [model for model, block in sources.items() if block.tensor(info.key) is not None]
        tied = [model for model in sources if any(name in models[model] for name in info.tied)]
        lacking = [model for model in sources if model not in (*holders, *tied)]
        if anchor.tensor(info.key) is None:
            if info.tied and (recipe.stock or all(models[m].config.get("tie_word_embeddings") for m in holders)):
                continue  # a second copy, which the anchor does not store; of other methods `check_heads` judges
            lacking.insert(0, recipe.base)
        if lacking and not recipe.excluded(info.name):
            holder = next(model for model in sources if model not in lacking)
            problem = f"tensor '{info.name}' is missing, {holder} has it"
            remedy = "merge models with the same heads, or name the tensor under 'exclude' to copy it from base_model"
            if any(name in models[lacking[0]] for name in info.tied):
                remedy = "set 'untie: true' (the output then stores its head), or leave it out under 'exclude'"
            raise CheckpointError(problem, where=str(lacking[0]), remedy=remedy)
