r"""Sums over samples of linear maps' inputs, from which Grams are made.

For inputs x of a map the sum of ``(x, 1) (x, 1)^T`` is kept (x is the normalised input if a norm feeds the map).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.run.maps import LinearMap

Sums = dict[str, Tensor]
"""Accumulators in float64, and counts in int64, by `map.what`."""


@dataclass
class Collector:
    """Sums Grams of a watched model.

    Attributes:
        maps: by name.
        shared: the map whose inputs stand for those of each.
        blocks: names of the blocks whose maps are looked at.
        sums: the sums so far.
    """

    maps: Mapping[str, LinearMap]
    shared: Mapping[str, str]
    blocks: Collection[str]
    sums: Sums = field(default_factory=dict)

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        linear = self.maps[name]
        if self.shared.get(name) != name or linear.block.name not in self.blocks:
            return
        rows = x.detach().flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self._count(f"{name}.count", linear, expert, len(rows))
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        self._add(f"{name}.gram", linear, expert, rows.T @ rows)

    def on_output(self, name: str, expert: int | None, y: Tensor) -> None:
        pass

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


def finished(sums: Sums, dtype: torch.dtype) -> dict[str, Tensor]:
    """Means from stored sums."""
    result: dict[str, Tensor] = {}
    for key, total in sums.items():
        name, _, statistic = key.rpartition(".")
        result[key] = _mean(total, sums[f"{name}.count"]).to(dtype) if statistic == "gram" else total
    return result


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Sums divided by the number of rows, for each expert separately; zero without rows."""
    divisor = count.clamp(min=1).double().to(total.device)
    return total / divisor.reshape(*divisor.shape, *[1] * (total.ndim - divisor.ndim))
