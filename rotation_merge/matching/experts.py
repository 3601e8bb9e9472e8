"""Matching the experts of one layer: their order, then the neurons of each.

The cost of a pair of experts is |r_i - r_j|^2 over the router's rows plus the squared distance of their neurons under
the best order and scales. The order of the experts is one assignment over these costs. Matching a pair is expensive:
lower bounds replace the costs until an assignment uses the pair. An assignment is optimal if all of its pairs are
matched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space
from rotation_merge.linalg.assignment import assign, assign_small
from rotation_merge.matching.ffn import NeuronMatch, match_neurons, neurons_of
from rotation_merge.matching.matrix_pairs import Tensors, views
from rotation_merge.matching.nearest import least_distance
from rotation_merge.matching.neurons import Neurons, Pairs
from rotation_merge.matching.options import AlignConfig
from rotation_merge.symmetry import ExpertTransform, Monomial, Permutation, Scaling, SpaceTransform

MOST_WORK = 4e11
"""Pairs of experts are matched beyond the first candidates while (pairs x neurons^2 x width) stays below this."""

_NOTE = "experts: ordered by bounds and {} matched pairs; not proven to be the best order"
_SHARES = ((16, 16), (4, 64), (1, 256))  # rows looked at (one in ...), coordinates kept


@dataclass(frozen=True)
class ExpertsMatch:
    """The match of the experts of one layer.

    Attributes:
        transform: order of experts and neurons.
        gap: largest certified relative gap of the neurons' assignments, None where no order was asked for.
        notes: for the report.
        before, after: squared distance donor - anchor over the axes that live in the space.
        anchor: the anchor's squared norm there.
    """

    transform: ExpertTransform
    gap: float | None
    notes: list[str]
    before: float
    after: float
    anchor: float


def match_experts(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: dict[str, SpaceTransform],
    options: AlignConfig,
) -> ExpertsMatch:
    """Order of a layer's experts and of their neurons."""
    router, stacks = _collect(block, space, anchor, donor, transforms)
    layer = _Layer(space, options, router, stacks)
    order, notes = layer.order() if options.ffn != "none" else (torch.arange(layer.count), [])
    chosen = [layer.match(i, j) for i, j in enumerate(order.tolist())]
    diagonal = [layer.neurons(i, i) for i in range(layer.count)]
    stacked = Monomial(
        Permutation(torch.cat([m.element.permutation.index for m in chosen])),
        Scaling(torch.cat([m.element.scaling.factor for m in chosen])),
    )
    gaps = [m.gap for m in chosen if m.gap is not None]
    routed = layer.routing[torch.arange(layer.count), order]
    return ExpertsMatch(
        ExpertTransform(order, stacked, space.degree or 1),
        max(gaps) if gaps else None,
        notes,
        before=sum(n.before for n in diagonal) + float(layer.routing.diagonal().sum()),
        after=sum(m.after for m in chosen) + float(routed.sum()),
        anchor=sum(n.anchor_norm for n in diagonal) + float(sum(a.double().square().sum().cpu() for a, _ in router)),
    )


def _collect(
    block: Block, space: Space, anchor: Tensors, donor: Tensors, transforms: dict[str, SpaceTransform]
) -> tuple[Pairs, dict[str, Pairs]]:
    """Router rows (E, m), and by role the neurons of all experts (E, n, m), of anchor and donor.

    A tensor with a neuron axis counts its experts on dimension 0; one without is the router's.
    """
    router: Pairs = []
    stacks: dict[str, Pairs] = {"in": [], "gate": [], "out": []}
    for info, part, dim, a, b in views(block, space, anchor, donor, transforms):
        if part.role != "index":
            # (E, n, m) without a copy: all but experts and neurons is one dimension, or none
            moved = (x.movedim(dim, 1).reshape(space.sizes["count"], part.size, -1) for x in (a, b))
            stacks[part.role].append((next(moved), next(moved)))
        elif all(p.role == "index" for axis in info.axes for p in axis.parts if p.space == space):
            first, second = (x.movedim(dim, 0).reshape(space.sizes["count"], -1) for x in (a, b))
            router.append((first, second))
    return router, stacks


@dataclass
class _Layer:
    """The experts of one layer and the known results for their pairs."""

    space: Space
    options: AlignConfig
    router: Pairs
    stacks: dict[str, Pairs]
    matched: dict[tuple[int, int], NeuronMatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.count, self.size = self.space.sizes["count"], self.space.sizes["size"]
        self.routing = torch.zeros(self.count, self.count, dtype=torch.float64)
        for a, b in self.router:
            self.routing += torch.cdist(
                a.double().cpu(), b.double().cpu(), compute_mode="donot_use_mm_for_euclid_dist"
            ).square()

    def neurons(self, i: int, j: int) -> Neurons:
        """The neurons of the anchor's expert i against those of the donor's expert j."""
        roles: dict[str, Pairs] = {role: [(a[i], b[j]) for a, b in pairs] for role, pairs in self.stacks.items()}
        return neurons_of(self.space, roles, self.options)

    def match(self, i: int, j: int) -> NeuronMatch:
        """The best match of a pair, cached."""
        if (i, j) not in self.matched:
            self.matched[i, j] = match_neurons(self.neurons(i, j), self.options.ffn != "none")
        return self.matched[i, j]

    def order(self) -> tuple[Tensor, list[str]]:
        """The order of the experts, int64 (E,), and notes for the report."""
        rows = candidate = torch.arange(self.count)
        costs, exact = self.routing.clone(), torch.zeros(self.count, self.count, dtype=torch.bool)
        width = sum(a.shape[-1] for pairs in self.stacks.values() for a, _ in pairs)
        budget = max(2 * self.count, int(MOST_WORK / (self.size**2 * width)))
        bounded = False
        while True:
            for i in rows[~exact[rows, candidate]].tolist():
                j = int(candidate[i])
                costs[i, j] = self.routing[i, j] + self.match(i, j).after
                exact[i, j] = True
            if not bounded:
                costs, bounded = self._bounded(costs, exact), True
            candidate = self._assigned(-costs)
            if bool(exact[rows, candidate].all()):
                return candidate, []
            if int(exact.sum()) > budget:
                worst = 2 * float(costs.sum()) + 1
                known = self._assigned(-torch.where(exact, costs, torch.full_like(costs, worst)))
                return known, [_NOTE.format(int(exact.sum()))]

    def _assigned(self, values: Tensor) -> Tensor:
        """The best order for these values, (E, E); with routing groups, of the experts in each and of the groups."""
        groups = self.space.sizes.get("groups", 1)
        if groups == 1:
            return assign(values).permutation
        size = self.count // groups
        inner = values.reshape(groups, size, groups, size).transpose(1, 2)
        orders = torch.stack([assign_small(m) for m in inner.flatten(0, 1)]).unflatten(0, (groups, groups))
        outer = assign_small(inner.gather(3, orders[..., None])[..., 0].sum(-1))
        return (outer[:, None] * size + orders[torch.arange(groups), outer]).flatten()

    def _bounded(self, costs: Tensor, exact: Tensor) -> Tensor:
        """Tighten lower bounds of unmatched pairs until the donor's order is proven best or time is up."""
        price = costs.diagonal() / 2
        work = 0.0
        for share, width in _SHARES:
            is_open = ~exact & (costs < price[:, None] + price[None])
            work += float(is_open.sum()) * self.size**2 / share * width
            if not bool(is_open.any()) or work > MOST_WORK:
                break
            for i, j in is_open.nonzero().tolist():
                bound = self.routing[i, j] + least_distance(self.neurons(i, j), share, width)
                costs[i, j] = max(float(costs[i, j]), float(bound))
        return costs
