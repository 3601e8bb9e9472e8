"""Small expressions over a model's config, as architecture files hold them.

Names are config keys (a missing key is None), `i` is the layer, `a.b` reaches into nested configs, and the usual
arithmetic, comparisons, `and`/`or`/`not`, `x if c else y`, indexing (nothing has no entries), slices, `len` and `str`
work: ``head_dim or hidden_size // heads``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache, reduce
from typing import Any

from rotation_merge.errors import ArchitectureError

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}
"""Operators and comparisons that expressions may have."""


def evaluate(expression: str | int | float | bool | None, config: Mapping[str, Any]) -> Any:
    """Value of an expression; numbers, booleans and None are their own values.

    Raises:
        ArchitectureError: the expression is malformed or does not fit the config; names both.
    """
    if not isinstance(expression, str):
        return expression
    try:
        return _value(_parsed(expression), config)
    except (SyntaxError, TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError) as error:
        raise ArchitectureError(
            f"the expression '{expression}' has no value for this config ({error})",
            remedy="check the config keys it names",
        ) from error


@cache
def _parsed(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def _value(node: ast.AST, config: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return config.get(node.id)
        case ast.Attribute():
            return (_value(node.value, config) or {}).get(node.attr)
        case ast.Subscript():
            whole, key = _value(node.value, config), _value(node.slice, config)
            return None if whole is None else whole.get(key) if isinstance(whole, Mapping) else whole[key]
        case ast.Slice():
            return slice(*(_value(end, config) if end else None for end in (node.lower, node.upper, node.step)))
        case ast.List() | ast.Tuple():
            return [_value(item, config) for item in node.elts]
        case ast.BinOp():
            return _OPERATORS[type(node.op)](_value(node.left, config), _value(node.right, config))
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_value(node.operand, config))
        case ast.Call(func=ast.Name(id="len"), args=[item], keywords=[]):
            return len(_value(item, config) or ())
        case ast.Call(func=ast.Name(id="str"), args=[item], keywords=[]):
            return str(_value(item, config))
        case ast.IfExp():
            return _value(node.body if _value(node.test, config) else node.orelse, config)
        case ast.BoolOp(op=ast.Or()):
            return reduce(lambda value, item: value or _value(item, config), node.values, False)
        case ast.BoolOp():
            return reduce(lambda value, item: value and _value(item, config), node.values, True)
        case ast.Compare():
            values = [_value(item, config) for item in (node.left, *node.comparators)]
            return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False))
    raise SyntaxError(f"{type(node).__name__} is not allowed")
