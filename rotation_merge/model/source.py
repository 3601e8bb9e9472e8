"""Sources of tensors: reading blocks, transforming a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.model.apply import transform_tensor
from rotation_merge.symmetry import SpaceTransform
from rotation_merge.workers import Progress as Progress


class TensorSource(Protocol):
    """Anything that gives a tensor by its checkpoint name: a state dict, a lazily read set of shards."""

    def __contains__(self, name: object) -> bool: ...

    def __getitem__(self, name: str, /) -> Tensor: ...


KEPT = 1 << 26
"""Bytes of a model that stay in memory where it is read again and again."""


class CachedSource:
    """A source that caches the tensors it has read, up to a limit in bytes."""

    def __init__(self, source: TensorSource, room: int = KEPT) -> None:
        self.source, self.room = source, room
        self._kept: dict[str, Tensor] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._kept or name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        tensor = self.source[name]
        size = tensor.untyped_storage().nbytes()  # of all experts, where it is one of them
        if size <= self.room:
            self.room -= size
            self._kept[name] = tensor
        return tensor


def read_tensor(info: TensorInfo, source: TensorSource) -> Tensor | None:
    """A tensor of the architecture (stacked if stored in pieces), or None if the source lacks it.

    Raises:
        CheckpointError: a dimension has another length than the architecture says; names tensor and lengths.
    """
    names = info.names
    if names[0] not in source:
        names = next(((tied,) for tied in info.tied if tied in source), ())
    if not names:
        return None
    tensor = torch.stack([source[name] for name in names]) if info.stacked else source[names[0]]
    check_shape(info, tuple(tensor.shape))
    return tensor


def check_shape(info: TensorInfo, shape: tuple[int, ...], model: str | None = None) -> None:
    """Compare a (stacked) tensor's shape with its labelled axes; one without any claims nothing."""
    if not info.axes:
        return
    sizes = tuple(axis.size for axis in info.axes)
    if len(sizes) != len(shape) or any(w is not None and w != s for w, s in zip(sizes, shape, strict=False)):
        words = " x ".join("any" if w is None else str(w) for w in sizes)
        raise CheckpointError(
            f"tensor '{info.name}' has shape {list(shape)}, its config says {words}",
            where=model,
            remedy="config.json and weights do not belong together, or the architecture file is wrong",
        )


def check_shapes(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Compare every stored tensor's shape with its labelled axes, as `check_shape` does."""
    for info in architecture.tensors():
        present = [name for name in info.names if name in shapes]
        if present:
            shape = shapes[present[0]]
            check_shape(info, (len(info.names), *shape) if info.stacked else shape, model)


def read_block(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """The tensors of a block by key."""
    tensors = ((info.key, read_tensor(info, source)) for info in block.tensors)
    return {key: tensor for key, tensor in tensors if tensor is not None}


def unstack(info: TensorInfo, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under the names it is stored by."""
    return dict(zip(info.names, tensor.unbind(0), strict=True)) if info.stacked else {info.names[0]: tensor}


def transform_state(
    architecture: Architecture, state: Mapping[str, Tensor], transforms: Mapping[str, SpaceTransform]
) -> dict[str, Tensor]:
    """A state dict in new coordinates: same names and dtypes, each tensor rounded once.

    Args:
        architecture: resolved for this state dict's names.
        state: tensors by name; not modified. Tensors outside the architecture are passed on.
        transforms: by space name.
    """
    result = dict(state)
    for info in architecture.tensors():
        tensor = read_tensor(info, state)
        if tensor is not None:
            moved = transform_tensor(tensor, info, transforms)
            if moved is not tensor:
                result.update(unstack(info, moved.to(tensor.dtype).contiguous()))
    return result
