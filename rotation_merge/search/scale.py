"""The search for `lambda`, on the line from the base through a merge, without merging again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.search.judge import Figures

STEP = 1.25
"""Two scales that are tried side by side differ by this factor, in the end by its root."""

MOST = 8
"""So many scales are measured, at the most."""


def best_scale(
    merged: Any,
    base: Any,
    scale: float,
    measure: Callable[[Any], Figures],
    rank: Callable[[Figures], tuple[float, float]],
    over: Callable[[], bool] = lambda: False,
) -> tuple[float, Figures]:
    """Search the scale of a merged change with the lowest score, in steps from the first one.

    Args:
        merged: the base with `scale` times the merged change; left as the base with some multiple of it.
        measure: the figures of a model.
        rank: the sort key of merges, the best one first.
        over: whether no more scales may be measured.

    Returns:
        The scale and its figures.
    """
    starts, place, best = base.state_dict(), 0.0, 0.0
    measured = {place: measure(merged)}
    for move in (1.0, -1.0, 0.5, -0.5):
        while (step := best + move) not in measured and len(measured) < MOST and not over():
            _scale(merged, starts, STEP ** (step - place))
            place, measured[step] = step, measure(merged)
            if rank(measured[step]) >= rank(measured[best]):
                break
            best = step
    return round(scale * STEP**best, 3), measured[best]


@torch.no_grad()
def _scale(merged: Any, starts: Mapping[str, Tensor], factor: float) -> None:
    """Move a model along the line from the starts, each tensor once: tied ones move in place."""
    for name, tensor in (*merged.named_parameters(), *merged.named_buffers()):
        if name in starts and tensor.is_floating_point():
            tensor.copy_(torch.lerp(starts[name].to(tensor), tensor, factor))
