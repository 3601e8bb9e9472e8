"""Records activations of all linear maps of a model, block by block: one layer's weights are in memory.

Every product of activations with a weight is reported, whatever function computes it (a linear layer, GPT-2's Conv1D,
the experts of one fused tensor, a router). The model runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rotation_merge.architecture.model import Block
from rotation_merge.run.functions import check_answers
from rotation_merge.run.maps import LinearMap, along_inputs, linear_maps
from rotation_merge.run.runner import Runner

LEAST_GAIN = 1e-6
"""Of a norm's largest gain: what is multiplied by less is zero to its readers, and in what is recorded."""

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


Recorder = Callable[[str, int | None, Tensor, Tensor], None]
"""Takes a map's name, its expert (None: it is no expert's), its inputs (..., inputs), and its outputs (..., outputs)
after a layer scale."""


class WatchedBlocks:
    """A run of a model through its blocks, with its maps watched.

    Attributes:
        maps: all of the model's, by the first name of their tensors.
        axes: by map that ran so far, the (block, axis) that it reads.
        new_axes: those of the maps that run first in the present block.
        split: of `axes`: those behind a norm, whose inputs `normalised` gives.
        scales: by map: name of the layer scale behind it.

    Args:
        runner: about to run on samples without padding.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.maps = runner, linear_maps(runner.architecture)
        self.axes: dict[str, str] = {}
        self.new_axes: dict[str, str] = {}
        self.split: set[str] = set()
        self.scales: dict[str, str] = {}
        self._norms: dict[str, tuple[Tensor, Tensor]] = {}  # gain and shift, by map of the present block
        for block in runner.architecture.blocks:
            names = {info.key: info.name for info in block.tensors}
            for scale in (scale for scale in block.scales if scale.gain in names):
                written = [names[key] for key in scale.writes if names.get(key) in self.maps]
                self.scales.update(dict.fromkeys(written, names[scale.gain]))

    @property
    def uncalled(self) -> frozenset[str]:
        """Maps that have not run."""
        return frozenset(self.maps) - self.axes.keys()

    def advance(self) -> Block | None:
        """Open the next block, and find the inputs of the maps that run in it for the first time; None at the end."""
        block = self.runner.advance()
        if block is None:
            return None
        inputs: dict[str, list[Tensor]] = {}
        with Products(self, lambda name, _, x, __: inputs.setdefault(name, []).append(x)):
            self.runner.run(0)
        check_answers(self.runner.model, chain(*inputs.values()))
        self.new_axes = self._axes(inputs)
        norms = {name: self._norm(self.maps[name]) for name in self.new_axes}
        self._norms = {name: norm for name, norm in norms.items() if norm is not None}
        self.split.update(self.new_axes[name] for name in self._norms)
        self.axes.update(self.new_axes)
        return block

    def run(self, recorder: Recorder) -> None:
        """Run every batch through the present block, and record its outputs for the next ones."""
        with Products(self, recorder):
            for batch in range(len(self.runner.batches)):
                self.runner.run(batch, record=True)

    def normalised(self, name: str, x: Tensor) -> Tensor:
        """Inputs x = D x_hat + c of a map of the present block before its norm's gain D and shift c, where it has one.

        Coordinates without a gain are zero.
        """
        if name not in self._norms:
            return x
        gain, shift = self._norms[name]
        return (x - shift) / gain

    def _norm(self, linear: LinearMap) -> tuple[Tensor, Tensor] | None:
        """Gain (infinite where it vanishes) and shift of a map's norm, along all of its inputs; None without a norm."""
        norm, names = linear.norm, {info.key: info.name for info in linear.block.tensors}
        if norm is None or norm.gain not in names:
            return None
        parameters = dict(self.runner.model.named_parameters(remove_duplicate=False))
        stored, shift = parameters[names[norm.gain]].detach(), parameters.get(names.get(norm.shift or "", ""))
        gain, shift = along_inputs(linear, stored + norm.offset, None if shift is None else shift.detach())
        return gain.masked_fill(gain.abs() <= LEAST_GAIN * gain.abs().max(), torch.inf), shift

    def _axes(self, inputs: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
        """The (block, axis) of each map that ran first; those that read one tensor behind one norm share it."""
        axes: dict[str, str] = {}
        by_input: dict[tuple[Any, ...], str] = {}
        for name, linear in self.maps.items():
            if name in inputs and name not in self.axes:
                places = tuple((x.data_ptr(), x.shape, x.stride()) for x in inputs[name])
                read = linear.block.name, places, linear.norm, linear.stacked
                if read not in by_input:
                    known_axes = {*self.axes.values(), *by_input.values()}
                    by_input[read] = _unused(f"{linear.block.name}/{linear.inputs.label}", known_axes)
                axes[name] = by_input[read]
        return axes


def _unused(axis: str, known: Collection[str]) -> str:
    """A name for an input along an axis of a block; further ones are numbered."""
    names = chain([axis], (f"{axis}/{number}" for number in count(2)))
    return next(name for name in names if name not in known)


class Products(TorchFunctionMode):
    """Reports, within a block, products with the weights of maps that are in memory."""

    def __init__(self, blocks: WatchedBlocks, recorder: Recorder) -> None:
        super().__init__()
        self.blocks, self.recorder = blocks, recorder
        self.weights: dict[int, tuple[str, int | None]] = {}  # map and expert by the place in memory
        stored = blocks.runner.model.state_dict()
        for name, linear in blocks.maps.items():
            pieces = [stored[piece] for piece in linear.info.names if piece in stored and not stored[piece].is_meta]
            experts = [*chain(*pieces)] if pieces and pieces[0].ndim == 3 else pieces
            places = [piece.data_ptr() for piece in experts]
            self.weights |= {p: (name, n if linear.stacked else None) for n, p in enumerate(places)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product, place = func(*args, **(kwargs or {})), _PRODUCTS.get(func, len(args))
        weight = args[place + 1] if len(args) > place + 1 else None
        if isinstance(weight, Tensor) and weight.data_ptr() in self.weights:
            self._report(*self.weights[weight.data_ptr()], weight, args[place], product)
        return product

    def _report(self, name: str, expert: int | None, weight: Tensor, x: Tensor, y: Tensor) -> None:
        """Report a product; that of all experts (experts, tokens, ...) expert by expert.

        Tokens that are not routed to an expert are zero there.
        """
        scale = self.blocks.scales.get(name)
        y = y if scale is None else y * self.blocks.runner.model.get_parameter(scale)
        if weight.ndim < 3:
            self.recorder(name, expert, x, y)
            return
        for number, (rows, outputs) in enumerate(zip(x, y, strict=True)):
            routed = rows.detach().abs().amax(-1).nonzero()[:, 0]
            self.recorder(name, number, rows[routed], outputs[routed])
