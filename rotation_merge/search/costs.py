"""Estimates of a candidate's time from measured times and the amount of work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rotation_merge.architecture import Architecture
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin.recipe.delegates import OWN
from rotation_merge.mergekit_plugin.recipe.names import OPTIONS
from rotation_merge.report.estimate import averaging, estimate
from rotation_merge.search.candidates import CHANGES, FAR, Candidate

WRITING = 1.3
"""A model takes so much longer to write a text than to read it, many texts at once."""

REFIT = 7.0
"""Time of a refit, as a multiple of the time in which its models read the samples: they answer, and each layer of the
merge runs before each of its solves."""

STATISTICS = 3.0
"""Time of measuring Grams, as a multiple of reading the samples."""

SPARSIFYING = 1.5e-7
"""Seconds that mergekit takes to choose the largest changes, a weight and model."""

SCALED = 5.0
"""Scales that the search for the best one measures."""

SEEN = 8.0
"""Time of matching on samples, as a multiple of matching on weights, until one has been measured."""


@dataclass
class Costs:
    """Measured times, and the estimates made from them.

    Attributes:
        architecture, shapes: of the anchor.
        per_token: seconds that a model takes to read a token (or an image).
        tokens: of each model's samples to merge with.
        judging: seconds that judging a merge takes, from loading it on.
        written: whether models write their samples whenever they are merged with.
        relation: of the models: shared, near or far.
        done: seconds of the candidates so far, by name.
        kinds: by kind, expected and measured seconds of each.
    """

    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    per_token: float
    tokens: float
    judging: float = 0.0
    written: bool = False
    relation: str = FAR
    done: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def record(self, candidate: Candidate, seconds: float) -> None:
        """Record the time of a candidate."""
        expected = self._work(candidate, 0.0)
        self.done[candidate.name] = seconds
        plain = self.done.get("plain", 0.0)
        self.kinds.setdefault(candidate.kind, []).append((expected, max(seconds - plain, 0.0)))

    def expected(self, candidate: Candidate, remaining: float) -> float:
        """Seconds that a candidate will take.

        Args:
            remaining: of the budget, of which learning takes half.
        """
        plain = self.done.get("plain")
        if plain is None:
            return self._matching(candidate) + self.judging + self._work(candidate, remaining)
        known = [(before, took) for before, took in self.kinds.get(candidate.kind, ()) if before > 0.1]
        rate = known[-1][1] / known[-1][0] if known and candidate.kind != "learned" else 1.0
        return plain + rate * self._work(candidate, remaining)

    def _work(self, candidate: Candidate, remaining: float) -> float:
        """Seconds beyond a plain merge of the same models."""
        read = self.per_token * self.tokens * len(candidate.models)
        write = WRITING * read if self.written else 0.0
        matching = self._matching(candidate)
        matching -= min(matching, self._plain)
        extra = {
            "learned": remaining / 2,
            "refit": REFIT * read + write,
            "seen": REFIT * read + write + (SEEN - 1) * matching,
            "regmean": STATISTICS * read + write,
            "changes": self._averaging(candidate),
            "searched": SCALED * self.judging + self._averaging(candidate),
        }
        return matching + extra.get(candidate.kind, 0.0)

    def _averaging(self, candidate: Candidate) -> float:
        """The estimate for a delegate that merges task vectors."""
        name = str(candidate.parameters.get("delegate"))
        method = OWN.get(name)
        if not isinstance(method, TaskVectorMethod):
            weights = sum(map(math.prod, self.shapes.values()))
            return SPARSIFYING * weights * len(candidate.models) if "density" in CHANGES.get(name, ()) else 0.0
        return averaging(method, {}, self.architecture, dict(self.shapes), len(candidate.models)).seconds

    @property
    def _plain(self) -> float:
        return self._seconds(AlignConfig(attention="none", heads="none", ffn="none", scaling=False))

    def _matching(self, candidate: Candidate) -> float:
        """The estimate for aligning its donors and averaging."""
        chosen = {name: candidate.parameters[name] for name in OPTIONS if name in candidate.parameters}
        return self._seconds(AlignConfig(**chosen)) * (len(candidate.models) - 1)

    def _seconds(self, options: AlignConfig) -> float:
        estimated = estimate(self.architecture, dict(self.shapes), options, 4, 4)
        return estimated.seconds if self.relation == FAR else estimated.near_seconds
