"""`preset`: options by the relation of the models, resolved before matching."""

from __future__ import annotations

from collections.abc import Iterable

from mergekit.common import ModelReference

from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.keys import PRESETS
from rotation_merge.mergekit_plugin.models import Models
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.model.nearness import RELATED, cosine_text, likeness


def settle_presets(recipe: Recipe, models: Models, donors: Iterable[ModelReference], run: Run | None = None) -> None:
    """Fill `recipe.relations`, and note the options of each preset."""
    preset = recipe.value("preset")
    if preset is None:
        return
    for donor in donors:
        if donor == recipe.base:
            continue
        preset_name = str(preset)
        words = f"Preset {preset_name}"
        if preset == "auto":
            cosine = likeness(models[recipe.base], models[donor])
            preset_name = "near" if cosine >= RELATED else "far"
            measured = f"mean cosine of its matrices to the base's: {cosine_text(cosine)}"
            words = f"Preset auto: {preset_name} for `{donor}` ({measured})"
        recipe.relations[donor] = preset_name
        options = ", ".join(f"{name}: {value}" for name, value in PRESETS[preset_name].items())
        if run is not None:
            run.note(f"{words}: {options}, unless the recipe says otherwise.")
