"""Permuted layouts: queries and keys in the other RoPE layout, heads or neurons of one tensor in another order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Part, Space, TensorInfo
from rotation_merge.linalg.assignment import assign
from rotation_merge.model.apply import split_axis

ALIKE, BETTER = 0.5, 0.2
"""Cosine to the parents that a tensor has to reach in a permuted layout, and by how much it has to be better there."""
SAMPLED = 256
"""Rows whose nearest row among the parents' is looked for."""

HEADS = {"q": "query heads", "k": "key heads", "v": "value heads", "o": "what heads give"}


@dataclass(frozen=True)
class Layout:
    """A tensor that is the parents' in another order.

    Attributes:
        kind: `rope`, `heads` or `neurons`.
        space: whose coordinates stand in another order.
        order: which of the parents' coordinates stands at each place, in units of the kind: of KV groups, heads, rows.
        before, after: cosine to the parents as it stands, and put in order.
    """

    kind: str
    space: str
    role: str
    tensor: str
    order: tuple[int, ...]
    before: float
    after: float


Found = tuple[Space, str, Layout | None]


def layouts_in(info: TensorInfo, merged: Tensor, parents: Tensor) -> Iterator[Found]:
    """How one tensor of a merge stands to the mean of its parents: for each space whose coordinates may stand in
    another order, its role there, and that order."""
    if info.stacked or merged.ndim != len(info.axes):
        return
    for dim, axis in enumerate(info.axes):
        if not axis.parts:
            continue
        views = zip(*(split_axis(tensor, dim, axis) for tensor in (merged, parents)), axis.pieces, strict=True)
        for ours, parents_view, piece in views:
            if len(piece) != 1:
                continue
            part = piece[0]
            if part.space.kind == "attention" and part.role in HEADS:
                units = (_units(view, dim, part) for view in (ours, parents_view))
                yield part.space, part.role, _of_heads(part, info.name, *units)
            elif part.space.kind == "ffn" and merged.ndim > 1:
                rows = (view.movedim(dim, 0).flatten(1) for view in (ours, parents_view))
                yield part.space, part.role, _of_neurons(part, info.name, *rows)


def _units(view: Tensor, dim: int, part: Part) -> Tensor:
    """Heads (of keys and values: groups), their dimensions, and all else."""
    inner = len(part.factors)
    heads = view.movedim(list(range(dim, dim + inner)), list(range(inner))).flatten(0, inner - 2)
    return heads.flatten(2) if heads.ndim > 2 else heads[..., None]


def _of_heads(part: Part, name: str, merged: Tensor, parents: Tensor) -> Layout | None:
    before = _cosine(merged, parents)
    place = (part.space.name, part.role, name)
    if part.role in ("q", "k") and part.space.rotary:
        turned = {order: _cosine(merged[:, list(order)], parents) for order in _rope_orders(part, merged.shape[1])}
        order, after = max(turned.items(), key=lambda pair: pair[1])
        if after >= ALIKE and after >= before + BETTER:
            return Layout("rope", *place, order, before, after)
    if len(merged) < 2:
        return None
    alike = _cosines(merged.flatten(1), parents.flatten(1))
    order = tuple(assign(alike).permutation.tolist())
    moved = [i for i, j in enumerate(order) if i != j]
    if not moved:
        return None
    before, after = (float(torch.stack([alike[i, o[i]] for i in moved]).mean()) for o in (range(len(order)), order))
    return Layout("heads", *place, order, before, after) if after >= ALIKE and after >= before + BETTER else None


def _rope_orders(part: Part, size: int) -> list[tuple[int, ...]]:
    """From halves to neighbours and back; what rotary embedding leaves alone stays."""
    turned = part.space.rotary // part.space.rotary_parts
    pairs = torch.arange(turned).view(2, -1)
    orders = []
    for order in (pairs.T.flatten(), pairs.T.flatten().argsort()):
        whole = torch.arange(size)
        for k in range(part.space.rotary_parts):
            whole[k * turned : (k + 1) * turned] = order + k * turned
        orders.append(tuple(whole.tolist()))
    return orders


def _of_neurons(part: Part, name: str, merged: Tensor, parents: Tensor) -> Layout | None:
    before = _cosine(merged, parents)
    if before >= ALIKE or merged.shape[1] < 2:
        return None
    sample = torch.linspace(0, len(merged) - 1, min(SAMPLED, len(merged))).long()
    best = _cosines(merged[sample], parents).max(1)
    after = float(best.values.median())
    moved = float((best.indices != sample).float().mean())
    if moved < 0.5 or after < ALIKE or after < before + BETTER:
        return None
    return Layout("neurons", part.space.name, part.role, name, tuple(best.indices.tolist()), before, after)


def _cosine(merged: Tensor, parents: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(merged.flatten(), parents.flatten(), dim=0))


def _cosines(ours: Tensor, parents: Tensor) -> Tensor:
    """Of each row of the first with each of the second."""
    tiny = torch.finfo(torch.float32).tiny
    ours, parents = (x / x.norm(dim=1, keepdim=True).clamp(min=tiny) for x in (ours, parents))
    return ours @ parents.T


def move_nothing(space: Space, orders: Mapping[tuple[str, str], Layout | None]) -> bool:
    """Whether all tensors of a space stand in one order together, so that the model computes the same.

    Args:
        orders: by role and tensor; None: it stands in order.
    """
    if any(layout is not None and layout.kind == "rope" for layout in orders.values()):
        return False
    if space.kind == "ffn":
        permutations = [layout.order for layout in orders.values() if layout is not None]
        return len(permutations) == len(orders) and all(_agree(permutations[0], order) for order in permutations)
    groups, each = space.sizes["groups"], space.sizes["per_group"]
    still = {"q": groups * each, "o": groups * each, "k": groups, "v": groups}
    known = [
        (role, tuple(range(still[role])) if layout is None else layout.order) for (role, _), layout in orders.items()
    ]
    heads = {order for role, order in known if role in "qo"}
    shared = {order for role, order in known if role in "kv"}
    shared |= {tuple(head // each for head in order[::each]) for order in heads}
    together = all(head // each == order[i - i % each] // each for order in heads for i, head in enumerate(order))
    return together and len(heads) <= 1 and len(shared) <= 1


def _agree(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    """Whether two orders of neurons, found from samples, are the same but for neurons that resemble others."""
    same = sum(a == b for a, b in zip(first, second, strict=False))
    return len(first) == len(second) and same >= 0.8 * len(first)
