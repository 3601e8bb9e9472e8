"""A model's tensors with a LoRA adapter merged into them, tensor by tensor."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.errors import CheckpointError
from rotation_merge.model.adapter_parts import AdapterPart, adapter_parts
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.low_rank import LowRank
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
    parts: dict[str, list[tuple[int, AdapterPart]]] = {}
    for part in adapter_parts(adapter, architecture, tensors, config, model):
        info = part.info
        if tied is not None and info.vocabulary_axis is not None and len(info.axes) == 2:
            problem = f"the adapter changes '{info.name}' and not the head '{tied}', which is tied to it"
            remedy = "store the head as a tensor of its own, with 'tie_word_embeddings': false"
            raise CheckpointError(problem, where=model, remedy=remedy)
        for number, name in enumerate(info.names):
            if not info.stacked or part.expert in (None, number):
                parts.setdefault(name, []).append((number, part))

    def changed(name: str, tensor: Tensor) -> Tensor:
        if name in parts:
            tensor = tensor.to(_wide(tensor.dtype), copy=True)
            for number, part in parts[name]:
                _apply(adapter, part, number, tensor)
        return tensor

    wide = {name: _wide(tensors.dtypes[name]) for name in parts}
    return tensors.map(changed, dtypes={**tensors.dtypes, **wide})


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _apply(adapter: Adapter, part: AdapterPart, number: int, tensor: Tensor) -> None:
    """Carry out a change of a stored tensor in place.

    Args:
        number: which expert's tensor it is, where each has one.
    """
    change, apart = part.change, part.info.stacked and part.experts > 0
    if part.target is not None:
        tensor = tensor.narrow(*part.target)
    if part.expert is not None and not part.info.stacked:
        tensor = tensor[part.expert]

    def stored(key: str) -> Tensor:
        value = adapter.tensor(key)[number] if apart else adapter.tensor(key)
        return value if part.source is None else value.narrow(*part.source)

    if change.value:
        tensor.copy_(stored(change.value))
    if change.shift:
        tensor += change.scale * stored(change.shift).to(tensor.dtype)
    if not change.a:
        return
    low, magnitude = _factors(adapter, part), adapter.tensor(change.magnitude) if change.magnitude else None
    factors, matrices = [low], [tensor]
    if part.experts:
        numbers = [number] if apart else range(part.experts)
        factors = [replace(low, a=low.a[expert], b=low.b[expert]) for expert in numbers]
        matrices = [tensor] if apart else list(tensor)
    for of_map, matrix in zip(factors, matrices, strict=True):
        _multiply(of_map.to(matrix.dtype), magnitude, part, matrix)


@lru_cache(maxsize=1)
def _factors(adapter: Adapter, part: AdapterPart) -> LowRank:
    """The factors of a change, kept while the experts that they are of are read one after the other."""
    return part.factors(adapter)


def _multiply(low: LowRank, magnitude: Tensor | None, part: AdapterPart, matrix: Tensor) -> None:
    """Add a product of factors to a matrix, in place; with a magnitude as DoRA does."""
    magnitude = None if magnitude is None else magnitude.to(matrix.dtype)
    if part.source is not None:
        _, start, length = part.source
        if part.outputs(part.source):
            low = replace(low, b=low.b.narrow(0, start, length))
            magnitude = None if magnitude is None else magnitude.narrow(0, start, length)
        else:
            low = replace(low, a=low.a.narrow(1, start, length))
    if magnitude is not None:
        weight = matrix.T if part.flipped and not low.embedding else matrix
        weight.copy_(_dora(weight.contiguous(), low, magnitude))
        return
    matrix += low.product().mT if part.flipped else low.product()


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
