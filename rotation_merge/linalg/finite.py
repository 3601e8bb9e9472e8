"""Whether tensors hold numbers only, asked at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no floating-point tensor holds NaN or infinity; one question to a device for all.

    NaN and infinity go through a sum, which is many times faster than `torch.isfinite`; as a sum of finite values may
    overflow, bad ones are looked at again.
    """
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floating or bool(torch.stack([_sum(tensor) for tensor in floating]).isfinite().all()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in floating)


def _sum(tensor: Tensor) -> Tensor:
    """Sum in the tensor's own dtype if possible, which avoids a widened copy."""
    return tensor.sum(dtype=torch.float32 if tensor.itemsize < 2 else None).float()
