"""A recipe as the merge uses it, and all that it reads and writes. Faults are collected in its document; in mergekit's
own commands the first one stops it, with its place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import (
    ConfigReader,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    evaluate_setting,
)
from mergekit.merge_methods.base import MergeMethod
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from rotation_merge.averaging.methods import OwnMethod
from rotation_merge.config import MODEL, READ, WRITTEN, Kind
from rotation_merge.errors import RecipeError
from rotation_merge.files import FOLDER, MATCHING_UNFINISHED, ROOM, WORK, Input, Output
from rotation_merge.matching.options import AlignConfig, VaryingOptions
from rotation_merge.mergekit_plugin.delegates import OWN
from rotation_merge.mergekit_plugin.document import Document, documents, is_ours, read_from, recipe_file
from rotation_merge.mergekit_plugin.keys import (
    BY_NAME,
    EACH,
    OPTIONS,
    RECIPE,
    RELATIONS,
    UNMOVED,
    checked,
    names,
)
from rotation_merge.mergekit_plugin.parts import items, leaves
from rotation_merge.mergekit_plugin.rules import check, is_plain

ALIGNMENT = "alignment.safetensors"
"""File that `save_alignment: true` writes beside a merged model."""
KEPT_BY = "kept_by"
"""Says in the head of an alignment file that `save_alignment` wrote it."""


@dataclass(frozen=True)
class Recipe:
    """The parts of a merge configuration that concern the alignment.

    Attributes:
        config: mergekit's view of it.
        document: its source.
        base: the anchor; of an average alone that needs none, the first model.
        delegate: the method that averages.
        alone: whether it is the recipe of an average of our own, with nothing moved (`merge_method: wudi`).
        plain: the delegate is not told that the anchor is the base (see `is_plain`).
        exclude: parts of names of tensors that are copied from the anchor.
        values: the parameters of the whole merge, by name (see `value`).
        own_heads: names of tensors that every model keeps of its own (`heads_of: each`), known once models are opened.
        relations: `near` or `far` by donor where a `preset` is set, or `unmoved`; known once models are opened.
    """

    config: MergeConfiguration
    document: Document = field(repr=False)
    base: ModelReference
    delegate: MergeMethod
    alone: bool
    plain: bool
    exclude: tuple[str, ...]
    values: Mapping[str, Any]
    own_heads: set[str] = field(default_factory=set, repr=False)
    relations: dict[ModelReference, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, config: MergeConfiguration) -> Recipe:
        """Read a configuration made in Python.

        Raises:
            RecipeError: the first fault, its place and the remedy.
        """
        return cls.of(Document(config.model_dump(exclude_none=True)), config)

    @classmethod
    def of(cls, document: Document, config: MergeConfiguration | None = None) -> Recipe:
        """Read a document, or a configuration and the document it amounts to.

        Raises:
            RecipeError: the first fault, its place and the remedy.
        """
        recipe = read(document, config)
        document.raise_first()
        assert recipe is not None
        return recipe

    def value(self, name: str) -> Any:
        """A parameter of the whole merge, its default where it is not given."""
        value = self.values.get(name)
        return BY_NAME[name].default if value is None else value

    @property
    def own_method(self) -> OwnMethod | None:
        """The delegate, where it is one of our own."""
        return self.delegate if isinstance(self.delegate, OwnMethod) else None

    @property
    def on_whole_models(self) -> bool:
        """Whether the delegate works on whole models, not tensor by tensor."""
        return self.own_method is not None and self.own_method.whole_models

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that tensors are stored in; None: each in that of its file."""
        return dtype_from_name(self.config.dtype)

    @property
    def unsupported(self) -> str:
        return str(self.value("unsupported"))

    @property
    def untie(self) -> bool:
        return bool(self.value("untie"))

    @property
    def mean(self) -> bool:
        return bool(self.value("anchor") == "mean")

    def options(self, reader: ConfigReader, block: str, donor: ModelReference) -> AlignConfig:
        """The options for one donor in one block; filters see the block's module path."""
        relation = UNMOVED if self.alone else self.relations.get(donor, "")
        values: dict[str, Any] = dict(RELATIONS.get(relation, {}))
        for name in OPTIONS:
            value = _setting(name, reader.parameter_sources(donor), block, reader.t)
            if value is not None:
                values[name] = checked(name, value)
        return AlignConfig.from_values(values)

    def varying(self, reader: ConfigReader, donor: ModelReference) -> AlignConfig:
        """The options for one donor, which know those of each block."""
        scopes = [scope for scope in reader.parameter_sources(donor) if scope is not None]
        varied = any(not isinstance(s[n], bool | int | float | str) for s in scopes for n in s.keys() & set(OPTIONS))
        whole = self.options(reader, "", donor)
        return VaryingOptions(whole, lambda b, t: self.options(reader.with_t(t), b, donor)) if varied else whole

    def of_model(self, name: str, reader: ConfigReader, model: ModelReference) -> Any:
        """A parameter of one model; its default where it is not given."""
        value = self.given_of_model(name, reader, model)
        return BY_NAME[name].default if value is None else value

    def given_of_model(self, name: str, reader: ConfigReader, model: ModelReference) -> Any:
        """A parameter of one model; None where it is not given."""
        value = _setting(name, reader.parameter_sources(model), "", 0.0)
        return None if value is None else checked(name, value)

    def excluded(self, tensor: str) -> bool:
        return tensor in self.own_heads or any(part in tensor for part in self.exclude)


def read(document: Document, config: MergeConfiguration | None = None) -> Recipe | None:
    """Read a document, collecting its faults there; None where it has any, or is not ours.

    Args:
        config: mergekit's validated form of the document, if it exists.
    """
    delegate = check(document)
    if document.first is not None or delegate is None:
        return None
    value, config = document.value, config or document.config
    assert config is not None
    settings = value.get("parameters") or {}
    values = {name: checked(name, settings[name]) for name in names(RECIPE, EACH) if name in settings}
    words = [word.strip() for word in (values.get("exclude") or "").split(",")]
    base = config.base_model or next(model for model, _ in entries(config))
    return Recipe(
        config=config,
        document=document,
        base=base,
        delegate=delegate,
        alone=value["merge_method"] in OWN,
        plain=is_plain(value, delegate),
        exclude=tuple(word for word in words if word),
        values={**values, "delegate": delegate.spec.name},
    )


def _setting(name: str, scopes: Iterable[Mapping[str, Any] | None], block: str, t: float) -> Any:
    for scope in scopes:
        if scope is not None and name in scope:
            value = evaluate_setting(block, scope[name], t, validate=lambda v: v)
            if value is not None:
                return value
    return None


def restore_paths(document: Any, below_parameters: bool = False) -> Any:
    """Undo mergekit-multi's change of parameters: a model reference written as a mapping becomes a path again.

    (It replaces every string equal to the name of a merge, also where only a string may stand.)
    """
    if isinstance(document, dict):
        if below_parameters and set(document) == set(ModelReference.model_fields):
            return document["model"]["path"]
        return {key: restore_paths(item, below_parameters or key == "parameters") for key, item in document.items()}
    return [restore_paths(item, below_parameters) for item in document] if isinstance(document, list) else document


def check_document(content: dict[str, Any]) -> None:
    """Check a recipe without opening a model, unless its file has been checked already.

    Raises:
        RecipeError: the first fault.
    """
    _, all_checked = recipe_file()
    if not all_checked:
        document = Document(content)
        check(document)
        document.raise_first()


@contextmanager
def checked_file(path: str) -> Iterator[None]:
    """Check every document of ours in a recipe file, once for all that is read from it meanwhile.

    Raises:
        RecipeError: the first fault, with line and column, and the number of others.
    """
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        recipes = documents(text)
    except RecipeError as error:
        raise RecipeError(error.what, where=f"{path}, {error.where}", remedy=error.remedy) from error
    ours = [document for document in recipes if is_ours(document.value)]
    for document in ours:
        check(document)
    first = next((document.first for document in ours if document.first), None)
    if first is not None:
        position = f"line {first.line}, column {first.column}" if first.line else ""
        more = sum(fault.error for document in ours for fault in document.faults) - 1
        others = f" ({more} more: rotation-merge check {path})" if more else ""
        place = ", ".join(part for part in (path, position, first.where) if part)
        raise RecipeError(first.what, where=place, remedy=f"{first.remedy}{others}")
    with read_from(path, checked=True):
        yield


def title(model: object, origin: object | None) -> str:
    """The donor's name in reports."""
    return str(model) if origin is None else f"{model} (carried over from {origin})"


def entries(config: MergeConfiguration) -> Iterator[tuple[ModelReference, Mapping[str, Any]]]:
    """Every model that a recipe merges, with its parameters."""
    listed = (part for part in _parts(config) if isinstance(part, InputModelDefinition | InputSliceDefinition))
    return ((entry.model, entry.parameters or {}) for entry in listed)


def carried_donors(config: MergeConfiguration) -> set[ModelReference]:
    """Models whose task vector is carried over, into the anchor's vocabulary."""
    return {model for model, settings in entries(config) if settings.get("finetuned_from") not in (None, "none")}


# --- inputs and outputs ----------------------------------------------------------------------------------------------


def recipe_inputs(config: MergeConfiguration) -> list[Input]:
    """Everything that a recipe reads, wherever it names it: models, adapters, sources of tokenizers, files."""
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
            check(recipe)
    configs = [recipe.config for recipe in recipes if recipe.config is not None]
    return list(dict.fromkeys(read for config in configs for read in recipe_inputs(config)))


def recipe_outputs(config: MergeConfiguration, out: str | None) -> list[Output]:
    """All outputs of a recipe: the folder, and files named by parameters.

    Args:
        out: the merged model's folder; None: it is not known yet.
    """
    outputs = [] if out is None else [Output(out, "OUT", FOLDER), Output(f"{out}{MATCHING_UNFINISHED}", "OUT", WORK)]
    donors = len({model for model, _ in entries(config)} - {config.base_model})
    for name, value in _parameters(config):
        parameter = f"parameters.{name}"
        if name == "save_alignment" and value and out is not None:
            outputs += [
                Output(
                    file,
                    parameter,
                    wrote=lambda file: _is_saved_alignment(file, config),
                    remedy="name another file, or move it away",
                )
                for file in numbered(os.path.join(out, ALIGNMENT if value is True else value), donors)
            ]
        elif name != "save_alignment" and _names(name, value, WRITTEN):
            outputs.append(Output(value, parameter, ROOM, remedy="name another folder"))
    return outputs


def check_alignment_name(config: MergeConfiguration) -> None:
    """Refuse a `save_alignment` that names no place inside the merged model's folder.

    Raises:
        RecipeError: names the value.
    """
    for name, value in _parameters(config):
        if name == "save_alignment" and isinstance(value, str):
            steps = os.path.normpath(value).split(os.sep)
            if os.path.isabs(value) or steps[0] in (os.curdir, os.pardir):
                problem = f"'{value}' is not a name inside the merged model's folder"
                remedy = "write 'true', or a name such as 'maps.safetensors'"
                raise RecipeError(problem, where=f"parameters.{name}", remedy=remedy)


def numbered(path: str, count: int) -> list[str]:
    """A file for each donor: NAME, NAME-2, NAME-3."""
    stem, ending = os.path.splitext(path)
    return [f"{stem}{'' if number == 1 else f'-{number}'}{ending}" for number in range(1, max(count, 1) + 1)]


def _is_saved_alignment(path: str, config: MergeConfiguration) -> bool:
    """Whether `save_alignment` wrote a file, for models of this recipe."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["made"])
        origins = {str(value) for name, value in _parameters(config) if name == "finetuned_from"}
        models = origins | {str(reference) for reference in _references(config)}
        return facts[KEPT_BY] == "save_alignment" and {facts["anchor"], facts["donor"]} <= models
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False


def _names(name: str, value: Any, role: str) -> bool:
    """Whether a value of one of our parameters is the name of something that is read, or written."""
    if name not in BY_NAME or not isinstance(value, str):
        return False
    option = BY_NAME[name].option
    return isinstance(option.kind, Kind) and option.kind.role == role and value not in (*option.words, "none")


def _references(config: MergeConfiguration) -> Iterator[ModelReference]:
    """All models that a configuration names."""
    return (part for part in _parts(config) if isinstance(part, ModelReference))


def _parameters(config: MergeConfiguration) -> Iterator[tuple[str, Any]]:
    """Names and values of all parameters in a recipe; each value of lists and filters."""
    for part in _parts(config):
        for name, setting in items(getattr(part, "parameters", None)):
            yield from ((name, leaf) for leaf, _ in leaves(setting))


def _parts(value: Any) -> Iterator[Any]:
    """Everything that a configuration is made of, the inner parts first."""
    if isinstance(value, BaseModel) and not isinstance(value, ModelReference):
        children = [getattr(value, name) for name in type(value).model_fields]
    else:
        children = [item for _, item in items(value)]
    for child in children:
        yield from _parts(child)
    yield value
