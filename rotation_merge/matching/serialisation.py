"""Converts transforms and match results to tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rotation_merge.files import Entry
from rotation_merge.matching.block import BlockMatch, SpaceMatch
from rotation_merge.run.ledger import Ledger
from rotation_merge.symmetry import Transform


def packed(transforms: Mapping[str, Transform]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by ``space|name``, and the kinds of the spaces."""
    tensors = {f"{space}|{key}": x for space, transform in transforms.items() for key, x in transform.tensors().items()}
    return tensors, {space: transform.kind for space, transform in transforms.items()}


def unpacked(tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> dict[str, Transform]:
    """Restore the transforms, in the order of the kinds.

    Raises:
        ValueError: they are of other spaces than the kinds; whatever a transform says of tensors that are not its.
    """
    spaces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        space, _, name = key.partition("|")
        spaces.setdefault(space, {})[name] = tensor
    if spaces.keys() != kinds.keys():
        raise ValueError("its header lists other spaces than it holds")
    return {space: Transform.from_tensors(kind, spaces[space]) for space, kind in kinds.items()}


def entry_of(match: BlockMatch, **facts: Any) -> Entry:
    """The stored result of matching a block."""
    tensors, kinds = packed(match.transforms)
    return Entry({"kinds": kinds, "records": [asdict(record) for record in match.records], **facts}, tensors)


def match_of(entry: Entry) -> BlockMatch:
    """Restore the result of matching a block."""
    records = [SpaceMatch(**record) for record in entry.facts["records"]]
    return BlockMatch(unpacked(entry.tensors, entry.facts["kinds"]), records)


def match_once(ledger: Ledger, name: str, match: Callable[[], BlockMatch]) -> BlockMatch:
    """The match of a block, from an earlier run or computed now."""
    entry = ledger.get(name)
    if entry is not None:
        return match_of(entry)
    matched = match()
    ledger.keep(name, lambda: entry_of(matched))
    return matched
