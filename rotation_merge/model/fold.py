r"""Folding and centring: making room for rotations of the residual stream without changing a model's outputs.

A norm with gain g computes ``W (g * x_hat + b)``. Moving g into the maps that read it, ``W' = W diag(g)``, leaves a
gain of one, and a stream that may be turned. A shift b goes into the readers' biases, or, where they have none, becomes
``b / g``. A layer scale goes into the map before it. With LayerNorm every writer to the stream is centred, because the
norm removes the mean of its output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, Norm, Scale, TensorInfo, stem_of
from rotation_merge.errors import AlignmentError
from rotation_merge.model.apply import Get, at_least_float32, blockwise, dims_of, read_tensor, reader, times_gain
from rotation_merge.model.tensors import TensorSource, as_tensors

LEAST_GAIN = 1e-6
"""Gains below are not divided by."""
LEAST_TRUE = 0.1
"""Nor is a gain folded if rounding, times the norm's shift, would grow to this share of the norm's output."""
ROUNDINGS = 4.0
"""A shift divided by its gain may cost so many times the rounding of any weight in its storage type."""
LEAST_ERROR = 1e-4
"""... or this share of the norm's output, whichever is more."""
UNROTATED = "use 'residual: permutation' instead of rotation"


class Fold:
    """Folds the norms of some streams and centres what is written to them, tensor by tensor.

    Attributes:
        streams: that are folded.
        centred: those among them whose norms subtract the mean.
        dtype: that the results are going to be rounded to; None: their own.
    """

    def __init__(self, architecture: Architecture, streams: Iterable[str], dtype: torch.dtype | None = None) -> None:
        self.streams, self.dtype = tuple(streams), dtype
        self.centred = tuple(filter(architecture.layer_normed, self.streams))

    def touches(self, block: Block, info: TensorInfo) -> bool:
        """Whether folding may change a tensor of a block."""
        return bool(self._norms(block, info) or self._scales(block, info) or dims_of(info, self.centred, "write"))

    def tensor(self, block: Block, info: TensorInfo, get: Get) -> Tensor:
        """One tensor of the folded model.

        Args:
            get: gives the block's tensors as they are stored.

        Returns:
            The stored tensor itself where nothing changes, else a new one in float32 at least.

        Raises:
            AlignmentError: a gain is too small to be divided by.
        """
        tensor = required(get, info.key)
        for norm in self._norms(block, info):
            tensor = self._with_norm(block, info, tensor, norm, get)
        for scale in self._scales(block, info):
            if info.key == scale.gain:
                tensor = torch.ones_like(tensor)
            else:
                tensor = times_gain(at_least_float32(tensor), info, required(get, scale.gain), scale.stream, "write")
        for dim in dims_of(info, self.centred, "write"):
            tensor = at_least_float32(tensor)
            tensor = tensor - tensor.mean(dim, keepdim=True)
        return tensor

    def unfold_change(self, block: Block, info: TensorInfo, change: Tensor, get: Get, weights: Get) -> Tensor:
        """The change of a stored tensor that has the same effect as `change` on the folded model.

        Weights behind a norm are divided by its gain, those before a layer scale by the scale; from a bias, the
        changed weight times the norm's shift is subtracted. The reverse of `tensor` for changes, except where that
        centres.

        Args:
            info: which tensor; of a low-rank factor, with the axes that it has.
            change: of the folded model.
            get: gives the stored model's tensors by key.
            weights: gives the changes of weights beside a bias, as they are to be stored.

        Raises:
            AlignmentError: a gain is so near zero that the result would be off.
        """
        for norm in self._norms(block, info):
            if info.key == norm.shift and not _absorbs_shift(block, norm):
                change = change * _gain(norm, get).to(change)
            elif not _reads(info.key, norm):
                continue
            elif not info.key.endswith(".bias"):
                gain, shift = _gain(norm, get).to(change.dtype), get(norm.shift or "")
                change = times_gain(change, info, _reciprocal(block, norm.gain, gain, shift), norm.stream)
            else:
                constant = _constant(block, info, norm, get, weights, change.ndim)
                change = change if constant is None else change - constant
        for scale in self._scales(block, info):
            if info.key != scale.gain:
                factor = _reciprocal(block, scale.gain, at_least_float32(required(get, scale.gain)))
                change = times_gain(change, info, factor, scale.stream, "write")
        return change

    def _norms(self, block: Block, info: TensorInfo) -> list[Norm]:
        """Folded norms that a tensor is the gain or the shift of, or that it reads."""
        norms = (norm for norm in block.norms if norm.stream in self.streams)
        return [norm for norm in norms if info.key in (norm.gain, norm.shift) or _reads(info.key, norm)]

    def _scales(self, block: Block, info: TensorInfo) -> list[Scale]:
        """Folded layer scales that a tensor holds, or that stand behind it."""
        return [s for s in block.scales if s.stream in self.streams and info.key in (s.gain, *s.writes)]

    def _with_norm(self, block: Block, info: TensorInfo, tensor: Tensor, norm: Norm, get: Get) -> Tensor:
        if info.key == norm.gain:
            return torch.full_like(tensor, 1.0 - norm.offset)
        if info.key == norm.shift:
            absorbed = _absorbs_shift(block, norm)
            return torch.zeros_like(tensor) if absorbed else _divided(block, tensor, norm, get, self.dtype)
        if info.key.endswith(".bias"):
            constant = _constant(block, info, norm, get, get, tensor.ndim)
            return tensor if constant is None else at_least_float32(tensor) + constant
        return times_gain(at_least_float32(tensor), info, _gain(norm, get), norm.stream)


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
    return blockwise(architecture, tensors, lambda block, info: fold.tensor(block, info, reader(block, tensors)))


def unfolded_gain(architecture: Architecture, source: TensorSource, streams: Collection[str]) -> str | None:
    """The name of a norm's gain in these streams that is not one; None if all are folded."""
    for block in architecture.blocks:
        for norm in block.norms:
            info = block.tensor(norm.gain) if norm.stream in streams else None
            gain = None if info is None else read_tensor(info, source)
            if info is not None and gain is not None and bool((gain + norm.offset != 1).any()):
                return info.name
    return None


def weight_key(bias: str) -> str:
    """The key of the weight beside a bias."""
    return bias.removesuffix("bias") + "weight"


def required(get: Get, key: str) -> Tensor:
    """A tensor of a block that the model must have.

    Raises:
        KeyError: it has none.
    """
    tensor = get(key)
    if tensor is None:
        raise KeyError(key)
    return tensor


def _gain(norm: Norm, get: Get) -> Tensor:
    return at_least_float32(required(get, norm.gain)) + norm.offset


def _reads(key: str, norm: Norm) -> bool:
    """Whether a tensor is a reader of the norm, or the bias of one."""
    return key in norm.reads or stem_of(key) in norm.reads


def _absorbs_shift(block: Block, norm: Norm) -> bool:
    """Whether every map that reads the norm has a bias that its shift can go into."""
    weights = [info for info in block.tensors if _reads(info.key, norm) and not info.key.endswith(".bias")]
    stems = [info.key.removesuffix("weight") for info in weights]
    return all(stem.endswith(".") and block.tensor(f"{stem}bias") is not None for stem in stems)


def _constant(block: Block, bias: TensorInfo, norm: Norm, get: Get, weights: Get, ndim: int) -> Tensor | None:
    """W b, of a bias's `ndim` dimensions: what it takes over from the norm's shift b; None if it does not."""
    shift, info = get(norm.shift or ""), block.tensor(weight_key(bias.key))
    if shift is None or info is None or not _absorbs_shift(block, norm):
        return None
    weight = at_least_float32(required(weights, info.key))
    added = times_gain(weight, info, shift, norm.stream).sum(dims_of(info, (norm.stream,)))
    return added.flatten(ndim).sum(-1) if added.ndim > ndim else added


def _reciprocal(block: Block, key: str, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    """One over a gain; refused where an entry is too near zero, itself or beside the norm's shift."""
    wrong = gain.abs() < LEAST_GAIN
    if shift is not None:
        error = shift.abs().to(gain.dtype) / gain.abs().clamp_min(LEAST_GAIN) * torch.finfo(torch.float32).eps
        wrong = wrong | (error > LEAST_TRUE)
    if bool(wrong.any()):
        problem = f"entry {int(wrong.int().argmax())} of the gain '{key}' is too near zero to divide by"
        raise AlignmentError(problem, where=block.name, remedy=UNROTATED)
    return 1 / gain


def _divided(block: Block, shift: Tensor, norm: Norm, get: Get, dtype: torch.dtype | None) -> Tensor:
    """The shift divided by the gain, for readers without a bias; refused if rounding it cost too much."""
    # It stands beside normalised activations, whose root mean square is one, and once a rotation has mixed the
    # coordinates, the largest of its entries sets the rounding error of all.
    gain = _gain(norm, get).to(at_least_float32(shift))
    divided = torch.where((gain == 0) & (shift == 0), torch.zeros_like(gain), at_least_float32(shift) / gain)
    stored = max((shift.dtype, dtype or shift.dtype), key=lambda kind: torch.finfo(kind).eps)
    rounding = torch.finfo(stored).eps
    error = rounding * float(divided.double().square().mean().sqrt())
    if error > max(ROUNDINGS * rounding, LEAST_ERROR):
        problem = f"the gain '{norm.gain}' is too small to be folded (down to {float(gain.abs().min()):.2g})"
        words = f"in {str(stored).removeprefix('torch.')} the shift divided by it is off by {error:.2g} of the output"
        raise AlignmentError(f"{problem}: {words}", where=block.name, remedy=f"{UNROTATED}, or a dtype of more digits")
    return divided
