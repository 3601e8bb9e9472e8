"""A recipe as YAML text: its documents, and the line and column of every entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from rotation_merge.errors import RecipeError, RotationMergeError

Path = tuple[str | int, ...]
"""Keys and indices that lead from a document's root to a value."""
Step = tuple[Path, tuple[int, int], bool]
"""A path, its mark, and whether its key stands there a second time."""


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
        config: mergekit's validated form of the value, once checked.
    """

    value: Any
    number: int = 1
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    config: Any = field(default=None, repr=False)

    def fault(self, path: Path, problem: str, remedy: str = "", error: bool = True) -> None:
        """Note a fault at a path, or at the nearest part of it that the text has."""
        fault = Fault(problem, dotted(path), remedy, *self.position(path), self.number, error)
        if fault not in self.faults:
            self.faults.append(fault)

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

    def raised(self, path: Path, error: RotationMergeError) -> None:
        """Record an exception as a fault; the model that it names comes first."""
        place = f"{error.where}: " if error.where else ""
        self.fault(path, f"{place}{error.what}", error.remedy or "")

    def position(self, path: Path) -> tuple[int, int]:
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
        for node in nodes:
            _check_size(node)
        walked = [list(_walk(node, ())) for node in nodes]  # first, as values are made by rewriting nodes (`<<`)
        values = [yaml.SafeLoader("").construct_document(node) for node in nodes]
    except RecursionError as error:
        raise RecipeError("it is nested too deeply", where="recipe", remedy="write it with fewer levels") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "recipe"
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"not valid YAML: {problem}", where=place, remedy="check indentation and quotes") from error
    complete = [entry for entry in zip(nodes, walked, values, strict=True) if entry[2] is not None]
    if not complete:
        raise RecipeError("the recipe is empty", remedy="see the recipes directory for examples")
    return [_document(*entry, i) for i, entry in enumerate(complete, 1)]


MOST_VALUES = 100_000
"""Largest number of keys and values in a recipe; repetitions by aliases count."""


def _check_size(root: yaml.Node) -> None:
    """Refuse aliases that expand to more values than memory holds, or contain themselves.

    Raises:
        RecipeError: the recipe is too large.
    """
    sizes: dict[int, int] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        below = [x for pair in pairs for x in pair] or (node.value if isinstance(node, yaml.SequenceNode) else [])
        first = id(node) not in sizes
        sizes.setdefault(id(node), MOST_VALUES + 1)
        waiting = [x for x in below if id(x) not in sizes]
        if first and waiting:
            stack += waiting
            continue
        stack.pop()
        sizes[id(node)] = 1 + sum(min(sizes[id(x)], MOST_VALUES + 1) for x in below)
    if sizes[id(root)] > MOST_VALUES:
        raise RecipeError(
            f"it holds more than {MOST_VALUES} values, or an alias of itself",
            where="recipe",
            remedy="write out what its aliases (&, *) repeat",
        )


def _document(node: yaml.Node, walked: list[Step], value: Any, number: int) -> Document:
    result = Document(value, number)
    result.marks[()] = _mark(node)
    for path, mark, twice in walked:
        if twice:
            line, column = mark
            result.faults.append(
                Fault("the key occurs twice; the last one counts", dotted(path), "remove one", line, column, number)
            )
        result.marks[path] = mark
    if not isinstance(value, dict):
        result.fault((), f"a recipe is a mapping of keys, this is a {type(value).__name__}", "start with merge_method:")
    return result


def _walk(node: yaml.Node, path: Path) -> Iterator[Step]:
    """Every path below a node, its mark, and whether its key is a duplicate."""
    if isinstance(node, yaml.MappingNode):
        paths = set()
        for key, value in node.value:
            below = (*path, str(key.value))
            yield below, _mark(key), below in paths
            paths.add(below)
            yield from _walk(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), _mark(item), False
            yield from _walk(item, (*path, index))


def _mark(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
