r"""Sums over samples of the inputs of linear maps, from which Grams are made.

For an input x the sum of ``(x, 1) (x, 1)^T`` is kept (x is the normalised input if a norm feeds its maps).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotation_merge.run.maps import LinearMap
from rotation_merge.run.recorder import Watcher

Sums = dict[str, Tensor]
"""Accumulators in float64 by `AXIS.gram` or `TENSOR.fisher`, and counts in int64 by `AXIS.count`."""


class Collector(Watcher):
    """Sums Grams of a watched model.

    Args:
        maps: by name.
        axes: by map, the (block, axis) that it reads; inputs of others are not looked at.
    """

    def __init__(self, maps: Mapping[str, LinearMap], axes: Mapping[str, str]) -> None:
        self.maps, self.axes, self.sums = maps, axes, Sums()
        self.first_readers = frozenset(first_readers(axes).values())

    def on_input(self, name: str, expert: int | None, x: Tensor) -> None:
        if name not in self.first_readers:
            return
        experts = () if expert is None else (self.maps[name].info.axes[0].size or 1,)
        rows = x.detach().flatten(0, -2)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        self._add(f"{self.axes[name]}.count", experts, expert, torch.tensor(len(rows)))
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        self._add(f"{self.axes[name]}.gram", experts, expert, rows.T @ rows)

    def _add(self, key: str, experts: tuple[int, ...], expert: int | None, value: Tensor) -> None:
        if key not in self.sums:
            dtype = torch.float64 if value.is_floating_point() else torch.int64
            self.sums[key] = torch.zeros((*experts, *value.shape), dtype=dtype, device=value.device)
        total = self.sums[key] if expert is None else self.sums[key][expert]
        total += value


def first_readers(axes: Mapping[str, str]) -> dict[str, str]:
    """The first map that reads each input, by (block, axis)."""
    return {axis: name for name, axis in reversed([*axes.items()])}


def means(sums: Sums, dtype: torch.dtype) -> dict[str, Tensor]:
    """Grams from sums, each divided by its number of rows (for each expert separately; zero without rows)."""
    result: dict[str, Tensor] = {}
    for key, total in sums.items():
        axis, _, statistic = key.rpartition(".")
        result[key] = _mean(total, sums[f"{axis}.count"]).to(dtype) if statistic == "gram" else total
    return result


def _mean(total: Tensor, count: Tensor) -> Tensor:
    divisor = count.clamp(min=1).double().to(total.device)
    return total / divisor.reshape(*divisor.shape, *[1] * (total.ndim - divisor.ndim))
