r"""What fine-tuning changed, as a value: scaled, moved to another base, applied.

If an alignment turns W into ``L W R^T``, it turns a change ``B A`` into ``(L B)(A R^T)``: the same rank. Behind a norm
of a turned stream the stored maps differ from the folded ones by the gains g, g' of the old and the new base,
``A' = A diag(g) R^T diag(g')^-1``, and of the shifts b, b' of a LayerNorm is left over the constant
``L B A b - B' A' b'``, which goes into the bias of the map (`Fold.unfold_change`). So the new base keeps its norms. All
this is exact if the new base is the old one in other coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.averaging.average import check_finite
from rotation_merge.carrying.tokens import check_same_set, check_tuned_tokens
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.pair import check_shapes
from rotation_merge.model.apply import Get, read_tensor, reader, transform_tensor, unstack
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.low_rank import LowRank, dense, factor_infos
from rotation_merge.model.open import ModelLike, check_names, open_model
from rotation_merge.model.tensors import Tensors, as_tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import in_slices, shared_rows

Change = LowRank | Tensor

RowPair = tuple[Tensor, ...]
"""The new base's and the old base's rows of the same tokens."""

Record = Callable[[float, float], None]
"""Takes the squared norms of a tensor's change and of the old base's tensor; of a long vocabulary for each slice."""


@dataclass(frozen=True)
class Delta:
    """The change of a fine-tune, scale (tuned - old), moved to another base or on its own.

    Attributes:
        base: the model that it is for.
        old, tuned: the base that it is of and the fine-tune, both under `base`'s names.
        alignment: of `old` to `base`.
        rows: where token ids or the padding of the vocabularies differ.
        low: by tensor, the factors of changes of low rank, which `tuned` does not have.
        folding: of streams that are folded in `base` before it is changed; None: it stays as it is stored.
        precision: the least precise dtype of its computation.
        record: takes the norms of all that is computed.
    """

    base: View = field(repr=False)
    old: Tensors = field(repr=False)
    tuned: Tensors = field(repr=False)
    alignment: Alignment = field(default_factory=lambda: Alignment({}))
    rows: RowPair | None = None
    low: Mapping[str, LowRank] = field(default_factory=dict)
    folding: Fold | None = None
    scale: float = 1.0
    precision: torch.dtype = torch.float32
    record: Record | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return f"Delta(for {self.base.name}, scale {self.scale})"

    @staticmethod
    def between(base: ModelLike, tuned: ModelLike) -> Delta:
        """The change of a fine-tune from its base.

        Args:
            base, tuned: folders, names on the hub, modules, or pairs of a state dict and its config; `tuned` also
                `base+adapter`; not modified.

        Raises:
            RotationMergeError: one cannot be opened, or a tensor is only in one of the two, or has another shape there,
                or the fine-tune added tokens, or has them at other ids.
        """
        opened, fine = open_model(base, "base"), open_model(tuned, "tuned")
        check_names(opened, fine)
        check_tuned_tokens(opened, fine)
        check_shapes(opened, fine, remedy="name the base that it was tuned from, of the same class")
        return Delta(opened, opened.tensors, fine.tensors)

    def scaled(self, factor: float) -> Delta:
        """The change times a factor."""
        return replace(self, scale=factor * self.scale)

    __mul__ = __rmul__ = scaled

    def __neg__(self) -> Delta:
        return self.scaled(-1.0)

    def moved(self, alignment: Alignment, new: ModelLike, strict: bool = True) -> Delta:
        """The change in the coordinates of another base: L (tuned - base) R^T of each map.

        Args:
            alignment: of the base (the donor) to the other one (the anchor), whose class order the change takes. One
                without facts on its models is taken as it is.
            new: the other base, which the change is for then.
            strict: as of `Alignment.apply`.

        Raises:
            AlignmentError: the alignment is of another base, or of the language half of a model.
            CheckpointError: the bases know other tokens.
        """
        start, opened = self._settled(), new if isinstance(new, View) else open_model(new, "new")
        check_same_set(opened, start.base)
        base, tuned = start.base, replace(start.base, tensors=start.tuned)
        if alignment.basis is not None:
            base, tuned = alignment.opened_donor(base, strict), alignment.opened_donor(tuned, False)
        if base.text is not None:
            problem = "the change of a text-only model cannot be moved as a value into a vision-language model"
            raise AlignmentError(problem, remedy="take Delta.between(alignment.apply(base), alignment.apply(tuned))")
        rows = shared_rows([opened, start.base])
        return replace(start, base=opened, old=base.tensors, tuned=tuned.tensors, alignment=alignment, rows=rows)

    def moved_by(self, alignment: Alignment, dtype: torch.dtype | None, strict: bool) -> Delta:
        """The change in the coordinates that an alignment brings its base to; see `Alignment.apply`.

        Raises:
            AlignmentError: it is of another base than the alignment's donor, or of the language half of a model.
        """
        start = self._settled()
        return start.moved(alignment, alignment.apply(start.base, dtype, strict), strict)

    def _settled(self) -> Delta:
        """The change for its own base, after moving if it is moved."""
        if self.old is self.base.tensors:
            return self
        base, tuned = (delta.applied().to(torch.float64) for delta in (self.scaled(0.0), self))
        return Delta.between(base, tuned)

    def applied(self) -> View:
        """The base with the change, computed lazily and rounded once."""
        return self.base.blockwise(self.tensor, further=self.further)

    @property
    def further(self) -> list[Block]:
        """The base's layers that predict further tokens, if they change: no stream moves, and all models have them."""
        block, base = self.base.further_block, self.base.shapes
        models = (source.shapes for source in (self.old, self.tuned))
        same = all(shapes.get(info.name) == base[info.name] for shapes in models for info in block.tensors)
        moves = self.folding is not None or self.alignment.moves_streams(self.base.architecture)
        return [block] if block.tensors and same and not moves else []

    def state_dict(self) -> dict[str, Tensor]:
        """The task vector: the change of each stored tensor of the base, by name, in float64."""
        exact, changes = replace(self, precision=torch.float64), dict[str, Tensor]()
        for block in (*self.base.architecture.blocks, *self.further):
            for info in block.tensors:
                if read_tensor(info, self.base.tensors) is not None:
                    changes |= unstack(info, dense(exact.change(block, info), info).double())
        return changes

    def tensor(self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None) -> Tensor | None:
        """One tensor of the base with the change, rounded once; None if the base lacks it.

        Long vocabularies that both bases share are computed in slices.

        Args:
            dtype: storage type; None: that of the base.
        """
        sources = [source.cached(math.inf) for source in (self.base.tensors, self.old, self.tuned)]
        stored = read_tensor(info, sources[0])
        if stored is None or not stored.is_floating_point():
            return stored
        sliced = sources if info.vocabulary_axis is not None and self.rows is None and not self.low else []
        architecture = self.base.architecture

        def changed(parts: Sequence[Tensors] | None) -> Tensor:
            base, old, tuned = parts or sources
            if self.folding is not None:
                base = as_tensors(folded_tensors(architecture, base, self.folding.streams, self.folding.dtype))
            delta = replace(self, base=replace(self.base, tensors=base), old=old, tuned=tuned)
            before, change = read_tensor(info, base), dense(delta.change(block, info), info)
            assert before is not None
            return before.to(torch.promote_types(before.dtype, change.dtype)) + change

        return in_slices(block, info, sliced, dtype or stored.dtype, changed)

    def change(self, block: Block, info: TensorInfo) -> Change:
        """The change of one tensor in the base's storage form, unrounded; of low rank where it is known by factors.

        Raises:
            AlignmentError: a model lacks the tensor, or a gain cannot be divided by.
        """
        old, factors = reader(block, self.old), self.low.get(info.name)
        if factors is None:
            return self.scale * self._stored(block, info, self._difference(block, info))
        if self.record is not None:
            before, change = old(info.key), dense(factors, info)
            self.record(_squares(change), 0.0 if before is None else _squares(before.double()))

        def moved(part: TensorInfo, factor: Tensor) -> Tensor:
            folded = self.fold.tensor(block, part, lambda key: factor if key == info.key else old(key))
            return self._stored(block, part, folded)

        a, b = map(moved, factor_infos(info), (factors.a, factors.b))
        return replace(factors, a=a, b=b, scale=self.scale * factors.scale)

    @property
    def fold(self) -> Fold:
        """Folds the norms of the streams that are turned."""
        return Fold(self.base.architecture, self.alignment.folded)

    def _difference(self, block: Block, info: TensorInfo) -> Tensor:
        """The dense change of a tensor of the folded old base."""
        old, tuned = reader(block, self.old), self._tuned(block)
        before, after = old(info.key), tuned(info.key)
        if before is None or after is None or before.shape != after.shape:
            why = "a model lacks it" if before is None or after is None else "the fine-tune's has another shape"
            problem, remedy = f"'{info.name}' cannot be carried: {why}", "name the base that it was tuned from"
            raise AlignmentError(problem, where=block.name, remedy=f"{remedy}, of the same class")
        before, after = (self.fold.tensor(block, info, get) for get in (old, tuned))
        kind = torch.promote_types(before.dtype, self.precision)
        before = before.to(kind)
        change = check_finite(after.to(kind) - before, info.name, "the fine-tune or its base")
        if self.record is not None:
            self.record(_squares(change), _squares(before))
        return change

    def _tuned(self, block: Block) -> Get:
        """The fine-tune's tensors of a block, with changes of low rank."""
        stored, old = reader(block, self.tuned), reader(block, self.old)

        def get(key: str) -> Tensor | None:
            info = block.tensor(key)
            if info is None or info.name not in self.low:
                return stored(key)
            change, before = dense(self.low[info.name], info), old(key)
            return change if before is None else before.to(change) + change

        return get

    def _stored(self, block: Block, info: TensorInfo, change: Tensor) -> Tensor:
        """A change of the folded old base, or a factor of one, in the base's storage form and vocabulary."""
        moved = transform_tensor(change, info, self.alignment.transforms, change=True)

        def weight_change(key: str) -> Tensor | None:
            weight = block.tensor(key)
            if weight is None:
                return None
            return dense(replace(self, scale=1.0, record=None).change(block, weight), weight)

        moved = self.fold.unfold_change(block, info, moved, reader(block, self.base.tensors), weight_change)
        axis = info.vocabulary_axis
        if self.rows is None or axis is None:
            return moved
        whole = block.tensor(info.key)
        stored = read_tensor(whole, self.base.tensors) if whole is not None else None
        size = stored.shape[whole.vocabulary_axis or 0] if whole is not None and stored is not None else 0
        new_rows, old_rows = (rows.to(moved.device) for rows in self.rows)
        shape = [size if dim == axis else length for dim, length in enumerate(moved.shape)]
        return moved.new_zeros(shape).index_copy(axis, new_rows, moved.index_select(axis, old_rows))


def _squares(tensor: Tensor) -> float:
    return float(tensor.square().sum())
