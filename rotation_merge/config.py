"""One config dataclass a job. Its fields say all there is to say of an option: command line, errors and the tables of
the documentation are made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rotation_merge.errors import RecipeError, nearest

C = TypeVar("C", bound="Config")


KINDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "some of its words",
    Path: "a file",
}
"""Kinds of values, in words."""


@dataclass(frozen=True)
class Option:
    """One option of a job.

    Attributes:
        help: what it does, a short sentence without its name.
        kind: of its values: int, float, str, bool, or tuple of words.
        choices: the values that it may have; of a tuple, its words.
        low, high: the range of a number.
        above: whether the lower end itself is outside.
        optional: whether it may be None.
        words: values that it may have beside those of its kind.
        key: what recipes and commands call it, if not by its field's name.
        command: whether the command line has it.
    """

    help: str
    kind: type
    choices: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    optional: bool = False
    words: tuple[str, ...] = ()
    key: str = ""
    command: bool = True

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        if self.choices:
            words = ", ".join(str(choice).lower() for choice in self.choices)
            return f"some of: {words}" if self.kind is tuple else f"one of: {words}"
        if self.words:
            return f"one of: {', '.join(self.words)}, {replace(self, words=()).allowed}"
        words = KINDS[self.kind]
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{words} from {self.low:g} to {self.high:g}"
        if math.isfinite(self.low):
            return f"{words} {'above' if self.above else 'of at least'} {self.low:g}"
        return words

    def check(self, name: str, value: Any) -> None:
        """
        Raises:
            RecipeError: the value is none that the option may have; names the option, its range and the nearest value.
        """
        if self._holds(value):
            return
        remedy = f"it must be {self.allowed}"
        if self.kind is tuple and isinstance(value, tuple) and (odd := [v for v in value if v not in self.choices]):
            raise RecipeError(f"option '{name}' holds {odd[0]!r}", remedy=nearest(str(odd[0]), self.choices))
        near = nearest(value, [str(choice).lower() for choice in self.choices]) if isinstance(value, str) else ""
        if "did you mean" in near:
            remedy = near
        raise RecipeError(f"option '{name}' is {value!r}", remedy=remedy)

    def _holds(self, value: Any) -> bool:
        if value is None or value in self.words:
            return self.optional or value is not None
        if self.kind is tuple:
            return isinstance(value, tuple) and bool(value) and all(v in self.choices for v in value if self.choices)
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if self.kind not in (int, float, str, bool):
            return isinstance(value, self.kind)
        if self.kind is float:
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else:
            number = type(value) is self.kind
        if not number or self.kind in (str, bool):
            return number
        return self.low <= value <= self.high and not (self.above and value == self.low)


def option(default: Any, help: str, kind: type | None = None, **more: Any) -> Any:
    """A field of a config.

    Args:
        kind: of its values, where the default is None; it is optional then.
        **more: of `Option`.
    """
    described = Option(help, kind or type(default), optional=default is None, **more)
    return field(default=default, metadata={"option": described})


@dataclass(frozen=True)
class Config:
    """Base of the configs: values are checked when one is made."""

    def __post_init__(self) -> None:
        for name, described in self.options().items():
            described.check(name, getattr(self, name))

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Its options by name."""
        return {f.name: f.metadata["option"] for f in fields(cls) if "option" in f.metadata}

    @classmethod
    def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
        """Build from a mapping.

        Raises:
            RecipeError: a name is none of its fields; names the nearest.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise RecipeError(f"there is no option '{name}'", remedy=nearest(name, known))
        return cls(**values)
