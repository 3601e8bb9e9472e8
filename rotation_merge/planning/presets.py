"""`preset`: options for how the models are related, settled before anything is matched."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from mergekit.common import ModelReference

from rotation_merge.checkpoints.models import Model, Models
from rotation_merge.recipe.names import PRESETS
from rotation_merge.recipe.reading import Recipe
from rotation_merge.report.run import Run

LOOKED_AT = 8
"""Matrices that are compared, spread over the layers."""
RELATED = 0.5
"""Mean cosine of the angles between matrices of two models from which they count as near: fine-tunes of one base are
above 0.9, models trained independently at 0 (a planted twin too: alignment has to bring it back)."""


def settle_presets(recipe: Recipe, models: Models, donors: Iterable[ModelReference], run: Run | None = None) -> None:
    """Fill `recipe.relations`, and note what each preset became."""
    preset = recipe.value("preset")
    if preset is None:
        return
    for donor in donors:
        if donor == recipe.base:
            continue
        found = str(preset)
        words = f"Preset {found}"
        if donor in models.unlike:
            found = "far"
        elif preset == "auto":
            cosine = likeness(models[recipe.base], models[donor])
            found = "near" if cosine >= RELATED else "far"
            words = f"Preset auto: {found} for `{donor}` (mean cosine of matrices to the base's {cosine:.2f})"
        recipe.relations[donor] = found
        options = ", ".join(f"{name}: {value}" for name, value in PRESETS[found].items())
        if run is not None:
            run.note(f"{words}: {options}, where nothing else is said.")


def likeness(anchor: Model, donor: Model) -> float:
    """Mean cosine of the angle between matrices of the same name; 1 where no two can be compared.

    Only `LOOKED_AT` matrices are read, layers' own; embeddings say little of coordinates.
    """
    mine, theirs = anchor.shapes, donor.shapes
    layers = (info for block in anchor.architecture.blocks if block.index is not None for info in block.tensors)
    names = [info.name for info in layers if not info.stacked]
    names = [name for name in names if len(mine.get(name, ())) == 2 and mine[name] == theirs.get(name)]
    step = max(1, len(names) // LOOKED_AT)
    cosines = [
        torch.nn.functional.cosine_similarity(anchor[n].double().flatten(), donor[n].double().flatten(), dim=0)
        for n in names[::step]
    ]
    return float(torch.stack(cosines).mean()) if cosines else 1.0
