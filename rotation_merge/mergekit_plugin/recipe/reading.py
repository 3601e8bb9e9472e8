"""A recipe as the merge uses it, read from a document that collects its faults. In mergekit's own commands the first
fault stops it, with its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, MergeConfiguration, evaluate_setting
from mergekit.merge_methods.base import MergeMethod

from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import AlignConfig, VaryingOptions
from rotation_merge.mergekit_plugin.recipe import delegates
from rotation_merge.mergekit_plugin.recipe.contract import plain
from rotation_merge.mergekit_plugin.recipe.detect import is_ours
from rotation_merge.mergekit_plugin.recipe.document import Document, Fault, documents
from rotation_merge.mergekit_plugin.recipe.names import BY_NAME, EACH, OPTIONS, RECIPE, RELATIONS, names, normal
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import at
from rotation_merge.mergekit_plugin.recipe.settings import check_settings

_of_a_checked_file: ContextVar[bool] = ContextVar("_of_a_checked_file", default=False)


def restore_paths(document: Any) -> Any:
    """Undo mergekit-multi's change of parameters: a model reference written as a mapping becomes a path again.

    (It replaces every string equal to the name of a merge, also where only a string may stand.)
    """
    if isinstance(document, dict):
        return {k: _paths(v) if k == "parameters" else restore_paths(v) for k, v in document.items()}
    return [restore_paths(item) for item in document] if isinstance(document, list) else document


def _paths(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"model", "lora", "override_architecture"}:
            return value["model"]["path"]
        return {k: _paths(v) for k, v in value.items()}
    return [_paths(v) for v in value] if isinstance(value, list) else value


def check_document(content: dict[str, Any]) -> None:
    """Check a recipe without opening a model, unless its file has been checked already.

    Raises:
        RecipeError: the first fault.
    """
    if _of_a_checked_file.get():
        return
    document = Document(content)
    check_settings(document)
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
        check_settings(document)
    more = sum(fault.error for document in ours for fault in document.faults) - 1
    first = next((document.first for document in ours if document.first), None)
    if first is not None:
        raise RecipeError(first.what, where=_place(path, first), remedy=_remedy(path, first, more))
    token = _of_a_checked_file.set(True)
    try:
        yield
    finally:
        _of_a_checked_file.reset(token)


def _place(path: str, fault: Fault) -> str:
    position = f"line {fault.line}, column {fault.column}" if fault.line else ""
    return ", ".join(part for part in (path, position, fault.where) if part)


def _remedy(path: str, fault: Fault, more: int) -> str:
    if not more:
        return fault.remedy
    return f"{fault.remedy} ({more} more: rotation-merge check {path})"


@dataclass(frozen=True)
class Recipe:
    """The parts of a merge configuration that concern the alignment.

    Attributes:
        config: mergekit's view of it; its planner rearranges models and slices in there.
        document: its source.
        base: the anchor.
        delegate: the method that averages.
        plain: the delegate is not told that the anchor is the base (see `contract.is_plain`).
        exclude: parts of names of tensors that are copied from the anchor.
        values: the parameters of the whole merge, by name (see `value`).
        own_heads: names of tensors that every model keeps of its own (`heads_of: each`), known once models are opened.
        relations: `near` or `far` by donor where a `preset` is set, or `unmoved`; known once models are opened.
    """

    config: MergeConfiguration
    document: Document = field(repr=False)
    base: ModelReference
    delegate: MergeMethod
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
        values: dict[str, Any] = dict(RELATIONS.get(self.relations.get(donor, ""), {}))
        for name in OPTIONS:
            value = _setting(name, reader.parameter_sources(donor), block, reader.t)
            if value is not None:
                values[name] = normal(name, value)
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
        return None if value is None else BY_NAME[name].check(value)

    def excluded(self, tensor: str) -> bool:
        return tensor in self.own_heads or any(part in tensor for part in self.exclude)


def read(document: Document, config: MergeConfiguration | None = None) -> Recipe | None:
    """Read a document of ours, collecting its faults there; None where it has any.

    Args:
        config: mergekit's validated form of the document, if it exists.
    """
    check_settings(document)
    if document.first is not None:
        return None
    value, config = document.value, config or document.config
    assert config is not None
    assert config.base_model is not None
    settings = at(value, ("parameters",)) or {}
    values = {name: BY_NAME[name].check(settings[name]) for name in names(RECIPE, EACH) if name in settings}
    delegate = delegates.get(values.get("delegate") or BY_NAME["delegate"].default)
    parts = (values.get("exclude") or "").split(",")
    exclude = tuple(part.strip() for part in parts if part.strip())
    return Recipe(config, document, config.base_model, delegate, plain(document, delegate), exclude, values)


def _setting(name: str, scopes: Iterable[Mapping[str, Any] | None], block: str, t: float) -> Any:
    for scope in scopes:
        if scope is not None and name in scope:
            value = evaluate_setting(block, scope[name], t, validate=lambda v: v)
            if value is not None:
                return value
    return None
