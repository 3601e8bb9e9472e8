r"""Sums over samples of linear maps' inputs and gradients, from which statistics are made.

For inputs x of a map the sum of ``(x, 1) (x, 1)^T`` is kept (x is the normalised input if a norm feeds the map); for
gradients g of its outputs, that of ``g g^T``. Of wide inputs a sketch is kept instead of the whole: the diagonal and
``G Omega`` with a random Omega, from which Nystroem's formula makes ``diag(d) + U U^T``.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.run import sample_kinds
from rotation_merge.run.maps import LinearMap

KINDS = sample_kinds.STATISTICS

WIDEST = 8192
"""Wider inputs of neurons are sketched, and of wider outputs no gradients are kept."""

RANK = 256
"""Rank of a sketch where none is asked for."""

SPARE = 16
"""Columns of a sketch beyond its rank, which make it precise."""

Sums = dict[str, Tensor]
"""Accumulators in float64, and counts in int64, by `map.what`."""


@dataclass(frozen=True)
class StatisticsSelection:
    """The statistics to collect.

    Attributes:
        kinds: of KINDS.
        rank: of the sketch of inputs that neurons give; None: full up to WIDEST coordinates.
        blocks: names of the blocks whose maps are looked at.
    """

    kinds: tuple[str, ...]
    rank: int | None
    blocks: Collection[str]

    def rank_of(self, linear: LinearMap) -> int | None:
        """The rank of a map's inputs; None: all. Only neurons have one, as a rotation makes a diagonal dense."""
        size = linear.inputs.size or 0
        neurons = bool(linear.inputs.parts) and all(part.role == "out" for part in linear.inputs.parts)
        if not neurons or (self.rank is None and size <= WIDEST):
            return None
        rank = RANK if self.rank is None else self.rank
        return rank if rank + SPARE < size else None


def has_gradient(linear: LinearMap) -> bool:
    """Whether gradients of a map's outputs are kept: of vocabularies and very wide maps they are not."""
    return linear.outputs.label != "vocabulary" and (linear.outputs.size or 0) <= WIDEST


@dataclass
class Collector:
    """Sums statistics of a watched model.

    Attributes:
        maps: by name.
        shared: the map whose inputs stand for those of each.
        sums: the sums so far.
        watched: outputs of the maps in this batch whose gradients are wanted.
    """

    maps: Mapping[str, LinearMap]
    shared: Mapping[str, str]
    selection: StatisticsSelection
    sums: Sums = field(default_factory=dict)
    watched: list[tuple[str, int | None, Tensor]] = field(default_factory=list)

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        linear = self.maps[name]
        if self.shared.get(name) != name or linear.block.name not in self.selection.blocks:
            return
        rows = x.detach().flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self._count(f"{name}.count", linear, expert, len(rows))
        if {"gram", "kfac"} & set(self.selection.kinds):
            rank = self.selection.rank_of(linear)
            if rank is None:
                rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
                self._add(f"{name}.gram", linear, expert, rows.T @ rows)
            else:
                self._add(f"{name}.diagonal", linear, expert, rows.square().sum(0))
                self._add(f"{name}.sketch", linear, expert, rows.T @ (rows @ omega(linear, rank).to(rows)))
        if "moments" in self.selection.kinds:
            self._add(f"{name}.moments", linear, expert, torch.stack([rows.sum(0), rows.square().sum(0)]))

    def on_output(self, name: str, expert: int | None, y: Tensor) -> None:
        linear = self.maps[name]
        needs_gradient = (
            "kfac" in self.selection.kinds and linear.block.name in self.selection.blocks and has_gradient(linear)
        )
        if needs_gradient and y.requires_grad:
            self.watched.append((name, expert, y))

    def add_gradients(self, gradients: list[Tensor | None], count: bool) -> None:
        """Gradients of `given`, in order; `count` their rows once for each example."""
        for (name, expert, y), gradient in zip(self.watched, gradients, strict=True):
            linear = self.maps[name]
            if count:
                self._count(f"{name}.given", linear, expert, y.flatten(0, -2).shape[0])
            if gradient is not None:
                rows = gradient.flatten(0, -2)
                self._add(f"{name}.gradient", linear, expert, rows.T @ rows)

    def _add(self, key: str, linear: LinearMap, expert: int | None, value: Tensor) -> None:
        if key not in self.sums:
            shape = value.shape if expert is None else (_experts(linear), *value.shape)
            self.sums[key] = torch.zeros(shape, dtype=torch.float64, device=value.device)
        total = self.sums[key] if expert is None else self.sums[key][expert]
        total += value

    def _count(self, key: str, linear: LinearMap, expert: int | None, rows: int) -> None:
        if key not in self.sums:
            self.sums[key] = torch.zeros(() if expert is None else (_experts(linear),), dtype=torch.int64)
        total = self.sums[key] if expert is None else self.sums[key][expert]
        total += rows


def _experts(linear: LinearMap) -> int:
    return linear.info.axes[0].size or 1


def omega(linear: LinearMap, rank: int) -> Tensor:
    """The random matrix of a sketch, (size, rank + SPARE), the same for a map in every run."""
    draw = torch.Generator().manual_seed(zlib.crc32(linear.info.key.encode()))
    return torch.randn(linear.inputs.size or 0, rank + SPARE, dtype=torch.float64, generator=draw)


def finished(
    sums: Sums, maps: Mapping[str, LinearMap], selection: StatisticsSelection, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Means from stored sums."""
    result: dict[str, Tensor] = {}
    for key, total in sums.items():
        name, _, statistic = key.rpartition(".")
        if statistic in ("gram", "moments"):
            mean = _mean(total, sums[f"{name}.count"])
            result[key] = mean.to(dtype)
        elif statistic == "gradient":
            result[key] = _mean(total, sums[f"{name}.given"]).to(dtype)
        elif statistic == "sketch":
            linear = maps[name]
            count, rank = sums[f"{name}.count"], selection.rank_of(linear) or 0
            diagonal, sketch = _mean(sums[f"{name}.diagonal"], count), _mean(total, count)
            residual, factor = nystroem(diagonal, sketch, omega(linear, rank).to(sketch), rank)
            result[f"{name}.diagonal"], result[f"{name}.factor"] = residual.to(dtype), factor.to(dtype)
        elif statistic == "count" and name in maps:
            result[key] = total
    return result


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Sums divided by the number of rows, for each expert separately; zero without rows."""
    divisor = count.clamp(min=1).double().to(total.device)
    return total / divisor.reshape(*divisor.shape, *[1] * (total.ndim - divisor.ndim))


def nystroem(diagonal: Tensor, sketch: Tensor, omega: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """``G ~ diag(rest) + U U^T`` from the diagonal of G and ``G omega``.

    Args:
        diagonal: (..., n). sketch: (..., n, r). omega: (n, r).

    Returns:
        rest (..., n), at least zero, exact on the diagonal; U (..., n, rank).

    Source: Tropp, Yurtsever, Udell and Cevher 2017, algorithm 3.
    """
    shift = 1e-12 * diagonal.mean(-1)[..., None, None].clamp(min=torch.finfo(torch.float64).tiny)
    shifted = sketch + shift * omega
    core = omega.T @ shifted
    values, vectors = torch.linalg.eigh((core + core.mT) / 2)
    significant = values > 1e-10 * values[..., -1:].clamp(min=torch.finfo(torch.float64).tiny)
    inverse = torch.where(
        significant, values.clamp(min=torch.finfo(torch.float64).tiny).rsqrt(), torch.zeros_like(values)
    )
    whole = shifted @ vectors * inverse[..., None, :]
    u, s, _ = torch.linalg.svd(whole, full_matrices=False)
    factor = (u * s[..., None, :])[..., :rank]
    return (diagonal - factor.square().sum(-1)).clamp(min=0), factor
