"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other. Such a tensor is composed of the stored ones, changed
as the model's class has it, and cut into the stored ones again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter, Change, PlacedChange, placed
from rotation_merge.model.forms import ComposedTensor, TensorSlice, other_form
from rotation_merge.model.low_rank import LowRank, stacks, transposed
from rotation_merge.model.tensors import Tensors

CACHED = 3
"""Composed tensors that stay in memory, where a checkpoint stores their parts apart."""

KINDS: dict[int, type[nn.Module]] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Layers by the number of dimensions of their weights."""


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
    merging = _Merging(adapter, architecture, tensors, tied, model)
    merging.place(config)
    changed = merging.changes.keys() | merging.parts.keys()
    wide = {name: _wide(dtype) for name, dtype in tensors.dtypes.items() if name in changed}
    return tensors.map(merging.changed, dtypes={**tensors.dtypes, **wide})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class _Composed:
    """A tensor of the model's class that the checkpoint stores in other tensors, and its changes."""

    form: ComposedTensor
    changes: list[PlacedChange] = field(default_factory=list)


Part = tuple[_Composed, slice, TensorSlice, int]
"""A composed tensor, the entries of it that a stored tensor holds, where that holds them, and the number of the expert,
where these are stored apart."""


@dataclass
class _Merging:
    """An adapter and the checkpoint that it is merged into; see `adapted`.

    Attributes:
        changes: of tensors as they are stored, by name.
        parts: of composed tensors, by the name of the stored tensor that they lie in.
        latest: composed tensors that were used last, changed.
    """

    adapter: Adapter
    architecture: Architecture
    tensors: Tensors
    tied: str | None
    model: str
    changes: dict[str, tuple[Change, bool]] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    latest: dict[_Composed, Tensor] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "latest": {}}

    def place(self, config: Mapping[str, Any]) -> None:
        """Find the tensor of every change."""
        infos, names, composed = self.architecture.named(), every_name(config), dict[str, _Composed]()
        for name, change in self.adapter.changes.items():
            info, is_stored = infos.get(name), name in self.tensors
            if is_stored and (info is None or info.stacked or not stacks(info)):
                self._add(name, change, info)
            elif is_stored or not self._adds_nothing(change):
                self._place(change, placed(self.adapter, change, names), composed)

    def _adds_nothing(self, change: Change) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
        return bool(change.shift) and not change.value and not bool(self.adapter.tensor(change.shift).any())

    def _refused(self, problem: str, remedy: str = "was it trained on another model?") -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=self.model, remedy=remedy)

    def _add(self, name: str, change: Change, info: TensorInfo | None) -> None:
        """Add the change of a whole stored tensor."""
        shape = self.tensors.shapes[name]
        if self.tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
            raise self._refused(
                f"changes '{name}' and not the head '{self.tied}', which is tied to it",
                "store the head as a tensor of its own, with 'tie_word_embeddings': false",
            )
        flipped = change.transposed
        if change.a and len(shape) == 2:
            labelled = info is not None and any(axis.parts for axis in info.axes)
            flipped = transposed(info) if info and labelled else bool(self.adapter.config.get("fan_in_fan_out"))
            if shape[0] != shape[1] or change.embedding:
                flipped = change.embedding or shape == self._low_rank_shape(change)[::-1]
        self._check_shape(change, flipped, shape)
        self.changes[name] = change, flipped

    def _place(self, change: Change, place: PlacedChange | None, composed: dict[str, _Composed]) -> None:
        """Add a change of a tensor that the checkpoint stores under another name, or in another form."""
        blocks = (block for block in self.architecture.blocks if place and place.spot.in_block(block))
        if place is None or (block := next(blocks, None)) is None:
            raise self._absent(change)
        info, stored = place.spot.info, block.tensor(place.spot.info.key)
        if stored is not None and stored.names[place.expert or 0] in self.tensors:
            self._add(stored.names[place.expert or 0], place, stored)
            return
        form = other_form(block, replace(block, tensors=(*block.tensors, info))).get(info.key)
        if form is None or _is_another_vector(info, form):
            raise self._absent(change)
        shape = tuple(axis.size or 0 for axis in info.axes)
        self._check_shape(place, place.transposed, shape if place.expert is None else shape[1:])
        if info.name not in composed:
            composed[info.name] = _Composed(form)
            self._cut(composed[info.name])
        composed[info.name].changes.append(place)

    def _cut(self, whole: _Composed) -> None:
        """Find the parts of a composed tensor in the stored ones."""
        start, dim = 0, whole.form.dim
        for cut in whole.form.cuts:
            length = cut.length if cut.dim == dim else cut.info.axes[dim].size or 0
            for number, name in enumerate(cut.info.names):
                self.parts.setdefault(name, []).append((whole, slice(start, start + length), cut, number))
            start += length

    def _absent(self, change: Change) -> CheckpointError:
        return self._refused(f"changes '{change.name}', which the model does not store")

    def _low_rank_shape(self, change: Change) -> tuple[int, ...]:
        """Shape of a low-rank change, (out, in) or (out, in, kernel...)."""
        return self.adapter.shapes[change.b][0], *self.adapter.shapes[change.a][1:]

    def _check_shape(self, change: Change, flipped: bool, shape: tuple[int, ...]) -> None:
        """Refuse a change of another shape than the tensor that it falls on."""
        shapes = [self.adapter.shapes[name] for name in (change.value, change.shift) if name]
        if change.a:
            low = self._low_rank_shape(change)[:: -1 if flipped else 1]
            shapes.append((change.experts, *low) if change.experts else low)
        if odd := next((known for known in shapes if known != shape), None):
            raise self._refused(f"has {list(odd)} for '{change.name}', the model has {list(shape)}")

    def changed(self, name: str, tensor: Tensor) -> Tensor:
        """A stored tensor with its changes."""
        if name not in self.changes and name not in self.parts:
            return tensor
        tensor = tensor.to(_wide(tensor.dtype), copy=True)
        if name in self.changes:
            _apply(self.adapter, *self.changes[name], tensor)
        for whole, entries, cut, number in self.parts.get(name, ()):
            part = self._whole(whole)[(slice(None),) * whole.form.dim + (entries,)]
            place = (slice(None),) * cut.dim + (slice(cut.start, cut.start + cut.length),)
            tensor[place[cut.info.stacked :]] = part[number] if cut.info.stacked else part
        return tensor

    def _whole(self, whole: _Composed) -> Tensor:
        """A composed tensor (stacked, if the class has it in pieces) with its changes."""
        tensor = self.latest.get(whole)
        if tensor is None:
            while len(self.latest) >= CACHED:
                self.latest.pop(next(iter(self.latest)), None)
            stored = whole.form.read(self.tensors)
            tensor = stored.to(_wide(stored.dtype), copy=True)
            for change in whole.changes:
                part = tensor if change.expert is None else tensor[change.expert]
                _apply(self.adapter, change, change.transposed, part)
            self.latest[whole] = tensor
        return tensor


def _is_another_vector(info: TensorInfo, form: ComposedTensor) -> bool:
    """Whether a vector only looks like a stored one, as the biases of two maps into one stream do."""
    cut = form.cuts[0]
    return len(info.axes) == len(form.cuts) == 1 and cut.length == cut.info.axes[0].size


def _apply(adapter: Adapter, change: Change, flipped: bool, tensor: Tensor) -> None:
    """Change a tensor in place; flipped: the adapter takes it for [in, out]."""
    if change.value:
        tensor.copy_(adapter.tensor(change.value))
    if change.shift:
        tensor += change.scale * adapter.tensor(change.shift).to(tensor.dtype)
    if not change.a:
        return
    low = adapter.low_rank(change).to(tensor.dtype)
    if change.magnitude:
        weight = tensor.T if flipped and not change.embedding else tensor
        weight.copy_(_dora(weight.contiguous(), low, adapter.tensor(change.magnitude).to(tensor.dtype)))
        return
    product = _fused_experts(low, change.experts) if change.experts else low.product()
    tensor += product.mT if flipped != bool(change.experts) else product


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
    """The weight of a layer with a change merged by peft."""
    import peft  # which takes seconds

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
