"""Every fault of one document that can be seen without a model: keys, types, delegates, parameters, slices."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from mergekit import merge_methods
from mergekit._data import chat_templates
from mergekit.common import dtype_from_name
from mergekit.config import ConditionalParameter, MergeConfiguration
from mergekit.merge_methods.base import MergeMethod, ParameterScope, ParameterSpec
from pydantic import ValidationError

from rotation_merge.architecture.model import Architecture
from rotation_merge.averaging.parameters import DelegateParameter
from rotation_merge.config import DTYPES
from rotation_merge.errors import RecipeError, nearest, nearest_path, removed, short
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin.recipe import delegates
from rotation_merge.mergekit_plugin.recipe.contract import check_contract, wanted
from rotation_merge.mergekit_plugin.recipe.document import Document, Path
from rotation_merge.mergekit_plugin.recipe.names import (
    BLOCK,
    BY_NAME,
    DONOR_ONLY,
    LEGACY,
    METHOD,
    OPTIONS,
    RECIPE,
    SHARES,
    normal,
)
from rotation_merge.mergekit_plugin.recipe.parameter_scopes import (
    MergeInputs,
    at,
    existing,
    filters,
    groups,
    items,
    leaves,
    outputs,
    parts,
    reference,
    scopes,
    varies,
)

MATCHING = (*OPTIONS, "preset", "match_on")
"""Parameters that only say how donors are matched."""

MULTI_KEYS = ("name",)
"""Keys that mergekit-multi adds to a document."""


def check_settings(document: Document) -> None:
    """Collect every fault of one document that can be seen without a model."""
    _keys(document, (), document.value, (*MergeConfiguration.model_fields, *MULTI_KEYS))
    for path, kind in parts(document.value):
        _keys(document, path, at(document.value, path), tuple(kind.model_fields))
    _types(document)
    method = document.value.get("merge_method")
    if method != METHOD:
        known = [METHOD, *(m.spec.name for m in merge_methods.registered_methods())]
        if isinstance(method, str) and method not in known:
            document.fault(("merge_method",), f"there is no merge method '{method}'", nearest(method, known))
        return
    if document.value.get("base_model") is None and not document.misspelt(("base_model",)):
        document.fault((), "base_model is missing", "name the model that donors are aligned to")
    for key in ("dtype", "out_dtype"):
        _dtype(document, key)
    _chat_template(document)
    _tokenizer(document)
    delegate = _delegate(document)
    for path, ours in scopes(document.value):
        _parameters(document, path, ours, delegate)
    _slices(document)
    if delegate is not None:
        check_contract(document, delegate)
        _unused_options(document)


def tokenizer_source(value: Mapping[str, Any]) -> tuple[Path, str | None]:
    """The path of the recipe's tokenizer source, and the model named there; None for `base` or `union`."""
    for path in (("tokenizer", "source"), ("tokenizer_source",)):
        source = at(value, path)
        if source is not None and source not in ("base", "union"):
            named = reference(source)
            return path, named.model.path if named is not None else None
    return (), None


def _tokenizer(document: Document) -> None:
    """Refuse a missing tokenizer folder before it is searched on the hub."""
    path, name = tokenizer_source(document.value)
    if name is not None and not os.path.exists(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        remedy = nearest_path(name, "name a model with its tokenizer, or write base or union")
        document.fault(path, f"{name}: no such directory", remedy)


def _keys(document: Document, path: Path, value: Any, known: tuple[str, ...]) -> None:
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            remedy = nearest(str(key), known)
            if not path and key in BY_NAME:
                remedy = "it belongs under 'parameters'"
            document.fault((*path, str(key)), f"there is no key '{key}' here", remedy)


def _types(document: Document) -> None:
    """mergekit's own validation, every error at its place."""
    content = {key: value for key, value in document.value.items() if key not in MULTI_KEYS}
    try:
        document.config = MergeConfiguration.__pydantic_validator__.validate_python(content)
    except ValidationError as error:
        reported: set[Path] = set()
        for problem in error.errors():
            path = existing(document.value, tuple(problem["loc"]))
            if problem["type"] == "missing" and document.misspelt(tuple(problem["loc"])):
                continue
            if path not in reported and not any(known[: len(path)] == path for known in reported):
                reported.add(path)
                document.fault(path, *explain(problem))
    except (RuntimeError, TypeError, ValueError) as error:
        document.fault((), str(error), "see mergekit's documentation")


def explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's errors in words: problem and remedy."""
    place = error["loc"]
    if error["type"] == "missing":
        return f"'{place[-1]}' is missing", f"add '{place[-1]}: ...'"
    if "parameters" in place[:-1]:
        return "this is not a value", "write a number or a word, a list of them, or a list of {filter: ..., value: ...}"
    expected = {"list_type": "a list", "dict_type": "a mapping of keys to values", "string_type": "a word"}
    if error["type"].startswith("model") or error["type"] in expected:
        word = expected.get(error["type"], "a mapping of keys to values")
        if place[-1] in ("model", "base_model"):
            word = "a directory or org/name"
        model = isinstance(error.get("input"), str) and len(error["loc"]) > 1 and error["loc"][-2] == "models"
        write = f"write '- model: {error['input']}'" if model else f"it is {str(error.get('input'))[:60]!r}"
        return f"{word} is expected here", write
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}", "see mergekit's documentation"


def _dtype(document: Document, key: str) -> None:
    value = document.value.get(key)
    try:
        dtype = dtype_from_name(value)
    except (RuntimeError, AttributeError):
        document.fault((key,), f"{key} is {value!r}, which does not exist", nearest(str(value), DTYPES))
        return
    if dtype is not None and not dtype.is_floating_point:
        problem = f"{key} is {value!r}, weights are floating-point numbers"
        document.fault((key,), problem, f"choose one of: {', '.join(DTYPES)}")


def _chat_template(document: Document) -> None:
    """mergekit reads it when all weights have been merged: auto, the name of a template it ships, or a template."""
    value = document.value.get("chat_template")
    if value is None or not isinstance(value, str):
        return
    shipped = [file.name.removesuffix(".jinja") for file in resources.files(chat_templates).iterdir()]
    known = sorted({"auto", *(name for name in shipped if not name.startswith("__"))})
    if value not in known and (len(value) < 20 or "{" not in value):
        document.fault(("chat_template",), f"there is no chat template '{short(value)}'", nearest(value, known))


def _delegate(document: Document) -> MergeMethod | None:
    value = at(document.value, ("parameters", "delegate"))
    name = BY_NAME["delegate"].default if value is None else value
    known = delegates.names()
    if not isinstance(name, str) or name not in known:
        remedy = nearest(str(name), known)
        document.fault(("parameters", "delegate"), f"no merge method '{name}' to delegate to", remedy)
        close = difflib.get_close_matches(str(name), known, n=1)
        return delegates.get(close[0]) if close else None
    return delegates.get(name)


def _parameters(document: Document, path: Path, ours: tuple[str, ...], delegate: MergeMethod | None) -> None:
    settings = at(document.value, path)
    specs = {spec.name: spec for spec in delegate.spec.parameters} if delegate else {}
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        setting_path = (*path, str(name))
        if name in ours or name in specs:
            _setting(document, setting_path, name, value, specs.get(name), delegate)
        elif name in BY_NAME:
            document.fault(setting_path, f"parameter '{name}' does not belong here", _where(name))
        elif delegate is not None and name not in LEGACY:
            problem = f"there is no parameter '{name}' (delegate {delegate.spec.name})"
            remedy = (removed(str(name)) or "leave it out") if _of_others(name) else nearest(str(name), [*specs, *ours])
            document.fault(setting_path, problem, remedy)


def _of_others(name: object) -> bool:
    """Whether some delegate has a parameter of this name."""
    return any(spec.name == name for known in delegates.names() for spec in delegates.get(known).spec.parameters)


def _where(name: str) -> str:
    """The place of a misplaced parameter of ours."""
    places = {RECIPE: "under the recipe's 'parameters'", DONOR_ONLY: "under one donor's 'parameters'"}
    return f"move it {places.get(BY_NAME[name].option.scope, 'under one model, or under the recipe')}"


def _setting(
    document: Document, path: Path, name: str, value: Any, spec: ParameterSpec | None, delegate: MergeMethod | None
) -> None:
    """One parameter: the form of its setting, the delegates that read it, its values."""
    key = BY_NAME.get(name)
    if key is not None and key.option.scope != BLOCK and varies(value):
        if name != "delegate":  # of which it has been said that it is no method
            problem = f"parameter '{name}' applies to the whole model and takes no lists or filters"
            remedy = "write ranges such as '0-5,11' in one string" if name == "layers" else "give one value"
            document.fault(path, problem, remedy)
        return
    readers = () if key is None else key.option.delegates
    if readers and delegate is not None and delegate.spec.name not in readers and not _on_samples(document, path):
        problem = f"parameter '{name}' has no effect with delegate {delegate.spec.name}"
        document.fault(path, problem, f"leave it out; it is read by delegate {', '.join(readers)}")
    under_model = path[-4:-3] in (("models",), ("sources",))
    if delegate is not None and spec is not None and spec.scope == ParameterScope.SHARED and under_model:
        problem = f"parameter '{name}' of delegate {delegate.spec.name} has no effect under one model"
        document.fault(path, problem, "move it under the recipe's 'parameters'")
    for place, item in [(path, value), *(((*path, i), item) for i, item in items(value) if isinstance(value, list))]:
        _keys(document, place, item, tuple(ConditionalParameter.model_fields))
    for leaf, place in leaves(value, path):
        try:
            check_value(name, leaf, spec)
        except RecipeError as error:
            document.fault(place, error.what, error.remedy or "")


def _on_samples(document: Document, path: Path) -> bool:
    """Whether a parameter needs samples to carry or to match donors."""
    if path[-1] not in ("data", "samples"):
        return False
    all_settings = [at(document.value, place) or {} for place, _ in scopes(document.value)]
    carried = all_settings if path[:-1] == ("parameters",) else [at(document.value, path[:-1]) or {}]
    return any("match_on" in settings for settings in all_settings) or any(
        "finetuned_from" in options for options in carried
    )


def check_value(name: str, value: Any, spec: ParameterSpec | None = None) -> None:
    """A single value of a parameter.

    Args:
        spec: the delegate's own parameter of this name.

    Raises:
        RecipeError: it is none that the parameter may have.
    """
    if name in OPTIONS:
        BY_NAME[name].check(normal(name, value))
    elif name in BY_NAME and name != "delegate":
        BY_NAME[name].check(value)
    if spec is None:
        return
    try:
        valid = spec.validate(value)
    except ValidationError:
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy=f"it must be {wanted(spec)}") from None
    if isinstance(spec, DelegateParameter) and spec.option is not None:
        spec.option.check(name, valid, "parameter")
    if isinstance(valid, float) and not math.isfinite(valid):
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy="give a finite number")
    if name in SHARES and isinstance(valid, int | float) and not 0 <= valid <= 1:
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy="it is a share: give a number from 0 to 1")


def _slices(document: Document) -> None:
    """Sources of a slice have equally long ranges of layers, from a first to a later one, and the recipe's anchor."""
    anchor = reference(document.value.get("base_model"))
    for path, part in outputs(document.value):
        for i, piece in items(part.get("slices")):
            slice_path = (*path, "slices", i)
            anchor_named = reference(piece.get("base_model")) if isinstance(piece, Mapping) else None
            if anchor_named is not None and anchor_named != anchor:
                problem = f"base_model is {anchor_named}, that of the recipe is {anchor}"
                document.fault(slice_path, problem, "all slices share one anchor; remove the slice's own base_model")
            _lengths(document, slice_path, [(j, source) for j, source in items(at(piece, ("sources",)))])


def _lengths(document: Document, path: Path, sources: list[tuple[int, Any]]) -> None:
    lengths = []
    for j, source in sources:
        span = at(source, ("layer_range",))
        if not isinstance(span, list | tuple) or [type(end) for end in span] != [int, int]:
            return
        if not 0 <= span[0] < span[1]:
            place = (*path, "sources", j, "layer_range")
            document.fault(place, f"layer_range is {list(span)}", "write [first layer, one after the last]")
            return
        lengths.append(span[1] - span[0])
    if len(set(lengths)) != 1:
        problem = f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources"
        document.fault(path, problem, "give every source of a slice the same number of layers")


def check_words(document: Document, architecture: Architecture, tensors: Iterable[str]) -> None:
    """Check that layers and parts of names in a recipe exist in the models.

    Args:
        architecture: of the anchor.
        tensors: names of all models' tensors.
    """
    known = sorted(set(tensors))
    for path, _ in scopes(document.value):
        for leaf, place in leaves(at(document.value, (*path, "layers")), (*path, "layers")):
            try:
                AlignConfig(layers=normal("layers", leaf)).check_layers(architecture)
            except RecipeError as error:
                document.fault(place, error.what, error.remedy or "")
    option_path = ("parameters", "exclude")
    for word in str(at(document.value, option_path) or "").split(","):
        if word.strip() and not any(word.strip() in name for name in known):
            document.fault(option_path, f"no tensor name contains '{word.strip()}'", _like(word.strip(), known))


def _like(word: str, names: list[str]) -> str:
    """Parts of names that resemble a word."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    close = difflib.get_close_matches(word.rpartition(".")[2], sorted(parts), n=3, cutoff=0.4)
    return (
        f"names contain {', '.join(close)}" if close else f"names are like '{names[0]}'" if names else "none is known"
    )


def check_filters(document: Document, blocks: Iterable[str]) -> None:
    """Collect filters of alignment options that match no block: they see blocks, not tensors.

    Args:
        blocks: module paths of the anchor's blocks.
    """
    known = list(blocks)
    example = next((name for name in known if name.endswith(".0")), known[0])
    for path, _ in scopes(document.value):
        for option, setting in items(at(document.value, path)):
            for text in filters(setting) if option in OPTIONS else ():
                if not any(text in name for name in known):
                    problem = f"the filter '{text}' of '{option}' matches no block"
                    remedy = f"alignment options apply to whole blocks, with names such as '{example}'"
                    document.fault((*path, option), problem, remedy)


def _unused_options(document: Document) -> None:
    """Report matching options without effect: the donors are moved by files under `alignment`.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.
    """
    base = reference(document.value.get("base_model"))
    all_groups = list(groups(document.value))
    moved = {entry: _moved(group, i) for group in all_groups for i, entry in enumerate(group.entries)}
    donors = {e for group in all_groups for e, model in zip(group.entries, group.models, strict=True) if model != base}
    for entry in sorted(donors, key=str):
        if moved[entry]:
            _unused_at(document, (*entry, "parameters"), "the file under 'alignment' moves this donor")
    for scope in sorted({path for entry in donors for path in _above(entry)}, key=str):
        if all(moved[entry] for entry in donors if entry[: len(scope)] == scope):
            _unused_at(document, (*scope, "parameters"), "files under 'alignment' move every donor")


def _above(entry: Path) -> list[Path]:
    """The parts of a recipe with parameters for an entry: its slice, its module, the whole."""
    return [entry[:length] for length in range(len(entry) - 1)]


def _moved(group: MergeInputs, number: int) -> bool:
    """Whether a file moves a model, and nothing of it is matched."""
    if group.settings[number].get("alignment") in (None, False, "none"):
        return False
    spans = [at(group.sources[i], ("layer_range",)) for i in range(len(group.sources))]
    return all(span == spans[0] for span in spans)


def _unused_at(document: Document, path: Path, why: str) -> None:
    for name in at(document.value, path) or {}:
        if name in MATCHING:
            document.fault((*path, str(name)), f"'{name}' has no effect: {why}", "leave out one of the two")
