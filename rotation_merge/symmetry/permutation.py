"""Permutations: the neurons of an FFN, the order of heads or experts, a residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, gather


@dataclass(frozen=True, eq=False)
class Permutation(GroupElement):
    """``aligned[i] = donor[index[i]]``; index is int64, shape (G, d)."""

    index: Tensor

    kind = "permutation"
    monomial = True

    @property
    def batch(self) -> int:
        return self.index.shape[0]

    @property
    def size(self) -> int:
        return self.index.shape[1]

    @classmethod
    def identity(cls, batch: int, size: int) -> Permutation:
        return cls(torch.arange(size).repeat(batch, 1))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Permutation:
        return cls(torch.stack([torch.randperm(size, generator=generator) for _ in range(batch)]))

    def inverse(self) -> Permutation:
        return Permutation(self.index.argsort(dim=1))

    def compose(self, first: Permutation) -> Permutation:
        return Permutation(first.index.gather(1, self.index))

    def select(self, index: Tensor) -> Permutation:
        return Permutation(self.index[index])

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        return gather(x, self.index, batch_dim, dim)

    def distance(self) -> Tensor:
        """Fraction of the coordinates that move."""
        at_home = torch.arange(self.size, device=self.index.device)
        return (self.index != at_home).double().mean(1)

    def tensors(self) -> dict[str, Tensor]:
        return {"index": self.index}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Permutation:
        return cls(tensors["index"].long())
