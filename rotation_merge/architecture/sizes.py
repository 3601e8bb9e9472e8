"""Which entries of a config say how large the spaces of a family are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rotation_merge.architecture.schema import ArchitectureSpec, AttentionSpec, FfnSpec, StreamSpec

SIZES = {
    StreamSpec: ("size",),
    AttentionSpec: ("heads", "kv_heads", "head_dim", "value_dim"),
    FfnSpec: ("size",),
}
"""Entries of an architecture file that give sizes which a model can grow in."""

_NAME = re.compile(r"[A-Za-z_]\w*")


def size_keys(spec: ArchitectureSpec) -> set[str]:
    """The config's entries that the sizes of streams, heads and neurons are computed from."""
    found: set[str] = set()
    wanted = {name for expression in _expressions(spec) for name in _names(expression)}
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted |= set(_names(spec.variables.get(name)))
    return found - spec.variables.keys() - {module.layers_key for module in spec.modules.values()}


def _names(expression: Any) -> list[str]:
    return _NAME.findall(expression) if isinstance(expression, str) else []


def _expressions(spec: ArchitectureSpec) -> Iterator[Any]:
    spaces = [space for module in spec.modules.values() for space in module.layer.spaces.values()]
    for one in (*spec.streams.values(), *spaces):
        for entry in SIZES.get(type(one), ()):
            yield getattr(one, entry)


def of_sizes(spec: ArchitectureSpec, own: Mapping[str, Any], larger: Mapping[str, Any]) -> dict[str, int]:
    """The entries of a config that make a model as large as another one."""
    return {
        key: larger[key]
        for key in sorted(size_keys(spec))
        if isinstance(larger.get(key), int) and not isinstance(larger[key], bool) and larger[key] != own.get(key)
    }
