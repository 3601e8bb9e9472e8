"""The change of a fine-tune as a value: scaled, moved to another base, written.

`Delta.tensors` gives the new base with the change (folded, where the alignment folds), `Delta.changes` the change of
the new base as it is stored, and `Delta.factors` that change by the factors of an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.carrying.carrier import Carrier, Change, Changes, is_bias, weight_key
from rotation_merge.errors import AlignmentError, not_written
from rotation_merge.matching.alignment import Alignment
from rotation_merge.model.blocks import read_tensor, unstack
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.open import ModelLike, check_names, open_model
from rotation_merge.model.rows import in_slices, views
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.view import View


@dataclass(frozen=True)
class Delta:
    """The change of a fine-tune, tuned - base, moved to another base or on its own.

    Attributes:
        carrier: the base that it is of (`old`), the one that it is for (`new`), and the maps between the two.
        tuned: the fine-tune's tensors, under the names of the carrier's architecture.
        scale: factor of the change.
        dtype: of the results; None: the new base's for storage.
        solved: names of the tensors that were solved or trained for the new base itself; None: it is a fine-tune's
            change. Solved tensors are read in float64 and already have the rank of an adapter, if one is wanted.
        opened: the model that it is for, where it was made of models at hand.
    """

    carrier: Carrier
    tuned: TensorSource
    scale: float = 1.0
    dtype: torch.dtype | None = None
    solved: frozenset[str] | None = None
    opened: View | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        base = "" if self.opened is None else f"for {self.opened.name}, "
        return f"Delta({base}scale {self.scale})"

    @staticmethod
    def between(base: ModelLike, tuned: ModelLike) -> Delta:
        """The change of a fine-tune from its base.

        Args:
            base, tuned: folders, names on the hub, modules, or pairs of a state dict and its config; `tuned` also
                `base+adapter`; not modified.

        Raises:
            RotationMergeError: one cannot be opened, or a tensor is only in one of the two, or has another shape there.
        """
        opened, fine = open_model(base, "base"), open_model(tuned, "tuned")
        check_names(opened, fine)
        for name, shape in opened.shapes.items():
            if fine.shapes.get(name, shape) != shape:
                problem = f"'{name}' has the shape {fine.shapes[name]}, in {opened.name} {shape}"
                remedy = "name the base that it was tuned from, of the same class"
                raise AlignmentError(problem, where=fine.name, remedy=remedy)
        carrier = Carrier(opened.architecture, opened.tensors, opened.tensors, Alignment({}))
        return Delta(carrier, fine.tensors, opened=opened)

    @staticmethod
    def from_solved(carrier: Carrier, tensors: Mapping[str, Tensor]) -> Delta:
        """The change of a carrier's new base to tensors that were solved for it, by its names."""
        new = carrier.new
        base = Carrier(carrier.architecture, new, new, Alignment({}))
        return Delta(base, as_tensors(new).replaced(tensors), solved=frozenset(tensors))

    def scaled(self, factor: float) -> Delta:
        """The change times a factor."""
        return replace(self, scale=factor * self.scale)

    __mul__ = __rmul__ = scaled

    def __neg__(self) -> Delta:
        return self.scaled(-1.0)

    def moved(self, alignment: Alignment, new: ModelLike, strict: bool = True) -> Delta:
        """The change in the coordinates of another base: L (tuned - base) R^T of each map.

        Args:
            alignment: of the base (the donor) to the other one (the anchor), whose class order the change takes.
            new: the other base, which the change is for then.
            strict: as of `Alignment.apply`.

        Raises:
            AlignmentError: the alignment is of another base, or of the language half of a model.
        """
        start, opened = self._settled(), open_model(new, "new")
        base, tuned = start._as_donor(alignment, strict)
        carrier = Carrier(opened.architecture, base.tensors, opened.tensors, alignment)
        return replace(start, carrier=carrier, tuned=tuned.tensors, opened=opened)

    def moved_by(self, alignment: Alignment, dtype: torch.dtype | None, strict: bool) -> Delta:
        """The change in the coordinates that an alignment brings its base to; see `Alignment.apply`.

        Raises:
            AlignmentError: it is of another base than the alignment's donor, or of the language half of a model.
        """
        start, maps = self._settled(), alignment.without_biases()
        assert start.opened is not None
        base, tuned = start._as_donor(maps, strict)
        moved = maps.apply(replace(start.opened, tensors=as_tensors(start.carrier.new)), dtype, strict)
        carrier = Carrier(base.architecture, base.tensors, moved.tensors, maps)
        return replace(start, carrier=carrier, tuned=tuned.tensors, dtype=dtype, opened=moved)

    def _as_donor(self, alignment: Alignment, strict: bool) -> tuple[View, View]:
        """The base and the fine-tune in the anchor's sizes and class order; errors as for `moved_by`."""
        assert self.opened is not None
        models = (replace(self.opened, tensors=as_tensors(source)) for source in (self.carrier.new, self.tuned))
        base, tuned = (
            alignment.opened_donor(model, check) for model, check in zip(models, (strict, False), strict=True)
        )
        if base.text is not None:
            problem = "the change of a text-only model cannot be moved as a value into a vision-language model"
            raise AlignmentError(problem, remedy="take Delta.between(alignment.apply(base), alignment.apply(tuned))")
        return base, tuned

    def _settled(self) -> Delta:
        """The change for its own base, after moving if it is moved."""
        assert self.opened is not None, "only of models at hand"
        if self.carrier.old is self.carrier.new:
            return self
        base, tuned = (delta.applied().to(torch.float64) for delta in (self.scaled(0.0), self))
        return Delta.between(base, tuned)

    def applied(self) -> View:
        """The base with the change, computed lazily.

        It is folded if the alignment folds, and then lacks layers that predict tokens further ahead.
        """
        assert self.opened is not None, "only of models at hand"
        left_out = self.opened.unread if self.carrier.alignment.folded else []
        notes = (not_written(left_out),) if left_out else ()
        return self.opened.blockwise(self.tensor, left_out=frozenset(left_out), notes=notes)

    def state_dict(self) -> dict[str, Tensor]:
        """The task vector: the change of each stored tensor of the base, by name."""
        return self.changes()

    @property
    def precision(self) -> torch.dtype:
        """The least precise dtype of the change's computation."""
        return torch.float32 if self.solved is None else torch.float64

    def _holds(self, info: TensorInfo) -> bool:
        return self.solved is None or info.name in self.solved

    def tensors(self) -> Iterator[tuple[TensorInfo, dict[str, Tensor], float, float]]:
        """The new base with the carried change, tensor by tensor, in the new base's storage dtype.

        Yields:
            The tensor, its pieces by name, and the squared norms of its change and of the old base's tensor.
        """
        carrier = self.carrier
        for block in carrier.architecture.blocks:
            for info in block.tensors:
                if not self._holds(info) or (stored := read_tensor(info, carrier.new)) is None:
                    continue
                if not stored.is_floating_point():
                    yield info, unstack(info, stored), 0.0, 0.0
                    continue
                tensor, change, before = self.carried(block, info, stored)
                yield info, unstack(info, tensor.to(self.dtype or stored.dtype).contiguous()), change, before

    def named(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the new base with the change, by name; of a solved change, its tensors alone.

        Args:
            dtype: storage type, rounded to once; None: that of the new base.
        """
        for _, pieces, *_ in replace(self, dtype=dtype).tensors():
            yield from pieces.items()

    def tensor(self, block: Block, info: TensorInfo, dtype: torch.dtype | None = None) -> Tensor | None:
        """One tensor of the new base with the carried change, rounded once; None if the new base lacks it.

        Args:
            dtype: storage type; None: that of the new base.
        """
        stored = read_tensor(info, self.carrier.new)
        if stored is None or not stored.is_floating_point():
            return stored
        return replace(self, dtype=dtype).carried(block, info, stored)[0].to(dtype or stored.dtype).contiguous()

    def carried(self, block: Block, info: TensorInfo, stored: Tensor) -> tuple[Tensor, float, float]:
        """A tensor of the new base with the change, and the squared norms of the change and of the old base's tensor.

        Args:
            stored: the new base's; long vocabularies that are shared come in slices, rounded to its type.
        """
        sources, norms = (self.carrier.old, self.carrier.new, self.tuned), list[tuple[float, float]]()
        same = info.vocabulary_axis is not None and self.carrier.rows is None
        parts_of = views(block, sources if same else [])

        def made(part: slice | None) -> Tensor:
            view = self if part is None else self._of(*parts_of(part))
            tensor, *both = view._with_change(block, info)
            norms.append((both[0], both[1]))
            return tensor

        known = [tensor for source in sources if same and (tensor := read_tensor(info, source)) is not None]
        result = in_slices(info, known, self.dtype or stored.dtype, made) if known else made(None)
        change, before = map(sum, zip(*norms, strict=True))
        return result, change, before

    def _of(self, old: TensorSource, new: TensorSource, tuned: TensorSource) -> Delta:
        """The same change between other sources."""
        return replace(self, carrier=replace(self.carrier, old=old, new=new), tuned=tuned)

    def _with_change(self, block: Block, info: TensorInfo) -> tuple[Tensor, float, float]:
        """See `tensors`; without rounding."""
        carrier = self.carrier
        base = read_tensor(info, self._folded(carrier.new))
        assert base is not None
        change, before = self._change(block, info)
        moved = carrier.with_new_rows(block, info, carrier.moved(info, change))
        return base + self.scale * moved, float(change.square().sum()), before

    def factors(self, block: Block, rank: int | None) -> tuple[Changes, dict[str, tuple[float, float]]]:
        """A block's change in the new base's storage form, every matrix cut to low rank (None: not cut).

        Changes of folded streams' norms go into the maps that read them.

        Returns:
            The changes by key, those of biases and of other norms whole; and by key the squared norm of each, and the
            part of it that is kept.
        """
        result: Changes = {}
        norms: dict[str, tuple[float, float]] = {}
        for info in sorted(block.tensors, key=lambda i: is_bias(i.key)):
            if not self._holds(info) or read_tensor(info, self.carrier.new) is None:
                continue
            change, _ = self._change(block, info)
            weight = block.tensor(weight_key(info.key)) if is_bias(info.key) else None
            beside = dense(result[weight.key], weight) if weight is not None and weight.key in result else None
            moved = self.carrier.stored(block, info, change.double(), beside)
            whole = self.scale * moved
            if self.solved is None and not bool(whole.any()):
                continue  # an adapter of what was solved has factors of zero where nothing is worth carrying
            result[info.key] = cut = (
                of_low_rank(whole, info, rank, trimmed=self.solved is None)
                if rank is not None and len(info.axes) > 1
                else whole
            )
            norm = float(whole.square().sum())
            norms[info.key] = norm, norm - float((whole - dense(cut, info)).square().sum())
        return result, norms

    def changes(self, left_out: str | None = None, rank: int | None = None) -> dict[str, Tensor]:
        """Changes of all tensors in the new base's storage form, by name, in float64.

        Args:
            left_out: a head that stays the embedding's tensor.
            rank: that the change of every matrix is cut down to; None: not.
        """
        return {name: change for part in self.changes_by_block(left_out, rank) for name, change in part.items()}

    def changes_by_block(self, left_out: str | None, rank: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield `changes` block by block, so that one block is in memory at a time."""
        for block in self.carrier.architecture.blocks:
            change: dict[str, Tensor] = {}
            for key, part in self.factors(block, rank)[0].items():
                if (info := block.tensor(key)) is not None and info.name != left_out:
                    change |= unstack(info, dense(part, info))
            yield change

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
