"""A new LoRA for training, initialised along the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import RotationMergeError

PAST = ("out_proj", "conv1d")
"""Maps of a state-space mixer whose weights kernels read past a LoRA; peft refuses them in some models."""


def with_lora(model: Any, rank: int, seed: int) -> Any:
    """Add a rank-stabilised LoRA to a model and freeze everything else.

    It covers all linear maps, except those with which a state-space mixer writes the stream, and tied heads.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RotationMergeError("--lora needs peft", remedy="pip install peft") from error
    from transformers.pytorch_utils import Conv1D

    plain = nn.Linear.forward, Conv1D.forward  # a router may be a linear map that gives more than its product
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and type(module).forward in plain
        if module.weight not in tables and not _read_past(model, name)
    ]
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=rank, use_rslora=True, target_modules=maps or "all-linear")
    ).eval()


def _read_past(model: Any, name: str) -> bool:
    parent, _, leaf = name.rpartition(".")
    return leaf in PAST and all(hasattr(model.get_submodule(parent), key) for key in ("A_log", "D"))


def initialise_along_gradient(model: nn.Module, gradients: Callable[[], object]) -> None:
    """Initialise every LoRA of a model along the gradient G of its map, in place.

    A gets orthonormal rows that span the dominant row space of G and B is 0, so the model's outputs stay the same.

    Found by half a step of subspace iteration, for which the LoRA's own gradients do: that of B is G Aᵀ, that of A is
    Bᵀ G. No gradient of a whole weight is ever held.

    Args:
        gradients: adds up those of the loss on some samples.

    Source: the idea is LoRA-GA's (Wang, Yu and Li 2024), which takes singular vectors of G.
    """
    factors = [
        (a.weight, module.get_parameter(f"lora_B.{name}.weight"))
        for module in model.modules()
        for name, a in getattr(module, "lora_A", {}).items()
    ]
    fresh = [a.detach().clone() for a, _ in factors]
    gradients()
    with torch.no_grad():
        for a, b in factors:
            if b.grad is not None:
                basis = _orthonormal(b.grad.mT).mT
                b.zero_()[:, : basis.shape[1]] = basis
                a.zero_()
    model.zero_grad()
    gradients()
    with torch.no_grad():
        for (a, b), old in zip(factors, fresh, strict=True):
            if a.grad is not None:
                basis = _orthonormal(a.grad)
                a.copy_(old)[: len(basis)] = basis
                b.zero_()
    model.zero_grad()


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of rows (as many as fit in their length)."""
    return torch.linalg.qr(rows.double().mT)[0].mT.to(rows)
