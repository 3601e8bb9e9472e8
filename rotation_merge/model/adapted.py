"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model import peft_merge
from rotation_merge.model.adapter_entries import AdapterEntry, entry_of
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.forms import ComposedTensor, TensorSlice, other_form
from rotation_merge.model.low_rank import stacks, transposed
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
    entries = {part.name: part.entry for of_tensor in parts.values() for part in of_tensor if part.entry is not None}

    latest: dict[tuple[str, torch.dtype], Tensor] = {}

    def experts(name: str, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in latest:
            while len(latest) >= CACHED:
                latest.pop(next(iter(latest)), None)
            latest[name, dtype] = _of_experts(adapter, name, entries[name], dtype)
        return latest[name, dtype]

    def changed(name: str, tensor: Tensor) -> Tensor:
        if name not in parts:
            return tensor
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for part in parts[name]:
            region = tensor[part.target]
            if part.entry is not None and part.entry.experts:
                region += experts(part.name, tensor.dtype)[part.source]
            else:
                _apply(adapter, part, region)
        return tensor

    wide = {name: torch.promote_types(kind, torch.float32) for name, kind in tensors.dtypes.items() if name in parts}
    return tensors.map(changed, dtypes={**tensors.dtypes, **wide})


@dataclass(frozen=True)
class _Part:
    """A part of an adapter's change, and the part of a stored tensor that it falls on.

    Attributes:
        name: of the changed parameter in the adapter.
        flipped: the weight is stored [in, out].
        entry: the low-rank change, where the tensor is stored under another name or in another form.
        source, target: indices of the parts in the change and in the stored tensor; empty: all.
    """

    name: str
    flipped: bool
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
    low = replace(low.to(region.dtype), scale=part.entry.scale if part.entry else low.scale)
    if change.magnitude is not None:
        weight = region.T if part.flipped and not change.embedding else region
        magnitude = adapter.tensor(change.magnitude).to(region.dtype)
        weight.copy_(peft_merge.dora(weight.contiguous(), low, magnitude))
    else:
        region += (low.product().mT if part.flipped else low.product())[part.source]


def _of_experts(adapter: Adapter, name: str, entry: AdapterEntry, dtype: torch.dtype) -> Tensor:
    """The change of all experts of a parameter, as the model's class stores it; not to be modified."""
    low = adapter.low_rank(name)
    assert low is not None
    change = peft_merge.fused_experts(replace(low.to(dtype), scale=entry.scale), entry.experts)
    return change if entry.transposed else change.mT


@dataclass(frozen=True)
class _Checkpoint:
    """The model that an adapter is merged into; see `adapted`."""

    adapter: Adapter
    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    tied: str | None
    model: str

    @cached_property
    def _names(self) -> dict[str, PossibleTensor]:
        return every_name(self.config)

    def parts(self) -> dict[str, list[_Part]]:
        """The parts of all changes, by the stored tensor that each falls on."""
        result: dict[str, list[_Part]] = {}
        infos = self.architecture.named()
        for name in self.adapter.changes:
            info = infos.get(name)
            if name in self.shapes and (info is None or info.stacked or not stacks(info)):
                parts: Iterable[tuple[str, _Part]] = [self._whole(name, name, info)]
            elif name not in self.shapes and self._adds_nothing(name):
                continue
            else:
                parts = self._in_another_form(name)
            for key, part in parts:
                self._check_shape(key, part)
                result.setdefault(key, []).append(part)
        return result

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
        change = self.adapter.changes[name]
        alone = change.shift is not None and change.value is None
        return alone and not bool(self.adapter.tensor(str(change.shift)).any())

    def _refused(self, problem: str, remedy: str = ANOTHER_MODEL) -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=self.model, remedy=remedy)

    def _absent(self, name: str) -> CheckpointError:
        return self._refused(f"changes '{name}', which the model does not store")

    def _whole(
        self, name: str, place: str, info: TensorInfo | None, entry: AdapterEntry | None = None
    ) -> tuple[str, _Part]:
        """The change of a whole stored tensor, `place`."""
        if place not in self.shapes:
            raise self._absent(name)
        shape, change = self.shapes[place], self.adapter.changes[name]
        if self.tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
            raise self._refused(
                f"changes '{place}' and not the head '{self.tied}', which is tied to it",
                "store the head as a tensor of its own, with 'tie_word_embeddings': false",
            )
        if change.embedding or change.a is None or len(shape) != 2:
            flipped = change.embedding
        elif shape[0] != shape[1]:
            flipped = shape == _low_rank_shape(self.adapter, name)[::-1]
        else:
            labelled = info is not None and any(axis.parts for axis in info.axes)
            flipped = transposed(info) if info and labelled else bool(self.adapter.config.get("fan_in_fan_out"))
        return place, _Part(name, flipped, entry)

    def _in_another_form(self, name: str) -> Iterable[tuple[str, _Part]]:
        """A change's parts, by the tensors that the checkpoint stores for the parameter."""
        change = self.adapter.changes[name]
        entry = entry_of(self.adapter, name, self._names) if change.a is not None else None
        spot = entry.spot if entry is not None else self._names.get(name)
        block = next((block for block in self.architecture.blocks if spot is not None and spot.in_block(block)), None)
        if spot is None or block is None:
            raise self._absent(name)
        info, stored = spot.info, block.tensor(spot.info.key)
        expert = entry.expert if entry is not None else (info.names.index(name) if info.stacked else None)
        if stored is not None and stored.stacked == info.stacked and not (stacks(info) and expert is None):
            return [self._whole(name, stored.names[expert or 0], stored, entry)]
        named = replace(block, tensors=(*block.tensors, info))
        form = _same(stored) if stored is not None else other_form(block, named).get(info.key)
        if form is None or change.magnitude is not None:
            raise self._absent(name)
        return self._cuts(name, entry, info, expert, form)

    def _cuts(
        self, name: str, entry: AdapterEntry | None, info: TensorInfo, expert: int | None, form: ComposedTensor
    ) -> Iterator[tuple[str, _Part]]:
        """The parts of a change of a tensor that the checkpoint stores in another form; of one expert, or of all."""
        start, axes = 0, len(info.axes)
        for cut in form.cuts:
            length = cut.length if cut.dim == form.dim else (cut.info.axes[form.dim].size or 0)
            source_span, target_span = slice(start, start + length), slice(cut.start, cut.start + cut.length)
            start += length
            apart = bool(stacks(info)) and expert is None and cut.info.stacked
            for each in range(info.axes[0].size or 0) if apart else (expert,):
                source = _index(axes, form.dim, source_span, each, expert is None)
                target = _index(axes, cut.dim, target_span, each, not cut.info.stacked)
                key = cut.info.names[each or 0] if cut.info.stacked else cut.info.name
                yield key, _Part(name, entry is not None and entry.transposed, entry, source, target)

    def _check_shape(self, key: str, part: _Part) -> None:
        """Refuse a change of another shape than the tensor that it falls on."""
        adapter, stored = self.adapter, self.shapes[key]
        change = adapter.changes[part.name]
        shapes = [adapter.shapes[name] for name in (change.value, change.shift) if name is not None]
        if change.a is not None:
            shape = _low_rank_shape(adapter, part.name)[:: -1 if part.flipped else 1]
            experts = part.entry.experts if part.entry is not None else 0
            shapes.append((experts, *shape) if experts else shape)
        for shape in shapes:
            if _shape_at(shape, part.source) != _shape_at(stored, part.target):
                problem = f"has {list(shape)} for '{part.name}', the model has {list(stored)}"
                raise self._refused(problem if key == part.name else f"{problem} in '{key}'")


def _same(info: TensorInfo) -> ComposedTensor:
    """A tensor as composed of itself."""
    return ComposedTensor(0, (TensorSlice(info, 0, 0, info.axes[0].size or 0),))


def _index(axes: int, dim: int, span: slice, expert: int | None, holds_all: bool) -> Index:
    """Index of a span along one dimension, of one expert; holds_all: whether the tensor is one of all experts."""
    index: list[int | slice] = [slice(None)] * axes
    index[dim] = span
    if expert is None:
        return tuple(index)
    return (expert, *index[1:]) if holds_all else tuple(index[1:])


def _low_rank_shape(adapter: Adapter, name: str) -> tuple[int, ...]:
    """Shape of a low-rank change, (out, in) or (out, in, kernel...)."""
    change = adapter.changes[name]
    return adapter.shapes[str(change.b)][0], *adapter.shapes[str(change.a)][1:]


def _shape_at(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Shape of a part of a tensor; of all of it, if it lacks this part."""
    try:
        return tuple(torch.empty(shape, device="meta")[index].shape)
    except IndexError:
        return shape
