"""Multinomial logistic regression: a linear map whose outputs are logits, fitted to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rotation_merge.averaging.ridge import BIAS

ITERATIONS = 20
"""Of conjugate gradients, of which ten bring the loss of a byte model's head within a percent of the least."""

SETTLED = 1e-6
"""Of the first gradient's squared norm, in the preconditioner's metric: the iteration ends below it."""


def softmax_change(
    weight: Tensor,
    start: Tensor,
    inputs: Sequence[Tensor],
    targets: Callable[[int], Tensor],
    shares: Sequence[float],
    ridge: float,
) -> Tensor:
    r"""The change D of a linear map W whose softmax is nearest to given probabilities.

    Minimises the mean over positions of KL(softmax(t) || softmax((W + D) x)), plus ridge/2 mean(x^2) |D|^2: convex.
    Preconditioned conjugate gradients (Polak and Ribiere) with a Newton step along each direction; the preconditioner
    is the Gram of the inputs times the mean variance q (1 - q) of each output.

    Args:
        weight: W, shape (out, in), or (out, in + 1) with a bias in the last column, which is hardly penalised.
        start: where D starts, of the same shape.
        inputs: of each batch, (positions, in).
        targets: t of a batch by its number, (positions, out); read once in every pass.
        shares: how much each position of a batch counts.

    Returns:
        D, float64.
    """
    width, biased = inputs[0].shape[-1], weight.shape[1] > inputs[0].shape[-1]
    weight, change = weight.to(inputs[0]), start.to(inputs[0])
    count = sum(share * len(x) for x, share in zip(inputs, shares, strict=True))

    def batches() -> list[tuple[int, Tensor, float]]:
        widened = (torch.cat([x, x.new_ones(len(x), 1)], 1) if biased else x for x in inputs)
        return [(i, x, share / count) for i, (x, share) in enumerate(zip(widened, shares, strict=True))]

    gram, variance = (torch.zeros(size, dtype=torch.float64) for size in ((weight.shape[1],) * 2, weight.shape[0]))
    for i, x, share in batches():
        q = targets(i).softmax(-1)
        gram += share * (x.mT @ x).cpu()
        variance += share * (q - q.square()).sum(0).cpu()
    penalty = torch.full_like(gram[0], ridge * float(gram.diagonal()[:width].mean()))
    penalty[width:] = BIAS
    values, vectors = torch.linalg.eigh(gram)
    metric = (variance[:, None] * values.clamp_min(0.0) + penalty.mean()).to(change)
    vectors, penalty = vectors.to(change), penalty.to(change)

    def slope(at: Tensor) -> tuple[float, Tensor]:
        loss, gradient = 0.5 * float((penalty * at.square()).sum()), penalty * at
        for i, x, share in batches():
            log_p, log_q = (logits.log_softmax(-1) for logits in (x @ (weight + at).mT, targets(i).to(x)))
            q = log_q.exp()
            loss += share * float(torch.where(q > 0, q * (log_q - log_p), 0.0).double().sum())
            gradient += share * (log_p.exp() - q).mT @ x
        return loss, gradient

    def curvature(at: Tensor, direction: Tensor) -> float:
        total = float((penalty * direction.square()).sum())
        for _, x, share in batches():
            p, along = (x @ (weight + at).mT).softmax(-1), x @ direction.mT
            mean = (p * along).sum(-1, keepdim=True)
            total += share * float((p * (along - mean).square()).double().sum())
        return total

    loss, gradient = slope(change)
    first = previous = 0.0
    direction, last = torch.zeros_like(change), gradient
    for _ in range(ITERATIONS):
        steepest = ((gradient @ vectors) / metric) @ vectors.mT
        size = float((gradient * steepest).sum())
        first = first or size
        if size <= SETTLED * first:
            break
        share = max(0.0, float(((gradient - last) * steepest).sum()) / previous) if previous else 0.0
        direction = share * direction - steepest
        if float((direction * gradient).sum()) >= 0:
            direction = -steepest
        step = -float((direction * gradient).sum()) / max(curvature(change, direction), 1e-300)
        last, previous = gradient, size
        reached, following = slope(change + step * direction)
        while reached > loss and step * float(direction.abs().max()) > 1e-12:
            step /= 4
            reached, following = slope(change + step * direction)
        if reached > loss:
            break
        change, loss, gradient = change + step * direction, reached, following
    return change.double()
