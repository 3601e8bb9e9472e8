"""Measuring in other processes (`spread/`): each loads the model and runs shares of the samples through it.

Their sums are added here, in the order of the shares, so that what is found does not depend on who ran which.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rotation_merge.averaging.layers import in_layers
from rotation_merge.averaging.measure import Batch, Measurement, MeasureOptions
from rotation_merge.averaging.passes import Elsewhere, Pass
from rotation_merge.averaging.sums import Sums
from rotation_merge.checkpoints.models import Model, open_model
from rotation_merge.checkpoints.pair import whole_path
from rotation_merge.samples.functions import architecture_of, load
from rotation_merge.spread.pieces import Over

LEAST_ROOM = 1 << 28
"""Bytes that sums are given at least."""


@dataclass(frozen=True)
class Shares:
    """A model and samples: one piece is a share of the steps of one pass.

    Attributes:
        name: of the model, for a process that works in another folder.
        options: with the memory that sums may take, which says what the passes are.
        by_layer: whether layers read their weights as they run.
        size: see `Work`.
    """

    name: str
    batches: Sequence[Batch]
    task: str
    options: MeasureOptions
    by_layer: bool
    size: int
    device: str = "cpu"
    at_once: int = field(default=0, init=False)

    def on(self, device: str, home: str) -> Shares:
        return replace(self, device=device)

    @cached_property
    def _passes(self) -> list[Pass]:
        if self.by_layer:
            model, _ = in_layers(open_model(self.name), self.options, "", self.device, whole=True)
        else:
            model = load(self.name).to(self.device)
        return Measurement(model, architecture_of(model), self.batches, self.task).passes(self.options)

    def piece(self, step: int, item: range) -> Sums:
        """The sums of a share of the pass of a number."""
        sums: Sums = {}
        for each in item:
            self._passes[step].run(each, sums)
        return {key: value.cpu() for key, value in sums.items()}


def with_room(options: MeasureOptions, checkpoint: Model, over: Over) -> MeasureOptions:
    """The options with the memory that each of the others may take for sums, beside the model."""
    if not over.apart:
        return options
    weights = _bytes(checkpoint)
    return replace(options, memory=options.memory or max((over.room - weights) // 2, weights // 2, LEAST_ROOM))


def _bytes(checkpoint: Model) -> int:
    """Of the weights, in float32."""
    return 4 * sum(math.prod(shape) for shape in checkpoint.shapes.values())


def shared(
    checkpoint: Model, batches: Sequence[Batch], task: str, options: MeasureOptions, by_layer: bool, over: Over
) -> Elsewhere | None:
    """Runs passes in other processes; None where there are none.

    Args:
        options: see `with_room`.
    """
    if not over.apart:
        return None
    size = (0 if by_layer else _bytes(checkpoint)) + (options.memory or 0)
    work = Shares(whole_path(str(checkpoint.reference)), batches, task, options, by_layer, size)

    def run(number: int, shares: Sequence[range]) -> Iterator[Sums]:
        return over.each(work, number, shares)

    return run
