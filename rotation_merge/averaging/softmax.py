"""Multinomial logistic regression: a linear map whose outputs are logits, fitted to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from rotation_merge.averaging.ridge import BIAS

ITERATIONS = 20
"""Of L-BFGS, of which ten bring the loss of a byte model's head within a percent of the least."""

HISTORY = 2
"""Earlier steps that L-BFGS keeps: each is as large as the map, twice."""


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
