"""The state of one merge from its recipe to its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit import common
from mergekit.options import MergeOptions

from rotation_merge.errors import RotationMergeError
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe


@dataclass
class Session:
    """A recipe, its models (opened once each) and the record of the merge.

    Attributes:
        run: record of the merge, kept if a report will be written.
        donors: `Donors`, as they are settled when the recipe is compiled.
    """

    recipe: Recipe
    models: Models
    options: MergeOptions
    run: Run = field(default_factory=Run)
    donors: Any = None

    @classmethod
    def of(cls, recipe: Recipe, options: MergeOptions, watched: bool = True) -> Session:
        """A session of a recipe; `watched` as of its run."""
        run = Run(watched=watched, kept_transforms={} if recipe.value("save_alignment") else None)
        return cls(recipe, Models(options, recipe.unsupported, recipe.untie), options, run)

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices for matching whole models: the merge's, or all of `--multi-gpu`.

        Raises:
            RotationMergeError: it gives none.
        """
        if not self.options.multi_gpu:
            return (str(self.options.device or "cpu"),)
        try:
            count = common.get_torch_accelerator_count()
        except AttributeError:  # of the accelerator that is not there
            count = 0
        if not count:
            raise RotationMergeError("--multi-gpu: this machine has no GPU", remedy="leave it out")
        return tuple(f"{common.get_torch_accelerator_type()}:{number}" for number in range(count))

    @property
    def on_cpu(self) -> bool:
        """Whether the merge computes on the CPU."""
        return not self.options.multi_gpu and torch.device(self.options.device or "cpu").type == "cpu"

    def device(self) -> torch.device | None:
        """The accelerator on which this thread of the merge computes; None: the CPU."""
        if self.options.multi_gpu:
            return torch.empty(0).device
        return None if self.on_cpu else torch.device(self.options.device)
