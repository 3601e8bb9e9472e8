"""A model's tensors in other coordinates: folded, transformed, rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.model.apply import blockwise, read_tensor, reader, transform_tensor
from rotation_merge.model.fold import Fold, required
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.model.view import stored_dtype
from rotation_merge.model.vocabulary import in_slices
from rotation_merge.symmetry import Transform


def moved_tensors(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, Transform],
    folded: Sequence[str] = (),
) -> Tensors:
    """A model in other coordinates, in float32 at least where it changes; arguments as the attributes of `Mover`."""
    tensors, fold = as_tensors(source), Fold(architecture, folded)
    mover = Mover(architecture, tensors, transforms, folded)
    return blockwise(architecture, tensors, lambda block, info: mover.moved(block, info, tensors, fold))


@dataclass(frozen=True, eq=False)
class Mover:
    """Moves a model's tensors one by one, each rounded once.

    Attributes:
        architecture: by whose names the source's tensors are known.
        folded: streams whose norm gains are folded first.
        least: the least precise type that results are rounded to in the end, which folding has to survive; None: that
            of each tensor.
    """

    architecture: Architecture
    source: TensorSource
    transforms: Mapping[str, Transform]
    folded: Sequence[str] = ()
    least: torch.dtype | None = None

    def tensor(self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None) -> Tensor | None:
        """A tensor in the anchor's coordinates, long vocabularies in slices; None if the source lacks it.

        Args:
            dtype: that it is rounded to; None: what it is stored in.
        """
        source = as_tensors(self.source).cached(math.inf)  # each is read once
        stored = read_tensor(info, source)
        if stored is None:
            return None
        fold, rounded = Fold(self.architecture, self.folded, self.least or dtype), stored_dtype(stored, dtype)

        def moved(parts: Sequence[Tensors] | None) -> Tensor:
            return required(lambda _: self.moved(block, info, source if parts is None else parts[0], fold), info.key)

        return in_slices(block, info, [source], rounded, moved)

    def moved(self, block: Block, info: TensorInfo, source: Tensors, fold: Fold) -> Tensor | None:
        """A tensor in the anchor's coordinates, not rounded; None if the source lacks it."""
        stored = reader(block, source)
        if stored(info.key) is None:
            return None
        return transform_tensor(fold.tensor(block, info, stored), info, self.transforms)
