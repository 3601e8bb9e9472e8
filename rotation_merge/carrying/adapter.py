"""Carries an adapter from its base to another one, also to one that stores fused maps separately."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor
from rotation_merge.carrying.carrier import Carrier, Change, Changes
from rotation_merge.errors import AlignmentError, CheckpointError
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_files import AdapterWeights
from rotation_merge.model.adapters import WHOLE, WRONG_BASE, Adapter, PlacedChange, placed_changes
from rotation_merge.model.blocks import check_shape, read_tensor
from rotation_merge.model.forms import ComposedTensor, other_form, restructured
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.low_rank import LowRank, dense, factor_infos, output_axis, stacks
from rotation_merge.model.rows import with_rows_of
from rotation_merge.model.tensors import TensorSource

SMALLER = f"use 'residual: permutation', or {WHOLE}"


def carry_adapter(
    adapter: Adapter,
    carrier: Carrier,
    config: Mapping[str, Any],
    new_name: str,
    scale: float,
    rows: LabelRows | None,
) -> tuple[AdapterWeights, list[str]]:
    """Carry an adapter of the old base to the new one.

    If the new base is the old one in other coordinates, it has with the carried adapter the old one's outputs with its
    own.

    Args:
        carrier: of the old base to the new one.
        config: the old base's.
        new_name: the new base, for adapter_config.json.
        scale: factor of every change.
        rows: order that brings the old base's classes into the new one's (see `model/labels.py`).

    Returns:
        The adapter, and lines on it.

    Raises:
        CheckpointError: the adapter does not belong to the old base, or changes a tensor that the new base lacks.
        AlignmentError: a form of change that these maps cannot carry; names it and the remedy.
    """
    changes = placed_changes(adapter, config)
    extended = _with_all(carrier, [change.spot for change in changes])
    moving = _MovingAdapter(adapter, extended, scale, rows or {}, extended.architecture.blocks[0])
    for block in extended.architecture.blocks:
        if in_block := [change for change in changes if change.spot.in_block(block)]:
            replace(moving, block=block).carry(in_block)
    facts = {**adapter.config, "base_model_name_or_path": new_name, "revision": None}
    if moving.constants:
        moving.give_biases([change for change in changes if change.a])
        facts |= {"lora_bias": True, "init_lora_weights": True}
    written = AdapterWeights(facts, moving.tensors)
    return separated_adapter(written, changes, carrier.architecture, adapter.path), moving.notes()


def _with_all(carrier: Carrier, spots: Iterable[PossibleTensor]) -> Carrier:
    """Extend a carrier by the tensors that an adapter adds or names differently from the bases' files."""
    stored, extended = carrier.architecture, _extended(carrier.architecture, spots)
    old, new = (restructured(source, stored, extended) for source in (carrier.old, carrier.new))
    return replace(carrier, architecture=extended, old=old, new=new)


def _extended(architecture: Architecture, spots: Iterable[PossibleTensor]) -> Architecture:
    """Extend the architecture by the tensors that an adapter adds or names differently: a head, stacked experts."""
    blocks = list(architecture.blocks)
    for spot in spots:
        place = next((i for i, block in enumerate(blocks) if spot.in_block(block)), None)
        if place is None:
            blocks.append(Block(spot.place, spot.module, spot.index, spot.place, (spot.info,)))
        elif blocks[place].tensor(spot.info.key) is None:
            blocks[place] = replace(blocks[place], tensors=(*blocks[place].tensors, spot.info))
    return replace(architecture, blocks=tuple(blocks))


@dataclass
class _MovingAdapter:
    """An adapter on its way to the new base, block by block.

    Attributes:
        scale: factor of every change.
        rows: order that brings the old base's classes into the new one's.
        block: the present one.
        tensors: of the new adapter.
        norms: squared norm of every change, and of the old base's tensor before it, by tensor.
        constants: modules that got a bias, because a norm of the old base shifts their inputs.
    """

    adapter: Adapter
    carrier: Carrier
    scale: float
    rows: LabelRows
    block: Block
    tensors: dict[str, Tensor] = field(default_factory=dict)
    norms: dict[str, tuple[float, float]] = field(default_factory=dict)
    constants: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Lines on what was carried."""
        warning = change_note("The change", *map(sum, zip(*self.norms.values(), strict=True)))
        notes = [f"{len(self.norms)} changed tensors were carried.", *([warning] if warning else [])]
        if self.constants:
            count = len(self.constants)
            notes.append(f"{count} modules got a bias (peft's lora_bias), because norms shift their inputs.")
        return notes

    def _add_norm(self, info: TensorInfo, change: Change) -> None:
        so_far, old = self.norms.get(info.name, (0.0, 0.0))[0], read_tensor(info, self.carrier.old)
        before = 0.0 if old is None else float(old.double().square().sum())
        self.norms[info.name] = so_far + float(dense(change, info).square().sum()), before

    def carry(self, changes: Sequence[PlacedChange]) -> None:
        """Carry the adapter's changes of this block, by factors and of whole tensors."""
        groups: dict[str, list[PlacedChange]] = {}
        for entry in changes:
            if entry.a:
                groups.setdefault(entry.spot.info.key, []).append(entry)
        saved = {change.value: change.spot.info.key for change in changes if change.value}
        low: Changes = {key: self._change(group) for key, group in groups.items()}
        moved = self.carrier.block(self.block, low)
        whole = self.carrier.block(self.block, {key: self._saved_change(name, key) for name, key in saved.items()})
        for key, group in groups.items():
            self._there(key)
            self._write(group, low[key], moved[key])
            constant = self._dense(_bias_of(key), moved[_bias_of(key)]) if _bias_of(key) in moved else None
            if group[0].magnitude:
                self._write_magnitude(group[0], low[key], moved[key], constant)
            elif constant is not None and _bias_of(key) in saved.values():
                whole[_bias_of(key)] = self._dense(_bias_of(key), whole[_bias_of(key)]) + constant.reshape(-1)
            elif constant is not None:
                self._write_constant(group[0], constant)
        for name, key in saved.items():
            self._there(key)
            self._write_saved(name, key, whole.pop(key))
        if whole:
            key = next(iter(whole))
            raise self._refused(f"the shift of a norm adds a constant to '{key}', which cannot hold it", SMALLER)

    def _info(self, key: str) -> TensorInfo:
        info = self.block.tensor(key)
        assert info is not None
        return info

    def _dense(self, key: str, change: Change) -> Tensor:
        return dense(change, self._info(key))

    def _refused(self, problem: str, remedy: str) -> AlignmentError:
        return AlignmentError(f"{problem} ({self.block.name})", where=self.adapter.path, remedy=remedy)

    def _there(self, key: str) -> None:
        """Refuse a change of a tensor that only the old base has."""
        info = self._info(key)
        if _holds(self.carrier.old, info) and not _holds(self.carrier.new, info):
            problem = f"changes '{info.name}', which the new base lacks"
            raise CheckpointError(problem, where=self.adapter.path, remedy=WHOLE)

    # --- factors

    def _change(self, entries: list[PlacedChange]) -> LowRank:
        """The change of one tensor, or of all separately stored experts."""
        first, info = entries[0], self._info(entries[0].spot.info.key)
        a, b = self._factors(first, info)
        if first.expert is not None:
            whole = [x.new_zeros(len(info.names), *x.shape) for x in (a, b)]
            for entry in entries:
                factors = self._factors(entry, info)
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

    def _factors(self, entry: PlacedChange, info: TensorInfo) -> tuple[Tensor, Tensor]:
        """Both factors in float64; a bias (`lora_bias`) is one more column of b and a zero row of a."""
        a, b = (self.adapter.tensor(key).double() for key in (entry.a, entry.b))
        if entry.bias in self.adapter.shapes:
            bias = self.adapter.tensor(entry.bias).double()
            a = torch.cat([a, a.new_zeros(1, *a.shape[1:])])
            b = torch.cat([b, bias.reshape(-1, *[1] * (b.ndim - 1))], 1)
        return a, in_order(self.scale * b, self._order(info))

    def _order(self, info: TensorInfo) -> tuple[int, tuple[int, ...]] | None:
        """The output dimension of a tensor, and its order that matches the new base's classes."""
        return (0, self.rows[info.name][1]) if info.name in self.rows else None

    def _check(self, info: TensorInfo, *factors: Tensor) -> None:
        """Check that the factors fit the base's tensor."""
        for part, factor in zip(factor_infos(info), factors, strict=True):
            lengths = [axis.size for axis in part.axes]
            if part.vocabulary_axis is not None and (whole := read_tensor(info, self.carrier.old)) is not None:
                lengths[part.vocabulary_axis] = whole.shape[info.vocabulary_axis or 0]
            if len(lengths) != factor.ndim or any(
                n is not None and n != m for n, m in zip(lengths, factor.shape, strict=True)
            ):
                words = " x ".join("any" if n is None else str(n) for n in lengths)
                raise CheckpointError(
                    f"a factor of '{info.name}' is {list(factor.shape)}, in its base {words}",
                    where=self.adapter.path,
                    remedy=WRONG_BASE,
                )

    def _write(self, entries: list[PlacedChange], before: Change, moved: Change) -> None:
        """Put a carried change back under the adapter's names."""
        assert isinstance(moved, LowRank)
        first, info = entries[0], self._info(entries[0].spot.info.key)
        self._add_norm(info, before)
        a, b = moved.a, moved.b
        if first.bias in self.adapter.shapes:
            self._put(first.bias, b[:, -1].reshape(-1))
            a, b = a[:-1], b[:, :-1]
        if first.expert is None and stacks(info):
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        for entry in entries:
            self._put(entry.a, a if entry.expert is None else a[entry.expert])
            self._put(entry.b, b if entry.expert is None else b[entry.expert])

    def _put(self, key: str, tensor: Tensor) -> None:
        self.tensors[key] = tensor.to(self.adapter.tensor(key).dtype).contiguous()

    def _write_constant(self, entry: PlacedChange, constant: Tensor) -> None:
        """Write the constant from a norm's shift as peft's `lora_bias` (which is multiplied by the scale)."""
        if stacks(self._info(entry.spot.info.key)) or entry.embedding:
            raise self._refused(
                f"the shift of a norm adds a constant to '{entry.module}', which cannot hold it", SMALLER
            )
        bias, added = self.tensors.get(entry.bias), constant / entry.scale
        added = added if bias is None else bias.double() + added
        self.tensors[entry.bias] = added.to(self.tensors[entry.b].dtype)
        self.constants.append(entry.module)

    def give_biases(self, entries: Iterable[PlacedChange]) -> None:
        """Give every module a zero bias if any has one: peft knows only all or none (`lora_bias`)."""
        for entry in entries:
            if entry.embedding or (stacks(entry.spot.info) and entry.expert is None):
                problem = f"a norm's shift adds a constant, but peft has no bias for '{entry.module}'"
                raise AlignmentError(problem, where=self.adapter.path, remedy=SMALLER)
            if entry.bias not in self.tensors:
                b = self.tensors[entry.b]
                self.tensors[entry.bias] = b.new_zeros(b.shape[0])

    def _write_magnitude(self, entry: PlacedChange, before: Change, moved: Change, constant: Tensor | None) -> None:
        """DoRA: each output keeps the ratio of its magnitude to the norm of its row with the product added.

        Source: DoRA, arXiv 2402.09353, eq. 5: the weight is ``m V / |V|``, row by row, with ``V = W + s B A``.
        """
        info = self._info(entry.spot.info.key)
        dim, axis = output_axis(info)
        maps, centred = self.carrier.alignment.transforms, self.carrier.fold.centred
        turned = any(p.space.name in maps and maps[p.space.name].mixes(p.role) for p in axis.parts)
        turned = turned or any(p.space.name in centred and p.role == "write" for p in axis.parts)
        if turned or constant is not None or self.scale != 1 or len(info.axes) != 2 or entry.embedding:
            why = "its outputs are rotated" if turned else "it has a form without magnitudes of its own"
            why = "the shift of a norm adds a constant" if constant is not None else why
            why = "its change cannot be scaled" if self.scale != 1 else why
            raise self._refused(f"the DoRA of '{entry.module}' cannot be carried exactly: {why}", WHOLE)
        stored = in_order(self.adapter.tensor(entry.magnitude), self._order(info))
        lengths = []
        for source, change in ((self.carrier.old, before), (self.carrier.new, moved)):
            weight = read_tensor(info, source)
            assert weight is not None
            lengths.append((weight.double() + dense(change, info)).norm(dim=1 - dim))
        ratio = stored.double().flatten() / lengths[0]
        width = info.axes[1 - dim].size or 0
        columns = LowRank(ratio.new_zeros(2, width), torch.stack([ratio, torch.ones_like(ratio)], 1))
        placed = self.carrier.block(self.block, {info.key: columns})[info.key]
        assert isinstance(placed, LowRank)
        ratio, carried_ones = placed.b.unbind(1)  # zero at padding
        ratio = torch.where(carried_ones == 0, torch.ones_like(carried_ones), ratio / carried_ones)
        self._put(entry.magnitude, (ratio * lengths[1]).reshape(-1, *stored.shape[1:]))

    # --- whole tensors

    def _saved_change(self, name: str, key: str) -> Tensor:
        """The change of a tensor stored whole by the adapter; the tensor itself if the base lacks it."""
        tensor, info = self.adapter.tensor(name).double(), self._info(key)
        if info.stacked:
            raise self._refused(f"'{info.key}' is stored in full for each expert", WHOLE)
        tensor = in_order(tensor, self.rows.get(info.name))
        check_shape(info, tuple(tensor.shape), self.adapter.path)
        old = read_tensor(info, self.carrier.old)
        if old is not None and info.vocabulary_axis is not None:
            tensor = with_rows_of(tensor, old, info.vocabulary_axis)  # padding does not come along
        return tensor if old is None else self.scale * (tensor - old.double())

    def _write_saved(self, name: str, key: str, change: Change) -> None:
        info = self._info(key)
        moved = dense(change, info)
        self._add_norm(info, self._saved_change(name, key))
        new = read_tensor(info, self.carrier.new)
        self._put(name, moved if new is None else new.double() + moved)


def _holds(source: TensorSource, info: TensorInfo) -> bool:
    return any(name in source for name in (*info.names, *info.tied))


def _bias_of(key: str) -> str:
    return key.removesuffix("weight") + "bias"


def separated_adapter(
    written: AdapterWeights, changes: Sequence[PlacedChange], stored: Architecture, label: str
) -> AdapterWeights:
    """Split an adapter's fused modules if its base stores their parts separately.

    These are queries, keys and values, or gates and values. Without fused modules the adapter is unchanged.

    Experts stay as they are: peft and transformers take them in either form.

    Args:
        written: carried to the new base.
        changes: of the adapter that was carried.
        stored: of the new base.

    Raises:
        CheckpointError: it also holds whole modules.
    """
    entries = [change for change in changes if change.a]
    forms = [_apart(entry, stored) for entry in entries]
    if not any(forms):
        return written
    if whole := next((change.value for change in changes if change.value), None):
        problem = f"stores '{whole}' whole, and fuses modules that are separate in the new base"
        raise CheckpointError(problem, where=label, remedy=WHOLE)
    tensors = dict(written.tensors)
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for entry, apart in zip(entries, forms, strict=True):
        module_keys = [key for key in (entry.a, entry.b, entry.bias, entry.magnitude) if key in tensors]
        parts = {key: tensors.pop(key) for key in module_keys}
        rank = parts[entry.a].shape[0]
        for module, start, length in _places(entry, apart, stored):
            for key, tensor in parts.items():
                cut = tensor if length is None or key == entry.a else tensor.narrow(0, start, length)
                tensors[key.replace(entry.module, module, 1)] = cut.clone()
            modules.append(module)
            ranks[re.escape(module)] = rank
            alphas[re.escape(module)] = entry.scale * (rank**0.5 if written.config.get("use_rslora") else rank)
    targets = {"target_modules": modules, "rank_pattern": ranks, "alpha_pattern": alphas}
    return AdapterWeights({**written.config, **targets}, tensors)


def _apart(entry: PlacedChange, stored: Architecture) -> ComposedTensor | None:
    """The tensors that the new base stores instead of the changed one; None if it stores the same one."""
    info = entry.spot.info
    if stacks(info):
        return None
    for block in stored.blocks:
        if entry.spot.in_block(block) and block.tensor(info.key) is None:
            form = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
            return form if form is not None and len(form.cuts) > 1 else None
    return None


def _places(
    entry: PlacedChange, form: ComposedTensor | None, stored: Architecture
) -> Iterator[tuple[str, int, int | None]]:
    """The new base's modules that an entry is for, with the outputs of it that are theirs: first and number."""
    info, start = entry.spot.info, 0
    for cut in form.cuts if form is not None else ():
        yield cut.info.name.removesuffix(".weight"), start, cut.length
        start += cut.length
    if form is None:
        blocks = [block for block in stored.blocks if entry.spot.in_block(block) and not stacks(info)]
        stored_name = next(
            (same.name for block in blocks if (same := block.tensor(info.key)) is not None), entry.module
        )
        yield stored_name.removesuffix(".weight"), 0, None
