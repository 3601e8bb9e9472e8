"""Our delegates as tasks of one type, made from each delegate's `averaging.methods.Plan`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from mergekit.common import ModelReference
from mergekit.graph import Task
from pydantic import Field
from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.averaging.methods import OwnMethod, Source, Target
from rotation_merge.averaging.models import MergeLog
from rotation_merge.errors import StatisticsError
from rotation_merge.mergekit_plugin.planning.donors import Donors
from rotation_merge.mergekit_plugin.planning.output_tensor import OutputTensor
from rotation_merge.mergekit_plugin.planning.plan import plan_of
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors, by_name
from rotation_merge.run.maps import linear_map


class DelegateTask(KeyedTask):
    """One step of a delegate: a function, and the tasks with its arguments by name.

    Attributes:
        first: whether it looks at whole models: it runs once, on the main thread, ahead of all that depends on it.
        moved: whether its inputs are moved to the accelerator.
    """

    work: Callable[..., Any] = Field(repr=False)
    needs: Mapping[str, Task] = Field(default_factory=dict, repr=False)
    first: bool = False
    moved: bool = True

    def arguments(self) -> dict[str, Task]:
        return dict(self.needs)

    def execute(self, **values: Any) -> Any:
        return self.work(**values)

    def priority(self) -> int:
        return 2000 if self.first else 0

    def uses_accelerator(self) -> bool:
        return self.moved and not self.first

    def main_thread_only(self) -> bool:
        return self.first


class AuxiliaryPlanner(Protocol):
    """Plans a delegate's inputs beside the models' tensors."""

    def needs(self, request: OutputTensor, models: Sequence[ModelReference]) -> dict[ModelReference, AuxiliaryInput]:
        """Extra inputs for one output tensor, by model with a nonzero weight; empty if there are none.

        Raises:
            RotationMergeError: it is missing, or a parameter means nothing.
        """


@dataclass(frozen=True)
class AuxiliaryInput:
    """One model's part of a tensor with its weight and statistics.

    Attributes:
        tasks: whose results, put together, are `Source.inputs`.
        metadata: the head of its statistics file.
        split: whether the results are of all stacked pieces, of which each tensor takes its own.
    """

    tasks: tuple[Task, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False


class OutputPlanner:
    """Plans the output tensors of a merge by a delegate of our own, one task each."""

    def __init__(self, method: OwnMethod, donors: Donors, helper: AuxiliaryPlanner | None) -> None:
        self.method, self.plan, self.base, self.helper = method, plan_of(method), donors.recipe.base, helper
        self.log = MergeLog(str(self.base))
        self.tied = self.plan.tied and donors.tied_head is not None
        if self.tied:
            self.log.note("tied", donors.tied_head)
        donors.run.add_notes_later(lambda: method.words(self.log))

    def task(self, request: OutputTensor) -> DelegateTask:
        """
        Raises:
            RotationMergeError: a parameter means nothing, weights are of no use, or statistics are missing.
        """
        if not self.plan.negative:
            request.check_shares(self.method.spec.name)
        models = request.models(self.base)
        if self.plan.base:
            models = [self.base, *(model for model in models if model != self.base)]
        helped = self.helper.needs(request, models) if self.helper is not None else {}
        if helped and self.plan.statistics:
            models = [model for model in models if model in helped]
            self.log.with_statistics.update(request.info.names)
        block = request.moves.out.anchor.block
        linear = linear_map(block, request.info, self.tied) if self.plan.maps_only else None
        parts = [helped.get(model, AuxiliaryInput()) for model in models]
        merge = partial(
            merge_tensor,
            self.method,
            Target(
                block.tensor(request.info.key) or request.info,
                linear is not None,
                request.piece if request.info.stacked else None,
                self.log,
            ),
            [(model, float(request.shares[model]), part) for model, part in zip(models, parts, strict=True)],
            dict(request.parameters),
            linear is not None and linear.reads < linear.gives,
            request.label,
            request.dtype,
        )
        needs = {f"{i}:{j}": task for i, part in enumerate(parts) for j, task in enumerate(part.tasks)}
        key = f"merge:{request.key}"
        return DelegateTask(key=key, label=request.label, work=merge, needs={"tensors": request.gather, **needs})


def merged_tensors(
    method: OwnMethod,
    architecture: Architecture,
    sources: Sequence[tuple[ModelReference, TensorSource]],
    weights: Sequence[float],
    parameters: Mapping[str, Any],
    tied: bool = False,
) -> Tensors:
    """Models merged by a delegate of our own.

    Args:
        sources: of the models that count, the anchor's first, all in its coordinates and by its names.
        weights: of the models.
        parameters: of the delegate; its defaults where none is given.
        tied: whether the embedding is the head, too.
    """
    by_model = {model: as_tensors(source) for model, source in sources}
    first, log = by_model[sources[0][0]], MergeLog(str(sources[0][0]))
    parts = [(model, weight, AuxiliaryInput()) for (model, _), weight in zip(sources, weights, strict=True)]
    values = {spec.name: spec.default for spec in method.spec.parameters} | dict(parameters)
    places = architecture.places()

    def read(name: str) -> Tensor:
        stored = first[name]
        if not stored.is_floating_point() or name not in places:
            return stored
        work = torch.promote_types(stored.dtype, torch.float32)
        block, info, _ = places[name]
        linear = linear_map(block, info, tied)
        target = Target(info, linear is not None, None, log)
        flipped = linear is not None and linear.reads < linear.gives
        tensors = {model: source[name] for model, source in by_model.items()}
        return merge_tensor(method, target, parts, values, flipped, name, work, tensors)

    common = first.only(name for name in first if all(name in source for source in by_model.values()))
    return Tensors(common.shapes, common.dtypes, by_name(read))


def merge_tensor(
    method: OwnMethod,
    target: Target,
    parts: Sequence[tuple[ModelReference, float, AuxiliaryInput]],
    parameters: Mapping[str, Any],
    flipped: bool,
    label: str,
    dtype: torch.dtype | None,
    tensors: Mapping[ModelReference, Tensor],
    **results: Mapping[str, Any],
) -> Tensor:
    """One output tensor.

    Args:
        parts: of the models with nonzero weight, the anchor first: weights and further inputs.
        flipped: whether a linear map is stored as (inputs, outputs).
        label: its name in the output.
        dtype: of the result, to which it is rounded; None: that of the first model's tensor.
        tensors: in the anchor's coordinates, vocabularies brought together.
        results: of the tasks of `parts`, as `MODEL:TASK` by their numbers.

    Raises:
        StatisticsError: the weights of the models cannot be used.
    """
    first = tensors[parts[0][0]]
    if not first.is_floating_point():
        return first
    sources = []
    for number, (model, share, helped) in enumerate(parts):
        results_of_model: dict[str, Any] = {}
        for i in range(len(helped.tasks)):
            results_of_model |= results[f"{number}:{i}"]
        if helped.split and target.piece is not None:
            results_of_model = {name: value[target.piece] for name, value in results_of_model.items()}
        weight = tensors[model].mT if flipped else tensors[model]
        sources.append(Source(weight, share, results_of_model, helped.metadata))
    try:
        if target.linear and first.ndim == 3:
            rows = [[source.row(i) for source in sources] for i in range(len(first))]
            merged = torch.stack([method.merge(row, target, parameters) for row in rows])
        else:
            merged = method.merge(sources, target, parameters)
    except StatisticsError as error:
        raise StatisticsError(error.what, where=error.where or label, remedy=error.remedy) from error
    return (merged.mT if flipped else merged).to(first.device, dtype or first.dtype)
