"""The memory that an alignment and a merge take, from an architecture and the headers of the files alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rotation_merge.architecture.model import Architecture, Block, Space, TensorInfo
from rotation_merge.averaging.task_vectors import SLICE
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.match import PARTS
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.visit import BYTES_FOLDED
from rotation_merge.model.tensors import KEPT
from rotation_merge.model.vocabulary import LONG
from rotation_merge.run.maps import linear_map
from rotation_merge.workers import BYTES_A_WEIGHT, KEPT_FREED, workers_for

Shapes = Mapping[str, tuple[int, ...]]

SHARD = 5_000_000_000
"""Bytes of output that are held before a file is written."""


def itemsize_of(config: Mapping[str, Any]) -> int:
    """Bytes of a weight in the dtype that a config names; 4 where it names none."""
    name = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4


def peak_memory(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, itemsize: int, carried: bool = False
) -> int:
    """Peak bytes of aligning and averaging one donor, beyond Python and its libraries.

    One output file of up to `SHARD` bytes is held until it is written. With a residual stream everything is matched
    before anything is written.

    Args:
        shapes: by tensor name.
        itemsize: bytes of a weight, stored and written.
        carried: whether the donor is a task vector, so that a block of a third model is held, too.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if options.residual != "none":
        matching = _residual_memory(architecture, sizes, options, itemsize)
        peak = max(matching, _writing_memory(architecture, sizes, itemsize))
    else:
        peak = _local_memory(architecture, sizes, options, itemsize) + min(sum(sizes.values()) * itemsize, SHARD)
    return peak + (itemsize * max(_block_sizes(architecture, sizes), default=0) if carried else 0)


def averaging_memory(architecture: Architecture, shapes: Shapes, models: int, tied: bool = False) -> int:
    """Bytes that the largest map takes while task vectors are merged, in float64.

    Args:
        models: whose changes are merged.
        tied: whether the embedding is the head, too, and merged as one.
    """
    numbers = 0
    for block in architecture.blocks:
        for info in block.tensors:
            linear = linear_map(block, info, tied)
            shape = shapes.get(info.name, (0,))
            shape = (len(info.names), *shape) if info.stacked else shape
            if linear is None or len(shape) != 2 + linear.stacked:
                continue
            in_slices = info.vocabulary_axis is not None
            numbers = max(numbers, _numbers(models, (shape[linear.gives], shape[linear.reads]), in_slices))
    return torch.float64.itemsize * numbers


def _numbers(models: int, shape: tuple[int, int], in_slices: bool) -> int:
    """Numbers in memory while one map is merged."""
    size = math.prod(shape)
    if in_slices and size > SLICE:
        return size + (2 * models + 4) * SLICE + (models + 2) * shape[1] ** 2
    return (2 * models + 4) * size + 2 * min(shape) ** 2


def _local_memory(architecture: Architecture, sizes: dict[str, int], options: AlignConfig, itemsize: int) -> int:
    """Both models' tensors of the largest block, float32 copies of its largest tensors, and the similarity matrices."""
    peak = 0
    for block in architecture.blocks:
        weights = [_weights(info, sizes) for info in block.tensors]
        spaces = wanted_spaces(block, options.at(architecture, block))
        peak = max(peak, 2 * itemsize * sum(weights) + 8 * max(weights, default=0) + 12 * _similarities(spaces))
    return peak


def _residual_memory(architecture: Architecture, sizes: dict[str, int], options: AlignConfig, itemsize: int) -> int:
    """Peak memory of matching streams.

    For every worker it counts both models' tensors of a layer as stored and widened, the largest space once more as
    turned by the stream's map, and its similarities; then the stream products of each part, embedding, head and map,
    and of two layers per worker; tensors kept of models that are read again; and freed memory that the process keeps,
    as measured on layers of 1B and 8B shape and an embedding of 1B.
    """
    layers = [block for block in architecture.blocks if block.index is not None]
    peak = max((_turned_memory(block, sizes, options.at(architecture, block), itemsize) for block in layers), default=0)
    largest = max(_block_sizes(architecture, sizes, layers_only=True), default=0)
    workers = workers_for(BYTES_FOLDED * largest // BYTES_A_WEIGHT)
    products = 8 * sum(stream.sizes["size"] ** 2 for stream in architecture.streams.values())
    cached = 2 * min(KEPT, 4 * sum(sizes.values()))
    held_bytes = workers * (peak + 2 * products) + (min(PARTS, len(layers)) + 4) * products + cached
    return held_bytes + min(held_bytes // 4, workers * KEPT_FREED)


def _turned_memory(block: Block, sizes: dict[str, int], options: AlignConfig, itemsize: int) -> int:
    """Both models' tensors of a layer as stored and widened, the largest space as turned, and its similarities."""
    spaces = wanted_spaces(block, options)
    turned = dict.fromkeys((space.name for space in spaces), 0)
    for info in block.tensors:
        for name in {space.name for space in info.spaces()} & turned.keys():
            turned[name] += _weights(info, sizes)
    widened = (2 * itemsize + 8) * sum(_weights(info, sizes) for info in block.tensors)
    return widened + 4 * max(turned.values(), default=0) + 5 * _similarities(spaces)


def _similarities(spaces: list[Space]) -> int:
    """Entries of the largest similarity matrix, of the neurons of an FFN or of one expert."""
    return max((space.sizes.get("size", 0) ** 2 for space in spaces if space.kind != "translation"), default=0)


def _writing_memory(architecture: Architecture, sizes: dict[str, int], itemsize: int) -> int:
    """The output file so far, and per tensor: both models', both moved, and the intermediates of averaging."""
    shard_bytes, peak = 0, 0
    for info in architecture.tensors():
        for name in info.names:
            count = sizes.get(name, 0)
            peak = max(peak, shard_bytes + 9 * itemsize * count + 16 * min(count, LONG))
            shard_bytes = count * itemsize + (shard_bytes if shard_bytes + count * itemsize <= SHARD else 0)
    return peak


def _weights(info: TensorInfo, sizes: dict[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in info.names)


def _block_sizes(architecture: Architecture, sizes: dict[str, int], layers_only: bool = False) -> list[int]:
    """Weights of each block, in all or in layers only."""
    blocks = [block for block in architecture.blocks if block.index is not None or not layers_only]
    return [sum(_weights(info, sizes) for info in block.tensors) for block in blocks]
