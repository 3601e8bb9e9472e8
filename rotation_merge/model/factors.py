"""Low-rank changes: the two factors of a weight's change, and their axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rotation_merge.architecture.model import Axis, TensorInfo

OUTPUTS = {
    "stream": ("write",),
    "attention": ("q", "k", "v", "head", "kv_head"),
    "ffn": ("in", "gate"),
    "experts": ("in", "gate", "index"),
}
"""Roles of a linear map's outputs, by kind of space; other roles are those of inputs."""


@dataclass(frozen=True)
class LowRank:
    """A change ``scale * b @ a`` of a weight [out, in]; of a layer that stores [in, out], its transpose.

    Attributes:
        a: (r, in); of stacked experts (e, r, in); of a convolution (r, in, kernel...).
        b: (out, r); (e, out, r); (out, r, 1...).
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0


def transposed(info: TensorInfo) -> bool:
    """Whether a weight is stored [in, out]."""
    first, last = (info.axes[0], info.axes[-1]) if not info.stacked else (info.axes[1], info.axes[-1])
    return len(info.axes) <= 3 and (_gives(last) or (_reads(first) and not _gives(first)))


def _gives(axis: Axis) -> bool:
    return any(part.role in OUTPUTS.get(part.space.kind, ()) for part in axis.parts)


def _reads(axis: Axis) -> bool:
    return any(part.role not in OUTPUTS.get(part.space.kind, ()) for part in axis.parts)


def stacks(info: TensorInfo) -> int:
    """Leading axes that count maps instead of belonging to one: 1 for experts, stored apart or in one tensor."""
    counts = len(info.axes) == 3 and [part.role for part in info.axes[0].parts] == ["index"]
    return int(counts)


def factor_infos(info: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
    """The labelled axes of a weight's factors `a` and `b`."""
    rank, lead, axes = Axis(), info.axes[: stacks(info)], info.axes[stacks(info) :]
    if len(axes) > 2:
        return replace(info, axes=(rank, *axes[1:])), replace(info, axes=(axes[0], *[rank] * (len(axes) - 1)))
    reads, gives = (axes[0], axes[1]) if transposed(info) else (axes[1], axes[0])
    return replace(info, axes=(*lead, rank, reads)), replace(info, axes=(*lead, gives, rank))


def output_axis(info: TensorInfo) -> tuple[int, Axis]:
    """The dimension of a weight's outputs, and its axis."""
    lead = stacks(info)
    dim = lead + 1 if transposed(info) else lead
    return dim, info.axes[dim]


def dense(change: LowRank | Tensor, info: TensorInfo) -> Tensor:
    """The dense change of a weight."""
    if isinstance(change, Tensor):
        return change
    a, b = change.a, change.b
    if a.ndim > 2 and not stacks(info):
        return change.scale * (b.flatten(1) @ a.flatten(1)).reshape(b.shape[0], *a.shape[1:])
    product = change.scale * (b @ a)
    return product.mT if transposed(info) else product
