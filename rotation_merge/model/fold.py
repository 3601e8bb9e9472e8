r"""Folding and centring: making room for rotations of the residual stream without changing a model's outputs.

A norm with gain g computes ``W (g * x_hat + b)``. Moving g into the maps that read it, ``W' = W diag(g)``, leaves a
gain of one, and a stream that may be turned. A shift b goes into the readers' biases, or, where they have none, becomes
``b / g``. A layer scale goes into the map before it. With LayerNorm every writer to the stream is centred, because the
norm removes the mean of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, Norm, TensorInfo, stem_of
from rotation_merge.errors import AlignmentError
from rotation_merge.model.apply import at_least_float32, join_axis, placed, split_axis
from rotation_merge.model.blocks import blockwise, read_tensor, reader
from rotation_merge.model.tensors import TensorSource, as_tensors

Get = Callable[[str], Tensor | None]
"""Gives a tensor of the block by key, or None where the model has none."""


def fold_inputs(block: Block, info: TensorInfo, streams: Iterable[str]) -> list[str]:
    """Keys of the block's tensors that the folded `info` is computed from, itself included."""
    needed: list[str] = []

    def get(key: str) -> Tensor | None:
        if block.tensor(key) is not None and key not in needed:
            needed.append(key)
        return None

    get(info.key)
    for norm in _norms(block, streams):
        if info.key in (norm.gain, norm.shift) or _reads(info.key, norm):
            get(norm.gain)
            if norm.shift is not None:
                get(norm.shift)
            if info.key.endswith(".bias"):
                get(weight_key(info.key))
    for scale in block.scales:
        if scale.stream in streams and info.key in (scale.gain, *scale.writes):
            get(scale.gain)
    return needed


def fold_tensor(
    block: Block,
    info: TensorInfo,
    get: Get,
    streams: Iterable[str],
    centred: Iterable[str],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One tensor of the folded model.

    Args:
        block: the block it stands in.
        info: which tensor.
        get: the block's tensors as they are stored.
        streams: streams that are folded.
        centred: those among them whose norms subtract the mean.
        dtype: that the result is going to be rounded to, if another than its own.

    Returns:
        The stored tensor itself where nothing changes, else a new one in float32 at least.

    Raises:
        AlignmentError: a gain of zero would have to be divided by, or one so small that rounding would show.
    """
    tensor = get(info.key)
    if tensor is None:
        raise KeyError(info.key)
    for norm in _norms(block, streams):
        tensor = _fold_norm(block, info, tensor, norm, get, dtype)
    for scale in block.scales:
        if scale.stream in streams:
            if info.key == scale.gain:
                tensor = torch.ones_like(tensor)
            elif info.key in scale.writes:
                tensor = times_gain(at_least_float32(tensor), info, _required(get, scale.gain), scale.stream, "write")
    for dim, axis in enumerate(info.axes):
        if any(part.role == "write" and part.space.name in centred for part in axis.parts):
            tensor = at_least_float32(tensor)
            tensor = tensor - tensor.mean(dim, keepdim=True)
    return tensor


def unfolded_gain(architecture: Architecture, source: TensorSource, streams: Collection[str]) -> str | None:
    """The name of a norm's gain in these streams that is not one; None if all are folded."""
    for block in architecture.blocks:
        for norm in _norms(block, streams):
            info = block.tensor(norm.gain)
            gain = None if info is None else read_tensor(info, source)
            if info is not None and gain is not None and bool((gain + norm.offset != 1).any()):
                return info.name
    return None


def _fold_norm(
    block: Block, info: TensorInfo, tensor: Tensor, norm: Norm, get: Get, dtype: torch.dtype | None
) -> Tensor:
    if info.key == norm.gain:
        return torch.full_like(tensor, 1.0 - norm.offset)
    shift = get(norm.shift) if norm.shift is not None and block.tensor(norm.shift) is not None else None
    if info.key == norm.shift:
        return torch.zeros_like(tensor) if _absorbs_shift(block, norm) else _divided(block, tensor, norm, get, dtype)
    if not _reads(info.key, norm):
        return tensor
    if info.key.endswith(".bias"):
        if shift is None or not _absorbs_shift(block, norm):
            return tensor
        weight_info = block.tensor(weight_key(info.key))
        if weight_info is None:
            return tensor
        return at_least_float32(tensor) + _constant(
            at_least_float32(_required(get, weight_info.key)), weight_info, shift, norm, tensor.ndim
        )
    return times_gain(at_least_float32(tensor), info, _gain(norm, get), norm.stream)


def unfold_change(
    block: Block, info: TensorInfo, change: Tensor, get: Get, streams: Iterable[str], weight: Tensor | None
) -> Tensor:
    """The change of a stored tensor that has the same effect as `change` on the folded model.

    Weights behind a norm are divided by its gain, those before a layer scale by the scale; from a bias, the changed
    weight times the norm's shift is subtracted. The reverse of `fold_tensor` for changes, except where that centres.

    Args:
        block, info: which tensor; of a factor (see `factors.py`), with the axes that it has.
        change: of the folded model.
        get: the stored model's tensors by key.
        streams: streams that are folded.
        weight: of a bias: the change of the weight beside it, as it is to be stored.

    Raises:
        AlignmentError: a gain is so near zero that the result would be off.
    """
    for norm in _norms(block, streams):
        if info.key == norm.shift and not _absorbs_shift(block, norm):
            change = change * _gain(norm, get).to(change)
        if not _reads(info.key, norm):
            continue
        if not info.key.endswith(".bias"):
            change = times_gain(change, info, _reciprocal(block, norm, get, change.dtype), norm.stream)
            continue
        weight_info = block.tensor(weight_key(info.key))
        if weight is not None and weight_info is not None and norm.shift is not None and _absorbs_shift(block, norm):
            shift = get(norm.shift) if block.tensor(norm.shift) is not None else None
            if shift is not None:
                change = change - _constant(at_least_float32(weight), weight_info, shift, norm, change.ndim)
    for scale in block.scales:
        if scale.stream in streams and info.key in scale.writes:
            factor = _inverse(block, scale.gain, at_least_float32(_required(get, scale.gain)))
            change = times_gain(change, info, factor, scale.stream, "write")
    return change


LEAST_GAIN = 1e-6
"""Gains below are not divided by."""
LEAST_TRUE = 0.1
"""Nor is a gain folded if rounding, times the norm's shift, would grow to this share of the norm's output."""


def _reciprocal(block: Block, norm: Norm, get: Get, dtype: torch.dtype) -> Tensor:
    """One over the gain of a norm."""
    gain = _gain(norm, get).to(dtype)
    shift = get(norm.shift) if norm.shift is not None and block.tensor(norm.shift) is not None else None
    if shift is not None:
        error = shift.abs().to(dtype) / gain.abs().clamp_min(LEAST_GAIN) * torch.finfo(torch.float32).eps
        if bool((error > LEAST_TRUE).any()):
            raise _near_zero(block, norm.gain, int(error.argmax()))
    return _inverse(block, norm.gain, gain)


def _inverse(block: Block, key: str, gain: Tensor) -> Tensor:
    if bool((gain.abs() < LEAST_GAIN).any()):
        raise _near_zero(block, key, int(gain.abs().argmin()))
    return 1 / gain


def _near_zero(block: Block, key: str, entry: int) -> AlignmentError:
    return AlignmentError(
        f"entry {entry} of the gain '{key}' is too near zero to divide by",
        where=block.name,
        remedy="use 'residual: permutation' instead of rotation",
    )


def _constant(weight: Tensor, info: TensorInfo, shift: Tensor, norm: Norm, ndim: int) -> Tensor:
    """W b, a weight applied to a norm's shift, of the bias's `ndim` dimensions."""
    added = times_gain(weight, info, shift, norm.stream).sum(_dim(info, norm.stream))
    return added.flatten(ndim).sum(-1) if added.ndim > ndim else added


def _norms(block: Block, streams: Iterable[str]) -> list[Norm]:
    return [norm for norm in block.norms if norm.stream in streams]


def _reads(key: str, norm: Norm) -> bool:
    """Whether a tensor is a reader of the norm, or the bias of one."""
    return key in norm.reads or stem_of(key) in norm.reads


def _absorbs_shift(block: Block, norm: Norm) -> bool:
    """Whether every map that reads the norm has a bias that its shift can go into."""
    weights = [info for info in block.tensors if _reads(info.key, norm) and not info.key.endswith(".bias")]
    return all(
        info.key.endswith(".weight") and block.tensor(info.key.removesuffix("weight") + "bias") is not None
        for info in weights
    )


ROUNDINGS = 4.0
"""A shift divided by its gain may cost so many times the rounding of any weight in its storage type."""
LEAST_ERROR = 1e-4
"""... or this share of the norm's output, whichever is more."""


def _divided(block: Block, shift: Tensor, norm: Norm, get: Get, dtype: torch.dtype | None) -> Tensor:
    """The shift divided by the gain, for readers without a bias.

    Beside normalised activations, whose root mean square is one, it is stored in its type: once a rotation has mixed
    the coordinates, the largest of its entries sets the rounding error of all.

    Raises:
        AlignmentError: that error would be more than a few roundings.
    """
    gain = _gain(norm, get).to(at_least_float32(shift))
    if bool(((gain == 0) & (shift != 0)).any()):
        raise AlignmentError(
            f"the gain '{norm.gain}' has zeros and cannot be folded",
            where=block.name,
            remedy="use 'residual: permutation' instead of rotation",
        )
    divided = torch.where(gain == 0, torch.zeros_like(gain), at_least_float32(shift) / gain)
    size = float(divided.double().square().mean().sqrt())
    stored = max((shift.dtype, dtype or shift.dtype), key=lambda kind: torch.finfo(kind).eps)
    rounding = torch.finfo(stored).eps
    if size * rounding > max(ROUNDINGS * rounding, LEAST_ERROR):
        raise AlignmentError(
            f"the gain '{norm.gain}' is too small to be folded (down to {float(gain.abs().min()):.2g}): in "
            f"{str(stored).removeprefix('torch.')} the shift divided by it is off by {size * rounding:.2g} of the "
            "norm's output",
            where=block.name,
            remedy="use 'residual: permutation' instead of rotation, or a dtype of more digits",
        )
    return divided


def _gain(norm: Norm, get: Get) -> Tensor:
    return at_least_float32(_required(get, norm.gain)) + norm.offset


def _required(get: Get, key: str) -> Tensor:
    tensor = get(key)
    if tensor is None:
        raise KeyError(key)
    return tensor


def weight_key(bias: str) -> str:
    return bias.removesuffix("bias") + "weight"


def _dim(info: TensorInfo, stream: str, role: str = "read") -> int:
    for dim, axis in enumerate(info.axes):
        if any(part.space.name == stream and part.role == role for part in axis.parts):
            return dim
    raise KeyError(f"{info.key} does not {role} {stream}")


def times_gain(tensor: Tensor, info: TensorInfo, gain: Tensor, stream: str, role: str = "read") -> Tensor:
    """Times the gain along the axis of a stream, which may hold it several times over; a factor may lack that axis."""
    if not any(part.space.name == stream and part.role == role for axis in info.axes for part in axis.parts):
        return tensor
    dim = _dim(info, stream, role)
    axis = info.axes[dim]
    pieces = split_axis(tensor, dim, axis)
    for position, piece in enumerate(axis.pieces):
        for part, start in placed(piece, dim):
            if part.space.name == stream and part.role == role:
                pieces[position] = pieces[position] * gain.to(tensor).reshape(
                    -1, *[1] * (pieces[position].ndim - start - 1)
                )
    return join_axis(pieces, dim, axis)


class Fold:
    """The streams to fold and to centre; folds single tensors and blocks.

    Args:
        dtype: that the results are going to be rounded to, if another than their own.
    """

    def __init__(self, architecture: Architecture, streams: Iterable[str], dtype: torch.dtype | None = None) -> None:
        self.streams, self.dtype = tuple(streams), dtype
        self.centred = tuple(filter(architecture.layer_normed, self.streams))

    def touches(self, block: Block, info: TensorInfo) -> bool:
        """Whether folding may change a tensor of a block."""
        written = any(p.role == "write" and p.space.name in self.centred for a in info.axes for p in a.parts)
        gains = any(info.key in (n.gain, n.shift) for n in _norms(block, self.streams))
        gains = gains or any(info.key in (s.gain, *s.writes) for s in block.scales if s.stream in self.streams)
        return written or gains or self.inputs(block, info) != [info.key]

    def on_inputs(self, block: Block, info: TensorInfo, get: Get) -> dict[str, Tensor] | None:
        """Factors (in,) that folding multiplies a map's last axis with, by norm; None if folding does more."""
        scales = any(info.key in s.writes for s in block.scales if s.stream in self.streams)
        if scales or any(p.role == "write" and p.space.name in self.centred for a in info.axes for p in a.parts):
            return None
        read = [norm for norm in _norms(block, self.streams) if _reads(info.key, norm)]
        last = replace(info, axes=info.axes[-1:])
        ones_like_axis = torch.ones((), dtype=torch.float64).expand(info.axes[-1].size or 0)
        return {norm.gain: times_gain(ones_like_axis, last, _gain(norm, get), norm.stream) for norm in read}

    def inputs(self, block: Block, info: TensorInfo) -> list[str]:
        """Keys of the tensors that a folded one is computed from, itself included."""
        return fold_inputs(block, info, self.streams)

    def tensor(self, block: Block, info: TensorInfo, get: Get) -> Tensor:
        """See `fold_tensor`."""
        return fold_tensor(block, info, get, self.streams, self.centred, self.dtype)

    def block(self, block: Block, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors of a block, folded."""
        return {i.key: self.tensor(block, i, tensors.get) for i in block.tensors if i.key in tensors}


def folded_tensors(
    architecture: Architecture, source: TensorSource, streams: Collection[str], dtype: torch.dtype | None = None
) -> TensorSource:
    """Tensors with folded norms and centred writers, in float32 at least where folding changes them.

    Args:
        streams: that are folded; without any the source itself is returned.
        dtype: that the results are going to be rounded to, if another than their own.
    """
    if not streams:
        return source
    fold, tensors = Fold(architecture, streams, dtype), as_tensors(source)

    def compute(block: Block, info: TensorInfo) -> Tensor:
        return fold.tensor(block, info, reader(block, tensors))

    return blockwise(architecture, tensors, compute)
