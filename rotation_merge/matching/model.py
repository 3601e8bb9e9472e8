"""Matching whole models, block by block, on lazily read tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block, TensorInfo
from rotation_merge.matching import slices
from rotation_merge.matching.biases import Aligned
from rotation_merge.matching.block import SpaceMatch
from rotation_merge.matching.both import Both, Transforms
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.ledger import NOWHERE, Ledger
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.passes import match_streams
from rotation_merge.matching.state import TensorSource, read_tensor, unstack
from rotation_merge.matching.stream import residual_groups
from rotation_merge.matching.walk import Progress, Walk
from rotation_merge.spread.pieces import HERE, Over


@dataclass(frozen=True)
class Alignment:
    """What brings one donor to one anchor.

    Attributes:
        transforms: by space name.
        folded: streams whose norm gains were folded into the readers first (anchor and donor alike), which a
            rotation of the stream needs.
        records: what matching did to each space, block by block.
        summary: iterations, objective and the like, for the report.
        notes: what the user should know.
        samples: where it was matched on samples: what they are called, and how many.
    """

    transforms: Transforms
    folded: tuple[str, ...] = ()
    records: list[tuple[Block, list[SpaceMatch]]] = field(default_factory=list)
    summary: dict[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    samples: tuple[str, int] | None = None

    def moves_streams(self, architecture: Architecture) -> bool:
        """Whether what reads a stream and is not moved itself (layers that predict tokens further ahead) would be wrong
        behind it."""
        streams = (self.transforms[name] for name in architecture.streams if name in self.transforms)
        return bool(self.folded) or any(not stream.is_identity() for stream in streams)


class Match(Protocol):
    """Finds what brings the second of two sources to the first: `match_model`, or what takes its place."""

    def __call__(
        self,
        architecture: Architecture,
        anchor: TensorSource,
        donor: TensorSource,
        options: MatchOptions,
        progress: Progress | None = None,
        *,
        ledger: Ledger = NOWHERE,
    ) -> Alignment: ...


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: MatchOptions,
    progress: Progress | None = None,
    starts: Mapping[str, Transforms] | None = None,
    fold: bool = True,
    over: Over = HERE,
    ledger: Ledger = NOWHERE,
) -> Alignment:
    """Match every space that `options` ask for; one block of either model is in memory at a time, and what is kept of a
    model that is read more than once (`Kept`).

    Args:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: the models as they are stored (folding, where needed, is done here).
        options: which groups to use.
        progress: told about every block.
        starts: residual transforms to start from, by name of the start, instead of the identity and what
            embeddings and heads say.
        fold: False where both sources are folded already.
        over: who matches the blocks; for others than this process the sources can be pickled.
        ledger: where what is found is kept, and looked for.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
        AlignmentError: a tensor holds NaN or infinity.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    both = Both(architecture, anchor, donor, options, folded if fold else (), kept=bool(streams))
    walk = Walk(both, progress or (lambda *_: None), streams, over, ledger)
    found: Transforms = {}
    summary: dict[str, object] = {}
    if streams:
        found, summary = match_streams(walk, starts)
    records = walk.final(found)
    return Alignment(found, folded, records, summary)


def aligned_tensors(
    architecture: Architecture,
    source: TensorSource,
    alignment: Alignment,
    anchor: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """A donor's tensors in the anchor's coordinates, one after the other, in their storage dtype.

    For the anchor itself, folded where the alignment needs it, give ``Alignment({}, alignment.folded)``.

    Args:
        anchor: whose biases the donor is given where softmax cannot see them (`matching/biases.py`); None: it keeps its
            own.
        dtype: that the caller rounds to, which folding has to survive, too.
    """
    aligned = aligned_source(architecture, source, alignment, anchor, dtype)

    def in_place(block: Block, info: TensorInfo, stored: Tensor) -> Tensor:
        views = slices.views(block, [source] if info.vocabulary_axis is not None else [])

        def moved(part: slice | None) -> Tensor:
            seen = aligned if part is None else aligned_source(architecture, views(part)[0], alignment, dtype=dtype)
            found = seen.tensor(block, info)
            assert found is not None
            return found

        return slices.in_slices(info, [stored], stored.dtype, moved)

    for block in architecture.blocks:
        for info in block.tensors:
            if (stored := read_tensor(info, source)) is not None:
                moved = in_place(block, info, stored).to(stored.dtype).contiguous()
                yield from unstack(info, moved).items()


def aligned_source(
    architecture: Architecture,
    source: TensorSource,
    alignment: Alignment,
    anchor: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Aligned:
    """A donor in the anchor's coordinates, folded where the alignment needs it; see `aligned_tensors`."""
    if alignment.folded:
        source = Folded(architecture, source, alignment.folded, dtype)
        anchor = None if anchor is None else Folded(architecture, anchor, alignment.folded)
    return Aligned(architecture, source, alignment.transforms, anchor)
