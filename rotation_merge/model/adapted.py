"""A model with a LoRA adapter, read as one model with the adapter merged tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import Spot, every_name, other_names
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.factors import stacks
from rotation_merge.model.headers import Shapes
from rotation_merge.model.lora_pieces import Piece, pieces_of

READS = {"read", "o", "out"}
"""Roles of the axes that a linear map reads; in (out, in) they stand last."""

WRITES = {"write", "q", "k", "v", "in", "gate"}


@dataclass(frozen=True)
class WholeChange:
    """A change of a whole stored tensor: the adapter's name for it, and whether it is stored as (in, out)."""

    name: str
    transposed: bool

    def apply(self, adapter: Adapter, tensor: Tensor) -> Tensor:
        """The tensor with the adapter merged in, in float32 at least."""
        return adapter.apply(self.name, tensor, self.transposed)


Places = Mapping[str, list[WholeChange | Piece]]
"""What an adapter changes of a checkpoint, by the checkpoint's names of tensors."""


class AdaptedLoader:
    """Reads like mergekit's `LazyTensorLoader`; the adapter's changes come in float32 at least."""

    def __init__(self, base: Any, adapter: Adapter, places: Callable[[], Places]) -> None:
        """
        Args:
            base: mergekit's loader of the base model.
            places: what `find_places` gives, asked for when the first tensor is read.
        """
        self.base, self.adapter, self._find = base, adapter, places
        self.index = base.index

    @cached_property
    def places(self) -> Places:
        return self._find()

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        tensor: Tensor | None = self.base.get_tensor(key, device, None, raise_on_missing)
        return None if tensor is None else self._changed(tensor, self.places.get(key, ()))

    def _changed(self, tensor: Tensor, places: Iterable[WholeChange | Piece]) -> Tensor:
        if any(isinstance(place, Piece) for place in places):
            tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for place in places:
            tensor = place.apply(self.adapter, tensor)
        return tensor

    def flush(self) -> None:
        self.base.flush()


def find_places(
    adapter: Adapter,
    architecture: Architecture,
    shapes: Shapes,
    config: Mapping[str, Any],
    tied: str | None,
    model: str,
) -> Places:
    """The stored tensors that an adapter changes, and how.

    Args:
        shapes: of all tensors that the checkpoint stores.
        tied: name of a head that is tied to the embedding.
        model: what to call the two together in errors.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    known = architecture.named()
    elsewhere: dict[str, str] | None = None
    names: dict[str, Spot] | None = None
    places: dict[str, list[WholeChange | Piece]] = {}
    for name in adapter.changes:
        place = name
        if name not in shapes:
            elsewhere = other_names(config, architecture) if elsewhere is None else elsewhere
            place = elsewhere.get(name, name)
        info, pieces = known.get(place), dict[str, list[Piece]]()
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
            places.setdefault(place, []).insert(0, WholeChange(name, _transposed(adapter, name, shapes[place], info)))
    return places


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
    """Whether a weight is stored as (in, out): by its shape; of a square one, by what its axes are."""
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
