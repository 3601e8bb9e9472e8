"""Matching one block: every local space of a layer, the donor's residual stream held as it is given."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rotation_merge.architectures.model import Block, Space
from rotation_merge.errors import AlignmentError
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.attention import match_attention
from rotation_merge.matching.experts import match_experts
from rotation_merge.matching.ffn import match_ffn
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Tensors, sides


@dataclass(frozen=True)
class SpaceMatch:
    """What matching did to one space.

    Attributes:
        space, kind: the space's name and kind.
        group: the group its transform comes from.
        before, after: squared Frobenius distance donor - anchor over the tensors that have an axis in the space.
        anchor: squared norm of the anchor's tensors there.
        distances: how far the transform is from the identity, by part.
        seconds: wall time.
        gap: certified relative gap of the assignment, where there was one.
        head_order: the donor head that each aligned head came from, where heads may move.
        notes: what a reader should know.
    """

    space: str
    kind: str
    group: str
    before: float
    after: float
    anchor: float
    distances: dict[str, float]
    seconds: float
    gap: float | None = None
    head_order: list[int] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BlockMatch:
    """Transforms of a block's local spaces by space name, and the record of each."""

    transforms: dict[str, SpaceTransform]
    records: list[SpaceMatch]


def wanted_spaces(block: Block, options: MatchOptions) -> list[Space]:
    """The local spaces of a block that these options ask to match."""
    if not options.matches_layer(block.index):
        return []
    wanted = []
    for space in block.spaces.values():
        if space.kind == "attention":
            ask = options.attention != "none" or options.heads != "none"
        else:
            ask = options.ffn != "none" or (bool(options.rescale) and (space.gated or space.relu))
        if ask:
            wanted.append(space)
    return wanted


def match_block(
    block: Block,
    anchor: Tensors,
    donor: Tensors,
    options: MatchOptions,
    streams: Mapping[str, SpaceTransform] | None = None,
) -> BlockMatch:
    """Best transform of every local space of one block.

    Args:
        block: the anchor's block (the donor's has the same spaces).
        anchor, donor: tensors of the block by key.
        options: which groups to use.
        streams: transforms of the residual streams that the donor has been given.

    Raises:
        AlignmentError: a tensor holds NaN or infinity; names it.
    """
    _check_finite(block, anchor, "anchor")
    _check_finite(block, donor, "donor")
    transforms: dict[str, SpaceTransform] = dict(streams or {})
    records, local = [], {}
    for space in wanted_spaces(block, options):
        begin = time.perf_counter()
        transform, gap, notes = _match_space(block, space, anchor, donor, transforms, options)
        before = squared_distances(block, space, anchor, donor, transforms)
        transforms[space.name] = local[space.name] = transform
        after = squared_distances(block, space, anchor, donor, transforms) if not transform.is_identity() else before
        records.append(
            SpaceMatch(
                *(space.name, space.kind, transform.group()),
                before=before[0],
                after=after[0],
                anchor=before[1],
                distances=transform.distances(),
                seconds=time.perf_counter() - begin,
                gap=gap,
                head_order=transform.head_order().tolist() if hasattr(transform, "head_order") else None,
                notes=notes,
            )
        )
    return BlockMatch(local, records)


def _match_space(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: dict[str, SpaceTransform],
    options: MatchOptions,
) -> tuple[SpaceTransform, float | None, list[str]]:
    if space.kind == "experts":
        return match_experts(block, space, anchor, donor, transforms, options)
    found = sides(block, space, anchor, donor, transforms)
    if space.kind == "ffn":
        transform, gap = match_ffn(space, found, options)
        return transform, gap, []
    heads, notes = match_attention(space, found, options)
    return heads, None, notes


def squared_distances(
    block: Block, space: Space | None, anchor: Tensors, donor: Tensors, transforms: Mapping[str, SpaceTransform]
) -> tuple[float, float]:
    """Squared distance donor - anchor and squared norm of the anchor, over the tensors touching `space` (None: all)."""
    distance = norm = 0.0
    for info in block.tensors:
        if info.key in anchor and info.key in donor and (space is None or space in info.spaces()):
            a = anchor[info.key].float()
            b = transform_tensor(donor[info.key], info, transforms).float()
            distance += float((a - b).square().sum(dtype=torch.float64))
            norm += float(a.square().sum(dtype=torch.float64))
    return distance, norm


def _check_finite(block: Block, tensors: Tensors, whose: str) -> None:
    for info in block.tensors:
        tensor = tensors.get(info.key)
        if tensor is not None and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise AlignmentError(
                f"tensor '{info.name}' of the {whose} holds NaN or infinity",
                where=block.name,
                remedy="repair or replace the checkpoint",
            )
