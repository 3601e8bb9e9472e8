"""How the change of one matrix between two models is explained: by an adapter's change, or by a mistake's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.model.low_rank import LowRank

UNITS = 4.0
"""Units of rounding that an entry may be off where base, change and sum were each rounded, and the change's factors."""
SHARE = 0.02
"""Share of an adapter's change that a right merge may lack."""
SMALLEST = 2.0**-24
"""The smallest number of float16, the unit of its numbers next to zero."""
SAMPLED = 256
"""Rows and columns at most on which a rank is counted."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """A matrix of a base, the change that it should have, and the matrix that it has become.

    Attributes:
        before: W, (n, m), float32 or float64, as all others.
        change: D.
        after: M.
        grid: the dtype that M is rounded to.
        rounding: relative rounding of a weight, and of a change; an eps of a dtype each.
    """

    before: Tensor
    change: Tensor
    after: Tensor
    grid: torch.dtype
    rounding: tuple[float, float]

    @cached_property
    def gained(self) -> Tensor:
        return self.after - self.before

    @cached_property
    def off(self) -> Tensor:
        """What M is off W + D."""
        return self.after - (self.before + self.change)

    @cached_property
    def unit(self) -> Tensor:
        """Unit of rounding of each entry: of W or M, and of D, which sums of products round by its rows and columns."""
        change = self.change
        lengths = change.norm(dim=1, keepdim=True) * change.norm(dim=0, keepdim=True) / change.norm().clamp_min(1e-30)
        weights, changes = self.rounding
        unit = weights * torch.maximum(self.before.abs(), (self.before + change).abs()) + changes * lengths
        return unit + (SMALLEST if weights > 1e-4 else 0.0)

    @cached_property
    def deviation(self) -> float:
        """Largest deviation of M from W + D, in units of the rounding."""
        return float((self.off.abs() / self.unit.clamp_min(1e-45)).max()) if self.off.any() else 0.0

    @cached_property
    def expected_share(self) -> float:
        """Share of D that is left of it where W + D is rounded to the grid."""
        return self._share(self._rounded()[0] - self.before)

    @property
    def right(self) -> bool:
        """Whether M is W + D up to rounding: no entry is further off, and the rest is no part of D, nor a pattern."""
        if self.deviation > UNITS:
            return False
        off = min((self.after - rounded for rounded in self._rounded()), key=lambda rest: float(rest.norm()))
        return abs(self._share(off)) <= SHARE + self.spread(self.change) and self._is_noise(off, SHARE * self.change)

    def _rounded(self) -> list[Tensor]:
        """W + D rounded once, and with W rounded before, as where a model is loaded in the type of the merge."""
        if self.grid.itemsize == 1:  # whose grid depends on the scales
            return [self.before + self.change]
        dtype, sums = self.before.dtype, [self.before + self.change]
        sums.append(self.before.to(self.grid).to(dtype) + self.change)
        return [total.to(self.grid).to(dtype) for total in sums]

    def _share(self, tensor: Tensor) -> float:
        """How many times D a tensor holds."""
        return float((tensor * self.change).sum() / self.change.square().sum().clamp_min(1e-45))

    def spread(self, change: Tensor) -> float:
        """What rounding may add to, or take from, the number of times that a change is held."""
        return 2 * float((self.unit * change).norm() / change.square().sum().clamp_min(1e-45))

    def _is_noise(self, rest: Tensor, change: Tensor) -> bool:
        """Whether a rest has no pattern: its largest singular value is one of rounding, or of a share of a change."""
        noise = self.unit.norm(dim=1).max() + self.unit.norm(dim=0).max()
        return largest_singular_value(rest) <= float(noise + change.norm())

    def factor(self, change: Tensor) -> float | None:
        """The number c for which M is W + c times a change, up to rounding; None where there is none."""
        square = float(change.square().sum())
        if square == 0:
            return None
        factor = float((self.gained * change).sum()) / square
        rest = self.gained - factor * change
        part = 0.05 * factor * change
        fits = float(rest.norm()) <= float(self.unit.norm() + part.norm()) and self._is_noise(rest, part)
        return factor if fits else None

    def ranks(self, low: LowRank, flipped: bool) -> int:
        """How many of the first ranks of the adapter's change alone M seems to hold; 0 where none or all."""
        a, b = (factor.to(self.gained.dtype) for factor in low.flat())
        gained = self.gained.mT if flipped else self.gained
        gram = (b.mT @ b) * (a @ a.mT)
        inner = (b * (gained @ a.mT)).sum(0)
        shares = torch.linalg.lstsq(gram.double(), inner[:, None].double(), driver="gelsd").solution[:, 0]
        held = shares > shares.max() / 2
        first = int(held.to(torch.int).cumprod(0).sum())
        return first if 0 < first < len(shares) and first == int(held.sum()) else 0

    @cached_property
    def rank(self) -> int:
        """Rank of what M is off, above its rounding, on a sample of rows and columns; their number where it is full."""
        rows, columns = (max(1, -(-n // SAMPLED)) for n in self.off.shape)
        values = torch.linalg.svdvals(self.off[::rows, ::columns])
        sampled = self.unit[::rows, ::columns]
        noise = sampled.norm(dim=1).max() + sampled.norm(dim=0).max()
        return int((values > torch.maximum(noise, 1e-4 * values[0])).sum())

    @property
    def is_full(self) -> bool:
        """Whether that rank is more than an adapter has."""
        return 2 * self.rank > min(SAMPLED, *self.off.shape)


def largest_singular_value(matrix: Tensor, steps: int = 3) -> float:
    """The largest singular value of a matrix from below, by the power method on a fixed vector."""
    vector = torch.randn(matrix.shape[1], 1, generator=torch.Generator().manual_seed(0)).to(matrix)
    value = 0.0
    for _ in range(steps):
        image = matrix @ vector
        vector = matrix.mT @ (image / image.norm().clamp_min(1e-30))
        value = float(vector.norm())
        vector = vector / max(value, 1e-30)
    return value


def as_matrix(tensor: Tensor) -> Tensor:
    """A tensor with its first dimension against all others; a vector as one row."""
    return tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def grid_of(tensor: Tensor, stored: torch.dtype) -> torch.dtype:
    """The coarsest dtype whose numbers a tensor's all are: a merge in bfloat16 may be stored in float32."""
    kinds: Sequence[torch.dtype] = (torch.bfloat16, torch.float16, torch.float32)
    wider = [kind for kind in kinds if stored.itemsize > kind.itemsize] if tensor.numel() >= 16 else []
    return next((kind for kind in wider if torch.equal(tensor.to(kind).to(tensor.dtype), tensor)), stored)
