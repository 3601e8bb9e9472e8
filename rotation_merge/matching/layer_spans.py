"""Spaces that span layers: several layers read the keys and values of one, so its KV heads move in all of them.

The first layer of a span has the keys and values and is matched like any other. The other layers take its element,
except for the order of query heads inside each KV group. If the layers of a span are matched with different options,
keys and values do not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rotation_merge.architecture.model import Architecture, Block, Space
from rotation_merge.matching.options import AlignConfig
from rotation_merge.symmetry import HeadTransform, SpaceTransform
from rotation_merge.symmetry.admitted import asks

Leads = Mapping[str, HeadTransform | None]
"""By the name of a span: the element of its first layer, None where that is not known yet."""


def span_spaces(architecture: Architecture) -> Iterator[tuple[Block, Space]]:
    """Every space that spans layers, with the block of its part."""
    for block in architecture.blocks:
        for space in block.spaces.values():
            if space.span is not None:
                yield block, space


def matched_spans(architecture: Architecture, options: AlignConfig) -> frozenset[str]:
    """The spans whose layers are all matched with the same options."""
    choices: dict[str, list[object]] = {}
    for block, space in span_spaces(architecture):
        block_options = options.at(architecture, block)
        is_matched = block_options.matches_layer(block.index) and asks(space, block_options)
        choices.setdefault(str(space.span), []).append(
            (block_options.attention, block_options.heads, block_options.scaling) if is_matched else None
        )
    return frozenset(name for name, ways in choices.items() if None not in ways and len(set(ways)) == 1)


def query_order_space(space: Space) -> Space:
    """The space restricted to the order of query heads inside their KV groups."""
    return replace(space, norm="shared", values="fixed", free_groups=False)


def with_query_order(lead: HeadTransform, layer_element: HeadTransform) -> HeadTransform:
    """The element of a span's first layer, with another layer's order of query heads."""
    return replace(lead, queries=layer_element.queries)


def without_query_order(lead: HeadTransform) -> HeadTransform:
    """The element of a span's first layer, with the identity order of query heads."""
    return with_query_order(lead, lead.still())


def inconsistent_space(architecture: Architecture, transforms: Mapping[str, SpaceTransform]) -> str | None:
    """The first space that moves differently from the first layer of its span; None if all agree."""
    for _, space in span_spaces(architecture):
        name, first = space.name, str(space.span)
        lead, layer_element = (transforms.get(key) for key in (first, name))
        if name != first and not _agree(lead, layer_element):
            return name
    return None


def _agree(lead: SpaceTransform | None, layer_element: SpaceTransform | None) -> bool:
    """Whether two elements differ only in the order of query heads; a missing one is the identity."""
    first_element, second_element = (
        without_query_order(x) if isinstance(x, HeadTransform) else None for x in (lead, layer_element)
    )
    known = first_element or second_element
    if known is None:
        return True
    still = known.still()
    first_tensors, second_tensors = ((x or still).tensors() for x in (first_element, second_element))
    return first_tensors.keys() == second_tensors.keys() and all(
        torch.equal(first_tensors[key], second_tensors[key]) for key in first_tensors
    )
