"""Matching whole models, block by block, on lazily read tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.model_pair import ModelPair, Transforms
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.passes import Walk, match_streams
from rotation_merge.matching.stream import residual_groups
from rotation_merge.model.tensors import TensorSource
from rotation_merge.run.ledger import NOWHERE, Ledger
from rotation_merge.workers import Progress, Spread, in_threads


class Match(Protocol):
    """A function that aligns the second of two sources to the first, such as `match_model`."""

    def __call__(
        self,
        architecture: Architecture,
        anchor: TensorSource,
        donor: TensorSource,
        options: AlignConfig,
        progress: Progress | None = None,
        *,
        ledger: Ledger = NOWHERE,
    ) -> Alignment: ...


def match_model(
    architecture: Architecture,
    anchor: TensorSource,
    donor: TensorSource,
    options: AlignConfig,
    progress: Progress | None = None,
    starts: Mapping[str, Transforms] | None = None,
    fold: bool = True,
    over: Spread = in_threads,
    ledger: Ledger = NOWHERE,
) -> Alignment:
    """Match every space that `options` ask for, with one block of each model in memory at a time.

    Tensors of a model that is read more than once may be cached (`Kept`).

    Args:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: the models as they are stored (folding, where needed, is done here).
        options: which groups to use.
        progress: told about every block.
        starts: residual transforms to start from, by name of the start, instead of the identity and what
            embeddings and heads say.
        fold: False where both sources are folded already.
        over: who matches the blocks; for others than this process the sources can be pickled.
        ledger: store of intermediate results, to resume from.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
        AlignmentError: a tensor holds NaN or infinity.
    """
    streams = residual_groups(architecture, options.residual)
    folded = architecture.folds(streams)
    both = ModelPair(architecture, anchor, donor, options, folded if fold else (), cached=bool(streams))
    walk = Walk(both, progress or (lambda *_: None), streams, over, ledger)
    transforms: Transforms = {}
    summary: dict[str, object] = {}
    if streams:
        transforms, summary = match_streams(walk, starts)
    records = walk.final(transforms)
    return Alignment(transforms, folded, records, summary)
