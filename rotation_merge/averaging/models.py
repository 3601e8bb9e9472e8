"""What a merge method of ours is told about the models that it averages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.model.view import View
from rotation_merge.run.functions import Batch
from rotation_merge.run.statistics import Statistics

Place = tuple[Block, TensorInfo, int]
"""A tensor's block, its description, and which piece of a stacked tensor it is."""


@dataclass
class MergeLog:
    """What a method notes while it merges.

    Attributes:
        facts: numbers and words of the method, by name.
        lines: for the report, each once.
    """

    facts: dict[str, list[Any]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def note(self, name: str, value: Any) -> None:
        self.facts.setdefault(name, []).append(value)

    def line(self, text: str) -> None:
        if text not in self.lines:
            self.lines.append(text)


@dataclass(frozen=True)
class MergedModels:
    """The models of one merge, all in the anchor's coordinates.

    Models go by the ids that the entries of a `TensorGroup` have.

    Attributes:
        base: id of the anchor.
        places: by name of an output tensor, its place in every model; all other tensors get the weighted mean.
        tied_head: name of a head that stays the embedding's tensor.
        views: the models, by id.
        statistics: of each model, by id, moved with it; empty where the method needs none.
        storage: dtype that a tensor of the result is rounded to; None: that of the first model's tensor.
        samples: gives the batches that activations are compared on; None: weights are compared.
        log: takes the notes for the report.
    """

    base: Hashable
    places: Mapping[str, Place]
    tied_head: str | None = None
    views: Mapping[Hashable, View] = field(default_factory=dict)
    statistics: Mapping[Hashable, Statistics] = field(default_factory=dict)
    storage: Callable[[str], torch.dtype | None] = lambda _: None
    samples: Callable[[], Sequence[Batch]] | None = None
    log: MergeLog = field(default_factory=MergeLog)

    @classmethod
    def of(cls, views: Sequence[View], **facts: Any) -> MergedModels:
        """Models by their numbers, the anchor first; `facts` are further attributes."""
        first = views[0]
        facts = {"tied_head": first.tied_head, **facts}
        return cls(0, first.architecture.places(), views=dict(enumerate(views)), **facts)

    def name(self, model: Hashable) -> str:
        """What a model is called in messages."""
        return self.views[model].name if model in self.views else str(model)
