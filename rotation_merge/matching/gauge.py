"""Random group elements of a model, for tests and demonstrations: twins with the same outputs."""

from __future__ import annotations

import torch

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.layer_spans import matched_spans, query_order_space, with_query_order
from rotation_merge.matching.options import AlignConfig
from rotation_merge.symmetry import HeadTransform, SpaceTransform
from rotation_merge.symmetry.admitted import admitted, by_stream


def random_gauge(
    architecture: Architecture, options: AlignConfig, generator: torch.Generator
) -> dict[str, SpaceTransform]:
    """A random transform of every space that `options` match, by space name.

    Applied to a model (`in_coordinates`) it gives other weights with the same outputs; a `residual: rotation` needs a
    folded model.
    """
    result: dict[str, SpaceTransform] = {}
    spans = matched_spans(architecture, options)
    for block in architecture.blocks:
        if options.matches_layer(block.index):
            for space in block.spaces.values():
                alone = space.span is None or space.span in spans
                transform = admitted(space if alone else query_order_space(space), options).random(generator)
                lead = result.get(space.span or "")
                if space.span in spans and isinstance(lead, HeadTransform) and isinstance(transform, HeadTransform):
                    transform = with_query_order(lead, transform)
                result[space.name] = transform
    groups = by_stream(options.residual) or dict.fromkeys(architecture.streams, options.residual)
    for name, choice in groups.items():
        admits = architecture.stream_groups[name]
        group = admits[-1] if choice == "largest" else choice
        if group != "none" and group in admits:
            result[name] = architecture.stream_group(name, group).random(generator)
    return result
