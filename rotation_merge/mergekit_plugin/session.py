"""The state of one merge from its recipe to its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mergekit.options import MergeOptions

from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe

if TYPE_CHECKING:
    from rotation_merge.mergekit_plugin.donors import Donors


@dataclass
class Session:
    """A recipe, its models (opened once each) and the record of the merge.

    Attributes:
        run: record of the merge, kept if a report will be written.
        donors: as they are settled when the recipe is compiled.
    """

    recipe: Recipe
    models: Models
    options: MergeOptions
    run: Run = field(default_factory=Run)
    donors: Donors | None = None

    @classmethod
    def of(cls, recipe: Recipe, options: MergeOptions, watched: bool = True) -> Session:
        run = Run(watched=watched, kept_transforms={} if recipe.value("save_alignment") else None)
        return cls(recipe, Models(options, recipe.unsupported, recipe.untie), options, run)
