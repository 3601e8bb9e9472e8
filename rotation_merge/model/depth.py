r"""Finds similar layers of two aligned models by the parts of the stream that they read and write.

The part of a stream that a layer's maps W read (or write) is given by the Gram ``G = W^T W`` (``W W^T``) up to the
gauge of heads and neurons. With the stream's map R, a layer of the one resembles a layer of the other by the cosine of
``R G R^T`` and ``G'``, less their multiples of the identity. Layers meet in order, all of the shallower model's, with
the greatest sum (dynamic programming).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.model.source import TensorSource, read_tensor
from rotation_merge.symmetry import SpaceTransform

PROBES = 128
"""Grams of larger streams are compared by their products with so many random vectors."""

Marks = dict[tuple[str, str], Tensor]
"""By stream and role, products of the Grams of a layer's maps with probe vectors, (size, probes)."""


def probes(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Vectors that Grams are compared by, for streams of these sizes: (size, probes), float64."""
    draw = torch.Generator().manual_seed(0)
    vectors = {}
    for name, size in sizes.items():
        few = size > PROBES
        vectors[name] = (
            torch.randn(size, PROBES, generator=draw, dtype=torch.float64) if few else torch.eye(size).double()
        )
    return vectors


def probe_products(
    block: Block,
    source: TensorSource,
    probe_vectors: Mapping[str, Tensor],
    maps: Mapping[str, SpaceTransform] | None = None,
) -> Marks:
    """Products of the Grams of a layer's maps with probe vectors.

    Args:
        source: its tensors, folded where streams are turned.
        probe_vectors: the probes by stream.
        maps: of the streams to where the probes are; None: they are there.
    """
    products: Marks = {}
    stream_maps: dict[tuple[str, str], list[Tensor]] = {}
    for info in block.tensors:
        place = _on_stream(info)
        if place is None or (tensor := read_tensor(info, source)) is None:
            continue
        dim, stream, role = place
        stream_maps.setdefault((stream, role), []).append(tensor.movedim(dim, 0).flatten(1).double())
    for (stream, role), maps_there in stream_maps.items():
        wide, transform = probe_vectors[stream], (maps or {}).get(stream)
        local_probes = wide if transform is None else transform.inverse().act(wide, role, 0)
        size = len(maps_there[0])
        local_probes = local_probes[:size]
        product = sum((w @ (w.mT @ local_probes) for w in maps_there), torch.zeros_like(local_probes))
        product = product - sum(float(w.square().sum()) for w in maps_there) / size * local_probes
        padded = torch.zeros_like(wide)
        padded[:size] = product
        products[stream, role] = padded if transform is None else transform.act(padded, role, 0)
    return products


def _on_stream(info: TensorInfo) -> tuple[int, str, str] | None:
    """The dimension of a map that lives in a stream, the stream, and whether the map reads or writes it."""
    stream_axes = [
        (dim, part.space.name, part.role)
        for dim, axis in enumerate(info.axes)
        for part in axis.parts
        if part.space.kind == "stream" and axis.size == part.size
    ]
    return (
        stream_axes[0]
        if len(info.axes) > 1 and len(stream_axes) == 1 and stream_axes[0][2] in ("read", "write")
        else None
    )


def likeness(new: Marks, old: Marks) -> float:
    """The mean cosine of two layers' marks."""
    shared = [(new[key], old[key]) for key in new.keys() & old.keys()]
    cosines = [float((a * b).sum() / (a.norm() * b.norm()).clamp_min(1e-300)) for a, b in shared]
    return sum(cosines) / len(cosines) if cosines else 0.0


def in_order(table: Tensor) -> list[tuple[int, int]]:
    """The pairs (row, column) in rising order, as many as the shorter side, with the greatest sum.

    Args:
        table: similarity of each row and column, (rows, columns).
    """
    if table.shape[0] > table.shape[1]:
        return [(row, column) for column, row in in_order(table.mT)]
    rows, columns = table.shape
    best = torch.full((rows + 1, columns + 1), -torch.inf, dtype=torch.float64)
    best[0] = 0.0
    for i in range(1, rows + 1):
        for j in range(i, columns + 1):
            best[i, j] = torch.maximum(best[i, j - 1], best[i - 1, j - 1] + table[i - 1, j - 1])
    pairs, j = [], columns
    for i in range(rows, 0, -1):
        while j > i and best[i, j] == best[i, j - 1]:
            j -= 1
        pairs.append((i - 1, j - 1))
        j -= 1
    return pairs[::-1]
