"""Orthogonal maps (reflections included): value/output and rotary-free query/key dimensions, residual streams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import GroupElement, act_by_matrices
from rotation_merge.linalg.polar import procrustes, random_orthogonal


@dataclass(frozen=True, eq=False)
class Orthogonal(GroupElement):
    """``aligned = matrix @ donor``; matrix is float64, shape (G, d, d). Primal and dual action agree."""

    matrix: Tensor

    kind = "orthogonal"

    @property
    def batch(self) -> int:
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    @classmethod
    def identity(cls, batch: int, size: int) -> Orthogonal:
        return cls(torch.eye(size, dtype=torch.float64).repeat(batch, 1, 1))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Orthogonal:
        return cls(random_orthogonal(batch, size, generator))

    def inverse(self) -> Orthogonal:
        return Orthogonal(self.matrix.mT)

    def compose(self, first: Orthogonal) -> Orthogonal:
        return Orthogonal(self.matrix @ first.matrix)

    def select(self, index: Tensor) -> Orthogonal:
        return Orthogonal(self.matrix[index])

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        return act_by_matrices(self.matrix, x, batch_dim, dim)

    def distance(self) -> Tensor:
        """Frobenius distance from the identity over that of the farthest map: 0 at I, 1 at -I."""
        eye = torch.eye(self.size, dtype=self.matrix.dtype, device=self.matrix.device)
        return (self.matrix - eye).flatten(1).norm(dim=1).double() / (2 * self.size**0.5)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Orthogonal:
        """Rounded matrices are put back onto the group by their polar factor."""
        matrix = tensors["matrix"]
        return cls(matrix if matrix.dtype == torch.float64 else procrustes(matrix))
