"""The groups of a model's spaces, and random elements of them: twins with the same outputs."""

from __future__ import annotations

import torch

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.options import AlignConfig
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted, by_stream


def space_groups(architecture: Architecture, options: AlignConfig) -> dict[str, SpaceGroup]:
    """The group of every space that `options` match, by space name."""
    result: dict[str, SpaceGroup] = {}
    for block in architecture.blocks:
        if options.matches_layer(block.index):
            for space in block.spaces.values():
                result[space.name] = admitted(space, options)
    groups = by_stream(options.residual) or dict.fromkeys(architecture.streams, options.residual)
    for name, choice in groups.items():
        admits = architecture.stream_groups[name]
        group = admits[-1] if choice == "largest" else choice
        if group != "none" and group in admits:
            result[name] = architecture.stream_group(name, group)
    return result


def random_gauge(architecture: Architecture, options: AlignConfig, generator: torch.Generator) -> dict[str, Transform]:
    """A random transform of every space that `options` match, by space name.

    Applied to a model (`in_coordinates`) it gives other weights with the same outputs; a `residual: rotation` needs a
    folded model.
    """
    return {name: group.random(generator) for name, group in space_groups(architecture, options).items()}
