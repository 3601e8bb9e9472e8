"""Transforms of a mixer: heads in groups, with coordinates that may only change places (Mamba-2, gated delta rules).

The inputs of such a layer go through a depthwise convolution and an activation channel by channel, so that no map that
mixes channels, or scales them, commutes with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, gather, is_order
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform


@dataclass(frozen=True, eq=False)
class MixerTransform(SpaceTransform):
    """G groups of r heads each; first reordered, then their coordinates.

    Attributes:
        groups: int64 (G,), ``aligned group i = donor group groups[i]``.
        heads: int64 (G, r), the heads inside each group, ``heads[i]`` indexing donor group groups[i].
        shared: permutations (batch G) of the coordinates that the heads of a group share (keys, states).
        own: permutations (batch G r) of each head's coordinates.

    Roles and their dimensions: group (G), head (G, r), shared (G, d), own (G, r, e).
    """

    groups: Tensor
    heads: Tensor
    shared: Permutation
    own: Permutation

    space_kind = "mixer"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        x = x.index_select(dim, self.groups.to(x.device))
        if role in ("head", "own"):
            x = gather(x, self.heads, dim, dim + 1)
        if role == "shared":
            return self.shared.act(x, dim, dim + 1)
        if role == "own":
            return self.own.act(x.flatten(dim, dim + 1), dim, dim + 1).unflatten(dim, self.heads.shape)
        return x

    def mixes(self, role: str) -> bool:
        return False

    def inverse(self) -> MixerTransform:
        groups, heads = self.groups.argsort(), self.heads.argsort(dim=1)
        back = MixerTransform(groups, heads[groups], self.shared.inverse().select(groups), self.own)
        return MixerTransform(groups, back.heads, back.shared, self.own.inverse().select(back._leaves()))

    def compose(self, first: MixerTransform) -> MixerTransform:
        return MixerTransform(
            first.groups[self.groups],
            first.heads[self.groups].gather(1, self.heads),
            self.shared.compose(first.shared.select(self.groups)),
            self.own.compose(first.own.select(self._leaves())),
        )

    def _leaves(self) -> Tensor:
        """The order of all heads, int64 (G r,)."""
        return (self.groups[:, None] * self.heads.shape[1] + self.heads).flatten()

    def still(self) -> MixerTransform:
        groups, heads = torch.arange(len(self.groups)), torch.arange(self.heads.shape[1]).repeat(len(self.groups), 1)
        shared, leaves = (Permutation.identity(x.batch, x.size) for x in (self.shared, self.own))
        return MixerTransform(groups, heads, shared, leaves)

    def elements(self) -> dict[str, GroupElement]:
        return {}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> MixerTransform:
        return self

    def _moved(self) -> float:
        leaves = self._leaves()
        return float((leaves != torch.arange(len(leaves), device=leaves.device)).double().mean())

    def is_identity(self) -> bool:
        return self._moved() == 0 and self.shared.is_identity() and self.own.is_identity()

    def distances(self) -> dict[str, float]:
        return {
            "heads": self._moved(),
            "shared": float(self.shared.distance().mean()),
            "own": float(self.own.distance().mean()),
        }

    def group(self) -> str:
        return "order of heads and of their channels"

    def tensors(self) -> dict[str, Tensor]:
        return {
            "groups": self.groups,
            "heads": self.heads,
            "shared": self.shared.index,
            "own": self.own.index,
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> MixerTransform:
        groups, heads, shared, leaves = (tensors[name].long() for name in ("groups", "heads", "shared", "own"))
        return cls(groups, heads, Permutation(shared), Permutation(leaves))


@dataclass(frozen=True)
class MixerGroup(SpaceGroup):
    """The order of the heads of one mixer, where `order`, and of their channels, where `channels`."""

    groups: int
    per_group: int
    shared: int
    own: int
    order: bool
    channels: bool

    def identity(self) -> MixerTransform:
        shared = Permutation.identity(self.groups, self.shared)
        leaves = Permutation.identity(self.groups * self.per_group, self.own)
        heads = torch.arange(self.per_group).repeat(self.groups, 1)
        return MixerTransform(torch.arange(self.groups), heads, shared, leaves)

    def random(self, generator: torch.Generator) -> MixerTransform:
        still = self.identity()
        groups, heads, shared, leaves = still.groups, still.heads, still.shared, still.own
        if self.order:
            groups = torch.randperm(self.groups, generator=generator)
            heads = torch.stack([torch.randperm(self.per_group, generator=generator) for _ in range(self.groups)])
        if self.channels:
            shared = Permutation.random(self.groups, self.shared, generator)
            leaves = Permutation.random(self.groups * self.per_group, self.own, generator)
        return MixerTransform(groups, heads, shared, leaves)

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, MixerTransform):
            return "it is not a transform of a mixer"
        still = self.identity()
        shapes = {name: tensor.shape for name, tensor in still.tensors().items()}
        if {name: tensor.shape for name, tensor in transform.tensors().items()} != shapes:
            return f"it does not have {self.groups} groups of {self.per_group} heads"
        orders = (transform.groups[None], transform.heads, transform.shared.index, transform.own.index)
        return None if all(map(is_order, orders)) else "the order of its heads or channels is not a permutation"

    @property
    def words(self) -> str:
        order = "order of groups and heads" if self.order else ""
        return ", ".join(filter(None, [order, "permutation of channels" if self.channels else ""])) or "none"

    def work(self) -> MatchingCost:
        heads = self.groups * self.per_group
        pairs = heads**2 if self.order else heads
        return MatchingCost(
            2.0 * heads * max(self.own, self.shared), assigned=pairs * self.own**2, table=heads * self.own
        )
