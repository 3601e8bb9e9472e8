"""Runs a model block by block: one layer's weights in memory, hidden states stored in between.

The model is transformers' own, made without weights, and its own forward is what runs: finished layers replay their
outputs, the current one has its weights, and the forward ends where it would enter a block without weights. So masks,
positions and whatever else a model hands to its layers are right in every family. Modules outside of the layers stay in
memory once they are opened. What transformers stores in another form than checkpoints have (experts, fused maps) is
joined from its pieces, or taken apart.

`streamed_model` is the same model run as a whole, with only one layer's weights in memory: each layer reads them when
it is entered and frees them when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from rotation_merge.architecture import Architecture
from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.model.blocks import read_tensor, unstack
from rotation_merge.model.forms import restructured
from rotation_merge.model.tensors import as_tensors
from rotation_merge.model.view import View
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import Batch, architecture_of, has_fused_attention, unlabelled
from rotation_merge.run.store import PLAIN, SharedKVCache, StateStore, versions

INNER = ("use_weighted_layer_sum", "vision_feature_layer")
"""Entries of a config for models that read outputs of inner layers after the last layer."""

Fill = Callable[[TensorInfo, Tensor], Tensor]
"""Function from a source's tensor to the model's."""


class Halt(Exception):
    """Raised by hooks to end a forward early."""


class _Unfilled(Halt):
    def __init__(self, block: Block, arguments: Any) -> None:
        super().__init__(block.name)
        self.block, self.arguments = block, arguments


class Runner:
    """Runs one model block by block.

    Attributes:
        model: without weights but those of the present block, and of blocks outside of the layers that are done.
        architecture: under the names of the model's own state dict; blocks have their names from here.
        block: the present one.
        batches: its inputs; `least` is the number of the smallest.
        stored: its tensors by the names of its checkpoint.

    Args:
        view: the model; with `untie` a tied head gets its own tensor.
        store: where hidden states wait; None: in memory.
        prefix: of this model's keys in the store.
        fill: see `Fill`.

    Raises:
        CheckpointError: weights are missing, or the files have another form, from which transformers' cannot be joined.
    """

    def __init__(
        self,
        view: View,
        batches: Sequence[Batch],
        store: StateStore | None = None,
        prefix: str = "",
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        fill: Fill = lambda _, tensor: tensor,
    ) -> None:
        self.dtype, self.device, self.fill, self.prefix = dtype, torch.device(device), fill, prefix
        self.store = StateStore() if store is None else store
        self.model = empty_model(view.transformers_config, view.untie)
        self.architecture = architecture_of(self.model, view.untie)
        self.stored, self.source = view.tensors, restructured(view.tensors, view.architecture, self.architecture)
        if not self._covers():
            problem = f"transformers holds the weights of {type(self.model).__name__} in another form than the files"
            raise CheckpointError(f"{problem}, so it cannot be run one layer at a time", where=view.name)
        self._buffers()
        for parameter in self.model.parameters():  # which some models bring their inputs to before any is filled
            if parameter.is_meta and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        self.batches = [{k: self._input(v) for k, v in unlabelled(batch).items()} for batch in batches]
        sizes = [next(iter(batch.values())).numel() for batch in self.batches]
        self.least = sizes.index(min(sizes)) if sizes else 0
        self.block: Block | None = None
        self.opened: set[str] = set()
        self._slots = _slots(self.model, self.architecture)
        self._claimed = self._claims()
        self._last: dict[str, Block] = {}
        self._every: set[str] = set()
        self._left = SharedKVCache(self.store)
        self._replayed: dict[str, Any] = {}
        self._calls: list[tuple[Any, int]] = []
        self._arguments: dict[int, Any] = {}
        self._alone = False
        self._hooks: list[Any] = []
        self._recording = self._inside = self._opening = False
        self._batch = self._first = 0
        self._guard()
        for info in self.architecture.tensors():
            if "." not in info.name:  # the model's own, which no module below it is entered for
                self._read(info)

    @classmethod
    def of_module(cls, module: Any, batches: Sequence[Batch]) -> Runner:
        """A runner of a loaded model, whose weights it shares."""
        name, first = type(module).__name__, next(module.parameters())
        config = {**module.config.to_dict(), "architectures": [name]}
        view = View(name, config, architecture_of(module), as_tensors(module.state_dict()))
        return cls(view, batches, dtype=first.dtype, device=str(first.device))

    def advance(self) -> Block | None:
        """Leave the current block, after its outputs are recorded, and open the next; None at the end."""
        if self.block is not None:
            self._leave(self.block)
        self.block = None
        self._alone, self._opening = False, True
        self._arguments.clear()
        self.run(self.least)  # opens the next block where it is entered, and fills what else that enters
        self._alone, self._opening = self._runs_alone(), False
        return self.block

    def run(self, batch: int) -> Any:
        """Run one batch through the present block (its hooks see it), or as far as a hook lets it.

        Modules of another block that a layer enters (T5's first layers use the table of positions before them) are
        filled as well.

        Returns:
            Where the forward ends before a block that is not open: what it would enter that with.
        """
        try:
            if self._first + batch in self._arguments:
                self._layer_forward(batch)
            else:
                self.answer(batch)
        except _Unfilled as stop:
            if not self._inside:
                return stop.arguments
            self._fill(stop.block)
            return self.run(batch)
        except Halt:
            pass
        return None

    def follow(self, earlier: Runner, first: int, late: Callable[[Block, TensorInfo], bool]) -> None:
        """Continue after a runner of the same layers, with their outputs.

        Args:
            first: the other's number of this one's first batch; those after it follow.
            late: tells tensors, outside of the layers, whose blocks are still to be opened.
        """
        self.prefix, self._first, self._every = earlier.prefix, first, earlier._every
        self._left = earlier._left
        for block in self.architecture.blocks:
            layer = self.module_of(block)
            if layer is not None:
                self.opened.add(block.name)
                self._repeat(layer, block)
            elif not any(late(block, info) for info in block.tensors):
                self._fill(block)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the current layer's outputs for the layers after it."""
        self._recording = True
        yield
        self._recording = False

    def attend(self, kind: str) -> None:
        """Compute attention in torch's fused form (sdpa) from now on, where the model has it, or plainly (eager)."""
        if has_fused_attention(self.model) and kind != self.model.config._attn_implementation:
            self.model.set_attn_implementation(kind)
            self._arguments.clear()  # whose masks are of the other form

    def is_shared(self, name: str) -> bool:
        """Whether the model uses a parameter in several places."""
        return len(self._slots.get(name, ())) > 1

    def module(self, name: str) -> nn.Module:
        return self.model.get_submodule(name)

    def module_of(self, block: Block) -> nn.Module | None:
        """The module of a layer; None outside of the layers."""
        return None if block.index is None else self.module(block.name)

    # --- weights -----------------------------------------------------------------------------------------------

    def _covers(self) -> bool:
        """Whether the source has every parameter of the model in the model's own form."""
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        stored = {name for info in self.architecture.tensors() if self._stored(info) for name in info.names}
        loaded = {id(parameters[name]) for name in stored if name in parameters}
        return all(id(parameter) in loaded for parameter in parameters.values())

    def _stored(self, info: TensorInfo) -> bool:
        names = [info.names] if not info.tied else [info.names, *((tied,) for tied in info.tied)]
        return any(all(name in self.source for name in spelling) for spelling in names)

    def fill_all(self, late: Collection[str] = ()) -> Any:
        """The model with all of its weights but those tensors that come late, run as a whole from now on."""
        for block in self.architecture.blocks:
            self._fill(block, late)
        for hook in self._hooks:
            hook.remove()
        return self.model

    def _claims(self) -> dict[str, Block]:
        """First block that has each parameter, under any name, by tensor name."""
        first: dict[Any, Block] = {}
        claims = {}
        for block in self.architecture.blocks:
            for info in block.tensors:
                for name in info.names:
                    slots = self._slots.get(name)
                    claims[name] = first.setdefault((id(slots[0][0]), slots[0][1]) if slots else name, block)
        return claims

    def _buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self.device)

    def _open(self, block: Block) -> None:
        self.block = block
        done = self._last.get(block.module)
        if block.index is not None:
            self._last[block.module] = block
        elif done is not None and any(b.name not in self.opened for b in self.architecture.layers(block.module)):
            self._keep_every(done)
        self._fill(block)

    def _keep_every(self, done: Block) -> None:
        """Keep each layer's output, because a module outside the layers reads the stream between two layers."""
        if done.module in self._every or self._stack(done) == done.name:
            return
        for batch in range(len(self.batches)):
            self.store.put(self._key(done.name, batch), self.store.get(self._key(done.module, batch)))
        self._every.add(done.module)
        layer = self.module_of(done)
        if layer is not None:
            self._repeat(layer, done)

    def _fill(self, block: Block, late: Collection[str] = ()) -> None:
        self.opened.add(block.name)
        for info in block.tensors:
            if self._claimed[info.name] is block and "." in info.name and info.name not in late:
                self._read(info)

    def _read(self, info: TensorInfo) -> None:
        for name, piece in self.pieces(info).items():
            self.set(name, piece)

    @torch.no_grad()
    def pieces(self, info: TensorInfo) -> dict[str, Tensor]:
        """A tensor as the model stores it, read from the source: nothing, or one or several, by their names."""
        tensor = read_tensor(info, self.source)
        return {} if tensor is None else unstack(info, self.fill(info, tensor))

    def set(self, name: str, tensor: Tensor) -> None:
        """Give a parameter (or a buffer that holds weights) a value, wherever the model uses it."""
        owner, _, leaf = name.rpartition(".")
        module = self.module(owner)
        value = tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)
        if leaf in module._buffers:
            module._buffers[leaf] = value
            return
        parameter = nn.Parameter(value, requires_grad=False)
        for place, slot in self._slots[name]:
            place._parameters[slot] = parameter

    def _leave(self, block: Block) -> None:
        """Replace a finished layer by its recorded outputs, and free its weights."""
        layer = self.module_of(block)
        if layer is None:
            return
        self._repeat(layer, block)
        for info in block.tensors:
            for name in info.names:
                for place, slot in self._slots.get(name, ()):
                    old = place._parameters[slot]
                    if old is not None:
                        place._parameters[slot] = nn.Parameter(torch.empty_like(old, device="meta"), False)

    def _repeat(self, layer: nn.Module, block: Block) -> None:
        """Make a layer replay its recorded outputs."""
        stack = self._stack(block)
        layer.forward = lambda *_, **named: self._replay(stack, block, named)

    # --- forwards ----------------------------------------------------------------------------------------------

    def _guard(self) -> None:
        """End a forward before it enters a block that is not open.

        Parameters that several blocks share (an embedding tied to a head) belong to the first of them.
        """
        blocks: dict[nn.Module, list[Block]] = {}
        for block in self.architecture.blocks:
            layer = self.module_of(block)
            names = [name for info in block.tensors for name in info.names if self._claimed[info.name] is block]
            places = [place for name in names for place, _ in self._slots.get(name, ())]
            for place in [*([layer] if layer is not None else []), *places]:
                if place is not self.model and block not in blocks.setdefault(place, []):
                    blocks[place].append(block)
        for place, layers in blocks.items():
            check = partial(self._check, layers)
            self._hooks.append(place.register_forward_pre_hook(check, with_kwargs=True))
        for block in self.architecture.blocks:
            layer = self.module_of(block)
            if layer is not None:
                enter, keep = partial(self._enter, block), partial(self._keep, block)
                self._hooks.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
                self._hooks.append(layer.register_forward_hook(keep, with_kwargs=True))

    def _check(self, blocks: Sequence[Block], _: nn.Module, *arguments: Any) -> None:
        unopened = next((block for block in blocks if block.name not in self.opened), None)
        if unopened is not None and not self._opening:
            raise _Unfilled(unopened, arguments)
        if unopened is not None:
            self._opening = False
            self._open(unopened)
        self._inside = self._inside or any(block is self.block for block in blocks if block.index is not None)

    def _enter(self, block: Block, _: nn.Module, positional: Any, named: dict[str, Any]) -> None:
        self._left.entered(named)
        if block is self.block:
            self._calls.append(((positional, named), versions((positional, named))))
            if self._alone:
                self._arguments[self._batch] = positional, named

    def _runs_alone(self) -> bool:
        """Whether the current layer can be run by itself on arguments that are kept, and that is worth it.

        So it is if one forward enters it once, with plain values and few tensors beside the hidden states that are in
        memory anyway, and it leaves them as they are.
        """
        if len(self._calls) != 1 or self.device.type != "cpu" or self.store.folder is not None:
            return False
        arguments, version = self._calls[0]
        leaves = _pytree.tree_leaves(arguments)
        sizes = [x.numel() for x in leaves if isinstance(x, Tensor)]
        plain = all(isinstance(x, PLAIN) for x in leaves)
        return plain and sum(sizes[1:]) <= sum(sizes[:1]) and versions(arguments) == version

    def _keep(self, block: Block, _: nn.Module, __: Any, named: dict[str, Any], output: Any) -> None:
        self._inside = self._inside and block is not self.block
        if not self._recording or block is not self.block:
            return
        self._arguments.pop(self._batch, None)
        self._left.keep(self._key(f"{block.name}:left"), named)
        self.store.put(self._key(self._stack(block)), output)

    def _stack(self, block: Block) -> str:
        """The key of a layer's latest output: its stack, or the layer where a head reads all layers."""
        every = any(getattr(self.model.config, key, None) not in (None, False) for key in INNER)
        return block.name if every or block.module in self._every else block.module

    def _replay(self, stack: str, block: Block, named: dict[str, Any]) -> Any:
        self._left.restore_entries(self._key(f"{block.name}:left"), named, self.device)
        key = self._key(stack)
        if key not in self._replayed:
            self._replayed = {key: self.store.get(key, self.device)}
        return self._replayed[key]

    def _key(self, stack: str, batch: int | None = None) -> str:
        return f"{self.prefix}:{stack}:{self._batch if batch is None else batch}"

    def _input(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)

    def run_through(self) -> None:
        """Run every batch through every block."""
        while self.advance() is not None:
            with self.recording():
                for batch in range(len(self.batches)):
                    self.run(batch)

    @torch.no_grad()
    def answer(self, batch: int) -> Any:
        """The model's output for a batch, after the last block; before it, as far as the forward gets."""
        self._batch, self._inside = self._first + batch, False
        self._replayed = {}
        self._calls.clear()
        return self.model(**self.batches[batch])

    @torch.no_grad()
    def _layer_forward(self, batch: int) -> None:
        """Run the current layer by itself."""
        assert self.block is not None
        self._batch, self._inside = self._first + batch, False
        self._calls.clear()
        positional, named = self._arguments[self._batch]
        self.module(self.block.name)(*positional, **named)


def _slots(model: nn.Module, architecture: Architecture) -> dict[str, list[tuple[nn.Module, str]]]:
    """Every place in the model with the same parameter, by tensor name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, leaf))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: places[id(parameters[name])] for name in architecture.named() if name in parameters}


def streamed_model(view: View, dtype: torch.dtype, device: str = "cpu") -> Any:
    """transformers' model in evaluation mode, whose layers read their weights on each run.

    Its parameters have their shapes throughout, and values (NaN, if one looks) only inside of their layer.

    Raises:
        CheckpointError: weights are missing, or the files have another form than transformers' model, and cannot be
            brought into it one layer at a time.
    """
    runner = Runner(view, [], dtype=dtype, device=device)
    layers = [block for block in runner.architecture.blocks if runner.module_of(block) is not None]
    owned = {block.name: _alone(runner, block) for block in layers}
    model = runner.fill_all({info.name for infos in owned.values() for info in infos})
    for block in layers:
        _read_on_entry(runner, block, owned[block.name])
    if lost := sorted(n for n, p in model.named_parameters() if p.is_meta):
        raise CheckpointError(f"missing weights, the first is {lost[0]}", where=view.name, remedy="download it again")
    return model


def _alone(runner: Runner, block: Block) -> list[TensorInfo]:
    """A layer's large tensors, which nothing but this layer reads."""
    parameters = dict(runner.module(block.name).named_parameters(block.name))
    return [
        info
        for info in block.tensors
        if len(info.axes) > 1 and all(name in parameters and not runner.is_shared(name) for name in info.names)
    ]


def _read_on_entry(runner: Runner, block: Block, infos: Sequence[TensorInfo]) -> None:
    """Make a layer read its tensors before its forward, and free them after it."""
    layer = runner.module(block.name)
    parameters: dict[str, nn.Parameter] = {}
    absent: dict[str, Tensor] = {}
    for info in infos:
        for name in info.names:
            nothing = torch.full((), torch.nan, dtype=runner.dtype, device=runner.device)
            absent[name] = nothing.expand(runner.model.get_parameter(name).shape)
            runner.set(name, absent[name])
            parameters[name] = runner.model.get_parameter(name)

    def enter(*_: Any) -> None:
        for info in infos:
            for name, piece in runner.pieces(info).items():
                parameters[name].data = piece.to(runner.device, runner.dtype)

    def leave(*_: Any) -> None:
        for name, nothing in absent.items():
            parameters[name].data = nothing

    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, always_call=True)
