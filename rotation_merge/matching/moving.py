"""A model's tensors in other coordinates: folded, transformed, with the anchor's biases, rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.matching.stream import Transforms
from rotation_merge.model.biases import in_coordinates
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.rows import in_slices
from rotation_merge.model.tensors import Names, Tensors, TensorSource, as_tensors
from rotation_merge.model.view import stored_dtype


def moved_tensors(
    architecture: Architecture,
    source: TensorSource,
    transforms: Transforms,
    folded: Sequence[str] = (),
    biases: TensorSource | None = None,
    dtype: torch.dtype | None = None,
) -> Tensors:
    """A model in other coordinates, in float32 at least.

    Args:
        folded: streams whose norm gains are folded first.
        biases: of the anchor, folded, which the model is given where softmax cannot see them; None: it keeps its own.
        dtype: that results are rounded to in the end, which folding has to survive.
    """
    return in_coordinates(architecture, folded_tensors(architecture, source, folded, dtype), transforms, biases)


class Mover:
    """Moves a model's tensors one by one: folds, transforms, gives the anchor's biases, and rounds once.

    Args:
        architecture: by whose names the source's tensors are known.
        folded: streams whose norm gains are folded.
        biases: gives the anchor's biases that softmax cannot see, folded where the alignment folds; None: the model
            keeps its own.
        least: the least precise type that results are rounded to in the end, which folding has to survive; None: that
            of each tensor.
    """

    def __init__(
        self,
        architecture: Architecture,
        source: TensorSource,
        transforms: Transforms,
        folded: Sequence[str] = (),
        biases: TensorSource | None = None,
        least: torch.dtype | None = None,
    ) -> None:
        stored, self._read = as_tensors(source), dict[Names, Tensor]()
        self.architecture, self.transforms, self.folded = architecture, transforms, folded
        self.biases, self.least = biases, least
        self.source = Tensors(
            stored.shapes, stored.dtypes, lambda n: self._read[n] if n in self._read else stored.read(n)
        )
        self._whole: dict[torch.dtype | None, Tensors] = {}

    def tensor(self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None) -> Tensor | None:
        """A tensor in the anchor's coordinates, long vocabularies in slices; None if the source lacks it.

        Args:
            dtype: that it is rounded to, which folding has to survive, too; None: what it is stored in.
        """
        stored = read_tensor(info, self.source)
        if stored is None:
            return None
        key: Names = info.names if info.stacked else info.names[0]
        self._read[key] = stored  # which is read once
        try:
            return self._moved(block, info, stored, dtype)
        finally:
            self._read.pop(key, None)

    def _moved(self, block: Block, info: TensorInfo, stored: Tensor, dtype: torch.dtype | None) -> Tensor:
        rounded = stored_dtype(stored, dtype)

        def moved(parts: Sequence[Tensors] | None) -> Tensor:
            aligned = self._aligned(dtype) if parts is None else self._of(parts[0], None, dtype)
            tensor = read_tensor(info, aligned)
            assert tensor is not None
            return tensor

        return in_slices(block, info, [self.source], rounded, moved).to(rounded).contiguous()

    def _aligned(self, dtype: torch.dtype | None) -> Tensors:
        """The whole aligned source, cached for each dtype."""
        if dtype not in self._whole:
            self._whole[dtype] = self._of(self.source, self.biases, dtype)
        return self._whole[dtype]

    def _of(self, source: TensorSource, biases: TensorSource | None, dtype: torch.dtype | None) -> Tensors:
        return moved_tensors(self.architecture, source, self.transforms, self.folded, biases, self.least or dtype)
