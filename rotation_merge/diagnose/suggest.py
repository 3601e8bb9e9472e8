"""Which preset the weights of a recipe's models suggest: a handful of matrices is looked at."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mergekit.options import MergeOptions

from rotation_merge.diagnose.donors import last_recipe
from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.recipe.names import OPTIONS
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.checkpoint import Models
from rotation_merge.model.hub import is_absent
from rotation_merge.model.nearness import RELATED, likeness


@dataclass(frozen=True)
class Suggestion:
    """A donor, and how near to the base it is.

    Attributes:
        cosine: mean cosine of the angle between matrices of the same name.
        preset: what the recipe sets; None where it says nothing, `own` where it sets the options themselves.
    """

    donor: str
    suggested: str
    cosine: float
    preset: str | None

    @property
    def words(self) -> str:
        """One line."""
        found = f"{self.donor}: its matrices and the base's have a mean cosine of {self.cosine:.2f}"
        if self.preset == "auto":
            return f"{found}; 'preset: auto' is '{self.suggested}' here"
        if self.preset == self.suggested:
            return f"{found}; 'preset: {self.preset}' fits"
        if self.preset in ("near", "far"):
            return f"{found}; 'preset: {self.suggested}' fits better than '{self.preset}'"
        kind = "a fine-tune of one base" if self.suggested == "near" else "in other coordinates, or of another base"
        return f"{found}: {kind}; 'preset: {self.suggested}' is made for that"


def suggestions(path: str) -> list[Suggestion]:
    """For each donor of a recipe of ours that lies here; none where the recipe merges otherwise.

    A donor that is moved by a file, or whose task vector is carried, is not in question.
    """
    try:
        recipe = Recipe.of(last_recipe(path, "give a recipe of ours"))
        config = recipe.config
    except (RotationMergeError, ValueError):
        return []
    models, found = Models(MergeOptions(), recipe.unsupported), []
    preset = recipe.value("preset")
    for donor in config.models or []:
        values = {**(config.parameters or {}), **(donor.parameters or {})}
        settled = {"finetuned_from", "alignment"} & set(values)
        if donor.model == recipe.base or settled or is_absent(donor.model) or is_absent(recipe.base):
            continue
        try:
            cosine = likeness(models[recipe.base], models[donor.model])
        except RotationMergeError:  # such as a model that another document of the recipe makes first
            continue
        if math.isnan(cosine):
            continue
        given = preset or ("own" if set(OPTIONS) & set(values) else None)
        found.append(Suggestion(str(donor.model), "near" if cosine >= RELATED else "far", cosine, given))
    return found
