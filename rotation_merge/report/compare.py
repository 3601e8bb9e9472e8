"""Distances between two models, space by space, before and after an alignment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.model.apply import read_block, read_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource


@dataclass(frozen=True)
class Gap:
    """Two sets of tensors as two vectors, before and after alignment.

    Attributes:
        block, layer, space, kind: where; space "all" is the whole block, block "model" the whole model.
        distance_before, distance_after: |donor - anchor| / |anchor|.
        angle_before, angle_after: degrees between the two vectors.
        from_identity: distance of the map from the identity, by part.
    """

    block: str
    layer: int | None
    space: str
    kind: str
    distance_before: float
    distance_after: float
    angle_before: float
    angle_after: float
    from_identity: dict[str, float]


def _gap(sums: Tensor, block: str, layer: int | None, space: str, kind: str, identity: dict[str, float]) -> Gap:
    """The gap of two sets of tensors, by their `_sums`."""
    aa, bb, ab, cc, ac = sums.tolist()
    before, after = (bb, ab), (cc, ac)
    d0, d1 = (math.sqrt(max(aa + s - 2 * p, 0.0) / aa) if aa else 0.0 for s, p in (before, after))
    a0, a1 = (_angle(aa, s, p) for s, p in (before, after))
    return Gap(block, layer, space, kind, d0, d1, a0, a1, identity)


def _angle(aa: float, bb: float, ab: float) -> float:
    """Degrees; by the half-angle formula, which stays exact for small angles."""
    if aa <= 0 or bb <= 0:
        return 0.0
    cosine = ab / math.sqrt(aa * bb)
    return math.degrees(2 * math.asin(math.sqrt(min(max((1 - cosine) / 2, 0.0), 1.0))))


def gaps(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Iterator[Gap]:
    """Distances and angles of every space, every block and the whole model; one block in memory at a time.

    Where the alignment folds norm gains, both models are looked at folded, before and after.
    """
    if alignment.folded:
        anchor = folded_tensors(architecture, anchor, alignment.folded)
        donor = folded_tensors(architecture, donor, alignment.folded)
    aligned = moved_tensors(architecture, donor, alignment.transforms)
    whole = torch.zeros(5, dtype=torch.float64)
    for block in architecture.blocks:
        a, b = read_block(block, anchor), read_block(block, donor)
        sums = {i.key: _sums(a[i.key], b[i.key], read_tensor(i, aligned)) for i in _shared(block, a, b)}
        for space in block.spaces.values():
            transform = alignment.transforms.get(space.name)
            if transform is None and space.kind == "translation":
                continue  # rows that nobody asked to shift
            part = _total(sums, (info for info in _shared(block, a, b) if space in info.spaces()))
            local = space.name.rsplit(".", 1)[-1]
            yield _gap(part, block.name, block.index, local, space.kind, transform.distances() if transform else {})
        everything = _total(sums, _shared(block, a, b))
        yield _gap(everything, block.name, block.index, "all", "block", {})
        whole = whole + everything
    streams = {
        f"{name}: {part}" if len(architecture.streams) > 1 else part: value
        for name in architecture.streams
        if name in alignment.transforms
        for part, value in alignment.transforms[name].distances().items()
    }
    yield _gap(whole, "model", None, "all", "model", streams)


def _shared(block: Block, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[TensorInfo]:
    return [i for i in block.tensors if i.key in a and i.key in b and a[i.key].shape == b[i.key].shape]


def _total(sums: Mapping[str, Tensor], infos: Iterable[TensorInfo]) -> Tensor:
    return sum((sums[info.key] for info in infos), torch.zeros(5, dtype=torch.float64))


def _sums(anchor: Tensor, donor: Tensor, aligned: Tensor | None) -> Tensor:
    """Squared norms and inner products of anchor a, donor b and aligned donor c: aa, bb, ab, cc, ac."""
    a, b = anchor.double().flatten(), donor.double().flatten()
    c = b if aligned is None else aligned.double().flatten()
    products = [float(torch.dot(x, y)) for x, y in ((a, a), (b, b), (a, b), (c, c), (a, c))]
    return torch.tensor(products, dtype=torch.float64)


APART = 45.0
"""Degrees between two models from which they do not share their coordinates."""


def coordinates_verdict(gaps: list[Gap]) -> str:
    """One sentence on whether the two are in the same coordinates, and where they diverge."""
    whole = gaps[-1]
    if whole.distance_before == 0:
        return "the two models are equal in every shared tensor"
    layers = [gap for gap in gaps if gap.kind == "block" and gap.layer is not None]
    gain, shared = 1 - whole.distance_after / whole.distance_before, whole.angle_before < APART
    if whole.distance_after < 1e-3 * whole.distance_before:
        words = "are one model in two coordinate systems: alignment brings them together"
    elif gain < 0.01 and shared:
        words = "share their coordinates: alignment has next to nothing to do"
    elif gain < 0.01:
        words = "do not share their coordinates, and aligning these spaces does not bring them nearer"
    else:
        angles = f"{whole.angle_before:.3g} to {whole.angle_after:.3g} degrees"
        coordinates = "share most of their coordinates" if shared else "do not share their coordinates"
        words = f"{coordinates}: alignment brings them {gain:.0%} nearer (angle {angles})"
    if layers:
        widest = max(layers, key=lambda gap: gap.angle_after)
        words += f"; they differ most in {widest.block} ({widest.angle_after:.3g} degrees)"
    return f"the two models {words}"
