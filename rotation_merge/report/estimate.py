"""An alignment's spaces and cost, estimated from an architecture alone."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from rotation_merge.architecture.model import Architecture, Block, Space, TensorInfo
from rotation_merge.averaging.task_vectors import SLICE, TaskVectorMethod
from rotation_merge.matching.block import wanted_spaces
from rotation_merge.matching.model_pair import BYTES_FOLDED
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.passes import PARTS, SAMPLE
from rotation_merge.matching.stream import residual_groups
from rotation_merge.model.rows import LONG
from rotation_merge.model.tensors import KEPT
from rotation_merge.run.maps import linear_map
from rotation_merge.symmetry.admitted import admitted, heads
from rotation_merge.symmetry.space import MatchingCost
from rotation_merge.workers import BYTES_A_WEIGHT, KEPT_FREED, workers_for

Shapes = Mapping[str, tuple[int, ...]]

PAIR_SECONDS = 4.8e-8
"""Of one pair of neurons, one core: the best scale between the two, and its share of the assignment."""
PASSES = 4
"""Passes over two independent models that matching their stream takes from its better start, about as many as between
ViTs and between Llamas of other seeds."""
STEP_SECONDS = 0.01
"""Seconds of overhead of one pass over one block, measured on small models."""
DOUBLE = 0.45
"""Speed of products in float64, of that in float32."""
WIDE = 8
"""Bytes of a number in float64."""
SHARD = 5_000_000_000
"""Bytes of output that are held before a file is written."""
READ_BYTES = 4.2e8
"""Bytes a second that reading, moving, averaging and writing manage on one core: near models of 300M to 70B shape."""
REACHED = 0.8
"""Share of the speed of one large product that matching reaches."""


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
class Estimate:
    """The spaces and the cost of matching one donor.

    Attributes:
        lines: the spaces.
        matched, parameters: number of weights that some matched space moves, and of all weights.
        unaligned: parts that are not moved, with the reason.
        seconds, memory, disk: estimates for one donor: wall time on this machine's current threads between models of
            unknown relation, peak bytes beyond Python and its libraries (one output file of up to 5 GB is held until it
            is written), bytes written.
        near_seconds: the same between near models, where quick proofs hold.
        warnings: reasons to doubt a merge of the two.
    """

    family: str
    lines: list[SpaceLine]
    matched: int
    parameters: int
    unaligned: list[str]
    seconds: float
    near_seconds: float
    memory: int
    disk: int
    streams: dict[str, list[str]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def estimate(
    architecture: Architecture,
    shapes: Shapes,
    options: AlignConfig,
    itemsize: int,
    out_itemsize: int,
    tied: str | None = None,
) -> Estimate:
    """Estimate one donor's alignment.

    Args:
        shapes: by tensor name, from the files' headers.
        itemsize, out_itemsize: bytes of a stored weight, and of one written.
        tied: the stream whose embedding is also the output; it takes rotations only with `untie`.
    """
    sizes = {name: _count(shape) for name, shape in shapes.items()}
    moved = _moved(architecture, options)
    matched = sum(sizes.get(name, 0) for info in moved for name in info.names)
    total = sum(sizes.values())
    speed, files = flops_per_second(), (2 * itemsize + out_itemsize) * total / READ_BYTES
    workers = workers_for(_largest_layer(architecture, sizes))

    def seconds(near: bool) -> float:
        rounds = Rounds.of(architecture, options, near)
        flops, assigned = _work(architecture, shapes, options, near, rounds)
        again = (rounds.local if rounds.products else 0.0) * 2 * itemsize * total / READ_BYTES
        steps = STEP_SECONDS * len(architecture.blocks) * rounds.local
        return flops / speed + assigned * PAIR_SECONDS / workers + files + again + steps

    return Estimate(
        family=architecture.family,
        lines=_lines(architecture, options),
        matched=matched,
        parameters=total,
        unaligned=_unaligned(architecture, shapes, options, moved, tied),
        seconds=seconds(near=False),
        near_seconds=seconds(near=True),
        memory=_memory(architecture, sizes, options, itemsize, out_itemsize),
        disk=total * out_itemsize,
        streams={name: list(groups) for name, groups in architecture.stream_groups.items()},
    )


@dataclass(frozen=True)
class AveragingCost:
    """The cost of a delegate of task vectors, without reading and writing.

    Attributes:
        seconds: wall time on this machine's current threads.
        memory: bytes that its largest map takes.
    """

    delegate: str
    seconds: float
    memory: int


def averaging(
    method: TaskVectorMethod,
    parameters: Mapping[str, Any],
    architecture: Architecture,
    shapes: Shapes,
    models: int,
    tied: bool = False,
) -> AveragingCost:
    """Estimate the averaging of all maps, in float64.

    Args:
        parameters: of the delegate; those that are not given have their defaults.
        models: whose changes are merged.
        tied: whether the embedding is the head, too, and merged as one.
    """
    values = {parameter.name: parameter.default for parameter in method.spec.parameters} | dict(parameters)
    operations, memory = 0.0, 0
    for block in architecture.blocks:
        for info in block.tensors:
            linear = linear_map(block, info, tied)
            shape = _shape(info, shapes)
            if linear is None or len(shape) != 2 + linear.stacked:
                continue
            outputs, inputs = shape[linear.gives], shape[linear.reads]
            count = shape[0] if linear.stacked else 1
            only = {**values, "sides": "one"} if info.vocabulary_axis is not None else values
            operations += count * method.operations((outputs, inputs), models, only)
            in_slices = info.vocabulary_axis is not None and method.merges_in_slices()
            memory = max(memory, WIDE * _numbers(models, (outputs, inputs), in_slices))
    return AveragingCost(method.spec.name, operations / (flops_per_second() * DOUBLE), memory)


def _numbers(models: int, shape: tuple[int, int], in_slices: bool) -> int:
    """Numbers in memory while one map is merged."""
    size = math.prod(shape)
    if in_slices and size > SLICE:
        return size + (2 * models + 4) * SLICE + (models + 2) * shape[1] ** 2
    return (2 * models + 4) * size + 2 * min(shape) ** 2


def carried(estimate: Estimate, shapes: Shapes, itemsize: int) -> Estimate:
    """The same for a task vector that is carried over: a third model is read, and its block is in memory, too."""
    blocks: dict[str, int] = {}
    for name, shape in shapes.items():
        layer = re.match(r".*?\.\d+\.", name)
        blocks[layer[0] if layer else name] = blocks.get(layer[0] if layer else name, 0) + _count(shape)
    more = itemsize * estimate.parameters / READ_BYTES
    seconds, near = estimate.seconds + more, estimate.near_seconds + more
    return replace(
        estimate,
        seconds=seconds,
        near_seconds=near,
        memory=estimate.memory + itemsize * max(blocks.values(), default=0),
    )


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


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
    if space.kind == "mixer":
        return f"{s['groups'] * s['per_group']} heads in {s['groups']} groups, channels {s['own']} and {s['shared']}"
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
            reasons.append(
                f"'{name}' normalises queries and keys; maps that commute with the norm: {heads(space).qk.words}"
            )
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


@dataclass(frozen=True)
class Rounds:
    """Repetitions of each step, as shares of the model.

    Attributes:
        local: local spaces are matched.
        products: products of a stream are gathered.
        turned: a layer is moved by a stream's map.
        ends: whether tensors outside of layers are moved, or contribute to products of a stream.
        solved: a stream's map is solved for.
    """

    local: float = 1.0
    products: float = 0.0
    turned: float = 0.0
    ends: float = 0.0
    solved: float = 0.0

    @classmethod
    def of(cls, architecture: Architecture, options: AlignConfig, near: bool) -> Rounds:
        """Count rounds as `matching/passes.py` runs them.

        Starts use a sample of layers, passes go part by part, and a last one covers everything; tensors outside of
        layers are read once, and turned for the last pass and the result.
        """
        if options.residual == "none":
            return cls()
        layers = sum(block.index is not None for block in architecture.blocks)
        sample = SAMPLE / layers if layers > 2 * SAMPLE else 1.0
        if near:
            return cls(local=1 + sample, products=sample, ends=1, solved=1)
        passes, parts = PASSES + 2 * sample, max(1, min(PARTS, layers))
        turned = PASSES + sample + 2  # the identity turns nothing
        return cls(local=passes + 1, products=passes, turned=turned, ends=3, solved=2 + parts * PASSES)


def _work(
    architecture: Architecture, shapes: Shapes, options: AlignConfig, near: bool, rounds: Rounds
) -> tuple[float, float]:
    """Floating-point operations of all products, and entries of all assignments."""
    groups = residual_groups(architecture, options.residual)
    streams = {name: architecture.stream_group(name, group).work() for name, group in groups.items()}
    flops, assigned = rounds.solved * sum(work.solving for work in streams.values()), 0.0
    for block in architecture.blocks:
        works = _works(architecture, block, options, near)
        moved = rounds.products + rounds.turned if block.index is not None else rounds.ends
        flops += rounds.local * sum(work.solving for work in works.values())
        assigned += rounds.local * sum(work.assigned for work in works.values())
        for info in block.tensors:
            weights, names = _count(_shape(info, shapes)), sorted({space.name for space in info.spaces()})
            flops += rounds.local * weights * sum(works[name].per_weight for name in names if name in works)
            turns = sum(streams[name].per_weight for name in names if name in streams)
            flops += moved * weights * turns
    return flops, assigned


def _works(
    architecture: Architecture, block: Block, options: AlignConfig, near: bool = False
) -> dict[str, MatchingCost]:
    """The cost of each matched local space of a block, by name."""
    block_options = options.at(architecture, block)
    costs = {space.name: admitted(space, block_options).work() for space in wanted_spaces(block, block_options)}
    return {name: work.between_near_models if near else work for name, work in costs.items()}


def _shape(info: TensorInfo, shapes: Shapes) -> tuple[int, ...]:
    shape = shapes.get(info.name, (0,))
    return (len(info.names), *shape) if info.stacked else shape


def _memory(
    architecture: Architecture, sizes: dict[str, int], options: AlignConfig, itemsize: int, out_itemsize: int
) -> int:
    """The peak memory; with a residual stream everything is matched before anything is written."""
    if options.residual != "none":
        matching = _residual_memory(architecture, sizes, options, itemsize)
        return max(matching, _writing_memory(architecture, sizes, itemsize, out_itemsize))
    return _local_memory(architecture, sizes, options, itemsize) + min(sum(sizes.values()) * out_itemsize, SHARD)


def _local_memory(architecture: Architecture, sizes: dict[str, int], options: AlignConfig, itemsize: int) -> int:
    """Both models' tensors of the largest block, float32 copies of its largest tensors, and the similarity matrices."""
    peak = 0
    for block in architecture.blocks:
        weights = [_weights(info, sizes) for info in block.tensors]
        table = max((work.table for work in _works(architecture, block, options).values()), default=0)
        peak = max(peak, 2 * itemsize * sum(weights) + 8 * max(weights, default=0) + 12 * table)
    return peak


def _residual_memory(architecture: Architecture, sizes: dict[str, int], options: AlignConfig, itemsize: int) -> int:
    """Peak memory of matching streams.

    For every worker it counts both models' tensors of a layer as stored and widened, the largest space once more as
    turned by the stream's map, and its similarities; then the stream products of each part, embedding, head and map,
    and of two layers per worker; tensors kept of models that are read again; and freed memory that the process keeps,
    as measured on layers of 1B and 8B shape and an embedding of 1B.
    """
    layers, peak = 0, 0
    for block in architecture.blocks:
        if block.index is None:
            continue
        layers += 1
        works = _works(architecture, block, options)
        spaces = dict.fromkeys(works, 0)
        for info in block.tensors:
            for name in {space.name for space in info.spaces()} & works.keys():
                spaces[name] += _weights(info, sizes)
        table = max((work.table for work in works.values()), default=0)
        widened = (2 * itemsize + 8) * sum(_weights(info, sizes) for info in block.tensors)
        peak = max(peak, widened + 4 * max(spaces.values(), default=0) + 5 * table)
    workers = workers_for(BYTES_FOLDED * _largest_layer(architecture, sizes) // BYTES_A_WEIGHT)
    products = 8 * sum(stream.sizes["size"] ** 2 for stream in architecture.streams.values())
    cached = 2 * min(KEPT, 4 * sum(sizes.values()))
    held_bytes = workers * (peak + 2 * products) + (min(PARTS, layers) + 4) * products + cached
    return held_bytes + min(held_bytes // 4, workers * KEPT_FREED)


def _writing_memory(architecture: Architecture, sizes: dict[str, int], itemsize: int, out_itemsize: int) -> int:
    """The output file so far, and per tensor: both models', both moved, and the intermediates of averaging."""
    shard_bytes, peak = 0, 0
    for info in architecture.tensors():
        for name in info.names:
            count = sizes.get(name, 0)
            peak = max(peak, shard_bytes + (2 * itemsize + 7 * out_itemsize) * count + 16 * min(count, LONG))
            shard_bytes = count * out_itemsize + (shard_bytes if shard_bytes + count * out_itemsize <= SHARD else 0)
    return peak


def _weights(info: TensorInfo, sizes: dict[str, int]) -> int:
    return sum(sizes.get(name, 0) for name in info.names)


def _largest_layer(architecture: Architecture, sizes: dict[str, int]) -> int:
    layers = (block for block in architecture.blocks if block.index is not None)
    return max((sum(_weights(info, sizes) for info in block.tensors) for block in layers), default=0)


def flops_per_second() -> float:
    """This machine's speed for products of this size, measured once a process."""
    return REACHED * _products_per_second(torch.get_num_threads())


@cache
def _products_per_second(threads: int) -> float:
    x, best = torch.randn(768, 768), float("inf")
    x @ x
    for _ in range(5):
        began = time.process_time()
        x @ x
        best = min(best, time.process_time() - began)
    return threads * 2 * 768**3 / max(best, 1e-6)
