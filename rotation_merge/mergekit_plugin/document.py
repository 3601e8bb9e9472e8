"""A recipe as YAML text: its documents, whether they are ours, and the line and column of every fault."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from rotation_merge.errors import RecipeError, RotationMergeError, nearest_path, short
from rotation_merge.mergekit_plugin import METHOD

if TYPE_CHECKING:
    from mergekit.common import ModelReference

Path = tuple[str | int, ...]
"""Keys and indices that lead from a document's root to a value."""

Finding = tuple[Path, str, str]
"""Where something is wrong, what, and the remedy."""

MOST_VALUES, DEEPEST = 100_000, 100
"""Largest number of entries in a recipe, and of levels; repetitions by aliases count."""


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """A value and everything in it, with paths: of a document, or of mergekit's form of one."""
    yield path, value
    if isinstance(value, BaseModel | Mapping):
        entries: Iterable[tuple[Any, Any]] = dict(value).items()
    else:
        entries = enumerate(value) if isinstance(value, list | tuple) else ()
    for step, item in entries:
        yield from walk(item, (*path, step))


def with_models(value: Any, stand_in: Callable[[ModelReference], ModelReference]) -> Any:
    """mergekit's form of a recipe, or a part of it, with other models in their places."""
    from mergekit.common import ModelReference

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
    """One recipe.

    Attributes:
        marks: line and column, from 1, of each entry of its text by path; empty where it was made in Python.
        config: mergekit's validated form of the value, once read.
    """

    value: Any
    number: int = 1
    marks: Mapping[Path, tuple[int, int]] = field(default_factory=dict, repr=False)
    faults: list[Fault] = field(default_factory=list)
    config: Any = field(default=None, repr=False)

    def fault(self, path: Path, problem: str, remedy: str = "", error: bool = True) -> None:
        """Note a fault at a path, or at the nearest part of it that the text has."""
        parts = (path[:length] for length in range(len(path), -1, -1))
        line, column = next((self.marks[part] for part in parts if part in self.marks), (0, 0))
        fault = Fault(problem, dotted(path), remedy, line, column, self.number, error)
        if fault not in self.faults:
            self.faults.append(fault)

    def raised(self, path: Path, error: RotationMergeError) -> None:
        """Record an exception as a fault; the model that it names comes first."""
        place = f"{error.where}: " if error.where else ""
        self.fault(path, f"{place}{error.what}", error.remedy or "")

    def collect(self, findings: Iterable[Finding], ignored: bool = False) -> None:
        """Note what rules find.

        Args:
            ignored: whether mergekit passes over it; then only what is misspelt is an error.
        """
        for path, problem, remedy in findings:
            self.fault(path, problem, remedy, error=not ignored or "did you mean" in remedy)

    @property
    def first(self) -> Fault | None:
        """The fault to report: rules look for misspelt words before what these may cause."""
        return next((fault for fault in self.faults if fault.error), None)

    def raise_first(self) -> None:
        """Raise the fault to mend first, if there is any."""
        if self.first is not None:
            raise RecipeError(self.first.what, where=self.first.where or "recipe", remedy=self.first.remedy)


def dotted(path: Path) -> str:
    """A path in the form of error messages: ``models[0].parameters.weight``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def read_recipe(path: str) -> str:
    """A recipe's text.

    Raises:
        RecipeError: the file cannot be read as text.
    """
    try:
        return File(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        absent, remedy = isinstance(error, FileNotFoundError), "name a recipe, a YAML file"
        problem = "no such file" if absent else f"cannot be read ({short(error)})"
        remedy = nearest_path(path, remedy, of=os.path.isfile) if absent else remedy
        raise RecipeError(problem, where=path, remedy=remedy) from error


def documents(text: str) -> list[Document]:
    """Parse a recipe; mergekit-multi's hold several documents.

    Raises:
        RecipeError: the text is not YAML, or holds no mapping, or too much; names line and column.
    """
    parsed: list[Document] = []
    try:
        for root in filter(None, yaml.compose_all(text, Loader=yaml.SafeLoader)):
            marks, twice = _marked(root)
            if (value := yaml.SafeLoader("").construct_document(root)) is None:
                continue
            parsed.append(document := Document(value, len(parsed) + 1, marks))
            document.collect((path, "the key occurs twice; the last one counts", "remove one") for path in twice)
            if not isinstance(value, dict):
                problem = f"a recipe is a mapping of keys, this is a {type(value).__name__}"
                document.fault((), problem, "start with merge_method:")
    except RecursionError as error:
        raise RecipeError("it is nested too deeply", where="recipe", remedy="write it with fewer levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "recipe"
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"not valid YAML: {problem}", where=place, remedy="check indentation and quotes") from error
    if not parsed:
        raise RecipeError("the recipe is empty", remedy="see the recipes directory for examples")
    return parsed


def recipes_in(path: str, text: str, chosen: Callable[[Any], bool]) -> list[Document]:
    """The documents of a recipe file that are ours.

    Args:
        chosen: says of a document's value whether it is.

    Raises:
        RecipeError: the text is not YAML; names file, line and column.
    """
    try:
        return [document for document in documents(text) if chosen(document.value)]
    except RecipeError as error:
        raise RecipeError(error.what, where=f"{path}, {error.where}", remedy=error.remedy) from error


def raise_first(path: str, recipes: Iterable[Document]) -> None:
    """Raise the first fault of a file's documents, with its line and column, and the number of others."""
    recipes = list(recipes)
    count = sum(fault.error for document in recipes for fault in document.faults)
    for fault in (document.first for document in recipes if document.first):
        more = f" ({count - 1} more: rotation-merge check {path})" if count > 1 else ""
        place = ", ".join(filter(None, (path, f"line {fault.line}, column {fault.column}", fault.where)))
        raise RecipeError(fault.what, where=place, remedy=f"{fault.remedy}{more}")


def may_be(text: str, chosen: Callable[[Any], bool]) -> bool:
    """Whether a document of a recipe is ours; where that is no YAML, its lines decide. `chosen` as of `recipes_in`."""
    try:
        return any(chosen(document.value) for document in documents(text))
    except RecipeError:
        return chosen(dict(re.findall(r"""^['"]?(\w+)['"]?\s*:\s*['"]?([\w-]+)""", text, re.M)))


def _marked(root: yaml.Node) -> tuple[dict[Path, tuple[int, int]], list[Path]]:
    """Where each entry of a document begins, by path, and the keys that stand in a mapping twice.

    What a merge key (`<<`) brings in counts as the mapping's own.

    Raises:
        RecipeError: there are too many entries, or levels, once aliases are written out.
    """
    marks: dict[Path, tuple[int, int]] = {(): (root.start_mark.line + 1, root.start_mark.column + 1)}
    twice: list[Path] = []
    waiting: list[tuple[Path, yaml.Node]] = [((), root)]
    count = 0
    while waiting:
        path, node = waiting.pop()
        entries = _entries(node)
        twice += [(*path, step) for step, times in Counter(step for step, _, _ in entries).items() if times > 1]
        for step, mark, child in entries:
            place = path if step == "<<" else (*path, step)
            marks.setdefault(place, (mark.line + 1, mark.column + 1))
            waiting.append((place, child))
        count += len(entries)
        if count > MOST_VALUES or len(path) > DEEPEST:
            problem = f"it holds more than {MOST_VALUES} values or {DEEPEST} levels"
            raise RecipeError(problem, where="recipe", remedy="write out what its aliases (&, *) repeat")
    return marks, twice


def _entries(node: yaml.Node) -> list[tuple[str | int, yaml.Mark, yaml.Node]]:
    """Keys or indices of a node's entries, where each begins, and its value."""
    if isinstance(node, yaml.MappingNode):
        return [(str(key.value), key.start_mark, value) for key, value in node.value]
    entries = node.value if isinstance(node, yaml.SequenceNode) else []
    return [(index, entry.start_mark, entry) for index, entry in enumerate(entries)]


def aligns(value: Any, misspelt: bool = True) -> bool:
    """Whether a recipe names our method; nothing of mergekit is imported.

    Args:
        misspelt: whether its name counts also misspelt, or under a misspelt key.
    """
    method = value.get("merge_method", "") if isinstance(value, dict) else None
    if not isinstance(method, str):
        return False
    if not method:
        return misspelt and METHOD in value.values()
    return method == METHOD or bool(misspelt and difflib.get_close_matches(method.lower(), [METHOD], cutoff=0.8))


def is_ours(value: Any, misspelt: bool = True) -> bool:
    """Whether a recipe names our method, or an average of our own; `misspelt` as of `aligns`."""
    if aligns(value, misspelt):
        return True
    method = value.get("merge_method") if isinstance(value, dict) else None
    if not isinstance(method, str):
        return False
    from mergekit.merge_methods import registry

    if method in getattr(registry, "_METHODS", (method,)):  # recipes of mergekit's own need nothing of ours
        return False
    from rotation_merge.mergekit_plugin.delegates import OWN

    return method in OWN
