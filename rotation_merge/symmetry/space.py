"""The transform of one space: group elements put together, acting on an axis by the role it plays there.

A role is the function of an axis in its space (the queries or the keys of an attention space, the rows that write into
a residual stream or its norm gains). The axis stands in the tensor as one or more consecutive dimensions (`factors` of
the architecture layer), the first of them at `dim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement

Self = TypeVar("Self", bound="SpaceTransform")

TRANSFORMS: dict[str, type[SpaceTransform]] = {}
"""Space kinds (stream, ffn, attention, experts) and the transform that acts on them."""


class SpaceTransform(ABC):
    """One element of a space's group."""

    space_kind: ClassVar[str]

    def __init_subclass__(cls) -> None:
        TRANSFORMS[cls.space_kind] = cls

    @abstractmethod
    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        """Move an axis of x that plays `role` and starts at dimension `dim`; same shape, dtype kept.

        With `dual`: by the inverse transpose, the action on tensors that are paired with a weight's axis (inputs of an
        input axis, gradients of an output axis).
        """

    @abstractmethod
    def mixes(self, role: str) -> bool:
        """Whether an axis of this role has coordinates mixed, so that no diagonal stays one."""

    def moves(self, role: str) -> bool:
        """Whether an axis of this role has anything done to it."""
        return not self.is_identity()

    @abstractmethod
    def inverse(self: Self) -> Self: ...

    @abstractmethod
    def compose(self: Self, first: Self) -> Self:
        """This after `first`."""

    @abstractmethod
    def still(self: Self) -> Self:
        """The identity of the same group."""

    @abstractmethod
    def elements(self) -> dict[str, GroupElement]:
        """Its elements that learning may change, by name: all but the order of heads or experts."""

    @abstractmethod
    def with_elements(self: Self, elements: Mapping[str, GroupElement]) -> Self:
        """The same transform with other elements under the names that `elements` gives."""

    @abstractmethod
    def is_identity(self) -> bool: ...

    @abstractmethod
    def distances(self) -> dict[str, float]:
        """Distance of the transform from the identity, by part (order, qk, vo, neurons, ...)."""

    @abstractmethod
    def group(self) -> str:
        """Name of the group in reports."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]: ...

    @classmethod
    @abstractmethod
    def from_tensors(cls: type[Self], tensors: dict[str, Tensor]) -> Self: ...

    def to(self: Self, device: torch.device) -> Self:
        return self.from_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})


@dataclass(frozen=True)
class MatchingCost:
    """The cost of matching a space.

    Attributes:
        per_weight: floating-point operations for each entry of a tensor that lives in the space.
        solving: floating-point operations of the solve itself.
        assigned: entries of all similarity matrices that are assigned.
        table: entries of the largest one.
        near: operations for each weight where the models are near and a quick proof replaces tables and assignments.
    """

    per_weight: float
    solving: float = 0.0
    assigned: int = 0
    table: int = 0
    near: float | None = None

    @property
    def between_near_models(self) -> MatchingCost:
        """The same where the quick proof holds."""
        return self if self.near is None else replace(self, per_weight=self.near, solving=0.0, assigned=0)


class SpaceGroup(ABC):
    """The group of one space under the options: the order of heads or experts, and the groups of its elements."""

    @abstractmethod
    def identity(self) -> SpaceTransform:
        """The transform that moves nothing, of the kind that matching gives."""

    @abstractmethod
    def random(self, generator: torch.Generator) -> SpaceTransform:
        """A random transform, for tests and twins."""

    @abstractmethod
    def refuses(self, transform: SpaceTransform) -> str | None:
        """The reason why a transform is not in the group, in words; None if it is."""

    @property
    @abstractmethod
    def words(self) -> str:
        """The group in words."""

    @abstractmethod
    def work(self) -> MatchingCost:
        """The cost of matching."""
