"""Progress of long work, reported to a listener such as a search that runs merges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Progress = Callable[[str, float, float], None]
"""Called with a label, the amount done and the total (0: unknown). It may raise to end the work."""

_listener: ContextVar[Progress | None] = ContextVar("rotation_merge_progress", default=None)


@contextmanager
def listening(listener: Progress) -> Iterator[None]:
    """Within the block, sends the progress of this thread's work to `listener`."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listener() -> Progress:
    """The listener of this thread; a function that does nothing if there is none."""
    return _listener.get() or _nobody


def _nobody(task: str, done: float, total: float) -> None:
    pass
