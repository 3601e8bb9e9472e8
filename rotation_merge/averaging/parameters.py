"""Parameters of merge methods: types, ranges, and the errors for values outside them."""

from __future__ import annotations

import math
from typing import Any

from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import ValidationError

from rotation_merge.config import Option
from rotation_merge.errors import RecipeError

WEIGHT = ParameterSpec("weight", float, ParameterScope.INPUT, description="share of the model")

SHARES = ("t", "density")
"""Parameters of mergekit's methods that are shares of something, which mergekit takes beyond it, too."""


def parameter(name: str, default: Any, help: str, kind: Any = None) -> ParameterSpec:
    """A parameter with one value for all models.

    Args:
        kind: type of its values as of a config's fields, if not the default's.
    """
    return ParameterSpec(name, kind or type(default), ParameterScope.SHARED, default, help)


def checked(spec: ParameterSpec, value: Any) -> Any:
    """A single value of a parameter, mergekit's or ours, in its type.

    Raises:
        RecipeError: it is none that the parameter may have; names the nearest word, or the range.
    """
    problem = f"parameter '{spec.name}' is {value!r}"
    try:
        valid = spec.validate(value)
    except ValidationError:
        Option(spec.value_type, "").check(spec.name, value, "parameter")
        raise
    if isinstance(valid, float) and not math.isfinite(valid):
        raise RecipeError(problem, remedy="give a finite number")
    if spec.name in SHARES and isinstance(valid, int | float) and not 0 <= valid <= 1:
        raise RecipeError(problem, remedy="it is a share: give a number from 0 to 1")
    return valid
