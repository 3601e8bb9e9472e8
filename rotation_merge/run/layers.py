"""Watches the maps of a model, block by block, whatever the model's size: one layer's weights are in memory.

Norms run without gain and shift (see `HookedModel`), and hidden states are those of that run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from rotation_merge.architecture.model import Block
from rotation_merge.errors import StatisticsError
from rotation_merge.run.functions import SAME, check_answers
from rotation_merge.run.recorder import HookedModel, Watcher
from rotation_merge.run.runner import Runner
from rotation_merge.run.store import hooked

MOST_DIFFERENCE = 1e-3
"""Of outputs while the maps are watched, relative to their size; more means that they cannot be watched in this way."""


class WatchedBlocks:
    """A run of a model through its blocks, with its maps watched.

    Attributes:
        maps: all of the model's, by name.
        axes: by map that ran so far, the (block, axis) that it reads.
        new_axes: those of the maps that run first in the present block.
        split: of `axes`: those whose norm ran without gain and shift.

    Args:
        runner: about to run on samples without padding.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.hooked = HookedModel(runner.model, runner.architecture)
        self.maps = self.hooked.maps
        self.axes: dict[str, str] = {}
        self.new_axes: dict[str, str] = {}
        self.split: set[str] = set()
        self._splits: Iterable[str] = ()

    @property
    def uncalled(self) -> frozenset[str]:
        """Maps that have not run."""
        return frozenset(self.maps) - self.axes.keys()

    def advance(self) -> Block | None:
        """Open the next block, and find the inputs of the maps that run in it for the first time; None at the end."""
        block = self.runner.advance()
        if block is not None:
            self._look(block)
            self.axes.update(self.new_axes)
        return block

    @contextmanager
    def by(self, watcher: Watcher) -> Iterator[None]:
        """The watcher sees the maps of the present block, as those batches run that carry their hidden states on."""
        with self.hooked.split(self._splits), self.hooked.watched(watcher):
            yield

    def _look(self, block: Block) -> None:
        """Find the inputs of maps, and settle which norms are split, and whether attention is fused.

        Raises:
            StatisticsError: recording changes a layer's outputs.
        """
        probe = _Probe()
        self.runner.attend("eager")
        plain = self._outputs(block, probe)
        check_answers(self.runner.model, plain)
        self.new_axes = probe.axes(self.hooked, self.axes)
        fused, split, whole = ("sdpa", self.new_axes), ("eager", self.new_axes), ("eager", ())
        for attention, self._splits in (split, whole) if block.index is None else (fused, split):
            self.runner.attend(attention)
            with self.hooked.split(self._splits):
                axes = {self.new_axes[name] for name in self.hooked.splits}
                watched = self._outputs(block, _Probe())
            if _difference(plain, watched) <= (SAME if attention == "sdpa" else MOST_DIFFERENCE):
                self.split |= axes
                return
        raise StatisticsError(
            f"the maps of {type(self.runner.model).__name__} cannot be recorded without changing its outputs",
            remedy="its architecture file lists the readers of a norm wrongly; see docs/add-architecture.md",
        )

    def _outputs(self, block: Block, watcher: Watcher) -> list[Tensor]:
        """Outputs of a layer (or, outside of the layers, the model) for the first batch; else what goes on from it."""
        outputs: list[Any] = []
        place = self.runner.module_of(block) or self.runner.model
        hook = place.register_forward_hook(lambda _, __, output: outputs.append(output))
        with torch.no_grad(), hooked([hook]), self.hooked.watched(watcher):
            further = self.runner.run(0)
        leaves = _pytree.tree_leaves(outputs[-1] if outputs else further)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _difference(plain: Sequence[Tensor], watched: Sequence[Tensor]) -> float:
    """The largest difference of outputs, relative to the size of each; infinite for those of another form."""
    if [x.shape for x in plain] != [x.shape for x in watched]:
        return math.inf
    pairs = zip(plain, watched, strict=True)
    return max((float((b - a).abs().max()) / float(a.abs().max().clamp(min=1e-12)) for a, b in pairs), default=0.0)


class _Probe(Watcher):
    """The maps that run, and those that share an input tensor."""

    def __init__(self) -> None:
        self.inputs: dict[str, list[Tensor]] = {}

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        self.inputs.setdefault(name, []).append(x)

    def axes(self, watched: HookedModel, known: Mapping[str, str]) -> dict[str, str]:
        """The (block, axis) of each map that ran; those that read one tensor behind the same norm have the same.

        Args:
            known: those of other maps, which are left out.
        """
        axes: dict[str, str] = {}
        by_input: dict[tuple[Any, ...], str] = {}
        for name, linear in watched.maps.items():
            if name not in self.inputs or name in known:
                continue
            tensors = tuple(map(id, self.inputs[name]))
            read = linear.block.name, tensors, linear.norm, linear.stacked
            if read not in by_input:
                taken = {*known.values(), *by_input.values()}
                by_input[read] = _unused(f"{linear.block.name}/{linear.inputs.label}", taken)
            axes[name] = by_input[read]
        return axes


def _unused(axis: str, taken: Collection[str]) -> str:
    """A name for an input along an axis of a block; further ones are numbered."""
    names = chain([axis], (f"{axis}/{number}" for number in count(2)))
    return next(name for name in names if name not in taken)
