"""Checks that need no model: keys, types, delegates and parameters of one document."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from mergekit import merge_methods
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.merge_methods.base import BasePolicy, MergeMethod, ParameterScope
from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
from pydantic import ValidationError

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.options import MatchOptions
from rotation_merge.recipe import delegates
from rotation_merge.recipe.document import Document, Path
from rotation_merge.recipe.names import BY_NAME, EACH, LEGACY, METHOD, OF_MODEL, OPTIONS, RECIPE, names
from rotation_merge.recipe.reading import _normal as normal
from rotation_merge.recipe.rules import check_shared, is_plain, wanted

MULTI_KEYS = ("name",)
"""Keys that mergekit-multi adds to a document."""


def check_settings(document: Document) -> None:
    """Collect every fault of one document that can be seen without a model."""
    _keys(document, (), document.value, (*MergeConfiguration.model_fields, *MULTI_KEYS))
    for path, kind in _parts(document.value):
        _keys(document, path, _at(document.value, path), tuple(kind.model_fields))
    _types(document)
    method = document.value.get("merge_method")
    known = [METHOD, *(m.spec.name for m in merge_methods.registered_methods())]
    if method != METHOD:
        if isinstance(method, str) and method not in known:
            document.fault(("merge_method",), f"there is no merge method '{method}'", nearest(method, known))
        return
    if document.value.get("base_model") is None:
        document.fault((), "base_model is missing", "name the model that donors are aligned to")
    for key in ("dtype", "out_dtype"):
        _dtype(document, key)
    delegate = _delegate(document)
    for path, groups in scopes(document.value):
        _parameters(document, path, groups, delegate)
    if delegate is not None:
        _contract(document, delegate)


def _at(value: Any, path: Path) -> Any:
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def at(document: Document, path: Path) -> Any:
    """The value at a path, None where there is none."""
    return _at(document.value, path)


def _keys(document: Document, path: Path, value: Any, known: tuple[str, ...]) -> None:
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            remedy = nearest(str(key), known)
            if not path and key in BY_NAME:
                remedy = "it stands under 'parameters'"
            document.fault((*path, str(key)), f"there is no key '{key}' here", remedy)


def _parts(value: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every part of a recipe that has a fixed set of keys, and the class that lists them."""
    if isinstance(value.get("tokenizer"), Mapping):
        yield ("tokenizer",), TokenizerConfig
        for name, _ in _items(value["tokenizer"].get("tokens")):
            yield ("tokenizer", "tokens", name), TokenEmbeddingConfig
    yield from _inputs(value, ())
    for name, module in _items(value.get("modules")):
        yield ("modules", name), OutputModuleDefinition
        if isinstance(module, Mapping):
            yield from _inputs(module, ("modules", name))


def _inputs(value: Mapping[str, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for i, _ in _items(value.get("models")):
        yield (*path, "models", i), InputModelDefinition
    for i, piece in _items(value.get("slices")):
        yield (*path, "slices", i), OutputSliceDefinition
        for j, _ in _items(piece.get("sources") if isinstance(piece, Mapping) else None):
            yield (*path, "slices", i, "sources", j), InputSliceDefinition


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list) else []


def _types(document: Document) -> None:
    """mergekit's own validation, every error at its place."""
    content = {key: value for key, value in document.value.items() if key not in MULTI_KEYS}
    try:
        MergeConfiguration.__pydantic_validator__.validate_python(content)
    except ValidationError as error:
        seen: set[Path] = set()
        for found in error.errors():
            path = _shorten(document, tuple(found["loc"]))
            if path not in seen and not any(known[: len(path)] == path for known in seen):
                seen.add(path)
                document.fault(path, *explain(found))
    except (RuntimeError, TypeError, ValueError) as error:
        document.fault((), str(error), "see mergekit's documentation")


def explain(found: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's errors in a user's words: what is wrong, and the remedy."""
    place = found["loc"]
    if found["type"] == "missing":
        return f"'{place[-1]}' is missing", f"add '{place[-1]}: ...'"
    if "parameters" in place[:-1]:
        return "this is no value", "write a number or a word, a list of them, or a list of {filter: ..., value: ...}"
    wanted = {"list_type": "a list", "dict_type": "a mapping of keys to values", "string_type": "a word"}
    if found["type"].startswith("model") or found["type"] in wanted:
        word = wanted.get(found["type"], "a mapping of keys to values")
        if place[-1] in ("model", "base_model"):
            word = "a directory or org/name"
        return f"{word} is expected here", f"it is {str(found.get('input'))[:60]!r}"
    return f"{found['msg'][:1].lower()}{found['msg'][1:]}", "see mergekit's documentation"


def _shorten(document: Document, path: Path) -> Path:
    """The part of pydantic's location that exists in the text."""
    while path and path not in document.marks:
        path = path[:-1]
    return path


def _dtype(document: Document, key: str) -> None:
    try:
        dtype_from_name(document.value.get(key))
    except (RuntimeError, AttributeError):
        remedy = nearest(str(document.value[key]), ("bfloat16", "float16", "float32", "float64"))
        document.fault((key,), f"there is no dtype {document.value[key]!r}", remedy)


def _delegate(document: Document) -> MergeMethod | None:
    value = _at(document.value, ("parameters", "delegate"))
    name = "linear" if value is None else value
    known = delegates.names()
    if not isinstance(name, str) or name not in known:
        document.fault(
            ("parameters", "delegate"), f"no merge method '{name}' to delegate to", nearest(str(name), known)
        )
        close = difflib.get_close_matches(str(name), known, n=1)
        return delegates.get(close[0]) if close else None
    return delegates.get(name)


def scopes(value: Mapping[str, Any]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Every place where parameters stand, and the groups of names allowed there."""
    yield ("parameters",), ("options", "global")
    for path, kind in _parts(value):
        if kind in (InputModelDefinition, InputSliceDefinition):
            yield (*path, "parameters"), ("options", "donor")
        elif kind in (OutputSliceDefinition, OutputModuleDefinition):
            yield (*path, "parameters"), ("options",)


def _parameters(document: Document, path: Path, groups: tuple[str, ...], delegate: MergeMethod | None) -> None:
    settings = _at(document.value, path)
    tables = {"options": OPTIONS, "donor": OF_MODEL, "global": names(RECIPE, EACH)}
    own = {spec.name: spec for spec in delegate.spec.parameters} if delegate else {}
    known = [*own, *(name for group in groups for name in tables[group])]
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        here = (*path, str(name))
        if name in known:
            _conditions(document, here, value)
            for leaf, place in _leaves(value, here):
                _value(document, place, name, leaf, own.get(name), delegate)
        elif name in names(RECIPE):
            document.fault(here, f"parameter '{name}' does not belong here", "move it under the recipe's 'parameters'")
        elif name in OF_MODEL:
            document.fault(here, f"parameter '{name}' does not belong here", "move it under one donor's 'parameters'")
        elif delegate is not None and name not in LEGACY:
            what = f"there is no parameter '{name}' (delegate {delegate.spec.name})"
            document.fault(here, what, nearest(str(name), known))


def _conditions(document: Document, path: Path, value: Any) -> None:
    """The keys of {filter, value} entries."""
    for place, item in [(path, value), *(((*path, i), item) for i, item in _items(value) if isinstance(value, list))]:
        _keys(document, place, item, tuple(ConditionalParameter.model_fields))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """The scalars of a setting: itself, the entries of a per-layer list, the values behind filters."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    elif isinstance(value, Mapping):
        if "value" in value:
            yield from _leaves(value["value"], (*path, "value"))
    else:
        yield value, path


def _value(document: Document, path: Path, name: str, value: Any, spec: Any, delegate: MergeMethod | None) -> None:
    try:
        if name in OPTIONS:
            MatchOptions.from_values({name: normal(name, value)})
            if spec is not None and delegate is not None:
                check_shared(spec, value, None, delegate.spec.name)
        elif name in BY_NAME and name != "delegate":
            BY_NAME[name].check(value)
        elif spec is not None:
            spec.validate(value)
    except RecipeError as error:
        document.fault(path, error.what, error.remedy or "")
    except ValidationError:
        document.fault(path, f"parameter '{name}' is {value!r}", f"it must be {wanted(spec)}")


def _contract(document: Document, delegate: MergeMethod) -> None:
    """How many models the delegate takes and which of its parameters must be given, for `models:` recipes."""
    entries = document.value.get("models")
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) and "model" in e for e in entries):
        return
    spec, base = delegate.spec, document.value.get("base_model")
    models = [str(entry["model"]) for entry in entries]
    references = [ModelReference.parse(model) for model in models]
    with_base = ModelReference.parse(str(base)) if base is not None else None
    if is_plain(spec.contract, [references], with_base):
        base = with_base = None
    elif with_base is not None and with_base not in references:
        models.append(str(base))
        references.append(with_base)
    try:
        delegate.validate_inputs(references, None if spec.contract.base == BasePolicy.FORBIDDEN else with_base)
    except (ValueError, RuntimeError) as error:
        document.fault(
            ("models",), f"delegate {spec.name}: {error}", "add or remove models, or choose another delegate"
        )
    _required(document, delegate, models, None if base is None else str(base))


def _required(document: Document, delegate: MergeMethod, models: list[str], base: str | None) -> None:
    entries = {str(entry["model"]): i for i, entry in enumerate(document.value["models"])}
    shared = document.value.get("parameters") or {}
    for spec in delegate.spec.parameters:
        if not spec.required or spec.name in shared:
            continue
        what = f"delegate {delegate.spec.name} needs the parameter '{spec.name}'"
        if spec.scope == ParameterScope.SHARED:
            document.fault(("parameters",), what, f"add '{spec.name}: ...' under parameters")
            continue
        for model in models:
            place = entries.get(model)
            given = {} if place is None else document.value["models"][place].get("parameters") or {}
            if spec.name not in given and not (model == base and spec.scope == ParameterScope.NON_BASE):
                path: Path = ("base_model",) if place is None else ("models", place)
                remedy = (
                    f"add 'parameters: {{{spec.name}: ...}}'"
                    if place is not None
                    else (f"list {model} under 'models' with its own '{spec.name}'")
                )
                document.fault(path, f"{what} for {model}", remedy)
