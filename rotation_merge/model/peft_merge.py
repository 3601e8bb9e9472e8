"""Changes of single layers as peft merges them: DoRA, and fused experts (`target_parameters`)."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from rotation_merge.errors import CheckpointError
from rotation_merge.model.low_rank import LowRank

KINDS: dict[int, type[nn.Module]] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
"""Layers by the number of dimensions of their weights."""


def dora(weight: Tensor, change: LowRank, magnitude: Tensor) -> Tensor:
    """m (W + s B A) / |W + s B A|, in the dtype of the weight.

    Args:
        weight: (out, in), a convolution's (out, in, kernel...), an embedding's (tokens, width).
        magnitude: m, one number an output.

    Source: DoRA, arXiv 2402.09353, eq. 5.
    """
    if change.embedding:
        return _merged(nn.Embedding.from_pretrained(weight), change, change.rank, magnitude, target_modules=["layer"])
    kernel = [weight.shape[2:]] * (weight.ndim > 2)
    layer: Any = nn.utils.skip_init(KINDS[weight.ndim], weight.shape[1], weight.shape[0], *kernel, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return _merged(layer, change, change.rank, magnitude, target_modules=["layer"])


def fused_experts(change: LowRank, count: int) -> Tensor:
    """The change of all experts of a parameter, (experts, in, out), in the dtype of the factors.

    Args:
        change: A and B of all experts as peft stores them, with the scale of one expert's product.
        count: of experts.
    """
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(change.a.new_zeros(count, change.a.shape[1], len(change.b)), requires_grad=False)
    layer.is_transposed = True  # so that every peft takes it for (experts, in, out)
    return _merged(layer, change, change.rank // count, target_modules=[], target_parameters=["layer.weight"])


def _merged(layer: nn.Module, change: LowRank, rank: int, magnitude: Tensor | None = None, **targets: Any) -> Tensor:
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
