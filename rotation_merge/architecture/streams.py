"""Which groups a residual stream admits, read off its norms and what reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rotation_merge.architecture.expression import word
from rotation_merge.architecture.model import Block, stem_of
from rotation_merge.architecture.schema import ArchitectureSpec


def stream_groups(
    spec: ArchitectureSpec, config: Mapping[str, Any], stream: str, blocks: Sequence[Block]
) -> tuple[str, ...]:
    """The residual groups, smallest first: none, permutation, signed_permutation, rotation (DESIGN section 2).

    A bare model gives out its stream, which therefore keeps its coordinates. Subtracting a mean forbids signs. A
    rotation needs every gain folded into what reads it, and with means subtracted nothing may read the stream raw.
    """
    classes = config.get("architectures") or []
    if not classes or set(classes) & set(spec.bare):
        return ("none",)
    norms = [norm for block in blocks for norm in block.norms if norm.stream == stream]
    layer = any(norm.layer for norm in norms)
    groups = ["none", "permutation"] if layer else ["none", "permutation", "signed_permutation"]
    folds = all(norm.reads for norm in norms) and _read_in_their_blocks(stream, blocks)
    normed = {stem_of(key) for norm in norms for key in norm.reads}
    if folds and (not layer or _readers(stream, blocks) <= normed):
        groups.append("rotation")
    limit = word(spec.streams[stream].limit, config, ("none", "permutation", "signed_permutation"))
    return tuple(groups[: groups.index(limit) + 1] if limit in groups else groups)


def _readers(stream: str, blocks: Sequence[Block]) -> set[str]:
    return {
        stem_of(tensor.key)
        for block in blocks
        for tensor in block.tensors
        for axis in tensor.axes
        if any(part.space.name == stream and part.role == "read" for part in axis.parts)
    }


def _read_in_their_blocks(stream: str, blocks: Sequence[Block]) -> bool:
    """Whether what reads a block's norms of a stream is in the same block, as folding block by block needs it.

    A layer's reader named with its layer is in that layer, or a model of this config has none.
    """
    readers = [{stem_of(tensor.key) for tensor in block.tensors} for block in blocks]
    everywhere = {stem for stems in readers for stem in stems}
    for block, own_readers in zip(blocks, readers, strict=True):
        reads = {stem_of(key) for norm in block.norms if norm.stream == stream for key in norm.reads}
        elsewhere = (reads & everywhere) - own_readers
        if any(block.index is None or "{i}" not in stem for stem in elsewhere):
            return False
    return True
