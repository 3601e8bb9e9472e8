"""What a search finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rotation_merge.record import Attempt, Score, Verdict
from rotation_merge.search.judge import Figures


@dataclass
class Tried:
    """One candidate and what it is worth on the deciding samples; `expected`: the seconds that were announced."""

    name: str
    figures: Figures
    seconds: float
    recipe: str
    expected: float | None = None


@dataclass
class Outcome:
    """What was found.

    Attributes:
        tried: by score, the best first; those that were given up last.
        parents, ensemble, best: on the samples that only report, as is `plain`; no ensemble where models divide text
            differently.
        left_out: candidates that the budget had no room for, or that could not be made, and why.
        relations: of every other model: mean cosine of its matrices to the first one's.
        unit, figure: what scores are, and what stands beside them where there are labels.
        samples: those that only report, in words.
        notes: what else there is to know of the figures.
    """

    labelled: bool
    tried: list[Tried]
    parents: dict[str, Figures]
    ensemble: Figures | None
    best: Figures
    plain: Figures | None
    left_out: dict[str, str] = field(default_factory=dict)
    relations: dict[str, float] = field(default_factory=dict)
    unit: str = "loss (nats)"
    figure: str = "accuracy"
    samples: str = "samples that no merge has seen"
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        """What report and card say of it."""

        def score(name: str, figures: Figures | None) -> Score | None:
            return None if figures is None else Score(name, figures.score, figures.accuracy)

        best = self.tried[0].name
        return Verdict(
            self.unit,
            self.figure,
            self.samples,
            [Score(name, figures.score, figures.accuracy) for name, figures in self.parents.items()],
            Score(best, self.best.score, self.best.accuracy),
            score("plain", self.plain),
            score("ensemble", self.ensemble),
            [Attempt(t.name, t.figures.score, t.figures.accuracy, t.seconds, t.figures.unfinished) for t in self.tried],
            dict(self.left_out),
            list(self.notes),
        )

    def to_dict(self) -> dict[str, Any]:
        """For programs; without the losses of single examples."""
        found = asdict(self)
        single = [found["ensemble"], found["best"], found["plain"], *found["parents"].values()]
        for figures in [*single, *(tried["figures"] for tried in found["tried"])]:
            if figures is not None:
                del figures["examples"]
        verdict = self.verdict
        return {**found, "best_parent": verdict.best_parent.name, "worth_it": verdict.worth_it}
