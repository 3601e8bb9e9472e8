"""The groups of a model's spaces, and random elements of them: twins with the same outputs."""

from __future__ import annotations

import torch

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import residual_groups
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted


def space_groups(architecture: Architecture, options: AlignConfig) -> dict[str, SpaceGroup]:
    """The group of every space that `options` match, by space name.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
    """
    result: dict[str, SpaceGroup] = {}
    for block in architecture.blocks:
        if options.matches_layer(block.index):
            for space in block.spaces.values():
                result[space.name] = admitted(space, options)
    for name, group in residual_groups(architecture, options.residual).items():
        result[name] = architecture.stream_group(name, group)
    return result


def random_gauge(architecture: Architecture, options: AlignConfig, generator: torch.Generator) -> dict[str, Transform]:
    """A random transform of every space that `options` match, by space name.

    Applied to a model (`moved_tensors`) it gives other weights with the same outputs; a `residual: rotation` needs a
    folded model.
    """
    return {name: group.random(generator) for name, group in space_groups(architecture, options).items()}
