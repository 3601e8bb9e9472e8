"""The available delegates: mergekit's methods and our own."""

from __future__ import annotations

import math
from typing import Any, get_args

from mergekit import merge_methods
from mergekit.merge_methods.base import MergeMethod, ParameterSpec
from pydantic import ValidationError

from rotation_merge.averaging.parameters import DelegateParameter
from rotation_merge.averaging.registry import METHODS
from rotation_merge.errors import RecipeError

OWN: dict[str, MergeMethod] = {method.spec.name: method for method in METHODS}
"""Delegates of our own, each a merge method of recipes, too: `merge_method: NAME` merges models as they are."""

PREFIX = "rotation_merge:"
"""Under `rotation_merge:NAME` the tasks of a merge find a delegate of our own in mergekit's registry."""

SHARES = ("t", "density")
"""Parameters of delegates that are shares of something, which mergekit takes beyond it, too."""

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
"""Types of mergekit's parameters, in words."""


def names() -> list[str]:
    """Everything that can be a delegate."""
    known = [method.spec.name for method in merge_methods.registered_methods()]
    return sorted({*OWN, *known})


def get(name: str) -> MergeMethod:
    """A delegate by its name; ours before mergekit's.

    Raises:
        RuntimeError: there is none.
    """
    return OWN[name] if name in OWN else merge_methods.get(name)


def parameters(name: str) -> dict[str, ParameterSpec]:
    """A delegate's parameters by name."""
    return {spec.name: spec for spec in get(name).spec.parameters}


def registered_name(method: MergeMethod) -> str:
    """The delegate's name in mergekit's registry."""
    name = method.spec.name
    return f"{PREFIX}{name}" if OWN.get(name) is method else name


def check_value(spec: ParameterSpec, value: Any) -> None:
    """Check one value of a delegate's parameter.

    Raises:
        RecipeError: it is none that the parameter may have.
    """
    name = spec.name
    try:
        valid = spec.validate(value)
    except ValidationError:
        types = [kind for kind in (spec.value_type, *get_args(spec.value_type)) if kind in KINDS]
        remedy = f"it must be {KINDS[types[0]] if types else spec.value_type}"
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy=remedy) from None
    if isinstance(spec, DelegateParameter) and spec.option is not None:
        spec.option.check(name, valid, "parameter")
    if isinstance(valid, float) and not math.isfinite(valid):
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy="give a finite number")
    if name in SHARES and isinstance(valid, int | float) and not 0 <= valid <= 1:
        raise RecipeError(f"parameter '{name}' is {value!r}", remedy="it is a share: give a number from 0 to 1")
