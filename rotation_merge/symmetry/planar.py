r"""Rotations and rescalings of RoPE pairs: the maps that commute with rotary position embedding.

Rotary embedding turns coordinate pair p by an angle that depends on the position, which is multiplication of the
complex number z_p = x_{p,0} + i x_{p,1}. It commutes with multiplication by another complex number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.linalg.saddle import plane_scale
from rotation_merge.linalg.scaling import best_scale, cost, joint_scale
from rotation_merge.symmetry.base import GroupElement, broadcast
from rotation_merge.symmetry.group import Group, near
from rotation_merge.symmetry.statistics import Grams, balance
from rotation_merge.symmetry.tangent import Freedom, Steps, like, scaled


def pair_dims(size: int, interleaved: bool) -> tuple[slice, slice]:
    """Indices of the two coordinates of each pair: (i, i + d/2), or (2i, 2i + 1) if interleaved."""
    if interleaved:
        return slice(0, size, 2), slice(1, size, 2)
    return slice(0, size // 2), slice(size // 2, size)


@dataclass(frozen=True, eq=False)
class Planar(GroupElement):
    """Pair p of head g is turned by angle[g, p] (radians) and multiplied by scale[g, p] > 0.

    angle, scale: float64, shape (G, d/2). The dual side is turned the same way and divided by the scale.
    """

    angle: Tensor
    scale: Tensor
    interleaved: bool = False

    kind = "planar"

    @property
    def batch(self) -> int:
        return self.angle.shape[0]

    @property
    def size(self) -> int:
        return 2 * self.angle.shape[1]

    @classmethod
    def identity(cls, batch: int, size: int) -> Planar:
        shape = (batch, size // 2)
        return cls(torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64))

    @classmethod
    def random(cls, batch: int, size: int, generator: torch.Generator) -> Planar:
        shape = (batch, size // 2)
        angle = (torch.rand(shape, dtype=torch.float64, generator=generator) * 2 - 1) * math.pi
        return cls(angle, (0.4 * torch.randn(shape, dtype=torch.float64, generator=generator)).exp())

    def inverse(self) -> Planar:
        return Planar(-self.angle, 1 / self.scale, self.interleaved)

    def compose(self, first: Planar) -> Planar:
        return Planar(self.angle + first.angle, self.scale * first.scale, self.interleaved)

    def select(self, index: Tensor) -> Planar:
        return Planar(self.angle[index], self.scale[index], self.interleaved)

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        scale = 1 / self.scale if dual else self.scale
        angle = self.angle.contiguous()  # the cosine of a view may differ in the last bit from that of its copy
        first, second = (_along(x, dim, part) for part in pair_dims(self.size, self.interleaved))
        cos = broadcast(angle.cos() * scale, first, batch_dim, dim)
        sin = broadcast(angle.sin() * scale, first, batch_dim, dim)
        turned = (cos * first - sin * second).to(x.dtype), (sin * first + cos * second).to(x.dtype)
        if self.interleaved:
            return torch.stack(turned, dim=dim % x.ndim + 1).flatten(dim % x.ndim, dim % x.ndim + 1)
        return torch.cat(turned, dim=dim)

    def distance(self) -> Tensor:
        """Root mean square over pairs of |angle| / pi and |log scale|."""
        wrapped = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        return ((wrapped / math.pi) ** 2 + self.scale.log() ** 2).mean(1).sqrt()

    def tensors(self) -> dict[str, Tensor]:
        flag = torch.tensor(int(self.interleaved), device=self.angle.device)
        return {"angle": self.angle, "scale": self.scale, "interleaved": flag}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Planar:
        return cls(tensors["angle"].double(), tensors["scale"].double(), bool(tensors["interleaved"]))

    def still(self) -> Planar:
        return Planar(torch.zeros_like(self.angle), torch.ones_like(self.scale), self.interleaved)

    def tangent(self, freedom: Freedom) -> Steps:
        zeros = {"angle": torch.zeros(self.angle.shape)}
        return {**zeros, "log_scale": torch.zeros(self.scale.shape)} if freedom.scales else zeros

    def along(self, steps: Steps, freedom: Freedom, exact: bool) -> Planar:
        step = steps["angle"]
        angle = like(self.angle, step, exact) + like(step, step, exact)
        return Planar(angle, scaled(self.scale, steps, exact), self.interleaved)


def _along(x: Tensor, dim: int, part: slice) -> Tensor:
    index: list[slice] = [slice(None)] * x.ndim
    index[dim] = part
    return x[tuple(index)]


@dataclass(frozen=True)
class PlanarGroup(Group):
    """Rotations of RoPE pairs, with `rescale` times a positive factor for each."""

    rescale: bool | str = False
    interleaved: bool = False

    kind = "planar"
    statistic = "pairs"
    words = "a rotation for each RoPE pair"
    symbol = "planar"

    def identity(self, batch: int, size: int) -> Planar:
        start = Planar.identity(batch, size)
        return Planar(start.angle, start.scale, self.interleaved)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Planar:
        turn = Planar.random(batch, size, generator)
        return Planar(turn.angle, turn.scale if self.rescale else torch.ones_like(turn.scale), self.interleaved)

    def admits(self, maps: Tensor) -> bool:
        """Each pair by itself, by ((c, -s), (s, c)); of scale 1 where there is no rescaling."""
        first, second = pair_dims(maps.shape[-1], self.interleaved)
        cos, sin = (maps[:, rows, first].diagonal(dim1=1, dim2=2) for rows in (first, second))
        scale = torch.hypot(cos, sin)
        turn = Planar(torch.atan2(sin, cos), scale, self.interleaved)
        eye = torch.eye(maps.shape[-1], dtype=maps.dtype).repeat(len(maps), 1, 1)
        return near(maps, turn.act(eye, 0, 1)) and (bool(self.rescale) or near(scale, torch.ones_like(scale)))

    def solve(self, grams: Grams) -> tuple[Planar, Tensor]:
        """The angle of each pair's sum of complex inner products, jointly with its scale."""
        primal, dual = grams.primal, grams.dual
        norms = self._pair_sums(grams.donor_primal, grams.donor_dual)
        scale = torch.ones_like(norms[0])
        if self.rescale is True:
            anchor = self._pair_sums(grams.anchor_primal, grams.anchor_dual)
            scale = _joint_scale(primal, dual, norms, balance(*norms, *anchor))
        turn = _phase(scale * primal + dual / scale).conj()
        inner = (turn * primal).real, (turn * dual).real
        if self.rescale:
            scale = best_scale(*norms, *inner)
        return Planar(-turn.angle(), scale, self.interleaved), -cost(scale, *norms, *inner).sum(-1)

    def bound(self, primal: Tensor, dual: Tensor, grams: Grams) -> Tensor:
        return self._bounded(primal, dual, self._pair_sums(grams.donor_primal, grams.donor_dual)).sum(-1)

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        assert isinstance(element, Planar)
        turn = torch.polar(1 / element.scale, -element.angle)
        return torch.einsum("np,nabp->nab", turn, products).real

    def _pair_sums(self, primal: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        first, second = pair_dims(primal.shape[-1], self.interleaved)
        return primal[..., first] + primal[..., second], dual[..., first] + dual[..., second]


def _joint_scale(primal: Tensor, dual: Tensor, norms: tuple[Tensor, Tensor], guess: Tensor) -> Tensor:
    def inner(scale: Tensor) -> tuple[Tensor, Tensor]:
        turn = _phase(scale * primal + dual / scale).conj()
        return (turn * primal).real, (turn * dual).real

    scale, proven = plane_scale(primal, dual, norms, guess)
    if not bool(proven.all()):
        unproven = ~proven
        primal, dual = primal[unproven], dual[unproven]
        bounds, first, second = (primal.abs(), dual.abs()), norms[0][unproven], norms[1][unproven]
        mixed = lambda a: (a * primal + dual / a).abs()  # noqa: E731
        scale[unproven] = joint_scale(mixed, inner, first, second, guess[unproven], bounds)
    return scale


def _phase(z: Tensor) -> Tensor:
    """z / |z|; 1 where z is zero or its phase is below rounding, so that ties go to the identity."""
    size = z.abs()
    flat = size - z.real <= 1e-12 * size
    return torch.where(flat, torch.ones_like(z), z / torch.where(size == 0, torch.ones_like(size), size))
