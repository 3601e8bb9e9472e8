"""Elements that are matrices: the common base of orthogonal maps with and without scales."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement

Self = TypeVar("Self", bound="MatrixElement")


@dataclass(frozen=True, eq=False)
class MatrixElement(GroupElement):
    """``aligned = matrix @ donor``; float64, shape (G, d, d)."""

    matrix: Tensor

    @property
    def batch(self) -> int:
        return self.matrix.shape[0]

    @property
    def size(self) -> int:
        return self.matrix.shape[1]

    @classmethod
    def identity(cls: type[Self], batch: int, size: int) -> Self:
        return cls(torch.eye(size, dtype=torch.float64).repeat(batch, 1, 1))

    def compose(self: Self, first: Self) -> Self:
        return type(self)(self.matrix @ first.matrix)

    def select(self: Self, index: Tensor) -> Self:
        return type(self)(self.matrix[index])

    def distance(self) -> Tensor:
        """Frobenius distance from the identity, divided by the largest of an orthogonal map, 2 sqrt(d): 1 at -I."""
        eye = torch.eye(self.size, dtype=self.matrix.dtype, device=self.matrix.device)
        return (self.matrix - eye).flatten(1).norm(dim=1).double() / (2 * self.size**0.5)

    @cached_property
    def _still(self) -> bool:
        """Compare the diagonal first: it differs for most maps other than the identity."""
        return bool((self.matrix.diagonal(dim1=1, dim2=2) == 1).all()) and super()._still

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.matrix}
