"""The task that carries a donor's change with samples; what running models takes is imported with it alone."""

from __future__ import annotations

from typing import Any

import tqdm
from pydantic import Field
from torch import Tensor

from rotation_merge.carrying.by_samples import Samples
from rotation_merge.carrying.by_weights import Settings
from rotation_merge.carrying.carry_in_merge import carried_scales, carried_tensors, carried_weights
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.whole import WholeTask
from rotation_merge.mergekit_plugin.recipe.donor import title


class Carry(WholeTask):
    """Runs the models on samples: the anchor's tensors as a donor changes them, or the scales of its change."""

    donor: str
    origin: str
    anchor: str
    settings: Settings = Field(repr=False)
    samples: Samples
    run: Run = Field(repr=False)
    quiet: bool = False

    def execute(self) -> dict[str, Tensor] | dict[str, float]:
        make: Any = carried_tensors if self.samples.way != "weights" else carried_scales
        if self.settings.unlike.asked and self.samples.way == "weights":
            make = carried_weights
        with tqdm.tqdm(desc=f"Carrying {self.donor}", disable=self.quiet) as bar:
            found, notes, alignment = make(
                self.donor, self.origin, self.anchor, self.settings, self.samples, lambda *_: bar.update(1)
            )
        if self.samples.needed:
            self.run.used(f"carrying {self.donor}", self.samples.data, self.samples.count)
        if alignment is not None:
            self.run.aligned(title(self.donor, self.origin), alignment)
        for note in notes:
            self.run.note(f"`{self.donor}`: {note}")
        return found
