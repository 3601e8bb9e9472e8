"""Orthogonal maps (reflections included): value/output and rotary-free query/key dimensions, residual streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import act_by_matrices
from rotation_merge.groups.matrix import MatrixElement
from rotation_merge.linalg.polar import procrustes, random_orthogonal


@dataclass(frozen=True, eq=False)
class Orthogonal(MatrixElement):
    """``aligned = matrix @ donor``; matrix is float64, shape (G, d, d). Primal and dual action agree."""

    kind = "orthogonal"

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Orthogonal:
        return cls(random_orthogonal(batch, size, generator))

    def inverse(self) -> Orthogonal:
        return Orthogonal(self.matrix.mT)

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        return act_by_matrices(self.matrix, x, batch_dim, dim)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Orthogonal:
        """Rounded matrices are put back onto the group by their polar factor."""
        matrix = tensors["matrix"]
        return cls(matrix if matrix.dtype == torch.float64 else procrustes(matrix))
