"""What `check` tells beside faults: the preset that fits, lengths of changes, and what a merge needs of a machine."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference
from mergekit.merge_methods.base import BasePolicy
from rich.filesize import decimal

from rotation_merge.averaging.task_vectors import RATIO, SHORTENED, TaskVectorMethod
from rotation_merge.diagnose.donors import donors_of
from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.keys import OPTIONS
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Models
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.nearness import RELATED, cosine_text, likeness, sampled_changes
from rotation_merge.report.memory import peak_memory
from rotation_merge.report.remote import downloaded_bytes
from rotation_merge.run.functions import configured_dtype
from rotation_merge.workers import free_memory

KINDS = {"near": "a fine-tune of the same base", "far": "in other coordinates, or of another base"}


def advice(path: str) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """The preset that fits each local donor of a recipe of ours, and the lengths of the changes that it merges.

    A donor that is moved by a file, or whose task vector is carried, is not in question.

    Returns:
        For each `donor` the `suggested` preset, the mean `cosine` of the angle between its matrices and the base's, the
        recipe's `preset` (None: not given; `own`: the recipe sets the options themselves), and `words` on them. Of the
        changes of two or more donors, from a few matrices: `base`, `delegate`, `lengths` by model, `ratio` of the
        longest to the shortest, whether the delegate `shortened` the long ones, and `words`; None where the delegate
        merges no changes.
    """
    try:
        listed = donors_of(path)
    except (RotationMergeError, ValueError):
        return [], None
    session, presets = listed[0].session, list[dict[str, Any]]()
    recipe = session.recipe
    donors = [d for d in listed if not (d.value("finetuned_from") or d.value("alignment") or absent_parts(d.model))]
    for donor in () if absent_parts(recipe.base) else donors:
        with suppress(RotationMergeError):  # such as of a model that another document of the recipe makes first
            cosine = likeness(session.base, session.models[donor.model])
            preset = recipe.value("preset") or ("own" if donor.given().keys() & set(OPTIONS) else None)
            presets += [] if math.isnan(cosine) else [_suggestion(str(donor.model), cosine, preset)]
    whole = len(presets) == len(listed) > 1 and recipe.delegate.spec.contract.base is BasePolicy.REQUIRED
    return presets, _changes(recipe, session.models, [donor.model for donor in donors]) if whole else None


def _changes(recipe: Recipe, models: Models, donors: Sequence[ModelReference]) -> dict[str, Any]:
    """Lengths of the changes from the base to its fine-tunes."""
    method, fine_tunes = recipe.delegate, {str(donor): models[donor] for donor in donors}
    changes = sampled_changes(models[recipe.base], fine_tunes)
    automatic = (recipe.config.parameters or {}).get("lengths", "auto") == "auto"
    rule = getattr(method, "inner", method)  # without what calibrates it
    shortened = isinstance(rule, TaskVectorMethod) and automatic
    name, each = method.spec.name, ", ".join(f"{model} {length:.3g}" for model, length in changes.lengths.items())
    words = f"lengths of changes to {recipe.base} in a few matrices, as shares of its norm: {each}"
    words += f" (ratio {changes.ratio:.2g})"
    if changes.ratio > RATIO and shortened:
        words += f"; with {name} the longer ones are {SHORTENED} ('lengths: keep' leaves them)"
    elif changes.ratio > RATIO:
        words += f"; the longest dominates with {name}: give it a lower 'weight'"
    facts = {"base": str(recipe.base), "delegate": name, "lengths": dict(changes.lengths), "ratio": changes.ratio}
    return {**facts, "shortened": shortened, "words": words}


def _suggestion(donor: str, cosine: float, preset: str | None) -> dict[str, Any]:
    suggested = "near" if cosine >= RELATED else "far"
    verdict = f"'preset: {suggested}' fits"
    if preset == "auto":
        verdict = f"'preset: auto' chooses '{suggested}'"
    elif preset in KINDS and preset != suggested:
        verdict += f" better than '{preset}'"
    words = f"{donor}: {verdict}, it is {KINDS[suggested]} (mean cosine of its matrices to the base's: "
    words += f"{cosine_text(cosine)})"
    return {"donor": donor, "suggested": suggested, "cosine": cosine, "preset": preset, "words": words}


def needs_of(recipe: str, models: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """Bytes that a recipe needs, from its models' headers, and free bytes.

    Args:
        models: those that are to be downloaded, as the hub describes them.
        cache: that they come to.

    Returns:
        `downloads` by model of the hub, and the `cache` that they come to; the `output`, and `memory` at the peak
        beyond Python and its libraries (None for recipes of other methods); `free_disk` of the cache and `free_memory`;
        `words` on these, and the `shortages` in words.
    """
    output, memory = None, None
    with suppress(RotationMergeError, ValueError):  # recipes of other methods, and such as `check` finds faults in
        for donor in donors_of(recipe):
            anchor = donor.session.base
            size = configured_dtype(anchor.config).itemsize
            output = size * sum(map(math.prod, anchor.shapes.values()))
            carried = donor.value("finetuned_from") is not None
            memory = max(memory or 0, peak_memory(anchor.architecture, anchor.shapes, donor.options, size, carried))
    place = next(place for place in (Path(cache), *Path(cache).parents) if place.exists())
    disk, free = shutil.disk_usage(place).free, free_memory()
    downloads = {name: downloaded_bytes(info) for name, info in models.items()}
    needed = sum(downloads.values())
    words = f"{len(downloads)} models to download, {decimal(needed)}, {decimal(disk)} free in the cache"
    shortages = []
    if needed > disk:
        shortages.append(f"{decimal(needed)} must go to {cache}, which has {decimal(disk)} free")
    if output is not None and memory is not None:
        words += f", {decimal(output)} to write, about {decimal(memory)} of memory"
        if memory > free:
            shortages.append(f"the merge takes about {decimal(memory)} of memory, {decimal(free)} are free")
    facts = {"downloads": downloads, "cache": cache, "output": output, "memory": memory}
    return {**facts, "free_disk": disk, "free_memory": free, "words": words, "shortages": shortages}
