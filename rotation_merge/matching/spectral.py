"""Pairing heads by their singular values, after TransFusion: a variant for comparison.

TransFusion (Rinaldi and others, 2025) pairs heads by the distance of the singular values of their query, key and value
matrices without biases, which no permutation inside a head changes, and then permutes the coordinates of each pair,
with one permutation for the three. Here the output matrix and the biases count, too, queries and keys are permuted
apart from values and outputs (which contains the single permutation and is as exact), and the stream follows
`residual`, where TransFusion permutes it by a policy of its own. Directions play no part in the pairing, so the joint
optimum of `head_order` is never worse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign_small
from rotation_merge.matching.pairing import Pairing
from rotation_merge.matching.products import HeadProjections, Order


def spectral_order(pairings: list[Pairing], inside: bool = False) -> tuple[Order, list[str]]:
    """KV groups (unless `inside`) and, inside them, query heads assigned by the distance of their spectra."""
    shared: Tensor | float = 0.0
    heads: Tensor | float = 0.0
    for pairing in pairings:
        if pairing.side != "rest":
            shared = shared + _distances(pairing.primal)[:, 0, :, 0]
            heads = heads + _distances(pairing.dual).permute(0, 2, 1, 3)
    cost, inner = torch.as_tensor(shared), torch.as_tensor(heads)
    groups, per_group = inner.shape[0], inner.shape[-1]
    queries = torch.stack([assign_small(-m) for m in inner.flatten(0, 1)]).reshape(groups, groups, per_group)
    chosen = inner.cpu().gather(3, queries[..., None])[..., 0].sum(-1)
    rows = torch.arange(groups)
    donor = rows if inside else assign_small(-(cost.cpu() + chosen))
    return Order(rows, donor, queries[rows, donor]), ["heads paired by their singular values, after TransFusion"]


def _distances(half: HeadProjections) -> Tensor:
    """Euclidean distances between the singular values of the anchor's and the donor's heads, (G, r, G, r)."""
    groups, per_group, d = half.shape
    anchor, donor = (_spectra(half, which).reshape(groups * per_group, d) for which in (0, 1))
    return torch.cdist(anchor, donor).reshape(groups, per_group, groups, per_group)


def _spectra(half: HeadProjections, which: int) -> Tensor:
    """Singular values of each head's matrix (bias included as a column), (G, r, d), float64."""
    single = HeadProjections(
        [(p[which], p[which]) for p in half.pairs], half.shape, "full", half.interleaved, half.device
    )
    squares = torch.stack([_gram(single, head) for head in range(half.shape[1])], dim=1)
    return torch.linalg.eigvalsh(squares).clamp_min(0).sqrt()


def _gram(half: HeadProjections, head: int) -> Tensor:
    pairs = [(a[:, head : head + 1], b[:, head : head + 1]) for a, b in half.pairs]
    groups, _, d = half.shape
    return HeadProjections(pairs, (groups, 1, d), "full", half.interleaved, half.device).products()
