"""Tasks of mergekit's graph: matching a block, moving a donor's tensors, gathering them for the delegate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoadTensor
from pydantic import ConfigDict, Field
from torch import Tensor

from rotation_merge.architectures.model import Block, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.block import match_block
from rotation_merge.matching.options import MatchOptions
from rotation_merge.report.run import Run


class LabelledLoad(LoadTensor):
    """Loads a tensor next to the others of its output block, whatever layer it comes from."""

    label: str

    def group_label(self) -> str | None:
        return self.label


class KeyedTask(Task[Any]):
    """A task known by its key alone, so that hashing it is cheap; everything else is payload."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    key: str
    label: str

    def __hash__(self) -> int:
        return hash((type(self), self.key))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, KeyedTask) and self.key == other.key

    def group_label(self) -> str | None:
        return self.label

    def uses_accelerator(self) -> bool:
        return True


class MatchBlock(KeyedTask):
    """Matches one donor's block to the anchor's: returns the transforms of its local spaces.

    The loads of both are those that the merge itself uses, so nothing is read twice.
    """

    block: Block
    anchor: dict[str, tuple[LabelledLoad, ...]] = Field(repr=False)
    donor: dict[str, tuple[LabelledLoad, ...]] = Field(repr=False)
    donor_name: str
    options: MatchOptions
    run: Run = Field(repr=False)

    def arguments(self) -> dict[str, Task]:
        return {
            f"{side}:{key}:{i}": load
            for side, loads in (("anchor", self.anchor), ("donor", self.donor))
            for key, pieces in loads.items()
            for i, load in enumerate(pieces)
        }

    def execute(self, **tensors: Tensor | None) -> dict[str, SpaceTransform]:
        sides = []
        for side, loads in (("anchor", self.anchor), ("donor", self.donor)):
            given = {key: [tensors[f"{side}:{key}:{i}"] for i in range(len(pieces))] for key, pieces in loads.items()}
            sides.append(_stack(self.block, given))
        try:
            match = match_block(self.block, sides[0], sides[1], self.options)
        except AlignmentError as error:
            raise AlignmentError(error.what, where=f"{self.donor_name}, {error.where}", remedy=error.remedy) from error
        self.run.record(self.donor_name, self.block, match.records)
        return match.transforms

    def priority(self) -> int:
        return -5


def _stack(block: Block, given: Mapping[str, list[Tensor | None]]) -> dict[str, Tensor]:
    stacked = {info.key for info in block.tensors if info.stacked}
    result = {}
    for key, pieces in given.items():
        present = [piece for piece in pieces if piece is not None]
        if len(present) == len(pieces):
            result[key] = torch.stack(present) if key in stacked else present[0]
    return result


class MoveTensor(KeyedTask):
    """One tensor of a donor in the anchor's coordinates, rounded once, to `dtype`; a tuple, one for each stored piece.

    With `origin` (the model the donor was fine-tuned from) and `anchor`: anchor + map(donor - origin).
    """

    info: TensorInfo
    loads: tuple[LabelledLoad, ...] = Field(repr=False)
    transforms: Task | None = None
    anchor: tuple[LabelledLoad, ...] = ()
    origin: tuple[LabelledLoad, ...] = ()
    dtype: str | None = None

    def arguments(self) -> dict[str, Task]:
        groups = {"donor": self.loads, "anchor": self.anchor, "origin": self.origin}
        tasks: dict[str, Task] = {f"{name}:{i}": load for name, loads in groups.items() for i, load in enumerate(loads)}
        if self.transforms is not None:
            tasks["transforms"] = self.transforms
        return tasks

    def execute(
        self, transforms: dict[str, SpaceTransform] | None = None, **tensors: Tensor | None
    ) -> tuple[Tensor, ...] | None:
        donor = self._stacked("donor", len(self.loads), tensors)
        if donor is None:
            return None
        storage = dtype_from_name(self.dtype) or donor.dtype
        anchor, origin = (self._stacked(name, len(self.loads), tensors) for name in ("anchor", "origin"))
        if anchor is not None and origin is not None:
            donor = donor.float() - origin.float()
        moved = transform_tensor(donor, self.info, transforms or {})
        if anchor is not None and origin is not None:
            moved = anchor.float() + moved
        moved = moved.to(storage) if moved.is_floating_point() else moved
        return tuple(moved.unbind(0)) if self.info.stacked else (moved,)

    def _stacked(self, name: str, count: int, tensors: Mapping[str, Tensor | None]) -> Tensor | None:
        pieces = [tensors.get(f"{name}:{i}") for i in range(count)]
        present = [piece for piece in pieces if piece is not None]
        if len(present) < count:
            return None
        return torch.stack(present) if self.info.stacked else present[0]

    def priority(self) -> int:
        return -8


class AlignedGather(GatherTensors):
    """What the delegate gets for one output tensor: the anchor as it is, every donor moved."""

    key: str
    label: str
    sources: tuple[tuple[ModelReference, Task, int], ...]
    storage: str | None = None

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AlignedGather) and self.key == other.key

    def arguments(self) -> dict[str, Task]:
        return {str(i): task for i, (_, task, _) in enumerate(self.sources)}

    def group_label(self) -> str | None:
        return self.label

    def execute(self, **values: Any) -> dict[ModelReference, Tensor]:
        result = {}
        for i, (model, _, piece) in enumerate(self.sources):
            value = values[str(i)]
            tensor = value[piece] if isinstance(value, tuple) else value
            if tensor is not None:
                dtype = dtype_from_name(self.storage) if tensor.is_floating_point() else None
                result[model] = tensor if dtype is None else tensor.to(dtype)
        return result
