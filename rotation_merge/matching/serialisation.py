"""Converts transforms and match results to tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from rotation_merge.matching.block import BlockMatch
from rotation_merge.record import SpaceRow
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


def part_of(match: BlockMatch) -> dict[str, Any]:
    """The result of matching a block, to be kept (`files.write_part`)."""
    return {"maps": packed(match.transforms), "rows": [asdict(row) for row in match.rows], "whole": match.whole}


def match_of(part: Mapping[str, Any]) -> BlockMatch:
    """Restore the result of matching a block."""
    return BlockMatch(unpacked(*part["maps"]), [SpaceRow(**row) for row in part["rows"]], part["whole"])


def match_once(ledger: Ledger, name: str, match: Callable[[], BlockMatch]) -> BlockMatch:
    """The match of a block, from an earlier run or computed now."""
    part = ledger.get(name)
    if part is not None:
        return match_of(part)
    matched = match()
    ledger.keep(name, lambda: part_of(matched))
    return matched
