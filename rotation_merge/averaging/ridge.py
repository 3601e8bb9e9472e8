"""Ridge regression from sums of products: the change of a linear map that brings its outputs to their targets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rotation_merge.errors import DataError

BIAS = 1e-6
"""The penalty of a bias, over the number of rows."""

STRIPE = 256
"""Of products of inputs with themselves, those of so many with all that come after them are computed at once."""

AT_ONCE = 2048
"""Positions whose products are computed at once, at least: several small batches, or one large one."""


def ridge_change(gram: Tensor, cross: Tensor, penalty: Tensor) -> Tensor | None:
    r"""The change D of a linear map that minimises |R - X D^T|^2 + sum_j penalty_j |D_j|^2.

    D = (R^T X) (X^T X + diag(penalty))^-1, by Cholesky in float64.

    Args:
        gram: X^T X, shape (in, in); only its upper triangle is read.
        cross: X^T R, shape (in, out); R is the residual of the map's outputs.
        penalty: of each input, shape (in,), not negative.

    Returns:
        D, shape (out, in), float64; None where the sum is singular.
    """
    factor = ridge_factor(gram, penalty)
    return None if factor is None else torch.cholesky_solve(cross.double(), factor).mT


def ridge_factor(gram: Tensor, penalty: Tensor) -> Tensor | None:
    """The Cholesky factor, for all maps that read the same; see `ridge_change`."""
    whole = gram.double()
    diagonal = whole.diagonal()
    before = diagonal.clone()
    diagonal.add_(penalty)  # and put back: the whole is large
    factor, failed = torch.linalg.cholesky_ex(whole.mT)  # which is read below its diagonal, and columns first
    diagonal.copy_(before)
    singular = int(failed) or bool((factor.diagonal() < 1e-7 * before.clamp_min(1e-300).sqrt()).any())
    return None if singular else factor


class RidgeSums:
    """Products of inputs with themselves and with residuals of outputs, over all samples; the last input is the bias.

    Args:
        like: inputs of the maps.
        dtype: of products of a few batches; they are summed in float64.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self.width, self.rows, self.dtype = like.shape[-1], 0.0, dtype
        self.cross: dict[str, Tensor] = {}
        self.squares: dict[str, tuple[float, float]] = {}
        self._factors: dict[int, Tensor | None] = {}
        self._upper = torch.zeros(self.width + 1, self.width + 1, dtype=torch.float64, device=like.device)
        self._waiting: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._weight = 1.0

    @property
    def gram(self) -> Tensor:
        """Products of inputs (and a one) with themselves, (in + 1, in + 1), once all are there."""
        return self._upper.triu() + self._upper.triu(1).mT

    def add(self, inputs: Tensor, lacks: Mapping[str, tuple[Tensor, Tensor]], weight: float) -> None:
        """One batch: the inputs, and by key of a map the residual of its output, (positions, out), and the output."""
        if weight != self._weight or sum(len(x) for x, _ in self._waiting) >= AT_ONCE:
            self.flush()
        self._weight = weight
        residuals = {key: lack.to(self.dtype) for key, (lack, _) in lacks.items()}
        self._waiting.append((inputs.flatten(0, -2).to(self.dtype), residuals))
        for key, (lack, output) in lacks.items():
            before, whole = self.squares.get(key, (0.0, 0.0))
            target = output.flatten(0, -2) + lack
            self.squares[key] = before + weight * _square(lack), whole + weight * _square(target)

    def flush(self) -> None:
        """Add up the products of the batches that wait."""
        if not self._waiting:
            return
        (inputs, residuals), weight = zip(*self._waiting, strict=True), self._weight
        self._waiting = []
        x = torch.cat(inputs)
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
        self.rows += weight * len(x)
        for i in range(0, self.width + 1, STRIPE):
            self._upper[i : i + STRIPE, i:].add_(x[:, i : i + STRIPE].mT @ x[:, i:], alpha=weight)
        for key in residuals[0]:
            part = x.mT @ torch.cat([each[key] for each in residuals])
            self.cross.setdefault(key, torch.zeros_like(part, dtype=torch.float64)).add_(part, alpha=weight)

    def change(self, key: str, ridge: float, biased: bool, name: str) -> Tensor:
        """The map's change, (out, in), with a bias (out, in + 1).

        Raises:
            DataError: the inputs do not determine it.
        """
        size = self.width + int(biased)
        if size not in self._factors:
            self._factors[size] = ridge_factor(self._upper[:size, :size], self._penalty(ridge)[:size])
        factor = self._factors[size]
        if factor is None:
            raise DataError(
                f"{self.rows:.0f} positions of the samples do not determine '{name}' ({self.width} inputs)",
                remedy="give more samples, or a ridge above 0 ('ridge: 0.01')",
            )
        return torch.cholesky_solve(self.cross[key][:size], factor).mT

    def _penalty(self, ridge: float) -> Tensor:
        """Ridge penalties of each input and of the bias, (in + 1,)."""
        penalty = torch.full_like(self._upper[0], ridge * float(self._upper.diagonal()[: self.width].mean()))
        penalty[self.width] = BIAS * self._upper[self.width, self.width]  # the rows, as they count
        return penalty

    def errors(self, key: str, change: Tensor, ridge: float | None) -> tuple[float, float]:
        """Root of the relative squared error before and after.

        Args:
            ridge: under which the change is the best one, whose product with the Gram is known; None: under none.
        """
        size = change.shape[1]
        before, whole = self.squares[key]
        reached = (change.mT * self.cross[key][:size]).sum()
        if ridge is None:
            spent = (change @ self.gram[:size, :size] * change).sum()
        else:
            spent = reached - (change.square() @ self._penalty(ridge)[:size]).sum()
        after = max(before - float(2 * reached - spent), 0.0)
        return ((before / whole) ** 0.5, (after / whole) ** 0.5) if whole else (0.0, 0.0)


def _square(x: Tensor) -> float:
    """The sum of squares: of each row in its own precision, in all in float64."""
    return float(torch.linalg.vector_norm(x, dim=-1).double().square().sum())
