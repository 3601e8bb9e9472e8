"""The tasks that bring every source's tensors of one output block to the anchor's coordinates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.methods import BLOCK, TENSOR, plan_of
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.mergekit_plugin.planning.blocks import BlockPart, OutputBlock, same_block
from rotation_merge.mergekit_plugin.planning.donors import Donor, Donors
from rotation_merge.mergekit_plugin.planning.tasks import CarriedTensor, LabelledLoad, Loads, MatchBlock, MoveTensor
from rotation_merge.mergekit_plugin.recipe import title
from rotation_merge.model.biases import holders, inputs


@dataclass(frozen=True)
class Move:
    """The move of one source's tensors of a block to the anchor's coordinates.

    Attributes:
        frame: the block whose space names the transforms go by.
        transforms: task that matches the block's local spaces.
        whole: task that gives the alignment of the whole model.
        origin: the same block of the model the source was fine-tuned from.
        rows: the anchor's and the origin's rows of the tokens they share, where their vocabularies differ.
        carrying: task that gives the anchor's tensors as the source changes them, instead of all these.
        scale: of the change from the origin.
    """

    source: BlockPart
    frame: Block
    transforms: Task | None = None
    whole: Task | None = None
    origin: BlockPart | None = None
    rows: tuple[Tensor, Tensor] | None = None
    carrying: Task | None = None
    scale: float = 1.0


class BlockMoves:
    """The moves of all sources of one output block; filters and per-layer lists are resolved by `reader`."""

    def __init__(self, donors: Donors, out: OutputBlock, reader: ConfigReader) -> None:
        self.donors, self.out, self.fold = donors, out, donors.fold
        self.found = {source.model: self._carried(source, reader) for source in (out.anchor, *out.sources)}

    def _carried(self, source: BlockPart, reader: ConfigReader) -> Move:
        """The move of one source's tensors, or the task that carries them with samples."""
        donor = self.donors.found.get(source.model, Donor())
        if donor.carried.carrying is not None:
            frame = self._same_block(self.donors.recipe.base, source.block)
            return Move(source, frame.block, carrying=donor.carried.carrying)
        return replace(self._move(source, reader), scale=donor.carried.scale)

    def _move(self, source: BlockPart, reader: ConfigReader) -> Move:
        """The move of one source's block."""
        recipe, anchor = self.donors.recipe, self.out.anchor
        donor = self.donors.found.get(source.model, Donor())
        origin = None if donor.origin is None else self._same_block(donor.origin, source.block)
        if source is anchor and donor.whole is None:
            return Move(source, anchor.block, origin=origin)
        if donor.whole is not None and source.block.index == anchor.block.index:
            frame = self._same_block(recipe.base, source.block)
            return Move(source, frame.block, None, donor.whole, origin, donor.rows)
        options = recipe.options(reader, anchor.block.name, source.model)
        if not wanted_spaces(anchor.block, options):
            return Move(source, anchor.block, None, donor.whole, origin, donor.rows)
        keys = [i.key for i in anchor.block.tensors if _touches(i, anchor.block, whole=donor.whole is not None)]
        if self.fold is not None:
            keys = self.folded_from(anchor.block, keys)
        task = MatchBlock(
            key=f"{self.out.number}:{source.model}",
            label=self.out.label,
            block=anchor.block,
            anchor=self.loads(anchor, keys),
            donor=self.loads(origin or source, keys),
            anchor_name=str(recipe.base),
            donor_name=title(source.model, donor.origin),
            options=options,
            run=self.donors.run,
            fold=self.fold,
            whole=donor.whole,
            ahead=self.donors.ahead,
        )
        if self.donors.ahead is not None:
            shapes = self.donors.models[anchor.model].shapes
            names = (name for info in anchor.block.tensors for name in info.names)
            self.donors.ahead.add(task, sum(math.prod(shapes.get(name, (0,))) for name in names))
        return Move(source, anchor.block, task, donor.whole, origin, donor.rows)

    def tasks(self, source: BlockPart, info: TensorInfo) -> tuple[Task, ...]:
        """Tasks for a source's pieces of one tensor: loads, or a task that moves them."""
        move, names = self.found[source.model], self.out.names(info)
        block = move.frame
        framed = block.tensor(info.key) or info
        if move.carrying is not None:
            return self._carried_tensor(move, info, framed)
        matched = move.transforms is not None or move.whole is not None
        moving = matched and _touches(framed, block, whole=move.whole is not None)
        folding = self.fold is not None and self.fold.touches(block, framed)
        unseen = inputs(block, framed) if matched and move.origin is None else []
        adapted = source.model.lora is not None  # comes unrounded
        if not moving and not folding and not unseen and move.origin is None and not adapted:
            return self.loads(move.source, [info.key])[info.key]
        keys = self.folded_from(block, unseen or [info.key])
        hidden = {info.key for info in holders(block)}.intersection(unseen)
        needed = keys if move.origin is not None else self.folded_from(block, filter(hidden.__contains__, unseen))
        recipe = self.donors.recipe
        base = self._same_block(recipe.base, block)
        carried = move.origin is not None
        task = MoveTensor(
            key=f"{self.out.number}:{source.model}:{info.key}",
            label=names[0],
            block=block,
            info=framed,
            loads=self.loads(move.source, keys),
            transforms=move.transforms if moving or unseen else None,
            whole=move.whole if moving or unseen else None,
            fold=self.fold,
            anchor=self.loads(base, needed),
            origin=self.loads(move.origin, keys) if move.origin is not None else {},
            run=self.donors.run if carried else None,
            donor_name=str(source.model),
            rows=move.rows if carried and framed.vocabulary_axis is not None else None,
            dtype=self._moved_dtype(move.source, info),
            scale=move.scale,
        )
        return (task,) * len(names)

    def _carried_tensor(self, move: Move, info: TensorInfo, framed: TensorInfo) -> tuple[Task, ...]:
        """The anchor's tensor with the source's change, fitted to samples."""
        names = self.out.names(info)
        base = self._same_block(self.donors.recipe.base, move.frame)
        dtype = self._moved_dtype(base, info) if self._unrounded(info) else self.donors.recipe.dtype
        assert move.carrying is not None
        task = CarriedTensor(
            key=f"{self.out.number}:{move.source.model}:{info.key}",
            label=names[0],
            block=move.frame,
            info=framed,
            carrying=move.carrying,
            anchor=self.loads(base, self.folded_from(move.frame, [info.key])),
            fold=self.fold,
            dtype=dtype,
        )
        return (task,) * len(names)

    def storage(self, source: BlockPart, info: TensorInfo) -> torch.dtype | None:
        """Dtype in which a source's tensor would be written: the recipe's, else that of its file; None: in memory."""
        model = self.donors.models[source.model]
        if self.donors.recipe.dtype is not None or source.model in self.donors.models.held:
            return self.donors.recipe.dtype
        dtypes, model_info = model.stored_dtypes, source.block.tensor(info.key) or info
        return next((dtypes[n] for n in (*model_info.names, *model_info.tied) if n in dtypes), None)

    def _moved_dtype(self, source: BlockPart, info: TensorInfo) -> torch.dtype | None:
        """Dtype that a moved tensor is rounded to; None: that of the tensor as it is read."""
        if self._unrounded(info):
            return torch.promote_types(self.storage(source, info) or torch.float32, torch.float32)
        return self.donors.recipe.dtype if source.model.lora is None else self.storage(source, info)

    def _unrounded(self, info: TensorInfo) -> bool:
        """Whether a delegate of our own takes the tensor: it rounds the result alone, since changes are small."""
        recipe = self.donors.recipe
        takes_tensors = plan_of(recipe.delegate).unit in (TENSOR, BLOCK)
        return takes_tensors and not any(map(recipe.excluded, self.out.names(info)))

    def loads(self, source: BlockPart, keys: Iterable[str]) -> Loads:
        """Loads of some tensors of a source's block, labelled by the names they have in the output."""
        options = self.donors.options
        device = options.device if options.read_to_gpu else None
        run = self.donors.run if self.donors.run.watched else None
        rows = self.donors.models[source.model].rows
        result: Loads = {}
        for key in keys:
            info = self.out.anchor.block.tensor(key) or source.block.tensor(key)
            model_info = source.block.tensor(key) or info
            if info is None or model_info is None or not self.out.has(source, info):
                continue
            result[key] = tuple(
                LabelledLoad(
                    model=source.model,
                    tensor=name,
                    device=device,
                    tied_names=model_info.tied or None,
                    label=label,
                    run=run,
                    rows=rows.get(name),
                )
                for name, label in zip(model_info.names, self.out.names(info), strict=True)
            )
        return result

    def folded_from(self, block: Block, keys: Iterable[str]) -> list[str]:
        """The tensors that some folded ones are made of."""
        return list(dict.fromkeys(source for key in keys for source in self.fold_keys(block, key)))

    def _same_block(self, model: ModelReference, block: Block) -> BlockPart:
        return same_block(self.donors.models, model, block)

    def fold_keys(self, block: Block, key: str) -> list[str]:
        """The tensors that a folded tensor is made of."""
        info = block.tensor(key)
        return [key] if info is None or self.fold is None else self.fold.inputs(block, info)


def _touches(info: TensorInfo, block: Block, whole: bool) -> bool:
    """Whether a tensor has an axis that a transform may move."""
    local = {space.name for space in block.spaces.values()}
    return any(space.name in local or (whole and space.kind == "stream") for space in info.spaces())
