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

Measure = Callable[[Any, Figures | None], tuple[float, Figures]]


def best_scale(
    merged: Any, base: Any, scale: float, first: tuple[float, Figures], measure: Measure
) -> tuple[float, Figures]:
    """Search the scale of a merged change with the lowest score, in steps from the first one.

    A scale by which the merge forgets too much comes after every other one. One that is surely worse than the best one
    so far is stopped after its first samples.

    Args:
        merged: the base with `scale` times the merged change; left as the base with some multiple of it.
        first: excess forgetting and figures of `merged`.
        measure: excess forgetting and figures of a model, given the best figures so far.

    Returns:
        The scale and its figures.
    """
    starts, place = base.state_dict(), 0.0
    measured: dict[float, tuple[float, Figures]] = {0.0: first}

    @torch.no_grad()
    def better(step: float, best: float) -> bool:
        """Evaluate some steps from the first scale; returns whether the score is better than the best so far."""
        nonlocal place
        if step in measured or len(measured) == MOST:
            return False
        held = (*merged.named_parameters(), *merged.named_buffers())  # tied tensors once, since they move in place
        for name, tensor in held:
            if name in starts and tensor.is_floating_point():
                tensor.copy_(torch.lerp(starts[name].to(tensor), tensor, STEP ** (step - place)))
        place = step
        excess, figures = measured[best]
        measured[step] = measure(merged, None if excess else figures)
        after, now = measured[step]
        return not now.unfinished and (after, now.score) < (excess, figures.score)

    best = 0.0
    for move in (1.0, -1.0, 0.5, -0.5):
        while better(best + move, best):
            best += move
    return round(scale * STEP**best, 3), measured[best][1]
