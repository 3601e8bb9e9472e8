"""Records inputs and outputs of a model's maps on a few samples, as rows for matching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Axis, Block, Space
from rotation_merge.model.apply import placed, split_axis, transform_axis
from rotation_merge.run.functions import Batch
from rotation_merge.run.layers import WatchedBlocks
from rotation_merge.run.maps import LinearMap, linear_map, same_map
from rotation_merge.run.recorder import Watcher
from rotation_merge.run.runner import Runner
from rotation_merge.run.sums import first_readers
from rotation_merge.symmetry import Transform

MOST_ROWS = 1024
"""Rows that are kept of each map, where no number is given."""

Place = tuple[str, str, int | None]
Transforms = Mapping[str, Transform]


@dataclass
class Activations:
    """Rows of inputs and outputs of maps, by the place of their block.

    Attributes:
        maps: the maps of each block, with names of the model's own.
        inputs: by (block, axis) that maps read: (rows, size), at the same samples and positions in every model of a
            class.
        outputs: by map: (rows, size), at the same.
        axes: by map, the (block, axis) that it reads.
        split: those where the inputs are what a norm normalised, before its gain and shift.
    """

    maps: dict[Place, list[LinearMap]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)
    split: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Batch], most: int = MOST_ROWS) -> Activations:
        """Run a loaded model over samples.

        Args:
            batches: without padding; the same for every model that is compared.
            most: rows that are kept of each map, evenly spread over every sample.
        """
        runner = Runner.of_module(model, batches)
        samples = [len(next(iter(batch.values()))) for batch in batches]
        watched, result = WatchedBlocks(runner), cls()
        while watched.advance() is not None:
            watcher = _RowWatcher(watched.new_axes, max(1, most // sum(samples)))
            with watched.by(watcher):
                for number, watcher.samples in enumerate(samples):
                    runner.run(number)
            result.inputs.update({axis: torch.cat(parts) for axis, parts in watcher.inputs.items()})
            result.outputs.update({name: torch.cat(parts) for name, parts in watcher.outputs.items()})
        for linear in watched.maps.values():
            if linear.info.name in watched.axes and not linear.stacked:
                result.maps.setdefault(_place(linear.block), []).append(linear)
        return replace(result, axes=watched.axes, split=frozenset(watched.split))

    def around(self, linear: LinearMap) -> tuple[Tensor | None, Tensor | None]:
        """Inputs and outputs of a map, named as in the checkpoint."""
        place = same_map(linear, self.maps.get(_place(linear.block), []))
        if place is None:
            return None, None
        ours, rows = place
        outputs = self.outputs.get(ours.info.name)
        return self.inputs[self.axes[ours.info.name]], None if outputs is None else outputs[:, rows]

    def read_with(self, linear: LinearMap) -> str:
        """The (block, axis) that a map reads; empty if it did not run."""
        place = same_map(linear, self.maps.get(_place(linear.block), []))
        return "" if place is None else self.axes[place[0].info.name]

    def is_plain(self, linear: LinearMap) -> bool:
        """Whether no norm's gain is between a stream and the known inputs of this map."""
        return linear.norm is None or self.read_with(linear) in self.split


def _place(block: Block) -> Place:
    return block.module, block.place, block.index


class _RowWatcher(Watcher):
    """Keeps evenly spread rows of every map: the same positions in every model, equally many of each sample."""

    def __init__(self, axes: Mapping[str, str], each: int) -> None:
        self.axes, self.each, self.samples = axes, each, 1
        self.first_readers = frozenset(first_readers(axes).values())
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        if expert is None and name in self.first_readers:
            self.inputs.setdefault(self.axes[name], []).append(self._some(x))

    def on_output(self, name: str, expert: int | None, y: Tensor) -> None:
        if expert is None and name in self.axes:
            self.outputs.setdefault(name, []).append(self._some(y))

    def _some(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        samples = rows.unflatten(0, (self.samples, -1)) if len(rows) % self.samples == 0 else rows[:, None]
        count = min(samples.shape[1], self.each)
        places = torch.linspace(0, samples.shape[1] - 1, count, dtype=torch.float64).round().long()
        return samples[:, places.to(x.device)].flatten(0, 1).float().cpu()


def activation_points(block: Block, activations: Activations, transforms: Transforms) -> dict[str, Tensor]:
    """Points for the plans of a block's local spaces, (groups, size, samples), in the anchor's coordinates."""
    points: dict[str, list[Tensor]] = {}
    for info in block.tensors:
        linear = linear_map(block, info)
        if linear is None or linear.stacked:
            continue
        x, y = activations.around(linear)
        for space in block.spaces.values():
            plans = wanted_roles(space)
            sides = (("neurons", x, linear.inputs, ("out",), True), ("values", x, linear.inputs, ("o",), True))
            for plan, rows, axis, roles, dual in (*sides, ("queries and keys", y, linear.outputs, ("q", "k"), False)):
                if plan in plans and rows is not None and _has(axis, space, roles):
                    moved = transform_axis(rows, 1, axis, transforms, dual)
                    points.setdefault(f"{space.name}:{plan}", []).extend(_points(moved, axis, space, roles))
    return {key: torch.cat(parts, -1) for key, parts in points.items()}


def _has(axis: Axis, space: Space, roles: tuple[str, ...]) -> bool:
    return any(part.space.name == space.name and part.role in roles for part in axis.parts)


def _points(rows: Tensor, axis: Axis, space: Space, roles: tuple[str, ...]) -> list[Tensor]:
    """Select the coordinates of some roles from (samples, width), as (groups, size, samples).

    Query heads count as samples.
    """
    points = []
    for piece, view in zip(axis.pieces, split_axis(rows, 1, axis), strict=True):
        for part, start in placed(piece, 1):
            if part.space.name == space.name and part.role in roles:
                if space.kind != "attention":
                    points.append(standard(view.flatten(1))[None])
                    continue
                heads = view.unsqueeze(start + 1) if part.role in ("k", "v") else view
                groups = heads.permute(start, 0, start + 1, start + 2).flatten(1, 2)
                points.append(torch.stack([standard(group) for group in groups]))
    return points


def stream_points(
    architecture: Architecture, stream: str, activations: Activations, transforms: Transforms
) -> Tensor | None:
    """Inputs of all readers of a stream, as points (size, samples), in the anchor's coordinates."""
    points = []
    for block in architecture.blocks:
        for info in block.tensors:
            linear = linear_map(block, info)
            space = architecture.streams[stream]
            if linear is None or linear.stacked or linear.inputs.size != space.sizes["size"]:
                continue
            x, _ = activations.around(linear)
            if x is not None and _has(linear.inputs, space, ("read",)):
                points.append(standard(transform_axis(x, 1, linear.inputs, transforms, dual=True)))
    return torch.cat(points, -1) if points else None


def standard(columns: Tensor) -> Tensor:
    """Activations (samples, n) as points (n, samples), standardised coordinate by coordinate."""
    x = columns.double()
    return ((x - x.mean(0)) / (x.std(0) + 1e-9)).T


def wanted_roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The plans of a space: the roles that each is computed from, and those that it moves.

    What rotary embedding turns, or a norm inside the head sees, is aligned and never mixed.
    """
    if space.kind in ("ffn", "experts"):
        return {"neurons": ("in", "gate", "out")}
    roles: dict[str, tuple[str, ...]] = {"values": ("v", "o")} if space.values == "free" else {}
    if not space.rotary and space.norm is None:
        roles["queries and keys"] = ("q", "k")
    return roles
