"""A recipe's models in the anchor's coordinates: every tensor of the output, computed when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.averaging.average import check_finite
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import Mover
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import TensorOf
from rotation_merge.symmetry import Transform

Transforms = Mapping[str, Transform]
Dtype = Callable[[TensorInfo], torch.dtype | None]


def named_as(tensors: Tensors, stored: Block, named: Block) -> Tensors:
    """A model's tensors of one block, under the names of another block; tied ones under their first name."""
    present: dict[str, str] = {}
    for info in named.tensors:
        stored_info = stored.tensor(info.key) or info
        for new, old in zip(info.names, stored_info.names, strict=True):
            known = next((name for name in (old, *stored_info.tied) if name in tensors), None)
            if known is not None:
                present[new] = known
    return tensors.renamed(present).only(present)


@dataclass(frozen=True, eq=False)
class MovedBlock:
    """One model's tensors of one output block, in the anchor's coordinates.

    Attributes:
        architecture: of the output.
        block: the block of the output.
        tensors, anchor: of the model and of the anchor, as they are stored.
        dtype: gives the type that a tensor is rounded to, once; None: that in which it is read.
        maps: gives the transforms of the block's spaces and of the streams; None: it does not move.
        fold: folds streams in every model of the merge, for the least precise type that results are rounded to.
        computed: whether tensors come unrounded from an adapter.
        carried: of a fine-tune whose change is carried, gives the anchor with that change under an alignment.
    """

    architecture: Architecture
    block: Block
    tensors: Tensors = field(repr=False)
    anchor: Tensors = field(repr=False)
    name: str
    dtype: Dtype
    maps: Callable[[], Transforms] | None = None
    fold: Fold | None = None
    computed: bool = False
    carried: Callable[[Alignment], TensorOf] | None = None

    @property
    def folded(self) -> tuple[str, ...]:
        """The streams that are folded."""
        return () if self.fold is None else self.fold.streams

    def tensor(self, info: TensorInfo) -> Tensor | None:
        """A tensor of the block; None if the model lacks it.

        Raises:
            CheckpointError: it holds NaN or infinity, perhaps only in the type that it is rounded to.
        """
        kind = self.tensors.dtypes.get(info.name)
        folds = self.fold is not None and self.fold.touches(self.block, info)
        changes = self.maps is not None or self.carried is not None or self.computed or folds
        if kind is None or not kind.is_floating_point or not changes:
            return read_tensor(info, self.tensors)
        tensor = self._move(self.block, info, self.dtype(info))
        return None if tensor is None else check_finite(tensor, info.name, self.name)

    @cached_property
    def alignment(self) -> Alignment:
        """The transforms of the block and of the streams."""
        return Alignment(dict(self.maps()) if self.maps is not None else {}, self.folded)

    @cached_property
    def _move(self) -> TensorOf:
        if self.carried is not None:
            return self.carried(self.alignment)
        biases = folded_tensors(self.architecture, self.anchor, self.folded)
        least = None if self.fold is None else self.fold.dtype
        return Mover(self.architecture, self.tensors, self.alignment.transforms, self.folded, biases, least).tensor


def output_tensors(parts: Sequence[MovedBlock]) -> Tensors:
    """One model's tensors by the names of the output; those that are stored in pieces are computed once."""
    shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, torch.dtype]()
    places: dict[str, tuple[MovedBlock, TensorInfo, int]] = {}
    for part in parts:
        shapes |= part.tensors.shapes
        dtypes |= part.tensors.dtypes
        for info in part.block.tensors:
            places.update((name, (part, info, piece)) for piece, name in enumerate(info.names))
    stacks: dict[str, dict[int, Tensor]] = defaultdict(dict)
    locks: dict[str, Lock] = defaultdict(Lock)

    def computed(part: MovedBlock, info: TensorInfo) -> Tensor:
        tensor = part.tensor(info)
        assert tensor is not None
        return tensor

    def read(name: str) -> Tensor:
        part, info, piece = places[name]
        if not info.stacked:
            return computed(part, info)
        with locks[info.name]:
            stack = stacks[info.name]
            if piece not in stack:
                stack.update(enumerate(computed(part, info).unbind(0)))
            return stack.pop(piece)

    return Tensors(shapes, dtypes, by_name(read))
