"""The stages of a block: maps that read one input, in the order of its forward, and the paths of their outputs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import Block
from rotation_merge.run.maps import LinearMap, maps_of
from rotation_merge.run.runner import Halt, Runner

LAYER = "layer"
"""Name of the place where a layer passes the stream to the next one."""

LINEAR = 1e-2
"""A place follows a map's output if all but this share of its answer is the output times a gain for each coordinate."""


@dataclass
class BlockActivations:
    """Activations of one run of a block.

    Attributes:
        mask: (texts, positions), 1 where they are real; None: all are.
        inputs: of maps, by key.
        values: outputs of maps by key, and the stream by place: inputs of norms by key of their gain, and LAYER.
        order: keys and places in the order in which they were seen.
    """

    mask: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def rows(self, name: str, inputs: bool = False) -> Tensor:
        """The values of a key or place, or a map's inputs, without padding, (positions, width)."""
        x, mask = (self.inputs if inputs else self.values)[name], self.mask
        if mask is not None and x.ndim > 2 and x.shape[:2] == mask.shape:
            x = x.flatten(0, 1)
        if mask is not None and len(x) == mask.numel():
            x = x.index_select(0, mask.flatten().nonzero()[:, 0])
        return rows(x)


def rows(x: Tensor) -> Tensor:
    """All positions of all samples, (positions, width)."""
    return x.flatten(0, -2)


class BlockHooks:
    """Hooks on one block of a model.

    Attributes:
        maps: the linear maps that are modules of their own, by key.
        modules: those modules.
        places: where the stream can be looked at outside of LAYER: norms, by key of their gain.
    """

    def __init__(self, runner: Runner, block: Block) -> None:
        self.runner, self.layer = runner, runner.module_of(block)
        self.maps: dict[str, LinearMap] = {}
        self.modules: dict[str, nn.Module] = {}
        owners = dict(runner.model.named_modules(remove_duplicate=False))
        for linear in maps_of(block):
            key, module = linear.info.key, owners.get(linear.info.name.removesuffix(".weight"))
            if not linear.stacked and isinstance(module, nn.Linear | Conv1D):
                self.maps[key], self.modules[key] = linear, module
        names = {info.key: info.name.rpartition(".")[0] for info in block.tensors}
        gains = [norm.gain for norm in block.norms if owners.get(names.get(norm.gain, "")) not in (None, runner.model)]
        self.places = {gain: owners[names[gain]] for gain in gains}

    def see(
        self,
        batch: int,
        names: frozenset[str] | None = None,
        record: bool = False,
        disturb: Mapping[str, Tensor] | None = None,
    ) -> BlockActivations:
        """Activations of one batch at some keys and places (None: all).

        Args:
            record: the layer's outputs for the next ones; else the forward ends where all names have been seen.
            disturb: added to the outputs of maps.
        """
        activations = BlockActivations(self.runner.batches[batch].get("attention_mask"))
        until = frozenset[str]() if record or names is None else names
        seen = frozenset([*self.maps, *self.places, LAYER]) if names is None else names

        def note(name: str, value: Tensor) -> None:
            activations.values[name] = value
            activations.order.append(name)
            if until and until <= activations.values.keys():
                raise Halt

        def on_map(key: str, _: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            output = output + disturb[key] if disturb and key in disturb else output
            activations.inputs[key] = arguments[0]
            note(key, output)
            return output

        def on_norm(place: str, _: nn.Module, arguments: Any) -> None:
            note(place, arguments[0])

        def on_layer(_: nn.Module, __: Any, output: Any) -> None:
            note(LAYER, next(x for x in _pytree.tree_leaves(output) if isinstance(x, Tensor)))

        with ExitStack() as hooks:
            for key in self.modules.keys() & seen:
                hooks.enter_context(self.modules[key].register_forward_hook(partial(on_map, key)))
            for place in self.places.keys() & seen:
                hooks.enter_context(self.places[place].register_forward_pre_hook(partial(on_norm, place)))
            if self.layer is not None and LAYER in seen:
                hooks.enter_context(self.layer.register_forward_hook(on_layer))
            self.runner.run(batch, record)
        return activations

    def pass_on(self, batch: int, names: frozenset[str] = frozenset()) -> dict[str, Tensor]:
        """Outputs of maps and the stream at places, by name; of a layer the outputs are recorded for the next ones."""
        activations = self.see(batch, names, record=self.layer is not None)
        return {name: activations.rows(name) for name in activations.values}


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

    def aims(self, key: str) -> frozenset[str]:
        """Activations that a map's target needs: its output, or the stream and the other terms added there."""
        branch = self.branches.get(key)
        return frozenset([key] if branch is None else [branch.place, *(key for key, _ in branch.added)])

    @property
    def wanted(self) -> frozenset[str]:
        """The activations whose targets are needed."""
        return frozenset().union(*map(self.aims, self.keys))


def stages(taps: BlockHooks, keys: set[str]) -> list[Stage]:
    """The stages of a block in the order of its forward; maps that run twice or never are in none.

    Args:
        keys: of the maps to be solved.
    """
    if not keys:
        return []
    activations = taps.see(taps.runner.least)
    once = [key for key in activations.order if key in keys and activations.order.count(key) == 1]
    groups: dict[Any, list[str]] = {}
    for key in once:
        x = activations.inputs[key]
        groups.setdefault((x.data_ptr(), tuple(x.shape), x.stride()), []).append(key)
    writers = [key for key in once if any(part.role == "write" for part in taps.maps[key].outputs.parts)]
    gains = {key: _places(taps, key, activations) for key in writers}
    branches = {key: _branch(key, gains, activations) for key in writers if gains[key]}
    return [Stage(tuple(g), {key: branches[key] for key in g if key in branches}) for g in groups.values()]


def _places(taps: BlockHooks, key: str, activations: BlockActivations) -> dict[str, Tensor]:
    """Places that follow a map's output, with the gains: found out by disturbing it."""
    output = activations.values[key]
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(output.shape, generator=draw).to(output) * output.detach().std().clamp_min(1e-6)
    disturbed, noise_rows = taps.see(taps.runner.least, disturb={key: noise}), rows(noise)
    gains = {}
    for place in activations.order[activations.order.index(key) + 1 :]:
        if place in taps.maps or activations.order.count(place) != 1:
            continue
        change = rows(disturbed.values[place] - activations.values[place])
        if change.shape != noise_rows.shape:
            continue
        gain = (change * noise_rows).sum(0) / noise_rows.square().sum(0)
        if float((change - gain * noise_rows).norm()) <= LINEAR * float(change.norm()) and float(gain.abs().max()) > 0:
            gains[place] = gain.masked_fill(gain.abs() < LINEAR * gain.abs().max(), 0.0)
    return gains


def _branch(key: str, gains: dict[str, dict[str, Tensor]], activations: BlockActivations) -> Branch:
    """The first place after a map's output, and the terms that are added in between."""
    place = next(iter(gains[key]))
    between = activations.order[activations.order.index(key) + 1 : activations.order.index(place)]
    added = tuple((key, gains[key][place]) for key in between if place in gains.get(key, {}))
    return Branch(place, gains[key][place], added)
