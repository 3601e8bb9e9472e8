"""What transformers fills into a config, read off the source of its class without running it.

Importing transformers takes longer than everything that looking at a model needs otherwise. Where the source does not
plainly say what becomes of an entry, nothing is guessed.
"""

from __future__ import annotations

import ast
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


@dataclass
class _Class:
    """A config class as its source says it.

    Attributes:
        kinds, values: annotation and default of each entry.
        filled: what stands for an entry that is None; None: nothing plain.
        refused: conditions under which a config is refused.
        unclear: entries of which the source says more than that.
        aliases: other names of entries.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    filled: dict[str, str | None] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    unclear: set[str] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)


def with_defaults(raw: Mapping[str, Any], names: Collection[str]) -> dict[str, Any] | None:
    """A config.json with the defaults of its class; None where `names` might be others in transformers' hands.

    Args:
        names: the entries that matter; all others need not be as transformers has them.
    """
    found = _class_of(str(raw.get("model_type"))) if "auto_map" not in raw else None
    if found is None or found.aliases & set(raw) or found.unclear & set(names):
        return None
    if not all(_fits(raw[name], kind) for name, kind in found.kinds.items() if name in raw):
        return None
    config = {**found.values, **raw}
    if any(isinstance(config.get(name), Mapping) or _of_all(name, name not in config) for name in names):
        return None
    try:
        for name, expression in found.filled.items():
            if config.get(name) is None and expression is None and name in names:
                return None
            if config.get(name) is None:
                config[name] = evaluate(expression, config)
        return None if any(evaluate(condition, config) for condition in found.refused) else config
    except ArchitectureError:
        return None


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
            case ast.Assign(targets=[ast.Name(id="attribute_map")], value=ast.Dict(keys=keys)):
                found.aliases.update(str(key.value) for key in keys if isinstance(key, ast.Constant))
            case ast.FunctionDef(name="__post_init__"):
                for inner in statement.body:
                    _after(found, inner)
            case ast.FunctionDef(name=name) if name.startswith("validate_"):
                found.refused += [_plain(part.test) for part in _checks(statement)]
            case ast.FunctionDef():
                found.unclear.update(_set_in(statement))
    return found if found.kinds else None


def _entry(found: _Class, name: str, statement: ast.AnnAssign) -> None:
    found.kinds[name] = ast.unparse(statement.annotation)
    try:
        found.values[name] = ast.literal_eval(statement.value) if statement.value is not None else None
    except ValueError:
        found.unclear.add(name)


def _after(found: _Class, statement: ast.stmt) -> None:
    """What a class does to its entries once they are set."""
    match statement:
        case ast.If(
            test=ast.Compare(ast.Attribute(attr=name), [ast.Is()], [ast.Constant(value=None)]),
            body=[*body],
            orelse=[],
        ) if set(_stored(statement)) == {name}:
            whole = body[0].value if len(body) == 1 and isinstance(body[0], ast.Assign) else None
        case ast.Assign(
            targets=[ast.Attribute(attr=name)],
            value=ast.IfExp(
                test=ast.Compare(
                    left=ast.Attribute(attr=asked), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]
                ),
                body=ast.Attribute(attr=same),
                orelse=whole,
            ),
        ) if name == asked == same:
            pass
        case _:
            found.unclear.update(_set_in(statement))
            return
    found.filled[name] = _plain(whole) if whole is not None and _is_plain(whole) else None


def _is_plain(value: ast.expr) -> bool:
    """Whether an expression is arithmetic over entries."""
    known = (ast.BinOp, ast.operator, ast.Attribute, ast.Name, ast.Constant, ast.expr_context)
    return all(isinstance(node, known) for node in ast.walk(value))


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


def _plain(expression: ast.expr) -> str:
    return ast.unparse(expression).replace("self.", "")
