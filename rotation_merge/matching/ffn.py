"""Matching the neurons of an FFN: their order, and the rescaling their activation admits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architectures.model import Space
from rotation_merge.groups import Monomial, NeuronTransform, Permutation, Scaling
from rotation_merge.linalg.assignment import Assignment, assign_factored
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.matching.options import MatchOptions
from rotation_merge.matching.sides import Side

Pairs = list[tuple[Tensor, Tensor]]
"""(anchor, donor) matrices, (n, m) each."""


@dataclass(frozen=True)
class Neurons:
    """The sides of one FFN by role: rows into the neurons, gate rows, columns out of them."""

    ins: Pairs
    gates: Pairs
    outs: Pairs
    signed: bool
    positive: bool

    @property
    def rescales(self) -> bool:
        return self.signed or self.positive


def match_ffn(space: Space, found: list[Side], options: MatchOptions) -> tuple[NeuronTransform, float | None]:
    """Order and rescaling of one FFN's neurons.

    Returns:
        The transform, and the certified relative gap of the assignment (None: no assignment was asked for).
    """
    by_role = {role: [(s.anchor, s.donor) for s in found if s.role == role] for role in ("in", "gate", "out")}
    neurons = neurons_of(space, by_role, options)
    element, assignment = match_neurons(neurons, space.sizes["size"], options.ffn != "none")
    return NeuronTransform(element), assignment.gap if assignment else None


def neurons_of(space: Space, by_role: dict[str, Pairs], options: MatchOptions) -> Neurons:
    """The sides with what the activation admits: any nonzero scale if gated, a positive one if ReLU-like."""
    scale = bool(options.rescale)
    return Neurons(
        by_role["in"],
        by_role["gate"],
        by_role["out"],
        signed=scale and space.gated,
        positive=scale and space.relu and not space.gated,
    )


def match_neurons(neurons: Neurons, n: int, permute: bool) -> tuple[Monomial, Assignment | None]:
    """Best permutation (on balanced norms where rescaling is allowed), then the exact scale of every neuron.

    The result is never farther than the donor in its own order with its own best scales.
    """
    device = (neurons.ins or neurons.outs)[0][0].device
    assignment = None
    index = torch.arange(n)
    if permute:
        plain, signed = _costs(neurons)
        assignment = assign_factored(plain, signed)
        index = assignment.permutation
    element, value = _with_scales(neurons, index.to(device))
    in_order = torch.arange(n)
    if neurons.rescales and not torch.equal(index, in_order):
        unmoved, unmoved_value = _with_scales(neurons, in_order.to(device))
        if unmoved_value <= value:
            return unmoved, assignment
    return element, assignment


def _costs(neurons: Neurons) -> tuple[Pairs, Pairs]:
    if not neurons.rescales:
        return [*neurons.ins, *neurons.gates, *neurons.outs], []
    anchor = _balance(neurons, 0)
    donor = _balance(neurons, 1)
    ins = [(a.float() * anchor, b.float() * donor) for a, b in neurons.ins]
    outs = [(a.float() / anchor, b.float() / donor) for a, b in neurons.outs]
    return (neurons.gates, ins + outs) if neurons.signed else ([*neurons.gates, *ins, *outs], [])


def _squares(pairs: Pairs, which: int) -> Tensor:
    return sum((pair[which].float().square().sum(1).double() for pair in pairs), torch.zeros(()).double())


def _balance(neurons: Neurons, which: int) -> Tensor:
    """Factor (n, 1) that makes each neuron's in and out norms equal; 1 for dead neurons. For the costs only."""
    ratio = _squares(neurons.outs, which) / _squares(neurons.ins, which)
    usable = ratio.isfinite() & (ratio > 0)
    return torch.where(usable, ratio, torch.ones_like(ratio)).pow(0.25).float()[:, None]


def _with_scales(neurons: Neurons, index: Tensor) -> tuple[Monomial, float]:
    """The permutation with every neuron's best scale, and the part of the squared distance that depends on them."""
    in_order = bool((index == torch.arange(len(index), device=index.device)).all())

    def agreement(pairs: Pairs) -> Tensor:
        total = torch.zeros(len(index), dtype=torch.float64, device=index.device)
        for a, b in pairs:
            total += (a.float() * (b if in_order else b[index]).float()).sum(1).double()
        return total

    factor = torch.ones(len(index), dtype=torch.float64, device=index.device)
    value = 0.0
    if neurons.rescales:
        primal, dual = (_squares(pairs, 1)[index] for pairs in (neurons.ins, neurons.outs))
        p, q = agreement(neurons.ins), agreement(neurons.outs)
        factor = best_scale(primal, dual, p, q, signed=neurons.signed)
        gates = agreement(neurons.gates).sum() if neurons.gates else 0.0
        value = float(cost(factor, primal, dual, p, q).sum() - 2 * gates)
    return Monomial(Permutation(index[None].cpu()), Scaling(factor[None])), value
