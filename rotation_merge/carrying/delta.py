"""The change of a fine-tune as a value: scaled, moved to another base, applied, or cut to low rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.carrying.carrier import Carrier, Change, Changes, is_bias, weight_key
from rotation_merge.carrying.vocabulary import check_no_added_tokens, check_same_set
from rotation_merge.errors import AlignmentError, not_written
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.pair import check_shapes
from rotation_merge.model.blocks import blockwise, read_tensor, unstack
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.open import ModelLike, check_names, open_model
from rotation_merge.model.rows import in_slices
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import row_pair

Record = Callable[[float, float], None]
"""Takes the squared norms of a tensor's change and of the old base's tensor."""


@dataclass(frozen=True)
class Delta:
    """The change of a fine-tune, tuned - base, moved to another base or on its own.

    Attributes:
        carrier: the base that it is of (`old`), the one that it is for (`new`), and the maps between the two.
        tuned: the fine-tune's tensors, under the names of the carrier's architecture.
        opened: the model that it is for.
        scale: factor of the change.
        precision: the least precise dtype of its computation.
        solved: names of tensors that were solved for the new base: an adapter keeps factors of the whole rank for them,
            also where nothing is worth carrying.
    """

    carrier: Carrier
    tuned: TensorSource
    opened: View = field(repr=False)
    scale: float = 1.0
    precision: torch.dtype = torch.float32
    solved: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"Delta(for {self.opened.name}, scale {self.scale})"

    @staticmethod
    def between(base: ModelLike, tuned: ModelLike) -> Delta:
        """The change of a fine-tune from its base.

        Args:
            base, tuned: folders, names on the hub, modules, or pairs of a state dict and its config; `tuned` also
                `base+adapter`; not modified.

        Raises:
            RotationMergeError: one cannot be opened, or a tensor is only in one of the two, or has another shape there,
                or the fine-tune added tokens.
        """
        opened, fine = open_model(base, "base"), open_model(tuned, "tuned")
        check_names(opened, fine)
        check_no_added_tokens(opened, fine)
        check_shapes(opened, fine, remedy="name the base that it was tuned from, of the same class")
        carrier = Carrier(opened.architecture, opened.tensors, opened.tensors, Alignment({}))
        return Delta(carrier, fine.tensors, opened)

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
        start, opened = self._settled(), open_model(new, "new")
        check_same_set(opened, start.opened)
        base, tuned = start._as_donor(alignment, strict)
        rows = row_pair(opened, start.opened)
        carrier = Carrier(opened.architecture, base.tensors, opened.tensors, alignment, rows)
        return replace(start, carrier=carrier, tuned=tuned.tensors, opened=opened)

    def moved_by(self, alignment: Alignment, dtype: torch.dtype | None, strict: bool) -> Delta:
        """The change in the coordinates that an alignment brings its base to; see `Alignment.apply`.

        Raises:
            AlignmentError: it is of another base than the alignment's donor, or of the language half of a model.
        """
        start, maps = self._settled(), alignment.without_biases()
        base, tuned = start._as_donor(maps, strict)
        moved = maps.apply(replace(start.opened, tensors=as_tensors(start.carrier.new)), dtype, strict)
        carrier = Carrier(base.architecture, base.tensors, moved.tensors, maps)
        return replace(start, carrier=carrier, tuned=tuned.tensors, opened=moved)

    def _as_donor(self, alignment: Alignment, strict: bool) -> tuple[View, View]:
        """The base and the fine-tune in the anchor's sizes and class order; errors as for `moved_by`."""
        base, tuned = (replace(self.opened, tensors=as_tensors(source)) for source in (self.carrier.new, self.tuned))
        if alignment.basis is None:
            return base, tuned
        base, tuned = alignment.opened_donor(base, strict), alignment.opened_donor(tuned, False)
        if base.text is not None:
            problem = "the change of a text-only model cannot be moved as a value into a vision-language model"
            raise AlignmentError(problem, remedy="take Delta.between(alignment.apply(base), alignment.apply(tuned))")
        return base, tuned

    def _settled(self) -> Delta:
        """The change for its own base, after moving if it is moved."""
        if self.carrier.old is self.carrier.new:
            return self
        base, tuned = (delta.applied().to(torch.float64) for delta in (self.scaled(0.0), self))
        return Delta.between(base, tuned)

    def applied(self, *, record: Record | None = None) -> View:
        """The base with the change, computed lazily.

        It is folded if the alignment folds, and then lacks layers that predict tokens further ahead.

        Args:
            record: called for every tensor that is computed with the squared norms of its change and of the old
                base's tensor.
        """
        left_out = self.opened.unread if self.carrier.alignment.folded else []
        notes = (not_written(left_out),) if left_out else ()

        def tensor(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
            return self.tensor(block, info, dtype, record)

        return self.opened.blockwise(tensor, left_out=frozenset(left_out), notes=notes)

    def stored(self, left_out: str | None = None) -> Tensors:
        """The base with the change in its storage form, unrounded: nothing is folded, and changes of norms of folded
        streams are in the maps that read them.

        Args:
            left_out: a tensor that stays the base's.
        """
        return with_changes(self.carrier, lambda block: self.factors(block, None)[0], left_out)

    def state_dict(self) -> dict[str, Tensor]:
        """The task vector: the change of each stored tensor of the base, by name, in float64."""
        changes: dict[str, Tensor] = {}
        for block in self.carrier.architecture.blocks:
            for key, part in self.factors(block, None)[0].items():
                if (info := block.tensor(key)) is not None:
                    changes |= unstack(info, dense(part, info))
        return changes

    def tensor(
        self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None, record: Record | None = None
    ) -> Tensor | None:
        """One tensor of the new base with the carried change, rounded once; None if the new base lacks it.

        Long vocabularies that both bases share are computed in slices.

        Args:
            dtype: storage type; None: that of the new base.
            record: see `applied`.
        """
        sources = [as_tensors(source).cached(EVERYTHING) for source in (self.carrier.old, self.carrier.new, self.tuned)]
        stored = read_tensor(info, sources[1])
        if stored is None or not stored.is_floating_point():
            return stored
        same = info.vocabulary_axis is not None and self.carrier.rows is None
        norms = list[tuple[float, float]]()
        whole = replace(self, carrier=replace(self.carrier, dtype=self.carrier.dtype or dtype))

        def computed(parts: Sequence[Tensors] | None) -> Tensor:
            delta = whole._of(*(parts or sources))
            tensor, *squares = delta._with_change(block, info)
            norms.append((squares[0], squares[1]))
            return tensor

        rounded = dtype or stored.dtype
        result = in_slices(block, info, sources if same else [], rounded, computed)
        if record is not None:
            record(*map(sum, zip(*norms, strict=True)))
        return result.to(rounded).contiguous()

    def _of(self, old: TensorSource, new: TensorSource, tuned: TensorSource) -> Delta:
        """The same change between other sources."""
        return replace(self, carrier=replace(self.carrier, old=old, new=new), tuned=tuned)

    def _with_change(self, block: Block, info: TensorInfo) -> tuple[Tensor, float, float]:
        """A tensor with the change, unrounded, and the squared norms of the change and of the old base's tensor."""
        base = read_tensor(info, self._folded(self.carrier.new))
        assert base is not None
        change, before = self._change(block, info)
        moved = self.carrier.with_new_rows(block, info, self.carrier.moved(info, change))
        return base + self.scale * moved, float(change.square().sum()), before

    def factors(self, block: Block, rank: int | None) -> tuple[Changes, dict[str, tuple[float, float]]]:
        """A block's change in the new base's storage form, every matrix cut to low rank (None: not cut).

        Changes of folded streams' norms go into the maps that read them. Tensors that do not change are left out,
        unless they were solved.

        Returns:
            The changes by key, those of biases and of other norms whole; and by key the squared norm of each, and the
            part of it that is kept.
        """
        result: Changes = {}
        norms: dict[str, tuple[float, float]] = {}
        for info in sorted(block.tensors, key=lambda i: is_bias(i.key)):
            if read_tensor(info, self.carrier.new) is None:
                continue
            change, _ = self._change(block, info)
            weight = block.tensor(weight_key(info.key)) if is_bias(info.key) else None
            beside = dense(result[weight.key], weight) if weight is not None and weight.key in result else None
            moved = self.carrier.stored(block, info, change.double(), beside)
            if not bool(moved.any()) and info.name not in self.solved:
                continue
            whole, is_cut = self.scale * moved, rank is not None and len(info.axes) > 1
            trimmed = self.scale != 0 and info.name not in self.solved
            result[info.key] = cut = of_low_rank(whole, info, rank or 0, trimmed) if is_cut else whole
            norm = float(whole.square().sum())
            norms[info.key] = norm, norm - float((whole - dense(cut, info)).square().sum())
        return result, norms

    def _folded(self, source: TensorSource) -> TensorSource:
        carrier = self.carrier
        return folded_tensors(carrier.architecture, source, carrier.alignment.folded, carrier.dtype)

    def _change(self, block: Block, info: TensorInfo) -> tuple[Tensor, float]:
        """The change of a tensor of the folded model, and the squared norm of the original tensor."""
        old, tuned = (read_tensor(info, self._folded(source)) for source in (self.carrier.old, self.tuned))
        if old is None or tuned is None or old.shape != tuned.shape:
            why = "the fine-tune's has another shape" if old is not None and tuned is not None else "a model lacks it"
            raise AlignmentError(
                f"'{info.name}' cannot be carried: {why}",
                where=block.name,
                remedy="name the base that it was tuned from, of the same class",
            )
        old = old.to(torch.promote_types(old.dtype, self.precision))
        change = tuned.to(old.dtype) - old
        if not bool(torch.isfinite(change).all()):
            problem = f"'{info.name}' of the fine-tune or its base holds NaN or infinity"
            raise AlignmentError(problem, where=block.name, remedy="repair or replace the checkpoint")
        return change, float(old.square().sum())


def with_changes(
    carrier: Carrier, changes_of: Callable[[Block], Changes], left_out: str | None = None, scale: float = 1.0
) -> Tensors:
    """The new base with changes in its storage form, unrounded; those of one block are kept in memory.

    Args:
        changes_of: gives the changes of a block by key.
        left_out: a tensor that stays as it is.
    """
    latest: dict[str, Changes] = {}

    def tensor(block: Block, info: TensorInfo) -> Tensor | None:
        if block.name not in latest:
            changes = changes_of(block)
            latest.clear()
            latest[block.name] = changes
        change, stored = latest[block.name].get(info.key), read_tensor(info, carrier.new)
        if change is None or stored is None or info.name == left_out:
            return None
        added = dense(change, info)
        return stored.to(added) + scale * added

    return blockwise(carrier.architecture, carrier.new, tensor)


EVERYTHING = 1 << 62
"""Bytes of what is kept while one tensor is computed, so that each source is read once."""

NOTHING_LEFT = 1e-4
"""Share of a change's largest singular value below which singular values are rounding, 1e-8 of its squared norm."""


def of_low_rank(change: Tensor, info: TensorInfo, rank: int, trimmed: bool = False) -> Change:
    """The nearest change of this rank (Eckart and Young), with equally large factors.

    Tables of positions and tokens that belong to no layer (1, n, width) and convolutions of single channels
    (channels, 1, kernel) have no place in an adapter and stay whole.

    Args:
        trimmed: of the rank that the change has, where that is less.
    """
    if change.ndim > 2 and not stacks(info) and (transposed(info) or (change.shape[1] == 1 and change.ndim == 3)):
        return change
    matrix = change.mT if transposed(info) else change
    shape = matrix.shape
    if matrix.ndim > 2 and not stacks(info):
        matrix = matrix.flatten(1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    if trimmed:
        rank = min(rank, int((s > NOTHING_LEFT * s.max()).reshape(-1, s.shape[-1]).any(0).sum()))
    root = s[..., :rank].sqrt()
    a, b = root[..., :, None] * v[..., :rank, :], u[..., :rank] * root[..., None, :]
    if matrix.shape != shape:
        a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
    return LowRank(a, b)


def share(norms: Mapping[str, tuple[float, float]]) -> float:
    """Share of the squared norm that remains after cutting."""
    whole = sum(norm for norm, _ in norms.values())
    return sum(cut_norm for _, cut_norm in norms.values()) / whole if whole else 1.0
