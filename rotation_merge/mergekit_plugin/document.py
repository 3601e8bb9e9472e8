"""A recipe as YAML text: its documents, whether they are ours, and the line and column of every entry and fault.

Asked of every recipe that mergekit reads, so nothing of mergekit's is imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import yaml

from rotation_merge.errors import RecipeError, RotationMergeError

METHOD = "rotation_merge"
"""The merge method's name."""

Path = tuple[str | int, ...]
"""Keys and indices that lead from a document's root to a value."""

Mark = tuple[int, int]
"""Line and column, from 1."""

MOST_VALUES = 100_000
"""Largest number of entries in a recipe; repetitions by aliases count."""

DEEPEST = 400
"""More levels than the parser reads: only an alias of itself has them."""


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

    def misspelt(self, path: Path) -> bool:
        """Whether a fault beside, or below, a missing key names it as the word that was meant."""
        place, remedy = dotted(path[:-1]), f"did you mean '{path[-1]}'?"
        return any(fault.remedy == remedy and fault.where.startswith(place) for fault in self.faults)

    @property
    def first(self) -> Fault | None:
        """The fault to report: a misspelt key before the missing key that it causes; else the first one."""
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
    entries = list(islice(_walk(root, ()), MOST_VALUES + 1))
    if len(entries) > MOST_VALUES or any(len(path) > DEEPEST for path, _, _ in entries):
        raise RecipeError(
            f"it holds more than {MOST_VALUES} values, or an alias of itself",
            where="recipe",
            remedy="write out what its aliases (&, *) repeat",
        )
    return [((), _mark(root), False), *entries]


def _walk(node: yaml.Node, path: Path) -> Iterator[tuple[Path, Mark, bool]]:
    children: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        children = [(str(key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(index, item, item) for index, item in enumerate(node.value)]
    steps = set()
    for step, marked, child in children:
        yield (*path, step), _mark(marked), step in steps
        steps.add(step)
        if len(path) < DEEPEST:
            yield from _walk(child, (*path, step))


def _mark(node: yaml.Node) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1


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
    if method == METHOD or not isinstance(method, str):
        return bool(method == METHOD)
    if misspelt and difflib.get_close_matches(method.lower(), [METHOD], cutoff=0.8):
        return True
    from rotation_merge.mergekit_plugin.delegates import OWN

    return method in OWN


def ours_in(text: str) -> list[bool]:
    """Whether each document of a recipe file is ours.

    Raises:
        RecipeError: the text is not YAML.
    """
    return [is_ours(document.value) for document in documents(text)]


_file: ContextVar[tuple[str, bool]] = ContextVar("rotation_merge_recipe_file", default=("", False))


@contextmanager
def read_from(path: str, checked: bool = False) -> Iterator[None]:
    """Remember within the block which file recipes are read from.

    Args:
        checked: whether all of its documents have been checked.
    """
    token = _file.set((path, checked))
    try:
        yield
    finally:
        _file.reset(token)


def recipe_file() -> tuple[str, bool]:
    """The file that recipes are read from (empty: none is known), and whether all of it has been checked."""
    return _file.get()
