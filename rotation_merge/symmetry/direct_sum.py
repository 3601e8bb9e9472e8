"""Elements side by side: the rotary and the remaining dimensions of a head, or halves that rotary turns apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, dump, load, nested
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.orthogonal import Orthogonal
from rotation_merge.symmetry.planar import Planar
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.statistics import Grams
from rotation_merge.symmetry.tangent import Freedom, Steps


@dataclass(frozen=True, eq=False)
class DirectSum(GroupElement):
    """Elements side by side on consecutive coordinates: the rotary and the remaining part of a head."""

    parts: tuple[GroupElement, ...]

    kind = "direct_sum"

    @property
    def batch(self) -> int:
        return self.parts[0].batch

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @classmethod
    def identity(cls, batch: int, size: int) -> DirectSum:
        return cls((Scaling.identity(batch, size),))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> DirectSum:
        rotary = size // 4 * 2
        planar = Planar.random(batch, rotary, generator)
        return cls((planar, Orthogonal.random(batch, size - rotary, generator)))

    def inverse(self) -> DirectSum:
        return DirectSum(tuple(part.inverse() for part in self.parts))

    def compose(self, first: DirectSum) -> DirectSum:
        return DirectSum(tuple(a.compose(b) for a, b in zip(self.parts, first.parts, strict=True)))

    def select(self, index: Tensor) -> DirectSum:
        return DirectSum(tuple(part.select(index) for part in self.parts))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        pieces = x.split([part.size for part in self.parts], dim=dim)
        moved = [part.act(piece, batch_dim, dim, dual) for part, piece in zip(self.parts, pieces, strict=True)]
        return torch.cat(moved, dim=dim)

    def distance(self) -> Tensor:
        """Mean of the parts' distances, weighted by their sizes."""
        shares = [part.distance() * part.size for part in self.parts]  # orders lie on the CPU, maps where they are used
        device = next((share.device for share in shares if share.device.type != "cpu"), shares[0].device)
        return torch.stack([share.to(device) for share in shares]).sum(0) / self.size

    def tensors(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": t for i, part in enumerate(self.parts) for name, t in dump(part).items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> DirectSum:
        return cls(tuple(load(part) for _, part in sorted(nested(tensors).items())))

    def still(self) -> DirectSum:
        return DirectSum(tuple(part.still() for part in self.parts))

    def tangent(self, freedom: Freedom) -> Steps:
        return {f"{i}/{name}": t for i, part in enumerate(self.parts) for name, t in part.tangent(freedom).items()}

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> DirectSum:
        moved = []
        for i, part in enumerate(self.parts):
            part_steps = {name.removeprefix(f"{i}/"): step for name, step in steps.items() if name.startswith(f"{i}/")}
            moved.append(part.along(part_steps, freedom, exact) if part_steps else part)
        return DirectSum(tuple(moved))


@dataclass(frozen=True)
class SplitGroup(Group):
    """One group on the first `at` coordinates (those that rotary embedding turns), another on the rest.

    Each is solved on its own (`parts`), so that this one asks for no statistics.
    """

    first: Group
    second: Group
    at: int

    kind = "split"

    @property
    def words(self) -> str:
        return _both(self.first.words, self.second.words, "on the rest")

    @property
    def symbol(self) -> str:
        return _both(self.first.symbol, self.second.symbol, "on what rotary leaves alone")

    def parts(self, size: int) -> list[tuple[Group, slice]]:
        return [(self.first, slice(0, self.at)), (self.second, slice(self.at, size))]

    def unordered(self) -> Group:
        return SplitGroup(self.first.unordered(), self.second.unordered(), self.at)

    def lift(self, element: GroupElement) -> GroupElement:
        assert isinstance(element, DirectSum)
        return DirectSum((self.first.lift(element.parts[0]), self.second.lift(element.parts[1])))

    def identity(self, batch: int, size: int) -> DirectSum:
        return DirectSum((self.first.identity(batch, self.at), self.second.identity(batch, size - self.at)))

    def random(self, batch: int, size: int, generator: torch.Generator) -> DirectSum:
        first = self.first.random(batch, self.at, generator)
        return DirectSum((first, self.second.random(batch, size - self.at, generator)))

    def admits(self, maps: Tensor) -> bool:
        inner = [(group, maps[:, dims, dims]) for group, dims in self.parts(maps.shape[-1])]
        beside = torch.stack([torch.block_diag(*blocks) for blocks in zip(*(part for _, part in inner), strict=True)])
        return torch.equal(maps, beside) and all(group.admits(part) for group, part in inner)

    def solve(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        raise TypeError("a split group is solved part by part")

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        raise TypeError("a split group is solved part by part")


def _both(first: str, second: str, place: str) -> str:
    return first if first == second else f"{first}, {second} {place}"
