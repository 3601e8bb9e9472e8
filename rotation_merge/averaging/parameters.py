"""Parameters of merge methods: types, ranges, and the errors for values outside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import ValidationError

from rotation_merge.config import Option
from rotation_merge.errors import RecipeError, nearest, short

WEIGHT = ParameterSpec("weight", float, ParameterScope.INPUT, description="share of the model")

SHARES = ("t", "density")
"""Parameters of mergekit's methods that are shares of something, which mergekit takes beyond it, too."""

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}
"""Types of mergekit's parameters, in words."""


@dataclass(frozen=True)
class DelegateParameter(ParameterSpec):
    """A parameter of a method of our own.

    Attributes:
        option: which values it may have.
    """

    option: Option | None = None

    def validate(self, value: Any) -> Any:
        """A value in the parameter's type.

        Raises:
            ValidationError: it is of another type.
            RecipeError: it is out of range; names the parameter, its range and the nearest value.
        """
        valid = super().validate(value)
        if self.option is not None:
            self.option.check(self.name, valid, "parameter")
        return valid


def parameter(name: str, default: Any, help: str, kind: Any = None) -> DelegateParameter:
    """A parameter with one value for all models.

    Args:
        kind: type of its values, if not the default's.
    """
    return described_parameter(name, Option(kind or type(default), help, default=default))


def described_parameter(name: str, described: Option) -> DelegateParameter:
    """A parameter that a config describes."""
    kind: Any = described.base | None if described.optional else described.base
    return DelegateParameter(name, kind, ParameterScope.SHARED, described.default, described.text, option=described)


def wanted(spec: ParameterSpec) -> str:
    """The type of a parameter in words."""
    types = [kind for kind in (spec.value_type, *get_args(spec.value_type)) if kind in KINDS]
    return KINDS[types[0]] if types else str(spec.value_type)


def checked(spec: ParameterSpec, value: Any) -> Any:
    """A single value of a parameter, mergekit's or ours, in its type.

    Raises:
        RecipeError: it is none that the parameter may have.
    """
    problem = f"parameter '{spec.name}' is {value!r}"
    try:
        valid = spec.validate(value)
    except ValidationError:
        raise RecipeError(problem, remedy=f"it must be {wanted(spec)}") from None
    if isinstance(valid, float) and not math.isfinite(valid):
        raise RecipeError(problem, remedy="give a finite number")
    if spec.name in SHARES and isinstance(valid, int | float) and not 0 <= valid <= 1:
        raise RecipeError(problem, remedy="it is a share: give a number from 0 to 1")
    return valid


def check_known(method: str, parameters: Mapping[str, Any], known: Mapping[str, ParameterSpec]) -> None:
    """Refuse names that are no parameters of a method.

    Raises:
        RecipeError: names the nearest one that is.
    """
    for name in parameters:
        if name not in known:
            remedy = f"{nearest(name, known)}; it has {', '.join(known)}" if known else "leave it out"
            raise RecipeError(f"'{method}' has no parameter '{name}'", remedy=remedy)


def numbers_for(weights: Any, count: int, of: str) -> list[float]:
    """Weights that a caller gave, one for each of `count` models.

    Args:
        of: what they are weights of, in the singular.

    Raises:
        RecipeError: they are no numbers, or too many or too few.
    """
    try:
        values = [float(weight) for weight in weights]
    except (TypeError, ValueError) as error:
        raise RecipeError(f"'weights' are {short(repr(weights))}", remedy=f"give one number for each {of}") from error
    if len(values) != count:
        raise RecipeError(f"{len(values)} weights for {count} {of}s", remedy=f"give one weight for each {of}")
    return values
