"""Changes of single layers as peft merges them: DoRA, and fused experts (`target_parameters`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import CheckpointError
from rotation_merge.model.low_rank import LowRank

CONVOLUTIONS = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""By the dimensions of their weights."""


def dora(weight: Tensor, change: LowRank, magnitude: Tensor) -> Tensor:
    """m (W + s B A) / |W + s B A|, in the dtype of the weight.

    Args:
        weight: (out, in), a convolution's (out, in, kernel...), an embedding's (tokens, width).
        magnitude: m, one number an output.

    Source: DoRA, arXiv 2402.09353, eq. 5.
    """
    if change.embedding:
        layer: nn.Module = nn.Embedding(*weight.shape, _weight=weight)
    else:
        kind = CONVOLUTIONS.get(weight.ndim, nn.Linear)
        sizes = [weight.shape[1], weight.shape[0], *[weight.shape[2:]] * (weight.ndim > 2)]
        layer = nn.utils.skip_init(kind, *sizes, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    a, b = ("lora_embedding_A", "lora_embedding_B") if change.embedding else ("lora_A.weight", "lora_B.weight")
    factors = {a: change.a, b: change.b, "lora_magnitude_vector": magnitude}
    rank = len(change.a)
    return _merged(layer, factors, r=rank, lora_alpha=change.scale * rank, target_modules=["layer"], use_dora=True)


def fused_experts(change: LowRank, count: int, dtype: torch.dtype) -> Tensor:
    """The change of all experts of a parameter, (experts, in, out).

    Args:
        change: A and B of all experts as peft stores them, with the scale of one expert's product.
        count: of experts.
    """
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(count, change.a.shape[1], len(change.b), dtype=dtype), requires_grad=False)
    layer.is_transposed = True  # so that every peft takes it for (experts, in, out)
    rank = len(change.a) // count
    factors = {"lora_A.weight": change.a.to(dtype), "lora_B.weight": change.b.to(dtype)}
    return _merged(
        layer,
        factors,
        r=rank,
        lora_alpha=change.scale * rank,
        target_modules=[],
        target_parameters=["layer.weight"],
    )


def _merged(layer: nn.Module, factors: Mapping[str, Tensor], **config: Any) -> Tensor:
    """The weight of a layer with an adapter merged by peft.

    Args:
        factors: by peft's names inside the layer.
        config: of peft.

    Raises:
        CheckpointError: peft is missing.
    """
    try:
        import peft
    except ImportError as error:
        raise CheckpointError("DoRA and adapters of fused experts need peft", remedy="pip install peft") from error
    parent = nn.Module()
    parent.layer = layer
    state = {f"layer.{name}": tensor for name, tensor in factors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(**config), parent, low_cpu_mem_usage=True)  # draws no numbers
        peft.set_peft_model_state_dict(parent, state, low_cpu_mem_usage=True)
        parent.layer.merge()
    merged: Tensor = parent.layer.get_base_layer().weight.data
    return merged
