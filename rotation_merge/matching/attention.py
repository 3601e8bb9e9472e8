"""Matching one attention layer: the order of its heads and the maps inside them, jointly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from rotation_merge.architecture.model import Space
from rotation_merge.matching.normed import AttentionMatch, best_order, match_ordered
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.pairing import Pairing, assembled, pairings_of, shared_gains
from rotation_merge.matching.products import Order
from rotation_merge.matching.sides import Side
from rotation_merge.symmetry import GroupElement
from rotation_merge.symmetry.admitted import heads
from rotation_merge.symmetry.heads import HeadGroup


def match_attention(space: Space, sides: list[Side], options: AlignConfig) -> AttentionMatch:
    """The best order of heads and maps inside them, as far as `options` and the layer allow."""
    group = heads(space, options)
    if not group.orders:
        return _match(space, sides, group)
    return match_ordered(space, sides, group, lambda sides: _match(space, sides, group.unordered()))


def _match(space: Space, sides: list[Side], group: HeadGroup) -> AttentionMatch:
    """The best of a group in which no permutation holds several heads together."""
    donor, queries = group.own_order
    own_order = Order(torch.arange(group.groups), donor, queries)
    pairings, shared = pairings_of(space, sides, group), shared_gains(space, sides, group)
    distances = [pairing.distance() for pairing in (*pairings, *shared)]
    before = float(sum(distance.sum().cpu() for distance in distances))
    anchor = float(sum(pairing.anchor_norm().sum().cpu() for pairing in (*pairings, *shared)))
    if before == 0:
        return AttentionMatch(group.identity(), [], 0.0, 0.0, anchor)
    order, notes = best_order(group, pairings)
    if order is not None:
        distances[: len(pairings)] = [pairing.distance(order) for pairing in pairings]
    elements, after = [], 0.0
    orders = [order] * len(pairings) + [None] * len(shared)
    for pairing, its, distance in zip((*pairings, *shared), orders, distances, strict=True):
        element, gained = _solve(pairing, its, distance)
        elements.append(element)
        after += float((distance - gained).clamp_min(0).sum())
    order, still = order or own_order, group.identity()
    maps = {
        side: assembled([*pairings, *shared], elements, side) or identity for side, identity in still.elements().items()
    }
    transform = replace(still.with_elements(maps), groups=order.donor, queries=order.queries)
    return AttentionMatch(transform, notes, before, after, anchor)


def _solve(pairing: Pairing, order: Order | None, distance: Tensor) -> tuple[GroupElement, Tensor]:
    """The best maps, and what they take off the squared distances."""
    known, element, gain = pairing.solved(order)
    grams = pairing.settled(known, distance)
    if grams is not known:
        element, gain = pairing.group.solve(grams)
    donor_products = partial(pairing.own_products, order)
    element, gain = pairing.group.refined(element, gain, grams, donor_products, distance == 0)
    return element, gain - pairing.group.gain_as_it_stands(grams)
