"""A model with only one layer's weights in memory at a time, also in the backward pass.

Each layer reads its weights when it is entered and lets go of them when it is left. What autograd would keep of them
for the way back it keeps as a name and reads again. Small tensors (biases, gains) and what stands outside of the layers
stay. To whoever runs it, it is a model like any other; activations are kept as ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rotation_merge.architecture import Architecture
from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.errors import CheckpointError
from rotation_merge.model.source import TensorSource, read_tensor, unstack
from rotation_merge.run.runner import Runner


def streamed_model(
    config: Any,
    source: TensorSource,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str = "cpu",
    name: str = "model",
) -> Any:
    """transformers' model, in evaluation mode, whose layers read their weights from the source as they run.

    Its parameters have their shapes throughout, and values (NaN, if one looks) only inside of their layer.

    Args:
        config: of the model; not modified.
        source: its tensors.
        architecture: the architecture by whose names the source goes.
        name: of the model, for messages.

    Raises:
        CheckpointError: weights are missing, or the files have another form than transformers' model, and cannot be
            brought into it one layer at a time.
    """
    runner = Runner(config, source, architecture, [], dtype=dtype, device=device, layered=name)
    layers = [block for block in runner.architecture.blocks if runner.module_of(block) is not None]
    owned = {block.name: _alone(runner, block) for block in layers}
    model = runner.fill_all({info.name for infos in owned.values() for info in infos})
    stream = _Stream(runner)
    for block in layers:
        stream.take(block, owned[block.name])
    if lost := sorted(n for n, p in model.named_parameters() if p.is_meta):
        raise CheckpointError(f"missing weights, the first is {lost[0]}", where=name, remedy="download it again")
    return model


def _alone(runner: Runner, block: Block) -> list[TensorInfo]:
    """A layer's large tensors, which nothing but this layer reads."""
    parameters = dict(runner.module(block.name).named_parameters(block.name))
    return [
        info
        for info in block.tensors
        if len(info.axes) > 1 and all(name in parameters and not runner.is_shared(name) for name in info.names)
    ]


@dataclass(frozen=True)
class _Handle:
    """A view of a weight that is not in memory: where it is read from, and its size, strides and offset."""

    block: str
    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Stream:
    """Tracks which layer's weights are in memory."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.infos: dict[str, list[TensorInfo]] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.absent: dict[str, Tensor] = {}
        self.latest: tuple[str, dict[str, Tensor]] = ("", {})
        self.places: dict[int, str] = {}

    def take(self, block: Block, infos: list[TensorInfo]) -> None:
        """Load a layer's tensors before its forward, and free them after it."""
        layer = self.runner.module(block.name)
        self.infos[block.name] = infos
        for info in infos:
            for name in info.names:
                nothing = torch.full((), torch.nan, dtype=self.runner.dtype, device=self.runner.device)
                self.absent[name] = nothing.expand(self.runner.model.get_parameter(name).shape)
                self.runner.set(name, self.absent[name])
                self.parameters[name] = self.runner.model.get_parameter(name)
        plain = layer.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            self._fill(block.name)
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return plain(*arguments, **options)
            finally:
                self._empty(block.name)

        layer.forward = forward

    def _names(self, block: str) -> list[str]:
        return [name for info in self.infos[block] for name in info.names]

    def _read(self, block: str) -> dict[str, Tensor]:
        """A layer's weights; those of the layer before go first."""
        if self.latest[0] != block:
            self.latest = ("", {})
            weights: dict[str, Tensor] = {}
            for info in self.infos[block]:
                tensor = read_tensor(info, self.runner.source)
                assert tensor is not None  # the runner has looked
                pieces = unstack(info, tensor)
                weights.update((n, piece.to(self.runner.device, self.runner.dtype)) for n, piece in pieces.items())
            self.latest = block, weights
            self.places = {w.untyped_storage().data_ptr(): name for name, w in weights.items() if w.numel()}
        return self.latest[1]

    def _fill(self, block: str) -> None:
        for name, tensor in self._read(block).items():
            self.parameters[name].data = tensor

    def _empty(self, block: str) -> None:
        for name in self._names(block):
            self.parameters[name].data = self.absent[name]

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        name = self.places.get(tensor.untyped_storage().data_ptr())
        if name is None:
            return tensor
        return _Handle(self.latest[0], name, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Tensor | _Handle) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        return self._read(packed.block)[packed.name].as_strided(packed.size, packed.stride, packed.offset)
