"""Options of measuring and evaluating models; commands read them before torch is imported."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le, MinLen
from pydantic.dataclasses import dataclass

from rotation_merge.config import Config, Count, Length, option
from rotation_merge.run.sample_kinds import SAMPLES, ReadingConfig

FILE = "barrier.json"
"""Name under which a barrier lies beside a merged model."""


@dataclass(frozen=True)
class MeasureConfig(Config):
    """Options of measuring a model."""

    kinds: Annotated[tuple[Literal["gram", "fisher"], ...], MinLen(1)] = option(("gram",), "what to measure")
    labels: Literal["sampled", "data"] = option(
        "sampled",
        "labels of the gradients: sampled from the model (exact for classifiers), or those of the data",
    )
    seed: int = option(0, "seed of the samples that the model writes and of sampled labels")
    samples: Count | None = option(
        None, f"largest number of samples. Not given: all of a file, {SAMPLES} of `self` and `synthetic`"
    )
    batch_size: Count = option(16, "examples in a batch")
    length: Length = option(128, "tokens in a window of text")


@dataclass(frozen=True)
class EvaluateConfig(ReadingConfig):
    """Options of evaluation."""


@dataclass(frozen=True)
class BarrierConfig(ReadingConfig):
    """Options of evaluating models on a path."""

    points: Annotated[int, Ge(3), Le(101)] = option(11, "models on the path")
