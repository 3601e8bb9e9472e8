"""What carrying brings and what it destroys, in losses on samples held out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rotation_merge.run.data import Data
from rotation_merge.run.evaluate import evaluate

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Of a carried change, among which held-out samples choose."""

LITTLE = 0.1
"""Share of the gain at home below which training again is the advice."""

Both = tuple[float, float]
"""Losses on samples of the fine-tune's kind, and on text that the new base writes."""


@dataclass(frozen=True)
class Losses:
    """Mean losses in nats on samples held out: of the fine-tune's kind, and on text that the new base writes.

    Attributes:
        old, tuned: of the old pair, on the fine-tune's kind; new, own: of the new base, on either.
        carried: by scale, on both.
        writes: whether the new base writes text; where not, the second loss of each pair is the first.
    """

    old: float
    tuned: float
    new: float
    own: float
    carried: dict[float, Both]
    writes: bool = True

    @property
    def best(self) -> float:
        """The scale with the least sum of both losses."""
        return min(self.carried, key=lambda scale: sum(self.carried[scale]))

    def words(self, scale: float, where: str = "") -> list[str]:
        """What the user should know of the scale that was taken (called `where` in words)."""
        there, own = self.carried[scale]
        home = self.old - self.tuned
        lines = [
            f"On samples held out (loss in nats): the old base {self.old:.3f}, its fine-tune {self.tuned:.3f}; the new "
            f"base {self.new:.3f}, carried {there:.3f} {where or f'at scale {scale:g}'}.",
            f"On text that the new base writes itself: {self.own:.3f} before, {own:.3f} after."
            if self.writes
            else "What it costs the new base on its own domain was not measured: it writes no text.",
        ]
        if scale == 0:
            return [*lines, "Nothing is worth carrying: every scale is worse than none. Train on the new base instead."]
        share = (self.new - there) / home if home > 0 else None
        if share is None:
            lines.append(
                "The fine-tune is no better on these than its base, so what arrives of it cannot be told: give samples "
                "of what it was tuned for (--data)."
            )
        if share is not None:
            lines.append(f"That is {share:.0%} of what fine-tuning gained at home.")
        if share is not None and 0 < share < LITTLE:
            lines.append("That is little: where the training data are still there, train on the new base instead.")
        if there >= self.new:
            lines.append("Nothing of it arrives. Train on the new base instead.")
        return lines


def both(model: Any, held_out: Data, own: Data) -> Both:
    """A model's losses on either."""
    return evaluate(model, held_out)[0], evaluate(model, own)[0]
