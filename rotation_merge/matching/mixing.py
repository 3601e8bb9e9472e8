"""One model between anchor and donors, tensor by tensor: mixed weights, or mixed activations.

A mixed weight is computed when a layer uses it, dropped at the next block, and computed again in the backward pass. For
few tokens it is not computed at all: ``(sum_k c_k P_k W_k Q_k^T) x`` is ``sum_k c_k P_k (W_k (Q_k^T x))``, with the
maps applied to activations. The parents stay in storage; tensors are read, folded and converted to float32 on use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils import _pytree

from rotation_merge.architecture.model import Axis, Block, TensorInfo
from rotation_merge.model.apply import transform_axis
from rotation_merge.model.biases import inputs, with_biases
from rotation_merge.model.blocks import moved_reader, read_tensor
from rotation_merge.model.fold import Fold
from rotation_merge.model.tensors import TensorSource
from rotation_merge.symmetry import Monomial, Permutation, SpaceTransform, TranslationTransform

Make = Callable[[], Tensor]
Read = Callable[[torch.dtype], Tensor]
"""Gives a matrix in a type, good until the next is read."""


class RecomputedTensor(torch.autograd.Function):
    """A tensor that is computed again in the backward pass, without stored intermediates."""

    @staticmethod
    def forward(ctx: Any, make: Make, *leaves: Tensor) -> Tensor:
        ctx.make, ctx.leaves = make, leaves
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            recomputed = ctx.make()
        if not recomputed.requires_grad:
            return None, *(None for _ in ctx.leaves)
        return None, *torch.autograd.grad(recomputed, ctx.leaves, gradients[0], allow_unused=True)


class Products(torch.autograd.Function):
    """Sum of rows (n, in) times matrices (out, in) times numbers, with matrices read again in the backward pass.

    The matrices get no gradients.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, readers: Sequence[Read], shares: Sequence[float], *rows: Tensor) -> Tensor:
        ctx.readers, ctx.shares = readers, shares  # type: ignore[attr-defined]
        kind = rows[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows[0].dtype
        total: Tensor | None = None
        with torch.autocast(kind, enabled=False):
            for read, share, x in zip(readers, shares, rows, strict=True):
                total = _add_product(total, x.to(dtype), read(dtype).mT, share)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradients_in: list[Tensor | None] = [None, None]
        for needed, read, share in zip(ctx.needs_input_grad[2:], ctx.readers, ctx.shares, strict=True):
            gradients_in.append(_add_product(None, gradients[0], read(gradients[0].dtype), share) if needed else None)
        return tuple(gradients_in)


def _add_product(total: Tensor | None, x: Tensor, matrix: Tensor, share: float) -> Tensor:
    """Add ``share * x @ matrix`` to the total in place, on the matrix's device."""
    if matrix.device != x.device:
        far = _add_product(None, x.to(matrix.device), matrix, share).to(x.device)
        return far if total is None else total.add_(far)
    if total is None:
        product = x.new_empty(x.shape[0], matrix.shape[1])
        return torch.addmm(product, x, matrix, beta=0, alpha=share, out=product)
    return total.addmm_(x, matrix, alpha=share)


ELEMENTWISE = 100
"""What reading, folding and adding a weight takes, in floating-point operations of a product."""


@dataclass
class ParentTensors:
    """The tensors of all models, the anchor's first, folded, in float32 at least.

    Attributes:
        sources: each on a device of its own.
        device: where what is between them is computed; parents' products are computed where they lie.
        in_memory: keep what has been read and folded.
    """

    sources: Sequence[TensorSource]
    fold: Fold
    device: torch.device
    in_memory: bool
    _known: dict[tuple[int, str, str], Tensor | None] = field(default_factory=dict)
    _places: dict[tuple[torch.device, torch.dtype], Tensor] = field(default_factory=dict)

    def tensor(self, number: int, block: Block, key: str) -> Tensor | None:
        """One parent's tensor of a block (stacked if stored in pieces); None if it lacks it."""
        name = (number, block.name, key)
        if name in self._known:
            return self._known[name]
        tensor = self._read(number, block, key)
        if self.in_memory:
            self._known[name] = tensor
        return tensor

    def _read(self, number: int, block: Block, key: str) -> Tensor | None:
        info, stored = block.tensor(key), self.stored(number, block, key)
        if info is None or stored is None:
            return None
        folded = self.fold.tensor(block, info, lambda key: self.stored(number, block, key))
        return folded.to(self.device, torch.promote_types(stored.dtype, torch.float32))

    def stored(self, number: int, block: Block, key: str) -> Tensor | None:
        """One parent's tensor in storage."""
        info = block.tensor(key)
        return None if info is None else read_tensor(info, self.sources[number])

    def gains(self, number: int, block: Block, info: TensorInfo) -> dict[str, Tensor] | None:
        """Gains on a matrix's inputs that are equal to folding, or None if folding does more."""
        return self.fold.on_inputs(block, info, lambda key: self.stored(number, block, key))

    def unfolded(self, number: int, block: Block, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """A tensor for use before the next call: converted tensors share one buffer on each device."""
        stored = self.stored(number, block, info.key)
        assert stored is not None
        if stored.dtype == dtype:
            return stored
        place = self._places.get((stored.device, dtype))
        if place is None or place.numel() < stored.numel():
            place = torch.empty(stored.numel(), dtype=dtype, device=stored.device)
            self._places[stored.device, dtype] = place
        return place[: stored.numel()].view(stored.shape).copy_(stored)


class Mixing:
    """The model ``c_0 anchor + sum_i c_i moved donor_i``.

    Args:
        transforms: one mapping a donor.
        coefficients: (1 + donors,), the anchor's first.
    """

    def __init__(
        self, parents: ParentTensors, transforms: Sequence[Mapping[str, SpaceTransform]], coefficients: Tensor
    ) -> None:
        self.parents, self.transforms, self.coefficients = parents, [{}, *transforms], coefficients
        self._shares = coefficients.tolist()
        self.speaking = [n for n, share in enumerate(self._shares) if share or coefficients.requires_grad]
        self._inverses: list[dict[str, SpaceTransform]] = []
        self._leaves: dict[tuple[str, str], list[Tensor]] = {}
        self.forget()

    def forget(self) -> None:
        """Drop the buffers of a running block."""
        self._block: Block | None = None
        self._made: dict[tuple[str, bool], Tensor] = {}
        self._read: tuple[Tensor | None, dict[Any, Tensor]] = (None, {})

    # --- mixed weights -----------------------------------------------------------------------------------------

    def mixed(self, block: Block, info: TensorInfo) -> Tensor:
        """A differentiable tensor of the model (stacked if stored in pieces)."""
        total: Tensor | None = None
        for number in self.speaking:
            part = self.coefficients[number] * self._moved(number, block, info)
            total = part if total is None else total + part
        assert total is not None
        return total

    def _moved(self, number: int, block: Block, info: TensorInfo) -> Tensor:
        """A parent's tensor in the anchor's coordinates, with the anchor's hidden biases."""
        maps = self.transforms[number]

        moved = moved_reader(block, lambda key: self.parents.tensor(number, block, key), maps)
        anchor = partial(self.parents.tensor, 0, block)
        moved_tensor = with_biases(block, info, moved, anchor, maps) if number else moved(info.key)
        assert moved_tensor is not None
        return moved_tensor

    def made(self, block: Block, info: TensorInfo) -> Tensor:
        """The mixed tensor, cached while its block runs; the backward pass mixes it again."""
        if self._block is not block:
            self._block, self._made = block, {}
        key = info.key, torch.is_grad_enabled()
        if key not in self._made:
            self._made[key] = RecomputedTensor.apply(lambda: self._plainly(block, info), *self._learned(block, info))
        return self._made[key]

    def _plainly(self, block: Block, info: TensorInfo) -> Tensor:
        with torch.autocast(self.parents.device.type, enabled=False):
            return self.mixed(block, info)

    def _learned(self, block: Block, info: TensorInfo) -> list[Tensor]:
        """Return the leaf tensors of a block's tensor that may have gradients."""
        key = block.name, info.key
        if key not in self._leaves:
            infos = [known_info for known_info in map(block.tensor, inputs(block, info)) if known_info is not None] or [
                info
            ]
            roles = [role for known_info in infos for role in known_info.roles()]
            learned = [
                maps[name]
                for maps in self.transforms
                for name in dict.fromkeys(name for name, role in roles if name in maps and maps[name].moves(role))
            ]
            self._leaves[key] = [x for x in _tensors([self.coefficients, learned]) if x.requires_grad]
        return self._leaves[key]

    @contextmanager
    def sparing(self) -> Iterator[None]:
        """During a forward, store only the names of mixed weights for the backward pass."""

        def pack(tensor: Tensor) -> Any:
            address = tensor.untyped_storage().data_ptr()
            for (key, _), mixed in self._made.items():
                if address and mixed.untyped_storage().data_ptr() == address:
                    return self._block, key, tensor.size(), tensor.stride(), tensor.storage_offset()
            return tensor

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            block, key, *place = packed
            with torch.no_grad():
                return self.made(block, block.tensor(key)).as_strided(*place)

        self._inverses = [{k: m.inverse() for k, m in maps.items() if _acts_on_vectors(m)} for maps in self.transforms]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            self.forget()

    # --- maps on activations -----------------------------------------------------------------------------------

    def linear(self, mixed: Mixed, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The output of the model's map (out, in) for x (..., in); None if mixing the map is cheaper."""
        block, info = mixed.block, mixed.info
        if not self._acts(info) or not self._less(info, x.shape[:-1].numel(), *mixed.shape):
            return None
        total: Tensor | None = None
        for numbers in self._together(info.axes[0]):
            part = self._along(numbers[0], info.axes[0], self._products(numbers, block, info, x))
            total = part if total is None else total.add_(part)
        assert total is not None
        for number in self.speaking:
            shift = self._shift(number, info, x)
            total = total if shift is None else total + self.coefficients[number] * shift[:, None]
        total = total.unflatten(0, x.shape[:-1]) if x.ndim != 2 else total
        return total if bias is None else total + bias

    def _together(self, axis: Axis) -> list[list[int]]:
        """Group the parents: those with outputs in the anchor's coordinates, then each other parent alone."""
        moved = [number for number in self.speaking if self._moving(number, axis)]
        still = [number for number in self.speaking if number not in moved]
        return [*([still] if still else []), *([number] for number in moved)]

    def _products(self, numbers: Sequence[int], block: Block, info: TensorInfo, x: Tensor) -> Tensor:
        """Sum of some parents' maps, times their coefficients, applied to x, (n, out), in their own coordinates."""
        readers, inputs_moved = [], []
        for number in numbers:
            gains = self.parents.gains(number, block, info)
            readers.append(self._reader(number, block, info, gains is None))
            inputs_moved.append(self._seen(number, info.axes[1], x, gains or {}))
        if not self.coefficients.requires_grad:
            return Products.apply(readers, [self._shares[number] for number in numbers], *inputs_moved)
        scaled = [
            self.coefficients[number] * moved_input for number, moved_input in zip(numbers, inputs_moved, strict=True)
        ]
        return Products.apply(readers, [1.0] * len(scaled), *scaled)

    def rows(self, table: Mixed, index: Tensor) -> Tensor | None:
        """Rows of the model's table; None if an alignment permutes them."""
        block, info = table.block, table.info
        if not self._acts(info) or info.common is not None or any(self._moving(n, info.axes[0]) for n in self.speaking):
            return None
        total: Tensor | None = None
        for number in self.speaking:
            entries = self._entries(number, block, info, index.flatten())
            part = self.coefficients[number] * self._along(number, info.axes[1], entries)
            total = part if total is None else total + part
        assert total is not None
        return total.unflatten(0, index.shape) if index.ndim != 1 else total

    def _reader(self, number: int, block: Block, info: TensorInfo, folded: bool) -> Read:
        def read(dtype: torch.dtype) -> Tensor:
            folded_tensor = self.parents.tensor(number, block, info.key) if folded else None
            return (
                self.parents.unfolded(number, block, info, dtype) if folded_tensor is None else folded_tensor.to(dtype)
            )

        return read

    def _entries(self, number: int, block: Block, info: TensorInfo, index: Tensor) -> Tensor:
        """Rows of a parent's table, (n, out)."""
        stored = self.parents.stored(number, block, info.key)
        if stored is None or self.parents.fold.touches(block, info):
            stored = self.parents.tensor(number, block, info.key)
        assert stored is not None
        entries = functional.embedding(index.to(stored.device), stored)
        return entries.to(self.parents.device, torch.promote_types(entries.dtype, torch.float32))

    def _moving(self, number: int, axis: Axis) -> dict[str, SpaceTransform]:
        names = {part.space.name for part in axis.parts} & self.transforms[number].keys()
        return {
            name: self.transforms[number][name] for name in names if not self.transforms[number][name].is_identity()
        }

    def _along(self, number: int, axis: Axis, x: Tensor) -> Tensor:
        """Outputs along an output axis, (n, out), in the anchor's coordinates."""
        moving = self._moving(number, axis)
        return transform_axis(x, 1, axis, moving) if moving else x

    def _seen(self, number: int, axis: Axis, x: Tensor, gains: Mapping[str, Tensor]) -> Tensor:
        """Values (..., in) on an input axis in a parent's own coordinates, times its gains, (n, in).

        Computed once for all maps with these inputs.
        """
        if self._read[0] is not x:
            self._read = x, {}
        moving, known = self._moving(number, axis), self._read[1]
        key = number, axis.label, tuple(moving), tuple(gains)
        if key not in known:
            back = {name: self._inverses[number][name] for name in moving}
            flat = x.reshape(-1, x.shape[-1])
            known[key] = transform_axis(flat, 1, axis, back, dual=True) if back else flat
            for gain in gains.values():
                known[key] = known[key] * gain.to(flat)
        return known[key]

    def _shift(self, number: int, info: TensorInfo, x: Tensor) -> Tensor | None:
        """The row translation's effect on each output of x, (n,)."""
        shift = self.transforms[number].get(info.common.name) if info.common is not None else None
        if not isinstance(shift, TranslationTransform) or shift.is_identity():
            return None
        return x.reshape(-1, x.shape[-1]) @ shift.vector.to(x)

    def _acts(self, info: TensorInfo) -> bool:
        """Whether the maps of a matrix's axes can be applied to vectors."""
        if len(info.axes) != 2 or info.stacked or info.offset:
            return False
        moving = [space for n in self.speaking for axis in info.axes for space in self._moving(n, axis).values()]
        return all(map(_acts_on_vectors, moving))

    def _less(self, info: TensorInfo, rows: int, outputs: int, inputs: int) -> bool:
        """Whether applying the maps to so many activations is cheaper than mixing the weight, forward and backward."""
        count, size = len(self.speaking), outputs * inputs
        out, into = (sum(self._width(n, axis) for n in self.speaking) for axis in info.axes)
        acting = rows * (4 * count * size + 6 * (inputs * into + outputs * out))
        return acting < size * (6 * rows + 10 * (into + out) + ELEMENTWISE * count)

    def _width(self, number: int, axis: Axis) -> int:
        """Number of coordinates that a donor's maps of an axis mix with one another."""
        moving = self._moving(number, axis)
        mixed = {
            name for name, transform in moving.items() if not all(e.monomial for e in transform.elements().values())
        }
        return sum(part.factors[-1] for part in axis.parts if part.space.name in mixed)


def _acts_on_vectors(transform: SpaceTransform) -> bool:
    """Experts' weights are stacked; an order that is being learned has no inverse."""
    elements = transform.elements().values()
    soft = any(isinstance(e, Monomial) and not isinstance(e.permutation, Permutation) for e in elements)
    return transform.space_kind != "experts" and not soft


def _tensors(elements: Any) -> Iterator[Tensor]:
    """All tensors inside of elements."""
    if isinstance(elements, Tensor):
        yield elements
    elif isinstance(elements, list | tuple):
        for element in elements:
            yield from _tensors(element)
    elif is_dataclass(elements):
        yield from _tensors([getattr(elements, field.name) for field in fields(elements)])


class Mixed(Tensor):
    """A lazy stand-in for a parameter of the model.

    Linear maps and tables use it without forming the tensor; every other function gets the tensor.
    """

    mixing: Mixing
    block: Block
    info: TensorInfo
    piece: int

    @staticmethod
    def standing_for(mixing: Mixing, block: Block, info: TensorInfo, piece: int, stored: Tensor) -> Mixed:
        dtype = torch.promote_types(stored.dtype, torch.float32)
        mixed = Tensor._make_wrapper_subclass(Mixed, stored.shape, dtype=dtype, device=mixing.parents.device)
        mixed.mixing, mixed.block, mixed.info, mixed.piece = mixing, block, info, piece
        return mixed

    def made(self) -> Tensor:
        tensor = self.mixing.made(self.block, self.info)
        return tensor[self.piece] if self.info.stacked else tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        result = None
        if func is functional.linear and isinstance(args[1], Mixed) and not isinstance(args[0], Mixed):
            x, mixed, bias = (*args, kwargs.get("bias"))[:3]
            bias = bias.made() if isinstance(bias, Mixed) else bias
            result = mixed.mixing.linear(mixed, x, bias)
        if func is functional.embedding and isinstance(args[1], Mixed) and kwargs.get("max_norm") is None:
            result = args[1].mixing.rows(args[1], args[0])
        if result is not None:
            return result
        args, kwargs = _pytree.tree_map_only(Mixed, Mixed.made, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was given a weight that has not been mixed")


_FACTS = {
    getattr(Tensor, name).__get__ for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda")
} | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
"""What a placeholder says of itself."""
