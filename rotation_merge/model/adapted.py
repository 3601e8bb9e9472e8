"""A model's tensors with a LoRA adapter merged into them, tensor by tensor.

An adapter changes tensors as the model's class has them. What a checkpoint stores in another form (experts apart or all
in one tensor; queries, keys and values, or gates and values, apart or one after the other) is brought into the form of
the class, changed, and brought back.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.architecture.registry import PossibleTensor, every_name
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapters import Adapter, Change, PlacedChange, placed
from rotation_merge.model.forms import ComposedTensor, other_form, restructured
from rotation_merge.model.low_rank import LowRank, stacks, transposed
from rotation_merge.model.tensors import Shapes, Tensors

ANOTHER_MODEL = "was it trained on another model?"
CACHED = 2
"""Changed tensors of the class that stay in memory, where a checkpoint stores their parts apart (experts)."""

KINDS: dict[int, type[nn.Module]] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Layers by the number of dimensions of their weights."""

Shape = tuple[int, ...]


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
    checkpoint = _Checkpoint(adapter, architecture, tensors.shapes, config, tied, model)
    direct, others = checkpoint.places()
    named = checkpoint.in_class_form(others)
    inside = tensors if named is architecture else restructured(tensors, architecture, named)
    parameters = {change.spot.info.names[change.expert or 0]: change for change in others}
    changes = {n: checkpoint.checked(n, change, inside.shapes) for n, change in {**direct, **parameters}.items()}

    def changed(name: str, tensor: Tensor) -> Tensor:
        return _changed(adapter, changes[name], tensor) if name in changes else tensor

    result, wide = tensors.map(changed), set(changes)
    if named is not architecture:
        cached = lru_cache(CACHED)(inside.map(changed).read)
        merged = Tensors(inside.shapes, inside.dtypes, lambda name: cached(name) if name in changes else inside[name])
        forms = zip(architecture.blocks, named.blocks, strict=True)
        spent = [info for block, form in forms for info in block.tensors if info not in form.tensors]
        restored = {name for info in spent for name in info.names}
        back = restructured(merged, named, architecture).only(restored)
        result, wide = result.replaced(back.map(lambda _, tensor: tensor.clone())), wide | restored
    dtypes = {n: torch.promote_types(kind, torch.float32) if n in wide else kind for n, kind in tensors.dtypes.items()}
    return Tensors(tensors.shapes, dtypes, result.read, result.stack)


def _changed(adapter: Adapter, change: Change, tensor: Tensor) -> Tensor:
    """A parameter with an adapter's change, in float32 at least."""
    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
    if change.value:
        tensor.copy_(adapter.tensor(change.value))
    if change.shift:
        tensor += change.scale * adapter.tensor(change.shift).to(tensor.dtype)
    if not change.a:
        return tensor
    low = adapter.low_rank(change)
    low = replace(low, a=low.a.to(tensor.dtype), b=low.b.to(tensor.dtype))
    if change.experts:
        product = _fused_experts(low, change.experts).mT
        return tensor.add_(product.mT if change.transposed else product)
    if change.magnitude:
        weight = tensor.T if change.transposed and not change.embedding else tensor
        weight.copy_(_dora(weight.contiguous(), low, adapter.tensor(change.magnitude).to(tensor.dtype)))
        return tensor
    return tensor.add_(low.product().mT if change.transposed else low.product())


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
    shapes: Shapes
    config: Mapping[str, Any]
    tied: str | None
    model: str

    @cached_property
    def _infos(self) -> dict[str, TensorInfo]:
        return self.architecture.named()

    @cached_property
    def _names(self) -> dict[str, PossibleTensor]:
        return every_name(self.config)

    def _refused(self, problem: str, remedy: str = ANOTHER_MODEL) -> CheckpointError:
        return CheckpointError(f"the adapter {problem}", where=self.model, remedy=remedy)

    def _absent(self, change: Change) -> CheckpointError:
        return self._refused(f"changes '{change.name}', which the model does not store")

    def places(self) -> tuple[dict[str, Change], list[PlacedChange]]:
        """The changes of tensors that are stored under their names, by these, and the other changes."""
        direct: dict[str, Change] = {}
        others: list[PlacedChange] = []
        for name, change in self.adapter.changes.items():
            info = self._infos.get(name)
            if name in self.shapes and (info is None or info.stacked or not stacks(info)):
                direct[name] = change
            elif name in self.shapes or not self._adds_nothing(change):
                place = placed(self.adapter, change, self._names)
                if place is None:
                    raise self._absent(change)
                others.append(place)
        return direct, others

    def _adds_nothing(self, change: Change) -> bool:
        """Whether it is a bias of zeros: peft's `lora_bias` gives one to every module, also to those without a bias."""
        return bool(change.shift) and not change.value and not bool(self.adapter.tensor(change.shift).any())

    def in_class_form(self, changes: Sequence[PlacedChange]) -> Architecture:
        """The architecture with the changed tensors as the model's class has them; itself if it stores them so."""
        remaining = list(changes)
        blocks = []
        for block in self.architecture.blocks:
            of_block = [change for change in remaining if change.spot.in_block(block)]
            remaining = [change for change in remaining if not change.spot.in_block(block)] if of_block else remaining
            blocks.append(self._block_in_class_form(block, of_block))
        if remaining:
            raise self._absent(remaining[0])
        same = all(form is block for form, block in zip(blocks, self.architecture.blocks, strict=True))
        return self.architecture if same else replace(self.architecture, blocks=tuple(blocks))

    def _block_in_class_form(self, block: Block, changes: Sequence[PlacedChange]) -> Block:
        infos = {change.spot.info.key: change.spot.info for change in changes}
        if all((stored := block.tensor(key)) and stored.names == info.names for key, info in infos.items()):
            return block
        forms = other_form(block, replace(block, tensors=tuple(infos.values())))
        forms = {key: form for key, form in forms.items() if not _is_another_vector(infos[key], form)}
        spent = {cut.info.key for form in forms.values() for cut in form.cuts}
        kept = {info.key: info for info in block.tensors if info.key not in spent} | infos
        if spent - other_form(replace(block, tensors=tuple(kept.values())), block).keys():
            spot = changes[0].spot  # of the same spelling are the parts that the adapter leaves as they are
            known = [other for other in self._names.values() if other.in_block(block) and other.base == spot.base]
            beside = {other.info.key: other.info for other in known if other.spelling == spot.spelling}
            parts = other_form(block, replace(block, tensors=tuple(beside.values())))
            kept |= {key: beside[key] for key, form in parts.items() if {cut.info.key for cut in form.cuts} <= spent}
        result = replace(block, tensors=tuple(kept.values()))
        lost = spent - other_form(result, block).keys()
        for change in changes:
            key = change.spot.info.key
            if block.tensor(key) is None and (lost or key not in forms):
                raise self._absent(change)
        return result

    def checked(self, name: str, change: Change, shapes: Shapes) -> Change:
        """A change of one of the class's tensors, its orientation known; refuses one of another shape.

        Args:
            shapes: of the tensors as the class has them.
        """
        info = change.spot.info if isinstance(change, PlacedChange) else self._infos.get(name)
        if name not in shapes:
            raise self._absent(change)
        shape = shapes[name]
        if self.tied is not None and info is not None and info.vocabulary_axis is not None and len(shape) == 2:
            raise self._refused(
                f"changes '{name}' and not the head '{self.tied}', which is tied to it",
                "store the head as a tensor of its own, with 'tie_word_embeddings': false",
            )
        changed = [self.adapter.shapes[key] for key in (change.value, change.shift) if key]
        if change.a:
            low: Shape = (self.adapter.shapes[change.b][0], *self.adapter.shapes[change.a][1:])
            change = replace(change, transposed=self._transposed(change, shape, low, info))
            low = low[::-1] if change.transposed else low
            changed.append((change.experts, *low) if change.experts else low)
        if odd := [each for each in changed if each != shape]:
            raise self._refused(f"has {list(odd[0])} for '{change.name}', the model has {list(shape)}")
        return change

    def _transposed(self, change: Change, shape: Shape, low: Shape, info: TensorInfo | None) -> bool:
        """Whether the adapter takes a tensor for [in, out]: by its shape, of square ones by labels or peft's config."""
        if len(shape) != 2 or change.embedding:
            return change.transposed or change.embedding
        if shape[0] != shape[1]:
            return shape == low[::-1]
        labelled = info is not None and any(axis.parts for axis in info.axes)
        return transposed(info) if info and labelled else bool(self.adapter.config.get("fan_in_fan_out"))


def _is_another_vector(info: TensorInfo, form: ComposedTensor) -> bool:
    """Whether a vector only looks like a stored one, as the biases of two maps into one stream do."""
    cut = form.cuts[0]
    return len(info.axes) == len(form.cuts) == 1 and cut.length == cut.info.axes[0].size
