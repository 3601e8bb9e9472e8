"""FP8 weights as the numbers that they stand for: codes times the scales that are stored beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.registry import stores_codes
from rotation_merge.errors import CheckpointError
from rotation_merge.model.tensors import Tensors

SCALES = ("_scale_inv", "_scale")
"""Endings that the name of a weight's scales has behind the weight's own; codes are multiplied with either."""
BLOCK = (128, 128)
"""Rows and columns of a weight that share a scale, where the config does not say."""


def codes_in(tensors: Tensors) -> list[str]:
    """Names of matrices, or stacks of them, that are stored as FP8 codes: torch does not calculate with their type."""
    unknown = {name: shape for name, shape in tensors.shapes.items() if name not in tensors.dtypes}
    return [name for name, shape in unknown.items() if len(shape) in (2, 3) and not name.endswith(SCALES)]


def dequantised(config: Mapping[str, Any], tensors: Tensors, label: str) -> tuple[dict[str, Any], Tensors]:
    """A model's config and tensors with FP8 codes as numbers, computed in float32; any other model unchanged.

    Args:
        label: its name in errors.

    Raises:
        CheckpointError: codes have no scales.
    """
    codes, settings = codes_in(tensors), stores_codes(config)
    if not codes or not isinstance(settings, Mapping):
        return dict(config), tensors
    scales = {name: next((name + end for end in SCALES if name + end in tensors), "") for name in codes}
    if lacking := next((name for name, scale in scales.items() if not scale), None):
        problem = f"the FP8 codes of '{lacking}' have no scales beside them"
        raise CheckpointError(problem, where=label, remedy="write the model again with its scales")
    block = settings.get("weight_block_size") or BLOCK

    def number(name: str, tensor: Tensor) -> Tensor:
        return (
            tensor.float() * _spread(tensors[scales[name]].float(), tensor.shape, block) if name in scales else tensor
        )

    dtypes = {name: tensors.dtypes.get(name, torch.bfloat16) for name in tensors}
    numbers = tensors.map(number, dtypes=dtypes).only(name for name in tensors if not _is_scale(name, scales))
    return {name: value for name, value in config.items() if name != "quantization_config"}, numbers


def _is_scale(name: str, codes: Collection[str]) -> bool:
    """Whether a tensor holds scales of codes, or of the activations that meet them."""
    begins = [name[: place.start()] for place in re.finditer("_", name)]
    return name.endswith(SCALES) and any(begin in codes for begin in (f"{name.rpartition('.')[0]}.weight", *begins))


def _spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Scales of blocks, rows, experts or a whole weight, one for each of its entries (or broadcast to them)."""
    scales = scales.reshape(*scales.shape, *[1] * (len(shape) - scales.ndim))
    for dim, length in zip((-2, -1), block, strict=True):
        if scales.shape[dim] not in (1, shape[dim]):
            scales = scales.repeat_interleave(length, dim).narrow(dim, 0, shape[dim])
    return scales
