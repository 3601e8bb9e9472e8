"""Orthogonal maps (reflections included): value/output and rotary-free query/key dimensions, residual streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.errors import AlignmentError
from rotation_merge.linalg.polar import complement_of_ones, procrustes, random_orthogonal
from rotation_merge.symmetry.base import act_by_matrices
from rotation_merge.symmetry.matrix import MatrixElement
from rotation_merge.symmetry.tangent import Freedom, Steps, like, turned

ROUNDED = 1e-2
"""Largest accepted difference of an entry from an orthogonal map, several times the rounding of half precision."""


@dataclass(frozen=True, eq=False)
class Orthogonal(MatrixElement):
    """``aligned = matrix @ donor``; matrix is float64, shape (G, d, d). Primal and dual action agree."""

    kind = "orthogonal"

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Orthogonal:
        return cls(random_orthogonal(batch, size, generator))

    def inverse(self) -> Orthogonal:
        return Orthogonal(self.matrix.mT.contiguous())

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        return act_by_matrices(self.matrix, x, batch_dim, dim)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Orthogonal:
        """Rounded matrices are put back onto the group by their polar factor.

        Raises:
            AlignmentError: one is farther from it than rounding takes it.
        """
        matrix = tensors["matrix"]
        if matrix.dtype == torch.float64:
            return cls(matrix)
        nearest = procrustes(matrix)
        if not bool((nearest - matrix).abs().max() <= ROUNDED):
            raise AlignmentError("a map is not orthogonal")
        return cls(nearest)

    def tangent(self, freedom: Freedom) -> Steps:
        size = self.size - freedom.fixes_ones
        return {"turn": torch.zeros(self.batch, size, size)}

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> Orthogonal:
        """``exp(A)`` of a skew-symmetric A, in the complement of the all-ones vector where that is to stay."""
        turn = turned(steps["turn"], exact)
        if freedom.fixes_ones:
            turn = beside_ones(turn)
        moved = Orthogonal(turn @ like(self.matrix, turn, exact))
        if not exact:
            return moved
        return fixing_ones(moved) if freedom.fixes_ones else Orthogonal(procrustes(moved.matrix))


def beside_ones(inner: Tensor) -> Tensor:
    """Maps of the complement of the all-ones vector, (G, d - 1, d - 1), as maps that fix it, (G, d, d)."""
    size = inner.shape[-1] + 1
    basis = complement_of_ones(size).to(inner)
    return basis @ inner @ basis.T + 1.0 / size


def fixing_ones(element: Orthogonal) -> Orthogonal:
    """The nearest maps that fix the all-ones vector."""
    basis = complement_of_ones(element.size).to(element.matrix)
    return Orthogonal(beside_ones(procrustes(basis.T @ element.matrix @ basis)))
