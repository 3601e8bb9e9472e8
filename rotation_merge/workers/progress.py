"""Progress of long work, told to whoever listens: a search that runs merges, for example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, float, float], None]
"""Told what is done, how much of it, and how much there is (0: unknown). It may raise to end the work."""

_listener: ContextVar[Progress | None] = ContextVar("rotation_merge_progress", default=None)


@contextmanager
def listening(listener: Progress) -> Iterator[None]:
    """Within the block, `listener` is told of the progress of everything that this thread begins."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Progress:
    """Whoever listens to this thread; a function that does nothing where nobody does."""
    return _listener.get() or _nobody


def _nobody(what: str, done: float, total: float) -> None:
    pass
