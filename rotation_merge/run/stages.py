"""Activations of one block's linear maps and of its stream while a model runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import Block
from rotation_merge.run.maps import LinearMap, linear_map
from rotation_merge.run.runner import Halt, Runner
from rotation_merge.run.store import SettledOutputs

LAYER = "layer"
"""What the place is called where a layer gives the stream to the next one."""


@dataclass
class BlockActivations:
    """Activations of one run of a block, by key of the map or name of the place in the stream.

    Attributes:
        inputs, outputs: of the maps.
        stream: what entered a norm, and what the layer gave.
        order: keys and places in the order in which they were seen.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    stream: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def part(self, whole: frozenset[str], outputs_only: frozenset[str], mask: Tensor | None) -> BlockActivations:
        """What some maps read and gave, or only gave, and the stream at places among them, without padding."""
        real: dict[int, Tensor] = {}
        at = None if mask is None else mask.flatten().nonzero()[:, 0]

        def cut(tensors: dict[str, Tensor], names: frozenset[str]) -> dict[str, Tensor]:
            part = {name: x for name, x in tensors.items() if name in names}
            if mask is None or at is None:
                return part
            for x in part.values():
                if id(x) not in real:
                    real[id(x)] = _real(x, mask, at)
            return {name: real[id(x)] for name, x in part.items()}

        every = whole | outputs_only
        return BlockActivations(cut(self.inputs, whole), cut(self.outputs, every), cut(self.stream, every), self.order)


class Taps:
    """Hooks on one block of a model.

    Attributes:
        maps: the linear maps that are modules of their own, by key.
        modules: those modules.
        names: of all tensors of the block, by key.
        places: where the stream can be looked at: keys of norms, and LAYER.
        settled: what is not run again.
    """

    def __init__(self, runner: Runner, block: Block) -> None:
        self.runner = runner
        self.maps: dict[str, LinearMap] = {}
        self.modules: dict[str, nn.Module] = {}
        for info in block.tensors:
            linear = linear_map(block, info)
            module = None if linear is None or linear.stacked else _submodule(runner, info.name)
            if linear is not None and isinstance(module, nn.Linear | Conv1D) and info.name.endswith(".weight"):
                self.maps[info.key], self.modules[info.key] = linear, module
        self.names = {info.key: info.name for info in block.tensors}
        norms = {norm.gain: _submodule(runner, self.names.get(norm.gain, "")) for norm in block.norms}
        self.places: dict[str, nn.Module] = {key: module for key, module in norms.items() if module is not None}
        self.layer = runner.module_of(block)
        self.settled = SettledOutputs(runner.store, runner.prefix, self.modules, self.layer)

    @contextmanager
    def watching(
        self, until: frozenset[str] = frozenset(), disturb: dict[str, Tensor] | None = None
    ) -> Iterator[BlockActivations]:
        """Record activations within the block.

        Args:
            until: end the forward when all of these (keys or places) have been seen.
            disturb: what to add to the outputs of maps.
        """
        activations = BlockActivations()

        def note(name: str) -> None:
            activations.order.append(name)
            if until and until.issubset(activations.order):
                raise Halt

        def gave(key: str, arguments: Any, output: Tensor) -> Tensor:
            if disturb and key in disturb:
                output = output + disturb[key]
            activations.inputs[key], activations.outputs[key] = arguments[0], output
            note(key)
            return output

        def entered(place: str, arguments: Any) -> None:
            activations.stream[place] = arguments[0]
            note(place)

        def left(output: Any) -> None:
            activations.stream[LAYER] = next(x for x in _pytree.tree_leaves(output) if isinstance(x, Tensor))
            note(LAYER)

        hooks = [
            module.register_forward_hook(lambda _, arguments, output, key=key: gave(key, arguments, output))
            for key, module in self.modules.items()
        ]
        hooks += [
            module.register_forward_pre_hook(lambda _, arguments, place=place: entered(place, arguments))
            for place, module in self.places.items()
        ]
        if self.layer is not None:
            hooks.append(self.layer.register_forward_hook(lambda _, __, output: left(output)))
        try:
            yield activations
        finally:
            for hook in hooks:
                hook.remove()

    def first(self, disturb: dict[str, Tensor] | None = None) -> BlockActivations:
        """Activations of the smallest batch, with padding."""
        with self.watching(disturb=disturb) as activations, self.settled.counting():
            self.runner.run(self.runner.least)
        return activations

    def see(
        self, batch: int, until: frozenset[str] = frozenset(), also: frozenset[str] = frozenset()
    ) -> BlockActivations:
        """Activations of one batch, without padding, (positions, width).

        Args:
            until: end the forward when all of these have been seen, and show them, with what such maps read.
            also: keys and places that are shown, whatever else runs.
        """
        with self.settled.replaying(batch, self.runner.device), self.watching(until) as activations:
            self.runner.run(batch)
        return activations.part(until, also, self.runner.batches[batch].get("attention_mask"))

    def pass_on(self, batch: int, also: frozenset[str] = frozenset()) -> BlockActivations:
        """Activations of one batch at some keys and places; the layer's outputs are recorded for the next ones.

        Outside of the layers the forward ends where all of these have been seen.
        """
        if self.layer is None:
            return self.see(batch, also)
        with self.runner.recording():
            return self.see(batch, also=also)

    def module(self, key: str) -> nn.Module:
        """The map, or the norm, of this key."""
        return self.modules[key] if key in self.modules else self.places[key]

    def forget(self) -> None:
        """Forget the cached outputs of solved modules."""
        self.settled.forget()


def _submodule(runner: Runner, tensor: str) -> nn.Module | None:
    """The module that owns a tensor, where the model has it."""
    try:
        return runner.module(tensor.rpartition(".")[0]) if "." in tensor else None
    except AttributeError:
        return None


@dataclass(frozen=True)
class Branch:
    """The path of a map's output to the stream.

    Attributes:
        place: where the stream is looked at.
        gain: by how much each coordinate of the map's output counts there, shape (out,).
        added: keys of maps that write to the same place after it, with their gains.
    """

    place: str
    gain: Tensor
    added: tuple[tuple[str, Tensor], ...] = ()


@dataclass(frozen=True)
class Stage:
    """Maps that read one and the same input, which are solved together; or one norm."""

    keys: tuple[str, ...]
    branches: dict[str, Branch]

    @property
    def until(self) -> frozenset[str]:
        """The activations that this stage needs."""
        return frozenset(self.keys).union(*map(self.aims, self.keys))

    def aims(self, key: str) -> frozenset[str]:
        """Of what a map needs the answers: of its output, or of the stream and what else is added there."""
        branch = self.branches.get(key)
        return frozenset([key] if branch is None else [branch.place, *(key for key, _ in branch.added)])

    @property
    def wanted(self) -> frozenset[str]:
        """Of what answers are needed."""
        return frozenset().union(*map(self.aims, self.keys))


LINEAR = 1e-2
"""A place follows a map's output if all but this share of its answer is the output times a gain for each coordinate."""


def stages(taps: Taps, keys: set[str], norms: Collection[str] = ()) -> list[Stage]:
    """The stages of a block in the order of its forward; what runs twice, or not at all, is in none.

    Args:
        keys: of the maps to be solved.
        norms: places of the norms to be solved.
    """
    if not keys and not norms:
        return []
    activations = taps.first()
    solved = keys.union(norms)
    once = [key for key in activations.order if key in solved and activations.order.count(key) == 1]
    groups: dict[Any, list[str]] = {}
    for key in once:
        x = activations.inputs.get(key)
        groups.setdefault(key if x is None else (x.data_ptr(), tuple(x.shape), x.stride()), []).append(key)
    writers = [key for key in once if key in keys and _writes(taps.maps[key])]
    gains = {key: _places(taps, key, activations) for key in writers}
    branches = {key: _branch(key, gains, activations) for key in writers if gains[key]}
    return [Stage(tuple(g), {key: branches[key] for key in g if key in branches}) for g in groups.values()]


def _writes(linear: LinearMap) -> bool:
    return any(part.role == "write" for part in linear.outputs.parts)


def _places(taps: Taps, key: str, activations: BlockActivations) -> dict[str, Tensor]:
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


def _real(x: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    """The positions that are no padding, (positions, width); what has no positions as it is.

    Args:
        mask: (texts, positions), 1 where they are real.
        at: where they are among all of them.
    """
    if x.ndim > 2 and x.shape[:2] == mask.shape:
        return x.flatten(0, 1).index_select(0, at)
    return x.index_select(0, at) if len(x) == mask.numel() else x


def rows(x: Tensor) -> Tensor:
    """All positions of all samples, (positions, width)."""
    return x.flatten(0, -2)


def _branch(key: str, gains: dict[str, dict[str, Tensor]], activations: BlockActivations) -> Branch:
    """The first place that follows a map's output, and what else is added to it in between."""
    place = next(iter(gains[key]))
    between = activations.order[activations.order.index(key) + 1 : activations.order.index(place)]
    added = tuple((key, gains[key][place]) for key in between if place in gains.get(key, {}))
    return Branch(place, gains[key][place], added)
