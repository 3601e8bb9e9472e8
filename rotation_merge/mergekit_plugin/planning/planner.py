"""mergekit's planner with alignment put between loading and merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mergekit.architecture import ModelArchitecture, WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import ConfigReader, InputSliceDefinition, MergeConfiguration, OutputModuleDefinition
from mergekit.graph import Task
from mergekit.io.tasks import ReturnTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.parameter_resolver import resolve_parameters
from mergekit.plan import MergePlanner
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.averaging.methods import BLOCK, MODEL, STOCK, plan_of
from rotation_merge.errors import RecipeError, not_written
from rotation_merge.mergekit_plugin.delegates import registered_name
from rotation_merge.mergekit_plugin.planning.block_moves import BlockMoves
from rotation_merge.mergekit_plugin.planning.blocks import BlockPart, OutputBlock, same_block
from rotation_merge.mergekit_plugin.planning.delegate import OutputPlanner
from rotation_merge.mergekit_plugin.planning.donor_checks import check_meaning
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.output_tensor import OutputTensor
from rotation_merge.mergekit_plugin.planning.save_alignments import check_keepable
from rotation_merge.mergekit_plugin.planning.session import session_of, settle_heads
from rotation_merge.mergekit_plugin.planning.tasks import AlignedGather, FiniteTensor
from rotation_merge.model.vocabulary import check_token_ids


class RotationMergePlanner(MergePlanner):
    """Plans a merge with aligned donors; mergekit plans everything else."""

    def __init__(
        self, config: MergeConfiguration, arch_info: ModelArchitecture, options: MergeOptions, out_model_config: Any
    ) -> None:
        super().__init__(config, arch_info, options, out_model_config)
        self.session = session = session_of(config)
        self.recipe, self.models, self.run = session.recipe, session.models, session.run
        self._method = self.recipe.delegate
        self.unit = plan_of(self._method).unit
        settle_heads(session, config.referenced_models())
        self._blocks_planned = 0
        self._same_ids = {self.recipe.base}
        if self.recipe.untie:
            out_model_config.tie_word_embeddings = False

    def normalize_config(self) -> None:
        """Normalise the config as mergekit does. A delegate that merges these models only without a base gets none."""
        base = self.config.base_model
        if self.recipe.plain:
            self.config.base_model = None
        super().normalize_config()
        self.config.base_model = base
        self.donors = Donors.read(self.config, self.recipe, self.models, self.options, self.run)
        self.session.donors = self.donors
        check_meaning(self.config, self.donors)
        self.delegated = delegated(self.donors, self.config)
        self.run.folded = self.donors.folded
        if left_out := self.models[self.recipe.base].ignored:
            self.run.note(not_written(left_out))

    def plan_in_memory(self) -> list[ReturnTensor]:
        """Plan an in-memory merge as mergekit does (0.1.5's own method fails at its own types).

        NaN ends the merge, as in a written one.
        """
        self._plan()
        return [
            FiniteTensor.model_construct(weight_info=w, tensor_task=t, dtype=w.force_dtype or self.config.out_dtype)
            for w, t in self._tensors
        ]

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
        blocks: dict[str, list[BlockPart]] = {}
        for source in sources:
            architecture = self.models[source.model].architecture
            for block in architecture.blocks:
                if block.module == module and block.place == place:
                    blocks.setdefault(block.name, []).append(BlockPart(source.model, architecture, block))
        for same in blocks.values():
            self.plan_block(same, None, reader)

    def plan_layer(
        self,
        sources: list[InputSliceDefinition],
        layer_offset: int,
        t: float,
        cfg_reader: ConfigReader,
        module_name: str,
    ) -> None:
        parts = []
        for source in sources:
            architecture = self.models[source.model].architecture
            layers = architecture.layers(module_name)
            index = source.layer_range[0] + layer_offset
            if index >= len(layers):
                raise RecipeError(
                    f"layer {index} is asked for, the model has {len(layers)}",
                    where=f"slices, {source.model}",
                    remedy="correct layer_range",
                )
            parts.append(BlockPart(source.model, architecture, layers[index]))
        self.plan_block(parts, self._current_module_layers, cfg_reader.with_t(t))
        self._current_module_layers += 1

    def plan_block(self, sources: list[BlockPart], index: int | None, reader: ConfigReader) -> None:
        """All tensors of one output block."""
        self._blocks_planned += 1
        anchor = next((s for s in sources if s.model == self.recipe.base), None)
        anchor = anchor or same_block(self.models, self.recipe.base, sources[0].block)
        check_keepable(self.session, anchor, sources)
        out = OutputBlock(self.recipe, self.models, self._blocks_planned, index, anchor, sources)
        moves = BlockMoves(self.donors, out, reader)
        for info in out.tensors():
            self._plan_info(info, out, moves, reader)

    def _plan_info(self, info: TensorInfo, out: OutputBlock, moves: BlockMoves, reader: ConfigReader) -> None:
        tasks: dict[ModelReference, tuple[Task, ...]] = {}
        for piece, name in enumerate(out.names(info)):
            excluded = self.recipe.excluded(name)  # of experts that are stored apart, perhaps only some
            averaged = self.unit not in (STOCK, MODEL) and not excluded
            sources = [out.anchor] if excluded or self.unit == MODEL else out.sources
            if self.unit == MODEL and not excluded:
                tasks_of = [(self.recipe.base, self.delegated.tensor(name))]
            else:
                for source in sources:
                    if source.model not in tasks:
                        tasks[source.model] = moves.tasks(source, info)
                tasks_of = [(source.model, tasks[source.model][piece]) for source in sources]
            gather = AlignedGather(
                weight_info=ImmutableMap(data={}),
                key=f"{out.number}:{name}",
                label=name,
                sources=tuple((model, task, piece) for model, task in tasks_of),
                storage=None if averaged else self.config.dtype,
            )
            originals = {s.model: (s.block.tensor(info.key) or info).names[piece] for s in sources}
            if averaged:
                self._plan_average(info, piece, originals, gather, moves, reader)
            else:
                self._plan_merge(info, name, originals, gather, reader)

    def _plan_average(
        self,
        info: TensorInfo,
        piece: int,
        originals: dict[ModelReference, str],
        gather: AlignedGather,
        moves: BlockMoves,
        reader: ConfigReader,
    ) -> None:
        """A tensor that a delegate of our own averages."""
        name = gather.label
        weight = WeightInfo(name=name, vocabulary_axis=info.vocabulary_axis)
        base = self._base(reader, originals)
        shared, per_input = resolve_parameters(
            self._method.spec,
            tensor_name=name,
            inputs=originals,
            sources=reader.parameter_sources,
            base_model=base,
            t=reader.t,
        )
        shares = {model: float(values["weight"]) for model, values in per_input.items()}
        gathered, dtype = self._with_vocabulary(weight, gather, reader), moves.storage(moves.out.anchor, info)
        output = OutputTensor(info, piece, gathered, name, moves, reader, shares, shared, dtype)
        self._tensors.append((weight, self.delegated.task(output)))

    def _plan_merge(
        self,
        info: TensorInfo,
        name: str,
        originals: dict[ModelReference, str],
        gather: AlignedGather,
        reader: ConfigReader,
    ) -> None:
        weight = WeightInfo(name=name, vocabulary_axis=info.vocabulary_axis)
        alone = len(originals) == 1 and (self.recipe.excluded(name) or self.unit == MODEL)
        method = "passthrough" if alone else registered_name(self._method)
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

    def _check_token_ids(self, models: Sequence[ModelReference]) -> None:
        """Check that models whose rows are averaged by token id have the base's ids.

        Raises:
            CheckpointError: names the one that has not.
        """
        for model in models:
            donor = self.donors.found.get(model)
            carried = donor is not None and donor.origin is not None  # whose change goes by tokens
            if model not in self._same_ids and not carried:
                check_token_ids(self.models[self.recipe.base], self.models[model])
                self._same_ids.add(model)

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
        self._check_token_ids([model for model, _, _ in gather.sources])
        if self.options.unsafe_truncate_embeddings:
            return TruncatedVocabulary(gather_tensors=gather, weight_info=weight)
        return gather


def delegated(donors: Donors, config: MergeConfiguration) -> Any:
    """The planner of output tensors for a delegate of our own, by its unit; None for mergekit's.

    Args:
        config: normalised (modules with slices).
    """
    method: Any = donors.recipe.delegate
    plan = plan_of(method)
    if plan.unit == STOCK:
        return None
    if plan.unit == MODEL:
        from rotation_merge.mergekit_plugin.planning.refit_tasks import RefitModels

        return RefitModels(donors, config)
    if plan.unit == BLOCK:
        from rotation_merge.mergekit_plugin.planning.transport import Transport

        return OutputPlanner(method, donors, Transport(donors))
    if plan.statistics:
        from rotation_merge.mergekit_plugin.planning.statistics import CarriedStatistics

        return OutputPlanner(method, donors, CarriedStatistics(donors))
    return OutputPlanner(method, donors, None)
