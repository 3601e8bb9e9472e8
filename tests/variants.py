"""Configs one field away from those of the tiny models: the fields that a class reads."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any

import transformers
from tiny_models import ALL, Case, make

FIRST = list({(case.family, case.class_name): case for case in reversed(ALL)}.values())[::-1]
"""One case for each class."""

ONE = list({case.family: case for case in reversed(ALL)}.values())[::-1]
"""One case for each family."""


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


def fields_of(class_name: str) -> frozenset[str]:
    """Entries of a config that the module of a class reads, as `config.X`, or `getattr(config, "X", ...)`."""
    return _fields_read(getattr(transformers, class_name).__module__)


@functools.cache
def _fields_read(module: str) -> frozenset[str]:
    fields = set()
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        match node:
            case ast.Attribute(value=value, ctx=ast.Load()) if _is_config(value):
                fields.add(node.attr)
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(), *_]) if _is_config(value):
                fields.add(str(node.args[1].value))
    return frozenset(fields)


def try_make(case: Case) -> Any | None:
    """The model, or None where transformers has none of this config."""
    try:
        return make(case)
    except Exception:
        return None
