"""Matching whole models, block by block, on lazily read tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.block import SpaceMatch, match_block, wanted_spaces
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.state import TensorSource, read_block, read_tensor, unstack

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""


@dataclass(frozen=True)
class Alignment:
    """What brings one donor to one anchor.

    Attributes:
        transforms: by space name.
        folded: whether norm gains were folded into the readers first (anchor and donor alike), which a rotation of
            the residual stream needs.
        records: what matching did to each space, block by block.
        summary: iterations, objective and the like, for the report.
    """

    transforms: dict[str, SpaceTransform]
    folded: bool = False
    records: list[tuple[Block, list[SpaceMatch]]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: MatchOptions,
    progress: Progress | None = None,
) -> Alignment:
    """Match every space that `options` ask for; one block of either model is in memory at a time."""
    transforms: dict[str, SpaceTransform] = {}
    records = []
    blocks = [block for block in architecture.blocks if wanted_spaces(block, options)]
    for done, block in enumerate(blocks):
        if progress is not None:
            progress("matching", done, len(blocks))
        match = match_block(block, read_block(block, anchor), read_block(block, donor), options)
        transforms.update(match.transforms)
        records.append((block, match.records))
    return Alignment(transforms, records=records)


def aligned_tensors(
    architecture: Architecture, source: TensorSource, alignment: Alignment
) -> Iterator[tuple[str, Tensor]]:
    """The donor's tensors in the anchor's coordinates, one after the other, in their storage dtype."""
    for block in architecture.blocks:
        for info in block.tensors:
            tensor = read_tensor(info, source)
            if tensor is not None:
                moved = transform_tensor(tensor, info, alignment.transforms)
                yield from unstack(info, moved.to(tensor.dtype).contiguous()).items()

