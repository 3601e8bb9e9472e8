"""Rules of recipes: every fault of a document that can be seen without a model."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
    OutputModuleDefinition,
    OutputSliceDefinition,
)
from mergekit.merge_methods.base import BasePolicy, MergeMethod, ParameterScope, ParameterSpec
from mergekit.tokenizer.config import TokenEmbeddingConfig, TokenizerConfig
from pydantic import BaseModel, ValidationError

from rotation_merge.architecture.model import Architecture
from rotation_merge.config import DTYPES
from rotation_merge.errors import RecipeError, nearest, nearest_path, removed, short
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.document import METHOD, Document, Path
from rotation_merge.mergekit_plugin.keys import (
    BLOCK,
    BY_NAME,
    DONOR_ONLY,
    EACH,
    LEGACY,
    MATCHING,
    MERGING,
    OPTIONS,
    RECIPE,
    checked,
    names,
)

MULTI_KEYS = ("name",)
"""Keys that mergekit-multi adds to a document."""

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


# --- the parts of a recipe -------------------------------------------------------------------------------------------


def at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        value = dict(items(value)).get(step)
    return value


def items(value: Any) -> list[tuple[Any, Any]]:
    """Keys or indices, and their values."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Any, Path]]:
    """The scalars of a setting: itself, the entries of a per-layer list, the values behind filters."""
    if isinstance(value, ConditionalParameter):
        value = value.model_dump()
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif isinstance(value, Mapping):
        yield from leaves(value.get("value"), (*path, "value"))
    elif value is not None:
        yield value, path


def reference(value: Any) -> ModelReference | None:
    """A model as mergekit reads it, None where it cannot."""
    try:
        return None if value is None else ModelReference.model_validate(value)
    except (ValidationError, RuntimeError, ValueError, TypeError):
        return None


@dataclass(frozen=True)
class Part:
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


def parts(value: Any, kind: type[BaseModel] = MergeConfiguration, path: Path = ()) -> Iterator[Part]:
    """Every part of a recipe, in the order of mergekit's classes."""
    yield Part(path, value, kind)
    for name, below in BELOW.get(kind, {}).items():
        child = at(value, (name,))
        if below is TokenizerConfig:
            yield from parts(child, below, (name,)) if child is not None else ()
            continue
        for step, item in items(child):
            yield from parts(item, below, (*path, name, step))


def scopes(value: Any) -> Iterator[tuple[Path, Part]]:
    """Every place for parameters in a recipe, and the part that it belongs to."""
    return (((*part.path, "parameters"), part) for part in parts(value) if part.kind in ALLOWED)


@dataclass(frozen=True)
class MergeInputs:
    """Models that are merged together: those of a slice, a module or the whole recipe.

    Attributes:
        path: their place in the recipe.
        entries: the part of each model.
        models: in the order of the recipe, without the base that mergekit adds.
        shared: parameters that hold for all of them.
        adds_base: whether mergekit adds a base that is not listed.
    """

    path: Path
    entries: list[Part]
    models: list[ModelReference]
    shared: set[str]
    adds_base: bool

    def inputs(self, base: ModelReference | None) -> list[ModelReference]:
        """The delegate's inputs if `base` is its base."""
        return [*self.models, base] if self.adds_base and base and base not in self.models else self.models


def groups(value: Any) -> Iterator[MergeInputs]:
    """Every set of models for the delegate, as far as they can be read."""
    every = list(parts(value))
    for part in every:
        sliced = part.kind is OutputSliceDefinition
        listed = (*part.path, "sources" if sliced else "models")
        if isinstance(part.value, Mapping) if sliced else isinstance(at(part.value, listed[-1:]), list):
            entries = [entry for entry in every if entry.path[:-1] == listed]
            models = [reference(at(entry.value, ("model",))) for entry in entries]
            above = [outer for outer in every if outer.path == part.path[: len(outer.path)]]
            known = [model for model in models if model is not None]
            if len(known) == len(models):
                shared = {name for outer in above for name in outer.parameters}
                yield MergeInputs(part.path if sliced else listed, entries, known, shared, not sliced)


def tokenizer_source(value: Mapping[str, Any]) -> tuple[Path, str | None]:
    """The path of the recipe's tokenizer source, and the model named there; None for `base` or `union`."""
    for path in (("tokenizer", "source"), ("tokenizer_source",)):
        source = at(value, path)
        if source is not None and source not in ("base", "union"):
            named = reference(source)
            return path, named.model.path if named is not None else None
    return (), None


# --- a document ------------------------------------------------------------------------------------------------------


def check(document: Document) -> MergeMethod | None:
    """Collect every fault of one document that can be seen without a model.

    Returns:
        The delegate of a recipe of ours, or the nearest to what is none; None for other recipes, or where none is near.
    """
    for part in parts(document.value):
        more = () if part.path else MULTI_KEYS
        _keys(document, part.path, part.value, (*part.kind.model_fields, *more))
    _types(document)
    method = document.value.get("merge_method")
    if method != METHOD and not (isinstance(method, str) and method in delegates.OWN):
        known = [METHOD, *delegates.OWN, *(m.spec.name for m in merge_methods.registered_methods())]
        if isinstance(method, str) and method not in known:
            document.fault(("merge_method",), f"there is no merge method '{method}'", nearest(method, known))
        return None
    has_base = _base(document, method)
    for key in ("dtype", "out_dtype"):
        _dtype(document, key)
    _chat_template(document)
    _tokenizer(document)
    delegate = _delegate(document) if method == METHOD else delegates.OWN[method]
    for path, part in scopes(document.value):
        for name, value in part.parameters.items():
            _parameter(document, (*path, str(name)), name, value, part, delegate)
    _slices(document)
    if delegate is not None:
        if has_base:
            _contract(document, delegate)
        _unused_options(document)
    return delegate


def _keys(document: Document, path: Path, value: Any, known: Collection[str]) -> None:
    for key in value if isinstance(value, Mapping) else ():
        if key not in known:
            remedy = "it belongs under 'parameters'" if not path and key in BY_NAME else nearest(str(key), known)
            document.fault((*path, str(key)), f"there is no key '{key}' here", remedy)


def _types(document: Document) -> None:
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
        model = isinstance(error.get("input"), str) and len(place) > 1 and place[-2] == "models"
        write = f"write '- model: {error['input']}'" if model else f"it is {str(error.get('input'))[:60]!r}"
        return f"{word} is expected here", write
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}", "see mergekit's documentation"


def _base(document: Document, method: str) -> bool:
    """Whether there is a base, or the method itself needs none."""
    if document.value.get("base_model") is not None:
        return True
    if method != METHOD and delegates.OWN[method].spec.contract.base is not BasePolicy.REQUIRED:
        return True
    if not document.misspelt(("base_model",)):
        what = "donors are aligned to" if method == METHOD else "the others were fine-tuned from"
        document.fault((), "base_model is missing", f"name the model that {what}")
    return method == METHOD


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
    shipped = [file.name.removesuffix(".jinja") for file in resources.files(chat_templates).iterdir()]
    known = sorted({"auto", *(name for name in shipped if not name.startswith("__"))})
    if isinstance(value, str) and value not in known and (len(value) < 20 or "{" not in value):
        document.fault(("chat_template",), f"there is no chat template '{short(value)}'", nearest(value, known))


def _tokenizer(document: Document) -> None:
    """Refuse a missing tokenizer folder before it is searched on the hub."""
    path, name = tokenizer_source(document.value)
    if name is not None and not os.path.exists(name) and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        remedy = nearest_path(name, "name a model with its tokenizer, or write base or union")
        document.fault(path, f"{name}: no such directory", remedy)


def _delegate(document: Document) -> MergeMethod | None:
    name = at(document.value, ("parameters", "delegate"))
    name = BY_NAME["delegate"].default if name is None else name
    known = delegates.names()
    if not isinstance(name, str) or name not in known:
        remedy = nearest(str(name), known)
        document.fault(("parameters", "delegate"), f"no merge method '{name}' to delegate to", remedy)
        name = next(iter(difflib.get_close_matches(str(name), known, n=1)), None)
    return None if name is None else delegates.get(name)


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameter(document: Document, path: Path, name: Any, value: Any, part: Part, delegate: MergeMethod | None) -> None:
    """One parameter: whether it exists, may stand there, and has an effect; then its values."""
    specs = {spec.name: spec for spec in delegate.spec.parameters} if delegate else {}
    allowed, method = ALLOWED[part.kind], document.value["merge_method"]
    if method != METHOD:
        allowed = tuple(key for key in allowed if key in MERGING)
    if name in allowed or name in specs:
        _setting(document, path, name, value, part, delegate)
    elif name in BY_NAME and method != METHOD and name not in MERGING:
        problem = f"parameter '{name}' is about aligning, but 'merge_method: {method}' merges models as they are"
        document.fault(path, problem, f"write 'merge_method: {METHOD}', and 'delegate: {method}' under parameters")
    elif name in BY_NAME:
        places = {RECIPE: "under the recipe's 'parameters'", DONOR_ONLY: "under one donor's 'parameters'"}
        place = places.get(BY_NAME[name].option.scope, "under one model, or under the recipe")
        document.fault(path, f"parameter '{name}' does not belong here", f"move it {place}")
    elif delegate is not None and name not in LEGACY:
        problem = f"there is no parameter '{name}' (delegate {delegate.spec.name})"
        others = any(spec.name == name for known in delegates.names() for spec in delegates.get(known).spec.parameters)
        remedy = (removed(str(name)) or "leave it out") if others else nearest(str(name), [*specs, *allowed])
        document.fault(path, problem, remedy)


def _setting(document: Document, path: Path, name: str, value: Any, part: Part, delegate: MergeMethod | None) -> None:
    """A parameter that may stand there: the form of its setting, the delegates that read it, its values."""
    ours, method = name in BY_NAME, delegate.spec.name if delegate else ""
    spec = next((spec for spec in delegate.spec.parameters if spec.name == name), None) if delegate else None
    if ours and BY_NAME[name].option.scope != BLOCK and isinstance(value, list | tuple | Mapping):
        if name != "delegate":  # of which it has been said that it is no method
            problem = f"parameter '{name}' applies to the whole model and takes no lists or filters"
            remedy = "write ranges such as '0-5,11' in one string" if name == "layers" else "give one value"
            document.fault(path, problem, remedy)
        return
    readers = BY_NAME[name].option.delegates if ours else ()
    if readers and method and method not in readers and not _on_samples(document, name, part):
        problem = f"parameter '{name}' has no effect with delegate {method}"
        document.fault(path, problem, f"leave it out; it is read by delegate {', '.join(readers)}")
    under_model = part.kind in (InputModelDefinition, InputSliceDefinition)
    if spec is not None and spec.scope == ParameterScope.SHARED and under_model:
        problem = f"parameter '{name}' of delegate {method} has no effect under one model"
        document.fault(path, problem, "move it under the recipe's 'parameters'")
    for place, item in [(path, value), *(((*path, i), item) for i, item in items(value) if isinstance(value, list))]:
        _keys(document, place, item, tuple(ConditionalParameter.model_fields))
    for leaf, place in leaves(value, path):
        try:
            if ours and name != "delegate":
                checked(name, leaf)
            if spec is not None:
                delegates.check_value(spec, leaf)
        except RecipeError as error:
            document.raised(place, error)


def _on_samples(document: Document, name: str, part: Part) -> bool:
    """Whether a parameter needs samples to carry or to match donors."""
    every = [other.parameters for _, other in scopes(document.value)]
    carried = every if part.path == () else [part.parameters]
    return name in ("data", "samples") and (
        any("match_on" in settings for settings in every) or any("finetuned_from" in settings for settings in carried)
    )


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
                document.raised(place, error)
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
    for path, part in scopes(document.value):
        for option, setting in part.parameters.items():
            conditions = (setting if isinstance(setting, list) else [setting]) if option in OPTIONS else []
            for text in [at(condition, ("filter",)) for condition in conditions]:
                if text not in (None, "*") and not any(text in name for name in known):
                    problem = f"the filter '{text}' of '{option}' matches no block"
                    remedy = f"alignment options apply to whole blocks, with names such as '{example}'"
                    document.fault((*path, option), problem, remedy)


# --- slices, and the delegate's contract -------------------------------------------------------------------------


def _slices(document: Document) -> None:
    """Sources of a slice have equally long ranges of layers, from a first to a later one, and the recipe's anchor."""
    anchor = reference(document.value.get("base_model"))
    for part in parts(document.value):
        if part.kind is OutputSliceDefinition:
            anchor_named = reference(at(part.value, ("base_model",)))
            if anchor_named is not None and anchor_named != anchor:
                problem = f"base_model is {anchor_named}, that of the recipe is {anchor}"
                document.fault(part.path, problem, "all slices share one anchor; remove the slice's own base_model")
            _lengths(document, part.path, items(at(part.value, ("sources",))))


def _lengths(document: Document, path: Path, sources: list[tuple[Any, Any]]) -> None:
    lengths = []
    for step, source in sources:
        span = at(source, ("layer_range",))
        if not isinstance(span, list | tuple) or [type(end) for end in span] != [int, int]:
            return
        if not 0 <= span[0] < span[1]:
            place = (*path, "sources", step, "layer_range")
            document.fault(place, f"layer_range is {list(span)}", "write [first layer, one after the last]")
            return
        lengths.append(span[1] - span[0])
    if len(set(lengths)) != 1:
        problem = f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources"
        document.fault(path, problem, "give every source of a slice the same number of layers")


def is_plain(value: Mapping[str, Any], delegate: MergeMethod) -> bool:
    """Whether the delegate receives the anchor as an ordinary model, not as its base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models.
    """
    contract, base = delegate.spec.contract, reference(value.get("base_model"))
    if contract.max_inputs == 1 or base is None or contract.base == BasePolicy.FORBIDDEN:
        return True

    def admits(models: list[ModelReference], base: ModelReference | None) -> bool:
        try:
            contract.validate_ids(models, base)
        except ValueError:
            return False
        return True

    listed = [group.models for group in groups(value)]
    with_base = [models if base in models else [*models, base] for models in listed]
    return (
        contract.base == BasePolicy.OPTIONAL
        and not all(admits(models, base) for models in with_base)
        and all(admits(models, None) for models in listed)
    )


def _contract(document: Document, delegate: MergeMethod) -> None:
    """Violations of the delegate's contract, and missing parameters."""
    base = None if is_plain(document.value, delegate) else reference(document.value.get("base_model"))
    for group in groups(document.value):
        inputs = group.inputs(base)
        try:
            delegate.validate_inputs(inputs, base)
        except (ValueError, RuntimeError) as error:
            text = str(error).removeprefix("Merge method ")
            count = f"{len(inputs)} models, the base among them" if base in inputs else f"{len(inputs)} models"
            document.fault(
                group.path,
                f"delegate {delegate.spec.name}: {text[:1].lower()}{text[1:]}",
                f"it is given {count}; add or remove models, or choose another delegate",
            )
        for spec in delegate.spec.parameters:
            if spec.required and spec.name not in group.shared:
                _required(document, spec, group, base, delegate.spec.name)


def _required(
    document: Document, spec: ParameterSpec, group: MergeInputs, base: ModelReference | None, delegate: str
) -> None:
    name, problem = spec.name, f"delegate {delegate} needs the parameter '{spec.name}'"
    if spec.scope == ParameterScope.SHARED:
        if not document.misspelt(("parameters", name)):
            document.fault(("parameters",), problem, f"add '{name}' to the parameters")
        return
    inputs = group.inputs(base)
    for model, entry in zip(group.models, group.entries, strict=True):
        if model == base and spec.scope == ParameterScope.NON_BASE:
            continue
        if name not in entry.parameters and not document.misspelt((*entry.path, name)):
            document.fault(entry.path, f"{problem} for {model}", f"add 'parameters: {{{name}: ...}}'")
    if len(inputs) > len(group.models) and spec.scope != ParameterScope.NON_BASE:
        remedy = f"list {base} under 'models' with its own '{name}' (0 leaves it out)"
        document.fault(("base_model",), f"{problem} for {base}, the base", remedy)


def _unused_options(document: Document) -> None:
    """Report matching options without effect: the donors are moved by files under `alignment`.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.
    """
    base = reference(document.value.get("base_model"))
    moved: dict[Path, bool] = {}
    for group in groups(document.value):
        spans = [at(entry.value, ("layer_range",)) for entry in group.entries]
        for model, entry in zip(group.models, group.entries, strict=True):
            if model != base:
                file = entry.parameters.get("alignment")
                moved[entry.path] = file not in (None, False, "none") and all(span == spans[0] for span in spans)
    for path, part in scopes(document.value):
        donors = [entry for entry in moved if entry[: len(part.path)] == part.path]
        if not donors or not all(moved[entry] for entry in donors):
            continue
        alone = part.path in moved
        why = "the file under 'alignment' moves this donor" if alone else "files under 'alignment' move every donor"
        for name in part.parameters:
            if name in MATCHING:
                document.fault((*path, str(name)), f"'{name}' has no effect: {why}", "leave out one of the two")
