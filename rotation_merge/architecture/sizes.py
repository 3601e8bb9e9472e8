"""The config entries that determine the sizes of a family's spaces."""

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
    keys: set[str] = set()
    pending = {name for expression in _expressions(spec) for name in _names(expression)}
    while pending:
        name = pending.pop()
        if name not in keys:
            keys.add(name)
            pending |= set(_names(spec.variables.get(name)))
    return keys - spec.variables.keys() - {module.layers_key for module in spec.modules.values()}


def _names(expression: Any) -> list[str]:
    return _NAME.findall(expression) if isinstance(expression, str) else []


def _expressions(spec: ArchitectureSpec) -> Iterator[Any]:
    spaces = [space for module in spec.modules.values() for space in module.layer.spaces.values()]
    for entry_spec in (*spec.streams.values(), *spaces):
        for entry in SIZES.get(type(entry_spec), ()):
            yield getattr(entry_spec, entry)


def config_of_sizes(spec: ArchitectureSpec, config: Mapping[str, Any], larger: Mapping[str, Any]) -> dict[str, int]:
    """The config entries that give a model the sizes of another one."""
    return {
        key: larger[key]
        for key in sorted(size_keys(spec))
        if isinstance(larger.get(key), int) and not isinstance(larger[key], bool) and larger[key] != config.get(key)
    }
