"""Checks of the fields of a file from others."""

from __future__ import annotations

import re
from typing import Any


def checked_word(value: Any, pattern: str, name: str) -> str:
    """A text that matches a pattern from end to end.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or not re.fullmatch(pattern, value):
        raise ValueError(f"{value!r} is not a {name}")
    return value


def checked_count(value: Any, name: str) -> int:
    """A whole number from zero on.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a {name}")
    return value
