"""The spaces of a model, the groups that match them, and what stays unaligned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rotation_merge.architecture.model import Architecture, Block, Space, TensorInfo
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import residual_groups
from rotation_merge.symmetry.admitted import admitted

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class SpaceLine:
    """Equal spaces: kind, sizes, group, and number of blocks."""

    space: str
    kind: str
    sizes: str
    group: str
    count: int
    blocks: str


@dataclass(frozen=True)
class MatchedSpaces:
    """The spaces of a model under options of matching.

    Attributes:
        lines: the spaces.
        matched, parameters: number of weights that some matched space moves, and of all weights.
        unaligned: parts that are not moved, with the reason.
        streams: the groups that each stream admits.
    """

    family: str
    lines: list[SpaceLine]
    matched: int
    parameters: int
    unaligned: list[str]
    streams: dict[str, list[str]] = field(default_factory=dict)


def matched_spaces(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, tied: str | None = None
) -> MatchedSpaces:
    """Describe the spaces of a model.

    Args:
        shapes: by tensor name, from the files' headers.
        tied: the stream whose embedding is also the output; it takes rotations only with `untie`.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    moved = _moved(architecture, options)
    return MatchedSpaces(
        architecture.family,
        _lines(architecture, options),
        sum(sizes.get(name, 0) for info in moved for name in info.names),
        sum(sizes.values()),
        _unaligned(architecture, shapes, options, moved, tied),
        {name: list(groups) for name, groups in architecture.stream_groups.items()},
    )


def _matched_names(architecture: Architecture, options: AlignConfig) -> set[str]:
    blocks = architecture.blocks
    names = {space.name for block in blocks for space in wanted_spaces(block, options.at(architecture, block))}
    return names | set(residual_groups(architecture, options.residual))


def _moved(architecture: Architecture, options: AlignConfig) -> list[TensorInfo]:
    names = _matched_names(architecture, options)
    return [info for info in architecture.tensors() if any(space.name in names for space in info.spaces())]


def _lines(architecture: Architecture, options: AlignConfig) -> list[SpaceLine]:
    blocks_by_line: dict[tuple[str, str, str, str], list[Block]] = {}
    for block in architecture.blocks:
        block_options = options.at(architecture, block)
        matched_spaces = wanted_spaces(block, block_options)
        for space in block.spaces.values():
            if space.head and space not in matched_spaces:  # opt-in: nothing that is missing
                continue
            group = admitted(space, block_options).words if space in matched_spaces else "not matched"
            key = (space.name.rsplit(".", 1)[-1], space.kind, _sizes(space), group)
            blocks_by_line.setdefault(key, []).append(block)
    lines = []
    groups = residual_groups(architecture, options.residual)
    for name, stream in architecture.streams.items():
        possible = [group for group in architecture.stream_groups.get(name, ()) if group != "none"]
        group = groups.get(name, "not matched")
        choices = f"possible: {', '.join(possible)}" if possible else "none is possible"
        lines.append(SpaceLine(name, "stream", _sizes(stream), f"{group} ({choices})", 1, "whole model"))
    for (name, kind, sizes, group), blocks in blocks_by_line.items():
        lines.append(SpaceLine(name, kind, sizes, group, len(blocks), _ranges(blocks)))
    return lines


def _ranges(blocks: list[Block]) -> str:
    numbers = [block.index for block in blocks if block.index is not None]
    if not numbers:
        return blocks[0].name
    module = "" if blocks[0].module == "default" else f"{blocks[0].module} "
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{module}layers {numbers[0]}-{numbers[-1]}"
    return f"{module}layers {', '.join(map(str, numbers))}"


def _sizes(space: Space) -> str:
    s = space.sizes
    if space.kind == "attention":
        values = "" if s["value_dim"] == s["head_dim"] else f", values {s['value_dim']}"
        return f"{s['groups'] * s['per_group']} heads, {s['groups']} KV, of {s['head_dim']}{values}"
    if space.kind == "experts":
        return f"{s['count']} experts of {s['size']}"
    return str(s["size"])


def _would_match(groups: Sequence[str], tied: bool) -> str:
    """The option that would match a fixed stream, as `check_pair` admits it."""
    largest = groups[-1] if groups else "none"
    if largest == "none":
        return ", which the outputs use"
    if not (tied and largest == "rotation"):
        return f"; 'residual: {largest}' would match it"
    return (
        f"; 'residual: {groups[-2]}' would match it, 'residual: rotation' only with 'untie: true', "
        "as the embedding is also the output"
    )


def _unaligned(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, moved: list[TensorInfo], tied: str | None
) -> list[str]:
    reasons = []
    moving = residual_groups(architecture, options.residual)
    for name, groups in architecture.stream_groups.items():
        if name not in moving:
            more = _would_match(groups, name == tied)
            reasons.append(f"stream '{name}' keeps its coordinates (residual: {options.residual}){more}")
    reasons += list(architecture.limits)
    spaces = [space for block in architecture.blocks for space in block.spaces.values()]
    for name, space in {s.name.rsplit(".", 1)[-1]: s for s in spaces if s.kind == "attention"}.items():
        if space.norm is not None:
            words = admitted(space).groups["qk"][0].words
            reasons.append(f"'{name}' normalises queries and keys; maps that commute with the norm: {words}")
        elif space.rotary:
            reasons.append(f"'{name}' uses rotary positions: query/key maps turn each RoPE pair in its plane")
        if not space.free_order:
            reasons.append(f"heads of '{name}' keep their order: positions are tied to it")
        elif not space.free_groups:
            reasons.append(f"KV heads of '{name}' keep their order: other layers share them")
        if space.values == "fixed":
            reasons.append(f"values of '{name}' keep their coordinates")
    if options.layer_ranges() is not None:
        matched_layers = sum(
            block.index is not None and options.matches_layer(block.index) for block in architecture.blocks
        )
        reasons.append(f"only layers {options.layers} are matched ({matched_layers} layers)")
    known = {info.name for info in moved}
    unlabelled = [info for info in architecture.tensors() if info.name in shapes and info.name not in known]
    if unlabelled:
        names = ", ".join(list(dict.fromkeys(info.key.replace("{base}", "") for info in unlabelled))[:6])
        reasons.append(
            f"{len(unlabelled)} tensors have no axis in a matched space and are merged as they are, such as {names}"
        )
    return reasons
