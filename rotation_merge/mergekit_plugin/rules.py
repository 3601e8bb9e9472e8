"""Rules of recipes: every fault of a document that can be seen without a model.

mergekit's own classes judge keys and types, `ParameterSpec` the delegate's parameters, its contract the models; a rule
here yields what else is wrong, with its path, the problem and the remedy.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from mergekit import merge
from mergekit.common import ModelReference
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
from pydantic import ValidationError

from rotation_merge.architecture.model import Architecture
from rotation_merge.averaging.parameters import checked as check_value
from rotation_merge.config import DTYPES
from rotation_merge.errors import RecipeError, nearest, nearest_path, short
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import METHOD, delegates, keys
from rotation_merge.mergekit_plugin.document import (
    MISSPELT,
    MULTI_KEYS,
    Document,
    Finding,
    Path,
    at,
    is_ours,
    items,
    walk,
)

MODELS = (InputModelDefinition, InputSliceDefinition)

ALLOWED: dict[type, tuple[str, ...]] = {
    MergeConfiguration: (*keys.OPTIONS, *keys.names(keys.EACH, keys.RECIPE)),
    InputModelDefinition: (*keys.OPTIONS, *keys.OF_MODEL),
    InputSliceDefinition: (*keys.OPTIONS, *keys.OF_MODEL),
    OutputSliceDefinition: keys.OPTIONS,
    OutputModuleDefinition: keys.OPTIONS,
}
"""Parts of a recipe with parameters, and those of ours that are allowed there."""

KEYS = {
    key for kind in (*ALLOWED, TokenizerConfig, TokenEmbeddingConfig, ConditionalParameter) for key in kind.model_fields
}
"""Every key of mergekit's recipes."""

ONE_OF_TWO = "leave out one of the two"


# --- parts of a recipe -----------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A parameter in a recipe: its path, its name, what it is set to, and the part that it stands under."""

    path: Path
    name: str
    value: Any
    part: Any

    def leaves(self) -> Iterator[tuple[Path, Any]]:
        """The scalars: itself, the entries of a per-layer list, the values behind filters."""
        for path, value in walk(self.value, self.path):
            if isinstance(value, bool | int | float | str) and path[-1:] != ("filter",):
                yield path, value


def settings(config: MergeConfiguration) -> Iterator[Setting]:
    """Every parameter in a recipe, ours and the delegate's."""
    for path, part in walk(config):
        for name, value in (part.parameters or {}).items() if type(part) in ALLOWED else ():
            yield Setting((*path, "parameters", name), name, value, part)


@dataclass(frozen=True)
class MergeInputs:
    """Models that are merged together: those of a slice, a module or the whole recipe.

    Attributes:
        path: their place in the recipe.
        entries: each model's part, and its place.
        above: names of the parameters that hold for all of them.
        whole: whether they are whole models, to which mergekit adds a base that is not listed.
    """

    path: Path
    entries: list[tuple[Path, Any]]
    above: set[str]
    whole: bool

    def inputs(self, base: ModelReference | None, whole: bool = False) -> list[ModelReference]:
        """The delegate's inputs if `base` is its base."""
        models = [entry.model for _, entry in self.entries]
        return [*models, base] if (self.whole or whole) and base and base not in models else models


def groups(config: MergeConfiguration) -> Iterator[MergeInputs]:
    """Every set of models for the delegate."""
    for path, part in walk(config):
        listed = "sources" if isinstance(part, OutputSliceDefinition) else "models"
        if type(part) in ALLOWED and (entries := getattr(part, listed, None)):
            above = {s.name for s in settings(config) if path[: len(s.path) - 2] == s.path[:-2]}
            places = [((*path, listed, number), entry) for number, entry in enumerate(entries)]
            yield MergeInputs((*path, listed), places, above, listed == "models")


def tokenizer_source(config: MergeConfiguration) -> str | None:
    """The model that a recipe takes its tokenizer from, if it names one."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    return source.model.path if isinstance(source, ModelReference) else None


# --- a document ------------------------------------------------------------------------------------------------------


def check(document: Document) -> MergeMethod | None:
    """Collect every fault of one document that can be seen without a model.

    What may only seem to be missing is looked for once no word is misspelt.

    Returns:
        The delegate of a recipe of ours, or the nearest to what is none; None for other recipes, or where none is near.
    """
    if document.config is None:
        check_structure(document)
    config = document.config
    if config is None:
        return None
    if not is_ours(dict(config), misspelt=False):
        known = [METHOD, *delegates.names()]
        if (name := config.merge_method) not in known:
            document.fault(("merge_method",), f"there is no merge method '{name}'", nearest(name, known))
        return None
    delegate = _delegate(config)
    for rule in (_entries, _unused_options, _slices, _conflicts):
        document.collect(rule(config))
    document.collect(_parameters(config, delegate))
    if delegate is not None and not any(MISSPELT in fault.remedy for fault in document.faults):
        document.collect(_contract(config, delegate))
    return delegate


def check_structure(document: Document) -> None:
    """mergekit's own validation, every error at its place; unknown keys do not keep the rest from being read."""
    validate = MergeConfiguration.__pydantic_validator__.validate_python
    content = {key: value for key, value in document.value.items() if key not in MULTI_KEYS}
    try:
        document.config = validate(content, extra="forbid")
    except ValidationError as error:
        document.collect(_structural(error, content))
        with suppress(ValidationError, RuntimeError, ValueError):
            document.config = validate(content)
    except (RuntimeError, TypeError, ValueError) as error:
        document.fault((), str(error), "see mergekit's documentation")


def _structural(error: ValidationError, content: Any) -> Iterator[Finding]:
    """pydantic's errors in words, one for each place: unknown keys first, for which others may be missing."""
    reported: list[Path] = []
    for problem in sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden"):
        path: Path = ()
        for step in problem["loc"]:  # members of unions are steps, too
            path = (*path, step) if step in dict(items(at(content, path))) else path
        place = path[: path.index("parameters") + 2] if "parameters" in path else path  # a setting is of many forms
        if not any(known[: len(place)] == place for known in reported):
            reported.append(path)
            yield path, *explain(problem)


def explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's errors: problem and remedy."""
    place, value = error["loc"], error.get("input")
    if error["type"] == "extra_forbidden":
        placed = "it belongs under 'parameters'" if len(place) == 1 and place[0] in keys.BY_NAME else ""
        return f"there is no key '{place[-1]}' here", placed or nearest(str(place[-1]), KEYS)
    if error["type"] == "missing":
        return f"'{place[-1]}' is missing", f"add '{place[-1]}: ...'"
    if "parameters" in place[:-1]:
        return "this is not a value", "write a number or a word, a list of them, or a list of {filter: ..., value: ...}"
    problem = error["msg"].partition(" or instance of")[0]
    if place[-1:] in (("model",), ("base_model",)):
        problem = "a directory or org/name is expected here"
    listed = isinstance(value, str) and place[-2:-1] == ("models",)
    remedy = f"write '- model: {value}'" if listed else f"it is {short(repr(value))}"
    return f"{problem[:1].lower()}{problem[1:]}", remedy


def delegate_name(config: MergeConfiguration) -> Any:
    """What a recipe of ours names as its delegate."""
    if config.merge_method != METHOD:
        return config.merge_method
    return (config.parameters or {}).get("delegate", keys.BY_NAME["delegate"].default)


def _delegate(config: MergeConfiguration) -> MergeMethod | None:
    """The delegate, or the one with the nearest name."""
    name, known = str(delegate_name(config)), delegates.names()
    close = [name] if name in known else difflib.get_close_matches(name, known, n=1)
    return delegates.get(close[0]) if close else None


def _entries(config: MergeConfiguration) -> Iterator[Finding]:
    """Entries of the whole recipe; mergekit reads the chat template when all weights have been merged."""
    for key, dtype in (("dtype", config.dtype), ("out_dtype", config.out_dtype)):
        if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
            yield (key,), f"{key} is '{dtype}', which is no type of weights", nearest(dtype, DTYPES)
    if config.chat_template != "auto":
        try:
            merge._set_chat_template(SimpleNamespace(), config)
        except RuntimeError:
            problem = f"there is no chat template '{short(config.chat_template)}'"
            yield ("chat_template",), problem, "write auto, the name of one that mergekit has, or a template"
    source = tokenizer_source(config)  # refused before it is searched on the hub
    if source and not os.path.exists(source) and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        path = ("tokenizer", "source") if config.tokenizer else ("tokenizer_source",)
        remedy = nearest_path(source, "name a model with its tokenizer, or write base or union")
        yield path, f"{source}: no such directory", remedy
    name, known = delegate_name(config), delegates.names()
    if not isinstance(name, str) or name not in known:
        yield ("parameters", "delegate"), f"no merge method '{name}' to delegate to", nearest(str(name), known)


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameters(config: MergeConfiguration, delegate: MergeMethod | None) -> Iterator[Finding]:
    """Every parameter: whether it exists, may stand there, and has an effect; then its values."""
    specs = {spec.name: spec for spec in delegate.spec.parameters} if delegate else {}
    used, every = {setting.name for setting in settings(config)}, config.merge_method == METHOD
    for setting in settings(config):
        name, ours = setting.name, keys.BY_NAME.get(setting.name)
        allowed = [known for known in ALLOWED[type(setting.part)] if every or known in keys.MERGING]
        if ours is None and name not in specs:
            if delegate is not None and name not in keys.LEGACY:
                yield setting.path, *_unknown(name, delegate, [*specs, *allowed])
        elif name not in (*allowed, *specs):
            yield setting.path, *_misplaced(name, config.merge_method)
        elif ours and ours.option.scope != keys.BLOCK and isinstance(setting.value, list | ConditionalParameter):
            if name != "delegate":  # of which it has been said that it is no method
                problem = f"parameter '{name}' applies to the whole model and takes no lists or filters"
                yield setting.path, problem, "give one value; for 'layers' ranges such as '0-5,11' in one string"
        else:
            yield from _without_effect(setting, delegate, used) if delegate is not None else ()
            yield from _values(setting, specs.get(name))


def _unknown(name: str, delegate: MergeMethod, known: Iterable[str]) -> tuple[str, str]:
    """A parameter that neither we nor the delegate have: problem and remedy."""
    elsewhere = (spec.name for method in delegates.names() for spec in delegates.get(method).spec.parameters)
    remedy = "leave it out" if name in elsewhere else nearest(name, known)
    return f"there is no parameter '{name}' (delegate {delegate.spec.name})", remedy


def _misplaced(name: str, method: str) -> tuple[str, str]:
    """A parameter of ours that may not stand there: problem and remedy."""
    if method != METHOD and name not in keys.MERGING:
        problem = f"parameter '{name}' is not for 'merge_method: {method}', which merges models as they are"
        return problem, f"write 'merge_method: {METHOD}', and 'delegate: {method}' under parameters"
    return f"parameter '{name}' does not belong here", f"it stands {keys.PLACES[keys.BY_NAME[name].option.scope]}"


def _without_effect(setting: Setting, delegate: MergeMethod, used: set[str]) -> Iterator[Finding]:
    """A parameter that the delegate does not read, or not under one model."""
    name, method = setting.name, delegate.spec.name
    readers = keys.BY_NAME[name].option.delegates if name in keys.BY_NAME else ()
    sampled = name in ("data", "samples") and {"match_on", "finetuned_from"} & used
    if readers and method not in readers and not sampled:
        problem = f"parameter '{name}' has no effect with delegate {method}"
        yield setting.path, problem, f"leave it out; it is read by delegate {', '.join(readers)}"
    shared = [spec.name for spec in delegate.spec.parameters if spec.scope == ParameterScope.SHARED]
    if name in shared and isinstance(setting.part, MODELS):
        problem = f"parameter '{name}' of delegate {method} has no effect under one model"
        yield setting.path, problem, "move it under the recipe's 'parameters'"


def _values(setting: Setting, spec: ParameterSpec | None) -> Iterator[Finding]:
    """Values that a parameter cannot have: one of ours, or of the delegate."""
    for place, value in setting.leaves():
        try:
            if setting.name in keys.BY_NAME and setting.name != "delegate":
                keys.checked(setting.name, value)
            if spec is not None:
                check_value(spec, value)
        except RecipeError as error:
            yield place, error.what, error.remedy or ""


def _unused_options(config: MergeConfiguration) -> Iterator[Finding]:
    """Matching options without effect: the donors are moved by files under `alignment`.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.
    """
    moved = dict[Path, bool]()
    for group in groups(config):
        meeting = len({getattr(entry, "layer_range", None) for _, entry in group.entries}) == 1
        for path, entry in group.entries:
            if entry.model != config.base_model:
                moved[path] = (entry.parameters or {}).get("alignment") not in (None, False, "none") and meeting
    for setting in settings(config):
        donors = [file for path, file in moved.items() if path[: len(setting.path) - 2] == setting.path[:-2]]
        if setting.name in keys.MATCHING and donors and all(donors):
            yield (
                setting.path,
                f"'{setting.name}' has no effect: the file under 'alignment' moves the donor",
                ONE_OF_TWO,
            )


def _conflicts(config: MergeConfiguration) -> Iterator[Finding]:
    """Parameters that other entries leave no place for."""
    pieces = [part.sources for _, part in walk(config) if isinstance(part, OutputSliceDefinition)]
    reasons = dict[str, str]()
    if (config.parameters or {}).get("anchor") == "mean":
        names = ("match_on", "finetuned_from", "alignment")
        reasons |= dict.fromkeys(names, "'anchor: mean' aligns whole models together, on their weights")
    if any(source.layer_range != sources[0].layer_range for sources in pieces for source in sources):
        samples = ["data"] if delegate_name(config) == "ot_fusion" else []
        reasons |= dict.fromkeys(["match_on", "save_alignment", *samples], "the slices pair layers differently")
    if config.tokenizer or config.tokenizer_source:
        reasons["heads_of"] = "'tokenizer' changes the vocabulary of all heads"
    for path, name, value, _ in settings(config):
        if name in reasons and value not in (None, False, "none", "weights", "base"):
            yield path, f"'{name}' cannot be used: {reasons[name]}", ONE_OF_TWO


# --- slices, and the delegate's contract -----------------------------------------------------------------------------


def _slices(config: MergeConfiguration) -> Iterator[Finding]:
    """Sources of a slice have equally long ranges of layers, from a first to a later one, and the recipe's anchor."""
    for path, part in walk(config):
        if not isinstance(part, OutputSliceDefinition):
            continue
        if part.base_model not in (None, config.base_model):
            problem = f"base_model is {part.base_model}, that of the recipe is {config.base_model}"
            yield path, problem, "all slices share one anchor; remove the slice's own base_model"
        for step, source in enumerate(part.sources):
            if not 0 <= source.layer_range[0] < source.layer_range[1]:
                place = (*path, "sources", step, "layer_range")
                yield place, f"layer_range is {list(source.layer_range)}", "write [first layer, one after the last]"
        lengths = [source.layer_range[1] - source.layer_range[0] for source in part.sources]
        if len(set(lengths)) != 1:
            problem = f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources"
            yield path, problem, "give every source of a slice the same number of layers"


def is_plain(config: MergeConfiguration, delegate: MergeMethod) -> bool:
    """Whether the delegate receives the anchor as an ordinary model, not as its base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models.
    """
    contract, base = delegate.spec.contract, config.base_model
    if contract.max_inputs == 1 or base is None or contract.base == BasePolicy.FORBIDDEN:
        return True
    try:
        for group in groups(config):
            contract.validate_ids(group.inputs(base, whole=True), base)
    except ValueError:
        return bool(contract.base == BasePolicy.OPTIONAL)
    return False


def _contract(config: MergeConfiguration, delegate: MergeMethod) -> Iterator[Finding]:
    """A missing base, violations of the delegate's contract, and missing parameters."""
    spec, base = delegate.spec, config.base_model
    if base is None and (config.merge_method == METHOD or spec.contract.base == BasePolicy.REQUIRED):
        yield (), "base_model is missing", "name the model that the others are aligned to, or were fine-tuned from"
        return
    base = None if is_plain(config, delegate) else base
    for group in groups(config):
        inputs = group.inputs(base)
        try:
            delegate.validate_inputs(inputs, base)
        except (ValueError, RuntimeError) as error:
            text = str(error).removeprefix("Merge method ")
            count = f"{len(inputs)} models, the base among them" if base in inputs else f"{len(inputs)} models"
            remedy = f"it is given {count}; add or remove models, or choose another delegate"
            yield group.path, f"delegate {spec.name}: {text[:1].lower()}{text[1:]}", remedy
        yield from _missing(delegate, group, base)


def _missing(delegate: MergeMethod, group: MergeInputs, base: ModelReference | None) -> Iterator[Finding]:
    """Parameters that a delegate needs and is not given."""
    for spec in delegate.spec.parameters:
        name, problem = spec.name, f"delegate {delegate.spec.name} needs the parameter '{spec.name}'"
        if not spec.required or name in group.above:
            continue
        if spec.scope == ParameterScope.SHARED:
            yield ("parameters",), problem, f"add '{name}' to the parameters"
            continue
        takes_base = spec.scope != ParameterScope.NON_BASE
        for path, entry in group.entries:
            if name not in (entry.parameters or {}) and (takes_base or entry.model != base):
                yield path, f"{problem} for {entry.model}", f"add 'parameters: {{{name}: ...}}'"
        if takes_base and len(group.inputs(base)) > len(group.entries):
            remedy = f"list {base} under 'models' with its own '{name}' (0 leaves it out)"
            yield ("base_model",), f"{problem} for {base}, the base", remedy


# --- names in models -------------------------------------------------------------------------------------------------


def unknown_names(config: MergeConfiguration, architecture: Architecture, tensors: Iterable[str]) -> Iterator[Finding]:
    """Layers, parts of names and filters in a recipe that do not exist in the models.

    Filters of alignment options see blocks, not tensors.

    Args:
        architecture: of the anchor.
        tensors: names of all models' tensors.
    """
    blocks, known = [block.name for block in architecture.blocks], sorted(set(tensors))
    example = next((name for name in blocks if name.endswith(".0")), blocks[0])
    remedy = f"alignment options apply to whole blocks, with names such as '{example}'"
    for path, name, value, _ in settings(config):
        if name == "layers":
            try:
                AlignConfig(layers=keys.checked("layers", value)).check_layers(architecture)
            except RecipeError as error:
                yield path, error.what, error.remedy or ""
        for step, text in walk(value) if name in keys.OPTIONS else ():
            if step[-1:] == ("filter",) and text not in (None, "*") and not any(text in block for block in blocks):
                yield path, f"the filter '{text}' of '{name}' matches no block", remedy
    for word in map(str.strip, str((config.parameters or {}).get("exclude") or "").split(",")):
        if word and not any(word in name for name in known):
            steps = {step for name in known for step in name.split(".") if not step.isdigit()}
            close = difflib.get_close_matches(word.rpartition(".")[2], sorted(steps), n=3, cutoff=0.0)
            advice = f"the nearest are {', '.join(map(repr, close))}"
            yield ("parameters", "exclude"), f"no tensor name contains '{word}'", advice
