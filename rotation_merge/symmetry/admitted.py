"""The group that a space admits; matching, gauges, learning, files and tables use it.

An architecture file's facts of a space (rotary dimensions, norm of queries and keys, gate, activation) select a row of
these tables; a recipe's options restrict it. To add a group is to write it in `group.py` and to name it here, in the
row of the norm (or of the values) that leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

import torch
from annotated_types import Predicate
from pydantic.dataclasses import dataclass as config_dataclass
from torch import Tensor

from rotation_merge.config import BLOCK, WHOLE, Config, Kind, option
from rotation_merge.errors import AlignmentError, ArchitectureError, RecipeError, nearest
from rotation_merge.symmetry.element import Linear, Monomial, Translation, in_order, is_order
from rotation_merge.symmetry.group import LARGEST_ENTRY, Exchange, Fixed, Group, Permutations, Planar, Rotations, Signs
from rotation_merge.symmetry.transform import Transform

STREAM_GROUPS = {
    "none": "none",
    "permutation": "permutations",
    "signed_permutation": "signed permutations",
    "rotation": "rotations",
}
"""The residual groups, smallest first, and their words in a table."""

RESIDUAL = (*STREAM_GROUPS, "largest")
"""Options for a residual stream."""


def by_stream(text: Any) -> dict[str, str] | None:
    """Parse residual groups by stream, `decoder=rotation,encoder=permutation`; None for other texts."""
    pairs = [piece.partition("=") for piece in text.split(",")] if isinstance(text, str) and "=" in text else []
    by_stream = {stream.strip(): group.strip() for stream, _, group in pairs}
    return by_stream if by_stream and all(by_stream) and set(by_stream.values()) <= set(RESIDUAL) else None


Residual = Literal[RESIDUAL]  # type: ignore[valid-type]
Streams = Annotated[str, Predicate(by_stream), Kind("groups by stream (decoder=rotation,encoder=permutation)")]


@config_dataclass(frozen=True)
class GroupOptions(Config):
    """Options that admit groups, by the names and values of recipes and of the command line."""

    attention: Literal["rotation", "none", "permutation"] = option(
        "rotation",
        "maps inside attention heads. `permutation`: orders of coordinates; `rotation`: the largest compact group that "
        "the layer admits",
        scope=BLOCK,
    )
    heads: Literal["none", "permutation", "spectral"] = option(
        "none",
        "order of the attention heads. `permutation`: the best order together with the maps inside heads; `spectral`: "
        "by singular values, as TransFusion does, for comparison",
        scope=BLOCK,
    )
    ffn: Literal["permutation", "none"] = option(
        "permutation", "order of the FFN neurons and of the experts", scope=BLOCK
    )
    scaling: Literal[True, False, "sequential"] = option(
        True,
        "scaling of heads and neurons, with a sign where the layer admits it. `sequential`: after the rotation, as "
        "in the ICML 2025 paper, instead of jointly",
        scope=BLOCK,
    )
    residual: Residual | Streams = option(
        "none",
        "group of the residual stream, one map for the whole model; or one group for each stream, as "
        "`decoder=rotation,encoder=permutation`",
        scope=WHOLE,
    )
    shift_head: Literal[False, True] = option(
        False,
        "shift all rows of an untied output head by one vector; this changes logits, but no probabilities",
        scope=BLOCK,
    )


LARGEST = GroupOptions(heads="permutation")
"""The largest compact groups, with scaling."""


WIDEST = GroupOptions(heads="permutation", shift_head=True)
"""Everything that any recipe may ask for, or a file hold."""


class SpaceFacts(Protocol):
    """Facts of a local space (`architecture.model.Space`) that decide its group."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def sizes(self) -> dict[str, int]: ...
    @property
    def rotary(self) -> int: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def rotary_parts(self) -> int: ...
    @property
    def norm(self) -> str | None: ...
    @property
    def values(self) -> str: ...
    @property
    def free_order(self) -> bool: ...
    @property
    def free_groups(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
    @property
    def degree(self) -> int: ...
    @property
    def head(self) -> bool: ...


ROUNDED = 1e-2
"""Largest accepted difference of an entry of a rounded map, several times the rounding of half precision."""
NEAR = 1e-6
"""Largest difference, over its largest entry, of a map from the group that it belongs to."""


@dataclass(frozen=True)
class SpaceGroup:
    """The group of one space under the options: which orders are free, and the group of each element.

    Attributes:
        kind: of the space.
        groups: by the name of an element its group, its batch and its size.
        heads: numbers of KV groups and of query heads in each; of experts: of the router's groups and of the experts in
            each.
        order: none (not asked for), permutation (the best), spectral (by singular values), or fixed (asked for where
            the architecture forbids it).
        inside: whether KV groups keep their places, and query heads change theirs inside them.
        shift: size of the vector that may be added; 0: none.
    """

    kind: str
    groups: dict[str, tuple[Group, int, int]] = field(default_factory=dict)
    heads: tuple[int, int] | None = None
    order: str = "none"
    inside: bool = False
    shift: int = 0

    @property
    def reorders(self) -> bool:
        """Whether heads or experts may change places."""
        return self.order in ("permutation", "spectral")

    @property
    def moves(self) -> bool:
        """Whether there is more than the identity."""
        return self.reorders or bool(self.shift) or self.words != "none"

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """Every head or expert at its place."""
        if self.heads is None:
            return ()
        if self.kind == "experts":
            return (torch.arange(self.heads[0] * self.heads[1]),)
        return torch.arange(self.heads[0]), torch.arange(self.heads[1]).repeat(self.heads[0], 1)

    def identity(self) -> Transform:
        """The transform that moves nothing, of the form that matching gives."""
        elements = {name: group.identity(batch, size) for name, (group, batch, size) in self.groups.items()}
        return self.made(elements, self.orders)

    def made(self, elements: dict[str, Any], orders: tuple[Tensor, ...], shift: Tensor | None = None) -> Transform:
        """A transform of these elements and orders, and of a vector that is added."""
        if self.kind == "translation":
            vector = torch.zeros(max(self.shift, 1), dtype=torch.float64) if shift is None else shift
            elements = {"shift": Translation(vector)}
        return Transform(self.kind, elements, orders)

    def random(self, generator: torch.Generator) -> Transform:
        """A random transform, for tests and twins."""
        orders = self._random_orders(generator) if self.reorders else self.orders
        elements = {name: group.random(batch, size, generator) for name, (group, batch, size) in self.groups.items()}
        shift = torch.randn(self.shift, dtype=torch.float64, generator=generator) if self.shift else None
        return self.made(elements, orders, shift)

    def _random_orders(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        assert self.heads is not None
        groups, per_group = self.heads
        outer = torch.arange(groups) if self.inside else torch.randperm(groups, generator=generator)
        inner = torch.stack([torch.randperm(per_group, generator=generator) for _ in range(groups)])
        return ((outer[:, None] * per_group + inner).flatten(),) if self.kind == "experts" else (outer, inner)

    def refuses(self, transform: Transform) -> str | None:
        """The reason why a transform is not in the group, in words; None if it is."""
        if transform.kind != self.kind:
            return f"it is a transform of kind {transform.kind}, not {self.kind}"
        if self.kind == "translation":
            return self._refuses_shift(transform)
        if transform.elements.keys() != self.groups.keys():
            return f"it has the maps {', '.join(transform.elements) or 'none'}, not {', '.join(self.groups)}"
        if refused := self._refuses_orders(transform.orders):
            return refused
        refusals = (self._refuses_element(name, transform.elements[name]) for name in self.groups)
        return next((refusal for refusal in refusals if refusal), None)

    def _refuses_shift(self, transform: Transform) -> str | None:
        shift = transform.elements.get("shift")
        if not isinstance(shift, Translation) or not bool(shift.vector.isfinite().all()):
            return "it is no translation, or not of numbers"
        return None if shift.shape[1] == self.shift or shift.is_identity() else f"it does not have {self.shift} entries"

    def _refuses_orders(self, orders: tuple[Tensor, ...]) -> str | None:
        places, noun = self.orders, "experts" if self.kind == "experts" else "heads"
        if [order.shape for order in orders] != [order.shape for order in places]:
            return f"it does not have {' x '.join(map(str, self.heads or ()))} {noun}"
        if not all(map(is_order, orders)):
            return f"the order of its {noun} is not a permutation"
        if not self.reorders and not all(map(in_order, orders)):
            return f"{noun} have to keep their places"
        if self.inside and not in_order(orders[0]):
            return "KV heads have to keep their places"
        if self.kind == "experts" and self.heads is not None:
            groups = orders[0].reshape(self.heads) // self.heads[1]
            if bool((groups != groups[:, :1]).any()):
                return "experts leave the group that the router picks them in"
        return None

    def _refuses_element(self, name: str, element: Monomial | Linear | Translation) -> str | None:
        if refused := self._refuses_entries(name, element):
            return refused
        assert isinstance(element, Monomial | Linear)
        group = self.groups[name][0]
        return None if _near(element, group.project(element)) else self._foreign(name)

    def _foreign(self, name: str) -> str:
        return f"{SIDES.get(name, name)}: it does not belong to the group: {self.groups[name][0].words}"

    def _refuses_entries(self, name: str, element: Monomial | Linear | Translation) -> str | None:
        """The reason why an element's tensors are those of no group of this size."""
        group, batch, size = self.groups[name]
        side = SIDES.get(name, name)
        form = {"matrix": (batch, size, size), "index": (batch, size), "factor": (batch, size)}
        tensors = {key: x for key, x in element.tensors().items() if key in form}
        if not tensors or any(tuple(x.shape) != form[key] for key, x in tensors.items()):
            return f"{side}: it does not have {batch} maps of size {size}"
        if isinstance(element, Monomial):
            sizes = element.factor.abs()
            if not is_order(element.index):
                return f"{side}: its order is not a permutation"
            if not bool(((sizes >= 1 / LARGEST_ENTRY) & (sizes <= LARGEST_ENTRY)).all()):
                return f"{side}: a factor is zero, infinite or out of range"
        if isinstance(element, Linear):
            if isinstance(group.identity(1, size), Monomial):
                return self._foreign(name)
            largest = element.matrix.abs().amax((1, 2))
            if not bool(((largest >= 1 / LARGEST_ENTRY) & (largest <= LARGEST_ENTRY)).all()):
                return f"{side}: a map is zero, infinite or out of range"
        return None

    @property
    def words(self) -> str:
        """The group in words."""
        parts = [f"{SIDES[name]}: {group.words}" if name in SIDES else group.words for name, (group, *_) in self._inner]
        if self.kind == "translation":
            return "one vector added to all rows" if self.shift else "none"
        if self.kind == "experts":
            parts = ["order of experts" if self.reorders else "", *parts]
            return ", ".join(part for part in parts if part not in ("", "none")) or "none"
        if self.kind == "attention" and self.order != "none":
            parts = [f"head order: {self.order}{' inside KV groups' if self.inside else ''}", *parts]
        if not self.reorders and all(group.words == "none" for _, (group, *_) in self._inner):
            return "none"
        return "; ".join(parts)

    @property
    def _inner(self) -> list[tuple[str, tuple[Group, int, int]]]:
        return [(name, entry) for name, entry in self.groups.items() if name != "gains" or entry[0].words != "none"]

    def restored(self, transform: Transform) -> Transform:
        """A transform that storage has rounded, put back inside the group to the last digit.

        Raises:
            AlignmentError: it is farther from the group than rounding takes it.
        """
        elements = dict(transform.elements)
        for name, (group, *_) in self.groups.items():
            element = elements.get(name)
            if isinstance(element, Linear):
                if refused := self._refuses_entries(name, element):
                    raise AlignmentError(f"would change the models' outputs: {refused}")
                projected = group.project(element).matrices()
                if not bool((projected - element.matrix).abs().max() <= ROUNDED * element.matrix.abs().max()):
                    raise AlignmentError("a map is not orthogonal")
                elements[name] = Linear(projected)
        return Transform(self.kind, elements, transform.orders)


SIDES = {"qk": "query/key", "vo": "value/output", "gains": "gains"}
"""The elements of attention spaces, in words."""


def _near(element: Monomial | Linear, projected: Monomial | Linear) -> bool:
    """Whether two elements are the same up to rounding."""
    if isinstance(element, Monomial) and isinstance(projected, Monomial):
        same = element.degree == projected.degree and torch.equal(element.index, projected.index)
        return same and bool(((element.factor / projected.factor - 1).abs() <= NEAR).all())
    first, second = element.matrices(), projected.matrices()
    return bool((first - second).abs().max() <= NEAR * first.abs().max())


def stream_group(kind: str, size: int, fixes_ones: bool, name: str = "stream") -> SpaceGroup:
    """The group of a residual stream (or of a latent) that is called `kind` in recipes.

    Args:
        fixes_ones: whether rotations have to fix the all-ones vector: LayerNorm takes off the mean.

    Raises:
        RecipeError: no group is called so.
    """
    groups: dict[str, Group] = {
        "none": Fixed(),
        "permutation": Permutations(learnable=False),
        "signed_permutation": Permutations(signed=True, learnable=False),
        "rotation": Rotations(fixes_ones=fixes_ones),
    }
    if kind not in groups:
        raise RecipeError(f"no residual group is called '{kind}'", remedy=nearest(kind, STREAM_GROUPS))
    return SpaceGroup(name, {"map": (groups[kind], 1, size)})


def rotary_pairs(space: SpaceFacts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First and second coordinates of the RoPE pairs: (i, i + d/2), or (2i, 2i + 1) if interleaved; in each part."""
    size = space.rotary // space.rotary_parts
    first, second = list[int](), list[int]()
    for start in range(0, space.rotary, size):
        part = range(start, start + size)
        first += part[0::2] if space.interleaved else part[: size // 2]
        second += part[1::2] if space.interleaved else part[size // 2 :]
    return tuple(first), tuple(second)


def _ties(space: SpaceFacts) -> tuple[int, ...] | None:
    """Numbers of coordinates that are one RoPE pair; None without rotary."""
    if not space.rotary:
        return None
    pairs, size = rotary_pairs(space), space.sizes["head_dim"]
    numbers = {c: n for coordinates in pairs for n, c in enumerate(coordinates)}
    return tuple(numbers.get(c, len(pairs[0]) + c - space.rotary) for c in range(size))


def _rotations(options: GroupOptions, scaled: bool = True) -> Rotations:
    return Rotations(scaled and options.scaling is not False, sequential=options.scaling == "sequential")


def _turns(space: SpaceFacts, options: GroupOptions, scaled: bool = True) -> Group:
    """Maps that commute with rotary embedding."""
    maps = _rotations(options, scaled)
    if not space.rotary:
        return maps
    unturned = maps if space.rotary < space.sizes["head_dim"] else None
    return Planar(rotary_pairs(space), maps.scaled, maps.sequential, unturned)


Choose = Callable[[SpaceFacts, GroupOptions], Group]

_gained: Choose = lambda space, options: Signs(_ties(space))  # noqa: E731
_fixed: Choose = lambda space, options: Fixed()  # noqa: E731

QUERIES: dict[str | None, Choose] = {
    None: _turns,
    "rms_head": _gained,
    "rms_all": _gained,
    "rms_turned": _gained,
    "rms_clipped": _gained,
    "l2_head": lambda space, options: _turns(space, options, scaled=False),
    "layer_head": lambda space, options: Signs((0,) * space.sizes["head_dim"]),
    "affine_head": _fixed,
    "shared": _fixed,
}
"""The group of query and key coordinates, by the norm between their projection and their product."""

_exchange: Choose = lambda space, options: Exchange(_ties(space)) if options.scaling else Fixed()  # noqa: E731

GAINS: dict[str | None, Choose] = {
    "rms_head": _exchange,
    "rms_all": _exchange,
    "rms_turned": lambda space, options: Exchange() if options.scaling else Fixed(),
    "affine_head": _exchange,
}
"""The group of the gains of that norm; none where it has no gains, or others for each head. Of a norm over all heads,
each KV group exchanges its own."""

VALUES: dict[str, Choose] = {
    "free": lambda space, options: _rotations(options),
    "normed": lambda space, options: Rotations(),
    "gated": lambda space, options: Permutations(signed=bool(options.scaling), scaled=bool(options.scaling)),
    "fixed": _fixed,
}
"""The group of value and output coordinates, by the architecture file's entry."""


def _orders(group: Group) -> Group:
    """The permutations in a group: none where rotary embedding or a norm ties coordinates to their places.

    Git Re-Basin (2023) and TransFusion (2025) permute the coordinates of a head.
    """
    if isinstance(group, Rotations | Permutations):
        return Permutations(learnable=False)
    if isinstance(group, Planar) and group.unturned is not None:
        return Permutations(first=group.at, learnable=False)
    return Fixed()


def heads(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """`admitted` for an attention space."""
    for property_name, value, known in (("norm", space.norm, QUERIES), ("values", space.values, VALUES)):
        if value not in known:
            raise _unknown(space, property_name, value, [word for word in known if word])
    sides: dict[str, Group] = {"qk": QUERIES[space.norm](space, options), "vo": VALUES[space.values](space, options)}
    if space.norm in GAINS:
        sides["gains"] = GAINS[space.norm](space, options)
    if options.attention == "none":
        sides = dict.fromkeys(sides, Fixed())
    elif options.attention == "permutation" or options.heads == "spectral":
        sides = {name: _orders(group) for name, group in sides.items()}
    groups, head_dim, value_dim = (space.sizes[name] for name in ("groups", "head_dim", "value_dim"))
    sizes = {"qk": (groups, head_dim), "vo": (groups, value_dim)}
    sizes["gains"] = (groups if space.norm == "rms_all" else 1, head_dim)
    order = options.heads if options.heads == "none" or space.free_order else "fixed"
    entries = {name: (group, *sizes[name]) for name, group in sides.items()}
    return SpaceGroup("attention", entries, (groups, space.sizes["per_group"]), order, not space.free_groups)


def _neurons(space: SpaceFacts, options: GroupOptions) -> Permutations:
    """Orders and factors of FFN neurons."""
    scaled = bool(options.scaling) and space.degree > 0
    return Permutations(space.gated and scaled, scaled, space.degree or 1, permute=options.ffn != "none")


def neurons(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """`admitted` for an FFN."""
    return SpaceGroup("ffn", {"neurons": (_neurons(space, options), 1, space.sizes["size"])})


def experts(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """`admitted` for the experts of a layer; those that a router picks in groups stay in theirs."""
    count, routing = space.sizes["count"], space.sizes.get("groups", 1)
    groups = {"neurons": (_neurons(space, options), count, space.sizes["size"])}
    order = "none" if options.ffn == "none" else "permutation"
    return SpaceGroup("experts", groups, (routing, count // routing), order)  # type: ignore[arg-type]


def latent(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """`admitted` for a latent, whose gains are folded where those of the residual streams are.

    A latent is a stream inside one layer, between a writing map, a norm and reading maps: multi-head latent attention,
    DeepSeek-V2 (2024), section 2.1.
    """
    kind = "rotation" if options.residual == "rotation" else "signed_permutation"
    kind = {"none": "none", "permutation": "permutation"}.get(options.attention, kind)
    return stream_group(kind, space.sizes["size"], fixes_ones=False, name="latent")


def translation(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """`admitted` for rows that only a softmax sees: of routers with the experts, of heads where asked for."""
    moves = options.shift_head if space.head else options.ffn != "none"
    return SpaceGroup("translation", shift=space.sizes["size"] if moves else 0)


_KINDS: dict[str, Callable[[SpaceFacts, GroupOptions], SpaceGroup]] = {
    "attention": heads,
    "ffn": neurons,
    "experts": experts,
    "latent": latent,
    "translation": translation,
}


def admitted(space: SpaceFacts, options: GroupOptions = LARGEST) -> SpaceGroup:
    """The group of a local space that a recipe's wishes leave.

    Raises:
        ArchitectureError: nothing is known of the space's kind, norm or values; names it.
    """
    if space.kind not in _KINDS:
        raise _unknown(space, "kind", space.kind, _KINDS)
    return _KINDS[space.kind](space, options)


def widest(space: SpaceFacts, transform: Transform) -> SpaceGroup:
    """The widest group of a local space that a transform may be of: gains of latents are folded if it turns them."""
    return admitted(space, replace(WIDEST, residual="rotation") if transform.turns_stream else WIDEST)


def refuses(space: SpaceFacts, transform: Transform) -> str | None:
    """The reason why no recipe may ask for a transform of a local space, in words; None if one may."""
    return widest(space, transform).refuses(transform)


def asks(space: SpaceFacts, options: GroupOptions) -> bool:
    """Whether a recipe asks to match a local space."""
    if space.kind == "attention":
        return options.attention != "none" or options.heads != "none"
    return admitted(space, options).moves


def _unknown(space: SpaceFacts, property_name: str, word: object, known: Iterable[str]) -> ArchitectureError:
    return ArchitectureError(
        f"no group is known for the {property_name} '{word}'",
        where=f"space '{space.name}'",
        remedy=nearest(str(word), known),
    )
