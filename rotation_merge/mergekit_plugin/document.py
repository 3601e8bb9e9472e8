"""A recipe as YAML text: its documents, whether they are ours, and the line and column of every entry and fault."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import yaml
from mergekit.common import ModelReference
from pydantic import BaseModel

from rotation_merge.errors import RecipeError, RotationMergeError

METHOD = "rotation_merge"
"""The merge method's name."""

Path = tuple[str | int, ...]
"""Keys and indices that lead from a document's root to a value."""

Finding = tuple[Path, str, str]
"""Where something is wrong, what, and the remedy."""

Mark = tuple[int, int]
"""Line and column, from 1."""

MOST_VALUES = 100_000
"""Largest number of entries in a recipe; repetitions by aliases count."""

DEEPEST = 400
"""More levels than the parser reads: only an alias of itself has them."""

MULTI_KEYS = ("name",)
"""Keys that mergekit-multi adds to a document."""


def items(value: Any) -> list[tuple[Any, Any]]:
    """Keys, fields or indices, and their values."""
    if isinstance(value, BaseModel | Mapping):
        return list(dict(value).items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else []


def at(value: Any, path: Path) -> Any:
    """The value at a path; None if there is none."""
    for step in path:
        value = dict(items(value)).get(step)
    return value


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A value and everything in it, with paths: of a document, or of mergekit's form of one."""
    yield path, value
    for step, item in items(value):
        yield from walk(item, (*path, step))


def with_models(value: Any, stand_in: Callable[[ModelReference], ModelReference]) -> Any:
    """mergekit's form of a recipe, or a part of it, with other models in their places."""
    if isinstance(value, ModelReference):
        return stand_in(value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: with_models(item, stand_in) for name, item in value})
    if isinstance(value, dict):
        return {key: with_models(item, stand_in) for key, item in value.items()}
    return [with_models(item, stand_in) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Fault:
    """Something wrong with a recipe.

    Attributes:
        what, where, remedy: as in the package's exceptions.
        line, column: position in the YAML text, from 1; 0 where it has none.
        document: number of the YAML document, from 1.
        error: False for a note that does not stop the merge.
    """

    what: str
    where: str
    remedy: str
    line: int = 0
    column: int = 0
    document: int = 1
    error: bool = True

    def __str__(self) -> str:
        place = f"{self.line}:{self.column}: " if self.line else ""
        place_name = f"{self.where}: " if self.where else ""
        return f"{place}{place_name}{self.what}" + (f"; {self.remedy}" if self.remedy else "")


@dataclass
class Document:
    """One recipe: its value, and of a text a mark for each key and item.

    Attributes:
        config: mergekit's validated form of the value, once read.
    """

    value: Any
    number: int = 1
    marks: dict[Path, Mark] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    config: Any = field(default=None, repr=False)

    def fault(self, path: Path, problem: str, remedy: str = "", error: bool = True) -> None:
        """Note a fault at a path, or at the nearest part of it that the text has."""
        fault = Fault(problem, dotted(path), remedy, *self._position(path), self.number, error)
        if fault not in self.faults:
            self.faults.append(fault)

    def raised(self, path: Path, error: RotationMergeError) -> None:
        """Record an exception as a fault; the model that it names comes first."""
        place = f"{error.where}: " if error.where else ""
        self.fault(path, f"{place}{error.what}", error.remedy or "")

    def refused(self, path: Path) -> bool:
        """Whether a fault has been recorded at a path."""
        return any(fault.error and fault.where == dotted(path) for fault in self.faults)

    def collect(self, *rules: Iterable[Finding]) -> None:
        """Note what rules find."""
        for rule in rules:
            for finding in rule:
                self.fault(*finding)

    @property
    def misspelt(self) -> bool:
        """Whether a word is misspelt, so that another may only seem to be missing."""
        return any("did you mean" in fault.remedy for fault in self.faults)

    @property
    def first(self) -> Fault | None:
        """The fault to report: a misspelt word before what it causes; else the first one."""
        errors = [fault for fault in self.faults if fault.error]
        return min(errors, key=lambda fault: "did you mean" not in fault.remedy, default=None)

    def raise_first(self) -> None:
        """
        Raises:
            RecipeError: the fault to mend first, if there is any.
        """
        if self.first is not None:
            raise RecipeError(self.first.what, where=self.first.where or "recipe", remedy=self.first.remedy)

    def _position(self, path: Path) -> Mark:
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1) if self.marks else (0, 0))


def dotted(path: Path) -> str:
    """A path in the form of error messages: ``models[0].parameters.weight``."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text


def documents(text: str) -> list[Document]:
    """Parse a recipe; mergekit-multi's hold several documents.

    Raises:
        RecipeError: the text is not YAML, or holds no mapping; names line and column.
    """
    try:
        nodes = [node for node in yaml.compose_all(text, Loader=yaml.SafeLoader) if node is not None]
        entries = [_entries(node) for node in nodes]  # first, as values are made by rewriting nodes (`<<`)
        values = [yaml.SafeLoader("").construct_document(node) for node in nodes]
    except RecursionError as error:
        raise RecipeError("it is nested too deeply", where="recipe", remedy="write it with fewer levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "recipe"
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"not valid YAML: {problem}", where=place, remedy="check indentation and quotes") from error
    complete = [pair for pair in zip(values, entries, strict=True) if pair[0] is not None]
    if not complete:
        raise RecipeError("the recipe is empty", remedy="see the recipes directory for examples")
    return [_document(number, *pair) for number, pair in enumerate(complete, 1)]


def _document(number: int, value: Any, entries: list[tuple[Path, Mark, bool]]) -> Document:
    result = Document(value, number)
    for path, mark, twice in entries:
        result.marks[path] = mark
        if twice:
            result.fault(path, "the key occurs twice; the last one counts", "remove one")
    if not isinstance(value, dict):
        result.fault((), f"a recipe is a mapping of keys, this is a {type(value).__name__}", "start with merge_method:")
    return result


def _entries(root: yaml.Node) -> list[tuple[Path, Mark, bool]]:
    """Every path of a document, its mark, and whether its key is a duplicate.

    Raises:
        RecipeError: aliases expand to more values than memory holds, or contain themselves.
    """
    entries = list(islice(_walk(root), MOST_VALUES + 1))
    if len(entries) > MOST_VALUES or any(len(path) > DEEPEST for path, _, _ in entries):
        problem = f"it holds more than {MOST_VALUES} values, or an alias of itself"
        raise RecipeError(problem, where="recipe", remedy="write out what its aliases (&, *) repeat")
    return entries


def _walk(
    node: yaml.Node, path: Path = (), key: yaml.Node | None = None, twice: bool = False
) -> Iterator[tuple[Path, Mark, bool]]:
    mark = (key or node).start_mark
    yield path, (mark.line + 1, mark.column + 1), twice
    children: list[tuple[str | int, yaml.Node | None, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(name.value), name, value) for name, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, None, item) for index, item in enumerate(node.value)]
    steps = set()
    for step, name, child in children if len(path) <= DEEPEST else ():
        yield from _walk(child, (*path, step), name, step in steps)
        steps.add(step)


def is_ours(value: Any, misspelt: bool = True) -> bool:
    """Whether a recipe names our method, or an average of our own.

    Args:
        misspelt: whether our method's name counts also misspelt, or under a misspelt key.
    """
    if not isinstance(value, dict):
        return False
    if "merge_method" not in value:
        return misspelt and METHOD in [word for word in value.values() if isinstance(word, str)]
    method = value["merge_method"]
    if not isinstance(method, str) or method == METHOD:
        return bool(method == METHOD)
    if misspelt and difflib.get_close_matches(method.lower(), [METHOD], cutoff=0.8):
        return True
    from mergekit.merge_methods import registry

    if method in getattr(registry, "_METHODS", (method,)):  # recipes of mergekit's own need nothing of ours
        return False
    from rotation_merge.mergekit_plugin.delegates import OWN

    return method in OWN
