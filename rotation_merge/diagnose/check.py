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

MOVED = ("finetuned_from", "alignment")
"""Parameters of donors whose nearness to the base is not in question."""


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
        kinds = {"near": "a fine-tune of the same base", "far": "in other coordinates, or of another base"}
        verdict = f"'preset: {self.suggested}' fits, it is {kinds[self.suggested]}"
        if self.preset == "auto":
            verdict = f"'preset: auto' chooses '{self.suggested}'"
        elif self.preset == self.suggested:
            verdict = f"'preset: {self.preset}' fits"
        elif self.preset in kinds:
            verdict = f"'preset: {self.suggested}' fits better than '{self.preset}'"
        return f"{self.donor}: {verdict} (mean cosine of its matrices to the base's: {cosine_text(self.cosine)})"


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


def _recipe(path: str) -> Recipe | None:
    """A recipe of ours without faults; None for any other."""
    try:
        return Recipe.of(last_recipe(path, "give a recipe of ours"))
    except (RotationMergeError, ValueError):
        return None


def lengths_of_changes(path: str) -> Lengths | None:
    """Lengths of the changes that a recipe merges.

    None unless it merges two or more local models' changes in the base's coordinates.
    """
    if (recipe := _recipe(path)) is None:
        return None
    config, method = recipe.config, recipe.delegate
    donors = [model for model in config.models or [] if model.model != recipe.base]
    plain = not any(set(MOVED) & set(donor.parameters or {}) for donor in donors)
    is_local = not any(absent_parts(model) for model in [recipe.base, *(donor.model for donor in donors)])
    if method.spec.contract.base is not BasePolicy.REQUIRED or len(donors) < 2 or not (plain and is_local):
        return None
    models = Models(MergeOptions(), recipe.value("unsupported"))
    try:
        changes = sampled_changes(models[recipe.base], {str(donor.model): models[donor.model] for donor in donors})
    except RotationMergeError:
        return None
    shortened = isinstance(method, TaskVectorMethod) and (config.parameters or {}).get("lengths", "auto") == "auto"
    return Lengths(str(recipe.base), method.spec.name, dict(changes.lengths), changes.ratio, shortened)


def suggestions(path: str) -> list[Suggestion]:
    """Suggestions for each local donor of a recipe; empty if the recipe does not use this method.

    A donor that is moved by a file, or whose task vector is carried, is not in question.
    """
    if (recipe := _recipe(path)) is None:
        return []
    config, models, results = recipe.config, Models(MergeOptions(), recipe.value("unsupported")), []
    for donor in config.models or []:
        values = {**(config.parameters or {}), **(donor.parameters or {})}
        settled = set(MOVED) & set(values)
        if donor.model == recipe.base or settled or absent_parts(donor.model) or absent_parts(recipe.base):
            continue
        try:
            cosine = likeness(models[recipe.base], models[donor.model])
        except RotationMergeError:  # such as a model that another document of the recipe makes first
            continue
        if not math.isnan(cosine):
            preset = recipe.value("preset") or ("own" if set(OPTIONS) & set(values) else None)
            results.append(Suggestion(str(donor.model), "near" if cosine >= RELATED else "far", cosine, preset))
    return results


@dataclass(frozen=True)
class ResourceNeeds:
    """Bytes that a merge needs, and free bytes.

    Attributes:
        downloads: by model of the hub.
        cache: folder that they are downloaded to.
        output, memory: of the merged model, and at the peak beyond Python and its libraries; None for recipes of other
            methods.
        free_disk, free_memory: of the cache's disk and of the machine.
    """

    downloads: dict[str, int]
    cache: str
    output: int | None
    memory: int | None
    free_disk: int
    free_memory: int

    def shortages(self) -> Iterator[str]:
        """Missing resources in words."""
        needed = sum(self.downloads.values())
        if needed > self.free_disk:
            yield f"{_gigabytes(needed)} must go to {self.cache}, which has {_gigabytes(self.free_disk)} free"
        if self.memory is not None and self.memory > self.free_memory:
            yield f"the merge takes about {_gigabytes(self.memory)} of memory, {_gigabytes(self.free_memory)} are free"

    @property
    def words(self) -> str:
        needed, free = _gigabytes(sum(self.downloads.values())), _gigabytes(self.free_disk)
        parts = [f"{len(self.downloads)} models to download, {needed}", f"{free} free in the cache"]
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
    cache = Path(models[0].cache).absolute()
    disk = shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free
    downloads = {model.name: model.bytes for model in models}
    return ResourceNeeds(downloads, models[0].cache, output, memory, disk, free_memory())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
