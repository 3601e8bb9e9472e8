"""Carries an adapter from its base to another one, also to one that stores fused maps separately."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.carrying.delta import Delta
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_parts import AdapterPart, Entries, adapter_parts
from rotation_merge.model.adapters import Adapter, Change
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.open import check_shape
from rotation_merge.model.vocabulary import with_rows_of

WHOLE = "merge the adapter into its base and carry the whole model"
SMALLER = f"use 'residual: permutation', or {WHOLE}"


def carry_adapter(
    adapter: Adapter, delta: Delta, config: Mapping[str, Any], rows: LabelRows
) -> tuple[Adapter, list[str]]:
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
    stored = replace(delta.base, tensors=delta.old.only(delta.base.architecture.named()), config=config)
    parts = adapter_parts(adapter, stored, adapter.path, adds=True)
    norms = list[tuple[float, float]]()
    base = replace(delta.base, architecture=_extended(delta.base.architecture, parts))
    moving = _MovingAdapter(adapter, replace(delta, base=base, record=lambda *squares: norms.append(squares)), rows)
    moving.move([part for part in parts if part.change.a or part.change.value])
    notes = [f"{len(norms)} changed tensors were carried."]
    notes += filter(None, [change_note("The change", *map(sum, zip(*norms, strict=True)))])
    facts = {**adapter.config, "base_model_name_or_path": str(delta.base.reference), "revision": None}
    if count := moving.constants:
        facts |= {"lora_bias": True, "init_lora_weights": True}
        notes.append(f"{count} modules got a bias (peft's lora_bias), because norms shift their inputs.")
    return Adapter({**facts, **moving.patterns}, moving.tensors), notes


def _extended(architecture: Architecture, parts: Iterable[AdapterPart]) -> Architecture:
    """An architecture with the parameters that an adapter adds, such as a head."""
    blocks = list(architecture.blocks)
    for spot in (part.added for part in parts if part.added is not None):
        place = next((i for i, block in enumerate(blocks) if spot.in_block(block)), None)
        if place is None:
            blocks.append(Block(spot.place, spot.module, spot.index, spot.place, (spot.info,)))
        elif blocks[place].tensor(spot.info.key) is None:
            blocks[place] = replace(blocks[place], tensors=(*blocks[place].tensors, spot.info))
    return replace(architecture, blocks=tuple(blocks))


@dataclass(frozen=True)
class _Carried:
    """A carried part of a change.

    Attributes:
        a, b: A (rank, inputs) and s B (outputs, rank), float64; of experts in one (experts, ...).
        constant: what the norm before the map adds to its bias, where that is not in the adapter; None: nothing.
    """

    part: AdapterPart
    a: Tensor
    b: Tensor
    constant: Tensor | None


@dataclass
class _MovingAdapter:
    """An adapter on its way to the new base.

    Attributes:
        delta: between the bases, which are extended by what it adds.
        rows: order that brings the old base's classes into the new one's.
        tensors: of the new adapter.
        patterns: entries of its config, where fused modules were split.
        constants: number of modules that got a bias, because a norm of the old base shifts their inputs.
    """

    adapter: Adapter
    delta: Delta
    rows: LabelRows
    tensors: dict[str, Tensor] = field(default_factory=dict)
    patterns: dict[str, Any] = field(default_factory=dict)
    constants: int = 0

    def move(self, parts: Sequence[AdapterPart]) -> None:
        """Carry all changes, those by factors and those of whole tensors."""
        blocks = {info.name: block for block in self.delta.base.architecture.blocks for info in block.tensors}
        for part in parts:
            self._check(part)
        whole = {part.info.name: part for part in parts if part.change.value}
        saved = {name: self._saved(blocks[name], part) for name, part in whole.items()}
        absent = {name: torch.zeros_like(saved[name]) for name, part in whole.items() if part.added is not None}
        old = self.delta.old.replaced(absent)
        self.delta = replace(self.delta, old=old, tuned=old.replaced(saved))
        together: dict[tuple[str, Entries | None], list[AdapterPart]] = {}
        for part in (part for part in parts if part.change.a):
            together.setdefault((part.info.name, part.target), []).append(part)
        low, changes = dict[str, LowRank](), dict[Change, list[_Carried]]()
        for (name, _), of_entries in together.items():
            low[name] = self._low_rank(of_entries)
            for carried in self._moved(replace(self.delta, low={name: low[name]}), blocks[name], of_entries, saved):
                changes.setdefault(carried.part.change, []).append(carried)
        self._write_factors(list(map(_joined, changes.values())))
        self.delta = replace(self.delta, low=low)
        for name, part in whole.items():
            self._write_whole(blocks[name], part, saved)

    def _refused(self, name: str, reason: str, remedy: str = WHOLE) -> AlignmentError:
        problem = f"the change of '{name}' cannot be carried in an adapter: {reason}"
        return AlignmentError(problem, where=self.adapter.path, remedy=remedy)

    def _check(self, part: AdapterPart) -> None:
        """Refuse a change that the new base has no place for."""
        info, change, old, new = part.info, part.change, self.delta.old, self.delta.base
        names = {*info.names, *info.tied}
        reasons = {
            "it is a DoRA": bool(change.magnitude),
            "peft swaps inputs and outputs of this base's experts": bool(change.a) and part.flipped != transposed(info),
            "the new base lacks it": any(name in old for name in names) and not any(name in new for name in names),
            "it is no whole tensor of the new base": bool(change.value)
            and (info.stacked or part.source is not None or part.target is not None),
        }
        if reason := next((reason for reason, is_so in reasons.items() if is_so), ""):
            raise self._refused(change.name, reason)

    # --- factors

    def _low_rank(self, parts: Sequence[AdapterPart]) -> LowRank:
        """The change of some entries of a stored tensor, zero elsewhere: one part, or one of each expert."""
        first, low = parts[0], self._factors(parts[0])
        info, target = first.info, first.target
        if first.expert is not None:
            factors = {part.expert: self._factors(part) for part in parts}
            if any(of_expert.rank != low.rank for of_expert in factors.values()):
                raise self._refused(first.change.name, "the experts' ranks differ")
            nothing = LowRank(torch.zeros_like(low.a), torch.zeros_like(low.b))
            count = len(info.names) if info.stacked else info.axes[0].size or 1
            experts = [factors.get(number, nothing) for number in range(count)]
            low = LowRank(torch.stack([each.a for each in experts]), torch.stack([each.b for each in experts]))
        if target is None:
            return low
        return low.widened(first.outputs(target), target[1], info.axes[target[0]].size or 0)

    def _factors(self, part: AdapterPart) -> LowRank:
        """A and s B of one part, float64; a bias (`lora_bias`) is one more column of B and a zero row of A."""
        low = part.factors(self.adapter)
        a, b = low.a.double(), low.scale * low.b.double()
        if part.change.bias in self.adapter.shapes:
            bias = low.scale * self.adapter.tensors[part.change.bias].double()
            a = torch.cat([a, a.new_zeros(1, *a.shape[1:])])
            b = torch.cat([b, bias.reshape(-1, *[1] * (b.ndim - 1))], 1)
        low = part.narrowed(LowRank(a, b), part.source)
        order = (0, self.rows[part.info.name][1]) if part.info.name in self.rows else None
        return replace(low, b=in_order(low.b, order))

    def _moved(self, delta: Delta, block: Block, parts: Sequence[AdapterPart], saved: Container[str]) -> list[_Carried]:
        """The parts of a change of some entries of a stored tensor, carried."""
        first, info = parts[0], parts[0].info
        moved, constant = delta.change(block, info), self._constant(delta, block, info, saved)
        assert isinstance(moved, LowRank)
        low = first.narrowed(replace(moved, b=moved.scale * moved.b), first.target)
        if constant is not None and first.target is not None and first.outputs(first.target):
            constant = constant.narrow(0, *first.target[1:])
        of_parts = [low if part.expert is None else low.of_expert(part.expert) for part in parts]
        return [_Carried(part, each.a, each.b, constant) for part, each in zip(parts, of_parts, strict=True)]

    def _constant(self, delta: Delta, block: Block, info: TensorInfo, saved: Container[str]) -> Tensor | None:
        """What the norm before a changed map adds to its bias, where that is not in the adapter; None: nothing."""
        bias = block.tensor(info.key.removesuffix("weight") + "bias")
        if bias is None or bias.key == info.key or bias.name in saved or bias.name not in delta.base:
            return None
        constant = dense(replace(delta, record=None).change(block, bias), bias)
        return constant if bool(constant.any()) else None

    def _write_factors(self, changes: Sequence[Sequence[_Carried]]) -> None:
        """Put carried changes back under the adapter's names; a fused module's under those of its parts.

        Experts stay as they are: peft and transformers take them in either form.
        """
        split, modules = any(len(parts) > 1 for parts in changes), dict[str, _Carried]()
        ranks, alphas = dict[str, int](), dict[str, float]()
        for carried in (carried for parts in changes for carried in parts):
            part, stored = carried.part, split and carried.part.added is None and not stacks(carried.part.info)
            module = part.info.name.removesuffix(".weight") if stored else part.change.module
            self._put(carried, module)
            modules[module], rank = carried, self.adapter.shapes[part.change.a][0]
            ranks[re.escape(module)] = rank
            alphas[re.escape(module)] = part.scale * (rank**0.5 if self.adapter.config.get("use_rslora") else rank)
        if split:
            self.patterns = {"target_modules": list(modules), "rank_pattern": ranks, "alpha_pattern": alphas}
        self.constants = sum(carried.constant is not None for carried in modules.values())
        for module, carried in modules.items() if self.constants else ():
            self._give_bias(carried, module)

    def _put(self, carried: _Carried, module: str) -> None:
        """Put the factors of one module into the adapter."""
        part, a, b = carried.part, carried.a, carried.b / carried.part.scale
        if part.change.bias in self.adapter.shapes:
            self._store(part.change.bias, part.change, module, b[:, -1].reshape(-1))
            a, b = a[:-1], b[:, :-1]
        if part.experts:
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        self._store(part.change.a, part.change, module, a)
        self._store(part.change.b, part.change, module, b)

    def _store(self, key: str, change: Change, module: str, tensor: Tensor) -> None:
        dtype = self.adapter.tensors[key].dtype
        self.tensors[key.replace(change.module, module, 1)] = tensor.to(dtype, copy=True).contiguous()

    def _give_bias(self, carried: _Carried, module: str) -> None:
        """Give a module peft's `lora_bias`, which is multiplied by the scale, and which all modules have or none."""
        part, change, constant = carried.part, carried.part.change, carried.constant
        if change.embedding or (stacks(part.info) and (part.expert is None or constant is not None)):
            raise self._refused(change.name, "the shift of a norm adds a constant", SMALLER)
        b = self.tensors[change.b.replace(change.module, module, 1)]
        key = change.bias.replace(change.module, module, 1)
        bias = self.tensors.get(key, b.new_zeros(b.shape[0]))
        self.tensors[key] = bias if constant is None else (bias.double() + constant / part.scale).to(b.dtype)

    # --- whole tensors

    def _saved(self, block: Block, part: AdapterPart) -> Tensor:
        """A tensor that the adapter stores whole."""
        info, streams = part.info, self.delta.alignment.folded
        tensor = in_order(self.adapter.tensors[part.change.value], self.rows.get(info.name))
        check_shape(info, tuple(tensor.shape), self.adapter.path)
        old = read_tensor(info, self.delta.old)
        if old is not None and info.vocabulary_axis is not None:
            tensor = with_rows_of(tensor, old, info.vocabulary_axis)  # padding does not come along
        folded = {key for norm in block.norms if norm.stream in streams for key in (norm.gain, norm.shift)}
        folded |= {scale.gain for scale in block.scales if scale.stream in streams}
        if info.key in folded and (old is None or bool((tensor != old).any())):
            raise self._refused(info.name, "it belongs to a rotated stream", SMALLER)
        return tensor

    def _write_whole(self, block: Block, part: AdapterPart, saved: Container[str]) -> None:
        """Put a carried whole tensor back; one that the adapter adds, at scale 1."""
        info, key = part.info, part.change.value
        delta = self.delta if part.added is None else replace(self.delta, scale=1.0)
        moved, stored = dense(delta.change(block, info), info), read_tensor(info, delta.base.tensors)
        whole = moved if stored is None else stored.double() + moved
        self.tensors[key] = whole.to(self.adapter.tensors[key].dtype).contiguous()
        if self._constant(self.delta, block, info, saved) is not None:
            raise self._refused(info.name, "the shift of a norm adds a constant", SMALLER)


def _joined(parts: list[_Carried]) -> list[_Carried]:
    """The parts of one change; those of experts that the adapter has in one stay one."""
    first = parts[0]
    if len(parts) == 1 or not stacks(first.part.info) or first.part.source is None:
        return parts
    if first.part.outputs(first.part.source):
        return [replace(first, b=torch.cat([each.b for each in parts], first.b.ndim - 2))]
    return [replace(first, a=torch.cat([each.a for each in parts], first.a.ndim - 1))]
