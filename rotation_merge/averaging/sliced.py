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

NULL = 1e-12
"""Singular values below this share of the largest count as zero in a polar factor."""

BLOCK = 512
"""Rows of a product of a matrix with itself that are computed at once."""

TINY = torch.finfo(torch.float64).tiny
EPSILON = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class SlicedMatrix:
    """A matrix (outputs, inputs) whose rows are computed each time they are asked for; in one slice, any matrix.

    With several slices only matrices (inputs, inputs) are held: where ``C^T C = D^T D``, singular values and right
    vectors of D are those of C, and the left vectors are ``D V / s``.

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

    def svd(self) -> tuple[Callable[[int], SlicedMatrix], Tensor, Tensor]:
        """The thin singular value decomposition: the first columns of U as a function of their number, s and V^T.

        Of several slices, columns of U have a relative error of the rounding times ``s[0] / s``.
        """
        if len(self.parts) == 1:
            u, s, v = torch.linalg.svd(self.whole(), full_matrices=False)
            return lambda count: SlicedMatrix.of(u[:, :count].clone()), s, v
        _, s, v = torch.linalg.svd(self._square_factor())
        return lambda count: self @ (v[:count].mT / s[:count].clamp_min(TINY)), s, v

    def polar(self) -> SlicedMatrix:
        """The nearest matrix with orthonormal columns, or rows; of less than full rank, its partial isometry."""
        left_vectors, s, v = self.svd()
        rank = int((s > NULL * s[0]).sum())
        return left_vectors(rank) @ v[:rank]

    def _square_factor(self) -> Tensor:
        """C (inputs, inputs) with ``C^T C = D^T D``.

        The rounding of ``D^T D`` hides singular values below 1e-8 of the largest, so it is computed once more, after
        its first result has scaled D.

        Source: CholeskyQR2 (Yamamoto and others 2015), with eigenvalues instead of Cholesky factors.
        """
        values, vectors = torch.linalg.eigh(self.gram())
        scales = values.clamp_min(max(TINY, EPSILON * float(values[-1]))).sqrt()
        values, inner = torch.linalg.eigh((self @ (vectors / scales)).gram())
        return (values.clamp_min(0.0).sqrt()[:, None] * inner.mT * scales) @ vectors.mT


def combined(matrices: Sequence[SlicedMatrix], function: Callable[[list[Tensor]], Tensor]) -> SlicedMatrix:
    """A function of the rows of matrices in the same slices, such as their sum."""
    return SlicedMatrix(lambda part: function([matrix.rows(part) for matrix in matrices]), matrices[0].parts)
