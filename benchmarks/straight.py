"""A straight implementation of the ICML 2025 paper's matching, as the thing to measure against.

Written from the paper alone (section 4.2: equations 7, 10 and 12, Algorithm 1): one SVD after another for the heads,
scipy's assignment solver on the raw similarity of the neurons, rotation first and rescaling after. The products of
biases in Algorithm 1, b^T b, are left out, so it does slightly less than the paper's. It knows one layer of separate q,
k, v, o and up, down (gate) matrices and nothing else; where query heads share keys and values, their products are
summed. With rotary embedding the paper's rotation would change the outputs, so each RoPE pair is
turned by its best angle instead, pair by pair.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


def match_ffn(anchor: list[Tensor], donor: list[Tensor]) -> np.ndarray:
    """Equation 7: the permutation maximising <P, sum of A B^T> over matrices with one row for each neuron."""
    similarity = torch.zeros(len(anchor[0]), len(anchor[0]))
    for a, b in zip(anchor, donor, strict=True):
        similarity += a.float() @ b.float().T
    return linear_sum_assignment(similarity.numpy(), maximize=True)[1]


def rotation(products: Tensor) -> Tensor:
    """Equation 10: U V^T of one head's products."""
    u, _, vh = torch.linalg.svd(products)
    return u @ vh


def rotary_rotation(products: Tensor) -> Tensor:
    """The best angle of each RoPE pair (i, i + d/2), one after another."""
    d = products.shape[0]
    result = torch.zeros(d, d)
    for i in range(d // 2):
        j = i + d // 2
        angle = torch.atan2(products[j, i] - products[i, j], products[i, i] + products[j, j])
        result[i, i] = result[j, j] = angle.cos()
        result[j, i] = angle.sin()
        result[i, j] = -angle.sin()
    return result


def rescale(anchor: list[Tensor], donor: list[Tensor]) -> float:
    """Equation 12 for two matrices: the best positive root of the quartic, by numpy."""
    a2, b2 = (float((x * x).sum()) for x in donor)
    p, q = (float((x * y).sum()) for x, y in zip(anchor, donor, strict=True))
    if a2 == 0 or b2 == 0:
        return 1.0
    roots = np.roots([a2, -p, 0.0, q, -b2])
    real = [r.real for r in roots if abs(r.imag) < 1e-9 and r.real > 0]
    return min(real, key=lambda a: a * a * a2 + b2 / a**2 - 2 * a * p - 2 * q / a) if real else 1.0


def match_attention(
    anchor: dict[str, Tensor], donor: dict[str, Tensor], heads: int, kv_heads: int, rotary: bool
) -> list[dict[str, Tensor]]:
    """Algorithm 1 with rescaling, KV head by KV head: maps of the query/key and the value/output coordinates."""
    share = heads // kv_heads
    size = anchor["k"].shape[0] // kv_heads
    found = []
    for g in range(kv_heads):
        maps = {}
        for primal, dual, name in (("k", "q", "qk"), ("v", "o", "vo")):
            own = slice(g * size, (g + 1) * size)
            a_p, b_p = anchor[primal][own].float(), donor[primal][own].float()
            products = a_p @ b_p.T
            a_d, b_d = [], []
            for h in range(g * share, (g + 1) * share):
                rows = slice(h * size, (h + 1) * size)
                a_d.append(anchor[dual][rows].float())
                b_d.append(donor[dual][rows].float())
                products = products + a_d[-1] @ b_d[-1].T
            turn = rotary_rotation(products) if rotary and name == "qk" else rotation(products)
            turned = [turn @ b_p, torch.cat([turn @ b for b in b_d])]
            scale = rescale([a_p, torch.cat(a_d)], turned)
            maps[name] = turn * scale
        found.append(maps)
    return found


def match_layer(anchor: dict[str, Tensor], donor: dict[str, Tensor], heads: int, kv_heads: int, rotary: bool) -> None:
    """One layer: tensors q, k, v, o, up, down and optionally gate, with heads or neurons along the first dimension."""
    match_attention(anchor, donor, heads, kv_heads, rotary)
    names = [name for name in ("up", "gate", "down") if name in anchor]
    match_ffn([anchor[name] for name in names], [donor[name] for name in names])
