"""The parts of a recipe, by mergekit's classes: what is listed where, and the places of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
from pydantic import BaseModel, ValidationError

from rotation_merge.mergekit_plugin.document import Path
from rotation_merge.mergekit_plugin.keys import DONOR_ONLY, EACH, OPTIONS, RECIPE, names

BELOW: dict[type[BaseModel], dict[str, type[BaseModel]]] = {
    MergeConfiguration: {
        "tokenizer": TokenizerConfig,
        "models": InputModelDefinition,
        "slices": OutputSliceDefinition,
        "modules": OutputModuleDefinition,
    },
    TokenizerConfig: {"tokens": TokenEmbeddingConfig},
    OutputModuleDefinition: {"models": InputModelDefinition, "slices": OutputSliceDefinition},
    OutputSliceDefinition: {"sources": InputSliceDefinition},
}
"""Keys of mergekit's classes that hold parts of a recipe, and the classes of those."""

_OF_MODEL = (*OPTIONS, *names(EACH, DONOR_ONLY))
ALLOWED: dict[type[BaseModel], tuple[str, ...]] = {
    MergeConfiguration: (*OPTIONS, *names(EACH, RECIPE)),
    InputModelDefinition: _OF_MODEL,
    InputSliceDefinition: _OF_MODEL,
    OutputSliceDefinition: OPTIONS,
    OutputModuleDefinition: OPTIONS,
}
"""Parts of a recipe with parameters, and those of ours that are allowed there."""


def items(value: Any) -> list[tuple[Any, Any]]:
    """Keys or indices, and their values."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        value = dict(items(value)).get(step)
    return value


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Any, Path]]:
    """The scalars of a setting: itself, the entries of a per-layer list, the values behind filters."""
    if isinstance(value, ConditionalParameter):
        value = value.model_dump()
    if isinstance(value, Mapping):
        yield from leaves(value.get("value"), (*path, "value"))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif value is not None:
        yield value, path


def reference(value: Any) -> ModelReference | None:
    """A model as mergekit reads it, None where it cannot."""
    try:
        return None if value is None else ModelReference.model_validate(value)
    except (ValidationError, RuntimeError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class RecipePart:
    """A part of a recipe that has a fixed set of keys: the whole, a module, a slice, a model, a tokenizer, a token.

    Attributes:
        kind: mergekit's class of it.
    """

    path: Path
    value: Any
    kind: type[BaseModel]

    @property
    def parameters(self) -> Mapping[Any, Any]:
        settings = at(self.value, ("parameters",))
        return settings if isinstance(settings, Mapping) else {}

    @property
    def model(self) -> ModelReference | None:
        return reference(at(self.value, ("model",)))


def parts(value: Any, kind: type[BaseModel] = MergeConfiguration, path: Path = ()) -> Iterator[RecipePart]:
    """Every part of a recipe, in the order of mergekit's classes."""
    yield RecipePart(path, value, kind)
    for name, below in BELOW.get(kind, {}).items():
        child = at(value, (name,))
        if below is TokenizerConfig:
            yield from parts(child, below, (name,))
        else:
            for step, item in items(child):
                yield from parts(item, below, (*path, name, step))


def scopes(value: Any) -> Iterator[tuple[Path, RecipePart]]:
    """Every place for parameters in a recipe, and the part that it belongs to."""
    return (((*part.path, "parameters"), part) for part in parts(value) if part.kind in ALLOWED)


@dataclass(frozen=True)
class MergeInputs:
    """Models that are merged together: those of a slice, a module or the whole recipe.

    Attributes:
        path: their place in the recipe.
        entries: the part of each model, which can be read.
        above: the parts whose parameters hold for all of them.
        whole: whether they are whole models, to which mergekit adds a base that is not listed.
    """

    path: Path
    entries: list[RecipePart]
    above: list[RecipePart]
    whole: bool

    def inputs(self, base: ModelReference | None) -> list[ModelReference]:
        """The delegate's inputs if `base` is its base."""
        models = [entry.model for entry in self.entries if entry.model is not None]
        return [*models, base] if self.whole and base and base not in models else models


def groups(value: Any) -> Iterator[MergeInputs]:
    """Every set of models for the delegate, as far as they can be read."""
    every = list(parts(value))
    for part in every:
        sliced = part.kind is OutputSliceDefinition
        listed = (*part.path, "sources" if sliced else "models")
        if isinstance(part.value, Mapping) if sliced else isinstance(at(part.value, listed[-1:]), list):
            entries = [entry for entry in every if entry.path[:-1] == listed]
            above = [outer for outer in every if outer.path == part.path[: len(outer.path)]]
            if all(entry.model is not None for entry in entries):
                yield MergeInputs(part.path if sliced else listed, entries, above, not sliced)


def tokenizer_source(value: Mapping[str, Any]) -> tuple[Path, str | None]:
    """The path of the recipe's tokenizer source, and the model named there; None for `base` or `union`."""
    for path in (("tokenizer", "source"), ("tokenizer_source",)):
        source = at(value, path)
        if source is not None and source not in ("base", "union"):
            named = reference(source)
            return path, named.model.path if named is not None else None
    return (), None
