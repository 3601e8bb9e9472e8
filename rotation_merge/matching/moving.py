"""A model's tensors in other coordinates: folded, transformed, rounded once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.model.apply import blockwise, read_tensor, reader, transform_tensor
from rotation_merge.model.fold import Fold
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.model.view import TensorOf, stored_dtype
from rotation_merge.model.vocabulary import in_slices
from rotation_merge.symmetry import Transform


def moved_tensors(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, Transform],
    folded: Sequence[str] = (),
) -> Tensors:
    """A model in other coordinates, in float32 at least where it changes; arguments as of `mover`."""
    tensors, fold = as_tensors(source), Fold(architecture, folded)
    return blockwise(architecture, tensors, lambda block, info: _moved(block, info, tensors, fold, transforms))


def mover(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, Transform],
    folded: Sequence[str] = (),
    least: torch.dtype | None = None,
) -> TensorOf:
    """Computes a model's tensors in other coordinates one by one, long vocabularies in slices, each rounded once.

    Args:
        architecture: by whose names the source's tensors are known.
        folded: streams whose norm gains are folded first.
        least: the least precise type that results are rounded to in the end, which folding has to survive; None: that
            of each tensor.
    """

    def tensor(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        whole = as_tensors(source).cached(math.inf)  # each is read once
        stored, fold = read_tensor(info, whole), Fold(architecture, folded, least or dtype)
        if stored is None:
            return None

        def moved(parts: Sequence[Tensors] | None) -> Tensor:
            return _moved(block, info, whole if parts is None else parts[0], fold, transforms)

        return in_slices(block, info, [whole], stored_dtype(stored, dtype), moved)

    return tensor


def _moved(
    block: Block, info: TensorInfo, source: TensorSource, fold: Fold, transforms: Mapping[str, Transform]
) -> Tensor:
    """A tensor in other coordinates, not rounded."""
    return transform_tensor(fold.tensor(block, info, reader(block, source)), info, transforms)
