"""Transport plans of blocks and streams, from weights or activations, for delegates that move donors by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.averaging.ot_fusion import (
    REGULARISATION,
    Plans,
    TransportOptions,
    block_plans,
    stream_ends,
    stream_plans,
    transported,
    weight_points,
)
from rotation_merge.errors import RecipeError
from rotation_merge.matching.activations import Activations, activation_points, stream_points
from rotation_merge.matching.alignment import Alignment
from rotation_merge.mergekit_plugin.planning.block_moves import BlockMoves
from rotation_merge.mergekit_plugin.planning.delegate import AuxiliaryInput, DelegateTask
from rotation_merge.mergekit_plugin.planning.donor_checks import check_pool
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.output_tensor import OutputTensor
from rotation_merge.mergekit_plugin.planning.tasks import Loads, load_arguments, loaded, map_arguments
from rotation_merge.model.biases import in_coordinates
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.rows import vocabulary_subset
from rotation_merge.model.tensors import TensorSource
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import shared_rows
from rotation_merge.run.data import read_batches, unpadded
from rotation_merge.run.functions import Batch, architecture_of, load, local_path, module_of
from rotation_merge.symmetry import SpaceTransform

SAMPLES = 200
"""Samples that activations are taken on."""


def pool(anchor: View, samples: list[Batch] | None, data: str, seed: int) -> list[Batch]:
    """The samples of all models, which the anchor reads, or writes."""
    if samples is not None:
        return unpadded(samples, data)
    name = str(anchor.reference)
    return unpadded(read_batches(data, local_path(name), load(name), SAMPLES, seed=seed).batches, data)


def watch(model: View, batches: list[Batch]) -> Activations:
    """A model's activations on samples."""
    module = load(model.name) if model.files is not None else module_of(model)
    return Activations.of(module, architecture_of(module), batches)


@dataclass(frozen=True)
class PlanStreams:
    """The plan of each residual stream, from embeddings and heads, or from activations.

    Attributes:
        anchor, donor: sources by the anchor's names.
        folded: streams that are folded in both.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    how: TransportOptions
    folded: tuple[str, ...] = ()

    def __call__(
        self,
        whole: Alignment | None = None,
        anchor: Activations | None = None,
        donor: Activations | None = None,
    ) -> Plans:
        transforms = whole.transforms if whole else {}

        def points(stream: str) -> tuple[Tensor | None, Tensor | None]:
            if anchor is not None and donor is not None:
                anchor_points = stream_points(self.architecture, stream, anchor, {})
                return anchor_points, stream_points(self.architecture, stream, donor, transforms)
            sources = [self.anchor, self.donor]
            if self.folded:
                sources = [folded_tensors(self.architecture, source, self.folded) for source in sources]
            moved = in_coordinates(self.architecture, sources[1], transforms)
            return stream_ends(self.architecture, stream, sources[0], moved)

        return stream_plans(self.architecture, points, self.how)


@dataclass(frozen=True)
class PlanBlock:
    """The plans of a block's local spaces.

    Attributes:
        loads: of the anchor's tensors.
        donor: by key, the number of pieces of a donor's tensor.
    """

    block: Block
    how: TransportOptions
    loads: Loads
    donor: Mapping[str, int]
    fold: Fold | None

    def __call__(
        self,
        streams: Plans | None = None,
        transforms: dict[str, SpaceTransform] | None = None,
        whole: Alignment | None = None,
        anchor: Activations | None = None,
        donor: Activations | None = None,
        **values: Any,
    ) -> Plans:
        maps = {**(whole.transforms if whole else {}), **(transforms or {})}
        if anchor is not None and donor is not None:
            anchor_points, donor_points = (
                activation_points(self.block, anchor, {}),
                activation_points(self.block, donor, maps),
            )
        else:
            tensors = loaded("tensors", self.loads, self.block, values)
            anchor_points = weight_points(
                self.block, tensors if self.fold is None else self.fold.block(self.block, tensors)
            )
            donor_points = weight_points(self.block, dict(self._donor(values, streams or {})))
        return block_plans(self.block, donor_points, anchor_points, self.how.hard, self.how.regularisation)

    def _donor(self, values: Mapping[str, Any], streams: Plans) -> Iterator[tuple[str, Tensor]]:
        """The donor's aligned tensors, their inputs transported by the stream's plan."""
        for key, count in self.donor.items():
            info = self.block.tensor(key)
            pieces = [values[f"donor:{key}:{i}"] for i in range(count)]
            whole = [piece[i] if isinstance(piece, tuple) else piece for i, piece in enumerate(pieces)]
            if info is not None and all(piece is not None for piece in whole):
                tensor = torch.stack(whole) if info.stacked else whole[0]
                yield key, transported(tensor, info, streams, None)


class Transport:
    """Plans the optimal transport of every donor's coordinates to the anchor's."""

    def __init__(self, donors: Donors) -> None:
        self.donors, self.recipe, self.models, self.run = donors, donors.recipe, donors.models, donors.run
        self.streams: dict[ModelReference, DelegateTask] = {}
        self.blocks: dict[tuple[int, ModelReference], DelegateTask] = {}
        self.data: str | None = None

    def needs(self, request: OutputTensor, models: Sequence[ModelReference]) -> dict[ModelReference, AuxiliaryInput]:
        if request.parameters["stream"] == "transport" and self.recipe.value("heads_of") == "each":
            problem = (
                "'heads_of: each' puts the body under every donor's head, but plans of the stream do not move heads"
            )
            raise RecipeError(problem, where="parameters", remedy="add 'stream: identity'")
        self._settle_data(request.reader, request.shares)
        donors = [model for model in models if model != self.recipe.base]
        return {
            model: AuxiliaryInput(self._plans(model, request.info, request.moves, request.parameters))
            for model in donors
        }

    def _settle_data(self, reader: ConfigReader, models: Iterable[ModelReference]) -> None:
        """The samples of all models, which are one pool.

        Raises:
            RecipeError: models have samples of their own.
        """
        files = {self.recipe.of_model("data", reader, model) for model in models}
        if len(files) > 1:
            raise RecipeError(
                "delegate ot_fusion compares activations on the same samples, but models have their own 'data'",
                where="parameters",
                remedy="write 'data' once, under the recipe's parameters",
            )
        self.data = None if None in files else str(files.pop())
        if self.data is not None:
            check_pool(self.donors)
            self.run.used("matching of activations", self.data, SAMPLES)

    def _plans(
        self, model: ModelReference, info: TensorInfo, moves: BlockMoves, parameters: Mapping[str, Any]
    ) -> tuple[Task, ...]:
        """The transport plans for one donor's tensor."""
        soft = "soft plans, which are not symmetries: the averaged donor has other outputs than the original"
        words = "hard plans, which are permutations" if parameters["plan"] == "hard" else soft
        self.run.note(f"Delegate ot_fusion moved `{model}` by {words}.")
        plans: list[Task] = []
        kinds = {space.kind for space in info.spaces()}
        if "stream" in kinds and parameters["stream"] == "transport":
            plans.append(self._streams(model, parameters))
        if kinds - {"stream"}:
            plans.append(self._block(model, moves, parameters))
        return tuple(plans)

    def _how(self, parameters: Mapping[str, Any]) -> TransportOptions:
        default = REGULARISATION["weights" if self.data is None else "activations"]
        regularisation = parameters["regularisation"]
        return TransportOptions(parameters["plan"] == "hard", default if regularisation is None else regularisation)

    def _watched(self, model: ModelReference) -> dict[str, Task]:
        """Activations of the anchor and of a donor, if there are samples."""
        if self.data is None:
            return {}
        base, seed = self.models[self.recipe.base], self.donors.options.random_seed or 0
        samples = DelegateTask(
            key="pool",
            label="",
            work=partial(pool, base, self.models.samples.get(self.recipe.base), self.data, seed),
            first=True,
        )
        return {
            side: DelegateTask(
                key=f"watch:{watched.reference}",
                label="",
                work=partial(watch, watched),
                needs={"batches": samples},
                first=True,
            )
            for side, watched in (("anchor", base), ("donor", self.models[model]))
        }

    def _streams(self, model: ModelReference, parameters: Mapping[str, Any]) -> DelegateTask:
        if model not in self.streams:
            donor, base = self.donors.found[model], self.models[self.recipe.base]
            sources: list[TensorSource] = [base.tensors, self.donors.source(model)]
            if (rows := shared_rows([base, self.models[model]])) is not None:
                sources = [
                    vocabulary_subset(base.architecture, source, model_rows)
                    for source, model_rows in zip(sources, rows, strict=True)
                ]
            self.streams[model] = DelegateTask(
                key=f"streams:{model}",
                label="",
                work=PlanStreams(base.architecture, sources[0], sources[1], self._how(parameters), self.donors.folded),
                needs={**self._watched(model), **map_arguments(None, donor.whole)},
                first=True,
            )
        return self.streams[model]

    def _block(self, model: ModelReference, moves: BlockMoves, parameters: Mapping[str, Any]) -> DelegateTask:
        key = moves.out.number, model
        if key not in self.blocks:
            move, anchor, watched = moves.found[model], moves.out.anchor, self._watched(model)
            local = {space.name for space in anchor.block.spaces.values()}
            infos = [i for i in anchor.block.tensors if any(s.name in local for s in i.spaces()) and not watched]
            loads = moves.loads(anchor, dict.fromkeys(k for i in infos for k in moves.fold_keys(anchor.block, i.key)))
            donor = {info.key: moves.tasks(move.source, info) for info in infos}
            needs: dict[str, Task] = {**load_arguments(tensors=loads), **watched}
            needs |= {f"donor:{k}:{i}": task for k, tasks in donor.items() for i, task in enumerate(tasks)}
            if parameters["stream"] == "transport" and not watched:
                needs["streams"] = self._streams(model, parameters)
            counts = {k: len(tasks) for k, tasks in donor.items()}
            self.blocks[key] = DelegateTask(
                key=f"plans:{moves.out.number}:{model}",
                label=moves.out.label,
                work=PlanBlock(anchor.block, self._how(parameters), loads, counts, moves.fold),
                needs={**needs, **map_arguments(move.transforms, move.whole)},
            )
        return self.blocks[key]
