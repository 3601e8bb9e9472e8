"""Transforms of a latent: a stream inside one layer, between a writing map, a norm and reading maps.

Source: multi-head latent attention, DeepSeek-V2 (2024), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.space import SpaceTransform
from rotation_merge.symmetry.stream import StreamGroup, StreamTransform


class LatentTransform(StreamTransform):
    """A stream transform of one layer, with the same roles."""

    space_kind = "latent"


@dataclass(frozen=True)
class LatentGroup(StreamGroup):
    """A group of a latent: signed permutations under RMSNorm, rotations once its gain is folded."""

    def identity(self) -> LatentTransform:
        return LatentTransform(super().identity().element)

    def random(self, generator: torch.Generator) -> LatentTransform:
        return LatentTransform(super().random(generator).element)

    def solve(self, products: Tensor, gains: Tensor) -> LatentTransform:
        return LatentTransform(super().solve(products, gains).element)

    def refuses(self, transform: SpaceTransform) -> str | None:
        """Rotations are admitted where gains are folded; the alignment records that."""
        if not isinstance(transform, LatentTransform):
            return "it is not a transform of a latent"
        kind = "signed_permutation" if transform.moves_gains else "rotation"
        return StreamGroup(kind, self.size, self.fixes_ones).refuses(transform)
