"""Matching the experts of one layer: their order, then the neurons of each.

Which expert is which is told by the router's rows and by a sketch of what each expert computes that no order of its
neurons changes. The order is kept if the matched neurons then lie nearer than those of experts at their places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space
from rotation_merge.linalg.assignment import assign
from rotation_merge.matching.matrix_pairs import Pairs, Tensors, views
from rotation_merge.matching.neurons import Neurons, match_neurons
from rotation_merge.symmetry import Monomial, Transform
from rotation_merge.symmetry.admitted import GroupOptions, admitted

WIDTH = 32
"""Random directions along which a sketch looks at the inputs and the outputs of an expert."""


def match_experts(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, Transform],
    options: GroupOptions,
) -> Transform:
    """Order of a layer's experts and of their neurons."""
    layer = _Layer(space, options, *_collect(block, space, anchor, donor, transforms))
    group = admitted(space, options)
    order = layer.order() if group.reorders else group.orders[0]
    chosen = [layer.match(i, j)[0] for i, j in enumerate(order.tolist())]
    index, factor = (torch.cat([getattr(element, name) for element in chosen]) for name in ("index", "factor"))
    return Transform("experts", {"neurons": Monomial(index, factor, space.degree or 1)}, (order,))


def _collect(
    block: Block, space: Space, anchor: Tensors, donor: Tensors, transforms: Mapping[str, Transform]
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
    """The experts of one layer and the matches of their pairs."""

    space: Space
    options: GroupOptions
    router: Pairs
    stacks: dict[str, Pairs]
    matched: dict[tuple[int, int], tuple[Monomial, float]] = field(default_factory=dict)

    def match(self, i: int, j: int) -> tuple[Monomial, float]:
        """The neurons of the anchor's expert i against those of the donor's j: element and squared distance."""
        if (i, j) not in self.matched:
            roles: dict[str, Pairs] = {role: [(a[i], b[j]) for a, b in pairs] for role, pairs in self.stacks.items()}
            self.matched[i, j] = match_neurons(Neurons.of(self.space, roles, self.options))
        return self.matched[i, j]

    def order(self) -> Tensor:
        """The order of the experts, int64 (E,)."""
        count = self.space.sizes["count"]
        routing, likeness = self._distances()
        order, rows = self._assigned(-(routing + likeness)), torch.arange(count)
        if torch.equal(order, rows):
            return rows
        moved, still = (
            sum(self.match(i, j)[1] for i, j in enumerate(places.tolist())) + float(routing[rows, places].sum())
            for places in (order, rows)
        )
        return order if moved < still else rows

    def _distances(self) -> tuple[Tensor, Tensor]:
        """Squared distances of all pairs: of the router's rows, and of sketches as shares of the experts' norms."""
        count = self.space.sizes["count"]
        routing, likeness = (torch.zeros(count, count, dtype=torch.float64) for _ in range(2))
        for a, b in self.router:
            routing += _squares(a.double().cpu(), b.double().cpu())
        anchor, donor = (_sketch(self.stacks, which) for which in (0, 1))
        experts = (x for pairs in self.stacks.values() for stack, _ in pairs for x in stack)
        norm = sum(float(x.double().square().sum()) for x in experts) / count
        scale = float(anchor.square().sum(1).mean())
        if scale:
            likeness = _squares(anchor, donor) * norm / scale
        return routing, likeness

    def _assigned(self, values: Tensor) -> Tensor:
        """The best order for these values, (E, E); with routing groups, of the experts in each and of the groups."""
        groups = self.space.sizes.get("groups", 1)
        if groups == 1:
            return assign(values)
        size = len(values) // groups
        inner = values.reshape(groups, size, groups, size).transpose(1, 2)
        orders = torch.stack([assign(m) for m in inner.flatten(0, 1)]).unflatten(0, (groups, groups))
        outer = assign(inner.gather(3, orders[..., None])[..., 0].sum(-1))
        return (outer[:, None] * size + orders[torch.arange(groups), outer]).flatten()


def _squares(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()


def _sketch(stacks: Mapping[str, Pairs], which: int) -> Tensor:
    """What no order, scale or sign of the neurons changes, along random directions, float64 on the CPU, (E, k).

    Of gated experts the Gram of the gate's rows; else the product of the out and the in side (with a degree of one).
    """
    if stacks["gate"]:
        return torch.cat([_looked(pair[which], pair[which], n) for n, pair in enumerate(stacks["gate"])], 1)
    pairs = zip(stacks["in"][:1], stacks["out"][:1], strict=True)
    return torch.cat([_looked(first[which], second[which], 0) for first, second in pairs], 1)


def _looked(first: Tensor, second: Tensor, seed: int) -> Tensor:
    """P X^T Y Q of matrices X, (E, n, m), and Y, (E, n, l), for random P and Q, flat, (E, WIDTH^2)."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(x.shape[-1], WIDTH, generator=generator, dtype=torch.float64) for x in (first, second))
    products = [(x.double().cpu() @ left).mT @ (y.double().cpu() @ right) for x, y in zip(first, second, strict=True)]
    return torch.stack(products).flatten(1)
