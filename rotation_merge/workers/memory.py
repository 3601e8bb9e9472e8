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
    """Return free memory to the system after a layer (None: tensors outside of the layers), if the C library can.

    Otherwise fragmentation makes the process grow with each layer.
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
