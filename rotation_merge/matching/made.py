"""Steps of a computation that keep nothing for their gradients: what they need is made again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

Make = Callable[[], Tensor]
Read = Callable[[torch.dtype], Tensor]
"""Gives a matrix in a type, good until the next is read."""


class RecomputedTensor(torch.autograd.Function):
    """A tensor that is made, and made again for its gradient; nothing in between is kept."""

    @staticmethod
    def forward(ctx: Any, make: Make, *leaves: Tensor) -> Tensor:
        ctx.make, ctx.leaves = make, leaves
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            recomputed = ctx.make()
        if not recomputed.requires_grad:
            return None, *(None for _ in ctx.leaves)
        return None, *torch.autograd.grad(recomputed, ctx.leaves, gradients[0], allow_unused=True)


class Products(torch.autograd.Function):
    """Sum of rows (n, in) times matrices (out, in) times numbers. The matrices are read anew for the gradient, and have
    none of their own."""

    @staticmethod
    def forward(ctx: FunctionCtx, readers: Sequence[Read], shares: Sequence[float], *rows: Tensor) -> Tensor:
        ctx.readers, ctx.shares = readers, shares  # type: ignore[attr-defined]
        kind = rows[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows[0].dtype
        total: Tensor | None = None
        with torch.autocast(kind, enabled=False):
            for read, share, x in zip(readers, shares, rows, strict=True):
                total = _add_product(total, x.to(dtype), read(dtype).mT, share)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradients_in: list[Tensor | None] = [None, None]
        for needed, read, share in zip(ctx.needs_input_grad[2:], ctx.readers, ctx.shares, strict=True):
            gradients_in.append(_add_product(None, gradients[0], read(gradients[0].dtype), share) if needed else None)
        return tuple(gradients_in)


def _add_product(total: Tensor | None, x: Tensor, matrix: Tensor, share: float) -> Tensor:
    """``total + share * x @ matrix``, in the place of the total; computed where the matrix is."""
    if matrix.device != x.device:
        far = _add_product(None, x.to(matrix.device), matrix, share).to(x.device)
        return far if total is None else total.add_(far)
    if total is None:
        product = x.new_empty(x.shape[0], matrix.shape[1])
        return torch.addmm(product, x, matrix, beta=0, alpha=share, out=product)
    return total.addmm_(x, matrix, alpha=share)
