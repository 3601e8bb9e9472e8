"""Low-rank changes: the two factors of a weight's change, and their axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Axis, TensorInfo

READS = {"read", "o", "out"}
"""Roles of the coordinates that a linear map reads, which stand last in [out, in]."""

WRITES = {"write", "q", "k", "v", "in", "gate"}

TABLES = ("vocabulary", "positions", "types")
"""First axes of embeddings, whose weights are stored [in, out], and of heads, which read what stands last."""


@dataclass(frozen=True)
class LowRank:
    """A change ``scale * b @ a`` of a weight [out, in]; of a layer that stores [in, out], its transpose.

    Attributes:
        a: (r, in); of stacked experts (e, r, in); of a convolution (r, in, kernel...).
        b: (out, r); (e, out, r); (out, r, 1...).
        embedding: whether the weight is an embedding's, [in, out] with in = tokens.
        magnitude: DoRA's m, (out,): lengths of the changed weight's rows; None: these are not set.
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0
    embedding: bool = False
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """Of one map."""
        return len(self.a)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs) of the change of one map."""
        return len(self.b), self.a[0].numel()

    def product(self) -> Tensor:
        """The change of one map, (out, in) or (out, in, kernel...)."""
        return (self.scale * (self.b.flatten(1) @ self.a.flatten(1))).reshape(len(self.b), *self.a.shape[1:])

    def add_to(self, weight: Tensor) -> None:
        """The change of one map's weight, in place: W + s B A, or with a magnitude m (W + s B A) / |W + s B A|.

        Args:
            weight: (out, in) or (out, in, kernel...); norms are those of its outputs.

        Source: the latter is DoRA, arXiv 2402.09353, eq. 5.
        """
        weight += self.product()
        if self.magnitude is not None:
            norms = torch.linalg.vector_norm(weight.flatten(1), dim=1)
            weight *= (self.magnitude.flatten() / norms).reshape(-1, *[1] * (weight.ndim - 1))

    def to(self, dtype: torch.dtype) -> LowRank:
        magnitude = None if self.magnitude is None else self.magnitude.to(dtype)
        return replace(self, a=self.a.to(dtype), b=self.b.to(dtype), magnitude=magnitude)

    def of_expert(self, number: int) -> LowRank:
        """The change of one of stacked experts."""
        return replace(self, a=self.a[number], b=self.b[number])

    def narrowed(self, outputs: bool, start: int, length: int) -> LowRank:
        """The change of some outputs, or of some inputs, of a map or of each of stacked experts."""
        if not outputs:
            return replace(self, a=self.a.narrow(-1, start, length))
        magnitude = None if self.magnitude is None else self.magnitude.narrow(0, start, length)
        return replace(self, b=self.b.narrow(-2, start, length), magnitude=magnitude)

    def flat(self) -> tuple[Tensor, Tensor]:
        """A (rank, inputs) and s B (outputs, rank) of one map, float64."""
        return self.a.double().flatten(1), self.scale * self.b.double().flatten(1)

    def of_rank(self, rank: int) -> LowRank:
        """The same change of one map with factors of a larger rank, filled with zeros."""
        more = rank - self.rank
        a = torch.cat([self.a, self.a.new_zeros(more, *self.a.shape[1:])])
        b = torch.cat([self.b, self.b.new_zeros(len(self.b), more, *self.b.shape[2:])], 1)
        return replace(self, a=a, b=b)


def transposed(info: TensorInfo) -> bool:
    """Whether a weight is stored [in, out]."""
    if len(info.axes) < 2:
        return False
    first, last = ({part.role for part in info.axes[dim].parts} for dim in (stacks(info), -1))
    table = info.axes[0].label in TABLES and not last & READS
    return bool(first & READS or ((table or last & WRITES) and not first & WRITES))


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


def dense(change: LowRank | Tensor, info: TensorInfo) -> Tensor:
    """The dense change of a weight."""
    if isinstance(change, Tensor):
        return change
    product = change.scale * (change.b @ change.a) if stacks(info) else change.product()
    return product.mT if transposed(info) else product
