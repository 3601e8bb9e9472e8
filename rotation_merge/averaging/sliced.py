"""Tall matrices that are computed in slices of their rows, such as the change of a head of a large vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import EllipsisType

import torch
from torch import Tensor

Part = slice | EllipsisType
"""Some rows of a tensor, or all."""

ZERO = 1e-7
"""Singular values below this share of the largest count as zero: in a Gram they are no more than its rounding."""

BLOCK = 512
"""Rows of a product of a matrix with itself that are computed at once."""


@dataclass(frozen=True)
class SlicedMatrix:
    """A matrix (outputs, inputs) whose rows are computed each time they are asked for; in one slice, any matrix.

    With several slices only matrices (inputs, inputs) are held.

    Attributes:
        rows: the rows of a slice, float64.
        parts: the slices; of several each has at least one row.
        error: bound on the largest singular value that rounding gave the matrix.
    """

    rows: Callable[[Part], Tensor]
    parts: Sequence[Part] = (...,)
    error: float = 0.0

    @classmethod
    def of(cls, matrix: Tensor, error: float = 0.0) -> SlicedMatrix:
        return cls(lambda part: matrix[part], error=error)

    def whole(self) -> Tensor:
        if len(self.parts) == 1:
            return self.rows(self.parts[0])
        return torch.cat([self.rows(part) for part in self.parts])

    def __matmul__(self, right: Tensor) -> SlicedMatrix:
        """The product; in one slice it is computed now."""
        if len(self.parts) == 1:
            return SlicedMatrix.of(self.whole() @ right)
        return SlicedMatrix(lambda part: self.rows(part) @ right, self.parts)

    def __mul__(self, columns: Tensor | float) -> SlicedMatrix:
        """Each column times a number."""
        return SlicedMatrix(lambda part: self.rows(part) * columns, self.parts)

    def scaled(self, factor: float) -> SlicedMatrix:
        """The matrix times a number, in place if it is held."""
        if len(self.parts) == 1:
            return SlicedMatrix.of(self.whole().mul_(factor), factor * self.error)
        return replace(self * factor, error=factor * self.error)

    @cached_property
    def norm(self) -> float:
        """The Frobenius norm; its slices are computed once."""
        return math.hypot(*(float(self.rows(part).norm()) for part in self.parts))

    def to(self, dtype: torch.dtype) -> SlicedMatrix:
        """Its rows in another type than float64."""
        return SlicedMatrix(lambda part: self.rows(part).to(dtype), self.parts)

    def gram(self) -> Tensor:
        """``D^T D``, of which what lies above the diagonal is copied."""
        total = torch.zeros(())
        for number, rows in enumerate(map(self.rows, self.parts)):
            total = total if number else rows.new_zeros(rows.shape[1], rows.shape[1])
            for i in range(0, len(total), BLOCK):
                total[i : i + BLOCK, : i + BLOCK].addmm_(rows[:, i : i + BLOCK].mT, rows[:, : i + BLOCK])
        for i in range(BLOCK, len(total), BLOCK):
            total[:i, i : i + BLOCK] = total[i : i + BLOCK, :i].mT
        return total

    def svd(self) -> Svd:
        """The thin singular value decomposition.

        One side of it are eigenvectors of the smaller of ``D^T D`` and ``D D^T``, which takes less than half as long as
        decomposing D. The other side has a relative error of the rounding times ``(s[0] / s)^2``.
        """
        matrix = self if len(self.parts) > 1 else SlicedMatrix.of(self.whole())
        wide = len(self.parts) == 1 and matrix.whole().shape[0] < matrix.whole().shape[1]
        squares, vectors = torch.linalg.eigh((SlicedMatrix.of(matrix.whole().mT) if wide else matrix).gram())
        values = squares.flip(0).clamp_min(0.0).sqrt()
        return Svd(matrix, torch.where(values > ZERO * values[0], values, 0.0), vectors.flip(1), wide)


@dataclass(frozen=True)
class Svd:
    """``D = U diag(s) V^T``, in falling order.

    Attributes:
        matrix: D.
        values: s, shape (smaller side,); zero from `rank` on.
        vectors: U where D is wide, else V; (smaller side, smaller side).
    """

    matrix: SlicedMatrix
    values: Tensor
    vectors: Tensor
    wide: bool

    @cached_property
    def rank(self) -> int:
        return int(self.values.count_nonzero())

    def left(self, count: int) -> SlicedMatrix:
        """The first columns of U, at most `rank`."""
        vectors = self.vectors[:, :count]
        return SlicedMatrix.of(vectors) if self.wide else self.matrix @ (vectors / self.values[:count])

    def right(self, count: int) -> Tensor:
        """The first rows of V^T, at most `rank`."""
        vectors = self.vectors[:, :count]
        return (vectors / self.values[:count]).mT @ self.matrix.whole() if self.wide else vectors.mT

    def isometry(self, count: int | None = None) -> SlicedMatrix:
        """``U V^T`` of the first singular vectors, at most `rank`; of all, the polar factor."""
        count = self.rank if count is None else count
        vectors = self.vectors[:, :count]
        inverse_root = (vectors / self.values[:count]) @ vectors.mT
        return SlicedMatrix.of(inverse_root @ self.matrix.whole()) if self.wide else self.matrix @ inverse_root


def combined(matrices: Sequence[SlicedMatrix], function: Callable[[list[Tensor]], Tensor]) -> SlicedMatrix:
    """A function of the rows of matrices in the same slices, such as their sum."""
    return SlicedMatrix(lambda part: function([matrix.rows(part) for matrix in matrices]), matrices[0].parts)
