"""The transform of one space: orders and group elements, acting on an axis by the role it plays there (`ROLES`).

The axis stands in the tensor as one or more consecutive dimensions (`Space.factors`), the first of them at `dim`.
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
from rotation_merge.symmetry.space import ORDERS, ROLES

SEEN = 1e-9
"""Distances from the identity below it are rounding."""


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
