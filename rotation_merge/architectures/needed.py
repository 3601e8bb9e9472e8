"""Which entries of a config an architecture file asks for."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel

from rotation_merge.architectures.registry import families
from rotation_merge.architectures.schema import ArchitectureSpec, Expression

_TYING = frozenset({"tie_word_embeddings", "model_type"})
ALWAYS = _TYING | {"architectures"}
"""Entries that are read of every config."""

_EXPRESSIONS = (Expression, dict[str, Expression])


def needed(spec: ArchitectureSpec) -> frozenset[str]:
    """Names in the file's expressions, and in those that tell its family from others; more than config keys, as words
    and the file's own variables are names, too."""
    begins = {name for begin in spec.dropped for _, name, _, _ in string.Formatter().parse(begin) if name}
    apart = {name for other in families().values() if other.when is not None for name in _names(other.when)}
    return ALWAYS | begins | apart | {name for text in _expressions(spec) for name in _names(text)}


def needed_within(spec: ArchitectureSpec) -> dict[str, frozenset[str]]:
    """The same of the configs within the config, by the entries where they stand."""
    texts = [*_expressions(spec), *(other.when for other in families().values())]
    found = {module.config: _TYING for module in spec.modules.values() if module.config is not None}
    for module in spec.modules.values():
        if module.config is not None:
            found[module.config] |= {name for text in _expressions(module) for name in _names(text)}
    for holder, name in {pair for text in texts for pair in _reached(text)}:
        found[holder] = found.get(holder, _TYING) | {name}
    return found


def _expressions(part: Any) -> Iterator[Any]:
    """The expressions in a file, or in a part of it."""
    if isinstance(part, BaseModel):
        for name, field in type(part).model_fields.items():
            value = getattr(part, name)
            if field.annotation in _EXPRESSIONS:
                yield from value.values() if isinstance(value, dict) else [value]
            else:
                yield from _expressions(value)
    elif isinstance(part, dict | list):
        for entry in part.values() if isinstance(part, dict) else part:
            yield from _expressions(entry)


@cache
def _names(text: Any) -> frozenset[str]:
    if not isinstance(text, str):
        return frozenset()
    return frozenset(node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name))


@cache
def _reached(text: Any) -> frozenset[tuple[str, str]]:
    """Entries that an expression reads in others, each with the other's name."""
    nodes = ast.walk(ast.parse(text, mode="eval")) if isinstance(text, str) else ()
    return frozenset(
        (node.value.id, node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    )
