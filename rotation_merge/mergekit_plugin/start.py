"""A command's start and end without Python's collector, which looks at all that libraries hold again and again.

While mergekit imports torch and transformers nothing is there to be collected, and when the process ends everything
goes anyway; together it is more than a second of every merge. Only where a command is given a recipe of ours.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_METHOD = b"rotation_merge"  # as in recipe/names.py, which is not to be imported before the collector is held
_LOOKED_AT = 1 << 20  # bytes of a recipe


@contextmanager
def collector_held() -> Iterator[None]:
    """Turn garbage collection off in the block and freeze its objects, also when Python ends."""
    if not gc.isenabled() or not any(map(_is_ours, sys.argv[1:])):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.freeze)


def _is_ours(argument: str) -> bool:
    """Whether a command's argument is a file that names our method."""
    try:
        with open(argument, "rb") as file:
            return _METHOD in file.read(_LOOKED_AT)
    except (OSError, ValueError):
        return False
