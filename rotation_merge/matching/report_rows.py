"""Report rows of an alignment that was not matched on weights, and those in the metadata of an alignment file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import yaml

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import AlignmentError, short
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.block import row_of, squared_distances
from rotation_merge.matching.matrix_pairs import SpaceMatch
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.model.blocks import read_block
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource
from rotation_merge.record import MergeReport, SpaceRow, read_as


def recorded(architecture: Architecture, anchor: TensorSource, donor: TensorSource, alignment: Alignment) -> Alignment:
    """Add a report's rows to an alignment that was not matched, for example a learned one.

    Each has the distance over the space before and after, with the other transforms applied.
    """
    anchor, donor = (folded_tensors(architecture, source, alignment.folded) for source in (anchor, donor))
    transforms = alignment.transforms
    moved = [space for name, space in architecture.streams.items() if name in transforms]
    rows, whole = [], [0.0, 0.0, 0.0]
    for block in architecture.blocks:
        a, b = (without_hidden_biases(block, read_block(block, source), transforms) for source in (anchor, donor))
        for space in (space for space in block.spaces.values() if space.name in transforms):
            without = {name: t for name, t in transforms.items() if name != space.name}
            before, after = (squared_distances(block, a, b, maps, [space]) for maps in (without, transforms))
            rows.append(row_of(block, space, SpaceMatch(transforms[space.name], (before[0], *after))))
        if moved:
            before, after = (squared_distances(block, a, b, maps) for maps in ({}, transforms))
            whole = [total + part for total, part in zip(whole, (before[0], *after), strict=True)]
    rows += [
        row_of(architecture.blocks[0], space, SpaceMatch(transforms[space.name], (whole[0], whole[1], whole[2])))
        for space in moved
    ]
    return replace(alignment, rows=rows)


def file_metadata(report: MergeReport, donor: str, name: str | None = None) -> dict[str, Any]:
    """The metadata of an alignment file, from the report of its match; `figures_in` reads the figures.

    Args:
        name: what the report calls the donor, if not the same.
    """
    rows = [asdict(row) for row in report.rows if row.donor == (name or donor)]
    return {
        "anchor": report.anchor,
        "donor": donor,
        "models": report.models,
        "options": yaml.safe_load(report.recipe),
        "versions": report.versions,
        "figures": {"rows": rows, "whole": report.whole.get(name or donor, {})},
    }


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
