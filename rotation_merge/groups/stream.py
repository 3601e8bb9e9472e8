"""Transforms of a residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rotation_merge.groups.base import GroupElement, dump, load, mixes
from rotation_merge.groups.monomial import Monomial
from rotation_merge.groups.space import SpaceTransform


@dataclass(frozen=True, eq=False)
class StreamTransform(SpaceTransform):
    """One element (G = 1) for the whole stream.

    Roles: `write` (into the stream), `read` (out of it), `shift` (norm biases, added to what is read) move with
    the element; `gain` (norm gains and layer scales, multiplied coordinate by coordinate) only follows its
    permutation, so that a map that mixes coordinates needs the gains folded away first.
    """

    element: GroupElement

    space_kind = "stream"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        element = self.element
        if role == "gain":
            if not isinstance(element, Monomial):
                return x
            element = element.permutation
        return element.act(x.unsqueeze(0), 0, dim + 1, dual).squeeze(0)

    def mixes(self, role: str) -> bool:
        return role != "gain" and mixes(self.element)

    def inverse(self) -> StreamTransform:
        return StreamTransform(self.element.inverse())

    def compose(self, first: StreamTransform) -> StreamTransform:
        return StreamTransform(self.element.compose(first.element))

    def is_identity(self) -> bool:
        return self.element.is_identity()

    def distances(self) -> dict[str, float]:
        return {"stream": float(self.element.distance().mean())}

    def group(self) -> str:
        return self.element.kind

    def tensors(self) -> dict[str, Tensor]:
        return dump(self.element)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> StreamTransform:
        return cls(load(tensors))
