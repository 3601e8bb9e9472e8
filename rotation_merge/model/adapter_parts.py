"""Where the changes of an adapter fall in the tensors that a base stores, and these tensors with the changes.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other. Each stored tensor then gets a part of the change.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import B_LAYOUT, GROUPED, NON_LORA, Adapter, Change
from rotation_merge.model.forms import ComposedTensor, other_form
from rotation_merge.model.low_rank import LowRank, stacks, transposed
from rotation_merge.model.tensors import Tensors
from rotation_merge.model.view import View

Entries = tuple[int, int, int]
"""Some entries of a tensor: the dimension, counted from the last; the first; how many."""

READS_STORED_ORDER, READS_BY_CLASS = (0, 19, 0), (0, 19, 1)
"""peft before the first takes fused experts [e, x, y] for [e, in, out], from the second on as their class says."""


@dataclass(frozen=True, eq=False)
class AdapterPart:
    """A change of a stored tensor, or of some of its entries.

    Attributes:
        info: the tensor.
        scale: of the product of the factors.
        flipped: the adapter takes the parameter for [in, out]; its factors are A (r, in) and B (out, r).
        experts: number of experts that the change is of; 0: it is of one map.
        expert: which one of the tensor's experts changes; None: all, or there are none.
        spot: the parameter's place, where the base stores it in another form, or not at all.
        form: how the base stores it, where that is in another form.
        target: entries of the tensor that change; None: all.
        source: entries of the adapter's parameter that these are; None: all.
    """

    change: Change
    info: TensorInfo
    scale: float
    flipped: bool = False
    experts: int = 0
    expert: int | None = None
    spot: PossibleTensor | None = None
    form: ComposedTensor | None = None
    target: Entries | None = None
    source: Entries | None = None

    @property
    def added(self) -> bool:
        """Whether the base does not store it."""
        return self.spot is not None and self.form is None

    def factors(self, adapter: Adapter) -> LowRank:
        """The factors of the change; of experts in one (e, r, in) and (e, out, r)."""
        low = replace(adapter.low_rank(self.change), scale=self.scale)
        if self.experts:  # A as peft's ParamWrapper has it, and B, unless its trainer packed that otherwise
            grouped = adapter.config.get(B_LAYOUT) == GROUPED
            b = low.b.unflatten(1, (self.experts, -1) if grouped else (-1, self.experts))
            b = b.permute(1, 0, 2) if grouped else b.permute(2, 0, 1)
            low = replace(low, a=low.a.unflatten(0, (self.experts, -1)), b=b)
        return self.cut_out(low)

    def cut_out(self, low: LowRank) -> LowRank:
        """The factors of the part's entries, of those of the whole parameter."""
        if self.source is None:
            return low
        dim, start, length = self.source
        return low.narrowed((dim == -1) == self.flipped, start, length)


def adapter_parts(adapter: Adapter, base: View, label: str, adds: bool = False) -> list[AdapterPart]:
    """The changes of an adapter by the tensors that its base stores.

    Args:
        label: name of base and adapter for errors.
        adds: also of parameters that the base lacks, such as a head; and whole vocabularies of other lengths.

    Raises:
        CheckpointError: the adapter changes something that the base does not have, or that has another shape.
    """
    placing = _Placing(adapter, base, base.architecture.named(), every_name(base.config), label, adds)
    return [part for name, change in adapter.changes.items() if (part := placing.part(name, change)) is not None]


@dataclass(frozen=True)
class _Placing:
    """An adapter and the base that its changes are placed in; see `adapter_parts`."""

    adapter: Adapter
    base: View
    infos: Mapping[str, TensorInfo]
    names: Mapping[str, PossibleTensor]
    label: str
    adds: bool

    def part(self, name: str, change: Change) -> AdapterPart | None:
        """Where one change falls; None if it changes nothing."""
        if self.adds and change.value in self.adapter.non_lora and self._is_of_base(change):
            change = replace(change, value="")
            if not change.a and not change.shift:
                return None
        info = self.infos.get(name, TensorInfo(name, (name,), ()))
        if name in self.base and (info.stacked or not stacks(info)):
            expert = info.names.index(name) if info.stacked else None
            return self._of_stored(AdapterPart(change, info, change.scale, expert=expert), name)
        if name not in self.base and self._adds_nothing(change):
            return None
        parameter = self.parameters.get(name)
        part = None if parameter is None else self._of_parameter(change, parameter)
        if part is None or (part.added and not self.adds):
            raise self._refused(change, f"changes '{change.name}', which the model does not store")
        return part

    def _refused(self, change: Change, problem: str) -> CheckpointError:
        file, remedy = "the adapter", "was it trained on another model?"
        if change.value in self.adapter.non_lora:
            file, remedy = f"{NON_LORA} beside the adapter", "rename its tensors as the base's are, or move it away"
        return CheckpointError(f"{file} {problem}", where=self.label, remedy=remedy)

    def _is_of_base(self, change: Change) -> bool:
        """Whether a tensor that the adapter stores whole is the base's, which some trainers write as well."""
        value = self.adapter.tensors[change.value]
        return change.name in self.base and torch.equal(self.base[change.name].to(value.dtype), value)

    def _adds_nothing(self, change: Change) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also where there is no bias."""
        return bool(change.shift) and not change.value and not bool(self.adapter.tensors[change.shift].any())

    @cached_property
    def parameters(self) -> dict[str, str]:
        """By the name of a change the parameter that it is of, where a model of this config may have it."""
        unwrapped = {name: name.replace(".base_layer", "") for name in self.adapter.changes}
        return {name: plain for name, plain in unwrapped.items() if plain in self.names} | self.targets

    @cached_property
    def targets(self) -> dict[str, str]:
        """By the name of a change the one of peft's `target_parameters` that it is of.

        peft wraps a module once for each of its targets, in the order of its parameters, the first one innermost.
        """
        endings = tuple(f".{target}" for target in self.adapter.config.get("target_parameters") or ())
        parameters, wrappers = dict[str, list[str]](), dict[str, list[str]]()
        for name in self.names:
            if f".{name}".endswith(endings):
                parameters.setdefault(name.rpartition(".")[0], []).append(name)
        for name, change in self.adapter.changes.items():
            if change.a:
                wrappers.setdefault(change.module.replace(".base_layer", ""), []).append(name)
        targets = dict[str, str]()
        for module, names in wrappers.items():
            if len(names) == len(parameters.get(module, [])):
                innermost_first = sorted(names, key=lambda name: -name.count(".base_layer"))
                targets |= zip(innermost_first, parameters[module], strict=True)
        return targets

    @cached_property
    def takes_experts_for_in_out(self) -> bool:
        """Whether factors take parameters of all experts for [e, in, out], which no file mixes with [e, out, in].

        The sizes of all decide, else, where all are square, the version of peft that wrote the file.

        Raises:
            CheckpointError: neither tells.
        """
        changes = ((self.adapter.changes[name], parameter) for name, parameter in self.parameters.items())
        experts = [(change, self.names[parameter].info) for change, parameter in changes if change.a]
        experts = [(change, info) for change, info in experts if stacks(info)]
        orders = [turned for turned in (False, True) if all(_fits(self.adapter, *expert, turned) for expert in experts)]
        return orders == [True] if len(orders) < 2 else self._by_version(*experts[0])

    def _by_version(self, change: Change, info: TensorInfo) -> bool:
        """Whether the peft that wrote the factors of square experts takes the parameter for [e, in, out]."""
        written = str(self.adapter.config.get("peft_version") or "")
        version = tuple(map(int, n.groups())) if (n := re.match(r"(\d+)\.(\d+)\.(\d+)", written)) else None
        if version is None or not READS_STORED_ORDER <= version < READS_BY_CLASS:
            if transposed(info) and self._class_says_in_out(change):
                return True
            if version is not None:
                return version < READS_STORED_ORDER
        why = "does not say which peft wrote it" if version is None else "was written by peft 0.19.0"
        problem = f"{why}, so inputs and outputs of '{info.name}', which is square, cannot be told"
        raise self.adapter.refusal(problem)

    def _class_says_in_out(self, change: Change) -> bool:
        """Whether the class of transformers says that its experts are stored [e, in, out]; most of these do not."""
        with torch.device("meta"):
            model = self.base.model_class(self.base.transformers_config)
        module = dict(model.named_modules()).get(change.module.replace(".base_layer", ""))
        return bool(getattr(module, "is_transposed", False))

    def _of_parameter(self, change: Change, parameter: str) -> AdapterPart:
        """The change of a parameter that the base stores under another name, or in another form, or not."""
        spot = self.names[parameter]
        info = spot.info
        expert = info.names.index(parameter) if info.stacked else None
        experts = (info.axes[0].size or 1) if stacks(info) and expert is None else 0
        part = AdapterPart(change, info, change.scale, transposed(info), experts, expert)
        if change.a and expert is None and (change.name in self.targets or experts):
            scale = self.adapter.scale(parameter, self.adapter.shapes[change.b][1] // max(experts, 1))
            flipped = self.takes_experts_for_in_out if experts else not _fits(self.adapter, change, info, False)
            part = replace(part, scale=scale, flipped=flipped)
        block = next(filter(spot.in_block, self.base.architecture.blocks), None)
        stored = None if block is None else block.tensor(info.key)
        if stored is not None and stored.names[expert or 0] in self.base:
            return self._of_stored(replace(part, info=stored), stored.names[expert or 0])
        forms = {} if block is None else other_form(block, replace(block, tensors=(*block.tensors, info)))
        form = forms.get(info.key)
        if form is None or _is_another_vector(info, form):
            return replace(part, spot=spot)
        self._check(part, tuple(axis.size or 0 for axis in info.axes[info.stacked :]))
        return replace(part, spot=spot, form=form)

    def _of_stored(self, part: AdapterPart, name: str) -> AdapterPart:
        """The change of a whole stored tensor."""
        change, info, shape = part.change, part.info, self.base.shapes[name]
        if change.a and len(shape) == 2:
            labelled = any(axis.parts for axis in info.axes)
            flipped = transposed(info) if labelled else bool(self.adapter.config.get("fan_in_fan_out"))
            if shape[0] != shape[1] or change.embedding:
                flipped = change.embedding or shape == self._low_rank_shape(change)[::-1]
            part = replace(part, flipped=flipped)
        self._check(part, shape)
        return part

    def _low_rank_shape(self, change: Change) -> tuple[int, ...]:
        """Shape of a low-rank change, (out, in) or (out, in, kernel...)."""
        return self.adapter.shapes[change.b][0], *self.adapter.shapes[change.a][1:]

    def _check(self, part: AdapterPart, shape: tuple[int, ...]) -> None:
        """Refuse a change of another shape than the parameter that it is of."""
        change, any_length = part.change, self.adds and part.info.vocabulary_axis is not None
        shapes = [self.adapter.shapes[name] for name in (change.value, change.shift) if name and not any_length]
        if change.a:
            low = self._low_rank_shape(change)[:: -1 if part.flipped else 1]
            shapes.append((part.experts, *low) if part.experts else low)
        if odd := next((known for known in shapes if known != shape), None):
            raise self._refused(change, f"has {list(odd)} for '{change.name}', the model has {list(shape)}")


def _is_another_vector(info: TensorInfo, form: ComposedTensor) -> bool:
    """Whether a vector only looks like a stored one, as the biases of two maps into one stream do."""
    cut = form.cuts[0]
    return len(info.axes) == len(form.cuts) == 1 and cut.length == cut.info.axes[0].size


def pieces(part: AdapterPart) -> Iterator[AdapterPart]:
    """The changes of the tensors that a base stores a part's parameter in."""
    if part.form is None:
        yield part
        return
    dim, start = part.form.dim - len(part.info.axes), 0
    for cut in part.form.cuts:
        whole = cut.info.axes[cut.dim].size == cut.length
        target = None if whole else (cut.dim - len(cut.info.axes), cut.start, cut.length)
        length = cut.length if cut.dim == part.form.dim else cut.info.axes[part.form.dim].size or 0
        source = None if len(part.form.cuts) == 1 else (dim, start, length)
        yield replace(part, info=cut.info, target=target, source=source)
        start += length


def _fits(adapter: Adapter, change: Change, info: TensorInfo, turned: bool) -> bool:
    """Whether outputs and inputs of a change are the sizes of a tensor's matrices, as far as these are known.

    Args:
        turned: take these for [in, out].
    """
    size = [adapter.shapes[change.b][0], adapter.shapes[change.a][1]]
    known = [axis.size for axis in info.axes[stacks(info) :]]
    return len(known) == 2 and all(k in (None, s) for k, s in zip(known[::-1] if turned else known, size, strict=True))


# --- merged into the tensors


def adapted(base: View, adapter: Adapter, model: str) -> Tensors:
    """Tensors of a model with an adapter merged; those that it changes come in float32 at least.

    Args:
        model: name of base and adapter for errors.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    parts = parts_by_name(base, adapter, model)
    wide = {name: torch.promote_types(base.dtypes[name], torch.float32) for name in parts}

    def changed(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(wide[name], copy=True) if name in wide else tensor
        for number, part in parts.get(name, ()):
            _apply(adapter, part, number, tensor)
        return tensor

    return base.tensors.map(changed, dtypes={**base.dtypes, **wide})


def parts_by_name(base: View, adapter: Adapter, model: str) -> dict[str, list[tuple[int, AdapterPart]]]:
    """By the name of a stored tensor the changes of an adapter that fall in it; see `adapted`.

    Returns:
        With each change the number of the tensor among those that are stored apart.
    """
    parts: dict[str, list[tuple[int, AdapterPart]]] = {}
    for part in itertools.chain.from_iterable(map(pieces, adapter_parts(adapter, base, model))):
        info = part.info
        if (
            base.tied_head is not None
            and base.tied_head not in base
            and info.vocabulary_axis is not None
            and len(info.axes) == 2
        ):
            problem = f"the adapter changes '{info.name}' and not the head '{base.tied_head}', which is tied to it"
            remedy = "store the head as a tensor of its own, with 'tie_word_embeddings': false"
            raise CheckpointError(problem, where=model, remedy=remedy)
        for number, name in enumerate(info.names):
            if not info.stacked or part.expert in (None, number):
                parts.setdefault(name, []).append((number, part))
    return parts


def _apply(adapter: Adapter, part: AdapterPart, number: int, tensor: Tensor) -> None:
    """Carry out a change of a stored tensor in place.

    Args:
        number: which expert's tensor it is, where each has one.
    """
    change, stacked = part.change, part.info.stacked
    tensor = tensor if part.target is None else tensor.narrow(*part.target)
    tensor = tensor[part.expert] if part.expert is not None and not stacked else tensor

    def stored(key: str) -> Tensor:
        value = adapter.tensors[key][number] if part.experts and stacked else adapter.tensors[key]
        return (value if part.source is None else value.narrow(*part.source)).to(tensor.dtype)

    if change.value:
        tensor.copy_(stored(change.value))
    if change.shift:
        tensor += change.scale * stored(change.shift)
    if change.a:
        low = _factors(adapter, part)
        experts = {number: tensor} if stacked else dict(enumerate(tensor)) if part.experts else {-1: tensor}
        for expert, matrix in experts.items():
            of_expert = low.of_expert(expert) if part.experts else low
            of_expert.to(matrix.dtype).add_to(matrix.mT if part.flipped else matrix)


@lru_cache(maxsize=1)
def _factors(adapter: Adapter, part: AdapterPart) -> LowRank:
    """The factors of a change, kept while the experts that they are of are read one after the other."""
    return part.factors(adapter)
