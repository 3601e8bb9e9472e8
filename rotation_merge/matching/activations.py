"""Records inputs and outputs of a model's maps on a few samples, as rows for matching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Block, Part, Space
from rotation_merge.matching.matrix_pairs import axis_views
from rotation_merge.run.batches import Batch, examples_in
from rotation_merge.run.maps import LinearMap, maps_of, same_map
from rotation_merge.run.recorder import WatchedBlocks
from rotation_merge.run.runner import Runner
from rotation_merge.run.statistics import first_readers

MOST_ROWS = 1024
"""Rows that are kept of each map, where no number is given."""

Place = tuple[str, str, int | None]

Points = tuple[Tensor, Tensor]
"""Coordinates of the anchor and of the donor as points, (groups, size, features)."""

PLANS = {"out": "neurons", "o": "values", "q": "queries and keys", "k": "queries and keys", "read": "stream"}
"""The plan that activations along an axis of a role are points for."""


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
        watched, result = WatchedBlocks(Runner.of_module(model, batches)), cls()
        while watched.advance() is not None:
            result._record(watched, max(1, most // sum(map(examples_in, batches))))
        for linear in watched.maps.values():
            block = linear.block
            if linear.info.name in watched.axes and not linear.stacked:
                result.maps.setdefault((block.module, block.place, block.index), []).append(linear)
        return replace(result, axes=watched.axes, split=frozenset(watched.split))

    def _record(self, watched: WatchedBlocks, each: int) -> None:
        """Run a block, and keep so many rows of each sample: at the same positions in every model."""
        runner, axes, first = watched.runner, watched.new_axes, {*first_readers(watched.new_axes).values()}
        inputs, outputs = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)

        def some(x: Tensor) -> Tensor:
            rows, examples = x.flatten(0, -2), examples_in(runner.batches[runner.batch])
            samples = rows.unflatten(0, (examples, -1)) if len(rows) % examples == 0 else rows[:, None]
            count = min(samples.shape[1], each)
            places = torch.linspace(0, samples.shape[1] - 1, count, dtype=torch.float64).round().long()
            return samples[:, places.to(x.device)].flatten(0, 1).float().cpu()

        def record(name: str, expert: int | None, x: Tensor, y: Tensor) -> None:
            if expert is None and name in axes:
                outputs[name].append(some(y))
                if name in first:
                    inputs[axes[name]].append(some(watched.normalised(name, x)))

        watched.run(record)
        self.inputs.update({axis: torch.cat(parts) for axis, parts in inputs.items()})
        self.outputs.update({name: torch.cat(parts) for name, parts in outputs.items()})

    def around(self, linear: LinearMap) -> tuple[str, Tensor | None, Tensor | None]:
        """The (block, axis) that a map reads (empty: it did not run), its inputs and its outputs.

        Args:
            linear: named as in the checkpoint.
        """
        block = linear.block
        place = same_map(linear, self.maps.get((block.module, block.place, block.index), []))
        if place is None:
            return "", None, None
        name, rows = place[0].info.name, place[1]
        outputs = self.outputs.get(name)
        return self.axes[name], self.inputs[self.axes[name]], None if outputs is None else outputs[:, rows]


def activation_points(
    blocks: Iterable[Block], spaces: Iterable[Space], activations: tuple[Activations, Activations]
) -> dict[str, Points]:
    """Points for the plans of some spaces, by space and plan (`SPACE:neurons`), from the maps of some blocks."""
    points: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    keys = {(space.name, plan): f"{space.name}:{plan}" for space in spaces for plan in wanted_roles(space)}
    for linear in (linear for block in blocks for linear in maps_of(block) if not linear.stacked):
        (_, x, y), (_, u, v) = (of_model.around(linear) for of_model in activations)
        for axis, a, b in ((linear.inputs, x, u), (linear.outputs, y, v)):
            for part, start, *pair in () if a is None or b is None or not axis.parts else axis_views(a, b, 1, axis):
                key = keys.get((part.space.name, PLANS.get(part.role, "")))
                if key and (part.role != "read" or axis.size == part.space.sizes["size"]):
                    for side, rows in zip(points.setdefault(key, ([], [])), pair, strict=True):
                        side.append(standard(grouped(rows, start, part)))
    return {key: (torch.cat(first, -1), torch.cat(second, -1)) for key, (first, second) in points.items()}


def grouped(x: Tensor, start: int, part: Part) -> Tensor:
    """A part's coordinates as (groups, size, features), its dimensions in x beginning at `start`.

    Groups are KV groups, or experts; of neurons and streams there is one. Query heads of a group become features of
    their keys.
    """
    space, count = part.space, len(part.factors)
    front = [*([0] if space.kind == "experts" else []), *range(start, start + count)]
    rows = x.permute(*front, *(dim for dim in range(x.ndim) if dim not in front)).flatten(len(front))
    if space.kind in ("ffn", "stream"):
        return rows[None]
    return rows.permute(0, 2, 1, 3).flatten(2) if space.kind == "attention" and rows.ndim == 4 else rows


def standard(points: Tensor) -> Tensor:
    """Points (groups, size, samples), standardised coordinate by coordinate."""
    x = points.double()
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-9)


def wanted_roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The plans of a space: the roles that each is computed from, and those that it moves.

    What rotary embedding turns, or a norm inside the head sees, is aligned and never mixed.
    """
    if space.kind == "stream":
        return {"stream": ("write", "read", "gain", "shift")}
    if space.kind in ("ffn", "experts"):
        return {"neurons": ("in", "gate", "out")}
    roles: dict[str, tuple[str, ...]] = {"values": ("v", "o")} if space.values == "free" else {}
    if not space.rotary and space.norm is None:
        roles["queries and keys"] = ("q", "k")
    return roles
