"""Suggestions from a few matrices of a recipe's models: the preset, and unequal lengths of changes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mergekit.merge_methods.base import BasePolicy
from mergekit.options import MergeOptions

from rotation_merge.averaging.task_vectors import RATIO, TaskVectorMethod
from rotation_merge.diagnose.donors import last_recipe
from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.recipe.names import OPTIONS
from rotation_merge.mergekit_plugin.recipe.reading import Recipe
from rotation_merge.model.checkpoint import Models
from rotation_merge.model.gguf.place import is_absent
from rotation_merge.model.nearness import RELATED, cosine_text, likeness, sampled_changes


@dataclass(frozen=True)
class Suggestion:
    """A donor and its nearness to the base.

    Attributes:
        cosine: mean cosine of the angle between matrices of the same name.
        preset: the recipe's preset; None: not given; `own`: the recipe sets the options themselves.
    """

    donor: str
    suggested: str
    cosine: float
    preset: str | None

    @property
    def words(self) -> str:
        """One line."""
        measured = f"mean cosine of its matrices to the base's: {cosine_text(self.cosine)}"
        if self.preset == "auto":
            return f"{self.donor}: 'preset: auto' chooses '{self.suggested}' ({measured})"
        if self.preset == self.suggested:
            return f"{self.donor}: 'preset: {self.preset}' fits ({measured})"
        if self.preset in ("near", "far"):
            return f"{self.donor}: 'preset: {self.suggested}' fits better than '{self.preset}' ({measured})"
        kind = (
            "a fine-tune of the same base" if self.suggested == "near" else "in other coordinates, or of another base"
        )
        return f"{self.donor}: 'preset: {self.suggested}' fits, it is {kind} ({measured})"


@dataclass(frozen=True)
class Lengths:
    """Lengths of the changes that a recipe merges, from a few matrices.

    Attributes:
        lengths: by model.
        ratio: the longest over the shortest.
        shortened: whether the delegate shortens the long ones.
    """

    base: str
    delegate: str
    lengths: dict[str, float]
    ratio: float
    shortened: bool

    @property
    def words(self) -> str:
        """One line."""
        each = ", ".join(f"{model} {length:.3g}" for model, length in self.lengths.items())
        lengths_text = f"lengths of changes to {self.base} in a few matrices: {each} (ratio {self.ratio:.2g})"
        if self.ratio <= RATIO:
            return lengths_text
        if self.shortened:
            shortened = "shortens the longer ones to the harmonic mean ('lengths: keep' leaves them)"
            return f"{lengths_text}; {self.delegate} {shortened}"
        return f"{lengths_text}; the longest dominates with {self.delegate}: give it a lower 'weight'"


def lengths_of_changes(path: str) -> Lengths | None:
    """Lengths of the changes that a recipe merges.

    None unless it merges two or more local models' changes in the base's coordinates.
    """
    try:
        recipe = Recipe.of(last_recipe(path, "give a recipe of ours"))
    except (RotationMergeError, ValueError):
        return None
    config, method = recipe.config, recipe.delegate
    donors = [model for model in config.models or [] if model.model != recipe.base]
    plain = not any({"finetuned_from", "alignment"} & set(donor.parameters or {}) for donor in donors)
    is_local = not any(is_absent(model) for model in [recipe.base, *(donor.model for donor in donors)])
    if method.spec.contract.base is not BasePolicy.REQUIRED or len(donors) < 2 or not (plain and is_local):
        return None
    models = Models(MergeOptions(), recipe.unsupported)
    try:
        changes = sampled_changes(models[recipe.base], {str(donor.model): models[donor.model] for donor in donors})
    except RotationMergeError:
        return None
    name, values = method.spec.name, config.parameters or {}
    shortened = isinstance(method, TaskVectorMethod) and values.get("lengths", "auto") == "auto"
    return Lengths(str(recipe.base), name, dict(changes.lengths), changes.ratio, shortened)


def suggestions(path: str) -> list[Suggestion]:
    """Suggestions for each local donor of a recipe; empty if the recipe does not use this method.

    A donor that is moved by a file, or whose task vector is carried, is not in question.
    """
    try:
        recipe = Recipe.of(last_recipe(path, "give a recipe of ours"))
        config = recipe.config
    except (RotationMergeError, ValueError):
        return []
    models, results = Models(MergeOptions(), recipe.unsupported), []
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
        preset_used = preset or ("own" if set(OPTIONS) & set(values) else None)
        results.append(Suggestion(str(donor.model), "near" if cosine >= RELATED else "far", cosine, preset_used))
    return results
