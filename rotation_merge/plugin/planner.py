"""mergekit's planner with alignment put between loading and merging."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mergekit.architecture import ModelArchitecture, WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition, MergeConfiguration, OutputModuleDefinition
from mergekit.graph import Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.parameter_resolver import resolve_parameters
from mergekit.plan import MergePlanner
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.plugin.donors import Donor, Donors
from rotation_merge.plugin.models import Models
from rotation_merge.plugin.recipe import Recipe
from rotation_merge.plugin.tasks import AlignedGather, LabelledLoad, Loads, MatchBlock, MoveTensor
from rotation_merge.report.run import current


@dataclass(frozen=True)
class Source:
    """One model's part in an output block."""

    model: ModelReference
    architecture: Architecture
    block: Block


@dataclass(frozen=True)
class Move:
    """How one source's tensors of a block get to the anchor's coordinates.

    Attributes:
        frame: the block whose space names the transforms go by.
        transforms: task that matches the block's local spaces.
        whole: task that gives the alignment of the whole model.
        origin: the same block of the model the source was fine-tuned from.
        rows: the anchor's and the origin's rows of the tokens they share, where their vocabularies differ.
    """

    source: Source
    frame: Block
    transforms: Task | None = None
    whole: Task | None = None
    origin: Source | None = None
    rows: tuple[Tensor, Tensor] | None = None


class RotationMergePlanner(MergePlanner):
    """Plans a merge whose donors are aligned; everything mergekit plans stays mergekit's."""

    def __init__(
        self, config: MergeConfiguration, arch_info: ModelArchitecture, options: MergeOptions, out_model_config: Any
    ) -> None:
        super().__init__(config, arch_info, options, out_model_config)
        self.recipe = Recipe.read(config)
        self._method = self.recipe.delegate
        self.models = Models(options, self.recipe.unsupported, self.recipe.untie)
        self.run = current()
        self._blocks_planned = 0
        if self.recipe.untie:
            out_model_config.tie_word_embeddings = False

    def normalize_config(self) -> None:
        """As mergekit's; a delegate that takes these models only without a base is given none."""
        base = self.config.base_model
        if self.recipe.plain:
            self.config.base_model = None
        super().normalize_config()
        self.config.base_model = base
        self.donors = Donors.read(self.config, self.recipe, self.models, self.options, self.run)
        self.fold = self.donors.fold
        if left_out := self.models[self.recipe.base].ignored:
            self.run.note(f"Not written, as they hold no weights: {', '.join(left_out)}.")

    def plan_module(self, module_name: str, definition: OutputModuleDefinition) -> None:
        reader = ConfigReader(config=self.config, t=0, module=definition)
        slices = definition.slices or []
        self._current_module_layers = 0
        for place, piece in (("before", slices[0]), ("layers", None), ("after", slices[-1])):
            if piece is None:
                for out_slice in slices:
                    self.plan_slice(out_slice, module_def=definition, module_name=module_name)
            else:
                self._plan_outside(module_name, place, piece.sources, reader.for_out_slice(piece))

    def _plan_outside(
        self, module: str, place: str, sources: Sequence[InputSliceDefinition], reader: ConfigReader
    ) -> None:
        found: dict[str, list[Source]] = {}
        for source in sources:
            architecture = self.models[source.model].architecture
            for block in architecture.blocks:
                if block.module == module and block.place == place:
                    found.setdefault(block.name, []).append(Source(source.model, architecture, block))
        for same in found.values():
            self.plan_block(same, None, reader)

    def plan_layer(
        self,
        sources: list[InputSliceDefinition],
        layer_offset: int,
        t: float,
        cfg_reader: ConfigReader,
        module_name: str,
    ) -> None:
        found = []
        for source in sources:
            architecture = self.models[source.model].architecture
            layers = architecture.layers(module_name)
            index = source.layer_range[0] + layer_offset
            if index >= len(layers):
                raise RecipeError(
                    f"layer {index} is asked for, the model has {len(layers)}",
                    where=f"slices, {source.model}",
                    remedy="mend layer_range",
                )
            found.append(Source(source.model, architecture, layers[index]))
        self.plan_block(found, self._current_module_layers, cfg_reader.with_t(t))
        self._current_module_layers += 1

    def plan_block(self, sources: list[Source], index: int | None, reader: ConfigReader) -> None:
        """All tensors of one output block."""
        self._blocks_planned += 1
        anchor = next((s for s in sources if s.model == self.recipe.base), None)
        anchor = anchor or self._same_block(self.recipe.base, sources[0].block)
        moves = {s.model: self._move(anchor, s, index, reader) for s in (anchor, *sources)}
        for info in self._out_tensors(sources, anchor):
            self._plan_info(info, sources, anchor, moves, index, reader)

    def _out_tensors(self, sources: list[Source], anchor: Source) -> list[TensorInfo]:
        """Tensors of the output block, each present in every source (or left to the anchor alone).

        Raises:
            CheckpointError: some models have a tensor that others lack.
        """
        infos = list(anchor.block.tensors)
        known = {info.key for info in infos}
        for source in sources:
            infos += [info for info in source.block.tensors if info.key not in known]
            known.update(info.key for info in source.block.tensors)
        infos = [info for info in infos if not self._spare(info, anchor, sources)]
        for info in infos:
            lacking = [s for s in (anchor, *sources) if not self._has(s, info)]
            if lacking and not self.recipe.excluded(info.name):
                holder = next(s for s in sources if s not in lacking)
                raise CheckpointError(
                    f"tensor '{info.name}' is missing, {holder.model} has it",
                    where=str(lacking[0].model),
                    remedy="merge models with the same heads, or name the tensor under 'exclude' "
                    "to copy it from base_model",
                )
        return [info for info in infos if self._has(anchor, info)]

    def _spare(self, info: TensorInfo, anchor: Source, sources: list[Source]) -> bool:
        """Whether a tensor is a second copy of a tied one, which the anchor does not store."""
        holders = [self.models[s.model] for s in sources if s.block.tensor(info.key) is not None]
        tied = bool(info.tied) and anchor.block.tensor(info.key) is None
        return tied and all(model.config.get("tie_word_embeddings") for model in holders)

    def _has(self, source: Source, info: TensorInfo) -> bool:
        if source.block.tensor(info.key) is not None:
            return True
        return source.model != self.recipe.base and any(name in self.models[source.model] for name in info.tied)

    # --- tasks -------------------------------------------------------------------------------------------------

    def _label(self, anchor: Source, index: int | None) -> str:
        """A label that sorts a block's matching before its merging and after the block before it."""
        first = anchor.block.tensors[0]
        name = anchor.architecture.names(first, index)[0]
        return name if index is None else name[: name.index(f".{index}.") + len(f".{index}.")]

    def _loads(self, source: Source, keys: Iterable[str], anchor: Source, index: int | None) -> Loads:
        """Loads of some tensors of a source's block, labelled by the names they have in the output."""
        device = self.options.device if self.options.read_to_gpu else None
        result: Loads = {}
        for key in keys:
            info = anchor.block.tensor(key) or source.block.tensor(key)
            own = source.block.tensor(key) or info
            if info is None or own is None or not self._has(source, info):
                continue
            result[key] = tuple(
                LabelledLoad(model=source.model, tensor=name, device=device, tied_names=own.tied or None, label=label)
                for name, label in zip(own.names, anchor.architecture.names(info, index), strict=True)
            )
        return result

    def _move(self, anchor: Source, source: Source, index: int | None, reader: ConfigReader) -> Move:
        """How the tensors of one source's block are moved."""
        donor = self.donors.found.get(source.model, Donor())
        origin = None
        if donor.origin is not None:
            origin = self._same_block(donor.origin, source.block)
        if source is anchor and donor.whole is None:
            return Move(source, anchor.block, origin=origin)
        if donor.whole is not None and source.block.index == anchor.block.index:
            frame = self._same_block(self.recipe.base, source.block)
            return Move(source, frame.block, None, donor.whole, origin, donor.rows)
        options = self.recipe.options(reader, anchor.block.name, source.model)
        if not wanted_spaces(anchor.block, options):
            return Move(source, anchor.block, None, donor.whole, origin, donor.rows)
        keys = [i.key for i in anchor.block.tensors if self._touches(i, anchor.block, whole=donor.whole is not None)]
        if self.fold is not None:
            keys = list(dict.fromkeys(k for key in keys for k in self._fold_keys(anchor.block, key)))
        matched = origin or source
        task = MatchBlock(
            key=f"{self._blocks_planned}:{source.model}",
            label=self._label(anchor, index),
            block=anchor.block,
            anchor=self._loads(anchor, keys, anchor, index),
            donor=self._loads(matched, keys, anchor, index),
            donor_name=self.donors.name(source.model, donor.origin),
            options=options,
            run=self.run,
            fold=self.fold,
            whole=donor.whole,
        )
        return Move(source, anchor.block, task, donor.whole, origin, donor.rows)

    def _same_block(self, model: ModelReference, block: Block) -> Source:
        """The block of another model that stands at the same place."""
        architecture = self.models[model].architecture
        for other in architecture.blocks:
            same = (other.module, other.place, other.index) == (block.module, block.place, block.index)
            if same and (block.index is not None or other.name == block.name):
                return Source(model, architecture, other)
        raise CheckpointError(f"has no block like {block.name}", where=str(model), remedy="the models differ in depth")

    def _touches(self, info: TensorInfo, block: Block, whole: bool) -> bool:
        """Whether a tensor has an axis that a transform may move."""
        local = {space.name for space in block.spaces.values()}
        return any(space.name in local or (whole and space.kind == "stream") for space in info.spaces())

    def _fold_keys(self, block: Block, key: str) -> list[str]:
        info = block.tensor(key)
        return [key] if info is None or self.fold is None else self.fold.inputs(block, info)

    def _plan_info(
        self,
        info: TensorInfo,
        sources: list[Source],
        anchor: Source,
        moves: dict[ModelReference, Move],
        index: int | None,
        reader: ConfigReader,
    ) -> None:
        names = anchor.architecture.names(info, index)
        if self.recipe.excluded(names[0]):
            sources = [anchor]
        given = [(s.model, self._tensor_tasks(info, moves[s.model], anchor, index, names)) for s in sources]
        for piece, name in enumerate(names):
            gather = AlignedGather(
                weight_info=ImmutableMap(data={}),
                key=f"{self._blocks_planned}:{name}",
                label=name,
                sources=tuple((model, tasks[piece], piece) for model, tasks in given),
                storage=self.config.dtype,
            )
            originals = {s.model: (s.block.tensor(info.key) or info).names[piece] for s in sources}
            self._plan_merge(info, name, originals, gather, reader)

    def _tensor_tasks(
        self, info: TensorInfo, move: Move, anchor: Source, index: int | None, names: tuple[str, ...]
    ) -> tuple[Task, ...]:
        """What gives a source's pieces of one tensor: the loads themselves, or a task that moves them."""
        block = move.frame
        framed = block.tensor(info.key) or info
        moving = move.transforms is not None or move.whole is not None
        moving = moving and self._touches(framed, block, whole=move.whole is not None)
        folding = self.fold is not None and self.fold.touches(block, framed)
        if not moving and not folding and move.origin is None:
            return self._loads(move.source, [info.key], anchor, index)[info.key]
        keys = self._fold_keys(block, info.key)
        base = self._same_block(self.recipe.base, block)
        carried = move.origin is not None
        task = MoveTensor(
            key=f"{self._blocks_planned}:{move.source.model}:{info.key}",
            label=names[0],
            block=block,
            info=framed,
            loads=self._loads(move.source, keys, anchor, index),
            transforms=move.transforms if moving else None,
            whole=move.whole if moving else None,
            fold=self.fold,
            anchor=self._loads(base, keys, anchor, index) if carried else {},
            origin=self._loads(move.origin, keys, anchor, index) if move.origin is not None else {},
            run=self.run if carried else None,
            donor_name=str(move.source.model),
            rows=move.rows if carried and framed.vocabulary_axis is not None else None,
            dtype=self.config.dtype,
        )
        return (task,) * len(names)

    def _plan_merge(
        self,
        info: TensorInfo,
        name: str,
        originals: dict[ModelReference, str],
        gather: AlignedGather,
        reader: ConfigReader,
    ) -> None:
        weight = WeightInfo(name=name, vocabulary_axis=info.vocabulary_axis)
        alone = len(originals) == 1 and self.recipe.excluded(name)
        method = "passthrough" if alone else self._method.spec.name
        shared, per_input = (
            ({}, {m: {"scale": None} for m in originals})
            if alone
            else resolve_parameters(
                self._method.spec,
                tensor_name=name,
                inputs=originals,
                sources=reader.parameter_sources,
                base_model=self._base(reader, originals),
                t=reader.t,
            )
        )
        task = ExecuteMergeMethodTask(
            method_name=method,
            gather_tensors=self._with_vocabulary(weight, gather, reader),
            model_order=tuple(originals),
            parameters=shared,
            input_parameters=per_input,
            base_model=None if alone else self._base(reader, originals),
            output_weight=weight,
        )
        self._tensors.append((weight, task))

    def _base(self, reader: ConfigReader, models: dict[ModelReference, str]) -> ModelReference | None:
        base = reader.base_model
        return base if base in models and not self.recipe.plain else None

    def _with_vocabulary(self, weight: WeightInfo, gather: AlignedGather, reader: ConfigReader) -> Task:
        """The same vocabulary steps as mergekit's, after the alignment."""
        if weight.vocabulary_axis is None:
            return gather
        if self._tokenizer_task is not None:
            tokenizer = reader.config.tokenizer
            return PermutedVocabulary(
                gather_tensors=gather,
                tokenizer_task=self._tokenizer_task,
                tokens=tokenizer.tokens if tokenizer else {},
                pad_to_multiple_of=tokenizer.pad_to_multiple_of if tokenizer else None,
                base_model=reader.base_model,
                vocabulary_axis=weight.vocabulary_axis,
            )
        if self.options.unsafe_truncate_embeddings:
            return TruncatedVocabulary(gather_tensors=gather, weight_info=weight)
        return gather
