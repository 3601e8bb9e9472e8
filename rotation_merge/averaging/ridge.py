"""Linear maps fitted on samples: to outputs by ridge regression from sums of products, to probabilities by softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

RIDGES = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Of which one is chosen on rows that are held out."""

BIAS = 1e-6
"""The penalty of a bias, over the number of rows."""

STRIPE = 256
"""Of products of inputs with themselves, those of so many with all that come after them are computed at once."""

AT_ONCE = 2048
"""Positions whose products are computed at once, at least: several small batches, or one large one."""

ITERATIONS = 20
"""Of L-BFGS, of which ten bring the loss of a byte model's head within a percent of the least."""

HISTORY = 2
"""Earlier steps that L-BFGS keeps: each is as large as the map, twice."""


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
        self._factors: dict[tuple[int, float], Tensor | None] = {}
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

    def change(self, key: str, ridge: float, biased: bool) -> Tensor | None:
        r"""The change of a map that brings its outputs nearest to their targets, float64.

        D = (R^T X) (X^T X + diag(penalty))^-1 minimises |R - X D^T|^2 + sum_j penalty_j |D_j|^2, for residuals R.

        Returns:
            (out, in), with a bias (out, in + 1); None where the inputs do not determine it.
        """
        size = self.width + int(biased)
        if (size, ridge) not in self._factors:
            self._factors[size, ridge] = self._factor(self._penalty(ridge)[:size])
        factor = self._factors[size, ridge]
        return None if factor is None else torch.cholesky_solve(self.cross[key][:size], factor).mT

    def best_ridge(self, held_out: RidgeSums, biased: Mapping[str, bool]) -> float:
        """The ridge of `RIDGES` whose changes err least on rows held out, which are added to these rows then.

        Args:
            biased: by key of each map, whether it has a bias.
        """

        def error(ridge: float) -> float:
            changes = {key: self.change(key, ridge, has_bias) for key, has_bias in biased.items()}
            self._factors.clear()
            return sum(torch.inf if x is None else held_out.errors(k, x, None)[1] ** 2 for k, x in changes.items())

        best = min(RIDGES, key=error)
        self._upper += held_out._upper
        self.rows += held_out.rows
        for key, cross in held_out.cross.items():
            self.cross[key] += cross
            (before, whole), (others_before, others_whole) = self.squares[key], held_out.squares[key]
            self.squares[key] = before + others_before, whole + others_whole
        return best

    def _factor(self, penalty: Tensor) -> Tensor | None:
        """The Cholesky factor, for all maps that read as many of the inputs as there are penalties."""
        upper = self._upper[: len(penalty), : len(penalty)]
        before = upper.diagonal().clone()
        upper.diagonal().add_(penalty)  # and put back: the whole is large
        factor, failed = torch.linalg.cholesky_ex(upper.mT)  # which is read below its diagonal, and columns first
        upper.diagonal().copy_(before)
        singular = int(failed) or bool((factor.diagonal() < 1e-7 * before.clamp_min(1e-300).sqrt()).any())
        return None if singular else factor

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


def softmax_change(
    weight: Tensor,
    start: Tensor,
    inputs: Sequence[Tensor],
    targets: Callable[[int], Tensor],
    shares: Sequence[float],
    ridge: float,
) -> Tensor:
    r"""The change D (float64) of a linear map W whose softmax is nearest to given probabilities.

    Minimises the mean over positions of KL(softmax(t) || softmax((W + D) x)), plus ridge/2 mean(x^2) |D|^2: convex.
    By L-BFGS in coordinates in which the Gram of the inputs, times the mean variance q (1 - q) of each output, is the
    identity.

    Args:
        weight: W, shape (out, in), or (out, in + 1) with a bias in the last column, which is hardly penalised.
        start: where D starts, of the same shape.
        inputs: of each batch, (positions, in).
        targets: t of a batch by its number, (positions, out); read once in every pass.
        shares: how much each position of a batch counts.
    """
    width, (outputs, size) = inputs[0].shape[-1], weight.shape
    weight, start = weight.to(inputs[0]), start.to(inputs[0])
    count = sum(share * len(x) for x, share in zip(inputs, shares, strict=True))

    def batches() -> Iterator[tuple[Tensor, Tensor, float]]:
        """Inputs (with a one for a bias), logits of the targets, and how much each position counts."""
        for i, (x, share) in enumerate(zip(inputs, shares, strict=True)):
            yield torch.cat([x, x.new_ones(len(x), size - width)], 1), targets(i).to(x), share / count

    gram, variance = torch.zeros(size, size, dtype=torch.float64), torch.zeros(outputs, dtype=torch.float64)
    for x, target, share in batches():
        q = target.softmax(-1)
        gram += share * (x.mT @ x).cpu()
        variance += share * (q - q.square()).sum(0).cpu()
    penalty = torch.full_like(gram[0], ridge * float(gram.diagonal()[:width].mean()))
    penalty[width:] = BIAS
    values, vectors = torch.linalg.eigh(gram)
    scales = (variance[:, None] * values.clamp_min(0.0) + penalty.mean()).rsqrt().to(start)
    vectors, penalty = vectors.to(start), penalty.to(start)
    steps, best, least = torch.zeros_like(start), start, torch.inf

    def closure() -> float:
        nonlocal best, least
        change = start + (steps * scales) @ vectors.mT
        loss, gradient = 0.5 * float((penalty * change.square()).sum()), penalty * change
        for x, target, share in batches():
            log_p, log_q = (logits.log_softmax(-1) for logits in (x @ (weight + change).mT, target))
            q = log_q.exp()
            loss += share * float(torch.where(q > 0, q * (log_q - log_p), 0.0).double().sum())
            gradient += share * (log_p.exp() - q).mT @ x
        steps.grad = (gradient @ vectors) * scales
        if loss < least:
            best, least = change, loss
        return loss

    torch.optim.LBFGS([steps], max_iter=ITERATIONS, history_size=HISTORY, line_search_fn="strong_wolfe").step(closure)
    return best.double()
