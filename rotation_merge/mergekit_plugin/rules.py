"""Rules of recipes: every fault of a document that can be seen without a model.

A rule yields what is wrong, each with its path, the problem and the remedy.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from mergekit import merge_methods
from mergekit._data import chat_templates
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import (
    ConditionalParameter,
    InputModelDefinition,
    InputSliceDefinition,
    MergeConfiguration,
    OutputSliceDefinition,
)
from mergekit.merge_methods.base import BasePolicy, MergeMethod, ParameterScope, ParameterSpec
from pydantic import ValidationError

from rotation_merge.architecture.model import Architecture
from rotation_merge.averaging.parameters import checked as check_value
from rotation_merge.config import DTYPES
from rotation_merge.errors import RecipeError, nearest, nearest_path, removed, short
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.document import METHOD, Document, Path, is_ours
from rotation_merge.mergekit_plugin.keys import (
    BLOCK,
    BY_NAME,
    DONOR_ONLY,
    LEGACY,
    MATCHING,
    MERGING,
    OPTIONS,
    RECIPE,
    checked,
)
from rotation_merge.mergekit_plugin.parts import (
    ALLOWED,
    MergeInputs,
    RecipePart,
    at,
    groups,
    items,
    leaves,
    parts,
    reference,
    scopes,
    tokenizer_source,
)

Finding = tuple[Path, str, str]
"""Where something is wrong, what, and the remedy."""

MULTI_KEYS = ("name",)
"""Keys that mergekit-multi adds to a document."""


# --- a document ------------------------------------------------------------------------------------------------------


def check(document: Document) -> MergeMethod | None:
    """Collect every fault of one document that can be seen without a model.

    Returns:
        The delegate of a recipe of ours, or the nearest to what is none; None for other recipes, or where none is near.
    """
    value = document.value
    _collect(document, _keys(value), _types(document))
    if not is_ours(value, misspelt=False):
        _collect(document, _method(value.get("merge_method")))
        return None
    delegate = _delegate(value)
    _collect(document, _top(document), _parameters(value, delegate), _slices(value))
    if delegate is not None:
        _collect(document, _contract(document, delegate), _unused_options(value))
    return delegate


def _collect(document: Document, *rules: Iterator[Finding]) -> None:
    for rule in rules:
        for finding in rule:
            document.fault(*finding)


def _keys(value: Any) -> Iterator[Finding]:
    for part in parts(value):
        more = () if part.path else MULTI_KEYS
        yield from _unknown(part.path, part.value, (*part.kind.model_fields, *more))


def _unknown(path: Path, value: Any, known: Collection[str]) -> Iterator[Finding]:
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            remedy = "it belongs under 'parameters'" if not path and key in BY_NAME else nearest(str(key), known)
            yield (*path, str(key)), f"there is no key '{key}' here", remedy


def _types(document: Document) -> Iterator[Finding]:
    """mergekit's own validation, every error at its place."""
    content = {key: value for key, value in document.value.items() if key not in MULTI_KEYS}
    try:
        document.config = MergeConfiguration.__pydantic_validator__.validate_python(content)
    except ValidationError as error:
        reported: list[Path] = []
        for problem in error.errors():
            path = tuple(problem["loc"])
            if problem["type"] == "missing" and document.misspelt(path):
                continue
            while path and path[-1] not in dict(items(at(document.value, path[:-1]))):
                path = path[:-1]
            if not any(place[: len(path)] == path for place in reported):
                reported.append(path)
                yield path, *explain(problem)
    except (RuntimeError, TypeError, ValueError) as error:
        yield (), str(error), "see mergekit's documentation"


def explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's errors in words: problem and remedy."""
    place, given = error["loc"], error.get("input")
    if error["type"] == "missing":
        return f"'{place[-1]}' is missing", f"add '{place[-1]}: ...'"
    if "parameters" in place[:-1]:
        return "this is not a value", "write a number or a word, a list of them, or a list of {filter: ..., value: ...}"
    words = {"list_type": "a list", "dict_type": "a mapping of keys to values", "string_type": "a word"}
    if not error["type"].startswith("model") and error["type"] not in words:
        return f"{error['msg'][:1].lower()}{error['msg'][1:]}", "see mergekit's documentation"
    expected = words.get(error["type"], words["dict_type"])
    if place[-1] in ("model", "base_model"):
        expected = "a directory or org/name"
    listed = isinstance(given, str) and place[-2:-1] == ("models",)
    return f"{expected} is expected here", f"write '- model: {given}'" if listed else f"it is {str(given)[:60]!r}"


def _method(name: object) -> Iterator[Finding]:
    known = [METHOD, *delegates.OWN, *(method.spec.name for method in merge_methods.registered_methods())]
    if isinstance(name, str) and name not in known:
        yield ("merge_method",), f"there is no merge method '{name}'", nearest(name, known)


def _delegate(value: Mapping[str, Any]) -> MergeMethod | None:
    """The delegate, or the one with the nearest name."""
    method = value["merge_method"]
    name, known = str(delegate_name(value) if method == METHOD else method), delegates.names()
    close = [name] if name in known else difflib.get_close_matches(name, known, n=1)
    return delegates.get(close[0]) if close else None


def delegate_name(value: Mapping[str, Any]) -> Any:
    """What a recipe of ours names as its delegate."""
    name = at(value, ("parameters", "delegate"))
    return BY_NAME["delegate"].default if name is None else name


def _top(document: Document) -> Iterator[Finding]:
    """Entries of the whole recipe."""
    value, name, known = document.value, delegate_name(document.value), delegates.names()
    alone = value["merge_method"] != METHOD
    if value.get("base_model") is None and not alone and not document.misspelt(("base_model",)):
        yield (), "base_model is missing", "name the model that donors are aligned to"
    for key in ("dtype", "out_dtype"):
        yield from _dtype(key, value.get(key))
    yield from _chat_template(value.get("chat_template"))
    path, source = tokenizer_source(value)  # refused before it is searched on the hub
    if source and not os.path.exists(source) and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        remedy = nearest_path(source, "name a model with its tokenizer, or write base or union")
        yield path, f"{source}: no such directory", remedy
    if not alone and not (isinstance(name, str) and name in known):
        yield ("parameters", "delegate"), f"no merge method '{name}' to delegate to", nearest(str(name), known)


def _dtype(key: str, value: Any) -> Iterator[Finding]:
    try:
        dtype = dtype_from_name(value)
    except (RuntimeError, AttributeError):
        yield (key,), f"{key} is {value!r}, which does not exist", nearest(str(value), DTYPES)
        return
    if dtype is not None and not dtype.is_floating_point:
        problem = f"{key} is {value!r}, weights are floating-point numbers"
        yield (key,), problem, f"choose one of: {', '.join(DTYPES)}"


def _chat_template(value: Any) -> Iterator[Finding]:
    """mergekit reads it when all weights have been merged: auto, the name of a template it ships, or a template."""
    shipped = [file.name.removesuffix(".jinja") for file in resources.files(chat_templates).iterdir()]
    known = sorted({"auto", *(name for name in shipped if not name.startswith("__"))})
    if isinstance(value, str) and value not in known and (len(value) < 20 or "{" not in value):
        yield ("chat_template",), f"there is no chat template '{short(value)}'", nearest(value, known)


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameters(value: Mapping[str, Any], delegate: MergeMethod | None) -> Iterator[Finding]:
    """Every parameter: whether it exists, may stand there, and has an effect; then its values."""
    specs = delegates.parameters(delegate.spec.name) if delegate else {}
    alone = value["merge_method"] != METHOD
    for scope, part in scopes(value):
        allowed = [name for name in ALLOWED[part.kind] if name in MERGING or not alone]
        for name, setting in part.parameters.items():
            path = (*scope, str(name))
            if name in allowed or name in specs:
                yield from ((path, *finding) for finding in _without_effect(value, part, name, delegate))
                yield from _values(path, name, setting, specs.get(name))
            elif name in BY_NAME:
                yield path, *_misplaced(name, value["merge_method"])
            elif delegate is not None and name not in LEGACY:
                remedy = nearest(str(name), [*specs, *allowed])
                if any(
                    spec.name == name for known in delegates.names() for spec in delegates.get(known).spec.parameters
                ):
                    remedy = removed(str(name)) or "leave it out"
                yield path, f"there is no parameter '{name}' (delegate {delegate.spec.name})", remedy


def _misplaced(name: str, method: str) -> tuple[str, str]:
    """A parameter of ours that may not stand there: problem and remedy."""
    if method != METHOD and name not in MERGING:
        problem = f"parameter '{name}' is not for 'merge_method: {method}', which merges models as they are"
        return problem, f"write 'merge_method: {METHOD}', and 'delegate: {method}' under parameters"
    places = {RECIPE: "under the recipe's 'parameters'", DONOR_ONLY: "under one donor's 'parameters'"}
    place = places.get(BY_NAME[name].option.scope, "under one model, or under the recipe")
    return f"parameter '{name}' does not belong here", f"move it {place}"


def _without_effect(
    value: Mapping[str, Any], part: RecipePart, name: str, delegate: MergeMethod | None
) -> Iterator[tuple[str, str]]:
    """A parameter that the delegate does not read, or not under one model."""
    if delegate is None or _is_no_value(name, part.parameters[name]):
        return
    method, readers = delegate.spec.name, BY_NAME[name].option.delegates if name in BY_NAME else ()
    if readers and method not in readers and not (name in ("data", "samples") and _takes_samples(value, part)):
        problem = f"parameter '{name}' has no effect with delegate {method}"
        yield problem, f"leave it out; it is read by delegate {', '.join(readers)}"
    shared = [spec.name for spec in delegate.spec.parameters if spec.scope == ParameterScope.SHARED]
    if name in shared and part.kind in (InputModelDefinition, InputSliceDefinition):
        problem = f"parameter '{name}' of delegate {method} has no effect under one model"
        yield problem, "move it under the recipe's 'parameters'"


def _takes_samples(value: Mapping[str, Any], part: RecipePart) -> bool:
    """Whether samples carry or match donors: those of a part, or all of them where it is the recipe."""
    every = [other.parameters for _, other in scopes(value)]
    carried = [part.parameters] if part.path else every
    return any("match_on" in settings for settings in every) or any("finetuned_from" in each for each in carried)


def _is_no_value(name: str, setting: Any) -> bool:
    """Whether a parameter of the whole model has a list, or filters."""
    return name in BY_NAME and BY_NAME[name].option.scope != BLOCK and isinstance(setting, list | tuple | Mapping)


def _values(path: Path, name: str, setting: Any, spec: ParameterSpec | None) -> Iterator[Finding]:
    """The form of a parameter's setting, and its values."""
    if _is_no_value(name, setting):
        if name != "delegate":  # of which it has been said that it is no method
            problem = f"parameter '{name}' applies to the whole model and takes no lists or filters"
            yield path, problem, "write ranges such as '0-5,11' in one string" if name == "layers" else "give one value"
        return
    listed = [((*path, i), item) for i, item in enumerate(setting)] if isinstance(setting, list) else []
    for place, item in [(path, setting), *listed]:
        yield from _unknown(place, item, tuple(ConditionalParameter.model_fields))
    for leaf, place in leaves(setting, path):
        try:
            if name in BY_NAME and name != "delegate":
                checked(name, leaf)
            if spec is not None:
                check_value(spec, leaf)
        except RecipeError as error:
            yield place, error.what, error.remedy or ""


def _unused_options(value: Mapping[str, Any]) -> Iterator[Finding]:
    """Matching options without effect: the donors are moved by files under `alignment`.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.
    """
    base, moved = reference(value.get("base_model")), dict[Path, bool]()
    for group in groups(value):
        spans = [at(entry.value, ("layer_range",)) for entry in group.entries]
        for entry in group.entries:
            if entry.model != base:
                file = entry.parameters.get("alignment")
                moved[entry.path] = file not in (None, False, "none") and all(span == spans[0] for span in spans)
    for path, part in scopes(value):
        donors = [donor for donor in moved if donor[: len(part.path)] == part.path]
        if donors and all(moved[donor] for donor in donors):
            one = part.path in moved
            why = "the file under 'alignment' moves this donor" if one else "files under 'alignment' move every donor"
            for name in part.parameters:
                if name in MATCHING:
                    yield (*path, str(name)), f"'{name}' has no effect: {why}", "leave out one of the two"


# --- slices, and the delegate's contract -----------------------------------------------------------------------------


def _slices(value: Mapping[str, Any]) -> Iterator[Finding]:
    """Sources of a slice have equally long ranges of layers, from a first to a later one, and the recipe's anchor."""
    anchor = reference(value.get("base_model"))
    for part in parts(value):
        if part.kind is OutputSliceDefinition:
            named = reference(at(part.value, ("base_model",)))
            if named is not None and named != anchor:
                problem = f"base_model is {named}, that of the recipe is {anchor}"
                yield part.path, problem, "all slices share one anchor; remove the slice's own base_model"
            yield from _lengths(part)


def _lengths(piece: RecipePart) -> Iterator[Finding]:
    lengths = []
    for step, source in items(at(piece.value, ("sources",))):
        span = at(source, ("layer_range",))
        if not isinstance(span, list | tuple) or [type(end) for end in span] != [int, int]:
            return
        if not 0 <= span[0] < span[1]:
            place = (*piece.path, "sources", step, "layer_range")
            yield place, f"layer_range is {list(span)}", "write [first layer, one after the last]"
            return
        lengths.append(span[1] - span[0])
    if len(set(lengths)) != 1:
        problem = f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources"
        yield piece.path, problem, "give every source of a slice the same number of layers"


def is_plain(value: Mapping[str, Any], delegate: MergeMethod) -> bool:
    """Whether the delegate receives the anchor as an ordinary model, not as its base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models.
    """
    contract, base = delegate.spec.contract, reference(value.get("base_model"))
    if contract.max_inputs == 1 or base is None or contract.base == BasePolicy.FORBIDDEN:
        return True

    def admitted(base: ModelReference | None) -> bool:
        try:
            for group in groups(value):
                models = replace(group, whole=True).inputs(base)
                contract.validate_ids(models, base)
        except ValueError:
            return False
        return True

    return contract.base == BasePolicy.OPTIONAL and not admitted(base) and admitted(None)


def _contract(document: Document, delegate: MergeMethod) -> Iterator[Finding]:
    """Violations of the delegate's contract, and missing parameters."""
    value, spec = document.value, delegate.spec
    base = reference(value.get("base_model"))
    if value["merge_method"] != METHOD and base is None and spec.contract.base == BasePolicy.REQUIRED:
        if not document.refused(("base_model",)) and not document.misspelt(("base_model",)):
            yield (), "base_model is missing", "name the model that the others were fine-tuned from"
        return
    base = None if is_plain(value, delegate) else base
    for group in groups(value):
        inputs = group.inputs(base)
        try:
            delegate.validate_inputs(inputs, base)
        except (ValueError, RuntimeError) as error:
            text = str(error).removeprefix("Merge method ")
            count = f"{len(inputs)} models, the base among them" if base in inputs else f"{len(inputs)} models"
            remedy = f"it is given {count}; add or remove models, or choose another delegate"
            yield group.path, f"delegate {spec.name}: {text[:1].lower()}{text[1:]}", remedy
        for path, name, of, remedy in _missing(document, delegate, group, base):
            yield path, f"delegate {spec.name} needs the parameter '{name}'{of}", remedy


def _missing(
    document: Document, delegate: MergeMethod, group: MergeInputs, base: ModelReference | None
) -> Iterator[tuple[Path, str, str, str]]:
    """Parameters that a delegate needs: the place, the name, whose it is, and the remedy."""
    needed = [spec for spec in delegate.spec.parameters if spec.required]
    for spec in needed:
        name = spec.name
        if any(name in part.parameters for part in group.above):
            continue
        if spec.scope == ParameterScope.SHARED:
            if not document.misspelt(("parameters", name)):
                yield ("parameters",), name, "", f"add '{name}' to the parameters"
            continue
        takes_base = spec.scope != ParameterScope.NON_BASE
        for entry in group.entries:
            given = name in entry.parameters or document.misspelt((*entry.path, name))
            if not given and (takes_base or entry.model != base):
                yield entry.path, name, f" for {entry.model}", f"add 'parameters: {{{name}: ...}}'"
        if takes_base and len(group.inputs(base)) > len(group.entries):
            remedy = f"list {base} under 'models' with its own '{name}' (0 leaves it out)"
            yield ("base_model",), name, f" for {base}, the base", remedy


# --- names in models -------------------------------------------------------------------------------------------------


def check_words(document: Document, architecture: Architecture, tensors: Iterable[str]) -> None:
    """Check that layers and parts of names in a recipe exist in the models.

    Args:
        architecture: of the anchor.
        tensors: names of all models' tensors.
    """
    known = sorted(set(tensors))
    for path, part in scopes(document.value):
        for leaf, place in leaves(part.parameters.get("layers"), (*path, "layers")):
            try:
                AlignConfig(layers=checked("layers", leaf)).check_layers(architecture)
            except RecipeError as error:
                document.fault(place, error.what, error.remedy or "")
    option_path = ("parameters", "exclude")
    for word in str(at(document.value, option_path) or "").split(","):
        if word.strip() and not any(word.strip() in name for name in known):
            document.fault(option_path, f"no tensor name contains '{word.strip()}'", _like(word.strip(), known))


def _like(word: str, names: list[str]) -> str:
    """Parts of names that resemble a word."""
    steps = {step for name in names for step in name.split(".") if not step.isdigit()}
    close = difflib.get_close_matches(word.rpartition(".")[2], sorted(steps), n=3, cutoff=0.4)
    if close:
        return f"names contain {', '.join(close)}"
    return f"names are like '{names[0]}'" if names else "none is known"


def check_filters(document: Document, blocks: Iterable[str]) -> None:
    """Collect filters of alignment options that match no block: they see blocks, not tensors.

    Args:
        blocks: module paths of the anchor's blocks.
    """
    known = list(blocks)
    example = next((name for name in known if name.endswith(".0")), known[0])
    remedy = f"alignment options apply to whole blocks, with names such as '{example}'"
    for path, part in scopes(document.value):
        for option in part.parameters.keys() & set(OPTIONS):
            setting = part.parameters[option]
            for condition in setting if isinstance(setting, list) else [setting]:
                text = at(condition, ("filter",))
                if text not in (None, "*") and not any(text in name for name in known):
                    document.fault((*path, option), f"the filter '{text}' of '{option}' matches no block", remedy)
