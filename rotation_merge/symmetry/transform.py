"""The kinds of spaces, what acts on an axis of each role, and the transform of one space: orders and group elements.

A role is the function of an axis in its space (the queries or the keys of an attention space, the rows that write into
a residual stream or its norm gains). A new kind of space is a row of `ROLES`. The axis stands in the tensor as one or
more consecutive dimensions (`Space.factors`), the first of them at `dim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.symmetry.element import (
    Element,
    Linear,
    Monomial,
    element_of,
    in_batch_order,
    moved_share,
    tensors_of,
)

SEEN = 1e-9
"""Distances from the identity below it are rounding."""


@dataclass(frozen=True)
class Role:
    """What acts on the axes of one role.

    Attributes:
        element: name of the element, whose coordinates are the last dimension of the axis; None: orders alone act.
        levels: levels of order, a dimension each, in front: groups (or experts: 1), and the heads in each group (2).
        dual: the element acts by its inverse transpose.
        follows: only the order of the coordinates is followed, not signs, factors or turns.
        stacked: dimension 0 of the tensor counts the elements, whatever the axis (experts).
    """

    element: str | None
    levels: int = 0
    dual: bool = False
    follows: bool = False
    stacked: bool = False


_STREAM = {"write": Role("map"), "read": Role("map"), "shift": Role("map"), "gain": Role("map", follows=True)}

ORDERS = ("order0", "order1")
"""The elements that order groups (or experts), (1, G), and the heads inside each group, (G, r), by their level."""

STILL = ("fixed", "mixer")
"""Kinds of spaces that nothing moves: numbers of coordinates, and state-space mixers or gated convolutions. No block
lists them; their axes say which tensors are linear maps, and how fused ones are split."""

ROLES: dict[str, dict[str, Role]] = {
    "stream": _STREAM,
    "latent": _STREAM,
    "ffn": {"in": Role("neurons"), "gate": Role("neurons", follows=True), "out": Role("neurons", dual=True)},
    "experts": {
        "index": Role(None, levels=1),
        "in": Role("neurons", stacked=True),
        "gate": Role("neurons", follows=True, stacked=True),
        "out": Role("neurons", dual=True, stacked=True),
    },
    "attention": {
        "k": Role("qk", levels=1),
        "q": Role("qk", levels=2, dual=True),
        "v": Role("vo", levels=1),
        "o": Role("vo", levels=2, dual=True),
        "gate": Role("vo", levels=2, follows=True),
        "k_gain": Role("gains", levels=1),
        "q_gain": Role("gains", levels=2, dual=True),
        "k_norm": Role("gains"),
        "q_norm": Role("gains", dual=True),
        "kv_head": Role(None, levels=1),
        "head": Role(None, levels=2),
    },
    "translation": {},
    "mixer": {
        "group": Role(None, levels=1),
        "head": Role(None, levels=2),
        "shared": Role("shared", levels=1),
        "own": Role("own", levels=2),
    },
    "fixed": {"fixed": Role("fixed")},
}
"""By the kind of a space, what acts on the axes of each role, those of an element's primal side first. Attention: keys
and values have an entry for each KV group, queries and outputs one for each query head of it; gains of norms of queries
and keys are those of all heads together (`k_gain`, `q_gain`) or shared by them (`k_norm`, `q_norm`); `kv_head` and
`head` are one number a head, `gate` is a gate of the outputs. FFN neurons: `in` (up, where gated), `gate`, `out`.
Mixers: `shared` states of a group, `own` channels of a head."""

_SIZES = {"qk": "head_dim", "gains": "head_dim", "vo": "value_dim", "shared": "shared", "own": "own"}
"""The size of a space that an element's coordinates are, where it is not `size`."""


@dataclass(frozen=True)
class Space:
    """A coordinate system.

    Attributes:
        name: unique in the model: `residual`, or `model.layers.3.attn`.
        kind: a key of `ROLES`; those of `STILL` are never transformed.
        sizes: by kind: size; groups, per_group, head_dim, value_dim; count; shared, own.
        rotary: number of leading query/key dimensions that rotary embedding turns (0: none).
        interleaved: whether RoPE pairs are neighbours.
        rotary_parts: number of equal parts of a head that rotary embedding turns separately.
        norm: norm between query/key projection and product, as in the architecture file.
        values: constraint on values and outputs, as in the architecture file.
        free_order: whether heads may change places.
        free_groups: whether KV groups may, too.
        visible_bias: whether softmax sees a key's bias although there is no rotary.
        gated: whether the neurons' activations are multiplied by a second, linear map.
        degree: a neuron scaled by c on its way in is scaled by 1 / c^degree on its way out; 0: it cannot be scaled.
        head: of a translation: that of a head's rows, which changes logits.
    """

    name: str
    kind: str
    sizes: dict[str, int]
    rotary: int = 0
    interleaved: bool = False
    rotary_parts: int = 1
    norm: str | None = None
    values: str = "free"
    free_order: bool = True
    free_groups: bool = True
    visible_bias: bool = False
    gated: bool = False
    degree: int = 0
    head: bool = False

    @property
    def hides_key_bias(self) -> bool:
        """Whether softmax does not see biases of keys, which then add the same to all logits of a query."""
        return self.kind == "attention" and not (self.visible_bias or self.rotary or self.norm)

    def factors(self, role: str) -> tuple[int, ...]:
        """Dimensions an axis of this role splits into."""
        rule = ROLES[self.kind][role]
        counts = ("count",) if self.kind == "experts" else ("groups", "per_group")
        inner = () if rule.element is None else (_SIZES.get(rule.element, "size"),)
        return tuple(self.sizes[name] for name in (*counts[: rule.levels], *inner))


@dataclass(frozen=True, eq=False)
class Transform:
    """One element of a space's group: first the orders, then the elements.

    Attributes:
        kind: of the space.
        elements: by name, as `ROLES` says. The orders come first (`ORDERS`): ``aligned group i = donor group
            order0[0, i]``, and row i of the second indexes the heads of that one.
        shift: of a translation, float64, (d,): the vector that is added to every row of a matrix, ``aligned[i] =
            donor[i] + shift``, once all axes have moved, and never to a difference of two models' tensors. A softmax
            does not see it, ``softmax(W x)`` nor ``softmax(W x + 1 v^T x)``: rows of a router and, for probabilities,
            of a head, and the entries of their biases (rows of one number each).
    """

    kind: str
    elements: Mapping[str, Element]
    shift: Tensor | None = None

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        """Move an axis of x that plays `role` and starts at dimension `dim`; same shape, dtype kept.

        Args:
            dual: by the inverse transpose, the action on tensors that are paired with a weight's axis (inputs of an
                input axis, gradients of an output axis).
        """
        rule = ROLES[self.kind][role]
        for element, level in self._acting(role):
            if rule.stacked:
                x = element.act(x, 0, dim, dual != rule.dual)
            elif level:
                x = element.act(x, dim, dim + level, dual != rule.dual)
            else:
                x = element.act(x.unsqueeze(0), 0, dim + 1, dual != rule.dual).squeeze(0)
        return x

    def _acting(self, role: str) -> list[tuple[Element, int]]:
        """The elements that move something in a role, each with the levels of order in front of its dimension."""
        rule = ROLES[self.kind][role]
        acting: list[tuple[Any, int]] = [(self.elements.get(ORDERS[level]), level) for level in range(rule.levels)]
        element: Any = self.elements.get(rule.element or "")
        if element is not None:
            element = element.order() if rule.follows else element
            acting.append((element.powered() if rule.dual else element, rule.levels))
        return [(element, level) for element, level in acting if element is not None and not element.is_identity()]

    def added(self, x: Tensor) -> Tensor:
        """Rows (n, d), or of a bias (n,) with d = 1, all axes of which have moved, with the shift on each."""
        assert self.shift is not None
        work = torch.promote_types(x.dtype, torch.float32)
        return (x.to(work) + self.shift.to(device=x.device, dtype=work)).to(x.dtype)

    def moves(self, role: str) -> bool:
        """Whether an axis of this role has anything done to it; of translations, whether anything is added."""
        return not self.is_identity() if self.shift is not None else bool(self._acting(role))

    def mixes(self, role: str) -> bool:
        """Whether an axis of this role has coordinates added up, so that no diagonal stays one."""
        return any(isinstance(element, Linear) for element, _ in self._acting(role))

    @property
    def turns_stream(self) -> bool:
        """Whether a stream's or latent's coordinates are mixed, so that its gains have to be folded away."""
        return self.kind in ("stream", "latent") and isinstance(self.elements.get("map"), Linear)

    def is_identity(self) -> bool:
        shifts = self.shift is not None and bool(self.shift.any())
        return not shifts and all(element.is_identity() for element in self.elements.values())

    def inverse(self) -> Transform:
        if self.shift is not None:
            return replace(self, shift=-self.shift)
        elements = {name: element.inverse() for name, element in self.elements.items()}
        return Transform(self.kind, _reordered(elements, elements))

    def compose(self, first: Transform) -> Transform:
        """This after `first`, a transform of the same space."""
        if self.shift is not None and first.shift is not None:
            return replace(self, shift=self.shift + first.shift)
        before = _reordered(first.elements, self.elements)
        return Transform(self.kind, {name: self.elements[name].compose(before[name]) for name in before})

    @property
    def orders(self) -> tuple[Tensor, ...]:
        """The order of groups (or experts), (G,), and of the heads inside each, (G, r), as far as there are any."""
        indices = (x.index for name in ORDERS if isinstance(x := self.elements.get(name), Monomial))
        return tuple(index if level else index[0] for level, index in enumerate(indices))

    def head_order(self) -> Tensor | None:
        """The order of all query heads, int64 (G r,): ``aligned head i = donor head order[i]``; None without heads."""
        if len(self.orders) < 2:
            return None
        return (self.orders[0][:, None] * self.orders[1].shape[1] + self.orders[1]).flatten()

    def _parts(self) -> dict[str, dict[str, float]]:
        """How far each part is from the identity, by what is done to it."""
        heads = self.head_order()
        orders = {"heads": moved_share(heads)} if heads is not None else {}
        if len(self.orders) == 1:
            orders["experts"] = moved_share(self.orders[0])
        if self.shift is not None:
            orders["shift"] = float(self.shift.norm()) / max(len(self.shift), 1) ** 0.5
        maps = {name: element.distances() for name, element in self.elements.items() if name not in ORDERS}
        return {name: {name: distance} for name, distance in orders.items()} | maps

    def distances(self) -> dict[str, float]:
        """How far the transform is from the identity, by part."""
        result = dict[str, float]()
        for name, parts in self._parts().items():
            if name == "neurons":
                result |= {"neurons": parts["permutation"], "scale": parts["signs"] + parts["scales"]}
            else:
                result["stream" if name == "map" else name] = sum(parts.values())
        return result

    @property
    def words(self) -> str:
        """What the transform consists of, for reports: `heads, qk: rotation, vo: rotation and scales`."""
        words = []
        for name, parts in self._parts().items():
            kinds = " and ".join(kind for kind, distance in parts.items() if distance > SEEN)
            words += [f"{name}: {kinds}" if name in ("qk", "vo", "gains") else kinds] if kinds else []
        return ", ".join(words) or "identity"

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the transform, by name: `order0` (G,), `order1`, `shift`, `qk.matrix`."""
        result = dict(zip(ORDERS, self.orders, strict=False))
        result |= {} if self.shift is None else {"shift": self.shift}
        for name, element in self.elements.items():
            parts = {} if name in ORDERS else tensors_of(element)
            result |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
        return result

    @classmethod
    def from_tensors(cls, kind: str, tensors: Mapping[str, Tensor]) -> Transform:
        """The transform again.

        Raises:
            AlignmentError: no transform has these tensors.
        """
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, part = key.partition(".")
            parts.setdefault(name, {})[part] = tensor
        shift = parts.pop("shift")[""].double() if "" in parts.get("shift", ()) else None
        orders = orders_of(*(parts.pop(name)[""].long() for name in ORDERS if name in parts))
        return cls(kind, {**orders, **{name: element_of(part) for name, part in parts.items()}}, shift)

    def to(self, device: torch.device) -> Transform:
        """The same transform, its tensors on a device."""
        return self.from_tensors(self.kind, {name: tensor.to(device) for name, tensor in self.tensors().items()})


def orders_of(*orders: Tensor) -> dict[str, Element]:
    """The elements that order groups (or experts), by their index (G,), and the heads inside each group, (G, r)."""
    return {name: Monomial.permutation(torch.atleast_2d(x)) for name, x in zip(ORDERS, orders, strict=False)}


def _reordered(elements: Mapping[str, Any], by: Mapping[str, Any]) -> Mapping[str, Any]:
    """Elements, those that are a batch over groups (or experts) in the order of the groups in `by`."""
    if ORDERS[0] not in by:
        return elements
    return {name: in_batch_order(element, by[ORDERS[0]].index[0]) for name, element in elements.items()}


def packed(transforms: Mapping[str, Transform]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by ``space|name``, and the kinds of the spaces."""
    tensors = {f"{space}|{key}": x for space, transform in transforms.items() for key, x in transform.tensors().items()}
    return tensors, {space: transform.kind for space, transform in transforms.items()}


def unpacked(tensors: Mapping[str, Tensor], kinds: Mapping[str, str]) -> dict[str, Transform]:
    """Restore the transforms, in the order of the kinds.

    Raises:
        ValueError: they are of other spaces than the kinds; whatever a transform says of tensors that are not its.
    """
    spaces: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        space, _, name = key.partition("|")
        spaces.setdefault(space, {})[name] = tensor
    if spaces.keys() != kinds.keys():
        raise ValueError("its header lists other spaces than it holds")
    return {space: Transform.from_tensors(kind, spaces[space]) for space, kind in kinds.items()}
