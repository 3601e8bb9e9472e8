"""Random changes of weights with the singular values of a given one: controls of what is carried."""

from __future__ import annotations

import torch
from torch import Tensor

DRAWS = 10
"""Random changes that a carried one is compared with."""


def random_change(change: Tensor, draw: torch.Generator) -> Tensor:
    """A change of the same shape and singular values between random directions, float64; of a vector, of its length."""
    matrix = change.double().flatten(1) if change.ndim > 1 else change.double()[:, None]
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT
    upper = torch.linalg.qr(tall).R
    left, right = (
        torch.linalg.qr(torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x.device)).Q for x in (tall, upper)
    )
    turned = left @ upper @ right
    return (turned if tall is matrix else turned.mT).reshape(change.shape)
