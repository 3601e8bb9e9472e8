"""What a search finds, and what tells one search from another."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from rotation_merge.checkpoints.models import parse_reference
from rotation_merge.choosing.judge import Figures
from rotation_merge.choosing.making import Wish


@dataclass
class Tried:
    """One candidate and what it is worth on the deciding samples; `expected`: the seconds that were announced."""

    name: str
    figures: Figures
    seconds: float
    recipe: str
    expected: float | None = None


@dataclass
class Outcome:
    """What was found.

    Attributes:
        tried: by score, the best first.
        parents, ensemble, best: on the samples that only report, as is `plain`.
        left_out: candidates that the budget had no room for, or that could not be made, and why.
        relations: of every other model: mean cosine of its matrices to the first one's.
        unit, figure: what scores are, and what stands beside them where there are labels.
    """

    labelled: bool
    tried: list[Tried]
    parents: dict[str, Figures]
    ensemble: Figures
    best: Figures
    plain: Figures | None
    left_out: dict[str, str] = field(default_factory=dict)
    relations: dict[str, float] = field(default_factory=dict)
    unit: str = "loss (nats)"
    figure: str = "accuracy"

    @property
    def best_parent(self) -> str:
        return min(self.parents, key=lambda name: self.parents[name].score)

    @property
    def worth_it(self) -> bool:
        """Whether the best merge beats every parent alone."""
        return self.best.score < self.parents[self.best_parent].score

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best_parent": self.best_parent, "worth_it": self.worth_it}


def mark_of(wish: Wish) -> str:
    """Stands for what is merged with what: the models, the samples, and their files as they are."""
    asked = {name: value for name, value in asdict(wish).items() if name not in ("budget", "out")}
    files = [path for model in wish.models for path in _weights(model)] + [d for d in wish.data if os.path.exists(d)]
    stamps = [os.stat(path).st_mtime_ns for path in files]
    return hashlib.blake2b(json.dumps([asked, stamps]).encode(), digest_size=4).hexdigest()


def _weights(model: str) -> list[str]:
    """The weight files of a model that lies here, and of its adapter."""
    reference = parse_reference(model)
    folders = [part.path for part in (reference.model, reference.lora) if part is not None and os.path.isdir(part.path)]
    ends = (".safetensors", ".bin")
    return [os.path.join(folder, n) for folder in folders for n in sorted(os.listdir(folder)) if n.endswith(ends)]
