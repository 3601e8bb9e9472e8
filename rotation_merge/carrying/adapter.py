"""A change as an adapter of the new base: one of the old base that keeps its form, or a whole model's as a new LoRA.

Of an adapter that is carried only fused maps that are apart in the new base get modules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.architecture.registry import every_name
from rotation_merge.carrying.delta import Delta
from rotation_merge.carrying.places import BIAS, FACTORS, AdapterPlaces
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_parts import READS_BY_CLASS, AdapterPart, adapter_parts, pieces
from rotation_merge.model.adapters import B_LAYOUT, PREFIX, Adapter, adapter_of
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.forms import restructured
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.open import check_shape
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import with_rows_of

NOTHING_LEFT = 1e-4
"""Share of a change's largest singular value below which singular values are rounding, 1e-8 of its squared norm."""

WHOLE = "merge the adapter into its base and carry the whole model"
SMALLER = f"use 'residual: permutation', or {WHOLE}"


def carry_adapter(
    adapter: Adapter, delta: Delta, config: Mapping[str, object], rows: LabelRows
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
    moving = _MovingAdapter(adapter, _in_form_of(parts, delta), parts, rows)
    moving.delta = replace(moving.changed(), record=lambda *squares: norms.append(squares))
    tensors, biases, entries = moving.tensors()
    notes = [f"{len(norms)} changed tensors were carried."]
    notes += filter(None, [change_note("The change", norms)])
    facts = {**adapter.config, "base_model_name_or_path": str(delta.base.reference), "revision": None}
    if any(part.experts for part in parts):
        facts.pop(B_LAYOUT, None)
    if any(_swapped(part) and not transposed(part.info) for part in parts):
        facts["peft_version"] = ".".join(map(str, READS_BY_CLASS))
    if biases:
        notes.append(f"{biases} biases of modules change ({' and '.join(entries)}), because norms shift their inputs.")
    return moving.apart(Adapter({**facts, **entries}, tensors)), notes


def _swapped(part: AdapterPart) -> bool:
    """Whether factors of all experts take outputs for inputs: peft's before 0.19, and where a class does not say."""
    return bool(part.experts) and part.flipped != transposed(part.info)


def _in_form_of(parts: Sequence[AdapterPart], delta: Delta) -> Delta:
    """The change between bases that also have the tensors of an adapter as it names them, and those that it adds."""
    architecture, names = delta.base.architecture, every_name(delta.base.config)
    blocks, spots = list(architecture.blocks), [(part.spot, part.info) for part in parts if part.spot is not None]
    for part in (part for part in parts if part.form is not None and any(cut.target for cut in pieces(part))):
        if bias := names.get(part.info.names[0].removesuffix("weight") + "bias"):  # which a norm may shift
            spots.append((bias, bias.info))
    for spot, info in spots:
        place = next((i for i, block in enumerate(blocks) if spot.in_block(block)), None)
        if place is None:
            blocks.append(Block(spot.place, spot.module, spot.index, spot.place, (info,)))
        elif blocks[place].tensor(info.key) is None:
            blocks[place] = replace(blocks[place], tensors=(*blocks[place].tensors, info))
    form, added = replace(architecture, blocks=tuple(blocks)), {n for p in parts if p.added for n in p.info.names}
    in_form = (restructured(x, architecture, form) for x in (delta.old, delta.tuned, delta.base.tensors))
    old, tuned, new = (tensors.only(name for name in tensors if name not in added) for tensors in in_form)
    return replace(delta, old=old, tuned=tuned, base=replace(delta.base, architecture=form, tensors=new))


def _cut(adapter: Adapter, piece: AdapterPart) -> dict[str, Tensor]:
    """The factors of a piece of a module, and its bias, by the module's names."""
    change, tensors = piece.change, adapter.tensors
    low = piece.cut_out(LowRank(tensors[change.a], tensors[change.b]))
    cut = {change.a: low.a.clone(), change.b: low.b.clone()}  # files hold no tensor twice
    if change.bias in tensors:
        of_outputs = LowRank(tensors[change.a], tensors[change.bias][:, None])
        cut[change.bias] = piece.cut_out(of_outputs).b[:, 0].clone()
    return cut


@dataclass
class _MovingAdapter:
    """An adapter on its way to the new base.

    Attributes:
        delta: between the bases, in the adapter's form.
        rows: order that brings the old base's classes into the new one's.
        whole: names of the tensors that it stores whole.
        low: by tensor, the parts that change it by factors: one, or one of each expert.
    """

    adapter: Adapter
    delta: Delta
    parts: Sequence[AdapterPart]
    rows: LabelRows
    whole: set[str] = field(init=False)
    low: dict[str, list[AdapterPart]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = {info.name: block for block in self.delta.base.architecture.blocks for info in block.tensors}
        self.whole = {part.info.name for part in self.parts if part.change.value}
        for part in self.parts:
            self._check(part)
            if part.change.a:
                self.low.setdefault(part.info.name, []).append(part)

    def _refused(self, name: str, reason: str, remedy: str = WHOLE) -> AlignmentError:
        problem = f"the change of '{name}' cannot be carried in an adapter: {reason}"
        return AlignmentError(problem, where=self.adapter.path, remedy=remedy)

    def _check(self, part: AdapterPart) -> None:
        """Refuse a change that the new base has no place for."""
        info, change, form, new = part.info, part.change, part.form, self.delta.base
        names = {*info.names, *info.tied}
        reasons = {
            "it is a DoRA": bool(change.magnitude),
            "it swaps inputs and outputs": bool(change.a and not part.experts) and part.flipped != transposed(info),
            "the new base lacks it": not names.isdisjoint(self.delta.old) and names.isdisjoint(new),
            "it is no whole tensor of the new base": bool(change.value) and (info.stacked or form is not None),
        }
        if reason := next((reason for reason, is_so in reasons.items() if is_so), ""):
            raise self._refused(change.name, reason)

    # --- the change of the old base

    def changed(self) -> Delta:
        """The change between the bases that the adapter makes."""
        before, after = dict[str, Tensor](), dict[str, Tensor]()
        for part in (part for part in self.parts if part.change.value or part.change.shift):
            info, change, name = part.info, part.change, part.info.names[part.expert or 0]
            if change.value:
                after[name] = self._saved(part)
            if part.added:
                like = torch.zeros(self.adapter.shapes[change.value or change.shift])
                before |= {absent: like.to(after.get(name, like)) for absent in info.names if absent not in before}
            if change.shift:
                shift = in_order(self.adapter.tensors[change.shift].double(), self.rows.get(info.name))
                before[name] = (before[name] if name in before else self.delta.old[name]).double()
                after[name] = after.get(name, before[name]) + change.scale * shift
        old = self.delta.old.replaced(before)
        low = {name: self._low_rank(parts) for name, parts in self.low.items()}
        return replace(self.delta, old=old, tuned=old.replaced(after), low=low)

    def _low_rank(self, parts: Sequence[AdapterPart]) -> LowRank:
        """The change of a tensor by factors, A and s B in float64; of experts (experts, ...)."""
        first, factors = parts[0], {part.expert: part.factors(self.adapter).to(torch.float64) for part in parts}
        factors = {expert: LowRank(low.a, low.scale * low.b) for expert, low in factors.items()}
        low = factors[first.expert]
        if _swapped(first):
            low = LowRank(low.b.mT, low.a.mT)
        if first.expert is None:
            order = self.rows.get(first.info.name)
            return replace(low, b=in_order(low.b, order and (0, order[1])))
        if any(of_expert.rank != low.rank for of_expert in factors.values()):
            raise self._refused(first.change.name, "the experts' ranks differ")
        nothing = LowRank(torch.zeros_like(low.a), torch.zeros_like(low.b))
        experts = [factors.get(number, nothing) for number in range(len(first.info.names))]
        return LowRank(torch.stack([each.a for each in experts]), torch.stack([each.b for each in experts]))

    def _saved(self, part: AdapterPart) -> Tensor:
        """A tensor that the adapter stores whole."""
        info, streams, block = part.info, self.delta.alignment.folded, self.blocks[part.info.name]
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

    # --- the adapter of the new base

    def tensors(self) -> tuple[dict[str, Tensor], int, dict[str, Any]]:
        """The carried adapter's tensors, how many modules got a change of bias that they had not, and new entries.

        peft merges `lora_bias` only where all modules have a bias; elsewhere changed biases are stored themselves.
        """
        changes, tensors = self.adapter.changes.values(), dict[str, Tensor]()
        biases = {name: self._bias(parts[0].info) for name, parts in self.low.items()}
        has_biases = any(change.bias in self.adapter.shapes for change in changes if change.a)
        count = 0 if has_biases else sum(bias is not None for bias in biases.values())
        themselves = self._stored_biases(biases) if count else {}
        for name, parts in self.low.items():
            moved = self.delta.change(self.blocks[name], parts[0].info)
            assert isinstance(moved, LowRank)
            for part in parts:
                tensors |= self._factors(part, moved if part.expert is None else moved.of_expert(part.expert))
                if part.change.bias in self.adapter.shapes or (count and not themselves):
                    tensors |= self._lora_bias(part, biases[name])
        for part in (part for part in self.parts if part.change.value):
            tensors[part.change.value] = self._whole(part)
        entries = {"bias": "all"} if themselves else {"lora_bias": True, "init_lora_weights": True}
        return tensors | themselves, count, entries if count else {}

    def _stored_biases(self, biases: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Changed biases as peft stores those of the base; empty where `lora_bias` does, or has to."""
        infos = {name: self._bias_info(self.low[name][0].info) for name in biases}
        read = {name: read_tensor(info, self.delta.base.tensors) for name, info in infos.items() if info is not None}
        stored = {name: read.get(name) for name in biases}
        cut = any(part.form is not None or stacks(part.info) for parts in self.low.values() for part in parts)
        if cut or all(bias is not None for bias in stored.values()):
            return {}
        return {
            f"{PREFIX}{self.low[name][0].change.module}.base_layer.bias": (bias.double() + change).to(bias.dtype)
            for name, bias in stored.items()
            if bias is not None and (change := biases[name]) is not None
        }

    def apart(self, carried: Adapter) -> Adapter:
        """The carried adapter with modules of their own for maps that it has in one and the new base apart.

        Each gets a copy of the factor that they share. Experts stay: peft and transformers take them in either form.
        """
        low = [part for parts in self.low.values() for part in parts]
        if not any(part.form is not None and len(part.form.cuts) > 1 and not stacks(part.info) for part in low):
            return carried
        tensors = {part.change.value: carried.tensors[part.change.value] for part in self.parts if part.change.value}
        modules, ranks, alphas = list[str](), dict[str, int](), dict[str, float]()
        for part in low:
            change, rank = part.change, carried.tensors[part.change.a].shape[0]
            stays = part.added or stacks(part.info) > 0
            for piece in [part] if stays else pieces(part):
                named = stays or piece.target is not None
                modules.append(module := change.module if named else piece.info.name.removesuffix(".weight"))
                tensors |= {key.replace(change.module, module, 1): x for key, x in _cut(carried, piece).items()}
                ranks[re.escape(module)] = rank
                alphas[re.escape(module)] = part.scale * (rank**0.5 if carried.config.get("use_rslora") else rank)
        patterns = {"target_modules": modules, "rank_pattern": ranks, "alpha_pattern": alphas}
        return Adapter({**carried.config, **patterns}, tensors)

    def _bias(self, info: TensorInfo) -> Tensor | None:
        """The change of the bias beside a changed map, unless that is stored whole; None: it stays as it is.

        A norm that shifts the map's inputs adds to it.
        """
        bias = self._bias_info(info)
        if bias is None or bias.name in self.whole or bias.name not in self.delta.tuned:
            return None
        change = dense(replace(self.delta, record=None).change(self.blocks[info.name], bias), bias)
        return change if bool(change.any()) else None

    def _bias_info(self, info: TensorInfo) -> TensorInfo | None:
        """The bias beside a weight."""
        bias = self.blocks[info.name].tensor(info.key.removesuffix("weight") + "bias")
        return None if bias is None or bias.key == info.key else bias

    def _factors(self, part: AdapterPart, moved: LowRank) -> dict[str, Tensor]:
        """The factors of one module, by the adapter's names."""
        a, b = moved.a, moved.scale * moved.b / part.scale
        if part.experts:
            a, b = (b.mT, a.mT) if _swapped(part) and transposed(part.info) else (a, b)
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        return {key: self._as_stored(x, key) for key, x in ((part.change.a, a), (part.change.b, b))}

    def _lora_bias(self, part: AdapterPart, bias: Tensor | None) -> dict[str, Tensor]:
        """A module's `lora_bias`, which peft multiplies by the scale, and which all modules have or none."""
        change = part.change
        if change.embedding or (stacks(part.info) and part.expert is None):
            raise self._refused(change.name, "the shift of a norm adds a constant", SMALLER)
        if bias is None:
            bias = torch.zeros(self.adapter.shapes[change.b][0])
        of_module = bias if part.expert is None or bias.ndim == 1 else bias[part.expert]
        return {change.bias: self._as_stored(of_module / part.scale, change.b)}

    def _whole(self, part: AdapterPart) -> Tensor:
        """A carried whole tensor; one that the adapter adds, at scale 1."""
        info, low = part.info, {name: low for name, low in self.delta.low.items() if name != part.info.name}
        delta = replace(self.delta, low=low, scale=1.0 if part.added else self.delta.scale)
        change, stored = dense(delta.change(self.blocks[info.name], info), info), read_tensor(info, delta.base.tensors)
        if self._bias(info) is not None:
            raise self._refused(info.name, "the shift of a norm adds a constant", SMALLER)
        return self._as_stored(change if stored is None else stored.double() + change, part.change.value)

    def _as_stored(self, tensor: Tensor, like: str) -> Tensor:
        return tensor.to(self.adapter.tensors[like].dtype, copy=True).contiguous()


# --- new adapters


@dataclass(frozen=True)
class NewAdapter:
    """A change as an adapter of a base.

    Attributes:
        places: of the base's tensors in an adapter.
        low: by tensor, the changes of matrices by factors.
        whole: by tensor, the changes of biases, norms, and what else is stored whole.
        rank: of every factor, at most.
        share: of the whole change's squared norm that is in it.
        lost: by tensor without a place, its share of that norm.
    """

    base: View
    places: AdapterPlaces
    low: Mapping[str, LowRank]
    whole: Mapping[str, Tensor]
    rank: int
    share: float
    lost: Mapping[str, float]

    @cached_property
    def delta(self) -> Delta:
        """The change that it makes, with its factors."""
        tensors = self.base.tensors
        tuned = tensors.replaced({name: tensors[name].double() + change for name, change in self.whole.items()})
        return Delta(self.base, tensors, tuned, low=self.low, precision=torch.float64)

    @property
    def weights(self) -> Adapter:
        """The adapter as it is written, with `modules_to_save` for what is stored whole."""
        base, places, infos = self.base, self.places, self.base.architecture.named()
        maps = {places.module(name): low.to(torch.float32) for name, low in self.low.items()}
        biases = {name: change for name, change in self.whole.items() if places.kind(infos[name]) == BIAS}
        saved = sorted({places.module(name) for name in self.whole.keys() - biases.keys()})
        parts = {places.parameters[name]: name for path in saved for name in places.tensors[path].values()}
        beside = {f"{PREFIX}{place}": self.delta.tuned[name].to(base.dtypes[name]) for place, name in parts.items()}
        of_biases, entries = self._biases(maps, biases)
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if (base.config.get("architectures") or [""])[0].endswith("CausalLM") else None,
            "base_model_name_or_path": str(base.reference),
            "modules_to_save": saved or None,
            "fan_in_fan_out": any(transposed(infos[name]) and not low.embedding for name, low in self.low.items()),
            "lora_dropout": 0.0,
            **entries,
        }
        return adapter_of(maps, config, {**beside, **of_biases}, rank=self.rank)

    def _biases(
        self, maps: Mapping[str, LowRank], biases: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and entries of the config for biases: peft's `lora_bias`, or the changed biases themselves.

        peft merges the former only where all modules with factors have a bias.
        """
        base, by_module = self.base, {self.places.module(name): name for name in biases}
        if by_module.keys() <= maps.keys() and all(self.places.has_bias(path) for path in maps):
            shifts = {path: torch.zeros(len(factors.b)) for path, factors in maps.items()} if biases else {}
            shifts |= {path: biases[name].float() for path, name in by_module.items()}
            tensors = {f"{PREFIX}{path}.lora_B.bias": shift for path, shift in shifts.items()}
            return tensors, {"lora_bias": bool(biases), "bias": "none"}
        inner = {path: ".base_layer" if path in maps else "" for path in by_module}
        values = {
            f"{PREFIX}{path}{inner[path]}.bias": self.delta.tuned[name].to(base.dtypes[name])
            for path, name in by_module.items()
        }
        return values, {"lora_bias": False, "bias": "all"}


def _equal(tensors: Tensors, first: str, second: str) -> bool:
    return {first, second} <= tensors.keys() and torch.equal(tensors[first], tensors[second])


def new_adapter(delta: Delta, places: AdapterPlaces, rank: int, trained: Collection[str] = ()) -> NewAdapter:
    """A change as a new adapter of the base that it is for; what it has no place for is counted as lost.

    Args:
        rank: of every factor, at most; matrices are cut down to it.
        trained: names of tensors that are given factors of the whole rank in any case.
    """
    low, vectors, total = dict[str, LowRank](), dict[str, Tensor](), 0.0
    kept, lost = dict[str, float](), dict[str, float]()
    tied_to = {tied: [info.name] for info in delta.base.architecture.tensors() for tied in info.tied}
    for block in delta.base.architecture.blocks:
        for info in block.tensors:
            if read_tensor(info, delta.base.tensors) is None:
                continue
            name, change, kind = info.name, delta.change(block, info), places.kind(info)
            if any(tied in lost and _equal(delta.tuned, name, tied) for tied in (*info.tied, *tied_to.get(name, ()))):
                continue  # a tensor under another name, which is counted once
            whole = dense(change, info).double()
            squares = float(whole.square().sum())
            total += squares
            if not squares and name not in trained:
                continue
            if kind == FACTORS:
                if isinstance(change, Tensor):
                    change = of_low_rank(whole, info, rank, name not in trained, places.embeds(info))
                low[name] = change
                kept[name] = squares - float((whole - dense(change, info)).square().sum())
            elif kind:
                vectors[name], kept[name] = whole, squares
            else:
                lost[name] = squares
    unchanged = next((info for info in delta.base.architecture.tensors() if places.kind(info) == FACTORS), None)
    if not low and unchanged is not None:  # peft loads no adapter without factors
        nothing = torch.zeros(delta.base.shapes[unchanged.name])
        low[unchanged.name] = of_low_rank(nothing, unchanged, 1, embedding=places.embeds(unchanged))
    total = total or 1.0
    lost = {name: squares / total for name, squares in lost.items()}
    return NewAdapter(delta.base, places, low, vectors, rank, sum(kept.values()) / total, lost)


def of_low_rank(change: Tensor, info: TensorInfo, rank: int, trimmed: bool = False, embedding: bool = False) -> LowRank:
    """The nearest change of this rank (Eckart and Young), its A like that of a fresh LoRA.

    The rows of A are orthogonal and as long as if they were drawn (uniform, 1/sqrt(in)), so that in training every
    direction learns equally fast, whatever the change has in it already.

    Args:
        trimmed: of the rank that the change has, where that is less.
        embedding: the weight is an embedding's.
    """
    matrix = change.mT if embedding or transposed(info) else change
    shape = matrix.shape
    if matrix.ndim > 2 and not stacks(info):
        matrix = matrix.flatten(1)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    if trimmed:
        rank = min(rank, int((s > NOTHING_LEFT * s.max()).reshape(-1, s.shape[-1]).any(0).sum()))
    a, b = 3**-0.5 * v[..., :rank, :], 3**0.5 * u[..., :rank] * s[..., None, :rank]
    if matrix.shape != shape:
        a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
    return LowRank(a, b, embedding=embedding)
