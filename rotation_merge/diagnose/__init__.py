"""Checking a recipe without reading weights: all faults at once, each at its line and column."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mergekit.options import MergeOptions

from rotation_merge.diagnose.donors import RecipeDonor, carried_recipe, donors_of
from rotation_merge.diagnose.sources import check_sources, references
from rotation_merge.errors import CheckpointError, RotationMergeError, nearest
from rotation_merge.mergekit_plugin.recipe.document import Document, Fault, documents
from rotation_merge.mergekit_plugin.recipe.names import METHOD
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import at
from rotation_merge.mergekit_plugin.recipe.reading import read
from rotation_merge.mergekit_plugin.recipe.settings import check_settings
from rotation_merge.model.checkpoint import parse_reference
from rotation_merge.model.gguf.place import gguf_files, in_cache, is_gguf
from rotation_merge.model.headers import holds_model
from rotation_merge.model.hub import is_hub_name

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
    """Every fault of a recipe for mergekit-yaml, mergekit-multi or mergekit-evolve, in the order of the text.

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
        if "genome" in document.value:
            _check_evolve(document)
            continue
        if document.value.get("merge_method") == METHOD:
            check_sources(document, read(document), names, options, refused)
        else:
            check_settings(document)
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
        for part in filter(None, (reference.model, reference.lora)):
            if is_hub_name(part.path) and not os.path.exists(part.path) and not is_gguf(part.path):
                folder = in_cache(part.path, part.revision)
                if folder is None or not (holds_model(folder) or gguf_files(folder) or part is reference.lora):
                    names.append(part.path if part.revision is None else f"{part.path}@{part.revision}")
    return list(dict.fromkeys(names))


def _check_evolve(document: Document) -> None:
    """A search by mergekit-evolve over models that have been aligned before: keys, types, models."""
    from mergekit.evo.config import EvolMergeConfiguration
    from mergekit.evo.genome import METHOD_PARAM_MAPS, ModelGenomeDefinition
    from pydantic import ValidationError

    for path, kind in (((), EvolMergeConfiguration), (("genome",), ModelGenomeDefinition)):
        value: Any = document.value if not path else at(document.value, path)
        for key in value if isinstance(value, dict) else ():
            if key not in kind.model_fields:
                document.fault((*path, str(key)), f"there is no key '{key}' here", nearest(str(key), kind.model_fields))
    method = at(document.value, ("genome", "merge_method"))
    if method not in METHOD_PARAM_MAPS:
        known = ", ".join(METHOD_PARAM_MAPS)
        document.fault(("genome", "merge_method"), f"mergekit-evolve cannot search over '{method}'", f"known: {known}")
        return
    try:
        EvolMergeConfiguration.model_validate(document.value)
    except ValidationError as error:
        for problem in error.errors():
            document.fault(tuple(problem["loc"]), problem["msg"], "see mergekit's documentation")
    _check_genome_models(document)


def _check_genome_models(document: Document) -> None:
    from mergekit.common import ModelReference

    from rotation_merge.model.checkpoint import Models

    models = Models(MergeOptions(), "merge")
    entries = at(document.value, ("genome", "models"))
    for i, name in enumerate(entries if isinstance(entries, list) else []):
        try:
            reference = ModelReference.parse(str(name))
            if is_hub_name(reference.model.path):
                continue
            models[reference].check_files()
            models[reference].config  # noqa: B018  (loads and checks)
        except CheckpointError as error:
            document.raised(("genome", "models", i), error)
        except (RotationMergeError, RuntimeError, ValueError) as error:
            document.fault(("genome", "models", i), str(error), "check the path")
