"""Carries an adapter from its base to another one, also to one that stores fused maps separately."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor
from rotation_merge.carrying.delta import Delta
from rotation_merge.errors import AlignmentError, CheckpointError
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.adapters import WHOLE, WRONG_BASE, Adapter, PlacedChange, placed_changes
from rotation_merge.model.blocks import check_shape, read_tensor
from rotation_merge.model.forms import other_form, restructured
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.low_rank import LowRank, dense, factor_infos, stacks
from rotation_merge.model.rows import with_rows_of

SMALLER = f"use 'residual: permutation', or {WHOLE}"


def carry_adapter(
    adapter: Adapter, delta: Delta, config: Mapping[str, Any], rows: LabelRows
) -> tuple[AdapterWeights, list[str]]:
    """Carry an adapter of the old base to the new one.

    If the new base is the old one in other coordinates, it has with the carried adapter the old one's outputs with its
    own.

    Args:
        delta: between the bases, at its scale; `tuned` is the old base.
        config: the old base's.
        rows: order that brings the old base's classes into the new one's (see `model/labels.py`).

    Returns:
        The adapter, and lines on it.

    Raises:
        CheckpointError: the adapter does not belong to the old base, or changes a tensor that the new base lacks.
        AlignmentError: a form of change that these maps cannot carry; names it and the remedy.
    """
    changes, stored = placed_changes(adapter, config), delta.base.architecture
    norms = list[tuple[float, float]]()
    extended = _extended(delta, [change.spot for change in changes])
    moving = _MovingAdapter(adapter, replace(extended, record=lambda *squares: norms.append(squares)), rows)
    moving.move(changes)
    notes = [f"{len(norms)} changed tensors were carried."]
    notes += filter(None, [change_note("The change", *map(sum, zip(*norms, strict=True)))])
    facts = {**adapter.config, "base_model_name_or_path": str(delta.base.reference), "revision": None}
    if count := moving.constants:
        facts |= {"lora_bias": True, "init_lora_weights": True}
        notes.append(f"{count} modules got a bias (peft's lora_bias), because norms shift their inputs.")
    return _separated(AdapterWeights(facts, moving.tensors), changes, stored, adapter.path), notes


def _extended(delta: Delta, spots: Iterable[PossibleTensor]) -> Delta:
    """A change between bases that also know the tensors that an adapter adds or names differently.

    Such as a head, or stacked experts.
    """
    stored = delta.base.architecture
    blocks = list(stored.blocks)
    for spot in spots:
        place = next((i for i, block in enumerate(blocks) if spot.in_block(block)), None)
        if place is None:
            blocks.append(Block(spot.place, spot.module, spot.index, spot.place, (spot.info,)))
        elif blocks[place].tensor(spot.info.key) is None:
            blocks[place] = replace(blocks[place], tensors=(*blocks[place].tensors, spot.info))
    extended = replace(stored, blocks=tuple(blocks))
    new, old = (restructured(source, stored, extended) for source in (delta.base.tensors, delta.old))
    return replace(delta, base=replace(delta.base, architecture=extended, tensors=new), old=old, tuned=old)


@dataclass
class _MovingAdapter:
    """An adapter on its way to the new base.

    Attributes:
        delta: between the bases, which are extended by what it changes.
        rows: order that brings the old base's classes into the new one's.
        tensors: of the new adapter.
        constants: number of modules that got a bias, because a norm of the old base shifts their inputs.
    """

    adapter: Adapter
    delta: Delta
    rows: LabelRows
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: int = 0

    def move(self, changes: Sequence[PlacedChange]) -> None:
        """Carry all changes, those by factors and those of whole tensors."""
        of_tensor: dict[tuple[object, ...], list[PlacedChange]] = {}
        for each in changes:
            spot = each.spot
            of_tensor.setdefault((spot.module, spot.place, spot.index, spot.info.key), []).append(each)
        places = [
            (block, info, of_tensor.get((block.module, block.place, block.index, info.key), []))
            for block in self.delta.base.architecture.blocks
            for info in block.tensors
        ]
        factors = [(block, info, low) for block, info, every in places if (low := [x for x in every if x.a])]
        whole = {info.name: (block, info, x.value) for block, info, every in places for x in every if x.value}
        if dora := next((each.module for each in changes if each.magnitude), ""):
            raise self._refused(f"'{dora}' is a DoRA, whose magnitudes are those of its own base's rows", WHOLE)
        for _, info, _ in (*factors, *whole.values()):
            self._check_new(info)
        by_factors = {info.name: self._factors(entries, info) for _, info, entries in factors}
        saved = {name: self._saved(block, info, key) for name, (block, info, key) in whole.items()}
        absent = [name for name, (_, info, _) in whole.items() if read_tensor(info, self.delta.old) is None]
        old = self.delta.old.replaced({name: torch.zeros_like(saved[name]) for name in absent})
        self.delta = replace(self.delta, old=old, tuned=old.replaced(saved), low=by_factors)
        for block, info, entries in factors:
            self._write_factors(block, info, entries, whole)
        for name, (block, info, key) in whole.items():
            delta = replace(self.delta, scale=1.0) if name in absent else self.delta
            moved, stored = dense(delta.change(block, info), info), read_tensor(info, delta.base.tensors)
            self._put(key, moved if stored is None else stored.double() + moved)
            if self._constant(block, info, whole) is not None:
                raise self._cannot_hold(info.name)
        if self.constants:
            for entry in (entry for _, _, entries in factors for entry in entries):
                self._give_bias(entry)

    def _refused(self, problem: str, remedy: str) -> AlignmentError:
        return AlignmentError(problem, where=self.adapter.path, remedy=remedy)

    def _cannot_hold(self, name: str) -> AlignmentError:
        return self._refused(f"the shift of a norm adds a constant to '{name}', which cannot hold it", SMALLER)

    def _check_new(self, info: TensorInfo) -> None:
        """Refuse a change of a tensor that only the old base has."""
        names = {*info.names, *info.tied}
        if any(name in self.delta.old for name in names) and not any(name in self.delta.base for name in names):
            problem = f"changes '{info.name}', which the new base lacks"
            raise CheckpointError(problem, where=self.adapter.path, remedy=WHOLE)

    def _constant(self, block: Block, info: TensorInfo, saved: Container[str]) -> Tensor | None:
        """What the norm before a changed map adds to its bias, where that is not in the adapter; None: nothing."""
        bias = block.tensor(info.key.removesuffix("weight") + "bias")
        if bias is None or bias.key == info.key or bias.name in saved or bias.name not in self.delta.base:
            return None
        constant = dense(replace(self.delta, record=None).change(block, bias), bias)
        return constant if bool(constant.any()) else None

    # --- factors

    def _factors(self, entries: list[PlacedChange], info: TensorInfo) -> LowRank:
        """The change of one tensor, or of all separately stored experts."""
        first = entries[0]
        a, b = self._factors_of(first, info)
        if first.expert is not None:
            whole = [x.new_zeros(len(info.names), *x.shape) for x in (a, b)]
            for entry in entries:
                factors = self._factors_of(entry, info)
                if factors[0].shape != a.shape or entry.scale != first.scale:
                    problem = f"the experts' ranks or scales differ beside '{entry.module}'"
                    raise CheckpointError(problem, where=self.adapter.path, remedy=WHOLE)
                for stack, factor in zip(whole, factors, strict=True):
                    stack[entry.expert] = factor
            a, b = whole
        elif stacks(info):  # as peft's ParamWrapper lays them out
            count = info.axes[0].size or 1
            a, b = a.reshape(count, -1, a.shape[-1]), b.reshape(b.shape[0], -1, count).permute(2, 0, 1)
        self._check(info, a, b)
        return LowRank(a, b, first.scale)

    def _factors_of(self, entry: PlacedChange, info: TensorInfo) -> tuple[Tensor, Tensor]:
        """Both factors in float64; a bias (`lora_bias`) is one more column of b and a zero row of a."""
        a, b = (self.adapter.tensor(key).double() for key in (entry.a, entry.b))
        if entry.bias in self.adapter.shapes:
            bias = self.adapter.tensor(entry.bias).double()
            a = torch.cat([a, a.new_zeros(1, *a.shape[1:])])
            b = torch.cat([b, bias.reshape(-1, *[1] * (b.ndim - 1))], 1)
        return a, in_order(b, self._order(info))

    def _order(self, info: TensorInfo) -> tuple[int, tuple[int, ...]] | None:
        """The output dimension of a tensor, and its order that matches the new base's classes."""
        return (0, self.rows[info.name][1]) if info.name in self.rows else None

    def _check(self, info: TensorInfo, *factors: Tensor) -> None:
        """Check that the factors fit the base's tensor."""
        for part, factor in zip(factor_infos(info), factors, strict=True):
            lengths = [axis.size for axis in part.axes]
            if part.vocabulary_axis is not None and (whole := read_tensor(info, self.delta.old)) is not None:
                lengths[part.vocabulary_axis] = whole.shape[info.vocabulary_axis or 0]
            fits = (n in (None, m) for n, m in zip(lengths, factor.shape, strict=False))
            if len(lengths) != factor.ndim or not all(fits):
                words = " x ".join("any" if n is None else str(n) for n in lengths)
                problem = f"a factor of '{info.name}' is {list(factor.shape)}, in its base {words}"
                raise CheckpointError(problem, where=self.adapter.path, remedy=WRONG_BASE)

    def _write_factors(
        self, block: Block, info: TensorInfo, entries: list[PlacedChange], saved: Container[str]
    ) -> None:
        """Put a carried change back under the adapter's names."""
        moved = self.delta.change(block, info)
        assert isinstance(moved, LowRank)
        scaled = self.delta.scale * moved.b
        for entry in entries:
            a, b = moved.a, scaled
            if entry.expert is not None:
                a, b = a[entry.expert], b[entry.expert]
            elif stacks(info):
                a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
            if entry.bias in self.adapter.shapes:
                self._put(entry.bias, b[:, -1].reshape(-1))
                a, b = a[:-1], b[:, :-1]
            self._put(entry.a, a)
            self._put(entry.b, b)
        constant = self._constant(block, info, saved)
        if constant is not None:
            self._give_bias(entries[0], constant)
            self.constants += 1

    def _put(self, key: str, tensor: Tensor) -> None:
        self.tensors[key] = tensor.to(self.adapter.tensor(key).dtype).contiguous()

    def _give_bias(self, entry: PlacedChange, constant: Tensor | None = None) -> None:
        """Give a module peft's `lora_bias`, which is multiplied by the scale, and which all modules have or none."""
        if entry.embedding or (stacks(entry.spot.info) and (entry.expert is None or constant is not None)):
            raise self._cannot_hold(entry.module)
        b = self.tensors[entry.b]
        bias = self.tensors.get(entry.bias, b.new_zeros(b.shape[0]))
        self.tensors[entry.bias] = bias if constant is None else (bias.double() + constant / entry.scale).to(b.dtype)

    # --- whole tensors

    def _saved(self, block: Block, info: TensorInfo, key: str) -> Tensor:
        """A tensor that the adapter stores whole."""
        if info.stacked:
            raise self._refused(f"'{info.key}' is stored in full for each expert ({block.name})", WHOLE)
        tensor = in_order(self.adapter.tensor(key), self.rows.get(info.name))
        check_shape(info, tuple(tensor.shape), self.adapter.path)
        old = read_tensor(info, self.delta.old)
        if old is not None and info.vocabulary_axis is not None:
            tensor = with_rows_of(tensor, old, info.vocabulary_axis)  # padding does not come along
        if info.key in self._folded_keys(block) and (old is None or bool((tensor != old).any())):
            problem = f"the change of '{info.name}' cannot be carried with a rotated stream"
            raise self._refused(problem, "use 'residual: permutation', or merge the adapter and carry the whole model")
        return tensor

    def _folded_keys(self, block: Block) -> set[str | None]:
        """Gains and shifts of the block's norms of rotated streams, and its layer scales."""
        streams = self.delta.alignment.folded
        norms = [norm for norm in block.norms if norm.stream in streams]
        return {key for n in norms for key in (n.gain, n.shift)} | {s.gain for s in block.scales if s.stream in streams}


def _separated(
    written: AdapterWeights, changes: Sequence[PlacedChange], stored: Architecture, label: str
) -> AdapterWeights:
    """Split an adapter's fused modules if its base stores their parts separately: q, k and v, or gates and values.

    Without fused modules the adapter is unchanged. Experts stay as they are: peft and transformers take them in either
    form.

    Args:
        written: carried to the new base.
        changes: of the adapter that was carried.
        stored: of the new base.

    Raises:
        CheckpointError: it also holds whole modules.
    """
    parts = {change: _parts(change, stored) for change in changes if change.a}
    if all(len(places) == 1 for places in parts.values()):
        return written
    if whole := next((change.value for change in changes if change.value), None):
        problem = f"stores '{whole}' whole, and fuses modules that are separate in the new base"
        raise CheckpointError(problem, where=label, remedy=WHOLE)
    tensors, modules = dict(written.tensors), list[str]()
    ranks, alphas = dict[str, int](), dict[str, float]()
    for entry, places in parts.items():
        keys = [key for key in (entry.a, entry.b, entry.bias) if key in tensors]
        fused = {key: tensors.pop(key) for key in keys}
        rank = len(fused[entry.a])
        for module, start, length in places:
            for key, tensor in fused.items():
                cut = tensor if length is None or key == entry.a else tensor.narrow(0, start, length)
                tensors[key.replace(entry.module, module, 1)] = cut.clone()
            modules.append(module)
            ranks[re.escape(module)] = rank
            alphas[re.escape(module)] = entry.scale * (rank**0.5 if written.config.get("use_rslora") else rank)
    patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
    return AdapterWeights({**written.config, "target_modules": modules, **patterns}, tensors)


def _parts(entry: PlacedChange, stored: Architecture) -> list[tuple[str, int, int | None]]:
    """The new base's modules that an entry is for, with the outputs of it that are theirs: first and number."""
    info, block = entry.spot.info, next(filter(entry.spot.in_block, stored.blocks), None)
    if block is None or stacks(info):
        return [(entry.module, 0, None)]
    if (same := block.tensor(info.key)) is not None:
        return [(same.name.removesuffix(".weight"), 0, None)]
    form = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
    if form is None or len(form.cuts) == 1:
        return [(entry.module, 0, None)]
    starts = accumulate((cut.length for cut in form.cuts), initial=0)
    return [
        (cut.info.name.removesuffix(".weight"), start, cut.length)
        for cut, start in zip(form.cuts, starts, strict=False)
    ]
