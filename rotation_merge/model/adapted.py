"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter, Change, PlacedChange, placed
from rotation_merge.model.forms import ComposedTensor, other_form
from rotation_merge.model.low_rank import LowRank, stacks, transposed
from rotation_merge.model.tensors import Tensors

ANOTHER_MODEL = "was it trained on another model?"
CACHED = 3
"""Changes of fused experts that stay in memory, where a checkpoint stores experts apart."""

KINDS: dict[int, type[nn.Module]] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Layers by the number of dimensions of their weights."""

Index = tuple[int | slice, ...]


def adapted(
    tensors: Tensors,
    adapter: Adapter,
    architecture: Architecture,
    config: Mapping[str, Any],
    tied: str | None = None,
    model: str = "",
) -> Tensors:
    """Tensors with an adapter merged; those that it changes come in float32 at least.

    Args:
        tensors: all that the checkpoint stores.
        architecture, config: of the checkpoint.
        tied: name of a head that is tied to the embedding.
        model: name of base and adapter for errors.

    Raises:
        CheckpointError: the adapter changes something that the model does not have, or that has another shape.
    """
    parts = _Checkpoint(adapter, architecture, tensors.shapes, config, tied, model).parts()
    latest: dict[tuple[Change, torch.dtype], Tensor] = {}  # not a cache of functools', which no cluster can be sent

    def of_experts(change: Change, dtype: torch.dtype) -> Tensor:
        dense = latest.get((change, dtype))
        if dense is None:
            while len(latest) >= CACHED:
                latest.pop(next(iter(latest)), None)
            dense = latest[change, dtype] = _fused_experts(_factors(adapter, change, dtype), change.experts)
        return dense

    def changed(name: str, tensor: Tensor) -> Tensor:
        if name not in parts:
            return tensor
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        for part in parts[name]:
            region = tensor[part.target]
            if part.change.a and part.change.experts:
                dense = of_experts(part.change, tensor.dtype)
                region += (dense if part.flipped else dense.mT)[part.source]
            else:
                _apply(adapter, part, region)
        return tensor

    wide = {name: torch.promote_types(kind, torch.float32) for name, kind in tensors.dtypes.items() if name in parts}
    return tensors.map(changed, dtypes={**tensors.dtypes, **wide})


@dataclass(frozen=True)
class _Part:
    """A part of an adapter's change, and the part of a stored tensor that it falls on.

    Attributes:
        flipped: the adapter takes the weight for [in, out].
        source, target: indices of the parts in the change and in the stored tensor; empty: all.
    """

    change: Change
    flipped: bool
    source: Index = ()
    target: Index = ()


def _factors(adapter: Adapter, change: Change, dtype: torch.dtype) -> LowRank:
    low = adapter.low_rank(change)
    return replace(low, a=low.a.to(dtype), b=low.b.to(dtype))


def _apply(adapter: Adapter, part: _Part, region: Tensor) -> None:
    """Put a part of a change into a tensor, in place."""
    change = part.change
    if change.value:
        region.copy_(adapter.tensor(change.value)[part.source])
    if change.shift:
        region += (change.scale * adapter.tensor(change.shift).to(region.dtype))[part.source]
    if not change.a:
        return
    low = _factors(adapter, change, region.dtype)
    if change.magnitude:
        weight = region.T if part.flipped and not change.embedding else region
        magnitude = adapter.tensor(change.magnitude).to(region.dtype)
        weight.copy_(_dora(weight.contiguous(), low, magnitude))
    else:
        region += (low.product().mT if part.flipped else low.product())[part.source]


def _dora(weight: Tensor, change: LowRank, magnitude: Tensor) -> Tensor:
    """m (W + s B A) / |W + s B A|, in the dtype of the weight.

    Args:
        weight: (out, in), a convolution's (out, in, kernel...), an embedding's (tokens, width).
        magnitude: m, one number an output.

    Source: DoRA, arXiv 2402.09353, eq. 5.
    """
    layer: Any
    if change.embedding:
        layer = nn.Embedding.from_pretrained(weight)
    else:
        kernel = [weight.shape[2:]] * (weight.ndim > 2)
        layer = nn.utils.skip_init(KINDS[weight.ndim], weight.shape[1], weight.shape[0], *kernel, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return _by_peft(layer, change, change.rank, magnitude, target_modules=["layer"])


def _fused_experts(change: LowRank, count: int) -> Tensor:
    """The change of all experts of a parameter, (experts, in, out), in the dtype of the factors.

    Args:
        change: A and B of all experts as peft stores them, with the scale of one expert's product.
        count: of experts.
    """
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(change.a.new_zeros(count, change.a.shape[1], len(change.b)), requires_grad=False)
    layer.is_transposed = True  # so that every peft takes it for (experts, in, out)
    return _by_peft(layer, change, change.rank // count, target_modules=[], target_parameters=["layer.weight"])


def _by_peft(layer: nn.Module, change: LowRank, rank: int, magnitude: Tensor | None = None, **targets: Any) -> Tensor:
    """The weight of a layer with a change merged by peft.

    Raises:
        CheckpointError: peft is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise CheckpointError("DoRA and adapters of fused experts need peft", remedy="pip install peft") from error
    config = peft.LoraConfig(r=rank, lora_alpha=change.scale * rank, use_dora=magnitude is not None, **targets)
    a, b = ("lora_embedding_A", "lora_embedding_B") if change.embedding else ("lora_A.weight", "lora_B.weight")
    state = {f"layer.{a}": change.a, f"layer.{b}": change.b}
    if magnitude is not None:
        state["layer.lora_magnitude_vector"] = magnitude
    parent: Any = nn.Module()
    parent.layer = layer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, parent, low_cpu_mem_usage=True)  # draws no numbers
        peft.set_peft_model_state_dict(parent, state, low_cpu_mem_usage=True)
        parent.layer.merge()
    merged: Tensor = parent.layer.get_base_layer().weight.data
    return merged


@dataclass(frozen=True)
class _Checkpoint:
    """The model that an adapter is merged into; see `adapted`."""

    adapter: Adapter
    architecture: Architecture
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    tied: str | None
    model: str

    @cached_property
    def _names(self) -> dict[str, PossibleTensor]:
        return every_name(self.config)

    def parts(self) -> dict[str, list[_Part]]:
        """The parts of all changes, by the stored tensor that each falls on."""
        result: dict[str, list[_Part]] = {}
        infos = self.architecture.named()
        for name, change in self.adapter.changes.items():
            info = infos.get(name)
            if name in self.shapes and (info is None or info.stacked or not stacks(info)):
                parts: Iterable[tuple[str, _Part]] = [self._whole(change, name, info)]
            elif name not in self.shapes and self._adds_nothing(change):
                continue
            else:
                parts = self._in_another_form(change)
            for key, part in parts:
                self._check_shape(key, part)
                result.setdefault(key, []).append(part)
        return result

    def _adds_nothing(self, change: Change) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
        return bool(change.shift) and not change.value and not bool(self.adapter.tensor(change.shift).any())

    def _refused(self, problem: str, remedy: str = ANOTHER_MODEL) -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=self.model, remedy=remedy)

    def _absent(self, change: Change) -> CheckpointError:
        return self._refused(f"changes '{change.name}', which the model does not store")

    def _whole(self, change: Change, place: str, info: TensorInfo | None) -> tuple[str, _Part]:
        """The change of a whole stored tensor, `place`."""
        if place not in self.shapes:
            raise self._absent(change)
        shape = self.shapes[place]
        if self.tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
            raise self._refused(
                f"changes '{place}' and not the head '{self.tied}', which is tied to it",
                "store the head as a tensor of its own, with 'tie_word_embeddings': false",
            )
        if not change.a or len(shape) != 2:
            flipped = change.transposed
        elif change.embedding:
            flipped = True
        elif shape[0] != shape[1]:
            flipped = shape == _low_rank_shape(self.adapter, change)[::-1]
        else:
            labelled = info is not None and any(axis.parts for axis in info.axes)
            flipped = transposed(info) if info and labelled else bool(self.adapter.config.get("fan_in_fan_out"))
        return place, _Part(change, flipped)

    def _in_another_form(self, change: Change) -> Iterable[tuple[str, _Part]]:
        """A change's parts, by the tensors that the checkpoint stores for the parameter."""
        place = placed(self.adapter, change, self._names)
        block = next((block for block in self.architecture.blocks if place and place.spot.in_block(block)), None)
        if place is None or block is None:
            raise self._absent(change)
        info, stored = place.spot.info, block.tensor(place.spot.info.key)
        if stored is not None:
            return [self._whole(place, stored.names[place.expert or 0], stored)]
        form = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
        if form is None or change.magnitude or _is_another_vector(info, form):
            raise self._absent(change)
        return _cuts(place, form)

    def _check_shape(self, key: str, part: _Part) -> None:
        """Refuse a change of another shape than the tensor that it falls on."""
        adapter, change, stored = self.adapter, part.change, self.shapes[key]
        shapes = [adapter.shapes[name] for name in (change.value, change.shift) if name]
        if change.a:
            shape = _low_rank_shape(adapter, change)[:: -1 if part.flipped else 1]
            shapes.append((change.experts, *shape) if change.experts else shape)
        for shape in shapes:
            if _shape_at(shape, part.source) != _shape_at(stored, part.target):
                problem = f"has {list(shape)} for '{change.name}', the model has {list(stored)}"
                raise self._refused(problem if key == change.name else f"{problem} in '{key}'")


def _cuts(change: PlacedChange, form: ComposedTensor) -> Iterator[tuple[str, _Part]]:
    """The parts of a change of a tensor that the checkpoint stores in another form; of one expert, or of all."""
    start, axes = 0, len(change.spot.info.axes)
    for cut in form.cuts:
        length = cut.length if cut.dim == form.dim else (cut.info.axes[form.dim].size or 0)
        source, target = [slice(None)] * axes, [slice(None)] * axes
        source[form.dim], target[cut.dim] = slice(start, start + length), slice(cut.start, cut.start + cut.length)
        start += length
        for each in range(change.experts) if change.experts and cut.info.stacked else (change.expert,):
            key = cut.info.names[each or 0] if cut.info.stacked else cut.info.name
            indices = _of_expert(source, each, change.expert is None), _of_expert(target, each, not cut.info.stacked)
            yield key, _Part(change, change.transposed, *indices)


def _of_expert(index: list[slice], expert: int | None, holds_all: bool) -> Index:
    """An index of one expert, if it is of one; holds_all: whether the tensor is one of all experts."""
    if expert is None:
        return tuple(index)
    return (expert, *index[1:]) if holds_all else tuple(index[1:])


def _low_rank_shape(adapter: Adapter, change: Change) -> tuple[int, ...]:
    """Shape of a low-rank change, (out, in) or (out, in, kernel...)."""
    return adapter.shapes[change.b][0], *adapter.shapes[change.a][1:]


def _shape_at(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Shape of a part of a tensor; of all of it, if it lacks this part."""
    try:
        return tuple(torch.empty(shape, device="meta")[index].shape)
    except IndexError:
        return shape


def _is_another_vector(info: TensorInfo, form: ComposedTensor) -> bool:
    """Whether a vector only looks like a stored one, as the biases of two maps into one stream do."""
    cut = form.cuts[0]
    return len(info.axes) == len(form.cuts) == 1 and cut.length == cut.info.axes[0].size
