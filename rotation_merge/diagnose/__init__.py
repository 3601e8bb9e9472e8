"""Checking a recipe without reading weights: all faults at once, each at its line and column."""

from __future__ import annotations

from collections.abc import Mapping

from mergekit.options import MergeOptions

from rotation_merge.diagnose.donors import RecipeDonor, carried_recipe, donors_of
from rotation_merge.diagnose.sources import check_sources, references
from rotation_merge.errors import RotationMergeError
from rotation_merge.mergekit_plugin.document import Document, Fault, documents, is_ours
from rotation_merge.mergekit_plugin.recipe import read
from rotation_merge.model.folder import absent_parts
from rotation_merge.model.hub import is_hub_name
from rotation_merge.model.open import parse_reference

__all__ = [
    "Document",
    "Fault",
    "RecipeDonor",
    "absent_models",
    "carried_recipe",
    "check_text",
    "documents",
    "donors_of",
]


def check_text(text: str, refused: Mapping[str, RotationMergeError]) -> list[Fault]:
    """Every fault of a recipe for mergekit-yaml or mergekit-multi, in the order of the text.

    Args:
        refused: models of the hub whose headers could not be fetched, by name.

    Raises:
        RecipeError: the text is not YAML.
    """
    options = MergeOptions()
    parsed = documents(text)
    names: set[str] = set()
    for document in parsed:
        if not isinstance(document.value, dict):
            continue
        recipe = read(document)
        if is_ours(document.value, misspelt=False):
            check_sources(document, recipe, names, options, refused)
        name = document.value.get("name")
        if isinstance(name, str):
            names.add(name)
    faults = [fault for document in parsed for fault in document.faults]
    return sorted(faults, key=lambda f: (f.document, f.line, f.column))


def absent_models(text: str) -> list[str]:
    """Names on the hub of the models and adapters of a recipe that have not been downloaded, except GGUF files.

    Raises:
        RecipeError: the text is not YAML.
    """
    values = [document.value for document in documents(text) if isinstance(document.value, dict)]
    merge_names = {value.get("name") for value in values}
    names = []
    for name in (name for value in values for _, name in references(value) if name not in merge_names):
        try:
            reference = parse_reference(name)
        except RotationMergeError:  # said where the recipe is checked
            continue
        names += [str(part) for part in absent_parts(reference) if is_hub_name(part.path)]
    return list(dict.fromkeys(names))
