"""Functions of mergekit that answer merges of ours otherwise, while such a merge runs, and nobody else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

Replacement = Callable[..., Any]
"""Takes the real function, then its arguments."""

_ours: ContextVar[bool] = ContextVar("rotation_merge_ours", default=False)
_lock = threading.Lock()
_running = 0
_real: list[tuple[ModuleType | type, str, Any]] = []


@contextmanager
def replaced(*functions: tuple[ModuleType | type, str, Replacement]) -> Iterator[None]:
    """Within the block and its thread, other functions in the place of some of mergekit's.

    What other threads merge meanwhile meets the real ones; after the last such block they stand where they stood.
    """
    global _running
    with _lock:
        if _running == 0:
            _real.extend((module, name, getattr(module, name)) for module, name, _ in functions)
            for (module, name, real), (_, _, replacement) in zip(_real, functions, strict=True):
                setattr(module, name, _switch(real, replacement))
        _running += 1
    token = _ours.set(True)
    try:
        yield
    finally:
        _ours.reset(token)
        with _lock:
            _running -= 1
            while _running == 0 and _real:
                module, name, real = _real.pop()
                setattr(module, name, real)


def _switch(real: Callable[..., Any], replacement: Replacement) -> Callable[..., Any]:
    @functools.wraps(real)
    def switch(*args: Any, **kwargs: Any) -> Any:
        return replacement(real, *args, **kwargs) if _ours.get() else real(*args, **kwargs)

    return switch
