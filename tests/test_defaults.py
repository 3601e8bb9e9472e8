"""Defaults read off the source of config classes are those that transformers fills in, or nobody's."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Collection, Iterator, Mapping
from textwrap import dedent, indent
from typing import Any

import pytest
import transformers
from packaging.version import Version
from tiny_models import CONFIGS, Case, cases

from rotation_merge.architectures.needed import needed, needed_within
from rotation_merge.architectures.registry import find
from rotation_merge.checkpoints.defaults import with_defaults
from rotation_merge.checkpoints.plain_python import Refused, Scope

WHOLLY = Version(transformers.__version__) >= Version("5.23")
"""Whether all families' config classes are written as they are read here; older ones are left to transformers."""


def written(case: Case) -> tuple[type, dict[str, Any]]:
    """The config class of a case, and what its config.json says."""
    made = case.model_class.config_class(**case.config)
    made.architectures = [case.class_name]
    return type(made), json.loads(made.to_json_string())


def lacking(raw: Mapping[str, Any], names: Collection[str], within: Mapping[str, Collection[str]]) -> Iterator[Any]:
    """A config.json as it is, and without each of the entries that matter."""
    yield raw
    for name in sorted(set(names) & set(raw) - {"architectures", "model_type"}):
        yield {key: value for key, value in raw.items() if key != name}
    for part, some in sorted(within.items()):
        for name in sorted(set(some) & set(raw.get(part) or {})):
            yield {**raw, part: {key: value for key, value in raw[part].items() if key != name}}


def same(one: Any, other: Any) -> bool:
    return bool(json.dumps(one, sort_keys=True, default=str) == json.dumps(other, sort_keys=True, default=str))


ROPE = ("partial_rotary_factor", "rope_parameters")
"""Of which files read the first from the second, wherever it stands there."""


def share(config: Mapping[str, Any]) -> Any:
    return (config.get(ROPE[1]) or {}).get(ROPE[0]) or config.get(ROPE[0])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_configs_are_read_as_transformers_reads_them(path: Any) -> None:
    seen = set[str]()
    for case in cases(path):
        kind, raw = written(case)
        spec = find(raw)
        assert spec is not None
        names, within = needed(spec), needed_within(spec)
        for config in [raw] if raw["model_type"] in seen else lacking(raw, names, within):
            found = with_defaults(config, names, within)
            assert found is not None or config is not raw or not WHOLLY, case.name
            if found is None:
                continue
            decoded = getattr(kind, "_decode_special_floats", dict)(copy.deepcopy(config))  # older ones write them bare
            whole = kind(**decoded).to_dict()
            parts = [(found, whole, names), *((found.get(p) or {}, whole.get(p) or {}, n) for p, n in within.items())]
            for ours, theirs, some in parts:
                assert {n for n in some if n not in ROPE and not same(ours.get(n), theirs.get(n))} <= set(within)
                assert ROPE[1] not in some or same(share(ours), share(theirs))
        seen.add(raw["model_type"])


def ran(body: str, **entries: Any) -> Scope:
    """What the lines of a function make of entries."""
    function = ast.parse("def __post_init__(self, **kwargs):\n" + indent(dedent(body), "    ")).body[0]
    assert isinstance(function, ast.FunctionDef)
    scope = Scope({"count": 3, **entries}, {"step": 2}, aliases={"layers": "count"})
    scope.run(function)
    return scope


RUN = {
    "entries by other names": ("self.out = self.layers", 3),
    "lists": ("self.out = [i if i % kwargs.pop('step', 2) else 'x' for i in range(self.count) if i]", [1, "x"]),
    "variables of its own": ("a = b = 'x-y'.split('-')\nself.out = b[-1] + a[0]", "yx"),
    "a loop": ("self.out = 0\nfor i, one in enumerate([4, 5]):\n    self.out = self.out + i * one", 5),
    "tables": ("self.out = {str(i): i for i in range(2)}\nself.out['0'] = 7", {"0": 7, "1": 1}),
    "what is not asked": ("self.out = 1 if self.count or missing else missing", 1),
    "another branch": ("self.out = 1\nif self.count > 3:\n    self.out = missing", 1),
}


@pytest.mark.parametrize("name", RUN)
def test_plain_statements_are_run(name: str) -> None:
    body, value = RUN[name]
    scope = ran(body)
    assert (scope.entries["out"], scope.unclear) == (value, set())


LOST = {
    "a function": "self.out = missing(self.count)",
    "in a list": "self.out = [0]\nself.out[0] = missing()",
    "a variable": "a = missing()\nself.out = a",
    "a condition": "if missing:\n    self.out = 1",
    "by a word": "missing(self, 'out')",
    "by a method": "self.out.extend(missing)",
    "a list of any length": "self.out = [0] * 1000000",
    "a variable within a list": "[(a := i) for i in range(2)]\nself.out = 1 if a else 0",
}


@pytest.mark.parametrize("name", LOST)
def test_what_is_more_is_unclear_until_it_is_set(name: str) -> None:
    assert "out" in ran(LOST[name]).unclear
    assert "out" not in ran(LOST[name] + "\nself.out = 1").unclear


ANYTHING = [
    *("raise ValueError()", "1 // 0", "if missing:\n    raise ValueError()", "setattr(self, missing, 1)"),
    *("kwargs[missing] = 1", "kwargs.update(missing)", "for one in missing:\n    super().__post_init__()"),
]


@pytest.mark.parametrize("body", ANYTHING)
def test_what_may_set_or_refuse_anything_is_refused(body: str) -> None:
    with pytest.raises(Refused):
        ran(body)
