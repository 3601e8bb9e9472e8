r"""Translations: one vector added to every row of a matrix whose rows only enter a softmax.

``softmax(W x)`` does not see ``W + 1 v^T``, because ``v . x`` is added to all entries alike: the rows of a router that
picks by softmax (before or after the top k), and, for probabilities, those of a head with weights of its own. Nor does
it see one number added to every entry of a bias b, whose entries are rows of one number each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform


@dataclass(frozen=True, eq=False)
class TranslationTransform(SpaceTransform):
    """``aligned[i] = donor[i] + vector`` for every row i; vector is float64, (d,), in the anchor's coordinates.

    No axis plays a role in it: it is added once all axes have moved (`added`), and never to a difference of two
    models' tensors.
    """

    vector: Tensor

    space_kind = "translation"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        return x

    def added(self, x: Tensor) -> Tensor:
        """Rows (n, d), or of a bias (n,) with d = 1, with the vector on each, in x's dtype."""
        work = torch.promote_types(x.dtype, torch.float32)
        return (x.to(work) + self.vector.to(device=x.device, dtype=work)).to(x.dtype)

    def mixes(self, role: str) -> bool:
        return False

    def inverse(self) -> TranslationTransform:
        return TranslationTransform(-self.vector)

    def compose(self, first: TranslationTransform) -> TranslationTransform:
        return TranslationTransform(self.vector + first.vector.to(self.vector.device))

    def still(self) -> TranslationTransform:
        return TranslationTransform(torch.zeros_like(self.vector))

    def elements(self) -> dict[str, GroupElement]:
        return {}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> TranslationTransform:
        return self

    def is_identity(self) -> bool:
        return not bool(self.vector.any())

    def distances(self) -> dict[str, float]:
        return {"shift": float(self.vector.square().mean().sqrt())}

    def group(self) -> str:
        return "translation"

    def tensors(self) -> dict[str, Tensor]:
        return {"vector": self.vector}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> TranslationTransform:
        return cls(tensors["vector"].double())


@dataclass(frozen=True)
class TranslationGroup(SpaceGroup):
    """All translations of rows of `size` entries; where not `moves`, none."""

    size: int
    moves: bool = True

    def identity(self) -> TranslationTransform:
        return TranslationTransform(torch.zeros(self.size, dtype=torch.float64))

    def random(self, generator: torch.Generator) -> TranslationTransform:
        drawn = torch.randn(self.size, dtype=torch.float64, generator=generator)
        return TranslationTransform(drawn) if self.moves else self.identity()

    def solve(self, anchor: Tensor, donor: Tensor) -> TranslationTransform:
        """The nearest translation: it brings the donor's mean row, (n, d) or (n,) of a bias, to the anchor's."""
        if not self.moves or torch.equal(anchor, donor):
            return self.identity()
        donor_mean, anchor_mean = (x.to(anchor.device).double().reshape(-1, self.size).mean(0) for x in (donor, anchor))
        return TranslationTransform((anchor_mean - donor_mean).cpu())

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, TranslationTransform):
            return "it is not a translation"
        right = transform.vector.shape == (self.size,) and bool(transform.vector.isfinite().all())
        return None if right else f"it does not have {self.size} entries, or some are not numbers"

    @property
    def words(self) -> str:
        return "one vector added to all rows" if self.moves else "none"

    def work(self) -> MatchingCost:
        return MatchingCost(2.0)
