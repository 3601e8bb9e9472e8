"""A model with a LoRA adapter, read as one model: its tensors are the base model's as the adapter makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from rotation_merge.architectures.model import Architecture, TensorInfo
from rotation_merge.architectures.registry import other_names
from rotation_merge.checkpoints.adapters import Adapter
from rotation_merge.checkpoints.headers import Shapes
from rotation_merge.errors import CheckpointError

READS = {"read", "o", "out"}
"""Roles of the axes that a linear map reads; in (out, in) they stand last."""

WRITES = {"write", "q", "k", "v", "in", "gate"}


class AdaptedLoader:
    """Reads like mergekit's `LazyTensorLoader`; the adapter's changes come in float32 at least."""

    def __init__(self, base: Any, adapter: Adapter, places: Callable[[], Mapping[str, tuple[str, bool]]]) -> None:
        """
        Args:
            base: mergekit's loader of the base model.
            places: what `find_places` gives, asked for when the first tensor is read.
        """
        self.base, self.adapter, self._find = base, adapter, places
        self.index = base.index

    @cached_property
    def places(self) -> Mapping[str, tuple[str, bool]]:
        return self._find()

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Collection[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        if key not in self.index.tensor_paths:
            key = next((alias for alias in aliases or () if alias in self.index.tensor_paths), key)
        tensor: Tensor | None = self.base.get_tensor(key, device, None, raise_on_missing)
        if tensor is None or key not in self.places:
            return tensor
        return self.adapter.apply(self.places[key][0], tensor, self.places[key][1])

    def flush(self) -> None:
        self.base.flush()


def find_places(
    adapter: Adapter,
    architecture: Architecture,
    shapes: Shapes,
    config: Mapping[str, Any],
    tied: str | None,
    model: str,
) -> dict[str, tuple[str, bool]]:
    """What an adapter changes of a checkpoint.

    Args:
        shapes: of all tensors that the checkpoint stores.
        tied: name of a head that is tied to the embedding.
        model: what to call the two together in errors.

    Returns:
        By the checkpoint's name of a tensor: the adapter's name for it, and whether it is stored as (in, out).

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    if adapter.config.get("target_parameters"):
        raise adapter.refusal("'target_parameters' is set: it adapts parameters that are not the weight of a layer")
    known = architecture.named()
    elsewhere: dict[str, str] | None = None
    found = {}
    for name in adapter.changes:
        place = name
        if name not in shapes:
            elsewhere = other_names(config, architecture) if elsewhere is None else elsewhere
            place = elsewhere.get(name, name)
        _check(adapter, name, place, shapes, known.get(place), tied, model)
        found[place] = name, _transposed(adapter, name, shapes[place], known.get(place))
    return found


def _check(
    adapter: Adapter, name: str, place: str, shapes: Shapes, info: TensorInfo | None, tied: str | None, model: str
) -> None:
    def refused(what: str, remedy: str) -> CheckpointError:
        return CheckpointError(f"the adapter {what}", where=model, remedy=remedy)

    if place not in shapes:
        raise refused(f"changes '{name}', which the model does not store", "was it trained on another model?")
    shape, change, added = shapes[place], adapter.changes[name], adapter.shape(name)
    if tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
        raise refused(
            f"changes '{place}' and not the head '{tied}', which is tied to it",
            "store the head as a tensor of its own, with 'tie_word_embeddings': false",
        )
    fits = [shape, shape[::-1]] if len(shape) == 2 else [(shape[0], math.prod(shape[1:]))]
    given = [adapter.shapes[key] for key in (change.value, change.shift) if key is not None]
    odd = [other for other in given if other != shape] + ([added] if added is not None and added not in fits else [])
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
