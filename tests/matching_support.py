"""Small attention layers and FFNs as matching sees them, planted twins of them, and what a match leaves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rotation_merge import AlignConfig
from rotation_merge.architecture.model import Part, Space, TensorInfo
from rotation_merge.matching.matrix_pairs import Pairs, PartView
from rotation_merge.symmetry import Transform, orders_of
from rotation_merge.symmetry.admitted import admitted

torch.set_num_threads(1)


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=gen(seed), dtype=torch.float64)


def attention(groups: int, per_group: int, d: int, **facts: object) -> Space:
    sizes = {"groups": groups, "per_group": per_group, "head_dim": d, "value_dim": d}
    return Space("attn", "attention", sizes, **facts)  # type: ignore[arg-type]


def ffn(n: int, gated: bool = False, degree: int = 0) -> Space:
    return Space("ffn", "ffn", {"size": n}, gated=gated, degree=1 if gated else degree)


def roles_of(space: Space) -> tuple[str, ...]:
    if space.kind == "attention":
        return ("q", "k", "v", "o", *(("gate",) if space.values == "gated" else ()))
    return ("in", "gate", "out") if space.gated else ("in", "out")


def tensors(
    space: Space, width: int, seed: int, spread: float = 0.0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Random tensors by role, (*factors, width); `spread` makes their norms differ, as trained ones do."""
    g, found = gen(seed), {}
    for role in roles_of(space):
        shape = space.factors(role)
        norms = (spread * torch.randn(*shape, 1, generator=g, dtype=torch.float64)).exp()
        side = (spread * torch.randn(1, generator=g, dtype=torch.float64)).exp()
        found[role] = (torch.randn(*shape, width, generator=g, dtype=torch.float64) * norms * side).to(dtype)
    return found


def noisy(given: dict[str, Tensor], noise: float, seed: int) -> dict[str, Tensor]:
    """Every tensor with Gaussian noise of this share of its norm."""
    g, result = gen(seed), {}
    for role, x in given.items():
        e = torch.randn(x.shape, generator=g, dtype=torch.float64)
        result[role] = (x + noise * x.norm() / e.norm() * e).to(x.dtype)
    return result


def moved(given: dict[str, Tensor], transform: Transform) -> dict[str, Tensor]:
    return {role: transform.act(x, role, 0) for role, x in given.items()}


def planted(space: Space, options: AlignConfig, seed: int) -> Transform:
    return admitted(space, options).random(gen(seed))


def sides_of(anchor: dict[str, Tensor], donor: dict[str, Tensor]) -> dict[str, Pairs]:
    return {role: [(anchor[role], donor[role])] for role in anchor}


def views_of(space: Space, anchor: dict[str, Tensor], donor: dict[str, Tensor]) -> list[PartView]:
    return [(TensorInfo(role, (role,), ()), Part(space, role), 0, anchor[role], donor[role]) for role in anchor]


def distance(anchor: dict[str, Tensor], donor: dict[str, Tensor]) -> float:
    return float(sum((anchor[r].double() - donor[r].double()).square().sum() for r in anchor))


def left(anchor: dict[str, Tensor], donor: dict[str, Tensor], transform: Transform) -> float:
    """Squared distance after the transform, computed by applying it."""
    return distance(anchor, moved({r: x.double() for r, x in donor.items()}, transform))


def head_orders(groups: int, per_group: int) -> Iterator[tuple[Tensor, Tensor]]:
    """All orders of KV groups and of the query heads inside each."""
    inner = list(itertools.permutations(range(per_group)))
    for order in itertools.permutations(range(groups)):
        for queries in itertools.product(inner, repeat=groups):
            yield torch.tensor(order), torch.tensor(queries)


def reordered(space: Space, donor: dict[str, Tensor], order: Tensor, queries: Tensor) -> dict[str, Tensor]:
    still = admitted(space, AlignConfig()).identity()
    return moved(donor, replace(still, elements={**still.elements, **orders_of(order, queries)}))
