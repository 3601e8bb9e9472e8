"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter may change in one form what a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other. What a stored tensor holds of such a parameter is
changed by the rows or columns of the factors that belong to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.architecture.registry import every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter, Change, PlacedChange, placed
from rotation_merge.model.forms import ComposedTensor, other_form
from rotation_merge.model.low_rank import LowRank, stacks, transposed
from rotation_merge.model.tensors import Tensors

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
    wide = {name: _wide(dtype) for name, dtype in tensors.dtypes.items() if name in merging.steps}
    return tensors.map(merging.changed, dtypes={**tensors.dtypes, **wide})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Step:
    """A change of a stored tensor, or of a part of it.

    Attributes:
        flipped: the adapter takes the parameter for [in, out].
        place: entries of the stored tensor that change (the dimension, counted from the last; the first; how many);
            None: all.
        entries: those of the parameter that these are.
        expert: of a change of all experts, the one that the tensor holds; of another, the one of the tensor's that
            changes; None: the tensor holds what is changed, and nothing beside it.
    """

    change: Change
    flipped: bool
    place: tuple[int, int, int] | None = None
    entries: tuple[int, int, int] | None = None
    expert: int | None = None


@dataclass
class _Merging:
    """An adapter and the checkpoint that it is merged into; see `adapted`.

    Attributes:
        steps: by the name of the stored tensor that they change.
    """

    adapter: Adapter
    architecture: Architecture
    tensors: Tensors
    tied: str | None
    model: str
    steps: dict[str, list[_Step]] = field(default_factory=dict)

    def place(self, config: Mapping[str, Any]) -> None:
        """Find the tensor of every change."""
        infos, names = self.architecture.named(), every_name(config)
        for name, change in self.adapter.changes.items():
            info, is_stored = infos.get(name), name in self.tensors
            if is_stored and (info is None or info.stacked or not stacks(info)):
                self._add(name, change, info)
            elif is_stored or not self._adds_nothing(change):
                self._place(change, placed(self.adapter, change, names))

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
        self.steps.setdefault(name, []).append(_Step(change, flipped))

    def _place(self, change: Change, place: PlacedChange | None) -> None:
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
        self._cut(place, form)

    def _cut(self, change: PlacedChange, form: ComposedTensor) -> None:
        """Add a change of a parameter whose parts are stored elsewhere."""
        info, start = change.spot.info, 0
        for cut in form.cuts:
            length = cut.length if cut.dim == form.dim else cut.info.axes[form.dim].size or 0
            entries = None if len(form.cuts) == 1 else (form.dim - len(info.axes), start, length)
            place = None if cut.dim < cut.info.stacked else (cut.dim - len(cut.info.axes), cut.start, cut.length)
            apart = cut.info.stacked and info.stacked  # as the class has them
            for number in [change.expert or 0] if apart else range(len(cut.info.names)):
                expert = None if apart else number if cut.info.stacked else change.expert
                step = _Step(change, change.transposed, place, entries, expert)
                self.steps.setdefault(cut.info.names[number], []).append(step)
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
        if name not in self.steps:
            return tensor
        tensor = tensor.to(_wide(tensor.dtype), copy=True)
        for step in self.steps[name]:
            _apply(self.adapter, step, tensor if step.place is None else tensor.narrow(*step.place))
        return tensor


def _is_another_vector(info: TensorInfo, form: ComposedTensor) -> bool:
    """Whether a vector only looks like a stored one, as the biases of two maps into one stream do."""
    cut = form.cuts[0]
    return len(info.axes) == len(form.cuts) == 1 and cut.length == cut.info.axes[0].size


def _apply(adapter: Adapter, step: _Step, tensor: Tensor) -> None:
    """Carry out a change of a stored tensor, or of the part of it that changes, in place."""
    change, number = step.change, step.expert if step.change.experts else None
    if step.expert is not None and number is None:
        tensor = tensor[step.expert]

    def stored(key: str) -> Tensor:
        value = adapter.tensor(key) if number is None else adapter.tensor(key)[number]
        return value if step.entries is None else value.narrow(*step.entries)

    if change.value:
        tensor.copy_(stored(change.value))
    if change.shift:
        tensor += change.scale * stored(change.shift).to(tensor.dtype)
    if not change.a:
        return
    factors, matrices = [_factors(adapter, change)], [tensor]
    if change.experts:
        experts = _of_experts(factors[0], change.experts)
        factors, matrices = (experts, list(tensor)) if number is None else ([experts[number]], [tensor])
    magnitude = adapter.tensor(change.magnitude).to(tensor.dtype) if change.magnitude else None
    for low, matrix in zip(factors, matrices, strict=True):
        _multiply(low.to(matrix.dtype), magnitude, step, matrix)


@lru_cache(maxsize=1)
def _factors(adapter: Adapter, change: Change) -> LowRank:
    """The factors of a change, kept while the experts that they are of are read one after the other."""
    return adapter.low_rank(change)


def _of_experts(low: LowRank, count: int) -> list[LowRank]:
    """The factors of each expert, as peft stores them in one: A (count r, in), B (out, r count)."""
    a, b = low.a.unflatten(0, (count, -1)), low.b.unflatten(1, (-1, count))
    return [replace(low, a=a[number], b=b[:, :, number]) for number in range(count)]


def _multiply(low: LowRank, magnitude: Tensor | None, step: _Step, matrix: Tensor) -> None:
    """Add a product of factors to a matrix, in place; with a magnitude as DoRA does."""
    if step.entries is not None:
        dim, start, length = step.entries
        if dim == (-1 if step.flipped else -matrix.ndim):  # outputs
            low = replace(low, b=low.b.narrow(0, start, length))
            magnitude = None if magnitude is None else magnitude.narrow(0, start, length)
        else:
            low = replace(low, a=low.a.narrow(1, start, length))
    if magnitude is not None:
        weight = matrix.T if step.flipped and not low.embedding else matrix
        weight.copy_(_dora(weight.contiguous(), low, magnitude))
        return
    matrix += low.product().mT if step.flipped else low.product()


def _dora(weight: Tensor, change: LowRank, magnitude: Tensor) -> Tensor:
    """m (W + s B A) / |W + s B A| as peft merges it, in the dtype of the weight.

    Args:
        weight: (out, in), a convolution's (out, in, kernel...), an embedding's (tokens, width).
        magnitude: m, one number an output.

    Source: DoRA, arXiv 2402.09353, eq. 5.
    """
    import peft  # which takes seconds

    layer: Any
    if change.embedding:
        layer = nn.Embedding.from_pretrained(weight)
    else:
        kernel = [weight.shape[2:]] * (weight.ndim > 2)
        layer = nn.utils.skip_init(KINDS[weight.ndim], weight.shape[1], weight.shape[0], *kernel, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    rank = change.rank
    config = peft.LoraConfig(r=rank, lora_alpha=change.scale * rank, use_dora=True, target_modules=["layer"])
    a, b = ("lora_embedding_A", "lora_embedding_B") if change.embedding else ("lora_A.weight", "lora_B.weight")
    state = {f"layer.{a}": change.a, f"layer.{b}": change.b, "layer.lora_magnitude_vector": magnitude}
    parent: Any = nn.Module()
    parent.layer = layer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, parent, low_cpu_mem_usage=True)  # draws no numbers
        peft.set_peft_model_state_dict(parent, state, low_cpu_mem_usage=True)
        parent.layer.merge()
    merged: Tensor = parent.layer.get_base_layer().weight.data
    return merged
