"""The transform of one space: orders and group elements, acting on an axis by the role it plays there.

A role is the function of an axis in its space (the queries or the keys of an attention space, the rows that write into
a residual stream or its norm gains). The axis stands in the tensor as one or more consecutive dimensions (`factors` of
the architecture layer), the first of them at `dim`. `ROLES` says for each kind of space and role which orders and which
element act there: a new kind of space is a row of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.errors import AlignmentError
from rotation_merge.symmetry.element import (
    Element,
    Linear,
    Monomial,
    Translation,
    element_of,
    gather,
    in_order,
    moved_share,
)


@dataclass(frozen=True)
class Role:
    """What acts on the axes of one role.

    Attributes:
        element: name of the element; None: orders alone act.
        levels: levels of order in front of the element's coordinates: groups (1), and the heads in each (2).
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

ROLES: dict[str, dict[str, Role]] = {
    "stream": _STREAM,
    "latent": _STREAM,
    "ffn": {
        "in": Role("neurons"),
        "gate": Role("neurons", follows=True),
        "out": Role("neurons", dual=True),
    },
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
}
"""By the kind of a space, what acts on the axes of each role. Attention: keys and values have an entry for each KV
group, queries and outputs one for each query head of it; gains of norms of queries and keys are those of all heads
together (`k_gain`, `q_gain`) or shared by them (`k_norm`, `q_norm`); `kv_head` and `head` are one number a head, `gate`
is a gate of the outputs. FFN neurons: `in` (up, where gated), `gate`, `out`."""

PAIRED = {"qk": ("k", "q"), "vo": ("v", "o"), "gains": ("k_gain", "q_gain"), None: ("kv_head", "head")}
"""Of attention, the roles on the primal and on the dual side of each element, by KV group and query head."""


@dataclass(frozen=True, eq=False)
class Transform:
    """One element of a space's group: first the orders, then the elements.

    Attributes:
        kind: of the space.
        elements: by name, as `ROLES` says.
        orders: int64, of the groups (or experts), (G,), and of the heads inside each, (G, r): ``aligned group i = donor
            group orders[0][i]``, and row i of the second indexes the heads of that one. Empty where there is no order.
    """

    kind: str
    elements: Mapping[str, Monomial | Linear | Translation]
    orders: tuple[Tensor, ...] = ()

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        """Move an axis of x that plays `role` and starts at dimension `dim`; same shape, dtype kept.

        Args:
            dual: by the inverse transpose, the action on tensors that are paired with a weight's axis (inputs of an
                input axis, gradients of an output axis).
        """
        rule = ROLES[self.kind][role]
        x = self._reordered(x, rule.levels, dim)
        element = self._acting(rule)
        if element is None:
            return x
        if rule.stacked:
            return element.act(x, 0, dim, dual != rule.dual)
        if rule.levels:
            return element.act(x, dim, dim + rule.levels, dual != rule.dual)
        return element.act(x.unsqueeze(0), 0, dim + 1, dual != rule.dual).squeeze(0)

    def _acting(self, rule: Role) -> Element | None:
        """The element that acts in a role; None if none does, or nothing would move."""
        element = self.elements.get(rule.element or "")
        if element is None or isinstance(element, Translation):
            return None
        if rule.follows:
            if not isinstance(element, Monomial):
                return None
            element = element.order()
        if rule.dual and isinstance(element, Monomial):
            element = element.powered()
        return None if element.is_identity() else element

    def _reordered(self, x: Tensor, levels: int, dim: int) -> Tensor:
        if levels > 0 and self.orders and not self._still[0]:
            x = x.index_select(dim, self.orders[0].to(x.device))
        if levels > 1 and len(self.orders) > 1 and not self._still[1]:
            x = gather(x, self.orders[1], dim, dim + 1)
        return x

    @cached_property
    def _still(self) -> tuple[bool, ...]:
        return tuple(in_order(order) for order in self.orders)

    def added(self, x: Tensor) -> Tensor:
        """Rows (n, d), all axes of which have moved, with the translation on each, if there is one."""
        shift = self.elements.get("shift")
        return shift.added(x) if isinstance(shift, Translation) else x

    def moves(self, role: str) -> bool:
        """Whether an axis of this role has anything done to it; of translations, whether anything is added."""
        if self.kind == "translation":
            return not self.is_identity()
        rule = ROLES[self.kind][role]
        return not all(self._still[: rule.levels]) or self._acting(rule) is not None

    def mixes(self, role: str) -> bool:
        """Whether an axis of this role has coordinates mixed, so that no diagonal stays one."""
        element = None if self.kind == "translation" else self._acting(ROLES[self.kind][role])
        return element is not None and element.mixes()

    @property
    def turns_stream(self) -> bool:
        """Whether a stream's or latent's coordinates are mixed, so that its gains have to be folded away."""
        return self.kind in ("stream", "latent") and isinstance(self.elements.get("map"), Linear)

    def is_identity(self) -> bool:
        return all(self._still) and all(element.is_identity() for element in self.elements.values())

    def still(self) -> Transform:
        """The identity of the same group."""
        elements = {name: element.still() for name, element in self.elements.items()}
        orders = tuple(torch.arange(order.shape[-1]).expand(order.shape).clone() for order in self.orders)
        return Transform(self.kind, elements, orders)

    def inverse(self) -> Transform:
        if not self.orders:
            return replace(self, elements={name: element.inverse() for name, element in self.elements.items()})
        back = self.orders[0].argsort()
        elements = {name: _selected(element.inverse(), back) for name, element in self.elements.items()}
        inside = (order.argsort(dim=1)[back] for order in self.orders[1:])
        return Transform(self.kind, elements, (back, *inside))

    def compose(self, first: Transform) -> Transform:
        """This after `first`, a transform of the same space."""
        orders = self.orders
        before = dict(first.elements)
        if orders:
            inside = (order[orders[0]].gather(1, self.orders[1]) for order in first.orders[1:])
            before = {name: _selected(element, orders[0]) for name, element in before.items()}
            orders = (first.orders[0][orders[0]], *inside)
        elements = {name: element.compose(before[name]) for name, element in self.elements.items()}  # type: ignore[arg-type]
        return Transform(self.kind, elements, orders)

    def head_order(self) -> Tensor | None:
        """The order of all query heads, int64 (G r,): ``aligned head i = donor head order[i]``; None without heads."""
        if len(self.orders) < 2:
            return None
        return (self.orders[0][:, None] * self.orders[1].shape[1] + self.orders[1]).flatten()

    def distances(self) -> dict[str, float]:
        """How far the transform is from the identity, by part."""
        heads = self.head_order()
        result = {"heads": moved_share(heads)} if heads is not None else {}
        if len(self.orders) == 1:
            result["experts"] = moved_share(self.orders[0])
        for name, element in self.elements.items():
            parts = element.distances()
            if name == "neurons":
                result |= {"neurons": parts["order"], "scale": parts["scale"]}
            else:
                result["stream" if name == "map" else name] = sum(parts.values())
        return result

    @property
    def words(self) -> str:
        """What the transform consists of, for reports."""
        parts = ["order of " + ("heads" if len(self.orders) > 1 else "experts")] if not all(self._still) else []
        parts += [f"{name}: {element.words}" for name, element in self.elements.items() if not element.is_identity()]
        return ", ".join(parts).replace("map: ", "").replace("neurons: ", "") or "identity"

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the transform, by name: `order0`, `order1`, `qk.matrix`."""
        result = {f"order{level}": order for level, order in enumerate(self.orders)}
        for name, element in self.elements.items():
            result |= {f"{name}.{key}": tensor for key, tensor in element.tensors().items()}
        return result

    @classmethod
    def from_tensors(cls, kind: str, tensors: Mapping[str, Tensor]) -> Transform:
        """The transform again.

        Raises:
            AlignmentError: no transform has these tensors.
        """
        orders, parts = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for key, tensor in tensors.items():
            name, dot, part = key.partition(".")
            if dot:
                parts.setdefault(name, {})[part] = tensor
            elif key in ("order0", "order1"):
                orders[key] = tensor.long()
            else:
                raise AlignmentError(f"no group element has the tensor '{key}'", remedy="write the file again")
        elements = {name: element_of(part) for name, part in parts.items()}
        return cls(kind, elements, tuple(orders[name] for name in sorted(orders)))

    def to(self, device: torch.device) -> Transform:
        """The same transform, its tensors on a device."""
        return self.from_tensors(self.kind, {name: tensor.to(device) for name, tensor in self.tensors().items()})


def _selected(element: Monomial | Linear | Translation, index: Tensor) -> Monomial | Linear | Translation:
    """An element in another order of its groups; one for all groups has none."""
    return element if isinstance(element, Translation) or element.shape[0] != len(index) else element.select(index)
