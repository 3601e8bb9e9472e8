"""A new LoRA, and where it begins: along the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rotation_merge.errors import RotationMergeError


def with_lora(model: Any, rank: int, seed: int) -> Any:
    """The model with a LoRA (rank-stabilised) that alone is trained: on all linear maps, and on the head where that is
    not tied to an embedding.

    Raises:
        RotationMergeError: peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise RotationMergeError("--lora needs peft", remedy="pip install peft") from error
    from transformers.pytorch_utils import Conv1D

    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    maps = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module.weight not in tables
    ]
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(r=rank, lora_alpha=rank, use_rslora=True, target_modules=maps or "all-linear")
    ).eval()


def begin_along(model: nn.Module, gradients: Callable[[], object]) -> None:
    """Let every LoRA of a model begin along the gradient G of its map, in place: A gets orthonormal rows that span what
    matters most of G's rows, B is 0, so that the model computes what it did.

    Found by half a step of subspace iteration, for which the LoRA's own gradients do: that of B is G Aᵀ, that of A is
    Bᵀ G. No gradient of a whole weight is ever held.

    Args:
        gradients: adds up those of the loss on some samples.

    Source: the idea is LoRA-GA's (Wang, Yu and Li 2024), which takes singular vectors of G.
    """
    fresh = [a.detach().clone() for a, _ in _factors(model)]
    gradients()
    with torch.no_grad():
        for a, b in _factors(model):
            if b.grad is not None:
                basis = _orthonormal(b.grad.mT)
                b.zero_()[:, : len(basis)] = basis.mT
                a.zero_()
    model.zero_grad()
    gradients()
    with torch.no_grad():
        for (a, b), old in zip(_factors(model), fresh, strict=True):
            if a.grad is not None:
                basis = _orthonormal(a.grad)
                a.copy_(old)[: len(basis)] = basis
                b.zero_()
    model.zero_grad()


def _factors(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """A (rank, in) and B (out, rank) of every map."""
    for module in model.modules():
        for name, a in getattr(module, "lora_A", {}).items():
            yield a.weight, module.get_parameter(f"lora_B.{name}.weight")


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of rows (as many as fit in their length)."""
    return torch.linalg.qr(rows.double().mT)[0].mT.to(rows)
