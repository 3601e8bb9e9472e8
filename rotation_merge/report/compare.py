"""Distances between two models, space by space, before and after an alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.model.apply import read_block
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource

Gap = dict[str, Any]
"""Two sets of tensors as two vectors, before and after alignment: see `gaps`."""


def _gap(sums: Tensor, identity: Mapping[str, float], **place: Any) -> Gap:
    """The gap of two sets of tensors, by their `_sums`."""
    anchor, *before_and_after = sums.tolist()
    pairs = before_and_after[:2], before_and_after[2:]
    before, after = (math.sqrt(max(anchor + s - 2 * inner, 0.0) / (anchor or 1.0)) for s, inner in pairs)
    angles = {f"angle_{when}": _angle(anchor, *pair) for when, pair in zip(("before", "after"), pairs, strict=True)}
    return {**place, "distance_before": before, "distance_after": after, **angles, "from_identity": dict(identity)}


def _angle(aa: float, bb: float, ab: float) -> float:
    """Degrees; by the half-angle formula, which stays exact for small angles."""
    if aa <= 0 or bb <= 0:
        return 0.0
    cosine = ab / math.sqrt(aa * bb)
    return math.degrees(2 * math.asin(math.sqrt(min(max((1 - cosine) / 2, 0.0), 1.0))))


def gaps(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Iterator[Gap]:
    """Distances and angles of every space, every block and the whole model; one block in memory at a time.

    Where the alignment folds norm gains, both models are looked at folded, before and after.

    Returns:
        For each: `block`, `layer`, `space` and `kind` (space "all" is the whole block, block "model" the whole model);
        `distance_before` and `distance_after`, |donor - anchor| / |anchor|; `angle_before` and `angle_after`, degrees
        between the two vectors; `from_identity`, the distance of the map from the identity, by part.
    """
    if alignment.folded:
        anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    aligned, transforms = moved_tensors(architecture, donor, alignment.transforms), alignment.transforms
    whole = zero = torch.zeros(5, dtype=torch.float64)
    for block in architecture.blocks:
        a, b, c = (read_block(block, source) for source in (anchor, donor, aligned))
        shared = [i for i in block.tensors if i.key in a and i.key in b and a[i.key].shape == b[i.key].shape]
        sums = {info.key: _sums(a[info.key], b[info.key], c[info.key]) for info in shared}
        for space in block.spaces.values():
            if (transform := transforms.get(space.name)) is None and space.kind == "translation":
                continue  # rows that nobody asked to shift
            total = sum((sums[info.key] for info in shared if space in info.spaces()), zero)
            local, identity = space.name.rsplit(".", 1)[-1], transform.distances() if transform else {}
            yield _gap(total, identity, block=block.name, layer=block.index, space=local, kind=space.kind)
        total = sum(sums.values(), zero)
        yield _gap(total, {}, block=block.name, layer=block.index, space="all", kind="block")
        whole = whole + total
    streams = [(name, transforms[name].distances()) for name in architecture.streams if name in transforms]
    prefix = "{}: " if len(architecture.streams) > 1 else ""
    identity = {prefix.format(name) + part: value for name, parts in streams for part, value in parts.items()}
    yield _gap(whole, identity, block="model", layer=None, space="all", kind="model")


def _sums(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Squared norms and inner products of anchor a, donor b and aligned donor c: aa, bb, ab, cc, ac."""
    a, b, c = (tensor.double().flatten() for tensor in (a, b, c))
    return torch.stack([x @ y for x, y in ((a, a), (b, b), (a, b), (c, c), (a, c))])


APART = 45.0
"""Degrees between two models from which they do not share their coordinates."""


def coordinates_verdict(gaps: list[Gap]) -> str:
    """One sentence on whether the two are in the same coordinates, and where they diverge."""
    whole = gaps[-1]
    if whole["distance_before"] == 0:
        return "the two models are equal in every shared tensor"
    coordinates = "share their coordinates" if whole["angle_before"] < APART else "do not share their coordinates"
    gain = 1 - whole["distance_after"] / whole["distance_before"]
    words = f"{coordinates}: alignment brings them {gain:.0%} nearer"
    if gain > 0.999:
        words = "are one model in two coordinate systems: alignment brings them together"
    elif gain < 0.01:
        words = f"{coordinates}: alignment has next to nothing to do"
    words += f" (angle {whole['angle_before']:.3g} to {whole['angle_after']:.3g} degrees)"
    layers = [gap for gap in gaps if gap["kind"] == "block" and gap["layer"] is not None]
    if layers:
        widest = max(layers, key=lambda gap: float(gap["angle_after"]))
        words += f"; they differ most in {widest['block']} ({widest['angle_after']:.3g} degrees)"
    return f"the two models {words}"
