"""The group that a space admits; matching, gauges, learning, files and tables use it.

An architecture file's facts of a space (rotary dimensions, norm of queries and keys, gate, activation) select a row of
these tables; a recipe's options restrict it. To add a group is to write it in `group.py` and to name it here, in the
row of the norm (or of the values) that leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.errors import ArchitectureError
from rotation_merge.symmetry.element import Linear
from rotation_merge.symmetry.group import Group, Monomials, Planar, Rotations, nearest_member
from rotation_merge.symmetry.options import STREAMS, GroupOptions
from rotation_merge.symmetry.transform import ORDERS, Space, Transform, orders_of

_GROUPS = Monomials(), Monomials(first=0), Monomials(first=0, signed=True), Rotations()
STREAM_GROUPS: dict[str, Group] = dict(zip(STREAMS, _GROUPS, strict=True))
"""The residual groups by their names in recipes, smallest first."""

WIDEST = GroupOptions(heads="permutation", shift_head=True)
"""Everything that any recipe may ask for, or a file hold."""

ROUNDED = 1e-2
"""Largest accepted distance of a rounded map from its group, several times the rounding of half precision."""


@dataclass(frozen=True)
class SpaceGroup:
    """The group of one space under the options: which orders are free, and the group of each element.

    Attributes:
        kind: of the space.
        groups: by the name of an element its group, its batch and its size; those of orders first.
        routing: number of equal groups that a router picks experts in, which stay together.
        order: none (not asked for), permutation (the best), spectral (by singular values), or fixed (asked for where
            the architecture forbids it).
        inside: whether KV groups keep their places, and query heads change theirs inside them.
        shift: of translations, the size of the vector that may be added; 0: none may.
    """

    kind: str
    groups: dict[str, tuple[Group, int, int]]
    routing: int = 1
    order: str = "none"
    inside: bool = False
    shift: int | None = None

    def identity(self) -> Transform:
        """The transform that moves nothing, of the form that matching gives."""
        elements = {name: group.identity(batch, size) for name, (group, batch, size) in self.groups.items()}
        shift = None if self.shift is None else torch.zeros(self.shift, dtype=torch.float64)
        return Transform(self.kind, elements, shift)

    def random(self, generator: torch.Generator) -> Transform:
        """A random transform, for tests and twins."""
        elements = {name: group.random(batch, size, generator) for name, (group, batch, size) in self.groups.items()}
        if self.routing > 1 and self.order != "none":
            places = torch.arange(self.groups[ORDERS[0]][2]).reshape(self.routing, -1)
            rows = (places[number] for number in torch.randperm(self.routing, generator=generator))
            index = torch.cat([row[torch.randperm(len(row), generator=generator)] for row in rows])
            elements |= orders_of(index)
        shift = None if self.shift is None else torch.randn(self.shift, dtype=torch.float64, generator=generator)
        return Transform(self.kind, elements, shift)

    def admits(self, transform: Transform) -> bool:
        """Whether a transform of any origin is in the group."""
        return (
            transform.kind == self.kind
            and transform.elements.keys() == self.groups.keys()
            and self._admits_shift(transform.shift)
            and all(
                nearest_member(group, transform.elements[name], (batch, size)) is not None
                for name, (group, batch, size) in self.groups.items()
            )
            and self._keeps_routing(transform)
        )

    def _keeps_routing(self, transform: Transform) -> bool:
        """Whether experts that the router picks together stay together."""
        if self.routing == 1:
            return True
        groups = transform.orders[0].reshape(self.routing, -1)
        groups = groups // groups.shape[1]
        return bool((groups == groups[:, :1]).all())

    def _admits_shift(self, shift: Tensor | None) -> bool:
        if self.shift is None or shift is None:
            return self.shift is shift
        return not len(shift) or (shift.shape == (self.shift,) and bool(shift.isfinite().all()))

    def restored(self, transform: Transform) -> Transform:
        """A transform, its maps that storage has rounded put back inside the group to the last digit."""
        elements = dict(transform.elements)
        for name, (group, batch, size) in self.groups.items():
            element = elements.get(name)
            if isinstance(element, Linear):
                elements[name] = nearest_member(group, element, (batch, size), ROUNDED) or element
        return replace(transform, elements=elements)

    @property
    def words(self) -> str:
        """The group in words."""
        parts = [
            f"{SIDES[name]}: {group.words}" if name in SIDES else group.words
            for name, (group, *_) in self.groups.items()
            if name not in ORDERS and group.words != "none"
        ]
        if self.shift:
            return "one vector added to all rows"
        if self.kind == "experts" and self.order != "none":
            return ", ".join(["order of experts", *parts])
        if self.kind == "attention" and self.order != "none":
            parts = [f"head order: {self.order}{' inside KV groups' if self.inside else ''}", *parts]
        return "; ".join(parts) or "none"


SIDES = {"qk": "query/key", "vo": "value/output", "gains": "gains"}
"""The elements of attention spaces, in words."""


def stream_group(word: str, size: int, fixes_ones: bool, kind: str = "stream") -> SpaceGroup:
    """The group of a residual stream (or of a latent) by its word in recipes.

    Args:
        fixes_ones: whether rotations have to fix the all-ones vector: LayerNorm takes off the mean.
    """
    group = Rotations(fixes_ones=fixes_ones) if word == "rotation" else STREAM_GROUPS[word]
    return SpaceGroup(kind, {"map": (group, 1, size)})


def _pairs(space: Space) -> tuple[int, ...]:
    """Numbers of the coordinates' RoPE pairs: (i, i + d/2) are one, or (2i, 2i + 1) if interleaved; in each part."""
    numbers = torch.arange(space.rotary // 2).reshape(space.rotary_parts, -1)
    numbers = numbers.repeat_interleave(2, 1) if space.interleaved else numbers.repeat(1, 2)
    return tuple(numbers.flatten().tolist())


def _maps(space: Space, options: GroupOptions, scaled: bool = True) -> Rotations:
    """Maps that nothing restricts."""
    return Rotations(scaled and options.scaling is not False, options.scaling == "sequential")


def _turns(space: Space, options: GroupOptions, scaled: bool = True) -> Group:
    """Maps that commute with rotary embedding."""
    maps = _maps(space, options, scaled)
    if not space.rotary:
        return maps
    unturned = maps if space.rotary < space.sizes["head_dim"] else None
    return Planar(maps.scaled, maps.sequential, pairs=_pairs(space), unturned=unturned)


def _signs(space: Space, options: GroupOptions) -> Group:
    """A sign for each RoPE pair, which the product behind an RMSNorm leaves free."""
    return Monomials(signed=True, ties=_pairs(space))


Choose = Callable[[Space, GroupOptions], Group]

QUERIES: dict[str | None, Choose] = {
    None: _turns,
    **dict.fromkeys(("rms_head", "rms_all", "rms_turned", "rms_clipped"), _signs),
    "l2_head": lambda space, options: _turns(space, options, scaled=False),
    "layer_head": lambda space, options: Monomials(signed=True, ties=(0,) * space.sizes["head_dim"]),
    "affine_head": lambda space, options: Monomials(),
    "shared": lambda space, options: Monomials(),
}
"""The group of query and key coordinates, by the norm between their projection and their product."""


def _exchanged(space: Space, options: GroupOptions) -> Group:
    """What the gains of one norm may give to those of the other."""
    free = options.scaling is not False
    return Monomials(signed=free, scaled=free, ties=_pairs(space))


GAINS: dict[str | None, Choose] = {
    "rms_head": _exchanged,
    "rms_all": _exchanged,
    "rms_turned": lambda space, options: _exchanged(replace(space, rotary=0), options),
    "affine_head": _exchanged,
}
"""The group of the gains of that norm, which those of queries and of keys exchange; none where it has no gains, or
others for each head. Of a norm over all heads, each KV group exchanges its own; of one behind rotary embedding, each
coordinate."""

VALUES: dict[str, Choose] = {
    "free": _maps,
    "normed": lambda space, options: Rotations(),
    "gated": lambda space, options: Monomials(0, signed=bool(options.scaling), scaled=bool(options.scaling)),
    "fixed": lambda space, options: Monomials(),
}
"""The group of value and output coordinates, by the architecture file's entry."""


def _heads(space: Space, options: GroupOptions) -> SpaceGroup:
    """Maps inside the heads of an attention layer, the gains of its norms, and the order of its heads."""
    sides = {"qk": QUERIES[space.norm](space, options), "vo": VALUES[space.values](space, options)}
    if space.norm in GAINS:
        sides["gains"] = GAINS[space.norm](space, options)
    if options.attention == "none":
        sides = dict.fromkeys(sides, Monomials())
    elif options.attention == "permutation" or options.heads == "spectral":
        sides = {name: Monomials(group.first) for name, group in sides.items()}
    groups, head_dim, value_dim = (space.sizes[name] for name in ("groups", "head_dim", "value_dim"))
    sizes = {"qk": (groups, head_dim), "vo": (groups, value_dim)}
    sizes["gains"] = (groups if space.norm == "rms_all" else 1, head_dim)
    order = options.heads if options.heads == "none" or space.free_order else "fixed"
    heads = Monomials(0 if order in ("permutation", "spectral") else None)
    entries = {
        ORDERS[0]: (heads if space.free_groups else Monomials(), 1, groups),
        ORDERS[1]: (heads, groups, space.sizes["per_group"]),
        **{name: (group, *sizes[name]) for name, group in sides.items()},
    }
    return SpaceGroup("attention", entries, order=order, inside=not space.free_groups)


def _neurons(space: Space, options: GroupOptions, count: int) -> dict[str, tuple[Group, int, int]]:
    """Orders and factors of FFN neurons, of so many experts."""
    scaled = bool(options.scaling) and space.degree > 0
    first = None if options.ffn == "none" else 0
    group = Monomials(first, space.gated and scaled, scaled, degree=space.degree or 1)
    return {"neurons": (group, count, space.sizes["size"])}


def admitted(space: Space, options: GroupOptions = WIDEST) -> SpaceGroup:
    """The group of a local space that a recipe's wishes leave.

    Experts that a router picks in groups stay in theirs. A latent is a stream inside one layer, between a writing map,
    a norm and reading maps, whose gains are folded where those of the residual streams are (multi-head latent
    attention, DeepSeek-V2 (2024), section 2.1). Translations are of rows that only a softmax sees: of routers with the
    experts, of heads where asked for.

    Raises:
        ArchitectureError: nothing is known of the space's kind; names it.
    """
    if space.kind == "attention":
        return _heads(space, options)
    if space.kind == "ffn":
        return SpaceGroup("ffn", _neurons(space, options, 1))
    if space.kind == "experts":
        count, order = space.sizes["count"], "none" if options.ffn == "none" else "permutation"
        places = Monomials(None if order == "none" else 0)
        groups = {ORDERS[0]: (places, 1, count), **_neurons(space, options, count)}
        return SpaceGroup("experts", groups, space.sizes.get("groups", 1), order)
    if space.kind == "latent":
        kind = "rotation" if options.residual == "rotation" else "signed_permutation"
        kind = {"none": "none", "permutation": "permutation"}.get(options.attention, kind)
        return stream_group(kind, space.sizes["size"], fixes_ones=False, kind="latent")
    if space.kind == "translation":
        free = options.shift_head if space.head else options.ffn != "none"
        return SpaceGroup("translation", {}, shift=space.sizes["size"] if free else 0)
    raise ArchitectureError(f"no group is known for the kind '{space.kind}'", where=f"space '{space.name}'")
