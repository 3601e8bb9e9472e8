"""Report rows of an alignment that was not matched on weights, and those in the metadata of an alignment file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import AlignmentError, short
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import SpaceMatch, described, squared_distances
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.model.blocks import read_block
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource
from rotation_merge.record import SpaceRow, read_as
from rotation_merge.symmetry import Transform


def recorded(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Alignment:
    """Add records to an alignment that was not matched, for example a learned one.

    Each record has the distance over the space before and after, with the other transforms applied.
    """
    if alignment.folded:
        anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    transforms, records = alignment.transforms, []
    sums = {name: [0.0, 0.0, 0.0] for name in architecture.streams if name in transforms}
    for block in architecture.blocks:
        a, b = (without_hidden_biases(block, read_block(block, source), transforms) for source in (anchor, donor))
        block_records = []
        for space in block.spaces.values():
            if space.name in transforms:
                other_transforms = {name: t for name, t in transforms.items() if name != space.name}
                before = squared_distances(block, space, a, b, other_transforms)[0]
                after, norm = squared_distances(block, space, a, b, transforms)
                block_records.append(_record(space.name, space.kind, transforms[space.name], before, after, norm))
        records.append((block, block_records))
        for total in sums.values():
            moved, norm = squared_distances(block, None, a, b, transforms)
            for i, value in enumerate((squared_distances(block, None, a, b, {})[0], moved, norm)):
                total[i] += value
    streams = [_record(name, "stream", transforms[name], *total) for name, total in sums.items()]
    return replace(alignment, records=[*records, *([(architecture.blocks[0], streams)] if streams else [])])


def _record(name: str, kind: str, transform: Transform, before: float, after: float, norm: float) -> SpaceMatch:
    return described(SpaceMatch(name, kind, "", before, after, norm, {}, 0.0), transform)


def figures(rows: Sequence[SpaceRow], whole: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Figures of one donor's match or fit, for the metadata of its alignment file; `figures_in` reads them."""
    return {"rows": [asdict(row) for row in rows], "whole": dict(whole or {})}


def figures_in(metadata: Mapping[str, Any], path: str) -> tuple[list[SpaceRow], dict[str, object]]:
    """The figures in the metadata of an alignment file: rows, and those of the whole model; empty if it has none.

    Raises:
        AlignmentError: they are damaged.
    """
    try:
        known = metadata.get("figures", {})
        whole = known.get("whole", {})
        return read_as(list[SpaceRow], known.get("rows", []), finite=True), whole if isinstance(whole, dict) else {}
    except (ValueError, AttributeError) as error:
        remedy = "write it again with 'rotation-merge align'"
        raise AlignmentError(f"its figures are damaged ({short(error)})", where=path, remedy=remedy) from error
