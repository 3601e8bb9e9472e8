"""O(d) with one scale for each head: value/output and rotary-free query/key dimensions with `rescale`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import act_by_matrices
from rotation_merge.groups.matrix import MatrixElement
from rotation_merge.groups.orthogonal import Orthogonal
from rotation_merge.linalg.polar import random_orthogonal


@dataclass(frozen=True, eq=False)
class Scaled(MatrixElement):
    """A map of O(d) times one positive (or signed) factor for each head: R and a in ``aligned = a R donor``."""

    factor: Tensor

    kind = "scaled_orthogonal"

    @classmethod
    def identity(cls, batch: int, size: int) -> Scaled:
        return cls(Orthogonal.identity(batch, size).matrix, torch.ones(batch, dtype=torch.float64))

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
        """Distance of the orthogonal map, plus |log factor|."""
        return super().distance() + self.factor.abs().log().abs()

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix, "factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Scaled:
        return cls(Orthogonal.from_tensors(tensors).matrix, tensors["factor"].double())
