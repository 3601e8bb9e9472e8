"""Solved or trained tensors of a new base, at a scale, as whole tensors or as changes of low rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block
from rotation_merge.carrying.carrier import Carrier, Change
from rotation_merge.carrying.tuned import of_low_rank
from rotation_merge.model.source import read_tensor


@dataclass
class Solution:
    """Solved maps of a new base, as whole tensors or as changes of low rank."""

    carrier: Carrier
    solved: Mapping[str, Tensor]
    scale: float
    dtype: torch.dtype | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The solved tensors, at their scale, in the dtype; None: in the new base's for storage."""
        for block in self.carrier.architecture.blocks:
            for info in block.tensors:
                for name in info.names:
                    if name in self.solved and (new := read_tensor(info, self.carrier.new)) is not None:
                        change = self.solved[name].double() - new.double()
                        yield name, (new.double() + self.scale * change).to(self.dtype or new.dtype)

    def factors(self, block: Block, rank: int) -> tuple[dict[str, Change], dict[str, tuple[float, float]]]:
        """A block's changes, matrices by factors of a rank that they already have."""
        found: dict[str, Change] = {}
        kept: dict[str, tuple[float, float]] = {}
        for info in block.tensors:
            new = read_tensor(info, self.carrier.new)
            if new is not None and info.name in self.solved:
                change = self.scale * (self.solved[info.name].double() - new.double())
                found[info.key] = of_low_rank(change, info, rank) if change.ndim > 1 else change
                kept[info.key] = (float(change.square().sum()),) * 2
        return found, kept
