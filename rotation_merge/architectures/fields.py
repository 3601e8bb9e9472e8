"""What it means where two configs differ: `fields.json` says of every entry that a supported class reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["refused", "warned", "harmless"]


@dataclass(frozen=True)
class Field:
    """One entry of a config: what follows if two models differ in it, and why."""

    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Difference:
    """An entry, by its path in the config, with the anchor's and the donor's values."""

    name: str
    field: Field
    anchor: Any
    donor: Any

    def __str__(self) -> str:
        return f"'{self.name}' is {self.donor!r}, against {self.anchor!r}"


@cache
def fields() -> dict[str, Field]:
    """Every entry that is known, by name."""
    groups = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
    return {name: Field(group["verdict"], group["why"]) for group in groups for name in group["fields"].split()}


UNKNOWN = Field("warned", "no supported class reads it")


def differences(anchor: Mapping[str, Any], donor: Mapping[str, Any], own_family: bool = False) -> Iterator[Difference]:
    """Where two configs differ, harmless entries left out; nested configs are looked into.

    Args:
        own_family: the family is none of ours, so that entries that are not known may matter.
    """
    known = fields()
    for name, (ours, theirs) in _pairs(anchor, donor).items():
        field = known.get(name.rpartition(".")[2], UNKNOWN if own_family else None)
        if field is not None and field.verdict != "harmless" and _plain(ours) != _plain(theirs):
            yield Difference(name, field, ours, theirs)


def _pairs(anchor: Mapping[str, Any], donor: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Values of the entries that both configs have, by path; tables by entry, each entry's absence being None."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*anchor, *(name for name in donor if name not in anchor)]:
        ours, theirs = anchor.get(name), donor.get(name)
        nested = isinstance(ours, Mapping) and isinstance(theirs, Mapping)
        if name in ("id2label", "label2id") or (not prefix and not (name in anchor and name in donor)):
            continue
        if nested:
            found.update(_pairs(dict(ours or {}), dict(theirs or {}), f"{prefix}{name}."))
        else:
            found[prefix + name] = (ours, theirs)
    return found


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
