"""Returns freed memory to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

LARGE = 1 << 23
"""Bytes of a layer whose end is worth a look."""


def give_back(layer: nn.Module | None) -> None:
    """Return what is free to the system, where the C library can, once a layer has been worked on (None: what stands
    outside of the layers): else what it leaves lies scattered between what stays, and the process grows with each.
    """
    size = 0 if layer is None else sum(parameter.nbytes for parameter in layer.parameters())
    if size >= LARGE and (trim := _trim()) is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], Any] | None:
    """glibc's malloc_trim; None: this is another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
