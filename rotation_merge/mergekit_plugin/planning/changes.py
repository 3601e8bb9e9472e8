"""The tasks of delegates that merge task vectors: changes of the base, formed in its coordinates, merged map by map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.graph import Task
from pydantic import Field
from torch import Tensor

from rotation_merge.averaging.task_vectors import RATIO, TaskVectorMethod, evened, mean_of
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.tasks import KeyedTask
from rotation_merge.mergekit_plugin.planning.wanted import Wanted
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.run.maps import linear_map


@dataclass
class ChangeLog:
    """What was merged, over all tensors of a merge.

    Attributes:
        ratios: of each linear map, the longest change over the shortest.
        lengths, others: the values of these parameters that were met.
    """

    ratios: list[float] = field(default_factory=list)
    lengths: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def words(self) -> list[str]:
        """Lines for the report, on lengths only where they are unlike."""
        rule = " or ".join(sorted(self.others)) or "mean"
        lines = [f"Norms, biases, embeddings and other tensors got the {rule} of their changes."]
        uneven = [ratio for ratio in self.ratios if ratio > RATIO]
        if not uneven:
            return lines
        kept = "keep" in self.lengths
        done = "they were kept ('lengths: keep')" if kept else "they were brought to their geometric mean"
        return [
            *lines,
            f"In {len(uneven)} of {len(self.ratios)} linear maps the changes' lengths differ by more than {RATIO:g} "
            f"(up to {max(uneven):.3g}): {done}.",
        ]


@dataclass
class TaskVectorMerges:
    """Plans the tensors of a merge whose delegate merges task vectors."""

    method: TaskVectorMethod
    recipe: Recipe
    run: Run
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.log = ChangeLog()
        self.run.told_later(self._words)

    def task(self, wanted: Wanted) -> MergeChanges:
        """
        Raises:
            RecipeError: a parameter means nothing, or a weight is negative.
            StatisticsError: all weights are zero.
        """
        self.method.check(wanted.parameters)
        wanted.check_shares(self.method.spec.name)
        base = self.recipe.base
        models = [model for model in wanted.models(base) if model != base]
        linear = linear_map(wanted.moves.out.anchor.block, wanted.info)
        parameters = dict(wanted.parameters)
        if wanted.info.vocabulary_axis is not None and "sides" in parameters:
            parameters["sides"] = "one"  # rows of rare tokens have next to no change, and would be blown up
        return MergeChanges(
            key=wanted.key,
            label=wanted.label,
            gather=wanted.gather,
            method=self.method,
            base=base,
            models=tuple(models),
            weights=tuple(wanted.shares[model] for model in models),
            parameters=parameters,
            is_map=linear is not None,
            flipped=linear is not None and linear.reads < linear.gives,
            log=self.log,
            device=self.device,
        )

    def _words(self) -> list[str]:
        """What was merged by the delegate, for the report."""
        how = f"merged the changes of {len(self.log.ratios)} linear maps to {self.recipe.base}, not positions"
        first, *more = self.log.words()
        return [f"Delegate {self.method.spec.name} {how}. {first}", *more]


class MergeChanges(KeyedTask):
    """One output tensor: the base's, with the merged change of all models.

    Attributes:
        gather: gives each model's tensor.
        models, weights: whose changes are merged, and their importance.
        is_map: whether the tensor is a linear map (or a stack of them).
        flipped: whether it is stored as (inputs, outputs).
    """

    gather: Task
    method: TaskVectorMethod = Field(repr=False)
    base: ModelReference = Field(repr=False)
    models: tuple[ModelReference, ...] = Field(repr=False)
    weights: tuple[float, ...] = Field(repr=False)
    parameters: dict[str, Any] = Field(repr=False)
    is_map: bool = False
    flipped: bool = False
    log: ChangeLog = Field(repr=False)
    device: str = "cpu"

    def arguments(self) -> dict[str, Task]:
        return {"tensors": self.gather}

    def execute(self, tensors: dict[ModelReference, Tensor]) -> Tensor:
        start = tensors[self.base]
        same = all(torch.equal(tensors[model], start) for model in self.models)
        if same or not start.is_floating_point():
            return start
        first = start.to(self.device, torch.float64)
        changes = [tensors[model].to(first) - first for model in self.models]
        if not self.is_map:
            self.log.others.add(self.parameters["others"])
            merged = mean_of(changes, self.weights)
            if self.parameters["others"] == "sum":
                merged = merged * sum(self.weights)
        elif start.ndim == 3:
            merged = torch.stack([self._map([d[row] for d in changes]) for row in range(len(start))])
        else:
            merged = self._map(changes)
        return (first + self.parameters["lambda"] * merged).to(start.device, start.dtype)

    def _map(self, changes: Sequence[Tensor]) -> Tensor:
        """The merged change of one linear map, whatever way it is stored."""
        oriented = [d.mT.contiguous() if self.flipped else d for d in changes]
        if not any(bool(d.any()) for d in oriented):
            return changes[0]
        even, ratio = evened(oriented)
        self.log.ratios.append(ratio)
        self.log.lengths.add(self.parameters["lengths"])
        used = even if self.parameters["lengths"] == "auto" else oriented
        merged = self.method.change(used, self.weights, self.parameters)
        return merged.mT if self.flipped else merged
