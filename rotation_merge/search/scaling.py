"""The search for `lambda`, on the line from the base through a merge, without merging again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rotation_merge.search.judge import Figures

STEP = 1.25
"""Two scales that are tried side by side differ by this factor, in the end by its root."""

MOST = 8
"""So many scales are measured, at the most."""

Rank = Callable[[Figures], tuple[float, float]]
"""The sort key of merges: the best one first."""


def best_scale(
    merged: Any,
    base: Any,
    scale: float,
    measure: Callable[[Any], Figures],
    rank: Rank,
    over: Callable[[], bool] = lambda: False,
) -> tuple[float, Figures]:
    """Search the scale of a merged change with the lowest score, in steps from the first one.

    Args:
        merged: the base with `scale` times the merged change; left as the base with some multiple of it.
        measure: the figures of a model.
        over: whether no more scales may be measured.

    Returns:
        The scale and its figures.
    """
    starts, place = base.state_dict(), 0.0
    measured = {0.0: measure(merged)}

    @torch.no_grad()
    def better(step: float, best: float) -> bool:
        """Evaluate some steps from the first scale; returns whether it is better than the best so far."""
        nonlocal place
        if step in measured or len(measured) == MOST or over():
            return False
        held = (*merged.named_parameters(), *merged.named_buffers())  # tied tensors once, since they move in place
        for name, tensor in held:
            if name in starts and tensor.is_floating_point():
                tensor.copy_(torch.lerp(starts[name].to(tensor), tensor, STEP ** (step - place)))
        place = step
        measured[step] = measure(merged)
        return rank(measured[step]) < rank(measured[best])

    best = 0.0
    for move in (1.0, -1.0, 0.5, -0.5):
        while better(best + move, best):
            best += move
    return round(scale * STEP**best, 3), measured[best]
