"""Loss along straight paths between models, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from statistics import fmean, pstdev
from typing import Any

from rotation_merge.errors import RotationMergeError

FILE = "barrier.json"
"""Name under which a barrier lies beside a merged model."""

CENTRE = "the centre"
"""Name of the mean of three or more models."""

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

    def barrier(self) -> float:
        """Largest excess of the loss over the straight line between the ends."""
        first, last = self.loss[0], self.loss[-1]
        return max(loss - ((1 - t) * first + t * last) for t, loss in zip(self.t, self.loss, strict=True))

    def gain(self) -> tuple[float, float]:
        """The largest fall of the loss below the straight line between the ends, and its position."""
        first, last = self.loss[0], self.loss[-1]
        falls = [((1 - t) * first + t * last - loss, t) for t, loss in zip(self.t, self.loss, strict=True)]
        return max(falls)

    def verdict(self) -> str | None:
        """A sentence on a path without a barrier; None if there is a barrier."""
        gain, place = self.gain()
        if self.barrier() >= gain or gain < LEAST_GAIN:
            return None
        return (
            f"no barrier on the path, {self.name}: at {place:.2g} the loss is {gain:.4f} below the straight line "
            "between its ends"
        )

    def middle(self) -> int:
        return min(range(len(self.t)), key=lambda i: abs(self.t[i] - 0.5))


@dataclass(frozen=True)
class Barrier:
    """Paths between two models, a curve for each matching.

    Attributes:
        anchor, donor: the models at the ends: the anchor and a donor, two donors, or a model and the centre of all.
        options: of the curve `aligned`, which the recipe or the command asks for; none where it is not there.
        head: of models that keep heads of their own: the one whose head and config all on the paths have.
        over_anchors: by curve, the barrier of this path with each model in turn as the anchor, by its name.
    """

    anchor: str
    donor: str
    data: str
    task: str
    examples: int
    options: dict[str, Any]
    curves: list[Curve]
    over_anchors: dict[str, dict[str, float]] = field(default_factory=dict)
    head: str = ""

    @property
    def figure(self) -> str:
        """The name of the figure that `accuracy` holds."""
        return FIGURES.get(self.task, "accuracy")

    def to_dict(self) -> dict[str, Any]:
        return {"measures": {c.name: self._measures(c) for c in self.curves}, **asdict(self)}

    def _measures(self, curve: Curve) -> dict[str, float]:
        figures = {"barrier": curve.barrier(), "below_line": curve.gain()[0], "middle_loss": curve.loss[curve.middle()]}
        if turns := list(self.over_anchors.get(curve.name, {}).values()):
            figures |= {"mean_over_anchors": fmean(turns), "spread_over_anchors": pstdev(turns)}
        return figures

    def words(self) -> list[str]:
        """Sentences on the curves."""
        verdicts = [words for curve in self.curves if (words := curve.verdict())]
        for name, turns in self.over_anchors.items():
            least, most, mean = min(turns.values()), max(turns.values()), fmean(turns.values())
            verdicts.append(
                f"over {len(turns)} anchors the barrier, {name}, is {least:.4f} to {most:.4f}, mean {mean:.4f}"
            )
        return verdicts

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Barrier:
        fields = {"over_anchors": {}, "head": "", **data}
        fields = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "curves": [Curve(**curve) for curve in fields["curves"]]})

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def read_barriers(path: str) -> list[Barrier]:
    """Read the file that `rotation-merge barrier` wrote.

    Raises:
        RotationMergeError: the file is damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            entries = json.load(file)
        return [Barrier.from_dict(entry) for entry in (entries if isinstance(entries, list) else [entries])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RotationMergeError(f"is not a barrier ({error})", where=path, remedy="measure it again") from error
