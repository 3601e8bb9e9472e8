"""What transformers fills into a config, read off the source of its class without running it.

Importing transformers takes longer than everything that looking at a model needs otherwise. Where the source does not
plainly say what becomes of an entry, nothing is guessed.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

from rotation_merge.architectures.expression import evaluate
from rotation_merge.errors import ArchitectureError

_BASES = ("PreTrainedConfig", "PretrainedConfig")

_PARTS = re.compile(r"_(text|vision)(_model)?$")
"""Ends of the kinds whose classes lie beside the class of the whole."""

_KINDS = {"NoneType": "None"}
"""Types that annotations write otherwise."""


@dataclass(frozen=True)
class _Step:
    """What becomes of entries once they are set.

    Attributes:
        test: an expression; None: in any case.
        name, value: the entry that becomes the value of an expression where the test holds.
        unclear: what the source says more of where the test holds.
    """

    test: str | None
    name: str = ""
    value: str = ""
    unclear: frozenset[str] = frozenset()


@dataclass
class _Class:
    """A config class as its source says it.

    Attributes:
        kinds, values: annotation and default of each entry.
        steps: what becomes of them, one after the other.
        refused: conditions under which a config is refused; None: nothing plain.
        unclear: entries of which the source says more than that.
        aliases: other names of entries, and the entries.
        given: words that it looks for beside its entries.
        own_rope, checks_rope: it reads tables of rotary positions in a way of its own; it refuses some.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[_Step] = field(default_factory=list)
    refused: list[str | None] = field(default_factory=list)
    unclear: set[str] = field(default_factory=set)
    aliases: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    own_rope: bool = False
    checks_rope: bool = False


def with_defaults(raw: Mapping[str, Any], names: Collection[str]) -> dict[str, Any] | None:
    """A config.json with the defaults of its class; None where `names` might be others in transformers' hands.

    Args:
        names: the entries that matter; all others need not be as transformers has them.
    """
    found = _class_of(str(raw.get("model_type"))) if "auto_map" not in raw else None
    if found is None or set(found.aliases) & set(raw) or not _plain_rope(raw, found, names):
        return None
    if not all(_fits(raw[name], kind) for name, kind in found.kinds.items() if name in raw):
        return None
    doubled = set(found.aliases) & set(found.values)  # whose defaults are those of other entries
    if not {found.aliases[name] for name in doubled} <= set(raw):
        return None
    config = {**{name: value for name, value in found.values.items() if name not in doubled}, **raw}
    tables = {name for name in names if isinstance(config.get(name), Mapping)} - {ROPE}
    if tables or any(_of_all(name, name not in config) for name in set(names) - {ROPE}):
        return None
    try:
        settled = _settled(found, raw, config, names)
        refused = settled is None or None in found.refused
        return None if refused or any(evaluate(condition, settled or {}) for condition in found.refused) else config
    except ArchitectureError:
        return None


def _settled(
    found: _Class, raw: Mapping[str, Any], config: dict[str, Any], names: Collection[str]
) -> dict[str, Any] | None:
    """Take a class's steps with a config, in place; with its variables. None where one of `names` stays unclear."""
    unclear = set(found.unclear)
    known = {**{_HAS + name: name in raw for name in found.given}, **{_GIVEN + n: raw.get(n) for n in found.given}}
    for step in found.steps:
        known.update(config, **{_KIND + name: type(value).__name__ for name, value in config.items()})
        used = {name for text in (step.test, step.value) for name in _names(text or "None")}
        if step.test is not None and not unclear & used and not evaluate(step.test, known):
            continue
        unclear |= step.unclear
        if step.name:
            unclear -= {step.name}
            unclear |= {step.name} if unclear & used else set()
            (known if step.name.startswith(_OWN) else config)[step.name] = evaluate(step.value, known)
    return None if unclear & set(names) else {**known, **config}


ROPE = "rope_parameters"
_ROPE_WORDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def _plain_rope(raw: Mapping[str, Any], found: _Class, names: Collection[str]) -> bool:
    """Whether the table of rotary positions, as far as it matters, is that of config.json."""
    if ROPE not in names and not found.checks_rope:
        return True
    table = raw.get(ROPE) or {}
    plain = isinstance(table, Mapping) and set(table) <= _ROPE_WORDS and not raw.get("rope_scaling")
    usual = plain and {table.get(word, "default") for word in ("rope_type", "type")} == {"default"}
    return usual and (ROPE not in names or not found.own_rope or "partial_rotary_factor" in table)


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value is of an annotated type, as far as the annotation says it plainly."""
    kind = type(value).__name__
    return _KINDS.get(kind, kind) in re.findall(r"[\w']+", annotation) or f"'{value}'" in annotation


def _folder() -> str | None:
    found = find_spec("transformers")
    return os.path.dirname(found.origin) if found is not None and found.origin else None


@cache
def _base() -> str:
    """The source of the class that all configs extend."""
    with open(os.path.join(_folder() or "", "configuration_utils.py"), encoding="utf-8") as file:
        return re.split(r"^class Pre[tT]rainedConfig", file.read(), maxsplit=1, flags=re.MULTILINE)[-1]


@cache
def _of_all(name: str, absent: bool) -> bool:
    """Whether the class that all configs extend sets an entry, or has it where a config does not."""
    words = rf"\bself\.{name} = |^    {name}: " if absent else rf"\bself\.{name} = "
    return re.search(words, _base(), re.MULTILINE) is not None


@cache
def _class_of(model_type: str) -> _Class | None:
    """The class of a kind of model, where it lies in the folder of that name and extends nothing but the base."""
    stem = _PARTS.sub("", model_type.replace("-", "_"))
    path = os.path.join(_folder() or "", "models", stem, f"configuration_{stem}.py")
    if not stem.isidentifier() or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _model_type(node) == model_type:
            return _read(node) if [ast.unparse(base) for base in node.bases] in [[base] for base in _BASES] else None
    return None


def _model_type(node: ast.ClassDef) -> str | None:
    for statement in node.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="model_type")], value=ast.Constant(value=str(found))):
                return found
    return None


def _read(node: ast.ClassDef) -> _Class | None:
    found = _Class()
    for statement in node.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name)):
                _entry(found, name, statement)
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict() as names):
                found.aliases.update(ast.literal_eval(names))
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name="__post_init__"):
                reader = _Reader(found)
                for inner in statement.body:
                    reader.read(inner)
            case ast.FunctionDef(name="convert_rope_params_to_dict"):
                found.own_rope = True
            case ast.FunctionDef(name="validate_rope"):
                found.checks_rope = True
            case ast.FunctionDef(name=name) if name.startswith("validate_"):
                found.refused += [_Reader(found).plain(part.test) for part in _checks(statement)]
            case ast.FunctionDef():
                found.unclear.update(_set_in(statement))
    return found if found.kinds else None


def _entry(found: _Class, name: str, statement: ast.AnnAssign) -> None:
    found.kinds[name] = ast.unparse(statement.annotation)
    value = None if statement.value is None else _Reader(found).plain(statement.value)
    try:
        found.values[name] = ast.literal_eval(statement.value) if statement.value is not None else None
    except ValueError:
        if value is None or _names(value):
            found.unclear.add(name)
        else:
            found.values[name] = evaluate(value, {})


_OWN, _HAS, _GIVEN, _KIND = "_own_", "_has_", "_given_", "_kind_"
"""How the names of a function's variables, of words that are there, of their values and of entries' types begin."""


class _Unclear(Exception):
    """More than arithmetic over entries."""


class _Reader(ast.NodeTransformer):
    """Reads what a class does to its entries once they are set, statement by statement."""

    def __init__(self, found: _Class) -> None:
        self.found, self.known, self.own = found, set(found.kinds), set[str]()

    def read(self, statement: ast.stmt) -> None:
        """A statement as steps; one that is more than arithmetic over entries makes what it sets unclear."""
        step = self._step(statement)
        if step is None:
            inner = statement.test if isinstance(statement, ast.If) else None
            test = self.plain(inner) if inner is not None else None
            step = _Step(test, unclear=frozenset(_set_in(statement)))
            self.own -= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.found.steps.append(step)

    def _step(self, statement: ast.stmt, test: str | None = None) -> _Step | None:
        match statement:
            case ast.If(test=condition, body=[ast.Assign() as inner], orelse=[]) if test is None:
                asked = self.plain(condition)
                return None if asked is None else self._step(inner, asked)
            case ast.Expr(
                ast.Call(ast.Attribute(ast.Name(id="kwargs"), "setdefault"), [ast.Constant(value=str(name)), value])
            ):
                whole = self.plain(value)
                if whole is None or name in self.known:
                    return None
                self.found.given.add(name)
                return _Step(None, name, f"{_GIVEN}{name} if {_HAS}{name} else {whole}")
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                whole = self.plain(value)
                self.known.add(name)
            case ast.Assign(targets=[ast.Name(id=own)], value=value) if test is None:
                whole, name = self.plain(value), _OWN + own
                self.own |= {own} if whole is not None else set()
            case _:
                return None
        return None if whole is None else _Step(test, name, whole)

    def plain(self, expression: ast.expr) -> str | None:
        """An expression over entries and variables, as `evaluate` reads it; None for any other."""
        try:
            return ast.unparse(self.visit(copy.deepcopy(expression)))
        except _Unclear:
            return None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, _ARITHMETIC):
            raise _Unclear
        return super().generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.known):
            raise _Unclear
        return ast.Name(node.attr, ast.Load())

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self.own:
            raise _Unclear
        return ast.Name(_OWN + node.id, ast.Load())

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(ast.Constant(value=str(name)), [ast.In()], [ast.Name(id="kwargs")]):
                return self._given(name, _HAS)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(ast.Name(id="isinstance"), [ast.Attribute() as entry, ast.Name(id=kind)], []):
                name = ast.Name(_KIND + ast.unparse(self.visit(entry)), ast.Load())
                return ast.Compare(name, [ast.Eq()], [ast.Constant(kind)])
            case ast.Call(
                ast.Attribute(ast.Name(id="kwargs"), "pop" | "get"), [ast.Constant(value=str(name)), *rest], []
            ):
                other = self.visit(rest[0]) if rest else ast.Constant(None)
                return ast.IfExp(self._given(name, _HAS), self._given(name, _GIVEN), other)
        raise _Unclear

    def _given(self, name: str, what: str) -> ast.Name:
        """A word beside the entries: whether it is there, or its value."""
        if name in self.known:
            raise _Unclear
        self.found.given.add(name)
        return ast.Name(what + name, ast.Load())


_ARITHMETIC = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant, ast.List, ast.Tuple),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)


@cache
def _names(expression: str) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name))


def _stored(part: ast.AST) -> Iterator[str]:
    """Entries that a part of a class sets."""
    for node in ast.walk(part):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _set_in(part: ast.AST) -> Iterator[str]:
    """Those, and all that it mentions as words, which may be set by way of a function."""
    yield from _stored(part)
    for node in ast.walk(part):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _checks(function: ast.FunctionDef) -> Iterator[ast.If]:
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any(isinstance(inner, ast.Raise) for inner in node.body):
            yield node
