"""The time of a search: the current step, its estimate, the deadline, and the costs of candidates."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

from rotation_merge.architecture import Architecture
from rotation_merge.averaging.task_vectors import TaskVectorMethod
from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.keys import OPTIONS
from rotation_merge.report.estimate import averaging, estimate
from rotation_merge.search.candidates import CHANGES, FAR, Candidate
from rotation_merge.workers import listening

EVERY = 4.0
"""Seconds between two signs of life."""

Say = Callable[[str], None]


class OutOfTime(RotationMergeError):
    """The budget is spent before the work is done."""


class Clock:
    """Keeps a time budget and prints progress every few seconds; a context manager.

    Args:
        budget: seconds, from `began` on.
        say: shows a line.
        status: shows progress in place of the previous line.
    """

    def __init__(self, budget: float, say: Say, status: Say, began: float | None = None) -> None:
        self.budget, self.began = budget, time.perf_counter() if began is None else began
        self._say, self._status = say, status
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._shown = time.perf_counter()
        self._step: _Step | None = None
        self._deadline: float | None = None

    def __enter__(self) -> Clock:
        self._listening = listening(self.tick)
        self._listening.__enter__()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._listening.__exit__(kind, error, trace)

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """Remaining seconds of the budget, at least 0."""
        return max(self.budget - self.spent, 0.0)

    def say(self, text: str) -> None:
        """Print a line."""
        with self._lock:
            self._say(text)
            self._shown = time.perf_counter()

    @contextmanager
    def step(self, name: str, expected: float | None = None, within: float | None = None) -> Iterator[None]:
        """Name the work inside the block, and estimate its time.

        Args:
            expected: seconds that it will take.
            within: seconds after which it is ended, where it tells of its progress.

        Raises:
            OutOfTime: it was ended.
        """
        before, deadline = self._step, self._deadline
        self._step = _Step(name, expected)
        self._deadline = None if within is None else time.perf_counter() + within
        try:
            yield
        finally:
            self._step, self._deadline = before, deadline

    def tick(self, activity: str, done: float, total: float) -> None:
        """Report the progress of the current work.

        Raises:
            OutOfTime: there is no time for more of it.
        """
        step = self._step
        if step is not None:
            step.tick(activity, done, total)
        if self._deadline is not None and time.perf_counter() > self._deadline:
            raise OutOfTime("ran out of time", remedy="give a longer 'budget'")

    def _beat(self) -> None:
        while not self._stop.wait(0.25):
            with self._lock:
                if self._step is not None and time.perf_counter() - self._shown >= EVERY:
                    self._status(self._step.words())
                    self._shown = time.perf_counter()


class _Step:
    def __init__(self, name: str, expected: float | None) -> None:
        self.name, self.expected, self.began = name, expected, time.perf_counter()
        self.activity, self.done, self.total, self.since = "", 0.0, 0.0, self.began

    def tick(self, activity: str, done: float, total: float) -> None:
        if activity != self.activity or done < self.done:
            self.activity, self.since = activity, time.perf_counter()
        self.done, self.total = done, total

    def words(self) -> str:
        spent = time.perf_counter() - self.began
        activity = f", {self.activity} {self.done:.0f} of {self.total:.0f}" if self.activity and self.total else ""
        remaining = self._left(spent)
        return f"{self.name}{activity}, {spent:.0f} s so far" + (
            f", about {remaining:.0f} s left" if remaining >= 1 else ""
        )

    def _left(self, spent: float) -> float:
        """Remaining seconds: as expected, or extrapolated if the current part is slower."""
        share = self.done / self.total if self.total else 0.0
        part = (time.perf_counter() - self.since) * (1 - share) / share if share > 0.02 else 0.0
        return max((self.expected or 0.0) - spent, part, 0.0)


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
        tied: whether the embedding is the head, too.
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
    tied: bool = False
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
        count = len(candidate.models)
        return averaging(method, {}, self.architecture, dict(self.shapes), count, self.tied).seconds

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
