"""Multinomial logistic regression: a linear map whose outputs are logits, fitted to probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rotation_merge.averaging.ridge import BIAS

ITERATIONS = 20
"""Of L-BFGS, of which ten bring the loss of a byte model's head within a percent of the least."""

HISTORY = 4
"""Of its steps that are held, each as large as the map twice."""


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
    L-BFGS in coordinates in which the Gram of the inputs times the mean variance q (1 - q) of each output, which is
    near the Hessian, is the identity.

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
    weight = weight.to(inputs[0])
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
    scale = (variance[:, None] * values.clamp_min(0.0) + penalty.mean()).sqrt().to(weight)
    vectors, penalty = vectors.to(weight), penalty.to(weight)
    scaled = ((start.to(weight) @ vectors) * scale).requires_grad_()

    def loss() -> float:
        change = (scaled.detach() / scale) @ vectors.mT
        total, gradient = 0.5 * float((penalty * change.square()).sum()), penalty * change
        for i, x, share in batches():
            log_p, log_q = (logits.log_softmax(-1) for logits in (x @ (weight + change).mT, targets(i).to(x)))
            q = log_q.exp()
            total += share * float(torch.where(q > 0, q * (log_q - log_p), 0.0).double().sum())
            gradient += share * (log_p.exp() - q).mT @ x
        scaled.grad = (gradient @ vectors) / scale
        return total

    torch.optim.LBFGS([scaled], max_iter=ITERATIONS, history_size=HISTORY, line_search_fn="strong_wolfe").step(loss)
    return ((scaled.detach() / scale) @ vectors.mT).double()
