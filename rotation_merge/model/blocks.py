"""Blocks of a model: their tensors read and computed, those that are stored in pieces as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.tensors import Names, Tensors, TensorSource, as_tensors
from rotation_merge.symmetry import Transform


def read_tensor(info: TensorInfo, source: TensorSource) -> Tensor | None:
    """A tensor of the architecture (stacked if stored in pieces), or None if the source lacks it."""
    names = info.names if info.names[0] in source else tuple(tied for tied in info.tied if tied in source)[:1]
    if not names or not info.stacked:
        return source[names[0]] if names else None
    return source.read(names) if isinstance(source, Tensors) else torch.stack([source[name] for name in names])


def check_shape(info: TensorInfo, shape: tuple[int, ...], model: str | None = None) -> None:
    """Compare a (stacked) tensor's shape with its labelled axes; one without any claims nothing.

    Raises:
        CheckpointError: a dimension has another length than the architecture says; names tensor and lengths.
    """
    sizes = tuple(axis.size for axis in info.axes)
    if sizes and (len(sizes) != len(shape) or any(w not in (None, s) for w, s in zip(sizes, shape, strict=True))):
        words = " x ".join("any" if w is None else str(w) for w in sizes)
        problem = f"tensor '{info.name}' has shape {list(shape)}, its config says {words}"
        remedy = "config.json and weights do not belong together, or the architecture file is wrong"
        raise CheckpointError(problem, where=model, remedy=remedy)


def check_shapes(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], model: str) -> None:
    """Compare every stored tensor's shape with its labelled axes, as `check_shape` does."""
    for info in architecture.tensors():
        if (name := next((name for name in info.names if name in shapes), None)) is not None:
            check_shape(info, (len(info.names), *shapes[name]) if info.stacked else shapes[name], model)


def read_block(block: Block, source: TensorSource) -> dict[str, Tensor]:
    """The tensors of a block by key."""
    tensors = ((info.key, read_tensor(info, source)) for info in block.tensors)
    return {key: tensor for key, tensor in tensors if tensor is not None}


BlockTensor = Callable[[Block, TensorInfo], Tensor | None]
"""Computes one tensor of an architecture (stacked, if it is stored in pieces); None where the model has none."""

Get = Callable[[str], Tensor | None]
"""Gives a tensor of a block by key, None where the model has none."""


def reader(block: Block, source: TensorSource) -> Get:
    """Gives the tensors of a block as they are stored."""

    def get(key: str) -> Tensor | None:
        info = block.tensor(key)
        return None if info is None else read_tensor(info, source)

    return get


def moved_reader(block: Block, get: Get, transforms: Mapping[str, Transform]) -> Get:
    """Gives the tensors of a block in the coordinates that transforms bring them to.

    Args:
        get: gives them as they are.
    """

    def moved(key: str) -> Tensor | None:
        tensor, info = get(key), block.tensor(key)
        return None if tensor is None or info is None else transform_tensor(tensor, info, transforms)

    return moved


def blockwise(architecture: Architecture, source: TensorSource, compute: BlockTensor) -> Tensors:
    """Tensors of the same names and shapes, each computed when it is asked for; None: taken as it stands.

    Tensors outside the architecture are passed on. A tensor that is tied to another stands under both names.
    """
    stored, places = with_tied(architecture, source), architecture.places()

    def read(names: Names) -> Tensor:
        first = names if isinstance(names, str) else names[0]
        if first not in places:
            return stored.read(names)
        block, info, piece = places[first]
        if not isinstance(names, str) and names != info.names:
            return torch.stack([read(name) for name in names])
        computed = compute(block, info)
        if computed is None:
            return stored.read(names)
        return computed[piece] if isinstance(names, str) and info.stacked else computed

    return Tensors(stored.shapes, stored.dtypes, read)


def with_tied(architecture: Architecture, source: TensorSource) -> Tensors:
    """The same, with a tied tensor also under its second name."""
    tensors = as_tensors(source)
    aliases = {
        name: next((tied for tied in info.tied if tied in tensors), name)
        for info in architecture.tensors()
        if info.tied
        for name in info.names
        if name not in tensors
    }
    return tensors.renamed(aliases)


def unstack(info: TensorInfo, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor under the names it is stored by."""
    return dict(zip(info.names, tensor.unbind(0), strict=True)) if info.stacked else {info.names[0]: tensor}
