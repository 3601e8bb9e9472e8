"""Tasks of mergekit's graph: matching, moving a donor's tensors, gathering them for the delegate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.graph import Task
from mergekit.io.tasks import GatherTensors, LoaderCache, LoadTensor, ReturnTensor
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.errors import AlignmentError, CheckpointError, RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import BlockMatch, match_block, named
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.run import Run
from rotation_merge.matching.serialisation import match_once
from rotation_merge.mergekit_plugin.planning.prefetch import PrefetchScheduler
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.biases import with_biases
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import Fold
from rotation_merge.model.labels import in_order
from rotation_merge.model.rows import in_slices, with_rows, with_rows_of
from rotation_merge.symmetry import SpaceTransform


class UncheckedTask(BaseModel):
    """A task made by our own code: fields are taken unchecked, so that no schema of their types is built."""

    model_config = ConfigDict(arbitrary_types_allowed=True, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        fields = {}
        for name, info in cls.model_fields.items():
            schema: CoreSchema = core_schema.any_schema()
            if not info.is_required():
                schema = core_schema.with_default_schema(schema, **_default(info))
            fields[name] = core_schema.model_field(schema, frozen=True)
        return core_schema.model_schema(cls, core_schema.model_fields_schema(fields), frozen=True)


def _default(info: FieldInfo) -> dict[str, Any]:
    return {"default": info.default} if info.default_factory is None else {"default_factory": info.default_factory}


class LabelledLoad(UncheckedTask, LoadTensor):
    """Loads a tensor with the others of its output block, from any layer.

    The first look at it, while it is at hand, takes its fingerprint and makes sure that it holds numbers.

    Attributes:
        rows: order that brings its classes into the anchor's (see `model/labels.py`).
    """

    label: str
    run: Run | None = Field(default=None, repr=False)
    rows: tuple[int, tuple[int, ...]] | None = Field(default=None, repr=False)

    def group_label(self) -> str | None:
        return self.label

    def execute(self) -> Tensor | None:
        tensor = LoadTensor.execute(self)
        if tensor is None:
            return None
        name = self._resolve_name(LoaderCache().get(self.model)) or self.tensor
        if self.run is None or self.run.add_fingerprint(str(self.model), name, tensor):
            _check_finite(tensor, name, self.model)
        return in_order(tensor, self.rows)


Values = Mapping[str, Tensor | None]
"""Results of loads, by argument names."""

Loads = dict[str, tuple[LabelledLoad, ...]]
"""By key of the architecture, the loads of a tensor's stored pieces."""


class KeyedTask(UncheckedTask, Task[Any]):
    """A task known by its key alone, so that hashing it is cheap; everything else is payload."""

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


def load_arguments(**sides: Loads) -> dict[str, Task]:
    """The loads of several models as arguments of a task; `loaded` takes them apart again."""
    return {
        f"{side}:{key}:{i}": load
        for side, loads in sides.items()
        for key, pieces in loads.items()
        for i, load in enumerate(pieces)
    }


def map_arguments(transforms: Task | None, whole: Task | None) -> dict[str, Task]:
    """The tasks for a donor's maps, of a block and of the whole model, as task arguments."""
    return {name: task for name, task in (("transforms", transforms), ("whole", whole)) if task is not None}


def loaded(side: str, loads: Loads, block: Block, values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """One model's tensors by key, stacked if stored in pieces; absent ones are left out."""
    result = {}
    for key, pieces in loads.items():
        pieces_read = [values[f"{side}:{key}:{i}"] for i in range(len(pieces))]
        present = [tensor for tensor in pieces_read if tensor is not None]
        info = block.tensor(key)
        if info is not None and len(present) == len(pieces_read):
            result[key] = torch.stack(present) if info.stacked else present[0]
    return result


class MatchBlock(KeyedTask):
    """Matches one donor's block to the anchor's: returns the transforms of its local spaces.

    On a CPU workers do it ahead of mergekit, and read for themselves. On an accelerator the loads of both models are
    those that the merge itself uses, so nothing is read twice. With `whole` (a residual alignment of the same donor),
    local spaces are matched in the streams it gives.
    """

    block: Block
    anchor: Loads = Field(repr=False)
    donor: Loads = Field(repr=False)
    anchor_name: str
    donor_name: str
    options: AlignConfig
    run: Run = Field(repr=False)
    fold: Fold | None = Field(default=None, repr=False)
    whole: Task | None = None
    ahead: PrefetchScheduler | None = Field(default=None, repr=False)

    def arguments(self) -> dict[str, Task]:
        whole = {} if self.whole is None else {"whole": self.whole}
        return whole if self.ahead else {**load_arguments(anchor=self.anchor, donor=self.donor), **whole}

    def execute(self, whole: Alignment | None = None, **values: Tensor | None) -> dict[str, SpaceTransform]:
        match = self.ahead.result(self, whole) if self.ahead else self._once(lambda: self._match(whole, values))
        self.run.record(self.donor_name, self.block, match.records)
        self.run.keep(self.donor_name, match.transforms)
        return match.transforms

    def match(self, whole: Alignment | None) -> BlockMatch:
        """Reads both blocks, and matches them, unless an earlier run has."""
        loads = load_arguments(anchor=self.anchor, donor=self.donor)
        return self._once(lambda: self._match(whole, {n: cast(LabelledLoad, x).execute() for n, x in loads.items()}))

    def _once(self, match: Callable[[], BlockMatch]) -> BlockMatch:
        return match_once(self.run.ledger, self.key, match)

    def _match(self, whole: Alignment | None, values: Mapping[str, Tensor | None]) -> BlockMatch:
        anchor, donor = (loaded(s, d, self.block, values) for s, d in (("anchor", self.anchor), ("donor", self.donor)))
        if self.fold is not None:
            anchor, donor = self.fold.block(self.block, anchor), self.fold.block(self.block, donor)
        with named(self.anchor_name, self.donor_name):
            return match_block(self.block, anchor, donor, self.options, whole.transforms if whole else None)

    def priority(self) -> int:
        return -5


class MoveTensor(KeyedTask):
    """One tensor of a model in the anchor's coordinates, rounded once, to `dtype`; a tuple, one for each stored piece.

    With `origin` (the model the donor was fine-tuned from): anchor + scale * map(donor - origin). With `fold`: of the
    folded models. Without transforms: the anchor itself, folded. With the anchor's loads: the donor is given the
    anchor's biases where softmax cannot see them.
    """

    block: Block = Field(repr=False)
    info: TensorInfo = Field(repr=False)
    loads: Loads = Field(repr=False)
    transforms: Task | None = None
    whole: Task | None = None
    fold: Fold | None = Field(default=None, repr=False)
    anchor: Loads = Field(default_factory=dict, repr=False)
    origin: Loads = Field(default_factory=dict, repr=False)
    run: Run | None = Field(default=None, repr=False)
    donor_name: str = ""
    rows: tuple[Tensor, Tensor] | None = Field(default=None, repr=False)
    dtype: torch.dtype | None = None
    scale: float = 1.0

    def arguments(self) -> dict[str, Task]:
        sides = load_arguments(donor=self.loads, anchor=self.anchor, origin=self.origin)
        return {**sides, **map_arguments(self.transforms, self.whole)}

    def execute(
        self,
        transforms: dict[str, SpaceTransform] | None = None,
        whole: Alignment | None = None,
        **values: Tensor | None,
    ) -> tuple[Tensor, ...] | None:
        stored = loaded("donor", self.loads, self.block, values).get(self.info.key)
        maps = {**(whole.transforms if whole else {}), **(transforms or {})}
        if stored is None:
            return None
        if self.origin and stored.is_floating_point():
            donor = self._in_slices(stored, values, lambda pieces: self._transport(maps, pieces, self.scale))
        else:
            donor = self._in_slices(stored, values, lambda pieces: self._moved(maps, pieces))
        if donor.is_floating_point():
            donor = donor.to(self.dtype or stored.dtype)
        if donor is not stored:
            _check_finite(donor, self.label, self.donor_name)
        return tuple(donor.unbind(0)) if self.info.stacked else (donor,)

    def _tensor(self, side: str, loads: Loads, values: Values, info: TensorInfo | None = None) -> Tensor | None:
        tensors, info = loaded(side, loads, self.block, values), info or self.info
        if info.key not in tensors:
            return None
        return tensors[info.key] if self.fold is None else self.fold.tensor(self.block, info, tensors.get)

    def _in_slices(self, stored: Tensor, values: Values, make: Callable[[Values], Tensor]) -> Tensor:
        """Apply `make` to the loaded tensors, slice by slice for a long vocabulary if all models have the same."""
        known = {name: tensor for name, tensor in values.items() if tensor is not None}
        infos = {name: info for name in known if (info := self.block.tensor(name.split(":")[1])) is not None}
        axes = {name: info.vocabulary_axis for name, info in infos.items() if info.vocabulary_axis is not None}
        alike = [stored, *(tensor for name, tensor in known.items() if name.split(":")[1] == self.info.key)]

        def made(part: slice | None) -> Tensor:
            return make(values if part is None else {**values, **with_rows(known, axes, part)})

        if self.rows is not None or self.info.stacked:
            return made(None)
        return in_slices(self.info, alike, self.dtype or stored.dtype, made)

    def _moved(self, maps: Mapping[str, SpaceTransform], values: Values) -> Tensor:
        """The donor's tensor in the anchor's coordinates, with the anchor's unseen biases."""

        def donor_tensor(key: str) -> Tensor | None:
            info = self.info if key == self.info.key else self.block.tensor(key)
            tensor = None if info is None else self._tensor("donor", self.loads, values, info)
            return None if info is None or tensor is None else transform_tensor(tensor, info, maps)

        def anchor_tensor(key: str) -> Tensor | None:
            info = self.block.tensor(key)
            return None if info is None else self._tensor("anchor", self.anchor, values, info)

        tensor = (
            with_biases(self.block, self.info, donor_tensor, anchor_tensor, maps)
            if self.anchor
            else donor_tensor(self.info.key)
        )
        assert tensor is not None
        return tensor

    def _transport(self, maps: Mapping[str, SpaceTransform], values: Values, scale: float) -> Tensor:
        donor = self._tensor("donor", self.loads, values)
        assert donor is not None
        anchor, origin = self._tensor("anchor", self.anchor, values), self._tensor("origin", self.origin, values)
        if origin is not None and self.info.vocabulary_axis is not None:
            donor = with_rows_of(donor, origin, self.info.vocabulary_axis)  # rows that the donor added have no place
        why = "a model lacks it" if anchor is None or origin is None else "shapes differ"
        if anchor is None or origin is None or donor.shape != origin.shape or not self._fits(anchor, origin):
            raise AlignmentError(
                f"tensor '{self.info.name}' cannot be carried over: {why}",
                where=self.donor_name,
                remedy="name it under 'exclude' to copy it from base_model",
            )
        change = donor.float() - origin.float()
        if self.run is not None:
            self.run.transport(self.donor_name, float(change.square().sum()), float(origin.float().square().sum()))
        moved = scale * transform_tensor(change, self.info, maps, change=True)
        axis = self.info.vocabulary_axis
        if self.rows is None or axis is None:
            return anchor.float() + moved
        anchor_rows, donor_rows = (rows.to(moved.device) for rows in self.rows)
        return anchor.float().index_add(axis, anchor_rows, moved.index_select(axis, donor_rows))

    def _fits(self, anchor: Tensor, origin: Tensor) -> bool:
        """Whether the shapes agree, up to the size of a vocabulary with known shared tokens."""
        free = self.info.vocabulary_axis if self.rows is not None else None
        pairs = zip(anchor.shape, origin.shape, strict=True) if anchor.ndim == origin.ndim else None
        return pairs is not None and all(a == b or dim == free for dim, (a, b) in enumerate(pairs))

    def priority(self) -> int:
        return -8


class CarriedTensor(KeyedTask):
    """One tensor of the anchor with a donor's change, fitted to samples; rounded once, to `dtype`.

    Attributes:
        carrying: gives the tensors that change, by the anchor's names.
        anchor: loads of the anchor's.
    """

    block: Block = Field(repr=False)
    info: TensorInfo = Field(repr=False)
    carrying: Task
    anchor: Loads = Field(repr=False)
    fold: Fold | None = Field(default=None, repr=False)
    dtype: torch.dtype | None = None

    def arguments(self) -> dict[str, Task]:
        return {**load_arguments(anchor=self.anchor), "carrying": self.carrying}

    def execute(self, carrying: dict[str, Tensor], **values: Tensor | None) -> tuple[Tensor, ...] | None:
        tensors = loaded("anchor", self.anchor, self.block, values)
        if (stored := tensors.get(self.info.key)) is None:
            return None
        for key in tensors:
            info = self.block.tensor(key)
            if info is not None and all(name in carrying for name in info.names):
                tensors[key] = cast(Tensor, read_tensor(info, carrying))
        tensor = tensors[self.info.key] if self.fold is None else self.fold.tensor(self.block, self.info, tensors.get)
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype or stored.dtype)
        _check_finite(tensor, self.label, "the carried change")
        return tuple(tensor.unbind(0)) if self.info.stacked else (tensor,)

    def priority(self) -> int:
        return -8


class AlignedGather(UncheckedTask, GatherTensors):
    """The delegate's input for one output tensor: the anchor unchanged, every donor moved."""

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


class FiniteTensor(UncheckedTask, ReturnTensor):
    """A tensor of a model that is merged in memory, which must be numbers."""

    def execute(self, tensor: Tensor) -> Tensor:
        result: Tensor = super().execute(tensor)
        check_output(result, self.weight_info.name)
        return result


def check_output(tensor: Tensor, name: str) -> None:
    """Stop the merge if weights add up to zero for a delegate that divides by the sum, or a dtype overflows.

    Raises:
        RotationMergeError: names the tensor.
    """
    if not all_finite([tensor]):
        raise RotationMergeError(
            f"tensor '{name}' of the merged model would hold NaN or infinity",
            remedy="check that the weights do not add up to 0 and that the dtype holds the values; nothing was written",
        )


def _check_finite(tensor: Tensor, name: str, model: ModelReference | str) -> None:
    """NaN would go through every delegate in silence."""
    if not all_finite([tensor]):
        raise CheckpointError(
            f"tensor '{name}' holds NaN or infinity", where=str(model), remedy="repair or replace the checkpoint"
        )
