"""How long a candidate will take: what this machine took so far, and the estimate for matching in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rotation_merge.architectures import Architecture
from rotation_merge.choosing.candidates import Candidate
from rotation_merge.matching.options import MatchOptions
from rotation_merge.recipe.names import OPTIONS
from rotation_merge.report.estimate import estimate

PASSES = 12.0
"""Passes of a model over the samples that a refit takes for every model, until one has been measured."""

SEEN = 8.0
"""Matching on samples takes so many times what matching on weights alone takes, until one has been measured."""


@dataclass
class Costs:
    """What is known of times.

    Attributes:
        architecture, shapes: of the anchor.
        forward: seconds that one model takes over the samples that decide.
        writing: seconds that one model takes to write the samples that it is merged with; 0 where they are given.
        done: seconds of the candidates so far, by name.
        kinds: kind of each of them: matching alone, refit, regmean, seen, learned.
    """

    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    forward: float
    writing: float = 0.0
    done: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def took(self, candidate: Candidate, seconds: float) -> None:
        """What a candidate took."""
        self.done[candidate.name] = seconds
        self.kinds.setdefault(candidate.kind, []).append((self.matching(candidate), seconds))

    def matching(self, candidate: Candidate) -> float:
        """The estimate for aligning its donors, seconds."""
        chosen = {name: candidate.parameters[name] for name in OPTIONS if name in candidate.parameters}
        shapes = dict(self.shapes)
        return estimate(self.architecture, shapes, MatchOptions(**chosen), 4, 4).seconds * (len(candidate.models) - 1)

    def expected(self, candidate: Candidate, left: float) -> float | None:
        """Seconds that a candidate will take; None where nothing is known yet.

        Args:
            left: of the budget, of which learning takes half.
        """
        plain = self.done.get("plain")
        if plain is None:
            return None
        matching, rate = self.matching(candidate), self._rate(plain)
        known = self.kinds.get(candidate.kind)
        if known and candidate.kind != "matching":
            before, took = known[-1]
            return max(took + rate * (matching - before), plain)
        extra = {
            "learned": left / 2,
            "refit": (PASSES * self.forward + self.writing) * len(candidate.models),
            "seen": (PASSES * self.forward + self.writing) * len(candidate.models) + (SEEN - 1) * rate * matching,
            "regmean": (2 * self.forward + self.writing) * len(candidate.models),
        }
        return plain + rate * matching + extra.get(candidate.kind, 0.0)

    def _rate(self, plain: float) -> float:
        """Seconds that matching takes for each one that was estimated; 1 until some has been measured."""
        found = [(before, took) for before, took in self.kinds.get("matching", ()) if before > 0]
        return max(took - plain for _, took in found) / max(max(before for before, _ in found), 0.1) if found else 1.0
