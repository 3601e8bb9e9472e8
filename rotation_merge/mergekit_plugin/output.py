"""The output of a recipe: its blocks, which models' blocks they are merged of, and its architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mergekit.common import ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition, MergeConfiguration, OutputModuleDefinition

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe


@dataclass(frozen=True)
class OutputBlock:
    """One block of the output.

    Attributes:
        number: its place among all blocks of the output.
        index: which layer it is; None outside of the layers.
        anchor: the anchor's block, whose spaces the transforms go by, whether it is merged or not.
        sources: the block of each model that is merged, by model.
        reader: looks up the parameters that hold here.
        block: this block under the names of the output.
    """

    number: int
    index: int | None
    anchor: Block
    sources: dict[ModelReference, Block]
    reader: ConfigReader
    block: Block

    @property
    def label(self) -> str:
        """Sorts blocks in the order in which mergekit asks for their tensors."""
        name = self.block.tensors[0].name if self.block.tensors else ""
        return name if self.index is None else name[: name.index(f".{self.index}.") + len(f".{self.index}.")]

    def pairs(self) -> list[tuple[TensorInfo, TensorInfo]]:
        """Each tensor of the output, and the anchor's that it stands for."""
        known = {info.key: info for info in self.anchor.tensors}
        return [(info, known[info.key]) for info in self.block.tensors]


def same_block(models: Models, model: ModelReference, block: Block) -> Block:
    """The corresponding block of another model.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in models[model].architecture.blocks:
        same = (candidate.module, candidate.place, candidate.index) == (block.module, block.place, block.index)
        if same and (block.index is not None or candidate.name == block.name):
            return candidate
    raise CheckpointError(f"has no block like {block.name}", where=str(model), remedy="merge models of one depth")


def stores(models: Models, model: ModelReference, block: Block, info: TensorInfo) -> bool:
    """Whether a model stores a tensor in its block, or ties it to one that it stores."""
    return block.tensor(info.key) is not None or any(name in models[model] for name in info.tied)


class MergeOutput:
    """All blocks of a recipe's output.

    Args:
        config: normalised: modules with slices.

    Raises:
        RotationMergeError: a layer or a tensor is missing in a model.
    """

    def __init__(self, config: MergeConfiguration, recipe: Recipe, models: Models) -> None:
        self.config, self.recipe, self.models = config, recipe, models
        self.anchor = models[recipe.base].architecture
        self.blocks: list[OutputBlock] = []
        for name, module in (config.modules or {}).items():
            self._plan(name, module)

    @property
    def architecture(self) -> Architecture:
        """That of the output: the anchor's blocks under their new numbers."""
        return replace(self.anchor, blocks=tuple(out.block for out in self.blocks))

    def layers(self, module: str) -> int:
        return sum(out.index is not None and out.block.module == module for out in self.blocks)

    def _plan(self, name: str, module: OutputModuleDefinition) -> None:
        reader = ConfigReader(config=self.config, t=0, module=module)
        slices = module.slices or []
        self._outside(name, "before", slices[0].sources, reader.for_out_slice(slices[0]))
        index = 0
        for piece in slices:
            within = ConfigReader(config=self.config, slice_out=piece, t=0, module=module)
            count = len(range(*piece.sources[0].layer_range))
            for offset in range(count):
                t = offset / (count - 1) if count > 1 else 1
                self._layer(name, index, offset, piece.sources, within.with_t(t))
                index += 1
        self._outside(name, "after", slices[-1].sources, reader.for_out_slice(slices[-1]))

    def _outside(self, module: str, place: str, sources: Sequence[InputSliceDefinition], reader: ConfigReader) -> None:
        blocks: dict[str, dict[ModelReference, Block]] = {}
        for source in sources:
            for block in self.models[source.model].architecture.blocks:
                if block.module == module and block.place == place:
                    blocks.setdefault(block.name, {})[source.model] = block
        for same in blocks.values():
            self._add(None, same, reader)

    def _layer(
        self, module: str, index: int, offset: int, sources: Sequence[InputSliceDefinition], reader: ConfigReader
    ) -> None:
        blocks: dict[ModelReference, Block] = {}
        for source in sources:
            layers = self.models[source.model].architecture.layers(module)
            number = source.layer_range[0] + offset
            if number >= len(layers):
                raise RecipeError(
                    f"layer {number} is asked for, the model has {len(layers)}",
                    where=f"slices, {source.model}",
                    remedy="correct layer_range",
                )
            blocks[source.model] = layers[number]
        self._add(index, blocks, reader)

    def _add(self, index: int | None, sources: dict[ModelReference, Block], reader: ConfigReader) -> None:
        base = self.recipe.base
        anchor = sources.get(base) or same_block(self.models, base, next(iter(sources.values())))
        infos = [
            replace(info, names=self.anchor.names(info, index))
            for info in self._tensors(anchor, sources)
            if anchor.tensor(info.key) is not None
        ]
        block = replace(anchor, index=index, tensors=tuple(infos))
        self.blocks.append(OutputBlock(len(self.blocks) + 1, index, anchor, sources, reader, block))

    def _tensors(self, anchor: Block, sources: dict[ModelReference, Block]) -> list[TensorInfo]:
        """The tensors of a block, each present in every source (or left to the anchor alone).

        Raises:
            CheckpointError: some models have a tensor that others lack.
        """
        infos: dict[str, TensorInfo] = {}
        for block in (anchor, *sources.values()):
            for info in block.tensors:
                infos.setdefault(info.key, info)
        infos = {key: info for key, info in infos.items() if not self._spare(info, anchor, sources)}
        for info in infos.values():
            lacking = [m for m, block in sources.items() if not stores(self.models, m, block, info)]
            if anchor.tensor(info.key) is None:
                lacking.insert(0, self.recipe.base)
            if lacking and not self.recipe.excluded(info.name):
                holder = next(m for m in sources if m not in lacking)
                raise CheckpointError(
                    f"tensor '{info.name}' is missing, {holder} has it",
                    where=str(lacking[0]),
                    remedy="merge models with the same heads, or name the tensor under 'exclude' "
                    "to copy it from base_model",
                )
        return list(infos.values())

    def _spare(self, info: TensorInfo, anchor: Block, sources: dict[ModelReference, Block]) -> bool:
        """Whether a tensor is a second copy of a tied one, which the anchor does not store."""
        holders = [self.models[model] for model, block in sources.items() if block.tensor(info.key) is not None]
        tied = bool(info.tied) and anchor.tensor(info.key) is None
        return tied and all(model.config.get("tie_word_embeddings") for model in holders)
