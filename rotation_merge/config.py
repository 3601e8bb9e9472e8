"""One config dataclass for each job: the type and the `Field` of each of its fields describe an option.

Command line, recipe keys, errors and the tables of the documentation are made from them. Types are pydantic's, taken
strictly: literals, numbers with bounds, and the kinds of text that are named here.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from rotation_merge.errors import RecipeError, nearest, short

C = TypeVar("C", bound="Config")


class Kind(str):
    """A kind of value, beside a type: the noun phrase that follows "it must be"."""


WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", Path: "a file"}
"""Kinds of values by type, in words."""
FILE, MODEL, FOLDER, NEW_FILE = map(Kind, ("a file", "a model", "a folder", "a file to write"))

Count = Annotated[int, Ge(1)]
Length = Annotated[int, Ge(2)]
Share = Annotated[float, Ge(0), Le(1)]
Rate = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Numbers = Annotated[tuple[float, ...], MinLen(1), Kind("a tuple of numbers")]

Dtype = Literal["bfloat16", "float16", "float32", "float64"]
DTYPES = get_args(Dtype)
"""Types that weights may be stored in."""

BLOCK, WHOLE = "block", "whole"
"""Options of matching, which recipes may say anywhere. BLOCK: with filters and per-layer lists, resolved once a block.
WHOLE: one value for a whole donor."""
EACH = "each"
"""One value for a model; under it, or for all models under the recipe's parameters."""
DONOR_ONLY = "donor"
"""Only under one donor."""
RECIPE = "recipe"
"""Only under the recipe's parameters: holds for the merge."""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False, str_strip_whitespace=True, str_min_length=1)


def option(default: Any, help: str, **place: Any) -> Any:
    """The `Field` of an option; `place` is what `Option` takes beside its type and help."""
    return Field(default, description=help, json_schema_extra={"default": default, **place})


@dataclasses.dataclass(eq=False)
class Option:
    """One option of a job.

    Attributes:
        type: of its values.
        help: description in Markdown.
        key: its name in recipes and commands.
        recipe_key: its name in recipes, if another than in commands: a delegate has a parameter of the same name.
        command: whether the command line has it.
        scope: where recipes may have it; empty: nowhere.
        delegates: our own delegates that read it in recipes; empty: it holds whatever the delegate.
        default: its value where it is not given.
        choices: the only values that it may have; of a tuple, its words.
        words: literals that it may have beside values of its kind.
        kind: the type of all others, or a `Kind`.
        low, high: the range of a number.
    """

    type: Any
    help: str
    key: str = ""
    recipe_key: str = ""
    command: bool = True
    scope: str = ""
    delegates: tuple[str, ...] = ()
    default: Any = None

    def __post_init__(self) -> None:
        members = dict(_members(self.type))
        members.pop(NoneType, None)
        literals = tuple(word for member in members if get_origin(member) is Literal for word in get_args(member))
        plain_type = next((member for member in members if get_origin(member) is not Literal), None)
        facts = {fact.__class__: fact for fact in members.get(plain_type, ())}
        self.base = get_origin(plain_type) or plain_type or literals[0].__class__
        self.kind: Any = facts.get(Kind, self.base)
        self.choices: tuple[Any, ...] = literals if plain_type is None else ()
        self.words: tuple[Any, ...] = () if plain_type is None else literals
        if self.kind is tuple:
            self.choices = get_args(get_args(plain_type)[0])
        self.recipe_key = self.recipe_key or self.key
        self.above = Gt in facts
        self.low = facts[Gt].gt if self.above else facts[Ge].ge if Ge in facts else -math.inf
        self.high = facts[Le].le if Le in facts else math.inf

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
        """The allowed values: literals, and the kind of all others with its range."""
        if self.choices:
            return self.literals
        words = WORDS.get(self.kind, str(self.kind))
        if math.isfinite(self.high):
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

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type, config=_STRICT)

    def check(self, name: str, value: Any, noun: str = "option") -> None:
        """Check a value against the option's type.

        Args:
            noun: word for an option in the place where the user wrote it.

        Raises:
            RecipeError: the value is none that the option may have; names the option, its range and the nearest value.
        """
        number_for_bool = type(value) is int and bool in map(type, (*self.choices, *self.words))  # 1 equals True
        with suppress(ValidationError):
            if not number_for_bool:
                self._adapter.validate_python(value)
                return
        problem, word = f"{noun} '{name}' is {short(repr(value))}", value
        if self.kind is tuple and isinstance(value, tuple) and value:
            word = next(word for word in value if word not in self.choices)
            problem = f"{noun} '{name}' holds {short(repr(word))}"
        close = nearest(word, self.literals) if isinstance(word, str) else ""
        remedy = f"{close} {self.allowed}" if "did you mean" in close else f"it must be {self.allowed}"
        raise RecipeError(problem, remedy=remedy)

    def converted(self, value: Any) -> Any:
        """A value in the form that it is kept in.

        Paths become text (or a `Path`, where the type is that); lists, and a single word, become tuples.
        """
        if self.base is Path:
            return Path(value) if isinstance(value, str) and value.strip() else value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if self.base is not tuple:
            return value
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _members(type: Any, facts: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The members of a union, each with what `Annotated` adds to it."""
    if get_origin(type) is Annotated:
        yield from _members(type.__origin__, (*type.__metadata__, *facts))
    elif get_origin(type) in (Union, UnionType):
        for member in get_args(type):
            yield from _members(member)
    else:
        yield type, facts


@dataclass(frozen=True, config=ConfigDict(arbitrary_types_allowed=True, extra="forbid"))
class Config:
    """Base of the configs: values are checked when one is made."""

    @field_validator("*", mode="plain")
    @classmethod
    def _checked(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if (described := cls.options().get(name)) is None:
            return value
        value = described.converted(value)
        described.check(name, value)
        return value

    @classmethod
    @cache
    def options(cls) -> dict[str, Option]:
        """Its options by name."""
        types, described = get_type_hints(cls, include_extras=True), cls.__pydantic_fields__.items()  # type: ignore[attr-defined]
        return {
            name: Option(types[name], field.description, **{"key": name, **field.json_schema_extra})
            for name, field in described
            if field.description
        }

    @classmethod
    def of(cls: type[C], config: C | None, options: Mapping[str, Any] = MappingProxyType({})) -> C:
        """A config that a caller gave (None: the defaults), with some options replaced by name.

        Options of a config that is a field of it are known, too.

        Raises:
            RecipeError: it is no such config, or an option does not exist or has no such value.
        """
        if config is not None and not isinstance(config, cls):
            problem = f"the config is of type {type(config).__name__}"
            raise RecipeError(problem, remedy=f"it must be of type {cls.__name__}; or give its fields as options")
        start = cls() if config is None else config
        inner = {name: value for name, value in vars(start).items() if isinstance(value, Config)}
        known = [*vars(start), *(name for value in inner.values() for name in vars(value))]
        if (unknown := next((name for name in options if name not in known), None)) is not None:
            raise RecipeError(f"there is no option '{unknown}'", remedy=nearest(unknown, known))
        values = {name: value for name, value in options.items() if name in vars(start)}
        for name, value in inner.items():
            further = {option: options[option] for option in vars(value) if option in options}
            values[name] = value.of(values.get(name, value), further)
        return dataclasses.replace(start, **values) if options else start
