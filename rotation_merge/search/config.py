"""Options of a search, and the config of one, with its key."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import asdict
from typing import Annotated, Any

from annotated_types import Ge, Predicate
from pydantic.dataclasses import dataclass

from rotation_merge.config import Config, Count, Dtype, Kind, Length, option
from rotation_merge.errors import RotationMergeError

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")

CHANGEABLE = ("budget", "device", "out")
"""Options that may change when a search continues."""


def seconds(time: Any) -> float:
    """Convert a time such as 90s, 10m or 2h to seconds; numbers are seconds already. 0 if it is no time."""
    match = _TIME.fullmatch(time.strip()) if isinstance(time, str) else None
    if match is not None:
        return float(match[1]) * UNITS[match[2]]
    return float(time) if type(time) in (int, float) and math.isfinite(time) else 0.0


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


@dataclass(frozen=True)
class SearchConfig(MergeConfig):
    """Config of a search: the models, the output and the options.

    Attributes:
        models: the first is the anchor.
        data: one source for all, or one for each model.
        device: to compute on.
    """

    models: tuple[str, ...]
    out: str
    data: tuple[str, ...]
    device: str = "cpu"

    def load(self, model: str) -> Any:
        """Load a model on the device, with its classes in the first model's order."""
        from rotation_merge.run.functions import load

        return load(model, like=self.models[0]).to(self.device)

    @property
    def reading(self) -> tuple[int, int, int]:
        """Batch size, length and seed of reading samples."""
        return self.batch_size, self.length, self.seed

    def key(self) -> str:
        """Stable key of the models, the samples and the options, and of the state of their files."""
        from rotation_merge.model.checkpoint import mark_of
        from rotation_merge.model.open import open_model

        options = {name: value for name, value in asdict(self).items() if name not in CHANGEABLE}
        views = [open_model(model, any_base=True) for model in filter(None, [*self.models, self.base])]
        return hashlib.blake2b(mark_of(views, self.data, options=options).encode(), digest_size=4).hexdigest()


def usual_data(model: str) -> str:
    """Default data: texts written by the models, or random images.

    Raises:
        RotationMergeError: the model can make up neither.
    """
    from rotation_merge.run.functions import read_config
    from rotation_merge.run.sample_kinds import SELF, SYNTHETIC

    config = read_config(model)
    name = str((config.get("architectures") or [""])[0])
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return SELF
    if "image_size" in config or "vision_config" in config:
        return SYNTHETIC
    raise RotationMergeError(f"{name or 'the model'} cannot write samples", where=model, remedy="give 'data'")
