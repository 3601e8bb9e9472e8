"""What it means where two configs differ: `fields.json` says of every entry that a supported class reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rotation_merge.architecture.kinds import alike, spelled_out

Verdict = Literal["refused", "warned", "harmless"]


@dataclass(frozen=True)
class Field:
    """One entry of a config: what follows if two models differ in it, and why.

    Attributes:
        forward: whether the forward pass computes otherwise by it, as far as that is to be told from rounding.
    """

    verdict: Verdict
    why: str
    forward: bool = False


@dataclass(frozen=True)
class Difference:
    """An entry, by its path in the config, with the anchor's and the donor's values.

    Attributes:
        kinds: whether the two are of different kinds (`model_type`).
    """

    name: str
    field: Field
    anchor: Any
    donor: Any
    kinds: bool = False

    def __str__(self) -> str:
        return f"'{self.name}' is {self.donor!r}, against {self.anchor!r}"


@cache
def fields() -> dict[str, Field]:
    """Every entry that is known, by name."""
    groups = json.loads(Path(__file__).with_name("fields.json").read_text(encoding="utf-8"))
    return {
        name: Field(group["verdict"], group["why"], group.get("forward", False))
        for group in groups
        for name in group["fields"].split()
    }


UNKNOWN = Field("warned", "no supported class reads it")


def differences(anchor: Mapping[str, Any], donor: Mapping[str, Any], own_family: bool = False) -> Iterator[Difference]:
    """Where two configs differ, harmless entries left out; nested configs are looked into.

    Args:
        own_family: the family is none of ours, so that entries that are not known may matter.
    """
    known = fields()
    for name, anchor_value, donor_value, kinds in _pairs(anchor, donor):
        last = name.rpartition(".")[2]
        field = known.get(last, UNKNOWN if own_family else None)
        same = _plain(anchor_value) == _plain(donor_value) or (
            last == "model_type" and alike(anchor_value, donor_value)
        )
        if field is not None and field.verdict != "harmless" and not same:
            yield Difference(name, field, anchor_value, donor_value, kinds)


def _pairs(
    anchor: Mapping[str, Any], donor: Mapping[str, Any], prefix: str = "", kinds: bool = False
) -> Iterator[tuple[str, Any, Any, bool]]:
    """Values of the entries that both configs have, by path, and whether they are of different kinds of models; tables
    by entry, and where kinds differ, all entries that one of them has: each entry's absence is None."""
    names = [*anchor, *(name for name in donor if name not in anchor)]
    if anchor.get("model_type") != donor.get("model_type"):
        anchor, donor, kinds = spelled_out(anchor), spelled_out(donor), True
    for name in names:
        anchor_value, donor_value = anchor.get(name), donor.get(name)
        if name in ("id2label", "label2id") or not (prefix or kinds or (name in anchor and name in donor)):
            continue
        if isinstance(anchor_value, Mapping) and isinstance(donor_value, Mapping):
            yield from _pairs(anchor_value, donor_value, f"{prefix}{name}.", kinds)
        else:
            yield prefix + name, anchor_value, donor_value, kinds


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
