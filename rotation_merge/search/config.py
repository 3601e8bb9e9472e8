"""Options of the search for the best merge."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from annotated_types import Ge, Predicate
from pydantic.dataclasses import dataclass

from rotation_merge.config import Config, Count, Dtype, Kind, Length, option

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")


def seconds(time: Any) -> float:
    """Convert a time such as 90s, 10m or 2h to seconds; a number is seconds already. 0 if it is no time."""
    match = _TIME.fullmatch(time.strip()) if isinstance(time, str) else None
    if match is not None:
        return float(match[1]) * UNITS[match[2]]
    return float(time) if type(time) in (int, float) and math.isfinite(time) else 0.0


def words_of(time: float) -> str:
    """Seconds as a time."""
    return f"{time:g}s" if time < UNITS["m"] else f"{time / UNITS['m']:.3g}m"


Time = Annotated[Any, Predicate(seconds), Kind("seconds, or a time such as 90s, 10m or 2h")]


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """Options of the search for the best merge."""

    samples: Annotated[int, Ge(8)] = option(64, "number of samples of each set to merge with")
    budget: Time = option("10m", "time in which new merges are tried, as `90s`, `10m` or `2h`")
    seed: int = option(0, "seed of all random numbers")
    length: Length = option(128, "tokens in a window of text")
    batch_size: Count = option(8, "examples in a batch")
    dtype: Dtype | None = option(None, "type of the weights. Not given: that of the models")
    base: str | None = option(None, "common base of the models. Not given: found from adapters, cards or weights")
