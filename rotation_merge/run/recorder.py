"""Records activations while a model runs, for any class of model: of all of its linear maps, or of one block.

`HookedModel` reports every product of activations with a weight of the running module to a watcher, whatever function
computes it (a linear layer, GPT-2's Conv1D, the experts of one fused tensor, a router). Where a norm feeds maps, it is
run without gain and shift, which are applied on the way into each of its readers: so the normalised inputs are
recorded, and the model's outputs stay the same. Layer scales likewise: they are applied on the way out of the map
before them.

`BlockHooks` gives the activations of one block of a `Runner`: inputs and outputs of its maps, also of those whose
outputs are replayed, and the stream where norms read it and where the layer ends. The block may be ended early, or
disturbed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from transformers.pytorch_utils import Conv1D

from rotation_merge.architecture.model import Architecture, Block, Norm, Scale
from rotation_merge.run.maps import LinearMap, along_inputs, linear_map, linear_maps
from rotation_merge.run.runner import Halt, Runner
from rotation_merge.run.store import SettledOutputs, hooked

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


@dataclass
class _Owned:
    """A parameter of a module that is a map, or one expert's."""

    leaf: str
    name: str
    expert: int | None


@dataclass
class HookedModel:
    """A model with hooks on its maps.

    Attributes:
        model: in evaluation mode.
        architecture: under the names of the model's own state dict.
        maps: by the first name of their tensors.
        splits: by map: its norm's gain and shift, where that norm is split.
        scales: by map: the layer scale behind it.
    """

    model: nn.Module
    architecture: Architecture
    maps: dict[str, LinearMap]
    splits: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, architecture: Architecture) -> HookedModel:
        return cls(model, architecture, linear_maps(architecture))

    @contextmanager
    def split(self, called: Iterable[str]) -> Iterator[None]:
        """Run norms without gain and shift, and layer scales as one, if all their readers are recorded.

        Args:
            called: the maps that run at all.
        """
        running, changed = set(called), []
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for block in self.architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            for norm in block.norms:
                readers = [m for m in self.maps.values() if m.block is block and m.norm is norm]
                if readers and self._readable(norm, names, running):
                    gain, shift = parameters[names[norm.gain]], parameters.get(names.get(norm.shift or "", ""))
                    gain_and_shift = gain.detach() + norm.offset, None if shift is None else shift.detach().clone()
                    self.splits.update({m.info.name: along_inputs(m, *gain_and_shift) for m in readers})
                    changed.append((gain, gain.detach().clone(), 1.0 - norm.offset))
                    changed += [] if shift is None else [(shift, shift.detach().clone(), 0.0)]
            for scale in block.scales:
                if (written := self._written(scale, names, running)) is not None:
                    gain = parameters[names[scale.gain]]
                    self.scales[written] = gain.detach().clone()
                    changed.append((gain, gain.detach().clone(), 1.0))
        try:
            with torch.no_grad():
                for parameter, _, value in changed:
                    parameter.fill_(value)
            yield
        finally:
            with torch.no_grad():
                for parameter, stored, _ in changed:
                    parameter.copy_(stored)
            self.splits.clear()
            self.scales.clear()

    def _readable(self, norm: Norm, names: dict[str, str], running: set[str]) -> bool:
        """Whether every tensor that reads the norm is a map that runs."""
        stems = {key.removesuffix(".weight"): name for key, name in names.items() if not key.endswith(".bias")}
        readers = [stems[stem] for stem in (r.removesuffix(".weight") for r in norm.reads) if stem in stems]
        return norm.gain in names and bool(readers) and all(name in running for name in readers)

    @staticmethod
    def _written(scale: Scale, names: dict[str, str], running: set[str]) -> str | None:
        scaled_maps = [names[key] for key in scale.writes if names.get(key) in running]
        return scaled_maps[0] if scaled_maps and scale.gain in names else None

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Report every map that runs to the watcher."""
        stack: list[nn.Module] = []
        owned = self._owned()

        def left(module: nn.Module, *_: Any) -> None:
            if stack and stack[-1] is module:  # a hook before ours may have ended the forward where it would enter
                stack.pop()

        hooks = [module.register_forward_pre_hook(lambda m, _: stack.append(m)) for module in owned]
        hooks += [module.register_forward_hook(left, always_call=True) for module in owned]
        with hooked(hooks), _Mode(self, watcher, stack, owned):
            yield

    def _owned(self) -> dict[nn.Module, list[_Owned]]:
        """The modules that hold weights of maps."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        owned: dict[nn.Module, list[_Owned]] = {}
        for name, linear in self.maps.items():
            for number, stored in enumerate(linear.info.names):
                owner, _, leaf = stored.rpartition(".")
                if owner in modules and isinstance(getattr(modules[owner], leaf, None), Tensor):
                    expert = number if len(linear.info.names) > 1 else None
                    owned.setdefault(modules[owner], []).append(_Owned(leaf, name, expert))
        return owned


class _Mode(TorchFunctionMode):
    def __init__(
        self, tapped: HookedModel, watcher: Watcher, stack: list[nn.Module], owned: dict[nn.Module, list[_Owned]]
    ) -> None:
        super().__init__()
        self.tapped, self.watcher, self.stack, self.owned = tapped, watcher, stack, owned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = _PRODUCTS.get(func)
        if place is not None and self.stack and len(args) > place + 1:
            owner = self._owner(args[place + 1])
            if owner is not None and func is torch.bmm:
                return self._experts(owner[0], *args)
            if owner is not None:
                return self._product(func, place, owner, args, kwargs)
        result = func(*args, **kwargs)
        if func is Tensor.__getitem__ and self.stack and args[0].ndim == 3:
            self._mark_expert(args, result)
        return result

    def _product(self, func: Any, place: int, owner: tuple[str, int | None], args: Any, kwargs: Any) -> Any:
        name, expert = owner
        x = args[place]
        self.watcher.on_input(name, expert, x)
        split = self.tapped.splits.get(name)
        if split is not None:
            args = (*args[:place], x * split[0] + split[1], *args[place + 1 :])
        y = func(*args, **kwargs)
        scale = self.tapped.scales.get(name)
        if scale is not None:
            y = y * scale
        self.watcher.on_output(name, expert, y)
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
        if not isinstance(weight, Tensor):
            return None
        marked: tuple[str, int] | None = getattr(weight, "_tapped", None)
        if marked is not None:
            return marked
        for entry in self.owned[self.stack[-1]]:
            parameter = getattr(self.stack[-1], entry.leaf)
            if weight.data_ptr() == 0 or not _within(weight, parameter):
                continue
            if parameter.ndim == 3 and weight.ndim == 2:
                return entry.name, (weight.storage_offset() - parameter.storage_offset()) // parameter.stride(0)
            return entry.name, entry.expert
        return None

    def _mark_expert(self, args: Any, result: Any) -> None:
        """Mark a weight indexed out of a stack, which is a copy, with its map and expert."""
        index = args[1]
        if not isinstance(index, Tensor) or index.numel() != 1 or not isinstance(result, Tensor) or result.ndim > 3:
            return
        for entry in self.owned[self.stack[-1]]:
            if args[0] is getattr(self.stack[-1], entry.leaf):
                result._tapped = (entry.name, int(index))  # type: ignore[attr-defined]


def _within(weight: Tensor, parameter: Tensor) -> bool:
    return weight.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


LAYER = "layer"
"""Name of the place where a layer passes the stream to the next one."""


@dataclass
class BlockActivations:
    """Activations of one run of a block, by key of the map or name of the place in the stream.

    Attributes:
        inputs, outputs: of the maps.
        stream: inputs of norms, and the layer's output.
        order: keys and places in the order in which they were seen.
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    stream: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def part(self, whole: frozenset[str], outputs_only: frozenset[str], mask: Tensor | None) -> BlockActivations:
        """Inputs and outputs (or only outputs) of some maps, and the stream at some places, without padding."""
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


class BlockHooks:
    """Hooks on one block of a model.

    Attributes:
        maps: the linear maps that are modules of their own, by key.
        modules: those modules.
        names: of all tensors of the block, by key.
        places: where the stream can be looked at: keys of norms, and LAYER.
        settled: modules that are not run again.
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
            disturb: added to the outputs of maps.
        """
        activations = BlockActivations()

        def note(name: str) -> None:
            activations.order.append(name)
            if until and until.issubset(activations.order):
                raise Halt

        def on_output(key: str, arguments: Any, output: Tensor) -> Tensor:
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
            module.register_forward_hook(lambda _, arguments, output, key=key: on_output(key, arguments, output))
            for key, module in self.modules.items()
        ]
        hooks += [
            module.register_forward_pre_hook(lambda _, arguments, place=place: entered(place, arguments))
            for place, module in self.places.items()
        ]
        if self.layer is not None:
            hooks.append(self.layer.register_forward_hook(lambda _, __, output: left(output)))
        with hooked(hooks):
            yield activations

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
            until: end the forward when all of these have been recorded, and return them with the inputs of such maps.
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

    def forget(self) -> None:
        """Forget the cached outputs of solved modules."""
        self.settled.forget()


def _submodule(runner: Runner, tensor: str) -> nn.Module | None:
    """The module that owns a tensor, if the model has it."""
    try:
        return runner.module(tensor.rpartition(".")[0]) if "." in tensor else None
    except AttributeError:
        return None


def _real(x: Tensor, mask: Tensor, at: Tensor) -> Tensor:
    """The positions without padding, (positions, width); tensors without positions unchanged.

    Args:
        mask: (texts, positions), 1 where they are real.
        at: where they are among all of them.
    """
    if x.ndim > 2 and x.shape[:2] == mask.shape:
        return x.flatten(0, 1).index_select(0, at)
    return x.index_select(0, at) if len(x) == mask.numel() else x
