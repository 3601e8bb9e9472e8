"""Matching translations: the mean of the donor's rows goes to that of the anchor's."""

from __future__ import annotations

from collections.abc import Mapping

from rotation_merge.architectures.model import Block, Space
from rotation_merge.groups import SpaceTransform, TranslationTransform
from rotation_merge.groups.admitted import translation
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Tensors


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    others: Mapping[str, SpaceTransform],
    options: MatchOptions,
) -> TranslationTransform:
    """The nearest one, whatever order the rows are in: an order does not change their mean."""
    group = translation(space, options)
    rest = {name: transform for name, transform in others.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and info.key in anchor and info.key in donor:
            return group.solve(anchor[info.key], transform_tensor(donor[info.key], info, rest))
    return group.identity()
