"""A change as an adapter of the new base: one of the old base that keeps its form, or a whole model's as a new LoRA.

Of an adapter that is carried only fused maps that are apart in the new base get modules of their own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, TensorInfo
from rotation_merge.architecture.registry import every_name
from rotation_merge.carrying.delta import Change, Delta
from rotation_merge.errors import AlignmentError, CheckpointError, short
from rotation_merge.matching.run import change_note
from rotation_merge.model.adapter_parts import READS_BY_CLASS, AdapterPart, adapter_parts, pieces
from rotation_merge.model.adapters import B_LAYOUT, PREFIX, Adapter, adapter_of
from rotation_merge.model.apply import read_tensor
from rotation_merge.model.fold import weight_key
from rotation_merge.model.forms import names_in, restructured
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.low_rank import LowRank, dense, stacks, transposed
from rotation_merge.model.open import check_shape
from rotation_merge.model.view import View
from rotation_merge.model.vocabulary import with_rows_of
from rotation_merge.run.functions import architecture_of

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
    tensors, biases = moving.tensors()
    notes = [f"{len(norms)} changed tensors were carried."]
    notes += filter(None, [change_note("The change", norms)])
    facts = {**adapter.config, "base_model_name_or_path": str(delta.base.reference), "revision": None}
    if any(part.experts for part in parts):
        facts.pop(B_LAYOUT, None)
    if any(_swapped(part) and not transposed(part.info) for part in parts):
        facts["peft_version"] = ".".join(map(str, READS_BY_CLASS))
    if biases:
        facts |= {"lora_bias": True, "init_lora_weights": True}
        notes.append(f"{biases} modules got a bias (peft's lora_bias), because norms shift their inputs.")
    return moving.apart(Adapter(facts, tensors)), notes


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

    def tensors(self) -> tuple[dict[str, Tensor], int]:
        """The carried adapter's tensors, and how many modules got a bias that it had not."""
        changes, tensors = self.adapter.changes.values(), dict[str, Tensor]()
        biases = {name: self._bias(parts[0].info) for name, parts in self.low.items()}
        has_biases = any(change.bias in self.adapter.shapes for change in changes if change.a)
        count = 0 if has_biases else sum(bias is not None for bias in biases.values())
        for name, parts in self.low.items():
            moved = self.delta.change(self.blocks[name], parts[0].info)
            assert isinstance(moved, LowRank)
            for part in parts:
                tensors |= self._factors(part, moved if part.expert is None else moved.of_expert(part.expert))
                if count or part.change.bias in self.adapter.shapes:
                    tensors |= self._lora_bias(part, biases[name])
        for part in (part for part in self.parts if part.change.value):
            tensors[part.change.value] = self._whole(part)
        return tensors, count

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
        block = self.blocks[info.name]
        bias = block.tensor(info.key.removesuffix("weight") + "bias")
        if bias is None or bias.key == info.key or bias.name in self.whole or bias.name not in self.delta.tuned:
            return None
        change = dense(replace(self.delta, record=None).change(block, bias), bias)
        return change if bool(change.any()) else None

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
        places: parameters as the class of the base names them, by tensor.
        low: by tensor, the changes of matrices.
        vectors: by tensor, the changes of biases and norms.
        rank: of every factor, at most.
        share: of the whole change's squared norm that is in it.
    """

    base: View
    places: Mapping[str, str]
    low: Mapping[str, LowRank]
    vectors: Mapping[str, Tensor]
    rank: int
    share: float

    @cached_property
    def delta(self) -> Delta:
        """The change that it makes, with its factors."""
        tensors = self.base.tensors
        tuned = tensors.replaced({name: tensors[name].double() + change for name, change in self.vectors.items()})
        return Delta(self.base, tensors, tuned, low=self.low, precision=torch.float64)

    @property
    def weights(self) -> Adapter:
        """The adapter as it is written: biases of its maps in peft's `lora_bias`, norms in `modules_to_save`."""
        base, infos = self.base, self.base.architecture.named()
        maps = {_module(self.places[name]): low.to(torch.float32) for name, low in self.low.items()}
        vectors = {_module(self.places[name]): change for name, change in self.vectors.items()}
        norms, biased = sorted(vectors.keys() - maps.keys()), bool(vectors.keys() & maps.keys())
        tuned, parts = self.delta.tuned, {n: place for n, place in self.places.items() if _module(place) in norms}
        beside = {f"{PREFIX}{place}": tuned[name].to(base.dtypes[name]) for name, place in parts.items()}
        for module, factors in maps.items() if biased else ():
            beside[f"{PREFIX}{module}.lora_B.bias"] = vectors.get(module, torch.zeros(len(factors.b))).float()
        classes = base.config.get("architectures") or [""]
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if classes[0].endswith("CausalLM") else None,
            "base_model_name_or_path": str(base.reference),
            "modules_to_save": norms or None,
            "lora_bias": biased,
            "fan_in_fan_out": any(transposed(infos[name]) and not low.embedding for name, low in self.low.items()),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        return adapter_of(maps, config, beside, rank=self.rank)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def new_adapter(delta: Delta, places: Mapping[str, str], rank: int, trained: Collection[str] = ()) -> NewAdapter:
    """A change as a new adapter of the base that it is for.

    Matrices are cut down to `rank`. Beside a `lora_bias`, which peft has not for embeddings, these are left as they
    are; so are tensors without a module of their own in the model's class (experts in one tensor, position tables), and
    an embedding that is the head as well: peft would change one of the two.

    Args:
        places: as `adapter_places` gives them.
        rank: of every factor, at most.
        trained: names of tensors that are given factors of the whole rank in any case.
    """
    low, vectors = dict[str, LowRank](), dict[str, Tensor]()
    total, kept, filled = 0.0, dict[str, float](), set[str]()
    for block in delta.base.architecture.blocks:
        for info in sorted(block.tensors, key=lambda info: info.key.endswith(".bias")):
            if read_tensor(info, delta.base.tensors) is None:
                continue
            name, change, place = info.name, delta.change(block, info), places.get(info.name, "")
            whole = dense(change, info).double()
            squares = float(whole.square().sum())
            total += squares
            changes = isinstance(change, LowRank) or squares > 0 or name in trained
            if isinstance(change, Tensor):
                change = of_low_rank(whole, info, rank, name not in trained) if changes and whole.ndim > 1 else whole
            if not changes or not _fits(place, change, filled):
                continue
            filled.add(place)
            kept[name] = squares - float((whole - dense(change, info)).square().sum())
            if isinstance(change, LowRank):
                low[name] = change
            else:
                vectors[name] = change
    if {_module(places[name]) for name in vectors} & {_module(places[name]) for name in low}:
        low = {name: change for name, change in low.items() if not change.embedding}
    share = sum(kept[name] for name in (*low, *vectors)) / total if total else 1.0
    return NewAdapter(delta.base, places, low, vectors, rank, share)


def _fits(place: str, change: Change, filled: Collection[str]) -> bool:
    """Whether an adapter has a place for a change: for that of a bias beside those of weights (`filled`)."""
    if isinstance(change, LowRank):
        return place.endswith(".weight")
    return change.ndim == 1 and (weight_key(place) in filled if place.endswith(".bias") else bool(place))


def adapter_places(base: View) -> dict[str, str]:
    """Parameters as the model's class names them, by tensor; of those that an adapter may change.

    Raises:
        CheckpointError: the class of the base cannot be built.
    """
    try:
        with torch.device("meta"):
            model = base.model_class(base.transformers_config)
    except Exception as error:  # models and configs raise errors of many classes
        problem, remedy = f"its class cannot be built ({short(error)})", "carry it as a whole model, not as an adapter"
        raise CheckpointError(problem, where=base.name, remedy=remedy) from error
    infos = {name: info for name, (_, info, _) in base.architecture.places().items() if not stacks(info)}
    names = names_in(base.architecture, architecture_of(model, untie=True))
    known = {name: parameter for parameter, name in names.items() if name in infos}
    if base.tied_head is None:
        return known
    return {name: parameter for name, parameter in known.items() if infos[name].vocabulary_axis is None}


def of_low_rank(change: Tensor, info: TensorInfo, rank: int, trimmed: bool = False) -> Change:
    """The nearest change of this rank (Eckart and Young), its A like that of a fresh LoRA.

    The rows of A are orthogonal and as long as if they were drawn (uniform, 1/sqrt(in)), so that in training every
    direction learns equally fast, whatever the change has in it already. Tables of positions and tokens that belong to
    no layer (1, n, width) and convolutions of single channels (channels, 1, kernel) have no place in an adapter and
    stay whole.

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
    a, b = 3**-0.5 * v[..., :rank, :], 3**0.5 * u[..., :rank] * s[..., None, :rank]
    if matrix.shape != shape:
        a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *[1] * (len(shape) - 2))
    embeds = transposed(info) and info.axes[0].label in ("vocabulary", "positions", "types")
    return LowRank(a, b, embedding=embeds)
