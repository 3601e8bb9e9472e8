"""Matching translations: the mean of the donor's rows goes to that of the anchor's."""

from __future__ import annotations

from collections.abc import Mapping

from rotation_merge.architecture.model import Block, Space
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.sides import Tensors
from rotation_merge.model.apply import transform_tensor
from rotation_merge.symmetry import SpaceTransform, TranslationTransform
from rotation_merge.symmetry.admitted import translation


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, SpaceTransform],
    options: AlignConfig,
) -> TranslationTransform:
    """The nearest one, whatever order the rows are in: an order does not change their mean."""
    group = translation(space, options)
    other_transforms = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and info.key in anchor and info.key in donor:
            return group.solve(anchor[info.key], transform_tensor(donor[info.key], info, other_transforms))
    return group.identity()
