"""The task that carries a donor's change with samples; modules that run models are imported only with it."""

from __future__ import annotations

import tqdm
from pydantic import Field
from torch import Tensor

from rotation_merge.carrying.config import TransferConfig
from rotation_merge.carrying.session import Execution
from rotation_merge.carrying.transfer import transferred
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.planning.whole_model_tasks import WholeModelTask
from rotation_merge.mergekit_plugin.recipe.donor import title


class CarryTask(WholeModelTask):
    """Runs the models on samples: the anchor's tensors as a donor changes them."""

    donor: str
    origin: str
    anchor: str
    config: TransferConfig = Field(repr=False)
    execution: Execution = Field(repr=False)
    run: Run = Field(repr=False)
    quiet: bool = False

    def execute(self) -> dict[str, Tensor]:
        with tqdm.tqdm(desc=f"Carrying {self.donor}", disable=self.quiet) as bar:
            tensors, lines, alignment = transferred(
                self.donor, self.origin, self.anchor, self.config, self.execution, lambda *_: bar.update(1)
            )
        if self.config.needs_samples:
            self.run.used(f"carrying {self.donor}", self.config.data, self.config.sample_count)
        self.run.aligned(title(self.donor, self.origin), alignment)
        for line in lines:
            self.run.note(f"`{self.donor}`: {line}")
        return tensors
