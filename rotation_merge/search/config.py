"""Options of a search."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rotation_merge.config import DTYPES, KINDS, Config, Kind, option

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")


def seconds(time: Any) -> float:
    """Convert a time such as 90s, 10m or 2h to seconds; numbers are seconds already. 0 if it is no time."""
    match = _TIME.fullmatch(time.strip()) if isinstance(time, str) else None
    if match is not None:
        return float(match[1]) * UNITS[match[2]]
    return float(time) if KINDS[float].holds(time) else 0.0


TIME = Kind("seconds, or a time such as 90s, 10m or 2h", lambda value: seconds(value) > 0)


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Options of the search for the best merge."""

    samples: int = option(64, "number of samples of each set to merge with", low=8)
    budget: float | str = option("10m", "time for the search, as `90s`, `10m` or `2h`", TIME)
    seed: int = option(0, "seed of all random numbers")
    length: int = option(128, "tokens in a window of text", low=2)
    batch_size: int = option(8, "examples in a batch", low=1)
    dtype: str | None = option(None, "type of the weights. Not given: that of the models", str, choices=DTYPES)
    base: str | None = option(None, "common base of the models. Not given: found from adapters, cards or weights", str)

    @property
    def seconds(self) -> float:
        """Time for trying."""
        return seconds(self.budget)
