"""Rules of recipes: every fault of a document that can be seen without a model.

mergekit's own classes judge keys and types, `ParameterSpec` the delegate's parameters, its contract the models; a rule
here yields what else is wrong, with its path, the problem and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
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
from pydantic import ValidationError

from rotation_merge.architecture.model import Architecture
from rotation_merge.averaging.parameters import checked as check_value
from rotation_merge.averaging.svc import IDLE
from rotation_merge.config import DTYPES
from rotation_merge.errors import RecipeError, nearest, nearest_path, short
from rotation_merge.matching.options import AlignConfig
from rotation_merge.mergekit_plugin import METHOD, delegates, keys
from rotation_merge.mergekit_plugin.document import Document, Finding, Path, is_ours, walk
from rotation_merge.mergekit_plugin.schema import unknown_keys

MODELS = (InputModelDefinition, InputSliceDefinition)

ALLOWED: dict[type, tuple[str, ...]] = {
    MergeConfiguration: (*keys.OPTIONS, *keys.names(keys.EACH, keys.RECIPE)),
    InputModelDefinition: (*keys.OPTIONS, *keys.OF_MODEL),
    InputSliceDefinition: (*keys.OPTIONS, *keys.OF_MODEL),
    OutputSliceDefinition: keys.OPTIONS,
    OutputModuleDefinition: keys.OPTIONS,
}
"""Parts of a recipe with parameters, and those of ours that are allowed there."""

ONE_OF_TWO = "leave out one of the two"


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

    def covers(self, path: Path) -> bool:
        """Whether it holds for the part of the recipe at a path."""
        return path[: len(self.path) - 2] == self.path[:-2]


def settings(config: MergeConfiguration) -> Iterator[Setting]:
    """Every parameter in a recipe, ours and the delegate's."""
    for path, part in walk(config):
        for name, value in (part.parameters or {}).items() if type(part) in ALLOWED else ():
            yield Setting((*path, "parameters", name), name, value, part)


class Group(NamedTuple):
    """Models that are merged together, those of a slice, a module or the whole recipe: each part by its path.

    Attributes:
        base: the base that a slice names for itself.
    """

    path: Path
    entries: dict[Path, Any]
    base: ModelReference | None

    def inputs(self, base: ModelReference | None) -> list[ModelReference]:
        """The delegate's inputs if `base` is its base: mergekit adds it to whole models."""
        models = [entry.model for entry in self.entries.values()]
        return [*models, base] if self.path[-1] == "models" and base and base not in models else models


def groups(config: MergeConfiguration) -> Iterator[Group]:
    """Every set of models for the delegate."""
    for path, part in walk(config):
        listed = "sources" if isinstance(part, OutputSliceDefinition) else "models"
        if type(part) in ALLOWED and (entries := getattr(part, listed, None)):
            numbered = {(*path, listed, number): entry for number, entry in enumerate(entries)}
            yield Group((*path, listed), numbered, getattr(part, "base_model", None))


def tokenizer_source(config: MergeConfiguration) -> ModelReference | None:
    """The model that a recipe takes its tokenizer from, if it names one."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    return source if isinstance(source, ModelReference) else None


# --- a document ------------------------------------------------------------------------------------------------------


def check(document: Document) -> MergeMethod | None:
    """Collect every fault of one document that can be seen without a model.

    What may only seem to be missing is looked for once no word is misspelt. Of a recipe of another method, what
    mergekit ignores is a note, unless it is misspelt.

    Returns:
        The method that averages, or the nearest to what is none; None where none is near.
    """
    if document.config is None:
        check_structure(document)
    config, known = document.config, delegates.names()
    if config is None:
        return None
    delegate, ours = _delegate(document, config, known), is_ours(dict(config), misspelt=False)
    document.collect(_parameters(config, delegate), ignored=not ours)
    document.collect(_values(config, delegate))
    for rule in (_entries, _one_model_twice, _slices, *((_moved_by_files, _conflicts) if ours else ())):
        document.collect(rule(config))
    if delegate is not None and not any("did you mean" in fault.remedy for fault in document.faults):
        document.collect(_contract(config, delegate))
        document.collect(sums_of_zero(config, delegate))
        document.collect(other_sums(config, delegate), ignored=True)
        document.collect(_idle_calibration(config, delegate), ignored=True)
    return delegate


def _delegate(document: Document, config: MergeConfiguration, known: Collection[str]) -> MergeMethod | None:
    """The method that averages, or the one that is meant by a misspelt name; a fault if there is none."""
    name, ours = delegate_name(config), config.merge_method == METHOD
    if name not in known:
        problem = f"no merge method '{name}' to delegate to" if ours else f"there is no merge method '{name}'"
        path: Path = ("parameters", "delegate") if ours else ("merge_method",)
        document.fault(path, problem, nearest(str(name), known if ours else [METHOD, *known]))
    like = [name] if name in known else get_close_matches(str(name), known, 1)
    return delegates.get(like[0]) if like else None


def check_structure(document: Document) -> None:
    """mergekit's own validation, every error at its place; unknown keys do not keep the rest from being read."""
    validate = MergeConfiguration.__pydantic_validator__.validate_python
    content = {key: value for key, value in document.value.items() if key != "name"}  # of mergekit-multi
    unknown = list(unknown_keys(content))
    try:
        document.config = validate(content)
        document.collect(unknown, ignored=not is_ours(content))
    except ValidationError as error:
        document.collect([*unknown, *_structural(error, content, [path for path, *_ in unknown])])
    except (RuntimeError, TypeError, ValueError) as error:
        document.collect(unknown, ignored=True)
        if document.first is None:
            document.fault((), str(error), "see mergekit's documentation")


def _structural(error: ValidationError, content: Any, reported: list[Path]) -> Iterator[Finding]:
    """pydantic's errors in words, one for each place where none is reported yet, which may cause others."""
    present, reported = dict(walk(content)), [*reported]
    for problem in error.errors():
        path: Path = ()
        for step in problem["loc"]:  # members of unions are steps, too
            path = (*path, step) if (*path, step) in present else path
        place = path[: path.index("parameters") + 2] if "parameters" in path else path  # a setting is of many forms
        if not any(known[: len(place)] == place for known in reported):
            reported.append(path)
            yield path, *explain(problem)


def explain(error: Mapping[str, Any]) -> tuple[str, str]:
    """One of pydantic's errors: problem and remedy."""
    place, value = error["loc"], error.get("input")
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


def _role(config: MergeConfiguration) -> str:
    """What the method that averages is called in a recipe."""
    return "delegate" if is_ours(dict(config), misspelt=False) else "merge_method"


def delegate_name(config: MergeConfiguration) -> Any:
    """The name of the method that averages; of a recipe of ours its `delegate`, also under a misspelt key."""
    if config.merge_method != METHOD:
        return config.merge_method
    parameters = config.parameters or {}
    meant = ["delegate"] if "delegate" in parameters else get_close_matches("delegate", parameters, 1, cutoff=0.8)
    return parameters[meant[0]] if meant else keys.BY_NAME["delegate"].default


def _entries(config: MergeConfiguration) -> Iterator[Finding]:
    """Entries of the whole recipe that mergekit reads when all weights have been merged."""
    for key in ("dtype", "out_dtype"):
        dtype = getattr(config, key)
        if dtype is not None and dtype.removeprefix("torch.") not in DTYPES:
            yield (key,), f"{key} is '{dtype}', which is no type of weights", nearest(dtype, DTYPES)
    if config.chat_template != "auto":
        try:
            merge._set_chat_template(SimpleNamespace(), config)
        except RuntimeError:
            problem = f"there is no chat template '{short(config.chat_template)}'"
            yield ("chat_template",), problem, "write auto, the name of one that mergekit has, or a template"
    model = tokenizer_source(config)  # refused before it is searched on the hub
    source = None if model is None else model.model.path
    if source and not os.path.exists(source) and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        path = ("tokenizer", "source") if config.tokenizer else ("tokenizer_source",)
        remedy = nearest_path(source, "name a model with its tokenizer, or write base or union")
        yield path, f"{source}: no such directory", remedy


def _one_model_twice(config: MergeConfiguration) -> Iterator[Finding]:
    """Models that are merged with themselves, or with their base, under another path of one folder."""
    for group in groups(config):
        base = group.base or config.base_model
        named = {_real_parts(base): f"base_model {base}"} if base is not None else {}
        references = {base}
        for path, entry in group.entries.items():
            same = named.setdefault(_real_parts(entry.model), str(entry.model))
            if entry.model not in references and same != str(entry.model):
                yield (*path, "model"), f"{entry.model} is {same} by another path", "name each model once, by one path"
            references.add(entry.model)


def _real_parts(model: ModelReference) -> tuple[str, ...]:
    """A model and its adapter, folders of this machine by their real paths."""
    parts = (part for part in (model.model, model.lora) if part is not None)
    return tuple(os.path.realpath(part.path) if os.path.exists(part.path) else str(part) for part in parts)


# --- parameters ------------------------------------------------------------------------------------------------------


def _parameters(config: MergeConfiguration, delegate: MergeMethod | None) -> Iterator[Finding]:
    """Every parameter: whether it exists, may stand there, and has an effect."""
    specs = {} if delegate is None else {spec.name: spec for spec in delegate.spec.parameters}
    used = {setting.name for setting in settings(config)}
    method = "" if delegate is None else f"{_role(config)} {delegate.spec.name}"
    for setting in settings(config):
        name, option, spec = setting.name, keys.BY_NAME.get(setting.name), specs.get(setting.name)
        allowed = _allowed(config, delegate, setting.part)
        if (option is None or not allowed) and spec is None:
            if delegate is not None and name not in keys.LEGACY:
                problem = f"there is no parameter '{name}' ({method})"
                yield setting.path, problem, nearest(name, [*specs, *allowed])
        elif option is not None and spec is None and name not in allowed:
            remedy = f"it stands {keys.PLACES[option.scope]}, in recipes with 'merge_method: {METHOD}'"
            yield setting.path, f"parameter '{name}' does not belong here", remedy
        elif option and not spec and option.scope != keys.BLOCK and _varies(setting):
            if name != "delegate":  # of which it has been said that it is no method
                problem = f"parameter '{name}' applies to the whole model and takes no lists or filters"
                yield setting.path, problem, "give one value; for 'layers' ranges such as '0-5,11' in one string"
        elif remedy := _readers(setting, delegate, used):
            yield setting.path, f"parameter '{name}' has no effect with {method} here", remedy


def _varies(setting: Setting) -> bool:
    """Whether a parameter is a list of values for layers, or has filters."""
    return isinstance(setting.value, list | ConditionalParameter)


def _allowed(config: MergeConfiguration, delegate: MergeMethod | None, part: Any) -> tuple[str, ...]:
    """Parameters of ours that may stand under a part of a recipe; none in recipes of other methods."""
    if config.merge_method == METHOD or delegate is None:
        return ALLOWED[type(part)]
    averages = delegate.spec.name in delegates.OWN
    return tuple(known for known in ALLOWED[type(part)] if averages and known in keys.MERGING)


def _readers(setting: Setting, delegate: MergeMethod | None, used: set[str]) -> str:
    """Who reads a parameter that the delegate does not, or not under one model, as a remedy; else empty."""
    if delegate is None:
        return ""
    own = any(setting.name == spec.name for spec in delegate.spec.parameters)
    readers = keys.BY_NAME[setting.name].delegates if setting.name in keys.BY_NAME and not own else ()
    sampled = setting.name in ("data", "samples") and {"match_on", "finetuned_from"} & used
    if setting.name == "calibrate" and delegate.spec.name == "iso":
        return "leave it out; iso gives all singular values one size, so there are none to calibrate"
    if readers and delegate.spec.name not in readers and not sampled:
        return f"leave it out; it is read by delegate {', '.join(readers)}"
    if setting.name == "alpha" and readers and "calibrate" not in used:
        return "add 'calibrate: svc', or leave it out"
    shared = [spec.name for spec in delegate.spec.parameters if spec.scope == ParameterScope.SHARED]
    misplaced = setting.name in shared and isinstance(setting.part, MODELS)
    return "move it under the recipe's 'parameters'" if misplaced else ""


def _values(config: MergeConfiguration, delegate: MergeMethod | None) -> Iterator[Finding]:
    """Values that a parameter cannot have: one of ours, or of the delegate."""
    specs = {} if delegate is None else {spec.name: spec for spec in delegate.spec.parameters}
    for setting in settings(config):
        name, spec = setting.name, specs.get(setting.name)
        ours = spec is None and name in _allowed(config, delegate, setting.part) and name != "delegate"
        if ours and keys.BY_NAME[name].scope != keys.BLOCK and _varies(setting):
            continue  # of which it has been said that it takes none
        for place, value in setting.leaves():
            try:
                if ours:
                    keys.checked(name, value)
                if spec is not None:
                    check_value(spec, value)
            except RecipeError as error:
                yield place, error.what, error.remedy or ""


def _moved_by_files(config: MergeConfiguration) -> Iterator[Finding]:
    """Matching options without effect: all donors that they are for are moved by files under `alignment`.

    Where slices bring together layers of different places, what a file does not hold is matched: options count there.
    """
    matched = dict[Path, bool]()
    for group in groups(config):
        crossing = len({getattr(entry, "layer_range", None) for entry in group.entries.values()}) > 1
        for path, entry in group.entries.items():
            if entry.model != config.base_model:
                matched[path] = crossing or (entry.parameters or {}).get("alignment") in (None, False, "none")
    for setting in settings(config) if matched else ():
        donors = [by_options for path, by_options in matched.items() if setting.covers(path)]
        if setting.name in keys.MATCHING and donors and not any(donors):
            problem = f"'{setting.name}' has no effect: the file under 'alignment' moves the donor"
            yield setting.path, problem, ONE_OF_TWO


def _conflicts(config: MergeConfiguration) -> Iterator[Finding]:
    """Parameters that other entries leave no place for."""
    reasons = dict[str, str]()
    if (config.parameters or {}).get("anchor") == "mean":
        names = ("match_on", "finetuned_from", "alignment")
        reasons |= dict.fromkeys(names, "'anchor: mean' aligns whole models together, on their weights")
    ranges = [{getattr(e, "layer_range", None) for e in group.entries.values()} for group in groups(config)]
    if any(len(of_group) > 1 for of_group in ranges):
        samples = ["data"] if delegate_name(config) == "ot_fusion" else []
        reasons |= dict.fromkeys(["match_on", "save_alignment", *samples], "the slices pair layers differently")
    if config.tokenizer or config.tokenizer_source:
        reasons["heads_of"] = "'tokenizer' changes the vocabulary of all heads"
    for path, name, value, _ in settings(config):
        if name in reasons and value not in (None, False, "none", "weights", "base"):
            yield path, f"'{name}' cannot be used: {reasons[name]}", ONE_OF_TWO


# --- slices, and the delegate's contract -----------------------------------------------------------------------------


def _slices(config: MergeConfiguration) -> Iterator[Finding]:
    """Sources of a slice have equally long ranges of layers, from a first to a later one, and the recipe's anchor.

    In recipes of other methods a slice may have a base of its own.
    """
    for path, part in walk(config):
        if not isinstance(part, OutputSliceDefinition):
            continue
        if config.merge_method == METHOD and part.base_model not in (None, config.base_model):
            problem = f"base_model is {part.base_model}, that of the recipe is {config.base_model}"
            yield path, problem, "all slices share one anchor; remove the slice's own base_model"
        ranges = [source.layer_range for source in part.sources]
        for step, layers in enumerate(ranges):
            if not 0 <= layers[0] < layers[1]:
                place = (*path, "sources", step, "layer_range")
                yield place, f"layer_range is {list(layers)}", "write [first layer, one after the last]"
        lengths = [last - first for first, last in ranges]
        if len(set(lengths)) != 1:
            problem = f"its sources have {', '.join(map(str, lengths))} layers" if lengths else "it has no sources"
            yield path, problem, "give every source of a slice the same number of layers"


def is_plain(config: MergeConfiguration, delegate: MergeMethod) -> bool:
    """Whether the delegate receives the anchor as an ordinary model, not as its base.

    True where the delegate's contract admits these models only without a base: passthrough then gets the donor alone,
    nuslerp the anchor and a donor as two ordinary models. Recipes of other methods are taken as they stand.
    """
    contract, base = delegate.spec.contract, config.base_model
    if not is_ours(dict(config), misspelt=False):
        return False
    if contract.max_inputs == 1 or base is None or contract.base == BasePolicy.FORBIDDEN:
        return True
    try:
        for group in groups(config):
            contract.validate_ids(list(dict.fromkeys([*group.inputs(None), base])), base)
    except ValueError:
        return bool(contract.base == BasePolicy.OPTIONAL)
    return False


def _contract(config: MergeConfiguration, delegate: MergeMethod) -> Iterator[Finding]:
    """A missing base, violations of the delegate's contract, and missing parameters."""
    spec, needed = delegate.spec, config.merge_method == METHOD or delegate.spec.contract.base == BasePolicy.REQUIRED
    if needed and config.base_model is None and not all(group.base for group in groups(config)):
        yield (), "base_model is missing", "name the model that the others are aligned to, or were fine-tuned from"
        return
    plain, role = is_plain(config, delegate), _role(config)
    for group in groups(config):
        base = None if plain else group.base or config.base_model
        inputs = group.inputs(base)
        try:
            delegate.validate_inputs(inputs, base)
        except (ValueError, RuntimeError) as error:
            remedy = f"it is given {len(inputs)} with base_model; add or remove models, or choose another {role}"
            yield group.path, f"{role} {spec.name}: {error}", remedy
        above = {setting.name for setting in settings(config) if setting.covers(group.path[:-1])}
        for needed in (known for known in spec.parameters if known.required and known.name not in above):
            yield from _missing(f"{role} {spec.name}", needed, group, base)


def _missing(method: str, spec: ParameterSpec, group: Group, base: ModelReference | None) -> Iterator[Finding]:
    """The models for which a parameter of the method is missing."""
    problem = f"{method} needs the parameter '{spec.name}'"
    if spec.scope == ParameterScope.SHARED:
        yield ("parameters",), problem, f"add '{spec.name}' to the parameters"
        return
    places = {entry.model: path for path, entry in group.entries.items()}
    for model in dict.fromkeys(group.inputs(base)):
        place = places.get(model)
        value = None if place is None else (group.entries[place].parameters or {}).get(spec.name)
        if value is None and (model != base or spec.scope != ParameterScope.NON_BASE):
            whose = f"{model}, the base" if model == base else f"{model}"
            remedy = f"add 'parameters: {{{spec.name}: ...}}' to it under 'models'"
            yield place or ("base_model",), f"{problem} for {whose}", remedy


SHARES = {"linear": "normalize", "multislerp": "normalize_weights"}
"""Averages of mergekit that divide by the sum of the weights, unless this parameter is false."""


def sums_of_zero(config: MergeConfiguration, delegate: MergeMethod) -> Iterator[Finding]:
    """Weights that add up to 0 where a mean divides by their sum."""
    name = delegate.spec.name
    for path, total, largest, divides in _sums(config, name):
        if divides and abs(total) <= 1e-6 * largest:
            yield path, f"the weights add up to {total:.3g}, and {name} divides by it", "make them add up to 1"


def other_sums(config: MergeConfiguration, delegate: MergeMethod) -> Iterator[Finding]:
    """Weights of `linear` that do not add up to 1 where it does not divide by their sum; this scales the model."""
    for path, total, _, divides in _sums(config, delegate.spec.name):
        if not divides and delegate.spec.name == "linear" and abs(total - 1) > 0.05:
            remedy = "make them add up to 1, or leave out 'normalize: false'"
            yield path, f"the weights add up to {total:.3g}", remedy


def _sums(config: MergeConfiguration, name: str) -> Iterator[tuple[Path, float, float, bool]]:
    """The sum of each group's weights, the largest of them, and whether the method divides by the sum."""
    parameters = config.parameters or {}
    if name not in SHARES:
        return
    divides = parameters.get(SHARES[name], True) is not False
    for group in groups(config):
        base = group.base or config.base_model
        weights = {entry.model: (entry.parameters or {}).get("weight") for entry in group.entries.values()}
        weights = {model: parameters.get("weight") if weight is None else weight for model, weight in weights.items()}
        values = [weight for model, weight in weights.items() if name != "multislerp" or model != base]
        numbers = [weight for weight in values if isinstance(weight, int | float)]
        if len(numbers) == len(values):  # else there are lists or filters
            yield group.path, sum(numbers), max(map(abs, numbers), default=0.0), divides


def _idle_calibration(config: MergeConfiguration, delegate: MergeMethod) -> Iterator[Finding]:
    """A calibration behind a delegate that it does no good to."""
    if delegate.spec.name == "wudi" and (config.parameters or {}).get("calibrate") == "svc":
        yield ("parameters", "calibrate"), IDLE, "leave it out"


# --- names in models -------------------------------------------------------------------------------------------------


def unknown_names(config: MergeConfiguration, architecture: Architecture, tensors: Iterable[str]) -> Iterator[Finding]:
    """Layers, parts of names and filters in a recipe that do not exist in the models.

    Filters of alignment options see blocks, not tensors.

    Args:
        architecture: of the anchor.
        tensors: names of all models' tensors.
    """
    blocks, known = [block.name for block in architecture.blocks], sorted(set(tensors))
    for path, name, value, _ in settings(config):
        if name == "layers":
            try:
                AlignConfig(layers=keys.checked("layers", value)).check_layers(architecture)
            except RecipeError as error:
                yield path, error.what, error.remedy or ""
        for step, text in walk(value) if name in keys.OPTIONS else ():
            if step[-1:] == ("filter",) and text not in (None, "*") and not any(text in block for block in blocks):
                example = next((block for block in blocks if block.endswith(".0")), blocks[0])
                remedy = f"alignment options apply to whole blocks, with names such as '{example}'"
                yield path, f"the filter '{text}' of '{name}' matches no block", remedy
    for word in map(str.strip, str((config.parameters or {}).get("exclude") or "").split(",")):
        if word and not any(word in name for name in known):
            steps = {step for name in known for step in name.split(".") if not step.isdigit()}
            remedy = nearest(word.rpartition(".")[2], steps)
            yield ("parameters", "exclude"), f"no tensor name contains '{word}'", remedy
