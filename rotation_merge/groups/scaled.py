"""O(d) with one scale for each head: value/output and rotary-free query/key dimensions with `rescale`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import GroupElement, act_by_matrices
from rotation_merge.groups.orthogonal import Orthogonal
from rotation_merge.linalg.polar import random_orthogonal


@dataclass(frozen=True, eq=False)
class Scaled(GroupElement):
    """A map of O(d) times one positive (or signed) factor for each head: R and a in ``aligned = a R donor``."""

    matrix: Tensor
    factor: Tensor

    kind = "scaled_orthogonal"

    @property
    def batch(self) -> int:
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    @classmethod
    def identity(cls, batch: int, size: int) -> Scaled:
        matrix = torch.eye(size, dtype=torch.float64).repeat(batch, 1, 1)
        return cls(matrix, torch.ones(batch, dtype=torch.float64))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Scaled:
        factor = (0.5 * torch.randn(batch, dtype=torch.float64, generator=generator)).exp()
        return cls(random_orthogonal(batch, size, generator), factor)

    def inverse(self) -> Scaled:
        return Scaled(self.matrix.mT, 1 / self.factor)

    def compose(self, first: Scaled) -> Scaled:
        return Scaled(self.matrix @ first.matrix, self.factor * first.factor)

    def select(self, index: Tensor) -> Scaled:
        return Scaled(self.matrix[index], self.factor[index])

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        factor = 1 / self.factor if dual else self.factor
        return act_by_matrices(self.matrix * factor[:, None, None], x, batch_dim, dim)

    def distance(self) -> Tensor:
        """Distance of the orthogonal map as in `Orthogonal`, plus |log factor|."""
        eye = torch.eye(self.size, dtype=self.matrix.dtype, device=self.matrix.device)
        turn = (self.matrix - eye).flatten(1).norm(dim=1).double() / (2 * self.size**0.5)
        return turn + self.factor.abs().log().abs()

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix, "factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Scaled:
        return cls(Orthogonal.from_tensors(tensors).matrix, tensors["factor"].double())
