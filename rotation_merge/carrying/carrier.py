r"""Carries changes of weights to another base; exact if that base is the old one in other coordinates.

If alignment turns W into ``L W R^T``, it turns a change ``B A`` into ``(L B)(A R^T)``: the same rank. Behind a folded
norm the stored maps differ from the folded ones by the gains g, g' of the old and the new base, ``A' = A diag(g) R^T
diag(g')^-1``, and of the shifts b, b' of a LayerNorm is left over the constant ``L B A b - B' A' b'``, which goes into
the bias of the map (`Fold.unfold_change`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import Fold, weight_key
from rotation_merge.model.low_rank import LowRank, dense, factor_infos
from rotation_merge.model.tensors import TensorSource

Change = LowRank | Tensor
Changes = dict[str, Change]
"""Changes of a block's tensors, by key."""

RowPair = tuple[Tensor, Tensor]
"""The new base's and the old base's rows of the same tokens."""


@dataclass(frozen=True)
class Carrier:
    """Carries changes of the old base to the new one.

    Attributes:
        architecture: of both bases.
        old, new: the bases as they are stored; both answer to the names of `architecture`.
        alignment: of the old base to the new one.
        rows: where token ids or the padding of the vocabularies differ.
        dtype: that a computed tensor is going to be rounded to, if another than its own.
    """

    architecture: Architecture
    old: TensorSource
    new: TensorSource
    alignment: Alignment
    rows: RowPair | None = None
    dtype: torch.dtype | None = None

    @property
    def fold(self) -> Fold:
        return Fold(self.architecture, self.alignment.folded, self.dtype)

    def block(self, block: Block, changes: Mapping[str, Change]) -> Changes:
        """Changes of a block's tensors in the new base's storage form, with the remaining bias changes.

        Args:
            changes: by key, in float64.

        Raises:
            AlignmentError: a norm of a folded stream changes, or a gain cannot be divided by.
        """
        self._check_norms(block, changes)
        result: Changes = {}
        old = reader(block, self.old)
        for info in sorted(block.tensors, key=lambda i: is_bias(i.key)):
            change = changes.get(info.key)
            if isinstance(change, LowRank):
                a, b = (
                    self._carried(block, part, _with(old, info.key, factor))
                    for part, factor in zip(factor_infos(info), (change.a, change.b), strict=True)
                )
                result[info.key] = LowRank(a, b, change.scale)
            elif change is not None or self._constant(block, info, changes):
                weight = block.tensor(weight_key(info.key)) if is_bias(info.key) else None
                stored = dense(result[weight.key], weight) if weight is not None and weight.key in result else None
                moved = self._carried(block, info, self._changed(block, info.key, changes), stored)
                if change is not None or bool(moved.any()):
                    result[info.key] = moved
        return result

    def _changed(self, block: Block, changed_key: str, changes: Mapping[str, Change]) -> Callable[[str], Tensor | None]:
        """The source of a block's folding: changes of weights, but unchanged gains and shifts of norms."""
        old = reader(block, self.old)
        norms = folded_keys(block, self.architecture.streams)

        def get(key: str) -> Tensor | None:
            info = block.tensor(key)
            if info is None or (key in norms and key != changed_key):
                return old(key)
            if key in changes:
                return dense(changes[key], info)
            return torch.zeros_like(stored) if (stored := old(key)) is not None else None

        return get

    def _carried(
        self, block: Block, info: TensorInfo, get: Callable[[str], Tensor | None], weight: Tensor | None = None
    ) -> Tensor:
        """One change, or one factor of a change: folded, moved, unfolded, with the rows of the new vocabulary."""
        return self.stored(block, info, self.fold.tensor(block, info, get), weight)

    def moved(self, info: TensorInfo, change: Tensor) -> Tensor:
        """A change of the folded old base in the new base's coordinates."""
        return transform_tensor(change, info, self.alignment.transforms, change=True)

    def stored(self, block: Block, info: TensorInfo, change: Tensor, weight: Tensor | None = None) -> Tensor:
        """A change of the folded old base in the new base's storage form and vocabulary.

        Args:
            weight: of a bias: the change of the weight beside it, as it is to be stored.
        """
        moved = self.moved(info, change)
        moved = self.fold.unfold_change(block, info, moved, reader(block, self.new), weight)
        return self.with_new_rows(block, info, moved)

    def with_new_rows(self, block: Block, info: TensorInfo, moved: Tensor) -> Tensor:
        """A moved change at the token ids of the new vocabulary; zero for its padding."""
        axis = info.vocabulary_axis
        if self.rows is None or axis is None:
            return moved
        whole = block.tensor(info.key)
        stored = read_tensor(whole, self.new) if whole is not None else None
        size = stored.shape[whole.vocabulary_axis or 0] if whole is not None and stored is not None else 0
        new_rows, old_rows = (rows.to(moved.device) for rows in self.rows)
        shape = [*moved.shape]
        shape[axis] = size
        return moved.new_zeros(shape).index_copy(axis, new_rows, moved.index_select(axis, old_rows))

    def _constant(self, block: Block, info: TensorInfo, changes: Mapping[str, Change]) -> bool:
        """Whether folding brings a weight's change into the bias beside it."""
        if not is_bias(info.key) or weight_key(info.key) not in changes:
            return False
        return weight_key(info.key) in self.fold.inputs(block, info) and len(self.fold.inputs(block, info)) > 2

    def _check_norms(self, block: Block, changes: Mapping[str, Change]) -> None:
        for key in folded_keys(block, self.alignment.folded):
            change, info = changes.get(key), block.tensor(key)
            if isinstance(change, Tensor) and info is not None and bool(change.abs().max() > 0):
                raise AlignmentError(
                    f"the change of '{info.name}' cannot be carried with a rotated stream",
                    where=block.name,
                    remedy="use 'residual: permutation', or merge the adapter and carry the whole model",
                )


def folded_keys(block: Block, streams: Collection[str]) -> set[str]:
    """Gains and shifts of the block's norms of some streams, and its layer scales."""
    norms = [norm for norm in block.norms if norm.stream in streams]
    keys = {norm.gain for norm in norms} | {norm.shift for norm in norms if norm.shift is not None}
    return keys | {scale.gain for scale in block.scales if scale.stream in streams}


def _with(get: Callable[[str], Tensor | None], replaced_key: str, value: Tensor) -> Callable[[str], Tensor | None]:
    return lambda key: value if key == replaced_key else get(key)


def is_bias(key: str) -> bool:
    return key.endswith(".bias")


def reader(block: Block, source: TensorSource) -> Callable[[str], Tensor | None]:
    """A block's tensors by key, in float64."""

    def get(key: str) -> Tensor | None:
        info = block.tensor(key)
        tensor = read_tensor(info, source) if info is not None else None
        return None if tensor is None else tensor.double()

    return get
