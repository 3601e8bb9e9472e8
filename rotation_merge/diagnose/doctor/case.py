"""The case that is diagnosed, a recipe of any method or a merged model with its parents, and a cause of a bad merge."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rotation_merge.diagnose.donors import donors_of
from rotation_merge.errors import RecipeError, RotationMergeError
from rotation_merge.mergekit_plugin import METHOD
from rotation_merge.mergekit_plugin.document import documents, read_recipe
from rotation_merge.mergekit_plugin.donors import Donor
from rotation_merge.mergekit_plugin.rules import check_structure
from rotation_merge.model.contents import Contents
from rotation_merge.model.folder import absent_parts, folder_of
from rotation_merge.model.gguf import is_gguf
from rotation_merge.model.hub import check_local, is_hub_name
from rotation_merge.model.open import open_model, parse_reference, weights_of, whole_path
from rotation_merge.model.view import View
from rotation_merge.record import REPORT_FILE
from rotation_merge.report.files import read_report
from rotation_merge.report.integrity import Defect, check_folder, check_parents
from rotation_merge.run.proof import LARGEST

RECIPES = ("mergekit_config.yml", "recipe.yml")
"""Names of recipes beside a merged model."""

CERTAIN, LIKELY = 0.9, 0.5
"""Lower limits of the words for likelihoods; below all of them a cause is possible."""


@dataclass(frozen=True)
class Cause:
    """A possible cause of a bad merge.

    Attributes:
        name: one or two words.
        likelihood: from 0 to 1: probability that it spoils the merge, by its extent.
        what: the finding, with figures.
        where: the model, or the layer, it was found in.
        remedy: the next step.
    """

    name: str
    likelihood: float
    what: str
    where: str
    remedy: str

    @property
    def word(self) -> str:
        """The likelihood in a word."""
        return "certain" if self.likelihood >= CERTAIN else "likely" if self.likelihood >= LIKELY else "possible"


@dataclass(frozen=True)
class Case:
    """A merge that was made, or is to be made.

    Attributes:
        name: the folder or file that was given.
        merged: the folder of the merged model; None for a recipe.
        parents: models that are here, the base (or the first) at the front.
        absent: models that are not.
        recipe: as YAML has it; empty where none is known.
        donors: of a rotation_merge recipe, by name.
        unexamined: lines on what a diagnosis could not look at, which it adds.
    """

    name: str
    merged: str | None
    parents: tuple[str, ...]
    absent: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    donors: Mapping[str, Donor] = field(default_factory=dict)
    unexamined: list[str] = field(default_factory=list)

    @cached_property
    def merged_model(self) -> View | None:
        """The merged model, opened."""
        return None if self.merged is None else open_model(self.merged, unsupported="merge")

    @cached_property
    def models(self) -> dict[str, View]:
        """The parents, opened."""
        return {name: open_model(name, unsupported="merge", any_base=True) for name in self.parents}

    @cached_property
    def folders(self) -> dict[str, str]:
        """Folders of the parents by name, the base's first."""
        places = {name: folder_of(parse_reference(name).model) for name in self.parents}
        return {name: place for name, place in places.items() if place is not None}

    @cached_property
    def contents(self) -> Contents | None:
        """The merged model's folder; None where there is none."""
        is_folder = self.merged is not None and os.path.isdir(self.merged) and not is_gguf(self.merged)
        return Contents(str(self.merged)) if is_folder else None

    @property
    def quantised(self) -> bool:
        """Whether the merged model holds quantised codes, which are not examined."""
        return self.contents is not None and bool(self.contents.quantisation)

    @cached_property
    def defects(self) -> list[Defect]:
        """Defects in headers and small files of the merged model's folder."""
        return [] if self.contents is None else check_folder(self.contents.folder, list(self.folders.values()))

    @property
    def parent_defects(self) -> list[Defect]:
        """Defects of the parents that the merge did not notice; our own methods refuse these models."""
        whole_codes = self.contents is not None and self.quantised and not self.contents.without_scales
        stored = {name: place for name, place in self.folders.items() if parse_reference(name).lora is None}
        return [] if self.method == METHOD or whole_codes else check_parents(stored)

    @property
    def method(self) -> str:
        return str(self.recipe.get("merge_method", ""))

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The parameters of the whole recipe."""
        return self.recipe.get("parameters") or {}

    @property
    def delegate(self) -> str:
        """The method that averages."""
        return str(self.parameters.get("delegate", "linear")) if self.method == METHOD else self.method

    @property
    def sliced(self) -> bool:
        """Whether the recipe names layers."""
        return bool(self.recipe.get("slices") or self.recipe.get("modules"))

    @property
    def half(self) -> bool:
        """Whether the merge is stored, or is to be stored, in float16."""
        if self.merged_model is not None:
            return "torch.float16" in map(str, self.merged_model.dtypes.values())
        return str(self.recipe.get("out_dtype") or self.recipe.get("dtype")) == "float16"


def is_small(model: str) -> bool:
    """Whether a model is small enough to be run and aligned for a diagnosis, by the headers of its files."""
    return weights_of(model) <= LARGEST


def open_case(name: str, parents: Sequence[str] = ()) -> Case:
    """Open a recipe or a merged model with its parents.

    Args:
        parents: models that it was merged from, where no recipe tells.

    Raises:
        RotationMergeError: it is neither.
    """
    if os.path.isfile(name) and not is_gguf(name):
        return _of_recipe(name, None, parents)
    check_local(name)
    if not os.path.isdir(name) or not (Contents(name).opened or os.path.exists(os.path.join(name, "config.json"))):
        open_model(name, unsupported="merge")
    recipe = next(filter(os.path.isfile, (os.path.join(name, file) for file in RECIPES)), None)
    if recipe is not None:
        return _of_recipe(recipe, name, parents)
    report = os.path.join(name, REPORT_FILE)
    return Case(name, name, *_sorted([*parents, *([read_report(report).anchor] if os.path.isfile(report) else [])]))


def _of_recipe(path: str, merged: str | None, parents: Sequence[str]) -> Case:
    document = documents(read_recipe(path))[-1]
    value = document.value
    if not isinstance(value, dict) or "merge_method" not in value:
        raise RecipeError("names no merge_method", where=path, remedy="give a recipe that mergekit-yaml runs")
    check_structure(document)
    if (fault := document.first) is not None:
        raise RecipeError(fault.what, where=path, remedy=fault.remedy)
    config, text = document.config, str(value)  # mergekit names models in no order
    models = sorted(map(str, config.referenced_models()), key=lambda model: text.find(model.partition("+")[0]))
    present, absent = _sorted([*parents, *map(str, filter(None, [config.base_model])), *models])
    donors = {}
    if value["merge_method"] == METHOD and config.models and not absent:
        with suppress(*([RotationMergeError] if merged is not None else [])):
            donors = {str(donor.model): donor for donor in donors_of(path)}
    return Case(merged or path, merged, present, absent, value, donors)


def _sorted(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Models that are here, and those that are not, each once: user and recipe may call one by different paths."""
    first_names = {whole_path(model): model for model in reversed(names)}
    models = [first_names.pop(path) for path in map(whole_path, names) if path in first_names]
    absent = tuple(filter(_is_absent, models))
    return tuple(model for model in models if model not in absent), absent


def _is_absent(name: str) -> bool:
    reference = parse_reference(name)
    path = reference.model.path
    return bool(absent_parts(reference)) or not (os.path.isdir(path) or is_gguf(path) or is_hub_name(path))
