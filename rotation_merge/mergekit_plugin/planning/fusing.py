"""The tasks of delegate ot_fusion: activations where they are wanted, plans for each space, donors moved by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from mergekit.common import ModelReference
from mergekit.config import ConfigReader
from mergekit.graph import Task
from pydantic import Field
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.averaging.closed_forms import mean
from rotation_merge.averaging.ot_fusion import (
    REGULARISATION,
    OtFusion,
    Plan,
    Plans,
    block_plans,
    plan,
    transported,
    unit,
    weight_points,
)
from rotation_merge.errors import RecipeError
from rotation_merge.matching.activations import Activations, activation_points, stream_points
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.meaning import check_pool
from rotation_merge.mergekit_plugin.planning.moves import Moves
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask, Loads, load_arguments, loaded
from rotation_merge.mergekit_plugin.planning.wanted import Wanted
from rotation_merge.mergekit_plugin.planning.whole import WholeTask
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.biases import Aligned
from rotation_merge.model.checkpoint import Models
from rotation_merge.model.fold import Fold, Folded
from rotation_merge.model.source import TensorSource, read_tensor
from rotation_merge.model.sources import Rows
from rotation_merge.model.vocabulary import shared_rows
from rotation_merge.run.data import read_batches, unpadded
from rotation_merge.run.functions import Batch, architecture_of, load, local_path
from rotation_merge.symmetry import SpaceTransform

SAMPLES = 200
"""Samples that activations are taken on."""


class Pool(WholeTask):
    """The samples of all models, which the anchor reads, or writes."""

    anchor: str
    data: str
    seed: int

    def execute(self) -> list[Batch]:
        found = read_batches(self.data, local_path(self.anchor), load(self.anchor), SAMPLES, seed=self.seed)
        return unpadded(found.batches, self.data)


class Watch(WholeTask):
    """A model's activations on samples."""

    model: str
    pool: Pool

    def arguments(self) -> dict[str, KeyedTask]:
        return {"batches": self.pool}

    def execute(self, batches: list[Batch]) -> Activations:
        model = load(self.model)
        return Activations.of(model, architecture_of(model), batches)


@dataclass(frozen=True)
class How:
    """How plans are made: hard or soft, and at what regularisation."""

    hard: bool
    regularisation: float


class PlanStreams(WholeTask):
    """The plan of each residual stream, from embeddings and heads, or from activations."""

    architecture: Architecture = Field(repr=False)
    anchor: object = Field(repr=False)
    donor: object = Field(repr=False)
    how: How
    whole: Task | None = None
    watched: tuple[Watch, ...] = ()
    folded: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        tasks: dict[str, Any] = {f"watch{i}": task for i, task in enumerate(self.watched)}
        return tasks if self.whole is None else {**tasks, "whole": self.whole}

    def execute(self, whole: Alignment | None = None, **seen: Activations) -> Plans:
        transforms = whole.transforms if whole else {}
        found: Plans = {}
        for stream in self.architecture.streams:
            if seen:
                points = [
                    stream_points(self.architecture, stream, seen[name], maps)
                    for name, maps in (("watch0", {}), ("watch1", transforms))
                ]
            else:
                points = list(self._ends(stream, transforms))
            if points[0] is not None and points[1] is not None:
                made = plan(points[1], points[0], self.how.hard, self.how.regularisation)[None]
                found[stream] = Plan(dict.fromkeys(("write", "read", "gain", "shift"), made))
        return found

    def _ends(self, stream: str, transforms: Mapping[str, SpaceTransform]) -> Iterator[Tensor | None]:
        """What stands before and after the layers, as points of the stream's coordinates; anchor, donor."""
        stored = [cast(TensorSource, source) for source in (self.anchor, self.donor)]
        if self.folded:
            stored = [Folded(self.architecture, source, self.folded) for source in stored]
        sources = [stored[0], Aligned(self.architecture, stored[1], transforms)]
        found: list[list[Tensor]] = [[], []]
        for block in self.architecture.blocks:
            for info in block.tensors if block.index is None else ():
                for dim, axis in enumerate(info.axes):
                    if len(info.axes) > 1 and any(p.space.name == stream for p in axis.parts) and len(axis.parts) == 1:
                        both = [read_tensor(info, source) for source in sources]
                        if both[0] is not None and both[1] is not None and both[0].shape == both[1].shape:
                            for rows, x in zip(found, both, strict=True):
                                assert x is not None
                                rows.append(x.float().movedim(dim, 0).flatten(1))
        for rows in found:
            yield unit(torch.cat(rows, 1)) if rows else None


class PlanBlock(KeyedTask):
    """The plans of a block's local spaces."""

    block: Block = Field(repr=False)
    how: How
    anchor: Loads = Field(default_factory=dict, repr=False)
    donor: dict[str, tuple[Task, ...]] = Field(default_factory=dict, repr=False)
    streams: PlanStreams | None = None
    transforms: Task | None = None
    whole: Task | None = None
    watched: tuple[Watch, ...] = ()
    fold: Fold | None = Field(default=None, repr=False)

    def arguments(self) -> dict[str, Task]:
        tasks: dict[str, Task] = load_arguments(anchor=self.anchor)
        tasks |= {f"donor:{key}:{i}": task for key, found in self.donor.items() for i, task in enumerate(found)}
        tasks |= {f"watch{i}": task for i, task in enumerate(self.watched)}
        for name, task in (("streams", self.streams), ("transforms", self.transforms), ("whole", self.whole)):
            if task is not None:
                tasks[name] = task
        return tasks

    def execute(
        self,
        streams: Plans | None = None,
        transforms: dict[str, SpaceTransform] | None = None,
        whole: Alignment | None = None,
        **values: Any,
    ) -> Plans:
        maps = {**(whole.transforms if whole else {}), **(transforms or {})}
        if self.watched:
            anchor = activation_points(self.block, values["watch0"], {})
            donor = activation_points(self.block, values["watch1"], maps)
        else:
            tensors = loaded("anchor", self.anchor, self.block, values)
            tensors = tensors if self.fold is None else self.fold.block(self.block, tensors)
            anchor = weight_points(self.block, tensors)
            donor = weight_points(self.block, dict(self._donor(values, streams or {})))
        return block_plans(self.block, donor, anchor, self.how.hard, self.how.regularisation)

    def _donor(self, values: Mapping[str, Any], streams: Plans) -> Iterator[tuple[str, Tensor]]:
        """The donor's tensors, aligned, and what they read after the stream's plan."""
        for key, found in self.donor.items():
            info = self.block.tensor(key)
            pieces = [values[f"donor:{key}:{i}"] for i in range(len(found))]
            whole = [piece[i] if isinstance(piece, tuple) else piece for i, piece in enumerate(pieces)]
            if info is not None and all(piece is not None for piece in whole):
                tensor = torch.stack(whole) if info.stacked else whole[0]
                yield key, transported(tensor, info, streams, None)


class FuseTensor(KeyedTask):
    """One output tensor: the weighted mean of the anchor and of donors moved by their plans."""

    info: TensorInfo = Field(repr=False)
    gather: Task
    order: tuple[ModelReference, ...] = Field(repr=False)
    shares: tuple[float, ...] = Field(repr=False)
    plans: tuple[tuple[Task, ...], ...] = Field(default=(), repr=False)
    piece: int | None = None

    def arguments(self) -> dict[str, Task]:
        tasks = {f"plan{i}:{j}": task for i, found in enumerate(self.plans) for j, task in enumerate(found)}
        return {"tensors": self.gather, **tasks}

    def execute(self, tensors: dict[ModelReference, Tensor], **plans: Plans) -> Tensor:
        first = tensors[self.order[0]]
        if not first.is_floating_point():
            return first
        moved = []
        for number, model in enumerate(self.order):
            own: Plans = {}
            for j in range(len(self.plans[number])):
                own |= plans[f"plan{number}:{j}"]
            moved.append(transported(tensors[model], self.info, own, self.piece))
        return mean(moved, self.shares).to(first.dtype)


@dataclass
class Fusion:
    """Plans the tensors of a merge whose delegate is ot_fusion."""

    method: OtFusion
    recipe: Recipe
    models: Models
    donors: Donors
    run: Run
    streams: dict[ModelReference, PlanStreams] = field(default_factory=dict)
    blocks: dict[tuple[int, ModelReference], PlanBlock] = field(default_factory=dict)
    data: str | None = None

    def task(self, wanted: Wanted) -> FuseTensor:
        """
        Raises:
            RotationMergeError: a parameter means nothing, models have samples of their own or keep their heads.
        """
        self.method.check(wanted.parameters)
        if wanted.parameters["stream"] == "transport" and self.recipe.value("heads_of") == "each":
            what = "'heads_of: each' puts the body under every donor's head, which no plan of the stream moves"
            raise RecipeError(what, where="parameters", remedy="add 'stream: identity'")
        self._settle_data(wanted.reader, wanted.shares)
        order, info, moves = wanted.models(self.recipe.base), wanted.info, wanted.moves
        plans = [() if m == self.recipe.base else self._plans(m, info, moves, wanted.parameters) for m in order]
        return FuseTensor(
            key=wanted.key,
            label=wanted.label,
            info=moves.out.anchor.block.tensor(info.key) or info,
            gather=wanted.gather,
            order=tuple(order),
            shares=tuple(wanted.shares[model] for model in order),
            plans=tuple(plans),
            piece=wanted.piece if info.stacked else None,
        )

    def _settle_data(self, reader: ConfigReader, models: Iterable[ModelReference]) -> None:
        """The samples of all models, which are one pool.

        Raises:
            RecipeError: models have samples of their own.
        """
        found = {self.recipe.of_model("data", reader, model) for model in models}
        if len(found) > 1:
            raise RecipeError(
                "delegate ot_fusion compares activations on the same samples, and models have 'data' of their own",
                where="parameters",
                remedy="write 'data' once, under the recipe's parameters",
            )
        self.data = None if None in found else str(found.pop())
        if self.data is not None:
            check_pool(self.donors)
            self.run.used("matching of activations", self.data, SAMPLES)

    def _plans(
        self, model: ModelReference, info: TensorInfo, moves: Moves, parameters: Mapping[str, Any]
    ) -> tuple[Task, ...]:
        """What moves one donor's tensor."""
        soft = "soft plans, which are no symmetries: what was averaged no longer computes what the donor does"
        words = "hard plans, which are permutations" if parameters["plan"] == "hard" else soft
        self.run.note(f"Delegate ot_fusion moved `{model}` by {words}.")
        found: list[Task] = []
        kinds = {space.kind for space in info.spaces()}
        if "stream" in kinds and parameters["stream"] == "transport":
            found.append(self._streams(model, parameters))
        if kinds - {"stream"}:
            found.append(self._block(model, moves, parameters))
        return tuple(found)

    def _how(self, parameters: Mapping[str, Any]) -> How:
        default = REGULARISATION["weights" if self.data is None else "activations"]
        given = parameters["regularisation"]
        return How(parameters["plan"] == "hard", default if given is None else given)

    def _watched(self, model: ModelReference) -> tuple[Watch, ...]:
        if self.data is None:
            return ()
        seed = self.donors.options.random_seed or 0
        pool = Pool(key="pool", label="", anchor=str(self.recipe.base), data=self.data, seed=seed)
        return tuple(Watch(key=f"watch:{m}", label="", model=str(m), pool=pool) for m in (self.recipe.base, model))

    def _streams(self, model: ModelReference, parameters: Mapping[str, Any]) -> PlanStreams:
        if model not in self.streams:
            donor, base = self.donors.found[model], self.models[self.recipe.base]
            sources: list[TensorSource] = [base, self.donors.source(model)]
            if (rows := shared_rows([base, self.models[model]])) is not None:
                sources = [Rows(base.architecture, source, own) for source, own in zip(sources, rows, strict=True)]
            self.streams[model] = PlanStreams(
                key=f"streams:{model}",
                label="",
                architecture=base.architecture,
                anchor=sources[0],
                donor=sources[1],
                how=self._how(parameters),
                whole=donor.whole,
                watched=self._watched(model),
                folded=self.donors.folded,
            )
        return self.streams[model]

    def _block(self, model: ModelReference, moves: Moves, parameters: Mapping[str, Any]) -> PlanBlock:
        key = moves.out.number, model
        if key not in self.blocks:
            move, anchor = moves.found[model], moves.out.anchor
            watched = self._watched(model)
            local = {space.name for space in anchor.block.spaces.values()}
            infos = [i for i in anchor.block.tensors if any(s.name in local for s in i.spaces()) and not watched]
            fold_keys = dict.fromkeys(k for i in infos for k in moves.fold_keys(anchor.block, i.key))
            streamed = parameters["stream"] == "transport" and not watched
            self.blocks[key] = PlanBlock(
                key=f"plans:{moves.out.number}:{model}",
                label=moves.out.label,
                block=anchor.block,
                how=self._how(parameters),
                anchor=moves.loads(anchor, fold_keys),
                donor={i.key: moves.tasks(move.source, i) for i in infos},
                streams=self._streams(model, parameters) if streamed else None,
                transforms=move.transforms,
                whole=move.whole,
                watched=watched,
                fold=moves.fold,
            )
        return self.blocks[key]
