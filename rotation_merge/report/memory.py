"""The memory that an alignment and a merge take, from an architecture and the headers of the files alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.match import PARTS
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.visit import BYTES_FOLDED
from rotation_merge.model.tensors import KEPT
from rotation_merge.model.vocabulary import LONG
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
    before anything is written, and writing takes, of the largest tensor, both models', both moved, and the
    intermediates of averaging.

    Args:
        shapes: by tensor name.
        itemsize: bytes of a weight, stored and written.
        carried: whether the donor is a task vector, so that a block of a third model is held, too.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    whole, largest = sum(sizes.values()), max(sizes.values(), default=0)
    blocks = [_block_memory(block, sizes, options.at(architecture, block), itemsize) for block in architecture.blocks]
    peak = min(whole * itemsize, SHARD)
    if options.residual == "none":
        peak += max(blocks, default=0)
    else:
        peak = max(
            _streams_memory(architecture, sizes, max(blocks, default=0)),
            peak + 9 * itemsize * largest + 16 * min(largest, LONG),
        )
    return peak + carried * itemsize * max((_weights(block.tensors, sizes) for block in architecture.blocks), default=0)


def _block_memory(block: Block, sizes: Mapping[str, int], options: AlignConfig, itemsize: int) -> int:
    """Both models' tensors of a block, copies in float32, and the similarities of its largest space.

    Widened are the largest tensors, and of a layer in streams all; its largest space is turned by the stream's map.
    """
    spaces = wanted_spaces(block, options)
    weights = {info.key: _weights([info], sizes) for info in block.tensors}
    moved = [sum(weights[i.key] for i in block.tensors if space in i.spaces()) for space in spaces]
    streams = options.residual != "none" and block.index is not None
    widened = sum(weights.values()) if streams else max(weights.values(), default=0)
    copied = 8 * widened + 4 * max(moved, default=0) * streams
    entries = max((space.sizes.get("size", 0) ** 2 for space in spaces if space.kind != "translation"), default=0)
    return 2 * itemsize * sum(weights.values()) + copied + (5 if streams else 12) * entries


def _streams_memory(architecture: Architecture, sizes: Mapping[str, int], layer: int) -> int:
    """Peak memory of matching streams.

    Of every worker a layer and the stream's products for two; the products of each part, embedding, head and map;
    tensors kept of models that are read again; and freed memory that the process keeps, as measured on layers of 1B and
    8B shape and an embedding of 1B.

    Args:
        layer: bytes of one worker's.
    """
    layers = [_weights(block.tensors, sizes) for block in architecture.blocks if block.index is not None]
    workers = workers_for(BYTES_FOLDED * max(layers, default=0) // BYTES_A_WEIGHT)
    products = 8 * sum(stream.sizes["size"] ** 2 for stream in architecture.streams.values())
    cached = 2 * min(KEPT, 4 * sum(sizes.values()))
    peak = workers * (layer + 2 * products) + (min(PARTS, len(layers)) + 4) * products + cached
    return peak + min(peak // 4, workers * KEPT_FREED)


def _weights(tensors: Iterable[TensorInfo], sizes: Mapping[str, int]) -> int:
    return sum(sizes.get(name, 0) for info in tensors for name in info.names)
