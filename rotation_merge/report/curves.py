"""Loss along straight paths between models, as data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rotation_merge.errors import RotationMergeError

FILE = "barrier.json"
"""Name under which a barrier lies beside a merged model, where the report looks for it."""


LEAST_GAIN = 1e-4
"""What a merge has to be better by than the line between its parents, to be said so."""


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
        """How far the loss falls below the straight line between the ends at most, and where."""
        first, last = self.loss[0], self.loss[-1]
        falls = [((1 - t) * first + t * last - loss, t) for t, loss in zip(self.t, self.loss, strict=True)]
        return max(falls)

    def verdict(self) -> str | None:
        """What a path without a barrier means; None where there is one, or the path is the line."""
        gain, place = self.gain()
        if self.barrier() >= gain or gain < LEAST_GAIN:
            return None
        return (
            f"no barrier on the path, {self.name}: at {place:.2g} the merge is {gain:.4f} better than the line between "
            "its parents"
        )

    def middle(self) -> int:
        return min(range(len(self.t)), key=lambda i: abs(self.t[i] - 0.5))


@dataclass(frozen=True)
class Barrier:
    """Paths between an anchor and a donor, aligned and not."""

    anchor: str
    donor: str
    data: str
    task: str
    examples: int
    options: dict[str, Any]
    curves: list[Curve]

    def to_dict(self) -> dict[str, Any]:
        measures = {
            c.name: {"barrier": c.barrier(), "below_line": c.gain()[0], "middle_loss": c.loss[c.middle()]}
            for c in self.curves
        }
        return {"measures": measures, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Barrier:
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**{**fields, "curves": [Curve(**curve) for curve in fields["curves"]]})

    def write(self, path: str) -> None:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file, indent=1)
            file.write("\n")


def read_barriers(path: str) -> list[Barrier]:
    """What `rotation-merge barrier` wrote.

    Raises:
        RotationMergeError: the file is damaged.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return [Barrier.from_dict(one) for one in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RotationMergeError(f"is no barrier ({error})", where=path, remedy="measure it again") from error
