"""A model with a LoRA adapter, read as one model with the adapter merged tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name, other_names
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.blocks import Shapes
from rotation_merge.model.factors import stacks
from rotation_merge.model.forms import ComposedTensor, TensorSlice, other_form
from rotation_merge.model.lora import AdapterEntry, entry_of, sizes
from rotation_merge.model.tensors import Tensors

READS = {"read", "o", "out"}
"""Roles of the axes that a linear map reads; in (out, in) they stand last."""

WRITES = {"write", "q", "k", "v", "in", "gate"}


@dataclass(frozen=True)
class WholeTensorChange:
    """A change of a whole tensor: the adapter's name for it, and whether it is stored as (in, out)."""

    name: str
    transposed: bool

    def apply(self, adapter: Adapter, tensor: Tensor) -> Tensor:
        """The tensor with the adapter merged in, in float32 at least."""
        return adapter.apply(self.name, tensor, self.transposed)


def adapted(tensors: Tensors, adapter: Adapter, places: ChangePlaces) -> Tensors:
    """A model's tensors with an adapter merged in; those that it changes come in float32 at least.

    Args:
        places: result of `find_places`.
    """

    def change(name: str, tensor: Tensor) -> Tensor:
        changes = places.get(name, ())
        if any(isinstance(place, ChangePart) for place in changes):
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for place in changes:
            tensor = place.apply(adapter, tensor)
        return tensor

    wide = {name: torch.promote_types(dtype, torch.float32) for name, dtype in tensors.dtypes.items() if name in places}
    merged = tensors.map(change)
    return Tensors(tensors.shapes, {**tensors.dtypes, **wide}, merged.read, merged.stack)


def find_places(
    adapter: Adapter,
    architecture: Architecture,
    shapes: Shapes,
    config: Mapping[str, Any],
    tied: str | None,
    model: str,
) -> ChangePlaces:
    """The stored tensors that an adapter changes, with the changes.

    Args:
        shapes: of all tensors that the checkpoint stores.
        tied: name of a head that is tied to the embedding.
        model: name of base and adapter for errors.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    known = architecture.named()
    elsewhere: dict[str, str] | None = None
    names: dict[str, PossibleTensor] | None = None
    places: dict[str, list[WholeTensorChange | ChangePart]] = {}
    for name in adapter.changes:
        place = name
        if name not in shapes and _adds_nothing(adapter, name):
            continue
        if name not in shapes:
            elsewhere = other_names(config, architecture) if elsewhere is None else elsewhere
            place = elsewhere.get(name, name)
        info, pieces = known.get(place), dict[str, list[ChangePart]]()
        if place not in shapes or (info is not None and stacks(info) and not info.stacked):
            names = every_name(config) if names is None else names
            pieces = pieces_of(adapter, name, architecture, names)
        for key, parts in pieces.items():
            if not all(part.fits(adapter, shapes[key]) for part in parts):
                raise CheckpointError(
                    f"the adapter has {list(parts[0].sizes(adapter))} for '{name}', which does not fit '{key}'",
                    where=model,
                    remedy="was it trained on another model?",
                )
            places.setdefault(key, []).extend(parts)
        if not pieces:
            _check(adapter, name, place, shapes, info, tied, model)
            places.setdefault(place, []).insert(
                0, WholeTensorChange(name, _transposed(adapter, name, shapes[place], info))
            )
    return places


def _adds_nothing(adapter: Adapter, name: str) -> bool:
    """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
    change = adapter.changes[name]
    alone = change.shift is not None and change.a is None and change.value is None
    return alone and not bool(adapter.tensor(str(change.shift)).any())


def _check(
    adapter: Adapter, name: str, place: str, shapes: Shapes, info: TensorInfo | None, tied: str | None, model: str
) -> None:
    def refused(problem: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=model, remedy=remedy)

    if place not in shapes:
        raise refused(f"changes '{name}', which the model does not store", "was it trained on another model?")
    shape, change, added = shapes[place], adapter.changes[name], adapter.shape(name)
    if tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
        raise refused(
            f"changes '{place}' and not the head '{tied}', which is tied to it",
            "store the head as a tensor of its own, with 'tie_word_embeddings': false",
        )
    fits = [shape, shape[::-1]] if len(shape) == 2 else [(shape[0], math.prod(shape[1:]))]
    factor_shapes = [adapter.shapes[key] for key in (change.value, change.shift) if key is not None]
    odd = [size for size in factor_shapes if size != shape] + (
        [added] if added is not None and added not in fits else []
    )
    if odd:
        raise refused(
            f"has {list(odd[0])} for '{name}', the model has {list(shape)}", "was it trained on another model?"
        )


def _transposed(adapter: Adapter, name: str, shape: tuple[int, ...], info: TensorInfo | None) -> bool:
    """Whether a weight is stored as (in, out): by its shape; a square one, by its axes."""
    added = adapter.shape(name)
    if added is None or len(shape) != 2 or adapter.changes[name].embedding:
        return False
    if shape[0] != shape[1]:
        return shape != added
    roles = [{part.role for part in axis.parts} for axis in info.axes[-2:]] if info is not None else []
    for first, last, answer in ((READS, WRITES, True), (WRITES, READS, False)):
        if len(roles) == 2 and (roles[0] & first or roles[1] & last):
            return answer
    return bool(adapter.config.get("fan_in_fan_out"))


Span = tuple[int, int, int]
"""Some of a tensor's entries: dimension, first, number."""


@dataclass(frozen=True)
class ChangePart:
    """The part of a change that lands in one stored tensor, or in a part of it.

    Attributes:
        name: the adapter's name of the changed tensor.
        entry: the low-rank change; None: a change of another kind.
        count: of experts whose factors stand in one.
        expert: whose part of the change; at: which entry of the stored tensor gets it. None: all.
        source_span: of the change, of one expert where one is told; lands: of the stored tensor likewise. None: all.
    """

    name: str
    entry: AdapterEntry | None
    count: int
    expert: int | None
    at: int | None
    source_span: Span | None
    lands: Span | None

    def sizes(self, adapter: Adapter) -> tuple[int, ...]:
        """Sizes of the change that this part belongs to."""
        if self.entry is None:
            change = adapter.changes[self.name]
            return adapter.shapes[str(change.value or change.shift)]
        shape = sizes(adapter, self.entry.change)
        return (*([self.count] * bool(self.count)), *(shape[::-1] if self.entry.transposed else shape))

    def fits(self, adapter: Adapter, stored: tuple[int, ...]) -> bool:
        """Whether this part has the shape of its target."""
        piece_shape, stored_shape = (
            list(self.sizes(adapter)[self.expert is not None :]),
            list(stored[self.at is not None :]),
        )
        for shape, span in ((piece_shape, self.source_span), (stored_shape, self.lands)):
            if span is not None:
                shape[span[0]] = span[2] if span[1] + span[2] <= shape[span[0]] else 0
        return piece_shape == stored_shape

    def apply(self, adapter: Adapter, tensor: Tensor) -> Tensor:
        """Add this part of the change to a stored tensor, in place."""
        region, change = _some(tensor if self.at is None else tensor[self.at], self.lands), adapter.changes[self.name]
        if change.value is not None:
            region.copy_(self._part(adapter.tensor(change.value)))
        if change.shift is not None:
            region.add_(self._part(adapter.tensor(change.shift)).to(tensor), alpha=change.scale)
        if self.entry is not None:
            region.add_(_some(self._product(adapter, self.entry, tensor), self.source_span), alpha=self.entry.scale)
        return tensor

    def _part(self, whole: Tensor) -> Tensor:
        return _some(whole if self.expert is None else whole[self.expert], self.source_span)

    def _product(self, adapter: Adapter, entry: AdapterEntry, like: Tensor) -> Tensor:
        """B A in the weight's shape.

        For E experts peft has A (E rank, in), experts one after the other, and B (out, rank E), experts side by side.
        """
        a, b = adapter.factor(entry.a).to(like), adapter.factor(entry.b).to(like)
        if self.count:
            a, b = a.reshape(self.count, -1, a.shape[-1]), b.reshape(len(b), -1, self.count).permute(2, 0, 1)
            if self.expert is not None:
                a, b = a[self.expert], b[self.expert]
        product = b @ a
        return product.mT if entry.transposed else product


ChangePlaces = Mapping[str, list[WholeTensorChange | ChangePart]]
"""An adapter's changes of a checkpoint, by the checkpoint's tensor names."""


def pieces_of(
    adapter: Adapter, name: str, architecture: Architecture, names: Mapping[str, PossibleTensor]
) -> dict[str, list[ChangePart]]:
    """The parts of an adapter's change, by the checkpoint tensor that each changes; empty if there are none.

    Args:
        architecture: of the checkpoint.
        names: all that its tensors may go by.
    """
    change = adapter.changes[name]
    entry = entry_of(adapter, name, names) if change.a is not None else None
    spot = entry.spot if entry is not None else names.get(name)
    composed = _made(spot, architecture) if spot is not None and change.magnitude is None else None
    if spot is None or composed is None:
        return {}
    info = spot.info
    alone = entry.expert if entry is not None else (info.names.index(name) if info.stacked else None)
    whole = bool(stacks(info)) and alone is None
    count = (info.axes[0].size or 0) if whole else 0
    pieces: dict[str, list[ChangePart]] = {}
    start = 0
    for cut in composed.cuts:
        extent = cut.info.axes[cut.dim].size
        length = cut.length if cut.dim == composed.dim else (cut.info.axes[composed.dim].size or 0)
        for expert in range(count) if whole and (cut.info.stacked or info.stacked) else (alone,):
            less = int(expert is not None)
            source_span = None if len(composed.cuts) == 1 else (composed.dim - less, start, length)
            lands = None if cut.length == extent else (cut.dim - less, cut.start, cut.length)
            key, at = (cut.info.names[expert or 0], None) if cut.info.stacked else (cut.info.name, expert)
            pieces.setdefault(key, []).append(
                ChangePart(name, entry, count, expert if whole else None, at, source_span, lands)
            )
        start += length
    return pieces


def _some(tensor: Tensor, span: Span | None) -> Tensor:
    return tensor if span is None else tensor.narrow(*span)


def _made(spot: PossibleTensor, architecture: Architecture) -> ComposedTensor | None:
    """The stored tensors that a tensor is composed of; None if there are none."""
    for block in architecture.blocks:
        if spot.in_block(block):
            if (info := block.tensor(spot.info.key)) is not None:
                return ComposedTensor(0, (TensorSlice(info, 0, 0, info.axes[0].size or 0),))
            return other_form(block, replace(block, tensors=(*block.tensors, spot.info))).get(spot.info.key)
    return None
