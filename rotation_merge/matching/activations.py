"""What goes into and out of a model's maps on a few samples, row by row: points that plans are found between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Axis, Block, Space
from rotation_merge.model.apply import placed, split_axis, transform_axis
from rotation_merge.run.maps import LinearMap, linear_map, same_map
from rotation_merge.run.measure import Batch, Measurement
from rotation_merge.symmetry import SpaceTransform
from rotation_merge.symmetry.convolution import FACTORS

MOST_ROWS = 1024
"""Rows that are kept of each map, where no number is given."""

Place = tuple[str, str, int | None]
Transforms = Mapping[str, SpaceTransform]


@dataclass
class Activations:
    """Rows of what maps read and give, by the place of their block.

    Attributes:
        maps: the maps of each block, with names of the model's own.
        inputs, outputs: by map: (rows, size), at the same samples and positions in every model of a class. Maps that
            read the same have the inputs of the first of them.
        shared: by map, that first one.
        split: those whose inputs are what a norm normalised, before its gain and shift.
    """

    maps: dict[Place, list[LinearMap]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    split: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, model: nn.Module, architecture: Architecture, batches: Sequence[Batch], most: int = MOST_ROWS
    ) -> Activations:
        """Run a model over samples.

        Args:
            architecture: under the names of the model's state dict.
            batches: without padding; the same for every model that is compared.
            most: rows that are kept of each map, evenly spread over every sample.
        """
        seen = Measurement(model, architecture, batches, "none")
        watcher = _Rows(seen.shared, max(1, most // sum(len(next(iter(batch.values()))) for batch in batches)))
        with torch.no_grad(), seen.tapped.split(seen.called, seen.layers_only), seen.tapped.watched(watcher):
            for batch in batches:
                watcher.samples = len(next(iter(batch.values())))
                seen.outputs(batch)
        found = cls(shared=seen.shared, split=set(seen.split))
        joined = {name: torch.cat(parts) for name, parts in watcher.inputs.items()}
        for name, one in seen.tapped.maps.items():
            if name in seen.shared and not one.stacked:
                found.maps.setdefault(_place(one.block), []).append(one)
                found.inputs[name] = joined[seen.shared[name]]
                if name in watcher.outputs:
                    found.outputs[name] = torch.cat(watcher.outputs[name])
        return found

    def around(self, one: LinearMap) -> tuple[Tensor | None, Tensor | None]:
        """What a map, named as a checkpoint names it, reads and gives."""
        found = same_map(one, self.maps.get(_place(one.block), []))
        if found is None:
            return None, None
        ours, rows = found
        given = self.outputs.get(ours.info.name)
        return self.inputs[ours.info.name], None if given is None else given[:, rows]

    def read_with(self, one: LinearMap) -> str:
        """The first map that reads what this one reads; nothing where it did not run."""
        found = same_map(one, self.maps.get(_place(one.block), []))
        return "" if found is None else self.shared[found[0].info.name]

    def is_plain(self, one: LinearMap) -> bool:
        """Whether no norm's gain stands between a stream and what is known of what this map reads."""
        return one.norm is None or self.read_with(one) in self.split


def _place(block: Block) -> Place:
    return block.module, block.place, block.index


class _Rows:
    """Keeps evenly spread rows of every map, the same of every model; of each sample so many, whatever its batch."""

    def __init__(self, shared: Mapping[str, str], each: int) -> None:
        self.shared, self.each, self.samples = shared, each, 1
        self.inputs: dict[str, list[Tensor]] = {}
        self.outputs: dict[str, list[Tensor]] = {}

    def saw(self, name: str, expert: int | None, x: Tensor) -> None:
        if expert is None and self.shared.get(name) == name:
            self.inputs.setdefault(name, []).append(self._some(x))

    def gave(self, name: str, expert: int | None, y: Tensor) -> None:
        if expert is None:
            self.outputs.setdefault(name, []).append(self._some(y))

    def _some(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        samples = rows.unflatten(0, (self.samples, -1)) if len(rows) % self.samples == 0 else rows[:, None]
        count = min(samples.shape[1], self.each)
        places = torch.linspace(0, samples.shape[1] - 1, count, dtype=torch.float64).round().long()
        return samples[:, places.to(x.device)].flatten(0, 1).float().cpu()


def activation_points(block: Block, seen: Activations, transforms: Transforms) -> dict[str, Tensor]:
    """Points of every plan of a block's local spaces, (groups, size, samples), in the anchor's coordinates."""
    found: dict[str, list[Tensor]] = {}
    for info in block.tensors:
        one = linear_map(block, info)
        if one is None or one.stacked:
            continue
        x, y = seen.around(one)
        for space in block.spaces.values():
            plans = wanted_roles(space)
            sides = (("neurons", x, one.inputs, ("out",), True), ("values", x, one.inputs, ("o",), True))
            for what, rows, axis, roles, dual in (*sides, ("queries and keys", y, one.outputs, ("q", "k"), False)):
                if what in plans and rows is not None and _has(axis, space, roles):
                    moved = transform_axis(rows, 1, axis, transforms, dual)
                    found.setdefault(f"{space.name}:{what}", []).extend(_points(moved, axis, space, roles))
    return {key: torch.cat(parts, -1) for key, parts in found.items()}


def _has(axis: Axis, space: Space, roles: tuple[str, ...]) -> bool:
    return any(part.space.name == space.name and part.role in roles for part in axis.parts)


def _points(rows: Tensor, axis: Axis, space: Space, roles: tuple[str, ...]) -> list[Tensor]:
    """(groups, size, samples) of the parts of (samples, width) that play the roles; query heads count as samples."""
    found = []
    for piece, view in zip(axis.pieces, split_axis(rows, 1, axis), strict=True):
        for part, start in placed(piece, 1):
            if part.space.name == space.name and part.role in roles:
                if space.kind != "attention":
                    found.append(standard(view.flatten(1))[None])
                    continue
                heads = view.unsqueeze(start + 1) if part.role in ("k", "v") else view
                groups = heads.permute(start, 0, start + 1, start + 2).flatten(1, 2)
                found.append(torch.stack([standard(group) for group in groups]))
    return found


def stream_points(architecture: Architecture, stream: str, seen: Activations, transforms: Transforms) -> Tensor | None:
    """What all readers of a stream read, as points (size, samples), in the anchor's coordinates."""
    found = []
    for block in architecture.blocks:
        for info in block.tensors:
            one = linear_map(block, info)
            space = architecture.streams[stream]
            if one is None or one.stacked or one.inputs.size != space.sizes["size"]:
                continue
            x, _ = seen.around(one)
            if x is not None and _has(one.inputs, space, ("read",)):
                found.append(standard(transform_axis(x, 1, one.inputs, transforms, dual=True)))
    return torch.cat(found, -1) if found else None


def standard(columns: Tensor) -> Tensor:
    """Activations (samples, n) as points (n, samples), standardised coordinate by coordinate."""
    x = columns.double()
    return ((x - x.mean(0)) / (x.std(0) + 1e-9)).T


def wanted_roles(space: Space) -> dict[str, tuple[str, ...]]:
    """The plans of a space: what each is found from, and the roles it moves.

    What rotary embedding turns, or a norm inside the head sees, is aligned and never mixed.
    """
    if space.kind in ("ffn", "experts"):
        return {"neurons": ("in", "gate", "out")}
    if space.kind == "convolution":
        return {"neurons": tuple(FACTORS)}
    found: dict[str, tuple[str, ...]] = {"values": ("v", "o")} if space.values == "free" else {}
    if not space.rotary and space.norm is None:
        found["queries and keys"] = ("q", "k")
    return found
