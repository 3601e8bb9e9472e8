"""The spaces of a model, the groups that match them, and what stays unaligned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rotation_merge.architecture.model import Architecture, Block, Space
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import residual_groups
from rotation_merge.model.tensors import Shapes
from rotation_merge.symmetry.admitted import admitted

UNMATCHED = "not matched"


def matched_spaces(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, tied: str | None = None
) -> dict[str, Any]:
    """The spaces of a model under options of matching.

    Args:
        shapes: by tensor name, from the files' headers.
        tied: the stream whose embedding is also the output; it takes rotations only with `untie`.

    Returns:
        `family`; `lines`, one for equal spaces, with `space`, `kind`, `sizes`, `group`, `count` and `blocks`; `matched`
        and `parameters`: the number of weights that some matched space moves, and of all; `unaligned`: parts that are
        not moved, with the reason; `streams`: the groups that each stream admits.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    groups = residual_groups(architecture, options.residual)
    names = {s.name for b in architecture.blocks for s in wanted_spaces(b, options.at(architecture, b))} | set(groups)
    infos = list(architecture.tensors())
    moved = {name for info in infos if any(space.name in names for space in info.spaces()) for name in info.names}
    still = [i.key.replace("{base}", "") for i in infos if i.name in shapes and i.name not in moved]
    reasons = [*_still_streams(architecture, options, tied), *architecture.limits, *_limits(architecture, options)]
    if still:
        examples = ", ".join(list(dict.fromkeys(still))[:6])
        reasons.append(f"{len(still)} tensors have no axis in a matched space and are merged as they are: {examples}")
    return {
        "family": architecture.family,
        "lines": [*_streams(architecture, groups), *_local(architecture, options)],
        "matched": sum(sizes.get(name, 0) for name in moved),
        "parameters": sum(sizes.values()),
        "unaligned": reasons,
        "streams": {name: list(admissible) for name, admissible in architecture.stream_groups.items()},
    }


def _streams(architecture: Architecture, groups: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for name, stream in architecture.streams.items():
        possible = [group for group in architecture.stream_groups.get(name, ()) if group != "none"]
        group = f"{groups.get(name, UNMATCHED)} (possible: {', '.join(possible) or 'none'})"
        line = {"space": name, "kind": "stream", "sizes": _sizes(stream), "group": group}
        yield {**line, "count": 1, "blocks": "whole model"}


def _local(architecture: Architecture, options: AlignConfig) -> Iterator[dict[str, Any]]:
    """Equal local spaces, and where they are."""
    alike: dict[tuple[str, ...], list[Block]] = {}
    for block in architecture.blocks:
        block_options = options.at(architecture, block)
        matched = wanted_spaces(block, block_options)
        for space in block.spaces.values():
            if space in matched or not space.head:  # a head's is moved only where it is asked for
                group = admitted(space, block_options).words if space in matched else UNMATCHED
                key = (space.name.rpartition(".")[2], space.kind, _sizes(space), group)
                alike.setdefault(key, []).append(block)
    for facts, blocks in alike.items():
        line = dict(zip(("space", "kind", "sizes", "group"), facts, strict=True))
        yield {**line, "count": len(blocks), "blocks": _ranges(blocks)}


def _ranges(blocks: list[Block]) -> str:
    numbers = [block.index for block in blocks if block.index is not None]
    if not numbers:
        return blocks[0].name
    module = "" if blocks[0].module == "default" else f"{blocks[0].module} "
    whole = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{module}layers {f'{numbers[0]}-{numbers[-1]}' if whole else ', '.join(map(str, numbers))}"


def _sizes(space: Space) -> str:
    sizes = space.sizes
    if space.kind == "attention":
        values = "" if sizes["value_dim"] == sizes["head_dim"] else f", values {sizes['value_dim']}"
        return f"{sizes['groups'] * sizes['per_group']} heads, {sizes['groups']} KV, of {sizes['head_dim']}{values}"
    return f"{sizes['count']} experts of {sizes['size']}" if space.kind == "experts" else str(sizes["size"])


def _still_streams(architecture: Architecture, options: AlignConfig, tied: str | None) -> Iterator[str]:
    moving = residual_groups(architecture, options.residual)
    for name, groups in architecture.stream_groups.items():
        if name not in moving:
            largest = groups[-1] if groups else "none"
            words = f"'residual: {largest}' would match it" if largest != "none" else "the outputs use it"
            words += " with 'untie: true', as its embedding is the output, too" * (
                name == tied and largest == "rotation"
            )
            yield f"stream '{name}' keeps its coordinates (residual: {options.residual}); {words}"


def _limits(architecture: Architecture, options: AlignConfig) -> Iterator[str]:
    """What heads keep, and layers that are left out."""
    spaces = [space for block in architecture.blocks for space in block.spaces.values() if space.kind == "attention"]
    for name, space in {space.name.rpartition(".")[2]: space for space in spaces}.items():
        if not (space.free_order and space.free_groups):
            yield f"heads of '{name}' keep their order: positions, or other layers, are tied to it"
        if space.values == "fixed":
            yield f"values of '{name}' keep their coordinates"
    if options.layer_ranges() is not None:
        count = sum(block.index is not None and options.matches_layer(block.index) for block in architecture.blocks)
        yield f"only layers {options.layers} are matched ({count} layers)"
