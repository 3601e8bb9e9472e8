"""Rescalings, positive or signed, and pure signs: one factor for each coordinate (or one for all of a head)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, broadcast


def scaling_distance(factor: Tensor) -> Tensor:
    """Root mean square of |log |factor||, plus the fraction of negative signs, (G,)."""
    return factor.abs().log().pow(2).mean(1).sqrt() + (factor < 0).double().mean(1)


@dataclass(frozen=True, eq=False)
class Scaling(GroupElement):
    """``aligned = factor * donor``, on the dual side ``donor / factor``; factor nonzero, float64, shape (G, d)."""

    factor: Tensor

    kind = "scaling"
    monomial = True

    @property
    def batch(self) -> int:
        return self.factor.shape[0]

    @property
    def size(self) -> int:
        return self.factor.shape[1]

    @classmethod
    def identity(cls, batch: int, size: int) -> Scaling:
        return cls(torch.ones(batch, size, dtype=torch.float64))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Scaling:
        """Positive factors."""
        return cls((0.5 * torch.randn(batch, size, dtype=torch.float64, generator=generator)).exp())

    @classmethod
    def random_signs(cls, batch: int, size: int, generator: torch.Generator) -> Scaling:
        """Factors of 1 and -1."""
        return cls(torch.randint(0, 2, (batch, size), generator=generator).double() * 2 - 1)

    def inverse(self) -> Scaling:
        return Scaling(1 / self.factor)

    def compose(self, first: Scaling) -> Scaling:
        return Scaling(self.factor * first.factor)

    def select(self, index: Tensor) -> Scaling:
        return Scaling(self.factor[index])

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        factor = 1 / self.factor if dual else self.factor
        return (x * broadcast(factor, x, batch_dim, dim)).to(x.dtype)

    def distance(self) -> Tensor:
        return scaling_distance(self.factor)

    def tensors(self) -> dict[str, Tensor]:
        return {"factor": self.factor}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Scaling:
        return cls(tensors["factor"].double())
