"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name, other_names
from rotation_merge.errors import CheckpointError
from rotation_merge.model import peft_merge
from rotation_merge.model.adapter_entries import AdapterEntry, entry_of
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.headers import Shapes
from rotation_merge.model.low_rank import stacks, transposed
from rotation_merge.model.sources import ComposedTensor, TensorSlice, other_form
from rotation_merge.model.tensors import Tensors

ANOTHER_MODEL = "was it trained on another model?"
CACHED = 4
"""Changes of fused experts that stay in memory, where a checkpoint stores experts apart."""

Index = tuple[int | slice, ...]


def adapted(
    tensors: Tensors,
    adapter: Adapter,
    architecture: Architecture,
    config: Mapping[str, Any],
    tied: str | None = None,
    model: str = "",
) -> Tensors:
    """Tensors with an adapter merged; those that it changes come in float32 at least.

    Args:
        tensors: all that the checkpoint stores.
        architecture, config: of the checkpoint.
        tied: name of a head that is tied to the embedding.
        model: name of base and adapter for errors.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    parts = _Checkpoint(adapter, architecture, tensors.shapes, config, tied, model).parts()
    entries = {part.name: part.entry for at in parts.values() for part in at if part.entry is not None}

    @lru_cache(CACHED)
    def experts(name: str, dtype: torch.dtype) -> Tensor:
        return _fused_experts(adapter, name, entries[name], dtype)

    def changed(name: str, tensor: Tensor) -> Tensor:
        if name not in parts:
            return tensor
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for part in parts[name]:
            region = tensor[part.target]
            if part.entry is not None and part.entry.fused:
                region += experts(part.name, tensor.dtype)[part.source]
            else:
                _apply(adapter, part, region)
        return tensor

    return tensors.map(changed)


@dataclass(frozen=True)
class _Part:
    """A part of an adapter's change, and the part of a stored tensor that it falls on.

    Attributes:
        name: of the changed parameter in the adapter.
        flipped: the weight is stored [in, out].
        entry: the low-rank change, where the tensor is stored in another form.
        source, target: indices of the parts in the change and in the stored tensor; empty: all.
    """

    name: str
    flipped: bool = False
    entry: AdapterEntry | None = None
    source: Index = ()
    target: Index = ()


def _apply(adapter: Adapter, part: _Part, region: Tensor) -> None:
    """Put a part of a change into a tensor, in place."""
    change, low = adapter.changes[part.name], adapter.low_rank(part.name)
    if change.value is not None:
        region.copy_(adapter.tensor(change.value)[part.source])
    if change.shift is not None:
        region += (change.scale * adapter.tensor(change.shift).to(region.dtype))[part.source]
    if low is None:
        return
    low = replace(low, a=low.a.to(region.dtype), b=low.b.to(region.dtype))
    if change.magnitude is not None:
        weight = region.T if part.flipped and not change.embedding else region
        magnitude = adapter.tensor(change.magnitude).to(region.dtype)
        weight.copy_(peft_merge.dora(weight.contiguous(), low, magnitude))
        return
    product = replace(low, scale=part.entry.scale if part.entry else low.scale).product()
    region += (product.mT if part.flipped else product)[part.source]


def _fused_experts(adapter: Adapter, name: str, entry: AdapterEntry, dtype: torch.dtype) -> Tensor:
    """The change of all experts of a parameter, as the model's class stores it; not to be modified."""
    low = adapter.low_rank(name)
    assert low is not None
    change = peft_merge.fused_experts(replace(low, scale=entry.scale), entry.spot.info.axes[0].size or 1, dtype)
    return change if entry.transposed else change.mT


@dataclass(frozen=True)
class _Checkpoint:
    """The model that an adapter is merged into; see `adapted`."""

    adapter: Adapter
    architecture: Architecture
    shapes: Shapes
    config: Mapping[str, Any]
    tied: str | None
    model: str

    @cached_property
    def _names(self) -> dict[str, PossibleTensor]:
        return every_name(self.config)

    @cached_property
    def _elsewhere(self) -> dict[str, str]:
        return other_names(self.config, self.architecture)

    def parts(self) -> dict[str, list[_Part]]:
        """The parts of all changes, by the stored tensor that each falls on."""
        result: dict[str, list[_Part]] = {}
        infos = self.architecture.named()
        for name in self.adapter.changes:
            if name not in self.shapes and self._adds_nothing(name):
                continue
            place = name if name in self.shapes else self._elsewhere.get(name, name)
            info = infos.get(place)
            another_form = place not in self.shapes or (info is not None and stacks(info) and not info.stacked)
            parts = list(self._parts_of(name)) if another_form else []
            for key, part in parts or [(place, self._whole(name, place, info))]:
                self._check_shape(key, part)
                result.setdefault(key, []).append(part)
        return result

    def _refused(self, problem: str, remedy: str = ANOTHER_MODEL) -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=self.model, remedy=remedy)

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
        change = self.adapter.changes[name]
        alone = change.shift is not None and change.a is None and change.value is None
        return alone and not bool(self.adapter.tensor(str(change.shift)).any())

    def _whole(self, name: str, place: str, info: TensorInfo | None) -> _Part:
        """A change of a whole stored tensor."""
        if place not in self.shapes:
            raise self._refused(f"changes '{name}', which the model does not store")
        shape, change = self.shapes[place], self.adapter.changes[name]
        if self.tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
            raise self._refused(
                f"changes '{place}' and not the head '{self.tied}', which is tied to it",
                "store the head as a tensor of its own, with 'tie_word_embeddings': false",
            )
        if change.embedding or change.a is None or len(shape) != 2:
            return _Part(name, change.embedding)
        if shape[0] != shape[1]:
            return _Part(name, shape == _low_rank_shape(self.adapter, name)[::-1])
        labelled = info is not None and any(axis.parts for axis in info.axes)
        return _Part(name, transposed(info) if info and labelled else bool(self.adapter.config.get("fan_in_fan_out")))

    def _parts_of(self, name: str) -> Iterator[tuple[str, _Part]]:
        """A change's parts by the stored tensors that its own is composed of; nothing if it is of none."""
        change = self.adapter.changes[name]
        entry = entry_of(self.adapter, name, self._names) if change.a is not None else None
        spot = entry.spot if entry is not None else self._names.get(name)
        form = _stored_form(spot, self.architecture) if spot is not None and change.magnitude is None else None
        if spot is None or form is None:
            return
        info, start = spot.info, 0
        expert = entry.expert if entry is not None else (info.names.index(name) if info.stacked else None)
        count = (info.axes[0].size or 0) if stacks(info) and expert is None else 0
        for cut in form.cuts:
            extent = cut.info.axes[cut.dim].size
            length = cut.length if cut.dim == form.dim else (cut.info.axes[form.dim].size or 0)
            source, target = [[slice(None)] * len(info.axes) for _ in range(2)]
            if len(form.cuts) > 1:
                source[form.dim] = slice(start, start + length)
            if cut.length != extent:
                target[cut.dim] = slice(cut.start, cut.start + cut.length)
            start += length
            for each in range(count) if cut.info.stacked and expert is None else (expert,):
                key = cut.info.names[each or 0] if cut.info.stacked else cut.info.name
                indices = _of_expert(source, each, count > 0), _of_expert(target, each, not cut.info.stacked)
                yield key, _Part(name, entry is not None and entry.transposed, entry, *indices)

    def _check_shape(self, key: str, part: _Part) -> None:
        """Refuse a change of another shape than the tensor that it falls on."""
        adapter, stored = self.adapter, self.shapes[key]
        change = adapter.changes[part.name]
        shapes = [adapter.shapes[name] for name in (change.value, change.shift) if name is not None]
        if change.a is not None:
            shape = _low_rank_shape(adapter, part.name)
            experts = part.entry.spot.info.axes[:1] if part.entry is not None and part.entry.fused else ()
            shapes.append((*(axis.size or 0 for axis in experts), *(shape[::-1] if part.flipped else shape)))
        for shape in shapes:
            size = _shape_at(shape, part.source)
            if size is None or size != _shape_at(stored, part.target):
                problem = f"has {list(shape)} for '{part.name}', the model has {list(stored)}"
                raise self._refused(problem if key == part.name else f"{problem} in '{key}'")


def _stored_form(spot: PossibleTensor, architecture: Architecture) -> ComposedTensor | None:
    """The stored tensors that a tensor is composed of; None if there are none."""
    for block in architecture.blocks:
        if spot.in_block(block):
            if (info := block.tensor(spot.info.key)) is not None:
                return ComposedTensor(0, (TensorSlice(info, 0, 0, info.axes[0].size or 0),))
            return other_form(block, replace(block, tensors=(*block.tensors, spot.info))).get(spot.info.key)
    return None


def _of_expert(index: list[slice], expert: int | None, counted: bool) -> Index:
    """The index of one expert's part, from that of all experts; counted: whether the tensor holds all."""
    if expert is None:
        return tuple(index)
    return (expert, *index[1:]) if counted else tuple(index[1:])


def _low_rank_shape(adapter: Adapter, name: str) -> tuple[int, ...]:
    """Shape of a low-rank change, (out, in) or (out, in, kernel...)."""
    change = adapter.changes[name]
    return adapter.shapes[str(change.b)][0], *adapter.shapes[str(change.a)][1:]


def _shape_at(shape: tuple[int, ...], index: Index) -> tuple[int, ...] | None:
    """Shape of a part of a tensor; None if the index does not fit."""
    try:
        return tuple(torch.empty(shape, device="meta")[index].shape)
    except IndexError:
        return None
