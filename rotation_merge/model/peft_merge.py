"""Changes of single layers as peft merges them: DoRA, and fused experts (`target_parameters`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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
    layer: Any
    if change.embedding:
        layer = nn.Embedding.from_pretrained(weight)
    else:
        kernel = [weight.shape[2:]] * (weight.ndim > 2)
        layer = nn.utils.skip_init(KINDS[weight.ndim], weight.shape[1], weight.shape[0], *kernel, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    a, b = ("lora_embedding_A", "lora_embedding_B") if change.embedding else ("lora_A.weight", "lora_B.weight")
    factors = {a: change.a, b: change.b, "lora_magnitude_vector": magnitude}
    alpha = change.scale * change.rank
    config = {"r": change.rank, "lora_alpha": alpha, "target_modules": ["layer"], "use_dora": True}
    return _merged(layer, factors, config)


def fused_experts(change: LowRank, count: int) -> Tensor:
    """The change of all experts of a parameter, (experts, in, out), in the dtype of the factors.

    Args:
        change: A and B of all experts as peft stores them, with the scale of one expert's product.
        count: of experts.
    """
    a, b = change.a, change.b
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(a.new_zeros(count, a.shape[1], len(b)), requires_grad=False)
    layer.is_transposed = True  # so that every peft takes it for (experts, in, out)
    rank, parameters = len(a) // count, ["layer.weight"]
    config = {"r": rank, "lora_alpha": change.scale * rank, "target_modules": [], "target_parameters": parameters}
    return _merged(layer, {"lora_A.weight": a, "lora_B.weight": b}, config)


def _merged(layer: nn.Module, factors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
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
    parent: Any = nn.Module()
    parent.layer = layer
    state = {f"layer.{name}": tensor for name, tensor in factors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(peft.LoraConfig(**config), parent, low_cpu_mem_usage=True)  # draws no numbers
        peft.set_peft_model_state_dict(parent, state, low_cpu_mem_usage=True)
        parent.layer.merge()
    merged: Tensor = parent.layer.get_base_layer().weight.data
    return merged
