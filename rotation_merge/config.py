"""One config dataclass for each job: its fields describe all options.

Command line, errors and the tables of the documentation are made from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from rotation_merge.errors import RecipeError, nearest, removed, short

C = TypeVar("C", bound="Config")

READ, WRITTEN, NEITHER = "read", "written", "neither"
"""Whether a value names an input, an output, or neither."""


def is_text(value: Any) -> bool:
    """Whether a value is text that is not blank."""
    return isinstance(value, str) and bool(value.strip())


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        words: noun phrase that follows "it must be".
        holds: whether a value is of the kind.
        role: whether it names an input, an output, or neither.
    """

    words: str
    holds: Callable[[Any], bool]
    role: str = NEITHER


FILE, MODEL = Kind("a file", is_text, READ), Kind("a model", is_text, READ)
NUMBERS = Kind(
    "a tuple of numbers", lambda value: isinstance(value, tuple) and bool(value) and all(map(KINDS[float].holds, value))
)
FOLDER, NEW_FILE = Kind("a folder", is_text, WRITTEN), Kind("a file to write", is_text, WRITTEN)

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Types that weights may be stored in."""

KINDS: dict[type, Kind] = {
    int: Kind("a whole number", lambda value: type(value) is int),
    float: Kind("a number", lambda value: type(value) in (int, float) and math.isfinite(value)),
    bool: Kind("true or false", lambda value: type(value) is bool),
    str: Kind("a word", is_text),
    tuple: Kind("a tuple", lambda value: isinstance(value, tuple) and bool(value)),
    Path: Kind("a file", lambda value: isinstance(value, Path)),
}
"""Kinds of values by type."""

BLOCK, WHOLE = "block", "whole"
"""Options of matching, which recipes may say anywhere. BLOCK: with filters and per-layer lists, resolved once a block.
WHOLE: one value for a whole donor."""
EACH = "each"
"""One value for a model; under it, or for all models under the recipe's parameters."""
DONOR_ONLY = "donor"
"""Only under one donor."""
RECIPE = "recipe"
"""Only under the recipe's parameters: holds for the merge."""


@dataclass(frozen=True)
class Option:
    """One option of a job.

    Attributes:
        help: description in Markdown, without name, default and range.
        kind: of its values: int, float, str, bool, tuple of words, or a `Kind`.
        choices: the only values that it may have; of a tuple, its words.
        low, high: the range of a number.
        above: whether the lower end itself is outside.
        optional: whether it may be None.
        words: values that it may have beside those of its kind.
        key: its name in recipes and commands, if not the field's name.
        recipe_key: its name in recipes, if another than in commands: a delegate has a parameter of the same name.
        command: whether the command line has it.
        scope: where recipes may have it; empty: nowhere.
        delegates: our own delegates that read it in recipes; empty: it holds whatever the delegate.
    """

    help: str
    kind: type | Kind
    choices: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    optional: bool = False
    words: tuple[Any, ...] = ()
    key: str = ""
    recipe_key: str = ""
    command: bool = True
    scope: str = ""
    delegates: tuple[str, ...] = ()

    def name_in_recipes(self, field_name: str) -> str:
        """The recipe key of a field with this option."""
        return self.recipe_key or self.key or field_name

    @property
    def text(self) -> str:
        """The help as plain text, for terminals."""
        return self.help.replace("`", "")

    @property
    def literals(self) -> list[str]:
        """The allowed literal values."""
        return [str(value).lower() for value in (*self.choices, *self.words)]

    @property
    def values(self) -> list[str]:
        """The allowed values: literals, and the kind of all others."""
        if self.choices:
            return self.literals
        words = self._kind.words
        if math.isfinite(self.low) and math.isfinite(self.high):
            words = f"{words} from {self.low:g} to {self.high:g}"
        elif math.isfinite(self.low):
            words = f"{words} {'above' if self.above else 'of at least'} {self.low:g}"
        return [*self.literals, words]

    @property
    def allowed(self) -> str:
        """Allowed values in words."""
        if len(self.values) == 1 and not self.choices:
            return self.values[0]
        return f"{'some' if self.kind is tuple else 'one'} of: {', '.join(self.values)}"

    def check(self, name: str, value: Any, noun: str = "option") -> None:
        """Check a value against the option's type, range and choices.

        Args:
            noun: word for an option in the place where the user wrote it.

        Raises:
            RecipeError: the value is none that the option may have; names the option, its range and the nearest value.
        """
        if self._holds(value):
            return
        problem, word = f"{noun} '{name}' is {short(repr(value))}", value
        if self.kind is tuple and isinstance(value, tuple) and value:
            word = next(word for word in value if word not in self.choices)
            problem = f"{noun} '{name}' holds {short(repr(word))}"
        if isinstance(word, str) and (remedy := removed(f"{name}: {word}")):
            raise RecipeError(problem, remedy=remedy)
        close = nearest(word, self.literals) if isinstance(word, str) else ""
        if "did you mean" in close:
            raise RecipeError(problem, remedy=f"{close} {self.allowed}")
        raise RecipeError(problem, remedy=f"it must be {self.allowed}")

    def converted(self, value: Any) -> Any:
        """A value in the form that it is kept in.

        Paths become text (or a `Path`, where the kind is that); lists, and a single word, become tuples.
        """
        if self.kind is Path:
            return Path(value) if is_text(value) else value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if self.kind is tuple and isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) and self.kind in (tuple, NUMBERS) else value

    @property
    def _kind(self) -> Kind:
        return self.kind if isinstance(self.kind, Kind) else KINDS[self.kind]

    def _holds(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.kind is tuple:
            return self._kind.holds(value) and all(word in self.choices for word in value if self.choices)
        if any(value == known and type(value) is type(known) for known in (*self.choices, *self.words)):
            return True
        if self.choices or not self._kind.holds(value):
            return False
        if self.kind not in (int, float):
            return True
        return self.low <= value <= self.high and not (self.above and value == self.low)


def option(default: Any, help: str, kind: type | Kind | None = None, **more: Any) -> Any:
    """A field of a config.

    Args:
        kind: of its values, if not the default's type. An option whose default is None is optional.
        **more: of `Option`.
    """
    described = Option(help, kind or type(default), optional=default is None, **more)
    return field(default=default, metadata={"option": described})


@dataclass(frozen=True)
class Config:
    """Base of the configs: values are checked when one is made."""

    def __post_init__(self) -> None:
        for name, described in self.options().items():
            value = described.converted(getattr(self, name))
            object.__setattr__(self, name, value)
            described.check(name, value)

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

    @classmethod
    def or_default(cls: type[C], config: C | None, otherwise: str = "") -> C:
        """A config that a caller gave; None: the defaults.

        Args:
            otherwise: what the remedy ends in.

        Raises:
            RecipeError: it is no such config.
        """
        if config is not None and not isinstance(config, cls):
            problem = f"the config is of type {type(config).__name__}"
            raise RecipeError(problem, remedy=f"it must be of type {cls.__name__}{otherwise}")
        return cls() if config is None else config

    @classmethod
    def of(cls: type[C], config: C | None, options: Mapping[str, Any]) -> C:
        """A config (None: the defaults) with some options replaced by name.

        Raises:
            RecipeError: it is no such config, or an option does not exist or has no such value.
        """
        cls.or_default(config, "; or give its fields as options")
        if config is not None and not options:
            return config
        known = {} if config is None else {f.name: getattr(config, f.name) for f in fields(config)}
        return cls.from_values({**known, **options})
