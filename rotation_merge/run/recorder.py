"""Records activations of all linear maps of a model while it runs, for any class of model.

`HookedModel` reports every product of activations with a weight of the running module to a watcher, whatever function
computes it (a linear layer, GPT-2's Conv1D, the experts of one fused tensor, a router). Where a norm feeds maps, it is
run without gain and shift, which are applied on the way into each of its readers: so the normalised inputs are
recorded, and the model's outputs stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotation_merge.architecture.model import Architecture, Norm
from rotation_merge.run.maps import along_inputs, linear_maps
from rotation_merge.run.store import hooked

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


class HookedModel:
    """A model with hooks on its maps.

    Attributes:
        maps: by the first name of their tensors.
        splits: by map: its norm's gain and shift, where that norm is split.
        scales: by map: name of the layer scale behind it.

    Args:
        model: in evaluation mode.
        architecture: under the names of the model's own state dict.
    """

    def __init__(self, model: nn.Module, architecture: Architecture) -> None:
        self.model, self.architecture, self.maps = model, architecture, linear_maps(architecture)
        self.splits: dict[str, tuple[Tensor, Tensor]] = {}
        self.scales: dict[str, str] = {}
        for block in architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            for scale in (scale for scale in block.scales if scale.gain in names):
                written = [names[key] for key in scale.writes if names.get(key) in self.maps]
                self.scales.update(dict.fromkeys(written, names[scale.gain]))

    @contextmanager
    def split(self, called: Iterable[str]) -> Iterator[None]:
        """Run norms without gain and shift, if all their readers are recorded.

        Args:
            called: the maps that run at all.
        """
        running, changed = set(called), list[tuple[Tensor, Tensor, float]]()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for block in self.architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            for norm in block.norms:
                readers = [m for m in self.maps.values() if m.block is block and m.norm is norm]
                if readers and _readable(norm, names, running):
                    gain, shift = parameters[names[norm.gain]], parameters.get(names.get(norm.shift or "", ""))
                    gain_and_shift = gain.detach() + norm.offset, None if shift is None else shift.detach().clone()
                    self.splits.update({m.info.name: along_inputs(m, *gain_and_shift) for m in readers})
                    changed.append((gain, gain.detach().clone(), 1.0 - norm.offset))
                    changed += [] if shift is None else [(shift, shift.detach().clone(), 0.0)]
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


def _readable(norm: Norm, names: dict[str, str], running: set[str]) -> bool:
    """Whether every tensor that reads the norm is a map that runs."""
    stems = {key.removesuffix(".weight"): name for key, name in names.items() if not key.endswith(".bias")}
    readers = [stems[stem] for stem in (r.removesuffix(".weight") for r in norm.reads) if stem in stems]
    return norm.gain in names and bool(readers) and all(name in running for name in readers)


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
        self.watcher.on_output(name, expert, y if scale is None else y * self.tapped.model.get_parameter(scale))
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
