"""Matching a mixer: the order of its groups and heads and of their channels, jointly.

What a pair of heads gains is the optimum of one assignment over their channels, what a pair of groups gains that of its
shared channels plus that of the best pairing of its heads: assignments inside assignments, each of them exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign_small
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.sides import Side
from rotation_merge.symmetry.admitted import mixer
from rotation_merge.symmetry.mixer import MixerTransform
from rotation_merge.symmetry.permutation import Permutation


def match_mixer(space: Space, sides: list[Side], options: AlignConfig) -> MixerTransform:
    """The best order of groups, of the heads inside them, and of all channels."""
    group = mixer(space, options)
    if all(torch.equal(side.anchor, side.donor) for side in sides):
        return group.identity()
    groups, per_group = group.groups, group.per_group
    leaves = _Level(sides, "head", "own", groups * per_group, group.own, group.channels)
    tops = _Level(sides, "group", "shared", groups, group.shared, group.channels)
    if not group.order:
        rows, all_heads = torch.arange(groups), torch.arange(groups * per_group)
        shared, channel_orders = tops.orders(rows, rows), leaves.orders(all_heads, all_heads)
        still = group.identity()
        return MixerTransform(still.groups, still.heads, Permutation(shared), Permutation(channel_orders))
    values, heads = tops.gains(), torch.zeros(groups, groups, per_group, dtype=torch.long)
    inner = leaves.gains().unflatten(1, (groups, per_group)).unflatten(0, (groups, per_group))
    for i in range(groups):
        for j in range(groups):
            heads[i, j] = assign_small(inner[i, :, j])
            values[i, j] += inner[i, torch.arange(per_group), j, heads[i, j]].sum()
    order = assign_small(values)
    rows = torch.arange(groups)
    chosen = heads[rows, order]
    donor = (order[:, None] * per_group + chosen).flatten()
    shared, channel_orders = tops.orders(rows, order), leaves.orders(torch.arange(groups * per_group), donor)
    return MixerTransform(order, chosen, Permutation(shared), Permutation(channel_orders))


class _Level:
    """Groups, or heads, with what each of them holds: numbers, and channels that may change places."""

    def __init__(
        self, all_sides: Iterable[Side], number: str, channel: str, count: int, size: int, permute: bool
    ) -> None:
        sides = list(all_sides)
        self.count, self.size, self.permute = count, size, permute
        self.numbers = [_matrices(s, (count, -1)) for s in sides if s.role == number]
        self.channels = [_matrices(s, (count, size, -1)) for s in sides if s.role == channel]

    def products(self, i: int, j: int) -> Tensor:
        """<A, B> of the channels of the anchor's i and the donor's j, (size, size)."""
        total = torch.zeros(self.size, self.size, dtype=torch.float64)
        for a, b in self.channels:
            total += a[i].double() @ b[j].double().T
        return total

    def gains(self) -> Tensor:
        """What each pair takes off half the squared norms at most, (count, count)."""
        total = torch.zeros(self.count, self.count, dtype=torch.float64)
        for a, b in self.numbers:
            total += a.double() @ b.double().T
        if self.channels:
            for i in range(self.count):
                for j in range(self.count):
                    total[i, j] += self._best(self.products(i, j))[1]
        return total

    def _best(self, products: Tensor) -> tuple[Tensor, float]:
        index = assign_small(products) if self.permute else torch.arange(self.size)
        return index, float(products.gather(1, index[:, None]).sum())

    def orders(self, anchor: Tensor, donor: Tensor) -> Tensor:
        """The best orders of the channels of pairs, (N, size)."""
        if not self.channels:
            return torch.arange(self.size).repeat(len(anchor), 1)
        pairs = zip(anchor.tolist(), donor.tolist(), strict=True)
        return torch.stack([self._best(self.products(i, j))[0] for i, j in pairs])


def _matrices(side: Side, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return side.anchor.reshape(shape).cpu(), side.donor.reshape(shape).cpu()
