"""Loss along straight paths between models, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rotation_merge.record import read_as

FILE = "barrier.json"
"""Name under which a barrier lies beside a merged model."""

LEAST_GAIN = 1e-4
"""Least gain over the line between the parents that is reported as better."""

FIGURES = {"regression": "Pearson", "similarity": "Spearman"}
"""Name of the figure beside the loss, by task, if it is no accuracy."""


@dataclass(frozen=True)
class Curve:
    """One path: positions from 0 (anchor) to 1 (donor), loss in nats and accuracy there."""

    name: str
    t: list[float]
    loss: list[float]
    accuracy: list[float]

    def _excess(self) -> list[tuple[float, float]]:
        """Loss above the straight line between the ends, and the position."""
        first, last = self.loss[0], self.loss[-1]
        return [(loss - ((1 - t) * first + t * last), t) for t, loss in zip(self.t, self.loss, strict=True)]

    def barrier(self) -> float:
        """Largest excess of the loss over the straight line between the ends."""
        return max(self._excess())[0]

    def gain(self) -> tuple[float, float]:
        """The largest fall of the loss below the straight line between the ends, and its position."""
        return max((-excess, t) for excess, t in self._excess())

    def verdict(self) -> str | None:
        """A sentence on a path without a barrier; None if there is a barrier."""
        gain, place = self.gain()
        if self.barrier() >= gain or gain < LEAST_GAIN:
            return None
        line = "the straight line between its ends"
        return f"no barrier on the path, {self.name}: at {place:.2g} the loss is {gain:.4f} below {line}"

    def middle(self) -> int:
        return min(range(len(self.t)), key=lambda i: abs(self.t[i] - 0.5))


@dataclass(frozen=True)
class Barrier:
    """Paths between two models, a curve for each matching.

    Attributes:
        anchor, donor: the models at the ends.
        options: of the curve `aligned`, which the recipe or the command asks for; none where it is not there.
        head: of models that keep heads of their own: the one whose head and config all on the paths have.
    """

    anchor: str
    donor: str
    data: str
    task: str
    examples: int
    options: dict[str, Any]
    curves: list[Curve]
    head: str = ""

    @property
    def figure(self) -> str:
        """The name of the figure that `accuracy` holds."""
        return FIGURES.get(self.task, "accuracy")

    def to_dict(self) -> dict[str, Any]:
        measures = {
            c.name: {"barrier": c.barrier(), "below_line": c.gain()[0], "middle_loss": c.loss[c.middle()]}
            for c in self.curves
        }
        return {"measures": measures, **asdict(self)}

    def words(self) -> list[str]:
        """Sentences on the curves."""
        return [words for curve in self.curves if (words := curve.verdict())]


def is_barrier(path: str) -> bool:
    """Whether a file was written by `barrier --save`."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        return bool(read_as(list[Barrier], content if isinstance(content, list) else [content]))
    except (OSError, ValueError):
        return False
