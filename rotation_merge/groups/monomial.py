"""Permutation and rescaling together: FFN neurons, signed permutations of a residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups.base import GroupElement
from rotation_merge.groups.permutation import Permutation
from rotation_merge.groups.scaling import Scaling


@dataclass(frozen=True, eq=False)
class Monomial(GroupElement):
    """A permutation followed by a rescaling: FFN neurons, signed permutations of a residual stream.

    ``aligned[i] = scaling.factor[i] * donor[permutation.index[i]]``.
    """

    permutation: Permutation
    scaling: Scaling

    kind = "monomial"
    monomial = True

    @property
    def batch(self) -> int:
        return self.permutation.batch

    @property
    def size(self) -> int:
        return self.permutation.size

    @classmethod
    def identity(cls, batch: int, size: int) -> Monomial:
        return cls(Permutation.identity(batch, size), Scaling.identity(batch, size))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Monomial:
        return cls(Permutation.random(batch, size, generator), Scaling.random(batch, size, generator))

    def inverse(self) -> Monomial:
        back = self.permutation.inverse()
        return Monomial(back, Scaling(1 / self.scaling.factor.gather(1, back.index)))

    def compose(self, first: Monomial) -> Monomial:
        factor = self.scaling.factor * first.scaling.factor.gather(1, self.permutation.index)
        return Monomial(self.permutation.compose(first.permutation), Scaling(factor))

    def select(self, index: Tensor) -> Monomial:
        return Monomial(self.permutation.select(index), self.scaling.select(index))

    def powered(self, degree: int) -> Monomial:
        """The same order, every factor to the power of `degree`."""
        return self if degree == 1 else Monomial(self.permutation, Scaling(self.scaling.factor**degree))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        if not self.permutation.is_identity():
            x = self.permutation.act(x, batch_dim, dim)
        return x if self.scaling.is_identity() else self.scaling.act(x, batch_dim, dim, dual)

    def distance(self) -> Tensor:
        """Fraction of coordinates that move, plus the distance of the rescaling."""
        return self.permutation.distance() + self.scaling.distance()

    def tensors(self) -> dict[str, Tensor]:
        return self.permutation.tensors() | self.scaling.tensors()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Monomial:
        return cls(Permutation.from_tensors(tensors), Scaling.from_tensors(tensors))
