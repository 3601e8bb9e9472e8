"""The time of a search: the current step, its estimate, and the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rotation_merge.errors import RotationMergeError
from rotation_merge.workers.progress import listening

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
            raise OutOfTime("ran out of time", remedy="give a longer --budget")

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
        if activity != self.activity:
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
