"""The donors of a recipe that says nothing but plain values, read without mergekit, whose import takes seconds.

What a recipe may say here is a part of what it may say at all: models by name, single values, delegates of which
`DELEGATES` knows what they ask for. Where anything else stands, or anything is wrong, nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rotation_merge.errors import RecipeError
from rotation_merge.matching.options import MatchOptions
from rotation_merge.recipe.document import documents
from rotation_merge.recipe.donor import RecipeDonor, says_unlike
from rotation_merge.recipe.names import (
    BY_NAME,
    DONOR_ONLY,
    DTYPES,
    EACH,
    METHOD,
    OPTIONS,
    PRESETS,
    RECIPE,
    SHARES,
    names,
    normal,
)

NOT_PLAIN = ("alignment", "carry", "heads_of", "layers_map", "match_on", "widths")
"""Parameters that ask for more than configs, where they are given."""
TOKENIZERS = ("base", "union")
LEAST = 2
"""Models of a merge, the anchor among them."""


@dataclass(frozen=True)
class Terms:
    """What a delegate asks of a recipe.

    Attributes:
        each: a number that must be given for every model.
        base: whether for the anchor, too, which then has to be listed.
        shared: a number that must be given for the whole.
        numbers, flags: what else may be given.
        most: models, the anchor among them.
    """

    each: str | None = "weight"
    base: bool = False
    shared: str | None = None
    numbers: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    most: float = math.inf


_TASKS = ("int8_mask", "normalize", "rescale")

DELEGATES = {
    "linear": Terms(base=True, flags=("normalize",)),
    "slerp": Terms(each=None, shared="t", most=2),
    "task_arithmetic": Terms(numbers=("lambda", "density"), flags=_TASKS),
    "ties": Terms(numbers=("lambda", "density"), flags=_TASKS),
    "dare_ties": Terms(numbers=("lambda", "density"), flags=_TASKS),
    "dare_linear": Terms(numbers=("lambda", "density"), flags=_TASKS),
    "della": Terms(numbers=("lambda", "density", "epsilon"), flags=_TASKS),
    "della_linear": Terms(numbers=("lambda", "density", "epsilon"), flags=_TASKS),
    "breadcrumbs": Terms(numbers=("lambda", "density", "gamma"), flags=_TASKS),
    "breadcrumbs_ties": Terms(numbers=("lambda", "density", "gamma"), flags=_TASKS),
    "karcher": Terms(each=None, numbers=("tol",)),
    "regmean": Terms(base=True, numbers=("shrink", "ridge")),
    "fisher": Terms(base=True, numbers=("floor",), flags=("normalize",)),
    "kfac": Terms(base=True, numbers=("shrink", "ridge")),
    "refit": Terms(base=True, numbers=("ridge",)),
}
"""Delegates whose terms are no more than that; a test holds them against what mergekit says of them."""


class _NotPlain(Exception):
    """More than plain values."""


def plain_donors(text: str) -> list[RecipeDonor] | None:
    """The donors of a recipe, as `checking.donors_of` finds them; None where mergekit has to read it."""
    try:
        return _donors(text)
    except (_NotPlain, RecipeError):
        return None


def _donors(text: str) -> list[RecipeDonor]:
    found = documents(text)
    _only(len(found) == 1 and not found[0].faults)
    recipe = found[0].value
    known = {"merge_method", "base_model", "models", "parameters", "dtype", "out_dtype", "tokenizer_source"}
    _only(recipe.get("merge_method") == METHOD and set(recipe) <= known | {"tokenizer"})
    _only(all(recipe[key] in DTYPES for key in ("dtype", "out_dtype") if recipe.get(key) is not None))
    shared = _settings(recipe)
    delegate = shared.get("delegate", BY_NAME["delegate"].default)
    _only(isinstance(delegate, str) and delegate in DELEGATES)
    base, models = _name(recipe.get("base_model")), _models(recipe.get("models"))
    _check_terms(DELEGATES[delegate], base, models, shared)
    _check_values(shared, (*OPTIONS, *names(EACH, RECIPE)), delegate)
    for settings in models.values():
        _check_values(settings, (*OPTIONS, *names(EACH, DONOR_ONLY)), delegate)
    _only(not any(map(says_unlike, models.values())))
    words = _leaves_tokens(recipe)
    parts = [part.strip() for part in str(shared.get("exclude") or "").split(",") if part.strip()]

    def excluded(tensor: str) -> bool:
        return any(part in tensor for part in parts)

    donors = []
    for name, settings in models.items():
        if name != base:
            values = {**PRESETS.get(str(shared.get("preset")), {}), **shared, **settings}
            chosen = {option: normal(option, values[option]) for option in OPTIONS if values.get(option) is not None}
            origin = settings.get("finetuned_from")
            options = MatchOptions.from_values(chosen)
            donors.append(RecipeDonor(base, name, options, shared.get("untie") is True, origin, None, excluded, words))
    return donors


def _only(condition: bool) -> None:
    if not condition:
        raise _NotPlain


def _settings(part: Mapping[str, Any]) -> dict[str, Any]:
    found = part.get("parameters")
    _only(found is None or isinstance(found, dict))
    return found or {}


def _name(value: Any) -> str:
    """A model without adapter and revision."""
    _only(isinstance(value, str) and bool(value.strip()) and not set(value) & set("+@:"))
    return str(value)


def _models(value: Any) -> dict[str, dict[str, Any]]:
    """The settings of each model, by its name."""
    _only(isinstance(value, list) and all(isinstance(m, dict) and set(m) <= {"model", "parameters"} for m in value))
    found = {_name(entry.get("model")): _settings(entry) for entry in value}
    _only(len(found) == len(value))
    return found


def _leaves_tokens(recipe: Mapping[str, Any]) -> bool:
    """Whether tokens stay at the ids that they have in each model."""
    own, source = recipe.get("tokenizer"), recipe.get("tokenizer_source")
    _only(own is None or (isinstance(own, dict) and set(own) == {"source"} and own["source"] in TOKENIZERS))
    _only(source is None or (source in TOKENIZERS and own is None))
    return own is None and source is None


def _check_terms(terms: Terms, base: str, models: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
    """What the delegate asks for is there, and what it is given is what it takes."""
    _only(LEAST <= len({base, *models}) <= terms.most)
    _only(terms.shared is None or terms.shared in shared)
    if terms.each is not None and terms.each not in shared:
        _only(base in models or not terms.base)
        _only(all(terms.each in own for name, own in models.items() if name != base or terms.base))
    for settings in (shared, *models.values()):
        for name, value in settings.items():
            number = name in (terms.each, terms.shared, *terms.numbers)
            if number:
                _only(isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value))
                _only(name not in SHARES or 0 <= value <= 1)
            _only(number or name in BY_NAME or name in terms.flags)
            _only(name not in terms.flags or isinstance(value, bool))


def _check_values(settings: Mapping[str, Any], ours: tuple[str, ...], delegate: str) -> None:
    """Parameters of ours stand where they may, have values that they may have, and ask for no more than configs."""
    for name, value in settings.items():
        if name not in BY_NAME:
            continue
        key = BY_NAME[name]
        _only(name in ours and name not in NOT_PLAIN and not isinstance(value, list | dict))
        _only(not key.delegates or delegate in key.delegates)
        if name in OPTIONS:
            MatchOptions.from_values({name: normal(name, value)})
        else:
            key.check(value)
        _only((name, value) not in (("preset", "auto"), ("unsupported", "merge"), ("scale", "auto")))
        if name == "finetuned_from":
            _name(value)
