"""Invertible maps GL(d): what a value/output pair, or a rotary-free query/key pair, admits at most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import act_by_matrices
from rotation_merge.groups.matrix import MatrixElement
from rotation_merge.linalg.polar import random_orthogonal


@dataclass(frozen=True, eq=False)
class Invertible(MatrixElement):
    """``aligned = matrix @ donor``, on the dual side ``matrix^-T @ donor``; float64, shape (G, d, d)."""

    kind = "invertible"

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Invertible:
        """Singular values between about 1/2 and 2."""
        left, right = random_orthogonal(batch, size, generator), random_orthogonal(batch, size, generator)
        stretch = (torch.rand(batch, 1, size, dtype=torch.float64, generator=generator) * 1.4 - 0.7).exp()
        return cls(left * stretch @ right)

    def inverse(self) -> Invertible:
        return Invertible(torch.linalg.inv(self.matrix))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        matrix = torch.linalg.inv(self.matrix).mT if dual else self.matrix
        return act_by_matrices(matrix, x, batch_dim, dim)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Invertible:
        return cls(tensors["matrix"].double())
