"""One block of the output: each model's block for it, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit.common import ModelReference

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.mergekit_plugin.planning.opened import Models
from rotation_merge.mergekit_plugin.recipe import Recipe


@dataclass(frozen=True)
class BlockPart:
    """One model's part in an output block."""

    model: ModelReference
    architecture: Architecture
    block: Block


def same_block(models: Models, model: ModelReference, block: Block) -> BlockPart:
    """The corresponding block of another model.

    Raises:
        CheckpointError: there is none.
    """
    architecture = models[model].architecture
    for candidate in architecture.blocks:
        same = (candidate.module, candidate.place, candidate.index) == (block.module, block.place, block.index)
        if same and (block.index is not None or candidate.name == block.name):
            return BlockPart(model, architecture, candidate)
    raise CheckpointError(f"has no block like {block.name}", where=str(model), remedy="merge models of one depth")


@dataclass(frozen=True)
class OutputBlock:
    """The sources of one output block.

    Attributes:
        number: its place among all blocks of the output.
        index: which layer it is; None outside of the layers.
        anchor: the anchor's part, whether it is merged or not.
        sources: the parts that are merged.
    """

    recipe: Recipe
    models: Models
    number: int
    index: int | None
    anchor: BlockPart
    sources: list[BlockPart]

    def names(self, info: TensorInfo) -> tuple[str, ...]:
        """Output names of the pieces of a tensor."""
        return self.anchor.architecture.names(info, self.index)

    @property
    def label(self) -> str:
        """A label that sorts the block's matching before its merging and after the block before it."""
        name = self.names(self.anchor.block.tensors[0])[0]
        return name if self.index is None else name[: name.index(f".{self.index}.") + len(f".{self.index}.")]

    def has(self, source: BlockPart, info: TensorInfo) -> bool:
        """Whether a model stores a tensor, or ties it to one that it stores."""
        if source.block.tensor(info.key) is not None:
            return True
        return source.model != self.recipe.base and any(name in self.models[source.model] for name in info.tied)

    def tensors(self) -> list[TensorInfo]:
        """The tensors, each present in every source (or left to the anchor alone).

        Raises:
            CheckpointError: some models have a tensor that others lack.
        """
        infos = list(self.anchor.block.tensors)
        known = {info.key for info in infos}
        for source in self.sources:
            infos += [info for info in source.block.tensors if info.key not in known]
            known.update(info.key for info in source.block.tensors)
        infos = [info for info in infos if not self._spare(info)]
        for info in infos:
            lacking = [s for s in (self.anchor, *self.sources) if not self.has(s, info)]
            if lacking and not self.recipe.excluded(info.name):
                holder = next(s for s in self.sources if s not in lacking)
                raise CheckpointError(
                    f"tensor '{info.name}' is missing, {holder.model} has it",
                    where=str(lacking[0].model),
                    remedy="merge models with the same heads, or name the tensor under 'exclude' "
                    "to copy it from base_model",
                )
        return [info for info in infos if self.has(self.anchor, info)]

    def _spare(self, info: TensorInfo) -> bool:
        """Whether a tensor is a second copy of a tied one, which the anchor does not store."""
        holders = [self.models[s.model] for s in self.sources if s.block.tensor(info.key) is not None]
        tied = bool(info.tied) and self.anchor.block.tensor(info.key) is None
        return tied and all(model.config.get("tie_word_embeddings") for model in holders)
