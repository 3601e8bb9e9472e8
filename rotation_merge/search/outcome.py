"""The outcome of a search."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rotation_merge.model.verdict import sentences
from rotation_merge.record import Score, Verdict
from rotation_merge.search.judge import Figures


@dataclass(frozen=True)
class Trial:
    """A candidate and its figures on the selection samples.

    Attributes:
        scale: its `lambda`; None: it has none.
    """

    name: str
    figures: Figures
    seconds: float
    recipe: str
    scale: float | None = None

    @property
    def attempt(self) -> Score:
        """The candidate as a row of report and card."""
        name = self.name if self.scale is None else f"{self.name}, lambda {self.scale:g}"
        return _score(name, self.figures, self.seconds)


def _score(name: str, figures: Figures, seconds: float = 0.0) -> Score:
    return Score(name, figures.score, figures.accuracy, figures.on_base, seconds)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a search.

    Attributes:
        tried: by score, the best first; then those that forget too much.
        parents, ensemble, best: on the samples that only report, as is `plain`.
        left_out: candidates that the budget had no room for, or that could not be made, and why.
        relations: of every other model: mean cosine of its matrices to the first one's.
        unit, figure: unit of the scores, and name of the figure beside them if there are labels.
        samples: those that only report, in words.
        notes: notes on the figures.
        base: figures of the base on the selection samples, with its loss on its own text.
        written: whether the best merge was written.
    """

    labelled: bool
    tried: list[Trial]
    parents: dict[str, Figures]
    ensemble: Figures
    best: Figures
    plain: Figures | None
    left_out: dict[str, str] = field(default_factory=dict)
    relations: dict[str, float] = field(default_factory=dict)
    unit: str = "loss (nats)"
    figure: str = "accuracy"
    samples: str = "held-out samples"
    notes: list[str] = field(default_factory=list)
    base: Figures | None = None
    written: bool = False

    def __repr__(self) -> str:
        return f"Outcome({' '.join(sentences(self.verdict))})"

    @property
    def verdict(self) -> Verdict:
        """The verdict for report and card."""
        return Verdict(
            self.unit,
            self.figure,
            self.samples,
            [_score(name, figures) for name, figures in self.parents.items()],
            _score(self.tried[0].name, self.best),
            None if self.plain is None else _score("plain", self.plain),
            _score("ensemble", self.ensemble),
            [trial.attempt for trial in self.tried],
            dict(self.left_out),
            list(self.notes),
            None if self.base is None else self.base.on_base,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as a dictionary for JSON, without the losses of single texts."""
        facts = asdict(self)
        models = [facts["ensemble"], facts["best"], facts["plain"], *facts["parents"].values(), facts["base"]]
        for figures in filter(None, [*models, *(trial["figures"] for trial in facts["tried"])]):
            del figures["base_texts"]
        verdict = self.verdict
        return {**facts, "best_parent": verdict.best_parent.name, "worth_it": verdict.worth_it}
