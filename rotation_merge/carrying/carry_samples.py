"""The samples that work is carried on: what is solved from, what is held out of it, and the new base's own text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rotation_merge.errors import DataError
from rotation_merge.run.data import UNLABELLED, Data, read_batches
from rotation_merge.run.functions import load, local_path
from rotation_merge.run.written import SELF, writes_text

AT_ONCE = 16
HELD_OUT = 0.25
"""Share of the samples that nothing is solved from."""


@dataclass(frozen=True)
class Samples:
    """What the models are run on.

    Attributes:
        data: a file, or `self`: text that the fine-tune writes.
        count: how many, those held out included.
        scale: of the change; None: the best on the samples held out.
        steps: of distillation from the refit on.
        way: weights: these carry the change, and samples say its scale in each block; activations: and say by which
            maps inputs move; refit: maps are solved; distil: and trained.
    """

    data: str = SELF
    count: int = 64
    length: int = 128
    seed: int = 0
    scale: float | None = None
    steps: int = 50
    way: str = "refit"

    @property
    def needed(self) -> bool:
        """Whether anything is run on them."""
        return self.way != "weights" or self.scale is None

    def read(self, batch_size: int = AT_ONCE) -> dict[str, Any]:
        """How they are read."""
        return {"limit": self.count, "batch_size": batch_size, "length": self.length, "seed": self.seed}


def read_parts(tuned: str, new: str, samples: Samples) -> tuple[Data, Data, Data]:
    """What is solved from, what is held out of it, and text of the new base's own.

    Raises:
        DataError: the model writes no text and no data are given, or too few, or without labels.
    """
    model = load(tuned, like=new)
    if samples.data == SELF and not writes_text(model):
        raise DataError(f"{type(model).__name__} writes no text of its own", where=tuned, remedy="give --data FILE")
    whole = read_batches(samples.data, local_path(tuned), model, **samples.read())
    if whole.task in UNLABELLED:
        what = f"holds no labels for {type(model).__name__}, by whose loss it is measured what arrives"
        raise DataError(what, where=samples.data, remedy="give data with labels, or carry by weights alone")
    held = max(1, round(HELD_OUT * len(whole.batches)))
    if len(whole.batches) <= held:
        raise DataError(
            f"holds {whole.examples} samples, at least {2 * AT_ONCE} are needed", where=samples.data, remedy="give more"
        )
    parts = [
        Data(batches, whole.task, sum(len(next(iter(b.values()))) for b in batches))
        for batches in (whole.batches[:-held], whole.batches[-held:])
    ]
    base: Any = load(new)
    if not writes_text(base):
        return parts[0], parts[1], parts[1]
    own = read_batches(SELF, local_path(new), base, **replace(samples, count=AT_ONCE, seed=samples.seed + 1).read())
    return parts[0], parts[1], own
