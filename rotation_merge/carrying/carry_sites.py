r"""Maps of its own for what every linear map reads, from activations: what a change carried by weights lacks.

Alignment has one map for a stream, as the skip connection demands of whole models. A change need not keep to it: where
the new base reads x' and the aligned old one reads x on the same samples, a change D of the map is carried as
``D M^T``, M the orthogonal map that brings x nearest to x'. Where the new base is the old one in other coordinates,
x' = x and M is the identity. Outputs keep the maps of the alignment: with maps from activations for what is written,
less arrives (docs/carry.md).

Source: Theseus (2026, arXiv 2602.12952), inputs' half.
"""

from __future__ import annotations

from torch import Tensor

from rotation_merge.carrying.carrier import Carrier
from rotation_merge.linalg.polar import procrustes
from rotation_merge.matching.activations import Activations
from rotation_merge.matching.match_on import centred
from rotation_merge.model.apply import transform_axis
from rotation_merge.run.maps import LinearMap, linear_map

WIDEST = 8192
"""Inputs beyond which a map takes too long to find; what is wider keeps that of the alignment."""


def site_maps(carrier: Carrier, new: Activations, old: Activations) -> dict[str, Tensor]:
    """Of every linear map whose inputs were seen: M, (inputs, inputs), float64, ``new reads M @ what old reads``.

    Args:
        new, old: activations of the two bases on the same samples.

    Returns:
        By name of the map's tensor. Behind a norm whose gain is not folded there is none.
    """
    found: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for block in carrier.architecture.blocks:
        for info in block.tensors:
            one = linear_map(block, info)
            if one is None or one.stacked or not _reads_as_carried(carrier, one, new, old):
                continue
            (x, _), (u, _) = new.around(one), old.around(one)
            if x is None or u is None or x.shape != u.shape or x.shape[1] > WIDEST:
                continue
            leader = new.read_with(one)
            if leader not in same:
                aligned = transform_axis(u.double(), 1, one.inputs, carrier.alignment.transforms, dual=True)
                same[leader] = procrustes(centred(x).mT @ centred(aligned))
            found[info.name] = same[leader]
    return found


def _reads_as_carried(carrier: Carrier, one: LinearMap, new: Activations, old: Activations) -> bool:
    """Whether what was seen is what the change is multiplied by where it is moved."""
    if not one.inputs.parts:
        return False
    if one.norm is None:
        return True
    return one.norm.stream in carrier.alignment.folded and new.is_plain(one) and old.is_plain(one)
