"""Matching the neurons of an FFN: their order, and the rescaling their activation admits, jointly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.linalg.assignment import assign, assign_factored
from rotation_merge.matching.matrix_pairs import Side
from rotation_merge.matching.nearest import nearest_order
from rotation_merge.matching.neurons import Neurons, Pairs
from rotation_merge.matching.options import AlignConfig
from rotation_merge.symmetry import Monomial, Permutation, Scaling
from rotation_merge.symmetry.admitted import neurons as neuron_group


@dataclass(frozen=True)
class NeuronMatch:
    """The match of the neurons of one FFN.

    Attributes:
        element: order and scales, G = 1.
        gap: certified relative gap of the assignment, None where no order was asked for.
        before, after: squared distance donor - anchor over the axes that live in the space.
        anchor: the anchor's squared norm there.
    """

    element: Monomial
    gap: float | None
    before: float
    after: float
    anchor: float


def match_ffn(space: Space, sides: list[Side], options: AlignConfig) -> NeuronMatch:
    """Order and rescaling of one FFN's neurons."""
    by_role = {role: [(s.anchor, s.donor) for s in sides if s.role == role] for role in ("in", "gate", "out")}
    return match_neurons(neurons_of(space, by_role, options), options.ffn != "none")


def neurons_of(space: Space, by_role: dict[str, Pairs], options: AlignConfig) -> Neurons:
    """The sides of an FFN, with the rescaling that its activation admits."""
    group = neuron_group(space, options)
    signed = group.signed and group.degree > 0
    return Neurons(by_role["in"], by_role["gate"], by_role["out"], signed=signed, degree=group.degree)


def match_neurons(neurons: Neurons, permute: bool) -> NeuronMatch:
    """The joint optimum of the permutation and all scales; never farther than the identity order."""
    own_order = torch.arange(neurons.size)
    if neurons.before == 0 or not permute:
        return _finished(neurons, neurons, own_order, 0.0 if permute else None)
    proven = nearest_order(neurons)
    if proven is not None:
        return _finished(neurons, proven[1], proven[0], 0.0)
    index, gap = _assigned(neurons)
    moved = neurons if torch.equal(index, own_order) else neurons.reordered(index)
    if float(moved.distances.sum()) >= float(neurons.distances.sum()):
        moved, index = neurons, own_order
    return _finished(neurons, moved, index, gap)


def _assigned(neurons: Neurons) -> tuple[Tensor, float]:
    """The best order over the similarities of all pairs, and its certified gap relative to the objective."""
    if not neurons.rescales:
        solved = assign_factored(neurons.pairs)
        return solved.permutation, solved.gap
    similarity = neurons.similarity()
    # constants of rows and columns change no order; without them no column is the favourite of many rows
    offset = similarity.mean(0, keepdim=True)
    similarity -= offset
    rows = similarity.mean(1, keepdim=True)
    similarity -= rows
    solved = assign(similarity)
    value = abs(solved.value + float(offset.double().sum()) + float(rows.double().sum()))
    return solved.permutation, solved.gap * abs(solved.value) / value if value else solved.gap


def _finished(neurons: Neurons, moved: Neurons, index: Tensor, gap: float | None) -> NeuronMatch:
    element = Monomial(Permutation(index[None].cpu()), Scaling(moved.factor[None].cpu()))
    after = float(moved.distances.clamp_min(0).sum())
    return NeuronMatch(element, gap, neurons.before, after, neurons.anchor_norm)
