"""Records activations of all linear maps of a model, block by block: one layer's weights are in memory.

`WatchedBlocks` reports every product of activations with a weight of the running module to a watcher, whatever function
computes it (a linear layer, GPT-2's Conv1D, the experts of one fused tensor, a router). Where a norm feeds maps, it is
run without gain and shift, which are applied on the way into each of its readers: so the normalised inputs are
recorded, and the model's outputs stay the same; hidden states are those of that run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from rotation_merge.architecture.model import Block, Norm
from rotation_merge.errors import StatisticsError
from rotation_merge.run.functions import SAME, check_answers
from rotation_merge.run.maps import along_inputs, linear_maps
from rotation_merge.run.runner import Runner
from rotation_merge.run.store import hooked

MOST_DIFFERENCE = 1e-3
"""Of outputs while the maps are watched, relative to their size; more means that they cannot be watched in this way."""

_PRODUCTS = {
    torch.nn.functional.linear: 0,
    torch.addmm: 1,
    torch.mm: 0,
    torch.matmul: 0,
    torch.bmm: 0,
    Tensor.mm: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
}
"""Functions that multiply activations by a weight, and the place of the activations among their arguments."""


class Watcher:
    """Receives the inputs and outputs of every map that runs; a subclass takes what it needs."""

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        """A map's inputs, (..., inputs), before gain and shift if the norm is split."""

    def on_output(self, name: str, expert: int | None, y: Tensor) -> None:
        """A map's outputs, (..., outputs), after a layer scale."""


Owned = tuple[str, str, int | None]
"""A parameter of a module that is a map, or one expert's: its name there, the map's name, the expert."""


class WatchedBlocks:
    """A run of a model through its blocks, with its maps watched.

    Attributes:
        maps: all of the model's, by the first name of their tensors.
        axes: by map that ran so far, the (block, axis) that it reads.
        new_axes: those of the maps that run first in the present block.
        split: of `axes`: those whose norm ran without gain and shift.
        gains: by map: gain and shift of its norm, while it runs without them.
        scales: by map: name of the layer scale behind it.

    Args:
        runner: about to run on samples without padding.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.maps = runner, linear_maps(runner.architecture)
        self.axes: dict[str, str] = {}
        self.new_axes: dict[str, str] = {}
        self.split: set[str] = set()
        self.gains: dict[str, tuple[Tensor, Tensor]] = {}
        self.scales: dict[str, str] = {}
        for block in runner.architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            for scale in (scale for scale in block.scales if scale.gain in names):
                written = [names[key] for key in scale.writes if names.get(key) in self.maps]
                self.scales.update(dict.fromkeys(written, names[scale.gain]))
        self._called: Iterable[str] = ()

    @property
    def uncalled(self) -> frozenset[str]:
        """Maps that have not run."""
        return frozenset(self.maps) - self.axes.keys()

    def advance(self) -> Block | None:
        """Open the next block, and find the inputs of the maps that run in it for the first time; None at the end."""
        block = self.runner.advance()
        if block is not None:
            self.runner.attend("eager")
            inputs = _Inputs()
            plain = self._outputs(block, inputs)
            check_answers(self.runner.model, plain)
            self.new_axes = self._axes(inputs)
            self._settle(block, plain)
            self.axes.update(self.new_axes)
        return block

    @contextmanager
    def by(self, watcher: Watcher) -> Iterator[None]:
        """The watcher sees the maps of the present block, as those batches run that carry their hidden states on."""
        with self.without_gains(self._called), self.watched(watcher):
            yield

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Report every map that runs to the watcher."""
        mode = _Mode(self, watcher)
        with hooked(mode.hooks()), mode:
            yield

    @contextmanager
    def without_gains(self, called: Iterable[str]) -> Iterator[None]:
        """Run norms without gain and shift, if all their readers are recorded.

        Args:
            called: the maps that run at all.
        """
        parameters = dict(self.runner.model.named_parameters(remove_duplicate=False))
        changed = list[tuple[Tensor, Tensor, float]]()  # a parameter, its value, and that which it has meanwhile
        for norm, names, readers in self._norms_read_by(set(called)):
            gain, shift = parameters[names[norm.gain]], parameters.get(names.get(norm.shift or "", ""))
            changed.append((gain, gain.detach().clone(), 1.0 - norm.offset))
            changed += [] if shift is None else [(shift, shift.detach().clone(), 0.0)]
            gain_and_shift = gain.detach() + norm.offset, None if shift is None else shift.detach().clone()
            self.gains.update({name: along_inputs(self.maps[name], *gain_and_shift) for name in readers})
        try:
            with torch.no_grad():
                for parameter, _, value in changed:
                    parameter.fill_(value)
            yield
        finally:
            with torch.no_grad():
                for parameter, stored, _ in changed:
                    parameter.copy_(stored)
            self.gains.clear()

    def _norms_read_by(self, running: set[str]) -> Iterator[tuple[Norm, dict[str, str], list[str]]]:
        """Norms that are read by maps that run alone, with their block's names by key, and those maps."""
        for block in self.runner.architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            stems = {key.removesuffix(".weight"): name for key, name in names.items() if not key.endswith(".bias")}
            for norm in (norm for norm in block.norms if norm.gain in names):
                readers = {stems[stem] for stem in (r.removesuffix(".weight") for r in norm.reads) if stem in stems}
                maps = [name for name in self.maps if name in readers and self.maps[name].norm is norm]
                if maps and readers <= running:
                    yield norm, names, maps

    def _settle(self, block: Block, plain: Sequence[Tensor]) -> None:
        """Settle whether norms run without gains, and whether attention is fused.

        Args:
            plain: outputs without either.

        Raises:
            StatisticsError: recording changes a layer's outputs.
        """
        fused, split, whole = ("sdpa", self.new_axes), ("eager", self.new_axes), ("eager", ())
        for attention, self._called in (split, whole) if block.index is None else (fused, split):
            self.runner.attend(attention)
            with self.without_gains(self._called):
                axes = {self.new_axes[name] for name in self.gains}
                watched = self._outputs(block, _Inputs())
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
        with hooked([hook]), self.watched(watcher):
            further = self.runner.run(0)
        leaves = _pytree.tree_leaves(outputs[-1] if outputs else further)
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]

    def _axes(self, inputs: _Inputs) -> dict[str, str]:
        """The (block, axis) of each map that ran first; those that read one tensor behind one norm share it."""
        axes: dict[str, str] = {}
        by_input: dict[tuple[Any, ...], str] = {}
        for name, linear in self.maps.items():
            if name in inputs.seen and name not in self.axes:
                read = linear.block.name, tuple(map(id, inputs.seen[name])), linear.norm, linear.stacked
                if read not in by_input:
                    known_axes = {*self.axes.values(), *by_input.values()}
                    by_input[read] = _unused(f"{linear.block.name}/{linear.inputs.label}", known_axes)
                axes[name] = by_input[read]
        return axes


def _unused(axis: str, known: Collection[str]) -> str:
    """A name for an input along an axis of a block; further ones are numbered."""
    names = chain([axis], (f"{axis}/{number}" for number in count(2)))
    return next(name for name in names if name not in known)


def _difference(plain: Sequence[Tensor], watched: Sequence[Tensor]) -> float:
    """The largest difference of outputs, relative to the size of each; infinite for those of another form."""
    if [x.shape for x in plain] != [x.shape for x in watched]:
        return math.inf
    pairs = zip(plain, watched, strict=True)
    return max((float((b - a).abs().max()) / float(a.abs().max().clamp(min=1e-12)) for a, b in pairs), default=0.0)


class _Inputs(Watcher):
    """Holds the input tensors of the maps that run."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {}

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        self.seen.setdefault(name, []).append(x)


class _Mode(TorchFunctionMode):
    """Reports products with weights of the running module."""

    def __init__(self, blocks: WatchedBlocks, watcher: Watcher) -> None:
        super().__init__()
        self.blocks, self.watcher = blocks, watcher
        self.stack: list[nn.Module] = []
        self.owned: dict[nn.Module, list[Owned]] = {}
        modules = dict(blocks.runner.model.named_modules(remove_duplicate=False))
        for name, linear in blocks.maps.items():
            for number, stored in enumerate(linear.info.names):
                owner, _, leaf = stored.rpartition(".")
                if owner in modules and isinstance(getattr(modules[owner], leaf, None), Tensor):
                    expert = number if len(linear.info.names) > 1 else None
                    self.owned.setdefault(modules[owner], []).append((leaf, name, expert))

    def hooks(self) -> list[RemovableHandle]:
        """Hooks that tell which module runs."""

        def left(module: nn.Module, *_: Any) -> None:
            if self.stack and self.stack[-1] is module:  # a hook before may have ended the forward at its entry
                self.stack.pop()

        hooks = [module.register_forward_pre_hook(lambda m, _: self.stack.append(m)) for module in self.owned]
        return hooks + [module.register_forward_hook(left, always_call=True) for module in self.owned]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _PRODUCTS.get(func)
        if place is not None and self.stack and len(args) > place + 1:
            owner = self._owner(args[place + 1])
            if owner is not None and func is torch.bmm:
                return self._experts(owner[0], *args)
            if owner is not None:
                return self._product(func, place, owner, args, kwargs)
        return func(*args, **kwargs)

    def _product(self, func: Any, place: int, owner: tuple[str, int | None], args: Any, kwargs: Any) -> Any:
        name, expert = owner
        x = args[place]
        self.watcher.on_input(name, expert, x)
        if name in self.blocks.gains:
            gain, shift = self.blocks.gains[name]
            args = (*args[:place], x * gain + shift, *args[place + 1 :])
        y = func(*args, **kwargs)
        scale = self.blocks.scales.get(name)
        self.watcher.on_output(name, expert, y if scale is None else y * self.blocks.runner.model.get_parameter(scale))
        return y

    def _experts(self, name: str, x: Tensor, weight: Tensor) -> Tensor:
        """One product of all experts (n, inputs, outputs) with all tokens (n, tokens, inputs), expert by expert.

        Tokens that are not routed to an expert are zero there.
        """
        products = []
        for expert, (rows, matrix) in enumerate(zip(x, weight, strict=True)):
            routed = rows.detach().abs().amax(-1).nonzero()[:, 0]
            y = self._product(torch.mm, 0, (name, expert), (rows[routed], matrix), {})
            products.append(y.new_zeros(len(rows), matrix.shape[-1]).index_put((routed,), y))
        return torch.stack(products)

    def _owner(self, weight: Any) -> tuple[str, int | None] | None:
        """The map that a tensor is the weight of."""
        if not isinstance(weight, Tensor) or weight.data_ptr() == 0:
            return None
        for leaf, name, expert in self.owned[self.stack[-1]]:
            parameter = getattr(self.stack[-1], leaf)
            if _within(weight, parameter):
                stacked = parameter.ndim == 3 and weight.ndim == 2
                place = (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
                return name, place if stacked else expert
        return None


def _within(weight: Tensor, parameter: Tensor) -> bool:
    return weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
