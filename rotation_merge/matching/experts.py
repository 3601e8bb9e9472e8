"""Matching the experts of one layer: their order by their own optima, then the neurons of each."""

from __future__ import annotations

import torch
from torch import Tensor

from rotation_merge.architectures.model import Block, Space
from rotation_merge.groups import ExpertTransform, Monomial, Permutation, Scaling, SpaceTransform
from rotation_merge.linalg.assignment import assign
from rotation_merge.matching.apply import split_axis, transform_tensor
from rotation_merge.matching.ffn import Neurons, Pairs, match_neurons, neurons_of
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Tensors

MOST_EXACT_WORK = 4e11
"""Every pair of experts is compared exactly while (experts^2 x neurons^2 x width) stays below this; else candidates."""

_CANDIDATES = 4


def match_experts(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    others: dict[str, SpaceTransform],
    options: MatchOptions,
) -> tuple[ExpertTransform, float | None, list[str]]:
    """Order of experts and neurons.

    Returns:
        The transform, the largest certified gap of the neurons' assignments, and notes for the report.
    """
    count = space.sizes["count"]
    router, stacks = _collect(block, space, anchor, donor, others)

    def neurons(i: int, j: int) -> Neurons:
        roles: dict[str, Pairs] = {role: [(a[i], b[j]) for a, b in pairs] for role, pairs in stacks.items()}
        return neurons_of(space, roles, options)

    order, notes = torch.arange(count), []
    if options.ffn != "none" and count > 1:
        order, notes = _order(count, space.sizes["size"], router, stacks, neurons)
    elements, gaps = [], [0.0]
    for i, j in enumerate(order.tolist()):
        element, assignment = match_neurons(neurons(i, j), space.sizes["size"], options.ffn != "none")
        elements.append(element)
        gaps.append(assignment.gap if assignment else 0.0)
    stacked = Monomial(
        Permutation(torch.cat([e.permutation.index for e in elements])),
        Scaling(torch.cat([e.scaling.factor for e in elements])),
    )
    return ExpertTransform(order, stacked), max(gaps), notes


def _collect(
    block: Block, space: Space, anchor: Tensors, donor: Tensors, others: dict[str, SpaceTransform]
) -> tuple[Pairs, dict[str, Pairs]]:
    """Router rows (E, m), and by role the stacked neurons (E, n, m), of anchor and donor."""
    router: Pairs = []
    stacks: dict[str, Pairs] = {"in": [], "gate": [], "out": []}
    for info in block.tensors:
        if info.key not in anchor or info.key not in donor or space not in info.spaces():
            continue
        moved = transform_tensor(donor[info.key], info, others)
        for dim, axis in enumerate(info.axes):
            for k, part in enumerate(axis.parts):
                if part.space != space:
                    continue
                a, b = (split_axis(x, dim, axis)[k] for x in (anchor[info.key], moved))
                if part.role == "index":
                    if sum(p.space == space for x in info.axes for p in x.parts) == 1:
                        router.append((a.movedim(dim, 0).flatten(1), b.movedim(dim, 0).flatten(1)))
                else:
                    stacks[part.role].append(
                        (
                            a.movedim(dim, 1).flatten(2) if a.ndim > 2 else a[..., None],
                            b.movedim(dim, 1).flatten(2) if b.ndim > 2 else b[..., None],
                        )
                    )
    return router, stacks


def _order(count: int, size: int, router: Pairs, stacks: dict[str, Pairs], neurons: object) -> tuple[Tensor, list[str]]:
    width = sum(a.shape[-1] for pairs in stacks.values() for a, _ in pairs)
    values = torch.zeros(count, count, dtype=torch.float64)
    for a, b in router:
        values += a.double().cpu() @ b.double().cpu().T
    exact = count * count * size * size * width <= MOST_EXACT_WORK
    rough = values + _norm_agreement(stacks)
    candidates = torch.ones(count, count, dtype=torch.bool)
    notes = []
    if not exact:
        best = rough.topk(min(_CANDIDATES, count), dim=1).indices
        candidates = torch.zeros(count, count, dtype=torch.bool).scatter(1, best, True)
        candidates |= torch.eye(count, dtype=torch.bool)
        notes = [f"experts: {_CANDIDATES} candidates each, by router rows and neuron norms; not certified"]
    for i, j in candidates.nonzero().tolist():
        values[i, j] += _value(neurons(i, j), size)  # type: ignore[operator]
    floor = float(values.min()) - 2 * float(values.abs().max()) - 1.0
    values = torch.where(candidates, values, torch.full_like(values, floor))
    return assign(values).permutation, notes


def _norm_agreement(stacks: dict[str, Pairs]) -> Tensor:
    """Upper bound on what two experts' neurons could agree: sorted neuron norms against sorted neuron norms."""
    total: Tensor | float = 0.0
    for pairs in stacks.values():
        for a, b in pairs:
            norms = [x.float().norm(dim=2).sort(dim=1).values.double().cpu() for x in (a, b)]
            total = total + norms[0] @ norms[1].T
    return torch.as_tensor(total)


def _value(neurons: Neurons, size: int) -> float:
    """Inner product (per neuron scales included) of the best match of two experts' neurons, for ranking pairs."""
    element, _ = match_neurons(neurons, size, permute=True)
    total = 0.0
    for pairs, role in ((neurons.ins, "in"), (neurons.gates, "gate"), (neurons.outs, "out")):
        for a, b in pairs:
            moved = b.float()[element.permutation.index[0].to(b.device)]
            factor = element.scaling.factor[0].to(b.device)[:, None].float()
            moved = moved * factor if role == "in" else moved / factor if role == "out" else moved
            total += float((a.float() * moved).sum(dtype=torch.float64) - moved.square().sum(dtype=torch.float64) / 2)
    return total
