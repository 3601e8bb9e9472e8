"""The memory that an alignment and a merge take, from an architecture and the headers of the files alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.match import BYTES_FOLDED, PARTS
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.tensors import KEPT, Shapes
from rotation_merge.model.vocabulary import LONG
from rotation_merge.workers import BYTES_A_WEIGHT, KEPT_FREED, workers_for

SHARD = 5_000_000_000
"""Bytes of output that are held before a file is written."""


def peak_memory(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, itemsize: int, carried: bool = False
) -> int:
    """Peak bytes of aligning and averaging one donor, beyond Python and its libraries.

    Matching takes what workers are planned with (`BYTES_A_WEIGHT` of the largest block; of layers in streams
    `BYTES_FOLDED`, for every worker). Writing takes of the largest tensor both models' and copies in float32, with
    streams both moved as well, and holds one output file of up to `SHARD` bytes. Streams are matched before.

    Args:
        shapes: by tensor name.
        itemsize: bytes of a weight, stored and written.
        carried: whether the donor is a task vector, so that a block of a third model is held, too.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    whole, tensor = sum(sizes.values()), max(sizes.values(), default=0)
    blocks = [sum(sizes.get(n, 0) for info in block.tensors for n in info.names) for block in architecture.blocks]
    pairs = list(zip(blocks, architecture.blocks, strict=True))
    output = min(whole * itemsize, SHARD)
    if options.residual == "none":
        matched = (weights for weights, block in pairs if wanted_spaces(block, options.at(architecture, block)))
        peak = output + max((2 * itemsize + 8) * tensor, BYTES_A_WEIGHT * max(matched, default=0))
    else:
        layers = [weights for weights, block in pairs if block.index is not None]
        writing = output + 9 * itemsize * tensor + 16 * min(tensor, LONG)
        peak = max(writing, _streams_memory(architecture, layers, whole))
    return peak + carried * itemsize * max(blocks, default=0)


def _streams_memory(architecture: Architecture, layers: Sequence[int], whole: int) -> int:
    """Peak bytes of matching streams.

    Of every worker a layer and the stream's products for two; the products of each part, embedding, head and map;
    tensors kept of models that are read again; and freed memory that the process keeps, as measured on layers of 1B and
    8B shape and an embedding of 1B.

    Args:
        layers: weights of each.
        whole: weights of the model.
    """
    layer = BYTES_FOLDED * max(layers, default=0)
    workers = workers_for(layer // BYTES_A_WEIGHT)
    products = 8 * sum(stream.sizes["size"] ** 2 for stream in architecture.streams.values())
    peak = workers * (layer + 2 * products) + (min(PARTS, len(layers)) + 4) * products + 2 * min(KEPT, 4 * whole)
    return peak + min(peak // 4, workers * KEPT_FREED)
