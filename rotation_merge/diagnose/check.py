"""What `check` tells beside faults: the preset that fits, lengths of changes, and what a merge needs of a machine."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mergekit.merge_methods.base import BasePolicy
from mergekit.options import MergeOptions

from rotation_merge.averaging.task_vectors import RATIO, SHORTENED, TaskVectorMethod
from rotation_merge.diagnose.donors import donors_of, last_recipe
from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.keys import OPTIONS
from rotation_merge.mergekit_plugin.recipe import Recipe
from rotation_merge.mergekit_plugin.session import Models
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.nearness import RELATED, cosine_text, likeness, sampled_changes
from rotation_merge.model.open import open_model
from rotation_merge.report.memory import itemsize_of, peak_memory
from rotation_merge.report.remote import RemoteModel
from rotation_merge.workers import free_memory


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
            return f"{lengths_text}; with {self.delegate} the longer ones are {SHORTENED} ('lengths: keep' leaves them)"
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
    is_local = not any(absent_parts(model) for model in [recipe.base, *(donor.model for donor in donors)])
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
        if donor.model == recipe.base or settled or absent_parts(donor.model) or absent_parts(recipe.base):
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


@dataclass(frozen=True)
class ResourceNeeds:
    """Bytes that a merge needs, and free bytes.

    Attributes:
        downloads: by model of the hub.
        cache: folder that they are downloaded to.
        output, memory: of the merged model, and at the peak beyond Python and its libraries; None for recipes of other
            methods.
        free_disk, free_memory: of the cache's disk (None where the system does not say) and of the machine.
    """

    downloads: dict[str, int]
    cache: str
    output: int | None
    memory: int | None
    free_disk: int | None
    free_memory: int

    def shortages(self) -> Iterator[str]:
        """Missing resources in words."""
        needed = sum(self.downloads.values())
        if self.free_disk is not None and needed > self.free_disk:
            yield f"{_gigabytes(needed)} must go to {self.cache}, which has {_gigabytes(self.free_disk)} free"
        if self.memory is not None and self.memory > self.free_memory:
            yield f"the merge takes about {_gigabytes(self.memory)} of memory, {_gigabytes(self.free_memory)} are free"

    @property
    def words(self) -> str:
        parts = [f"{len(self.downloads)} models to download, {_gigabytes(sum(self.downloads.values()))}"]
        parts += [] if self.free_disk is None else [f"{_gigabytes(self.free_disk)} free in the cache"]
        parts += [] if self.output is None else [f"{_gigabytes(self.output)} to write"]
        parts += [] if self.memory is None else [f"about {_gigabytes(self.memory)} of memory"]
        return ", ".join(parts)


def needs_of(recipe: str, models: Sequence[RemoteModel]) -> ResourceNeeds:
    """The needs of a recipe, from its models' headers.

    Args:
        models: those that are to be downloaded, at least one.
    """
    output, memory = None, None
    with suppress(RotationMergeError, ValueError):  # recipes of other methods, and such as `check` finds faults in
        for donor in donors_of(recipe):
            anchor = open_model(donor.anchor, unsupported=donor.unsupported, any_base=True)
            size = itemsize_of(anchor.config)
            output = size * sum(map(math.prod, anchor.shapes.values()))
            carried = donor.origin is not None
            memory = max(memory or 0, peak_memory(anchor.architecture, anchor.shapes, donor.options, size, carried))
    downloads, cache = {model.name: model.bytes for model in models}, models[0].cache
    return ResourceNeeds(downloads, cache, output, memory, _free_disk(cache), free_memory())


def _free_disk(folder: str) -> int | None:
    place = next(place for place in (Path(folder), *Path(folder).absolute().parents) if place.exists())
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
