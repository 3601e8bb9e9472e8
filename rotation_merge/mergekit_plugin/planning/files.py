"""All that a recipe reads, and all that it writes: models, adapters, files of its parameters, sources of tokenizers."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from rotation_merge.config import MODEL, READ, WRITTEN, Kind
from rotation_merge.errors import RecipeError
from rotation_merge.files import FOLDER, MATCHING_UNFINISHED, ROOM, WORK, Input, Output
from rotation_merge.mergekit_plugin.recipe.detect import recipe_file
from rotation_merge.mergekit_plugin.recipe.document import documents
from rotation_merge.mergekit_plugin.recipe.donor import entries
from rotation_merge.mergekit_plugin.recipe.names import BY_NAME
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import items, leaves
from rotation_merge.mergekit_plugin.recipe.settings import check_settings
from rotation_merge.record import MANIFEST_FILE

ALIGNMENT = "alignment.safetensors"
"""File that `save_alignment: true` writes beside a merged model."""
KEPT_BY = "kept_by"
"""Says in the head of an alignment file that `save_alignment` wrote it."""


def recipe_inputs(config: MergeConfiguration) -> list[Input]:
    """Everything that a recipe reads, wherever it names it."""
    inputs = [Input(str(reference), "model") for reference in _references(config)]
    for name, value in _parameters(config):
        if _names(name, value, READ):
            inputs.append(Input(value, "model" if BY_NAME[name].option.kind is MODEL else name))
    return list(dict.fromkeys(inputs))


def inputs_in(path: str) -> list[Input]:
    """All inputs of the recipes in a file, as far as they can be read."""
    try:
        with open(path, encoding="utf-8") as file:
            recipes = documents(file.read())
    except (OSError, UnicodeDecodeError, RecipeError):
        return []
    for recipe in recipes:
        if isinstance(recipe.value, dict):
            check_settings(recipe)
    configs = [recipe.config for recipe in recipes if recipe.config is not None]
    return list(dict.fromkeys(read for config in configs for read in recipe_inputs(config)))


def recipe_outputs(config: MergeConfiguration, out: str | None) -> list[Output]:
    """All outputs of a recipe: the folder, and files named by parameters.

    Args:
        out: the merged model's folder; None: it is not known yet.
    """
    outputs = [] if out is None else [Output(out, "OUT", FOLDER), Output(f"{out}{MATCHING_UNFINISHED}", "OUT", WORK)]
    donors = len({model for model, _ in entries(config)} - {config.base_model})
    wrote = functools.partial(is_saved_alignment, config=config)
    for name, value in _parameters(config):
        option = f"parameters.{name}"
        if name == "save_alignment" and (value is not True or out is not None):
            path = os.path.join(str(out), ALIGNMENT) if value is True else str(value)
            if value:
                outputs += [Output(file, option, wrote=wrote, remedy=RENAME) for file in numbered(path, donors)]
        elif _names(name, value, WRITTEN):
            outputs.append(Output(value, option, ROOM, remedy="name another folder"))
    return outputs


RENAME = "name another file, or move it away"


def check_pulled(config: MergeConfiguration) -> None:
    """Refuse outputs of a pulled recipe outside the current folder.

    Raises:
        RecipeError: names the parameter.
    """
    path = recipe_file()
    if path is None or not os.path.exists(os.path.join(os.path.dirname(path), MANIFEST_FILE)):
        return
    folder = os.path.realpath(os.getcwd())
    for output in recipe_outputs(config, None):
        place = os.path.realpath(output.path)
        if os.path.isabs(output.path) or os.path.commonpath((folder, place)) != folder:
            problem = f"'{output.path}' is outside the folder of the command, where a pulled recipe may not write"
            raise RecipeError(problem, where=output.option, remedy="read the recipe, and name a file in that folder")


def numbered(path: str, count: int) -> list[str]:
    """A file for each donor: NAME, NAME-2, NAME-3."""
    stem, ending = os.path.splitext(path)
    return [f"{stem}{'' if number == 1 else f'-{number}'}{ending}" for number in range(1, max(count, 1) + 1)]


def is_saved_alignment(path: str, config: MergeConfiguration) -> bool:
    """Whether `save_alignment` wrote a file, for models of this recipe."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["made"])
        models = {str(reference) for reference in _references(config)} | {
            str(value) for name, value in _parameters(config) if name == "finetuned_from"
        }
        return facts[KEPT_BY] == "save_alignment" and {facts["anchor"], facts["donor"]} <= models
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False


def _names(name: str, value: Any, role: str) -> bool:
    """Whether a value of one of our parameters is the name of something that is read, or written."""
    if name not in BY_NAME or not isinstance(value, str):
        return False
    described = BY_NAME[name].option
    return isinstance(described.kind, Kind) and described.kind.role == role and value not in (*described.words, "none")


def _references(value: Any) -> Iterator[ModelReference]:
    """All models that a configuration names."""
    if isinstance(value, ModelReference):
        yield value
    else:
        for _, child in _children(value):
            yield from _references(child)


def _parameters(value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of all parameters in a recipe; each value of lists and filters."""
    for field, child in _children(value):
        if field == "parameters" and isinstance(child, Mapping):
            for parameter, setting in child.items():
                yield from ((parameter, leaf) for leaf, _ in leaves(_plain(setting)))
        else:
            yield from _parameters(child)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """The children of a configuration's part, each with its field name; without names in mappings and lists."""
    if isinstance(value, BaseModel):
        yield from ((field, getattr(value, field)) for field in type(value).model_fields)
    else:
        yield from (("", item) for _, item in items(value))


def _plain(setting: Any) -> Any:
    """A setting without mergekit's classes of conditions."""
    if isinstance(setting, BaseModel):
        return setting.model_dump()
    return [_plain(item) for item in setting] if isinstance(setting, list | tuple) else setting
