"""The stages of a block: maps that read one input, in the order of its forward, and the paths of their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rotation_merge.run.maps import LinearMap
from rotation_merge.run.recorder import BlockActivations, BlockHooks


@dataclass(frozen=True)
class Branch:
    """The path of a map's output to the stream.

    Attributes:
        place: where the stream is looked at.
        gain: factor of each coordinate of the map's output there, shape (out,).
        added: keys of maps that write to the same place after it, with their gains.
    """

    place: str
    gain: Tensor
    added: tuple[tuple[str, Tensor], ...] = ()


@dataclass(frozen=True)
class Stage:
    """Maps that read one and the same input, which are solved together."""

    keys: tuple[str, ...]
    branches: dict[str, Branch]

    @property
    def until(self) -> frozenset[str]:
        """The activations that this stage needs."""
        return frozenset(self.keys).union(*map(self.aims, self.keys))

    def aims(self, key: str) -> frozenset[str]:
        """Activations that a map's target needs: its output, or the stream and the other terms added there."""
        branch = self.branches.get(key)
        return frozenset([key] if branch is None else [branch.place, *(key for key, _ in branch.added)])

    @property
    def wanted(self) -> frozenset[str]:
        """The maps whose targets are needed."""
        return frozenset().union(*map(self.aims, self.keys))


LINEAR = 1e-2
"""A place follows a map's output if all but this share of its answer is the output times a gain for each coordinate."""


def stages(taps: BlockHooks, keys: set[str]) -> list[Stage]:
    """The stages of a block in the order of its forward; maps that run twice or never are in none.

    Args:
        keys: of the maps to be solved.
    """
    if not keys:
        return []
    activations = taps.first()
    once = [key for key in activations.order if key in keys and activations.order.count(key) == 1]
    groups: dict[Any, list[str]] = {}
    for key in once:
        x = activations.inputs[key]
        groups.setdefault((x.data_ptr(), tuple(x.shape), x.stride()), []).append(key)
    writers = [key for key in once if _writes(taps.maps[key])]
    gains = {key: _places(taps, key, activations) for key in writers}
    branches = {key: _branch(key, gains, activations) for key in writers if gains[key]}
    return [Stage(tuple(g), {key: branches[key] for key in g if key in branches}) for g in groups.values()]


def _writes(linear: LinearMap) -> bool:
    return any(part.role == "write" for part in linear.outputs.parts)


def _places(taps: BlockHooks, key: str, activations: BlockActivations) -> dict[str, Tensor]:
    """Places that follow a map's output, with the gains: found out by disturbing it."""
    output = activations.outputs[key]
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(output.shape, generator=draw).to(output) * output.detach().std().clamp_min(1e-6)
    disturbed, noise_rows = taps.first({key: noise}), rows(noise)
    gains = {}
    for place in activations.order[activations.order.index(key) + 1 :]:
        answer = disturbed.stream[place] - activations.stream[place] if place in activations.stream else None
        if answer is None or rows(answer).shape != noise_rows.shape or activations.order.count(place) != 1:
            continue
        flat = rows(answer)
        gain = (flat * noise_rows).sum(0) / noise_rows.square().sum(0)
        if float((flat - gain * noise_rows).norm()) <= LINEAR * float(flat.norm()) and float(gain.abs().max()) > 0:
            gains[place] = torch.where(gain.abs() < LINEAR * gain.abs().max(), torch.zeros_like(gain), gain)
    return gains


def rows(x: Tensor) -> Tensor:
    """All positions of all samples, (positions, width)."""
    return x.flatten(0, -2)


def _branch(key: str, gains: dict[str, dict[str, Tensor]], activations: BlockActivations) -> Branch:
    """The first place after a map's output, and the terms that are added in between."""
    place = next(iter(gains[key]))
    between = activations.order[activations.order.index(key) + 1 : activations.order.index(place)]
    added = tuple((key, gains[key][place]) for key in between if place in gains.get(key, {}))
    return Branch(place, gains[key][place], added)
