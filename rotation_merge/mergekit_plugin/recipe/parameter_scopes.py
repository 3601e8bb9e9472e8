"""Paths in a recipe: its parts, the places of parameters, the models merged together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, OutputModuleDefinition, OutputSliceDefinition
from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
from pydantic import ValidationError

from rotation_merge.mergekit_plugin.recipe.document import Path
from rotation_merge.mergekit_plugin.recipe.names import DONOR_ONLY, EACH, OPTIONS, RECIPE, names


def at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def items(value: Any) -> list[tuple[Any, Any]]:
    """Keys or indices, and their values."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def existing(value: Any, path: Path) -> Path:
    """The part of a path that is there."""
    for length in range(len(path), 0, -1):
        if path[length - 1] in [key for key, _ in items(at(value, path[: length - 1]))]:
            return path[:length]
    return ()


def parts(value: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every part of a recipe that has a fixed set of keys, and the class that lists them."""
    if isinstance(value.get("tokenizer"), Mapping):
        yield ("tokenizer",), TokenizerConfig
        for name, _ in items(value["tokenizer"].get("tokens")):
            yield ("tokenizer", "tokens", name), TokenEmbeddingConfig
    for path, part in outputs(value):
        if path:
            yield path, OutputModuleDefinition
        yield from _inputs(part, path)


def outputs(value: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The recipe itself and its modules: the parts with models or slices."""
    yield (), value
    for name, module in items(value.get("modules")):
        if isinstance(module, Mapping):
            yield ("modules", name), module


def _inputs(value: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for i, _ in items(value.get("models")):
        yield (*path, "models", i), InputModelDefinition
    for i, piece in items(value.get("slices")):
        yield (*path, "slices", i), OutputSliceDefinition
        for j, _ in items(piece.get("sources") if isinstance(piece, Mapping) else None):
            yield (*path, "slices", i, "sources", j), InputSliceDefinition


def scopes(value: Mapping[str, Any]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every place for parameters in a recipe, and our parameters that are allowed there."""
    yield ("parameters",), (*OPTIONS, *names(EACH, RECIPE))
    for path, kind in parts(value):
        if kind in (InputModelDefinition, InputSliceDefinition):
            yield (*path, "parameters"), (*OPTIONS, *names(EACH, DONOR_ONLY))
        elif kind in (OutputSliceDefinition, OutputModuleDefinition):
            yield (*path, "parameters"), OPTIONS


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Any, Path]]:
    """The scalars of a setting: itself, the entries of a per-layer list, the values behind filters."""
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif isinstance(value, Mapping):
        if "value" in value:
            yield from leaves(value["value"], (*path, "value"))
    elif value is not None:
        yield value, path


def varies(setting: Any) -> bool:
    """Whether a setting has more than one value: a per-layer list, or filters."""
    return isinstance(setting, list | tuple | Mapping)


def filters(setting: Any) -> list[str]:
    """The filters of a setting, without those that match everything."""
    conditions = setting if isinstance(setting, list) else [setting]
    texts = [c.get("filter") for c in conditions if isinstance(c, Mapping)]
    return [text for text in texts if text not in (None, "*")]


@dataclass(frozen=True)
class MergeInputs:
    """Models that are merged together: those of a slice, a module or the whole recipe.

    Attributes:
        path: its place in the recipe.
        entries: the place of each model.
        models: in the order of the recipe, without the base that mergekit adds.
        sources: the values at their places.
        settings: of each model, its own parameters.
        shared: parameters that hold for all of them.
        adds_base: whether mergekit adds a base that is not listed.
    """

    path: Path
    entries: list[Path]
    models: list[ModelReference]
    sources: list[Any]
    settings: list[Mapping[str, Any]]
    shared: list[Mapping[str, Any]]
    adds_base: bool

    def inputs(self, base: ModelReference | None) -> list[ModelReference]:
        """The delegate's inputs if `base` is its base."""
        return [*self.models, base] if self.adds_base and base and base not in self.models else self.models


def groups(value: Mapping[str, Any]) -> Iterator[MergeInputs]:
    """Every set of models for the delegate, as far as they can be read."""
    for path, part in outputs(value):
        shared = [_settings(part), *([_settings(value)] if path else [])]
        if isinstance(part.get("models"), list):
            yield from _group(value, (*path, "models"), (*path, "models"), shared, True)
        for i, piece in items(part.get("slices")):
            slice_path = (*path, "slices", i)
            if isinstance(piece, Mapping):
                yield from _group(value, slice_path, (*slice_path, "sources"), [_settings(piece), *shared], False)


def _group(
    value: Mapping[str, Any], path: Path, listed: Path, shared: list[Mapping[str, Any]], adds_base: bool
) -> Iterator[MergeInputs]:
    entries = [(*listed, i) for i, _ in items(at(value, listed))]
    models = [reference(at(value, (*entry, "model"))) for entry in entries]
    known = [model for model in models if model is not None]
    if len(known) == len(models):
        sources = [at(value, entry) for entry in entries]
        yield MergeInputs(path, entries, known, sources, list(map(_settings, sources)), shared, adds_base)


def _settings(part: Any) -> Mapping[str, Any]:
    settings = part.get("parameters") if isinstance(part, Mapping) else None
    return settings if isinstance(settings, Mapping) else {}


def reference(value: Any) -> ModelReference | None:
    """A model as mergekit reads it, None where it cannot."""
    if value is None:
        return None
    try:
        return ModelReference.model_validate(value)
    except (ValidationError, RuntimeError, ValueError, TypeError):
        return None
