"""How the change of one matrix between two models is explained: by an adapter's change, or by a mistake's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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
ENTRIES = 1 << 20
"""Entries at most on which explanations are compared."""
EXPLAINED = 0.5
"""Share of what a matrix gained that an explanation may leave."""


class Fit(NamedTuple):
    """How many times a matrix holds some change, and the norm of what that leaves, rounding taken into account."""

    factor: float
    rest: float


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
    def off(self) -> Tensor:
        """What M is off W + D."""
        return self.after - (self.before + self.change)

    @cached_property
    def unit(self) -> Tensor:
        """Unit of rounding of each entry: of W or W + D, and of D, by the lengths of its row and column."""
        change = self.change
        lengths = change.norm(dim=1, keepdim=True) * change.norm(dim=0, keepdim=True) / change.norm().clamp_min(1e-30)
        weights, changes = self.rounding
        unit = weights * torch.maximum(self.before.abs(), (self.before + change).abs()) + changes * lengths
        return unit + (SMALLEST if weights > 1e-4 else 0.0)

    @cached_property
    def deviation(self) -> float:
        """Largest deviation of M from W + D, in units of the rounding."""
        return float((self.off.abs() / self.unit.clamp_min(1e-45)).max()) if self.off.any() else 0.0

    @property
    def right(self) -> bool:
        """Whether M is W + D up to rounding: no entry is further off, and the rest is no part of D, nor a pattern."""
        if self.deviation > UNITS:
            return False
        rest = min((self.after - x for x in self.sums), key=lambda rest: float(rest.norm()))
        if not rest.any():
            return True
        share = float((rest * self.change).sum() / self.change.square().sum().clamp_min(1e-45))
        allowed = sum(n**0.5 for n in rest.shape) + SHARE * float(self._in_units(self.change).norm())
        return (
            abs(share) <= SHARE + self.spread(self.change) and largest_singular_value(self._in_units(rest)) <= allowed
        )

    @cached_property
    def _starts(self) -> list[Tensor]:
        """W, and W rounded as M is, where that is another: a tool may have rounded it before the change."""
        rounded = self._round(self.before)
        return [self.before] if torch.equal(rounded, self.before) else [self.before, rounded]

    @property
    def sums(self) -> list[Tensor]:
        """W + D, rounded as M is, from each start."""
        return [self._round(start + self.change) for start in self._starts]

    def _round(self, tensor: Tensor) -> Tensor:
        """A matrix rounded as M is; FP8 depends on scales, and is left as it is."""
        return tensor if self.coarse else tensor.to(self.grid).to(tensor.dtype)

    @property
    def coarse(self) -> bool:
        """Whether M is stored in FP8."""
        return self.grid.itemsize == 1

    def _in_units(self, tensor: Tensor) -> Tensor:
        """A matrix in units of the rounding of its rows and columns, which keeps its rank."""
        rows, columns = (self.unit.norm(dim=d, keepdim=True) / self.unit.shape[d] ** 0.5 for d in (1, 0))
        return tensor * (columns.square().mean().sqrt() / (rows * columns).clamp_min(1e-45))

    def spread(self, change: Tensor) -> float:
        """What rounding may add to, or take from, the number of times that a change is held."""
        return 2 * float((self.unit * change).norm() / change.square().sum().clamp_min(1e-45))

    # --- explanations

    def _sample(self, tensor: Tensor) -> Tensor:
        """Some entries, the same of every matrix."""
        return tensor.flatten()[:: -(-tensor.numel() // ENTRIES) | 1]

    def fit(self, change: Tensor, starts: Sequence[Tensor] = ()) -> Fit:
        """How many times M holds a change.

        The number c is the one for which W + c times the change, rounded, holds as much of it as M does.

        Args:
            starts: what W may have been, where it is not the base's.
        """
        change, after = map(self._sample, (change, self.after))
        fits = []
        for start in map(self._sample, starts or self._starts):
            wanted, factor = float(((after - start) * change).sum()), 1.0
            for _ in range(12):
                held = float(((self._round(start + factor * change) - start) * change).sum())
                ratio = wanted / held if held else 4.0
                factor *= -1.0 if ratio < 0 else min(4.0, max(0.25, ratio ** (2 / 3)))
            fits.append(Fit(factor, float((after - self._round(start + factor * change)).norm())))
        return min(fits, key=lambda fit: fit.rest)

    @cached_property
    def gained(self) -> float:
        """Norm of what M gained, up to rounding."""
        before, after = self._sample(self.before), self._sample(self.after)
        return float((after - self._round(before)).norm())

    @cached_property
    def expected(self) -> float:
        """Norm of what it should have gained."""
        before, change = self._sample(self.before), self._sample(self.change)
        return float((self._round(before + change) - self._round(before)).norm())

    def explains(self, fit: Fit) -> bool:
        """Whether a fit leaves little."""
        noise = float(self._sample(self.unit).norm()) if self.coarse else 0.0
        return fit.rest <= max(noise, EXPLAINED * self.gained)

    def first_ranks(self, low: LowRank, flipped: bool) -> int:
        """How many of the first ranks of the adapter's change explain M best; all, where nothing is cut."""
        a, b = (factor.to(self.before.dtype) for factor in low.flat())
        gained = self.after - self.before
        inner = (b * ((gained.mT if flipped else gained) @ a.mT)).sum(0).cumsum(0)
        squares = ((b.mT @ b) * (a @ a.mT)).cumsum(0).cumsum(1).diagonal()
        return int((inner.square() / squares.clamp_min(1e-45)).argmax()) + 1

    @cached_property
    def rank(self) -> int:
        """Rank of what M is off, as far as it is above rounding, on a sample of rows and columns."""
        rows, columns = (-(-n // SAMPLED) for n in self.off.shape)
        sample = self._in_units(self.off)[::rows, ::columns]
        values = torch.linalg.svdvals(sample)
        noise = 0.5 * sum(n**0.5 for n in sample.shape)
        return int((values > max(noise, 1e-4 * float(values[0]))).sum())

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
