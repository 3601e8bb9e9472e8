"""Runs a model block by block: one layer's weights in memory, hidden states stored in between.

The model is transformers' own, made without weights, and its own forward is what runs: finished layers replay their
outputs, the current one has its weights, and the forward ends where it would enter a block without weights. So masks,
positions and whatever else a model hands to its layers are right in every family. Modules outside of the layers stay in
memory once they are opened. What transformers stores in another form than checkpoints have (experts, fused maps) is
joined from its pieces, or taken apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils import _pytree

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.files import SPILL, TemporaryFolder, writing
from rotation_merge.model.apply import read_tensor, unstack
from rotation_merge.model.forms import restructured
from rotation_merge.model.view import View, stored_dtype
from rotation_merge.run.batches import Batch, unlabelled
from rotation_merge.run.functions import architecture_of, empty_model

INNER = ("use_weighted_layer_sum", "vision_feature_layer")
"""Entries of a config for models that read outputs of inner layers after the last layer."""


class Halt(Exception):
    """Ends a forward early, before a block that is not open, or where a hook has seen enough."""


class Runner:
    """Runs one model block by block.

    Attributes:
        model: without weights but those of the present block, and of blocks outside of the layers that are done.
        architecture: under the names of the model's own state dict; blocks have their names from here.
        source: its tensors by these names.
        block: the present one.
        opened: names of the blocks that were opened so far.
        batches: its inputs; `least` is the number of the smallest, `batch` of the one that runs.

    Args:
        view: the model; with `untie` a tied head gets its own tensor.
        store: where hidden states wait; None: in memory.

    Raises:
        CheckpointError: weights are missing, or the files have another form, from which transformers' cannot be joined.
    """

    def __init__(
        self,
        view: View,
        batches: Sequence[Batch],
        store: StateStore | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.store = StateStore() if store is None else store
        self.model = empty_model(view)
        self.architecture = architecture_of(self.model, view.untie)
        self.source = restructured(view.tensors, view.architecture, self.architecture)
        self.batches = [{k: self._cast(v) for k, v in unlabelled(batch).items()} for batch in batches]
        sizes = [next(iter(batch.values())).numel() for batch in self.batches]
        self.least = sizes.index(min(sizes)) if sizes else 0
        self.block: Block | None = None
        self.opened: set[str] = set()
        self.model._apply(self._placed)
        self._slots = _slots(self.model, self.architecture)
        self._check_form(view.name)
        self._outputs: dict[tuple[str, int], StoredValue] = {}  # of finished layers, by name and batch
        self._latest: dict[str, str] = {}  # finished layer, by the module that the layers are of
        self._needed: set[str] = set()  # finished layers whose outputs something else reads than the next layer
        self._replayed: dict[str, Any] = {}
        self.batch, self._opening, self._recording = self.least, False, False
        self._infos: dict[str, list[TensorInfo]] = {}  # tensors that a block is the first to have, by its name
        self._places: dict[str, list[nn.Module]] = {}  # modules whose entry is that of a block
        self._assign()
        for block in self.architecture.blocks:
            for place in self._places[block.name]:
                place.register_forward_pre_hook(partial(self._check, block))
        self._read(info for info in self.architecture.tensors() if "." not in info.name)  # of no module but the model

    # --- forwards ----------------------------------------------------------------------------------------------

    def advance(self) -> Block | None:
        """Leave the current block, after its outputs are recorded, and open the next; None at the end."""
        if self.block is not None and self.block.index is not None:
            self._latest[self.block.module] = self.block.name
            self._replay_from_now_on(self.block).to("meta")
        self.block, self._opening = None, True
        self.run(self.least)  # opens the next block where it is entered
        self._opening = False
        return self.block

    def run(self, batch: int, record: bool = False) -> None:
        """Run one batch through the present block (its hooks see it), or as far as a hook lets it.

        Args:
            record: the layer's outputs, for the layers after it.
        """
        self._recording = record
        try:
            self.answer(batch)
        except Halt:
            return
        finally:
            self._recording = False

    @torch.no_grad()
    def answer(self, batch: int) -> Any:
        """The model's output for a batch, after the last block."""
        self.batch, self._replayed = batch, {}
        return self.model(**self.batches[batch])

    def run_through(self) -> None:
        """Run every batch through every block."""
        while self.advance() is not None:
            for batch in range(len(self.batches)):
                self.run(batch, record=True)

    def follow(self, earlier: Runner, first: int, late: Callable[[Block, TensorInfo], bool]) -> None:
        """Continue after a runner of the same layers, with their outputs.

        Args:
            first: the other's number of this one's first batch; those after it follow.
            late: tells tensors, outside of the layers, whose blocks are still to be opened.
        """
        self._latest = earlier._latest
        self._outputs = {(name, batch - first): output for (name, batch), output in earlier._outputs.items()}
        for block in self.architecture.blocks:
            if block.index is not None:
                self.opened.add(block.name)
                self._replay_from_now_on(block)
            elif not any(late(block, info) for info in block.tensors):
                self._fill(block)

    def module_of(self, block: Block) -> nn.Module | None:
        """The module of a layer; None outside of the layers."""
        return None if block.index is None else self.model.get_submodule(block.name)

    def _check(self, block: Block, *_: Any) -> None:
        """End a forward before it enters a block that is not open, or open it."""
        if block.name in self.opened:
            return
        if not self._opening:
            raise Halt
        self.block, self._opening = block, False
        self._fill(block)
        if (layer := self.module_of(block)) is not None:
            inside = set(layer.modules())
            for candidate in self.architecture.blocks:  # T5's first layers hold the table of positions of all
                if candidate.index is None and not inside.isdisjoint(self._places[candidate.name]):
                    self._fill(candidate)
            layer.register_forward_hook(partial(self._keep, block), with_kwargs=True)
        elif any(b.name not in self.opened for b in self.architecture.layers(block.module)):
            self._needed.add(self._latest.get(block.module, ""))  # which the block between two layers reads

    def _keep(self, block: Block, _: nn.Module, __: Any, named: dict[str, Any], output: Any) -> None:
        """Record a layer's output, with the mappings that layers share keys and values in (Gemma 4)."""
        if not self._recording or block is not self.block:
            return
        shared = {name: dict(x) for name, x in named.items() if isinstance(x, MutableMapping)}
        self._outputs[block.name, self.batch] = self.store.put((output, shared))
        latest = self._latest.get(block.module)
        every = any(getattr(self.model.config, key, None) not in (None, False) for key in INNER)
        if latest is not None and latest not in self._needed and not every:
            self._outputs.pop((latest, self.batch), None)

    def _replay_from_now_on(self, block: Block) -> nn.Module:
        layer: Any = self.module_of(block)
        layer.forward = partial(self._replay, block)
        return cast(nn.Module, layer)

    def _replay(self, block: Block, *_: Any, **named: Any) -> Any:
        """A finished layer's output, or that of the latest one, as nothing reads those before it."""
        name = block.name if (block.name, self.batch) in self._outputs else self._latest[block.module]
        if name not in self._replayed:
            self._replayed = {name: self._outputs[name, self.batch].get(self.device)}
        output, shared = self._replayed[name]
        for argument, entries in shared.items():
            named[argument].update(entries)
        return output

    # --- weights -----------------------------------------------------------------------------------------------

    def is_shared(self, name: str) -> bool:
        """Whether the model uses a parameter in several places."""
        return len(self._slots.get(name, ())) > 1

    @torch.no_grad()
    def set(self, name: str, tensor: Tensor) -> None:
        """Give a parameter (or a buffer that holds weights) a value, wherever the model uses it."""
        value = self._cast(tensor)
        if name not in self._slots:
            owner, _, leaf = name.rpartition(".")
            self.model.get_submodule(owner)._buffers[leaf] = value
            return
        parameter = nn.Parameter(value, requires_grad=False)
        for module, leaf in self._slots[name]:
            module._parameters[leaf] = parameter

    def _fill(self, block: Block) -> None:
        self.opened.add(block.name)
        self._read(info for info in self._infos[block.name] if "." in info.name)

    def _read(self, infos: Iterable[TensorInfo]) -> None:
        """Fill tensors, each of which the model stores as one or several; nothing where the source has none."""
        for info in infos:
            if (tensor := read_tensor(info, self.source)) is not None:
                for name, piece in unstack(info, tensor).items():
                    self.set(name, piece)

    def _check_form(self, label: str) -> None:
        """Check that the source has every parameter in the model's own form."""
        parameters, filled = dict(self.model.named_parameters(remove_duplicate=False)), set[nn.Parameter]()
        for info in self.architecture.tensors():
            spellings = (info.names, *((tied,) for tied in info.tied))
            if any(all(name in self.source for name in names) for names in spellings):
                filled.update(parameters[name] for name in info.names if name in parameters)
        if not filled.issuperset(parameters.values()):
            problem = f"transformers holds the weights of {type(self.model).__name__} in another form than the files"
            raise CheckpointError(f"{problem}, so it cannot be run one layer at a time", where=label)

    def _assign(self) -> None:
        """Assign every tensor to the first block that has it under any name, and the modules that hold it."""
        assigned = set[Any]()
        for block in self.architecture.blocks:
            infos = [info for info in block.tensors if self._slots.get(info.name, [info.name])[0] not in assigned]
            slots = [self._slots.get(name, []) for info in infos for name in info.names]
            assigned.update(*slots, (info.name for info in infos))
            layer = self.module_of(block)
            places = [*([] if layer is None else [layer]), *(module for places in slots for module, _ in places)]
            self._infos[block.name] = infos
            self._places[block.name] = [place for place in dict.fromkeys(places) if place is not self.model]

    def _placed(self, tensor: Tensor) -> Tensor:
        """A buffer on the device, or a parameter without values in the dtype, which some models give inputs."""
        return tensor.to(stored_dtype(tensor, self.dtype)) if tensor.is_meta else tensor.to(self.device)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, stored_dtype(tensor, self.dtype))


Slot = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


def _slots(model: nn.Module, architecture: Architecture) -> dict[str, list[Slot]]:
    """Every place in the model with the same parameter, by tensor name."""
    places: dict[nn.Parameter, list[Slot]] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, leaf))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: places[parameters[name]] for name in architecture.named() if name in parameters}


# --- values that wait between forwards -------------------------------------------------------------------------------


class StoredValue:
    """A value with its tensors off the accelerator; its file goes with it."""

    def __init__(self, value: Any, path: Path | None) -> None:
        leaves, self._form = _pytree.tree_flatten(value)
        tensors = {str(i): x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        stored = {key: x.detach().to("cpu", copy=True).contiguous() for key, x in tensors.items()}
        self._leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self._tensors, self._path = stored if path is None else {}, path
        if path is not None:
            weakref.finalize(self, path.unlink, missing_ok=True)
            save_file(stored, path)

    def get(self, device: torch.device | str = "cpu") -> Any:
        """The value, with its tensors on a device."""
        tensors = self._tensors if self._path is None else load_file(self._path)
        leaves = [tensors[str(i)].to(device) if str(i) in tensors else x for i, x in enumerate(self._leaves)]
        return _pytree.tree_unflatten(leaves, self._form)


class StateStore:
    """Where values wait: tensors, lists and mappings of them, outputs of modules.

    Args:
        folder: tensors are written to a new folder inside of it, which goes with the store; None: kept in memory.
        remedy: for a full disk.

    Raises:
        SpaceError: the folder cannot be written to.
    """

    def __init__(self, folder: str | None = None, remedy: str = SPILL) -> None:
        self._numbers, self._writing = count(), partial(writing, folder or "", remedy)
        with self._writing():
            self._scratch = None if folder is None else TemporaryFolder(folder)

    def put(self, value: Any) -> StoredValue:
        """Store a value for as long as somebody holds the result."""
        if self._scratch is None:
            return StoredValue(value, None)
        with self._writing():
            return StoredValue(value, Path(self._scratch.path, f"{next(self._numbers)}.safetensors"))

    def close(self) -> None:
        """Remove the folder."""
        if self._scratch is not None:
            self._scratch.close()
