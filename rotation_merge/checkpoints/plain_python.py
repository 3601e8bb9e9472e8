"""A plain part of Python, run on values without importing anything: what a config class does with its entries.

Arithmetic, comparisons, lists, tables, conditions, loops and the class's own methods are run as they stand. Whatever is
more than that is not guessed at: what it sets becomes unclear.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST = 100_000
"""Entries of a list, or steps of a loop, beyond which nothing is run."""


class Unclear(Exception):
    """The source says more than can be run here."""


class Refused(Exception):
    """The source refuses the values, or it cannot be told what becomes of any of them."""


class Nested(dict[str, Any]):
    """A config in a config, once it is made."""


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv},
    **{ast.Mod: operator.mod, ast.Mult: operator.mul},
}
_COMPARE: dict[type, Callable[[Any, Any], bool]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b},
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_CALLS: dict[str, Callable[..., Any]] = {
    **{"len": len, "list": list, "tuple": tuple, "set": set, "dict": dict, "sorted": sorted, "reversed": reversed},
    **{"min": min, "max": max, "sum": sum, "abs": abs, "round": round, "any": any, "all": all},
    **{"int": int, "float": float, "bool": bool, "str": str, "enumerate": enumerate, "zip": zip},
}
_KINDS: dict[str, Callable[[Any], bool]] = {
    **{"str": lambda v: isinstance(v, str), "int": lambda v: isinstance(v, int)},
    **{"float": lambda v: isinstance(v, float), "bool": lambda v: isinstance(v, bool)},
    **{"list": lambda v: isinstance(v, list), "tuple": lambda v: isinstance(v, tuple)},
    "dict": lambda v: isinstance(v, dict) and not isinstance(v, Nested),
    **{name: lambda v: isinstance(v, Nested) for name in ("PreTrainedConfig", "PretrainedConfig")},
}
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset({"split", "startswith", "endswith", "lower", "upper", "replace", "strip", "join"}),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
    dict: frozenset({"get", "keys", "values", "items", "copy"}),
}
"""Methods of values, none of which changes them."""
_SILENT = ("logger", "warnings")


@dataclass
class Scope:
    """What a function of a class sees.

    Attributes:
        entries: of the object, by name.
        given: what it was given beside its entries (`kwargs`).
        aliases: other names of entries.
        methods: of the class, by name.
        settle: what the class it extends does with an object (`super().__post_init__`).
        unknown: whether an object may have an entry that is not among them.
        unclear: entries whose values are not known.
        local: variables of the function that runs.
    """

    entries: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    methods: Mapping[str, ast.FunctionDef] = field(default_factory=dict)
    settle: Callable[[], None] = lambda: None
    unknown: Callable[[str], bool] = lambda _: False
    unclear: set[str] = field(default_factory=set)
    local: dict[str, Any] = field(default_factory=dict)

    def run(self, function: ast.FunctionDef, local: Mapping[str, Any] | None = None) -> Any:
        """Run a function, with its variables; what it returns.

        Raises:
            Refused: it raises, an operation in it fails, or what it does cannot be told.
        """
        before, self.local = self.local, dict(local or {})
        try:
            self._body(function.body)
        except _Returned as found:
            return found.value
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise Refused from error
        finally:
            self.local = before
        return None

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            before = self.local
            try:
                self._statement(statement)
            except Unclear:
                self.local = before
                self._lose(statement)

    def _lose(self, statement: ast.stmt) -> None:
        """What a statement that cannot be run might set is unclear from here on."""
        if isinstance(statement, ast.Return) or sets_more(statement):
            raise Refused
        self.unclear |= {self.aliases.get(name, name) for name in set_in(statement)}
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.local.pop(node.id, None)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                found = self.value(value)
                for target in targets:
                    self._assign(target, found)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value))
            case ast.If(test=test, body=body, orelse=orelse):
                self._body(body if self.value(test) else orelse)
            case ast.For(target=target, iter=values, body=body, orelse=[]) if not _jumps(statement):
                for value in _few(self.value(values)):
                    self._assign(target, value)
                    self._body(body)
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(id=name)))) if name in _SILENT:
                pass
            case ast.Expr(value):
                self.value(value)
            case ast.Return(value):
                raise _Returned(None if value is None else self.value(value))
            case ast.Raise():
                raise Refused
            case ast.Pass():
                pass
            case _:
                raise Unclear

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.local[name] = value
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                name = self.aliases.get(name, name)
                self.entries[name] = value
                self.unclear.discard(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                values = list(value)
                if len(values) != len(parts):
                    raise Refused
                for part, own in zip(parts, values, strict=True):
                    self._assign(part, own)
            case ast.Subscript(value=holder, slice=ast.expr() as index) if not isinstance(index, ast.Slice):
                self.value(holder)[self.value(index)] = value
            case _:
                raise Unclear

    def value(self, node: ast.expr) -> Any:
        """The value of an expression.

        Raises:
            Unclear: it is more than can be told here.
        """
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(id=name):
                return self._variable(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._entry(name)
            case ast.Attribute(value=holder, attr=name):
                table = self.value(holder)
                return table[name] if isinstance(table, Nested) and name in table else _unclear()
            case ast.NamedExpr(target=target, value=value):
                found = self.value(value)
                self._assign(target, found)
                return found
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.value(test) else orelse)
            case ast.BoolOp(op=op, values=values):
                return self._either(isinstance(op, ast.Or), values)
            case ast.Call():
                return self._call(node)
            case _:
                return self._combined(node)

    def _combined(self, node: ast.expr) -> Any:
        match node:
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](self.value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _limited(_BINARY[type(op)], self.value(left), self.value(right))
            case ast.Compare(left=left, ops=ops, comparators=others):
                values = [self.value(one) for one in (left, *others)]
                known = all(type(op) in _COMPARE for op in ops)
                pairs = zip(ops, values, values[1:], strict=False)
                return all(_COMPARE[type(op)](a, b) for op, a, b in pairs) if known else _unclear()
            case ast.List(elts=elts):
                return [self.value(one) for one in elts]
            case ast.Tuple(elts=elts):
                return tuple(self.value(one) for one in elts)
            case ast.Set(elts=elts):
                return {self.value(one) for one in elts}
            case ast.Dict(keys=keys, values=values):
                both = zip(keys, values, strict=True)
                return {self.value(k) if k is not None else _unclear(): self.value(v) for k, v in both}
            case ast.ListComp(elt=elt, generators=[one]) | ast.GeneratorExp(elt=elt, generators=[one]):
                return [self.value(elt) for _ in self._each(node, one)]
            case ast.DictComp(key=key, value=value, generators=[one]):
                return {self.value(key): self.value(value) for _ in self._each(node, one)}
            case ast.Subscript(value=holder, slice=ast.Slice() as part):
                bounds = [None if b is None else self.value(b) for b in (part.lower, part.upper, part.step)]
                return self.value(holder)[slice(*bounds)]
            case ast.Subscript(value=holder, slice=index):
                return self.value(holder)[self.value(index)]
            case ast.JoinedStr(values=values):
                return "".join(str(self.value(one)) for one in values)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.value(value)
            case _:
                return _unclear()

    def _variable(self, name: str) -> Any:
        if name == "kwargs":
            return self.given
        return self.local[name] if name in self.local else _unclear()

    def _entry(self, name: str) -> Any:
        name = self.aliases.get(name, name)
        return self.entries[name] if name in self.entries and name not in self.unclear else _unclear()

    def _either(self, first_true: bool, values: list[ast.expr]) -> Any:
        found = None
        for value in values:
            found = self.value(value)
            if bool(found) == first_true:
                break
        return found

    def _each(self, whole: ast.expr, one: ast.comprehension) -> Iterator[None]:
        """Once for each value of a comprehension, its variables set."""
        before = self.local
        if any(isinstance(node, ast.NamedExpr) for node in ast.walk(whole)):
            raise Unclear
        for value in _few(self.value(one.iter)):
            self.local = dict(before)
            self._assign(one.target, value)
            if all(self.value(test) for test in one.ifs):
                yield
        self.local = before

    def _call(self, node: ast.Call) -> Any:
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Name(id="super"), [], []), "__post_init__")):
                return self.settle()
            case ast.Call(ast.Name(id="isinstance"), [value, kinds], []):
                names = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
                checks = [_KINDS[k.id] if isinstance(k, ast.Name) and k.id in _KINDS else _unclear() for k in names]
                found = self.value(value)
                return any(check(found) for check in checks)
            case ast.Call(ast.Name(id="getattr"), [holder, ast.Constant(value=str(name)), default], []):
                return self._has(holder, name, default)
            case ast.Call(ast.Name(id="range"), args, []):
                found = range(*map(self.value, args))
                return found if len(found) <= MOST else _unclear()
            case ast.Call(ast.Name(id=name), args, []) if name in _CALLS:
                return _CALLS[name](*map(self.value, args))
            case ast.Call(ast.Attribute(ast.Name(id="self"), name), args, named) if name in self.methods:
                return self._method(self.methods[name], args, named)
            case ast.Call(ast.Attribute(ast.Name(id="kwargs"), "get" | "pop" | "setdefault" as name), args, []):
                return getattr(self.given, name)(*map(self.value, args))
            case ast.Call(ast.Attribute(holder, name), args, []):
                found = self.value(holder)
                known = name in _METHODS.get(type(found), ())
                return getattr(found, name)(*map(self.value, args)) if known else _unclear()
        return _unclear()

    def _has(self, holder: ast.expr, name: str, default: ast.expr) -> Any:
        if isinstance(holder, ast.Name) and holder.id == "self":
            own = self.aliases.get(name, name)
            known = own in self.entries or own in self.unclear or self.unknown(own) or name in self.methods
            return self._entry(name) if known else self.value(default)
        table = self.value(holder)
        if not isinstance(table, Nested) or (name not in table and self.unknown(name)):
            raise Unclear
        return table[name] if name in table else self.value(default)

    def _method(self, function: ast.FunctionDef, args: list[ast.expr], named: list[ast.keyword]) -> Any:
        decorators = {ast.unparse(one) for one in function.decorator_list}
        names = [one.arg for one in function.args.args][0 if "staticmethod" in decorators else 1 :]
        whole = decorators <= {"staticmethod"} and len(args) + len(named) == len(names)
        if not whole or any(one.arg not in names for one in named):
            raise Unclear
        local = dict(zip(names, map(self.value, args), strict=False))
        return self.run(function, {**local, **{str(one.arg): self.value(one.value) for one in named}})


def _unclear() -> Any:
    raise Unclear


def _few(values: Any) -> list[Any]:
    found = list(values)
    return found if len(found) <= MOST else _unclear()


def _limited(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """An operation whose result is no list of any length."""
    lengths = [len(one) for one in (a, b) if isinstance(one, list | tuple | str)]
    times = [one for one in (a, b) if isinstance(one, int)]
    if operation is operator.mul and lengths and times and lengths[0] * times[0] > MOST:
        raise Unclear
    return operation(a, b)


def _jumps(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Break | ast.Continue) for node in ast.walk(loop))


def set_in(part: ast.AST) -> Iterator[str]:
    """Entries that a part of a class may set, and all that it mentions as words, which may be set by a function."""
    for node in ast.walk(part):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Constant(value=str(name)):
                yield name
            case ast.Subscript(value=holder, ctx=ast.Store() | ast.Del()) | ast.Call(ast.Attribute(holder)):
                yield from (one.attr for one in ast.walk(holder) if isinstance(one, ast.Attribute))


def sets_more(part: ast.AST) -> bool:
    """Whether a part may set entries that it does not name, or end in more than the next statement."""
    for node in ast.walk(part):
        match node:
            case ast.Raise() | ast.Call(ast.Name(id="setattr" | "delattr" | "super")):
                return True
            case ast.Call(ast.Attribute(ast.Name(id="kwargs"), "get" | "pop" | "setdefault"), [ast.Constant(), *_]):
                pass
            case ast.Call(ast.Attribute(ast.Name(id="kwargs"))):
                return True
            case ast.Subscript(value=ast.Name(id="kwargs"), slice=index, ctx=ast.Store() | ast.Del()):
                if not isinstance(index, ast.Constant):
                    return True
    return False
