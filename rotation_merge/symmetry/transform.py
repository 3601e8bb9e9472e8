"""The transform of one space: orders and group elements, acting on an axis by the role it plays there (`ROLES`).

The axis stands in the tensor as one or more consecutive dimensions (`Space.factors`), the first of them at `dim`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.symmetry.element import (
    Element,
    Linear,
    element_of,
    gather,
    in_batch_order,
    in_order,
    moved_share,
    tensors_of,
)
from rotation_merge.symmetry.space import ROLES

SEEN = 1e-9
"""Distances from the identity below it are rounding."""


@dataclass(frozen=True, eq=False)
class Transform:
    """One element of a space's group: first the orders, then the elements.

    Attributes:
        kind: of the space.
        elements: by name, as `ROLES` says.
        orders: int64, of the groups (or experts), (G,), and of the heads inside each, (G, r): ``aligned group i = donor
            group orders[0][i]``, and row i of the second indexes the heads of that one. Empty where there is no order.
        shift: of a translation, float64, (d,): the vector that is added to every row of a matrix, ``aligned[i] =
            donor[i] + shift``, once all axes have moved, and never to a difference of two models' tensors. A softmax
            does not see it, ``softmax(W x)`` nor ``softmax(W x + 1 v^T x)``: rows of a router and, for probabilities,
            of a head, and the entries of their biases (rows of one number each).
    """

    kind: str
    elements: Mapping[str, Element]
    orders: tuple[Tensor, ...] = ()
    shift: Tensor | None = None

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        """Move an axis of x that plays `role` and starts at dimension `dim`; same shape, dtype kept.

        Args:
            dual: by the inverse transpose, the action on tensors that are paired with a weight's axis (inputs of an
                input axis, gradients of an output axis).
        """
        rule = ROLES[self.kind][role]
        if rule.levels > 0 and self.orders and not self._still[0]:
            x = x.index_select(dim, self.orders[0].to(x.device))
        if rule.levels > 1 and len(self.orders) > 1 and not self._still[1]:
            x = gather(x, self.orders[1], dim, dim + 1)
        element = self._acting(role)
        if element is None:
            return x
        if rule.stacked:
            return element.act(x, 0, dim, dual != rule.dual)
        if rule.levels:
            return element.act(x, dim, dim + rule.levels, dual != rule.dual)
        return element.act(x.unsqueeze(0), 0, dim + 1, dual != rule.dual).squeeze(0)

    def _acting(self, role: str) -> Any:
        """The element that acts in a role; None if none does, or nothing would move."""
        rule = ROLES[self.kind][role]
        element: Any = self.elements.get(rule.element or "")
        if element is None:
            return None
        if rule.follows:
            element = element.order()
        if rule.dual:
            element = element.powered()
        return None if element.is_identity() else element

    @cached_property
    def _still(self) -> tuple[bool, ...]:
        return tuple(in_order(order) for order in self.orders)

    def added(self, x: Tensor) -> Tensor:
        """Rows (n, d), or of a bias (n,) with d = 1, all axes of which have moved, with the shift on each, if any."""
        if self.shift is None:
            return x
        work = torch.promote_types(x.dtype, torch.float32)
        return (x.to(work) + self.shift.to(device=x.device, dtype=work)).to(x.dtype)

    def moves(self, role: str) -> bool:
        """Whether an axis of this role has anything done to it; of translations, whether anything is added."""
        if self.shift is not None:
            return not self.is_identity()
        return not all(self._still[: ROLES[self.kind][role].levels]) or self._acting(role) is not None

    def mixes(self, role: str) -> bool:
        """Whether an axis of this role has coordinates added up, so that no diagonal stays one."""
        return self.shift is None and isinstance(self._acting(role), Linear)

    @property
    def turns_stream(self) -> bool:
        """Whether a stream's or latent's coordinates are mixed, so that its gains have to be folded away."""
        return self.kind in ("stream", "latent") and isinstance(self.elements.get("map"), Linear)

    def is_identity(self) -> bool:
        shifts = self.shift is not None and bool(self.shift.any())
        return not shifts and all(self._still) and all(element.is_identity() for element in self.elements.values())

    def inverse(self) -> Transform:
        if self.shift is not None:
            return replace(self, shift=-self.shift)
        if not self.orders:
            return replace(self, elements={name: element.inverse() for name, element in self.elements.items()})
        back = self.orders[0].argsort()
        elements = {name: in_batch_order(element.inverse(), back) for name, element in self.elements.items()}
        inside = (order.argsort(dim=1)[back] for order in self.orders[1:])
        return Transform(self.kind, elements, (back, *inside))

    def compose(self, first: Transform) -> Transform:
        """This after `first`, a transform of the same space."""
        if self.shift is not None and first.shift is not None:
            return replace(self, shift=self.shift + first.shift)
        orders, before = self.orders, first.elements
        if orders:
            inside = (order[orders[0]].gather(1, self.orders[1]) for order in first.orders[1:])
            before = {name: in_batch_order(element, orders[0]) for name, element in before.items()}
            orders = (first.orders[0][orders[0]], *inside)
        elements = {name: element.compose(before[name]) for name, element in self.elements.items()}  # type: ignore[arg-type]
        return Transform(self.kind, elements, orders)

    def head_order(self) -> Tensor | None:
        """The order of all query heads, int64 (G r,): ``aligned head i = donor head order[i]``; None without heads."""
        if len(self.orders) < 2:
            return None
        return (self.orders[0][:, None] * self.orders[1].shape[1] + self.orders[1]).flatten()

    def _order_distances(self) -> dict[str, float]:
        """How far it is from the identity in the parts that are no elements."""
        heads = self.head_order()
        result = {"heads": moved_share(heads)} if heads is not None else {}
        if len(self.orders) == 1:
            result["experts"] = moved_share(self.orders[0])
        if self.shift is not None:
            result["shift"] = float(self.shift.norm()) / max(len(self.shift), 1) ** 0.5
        return result

    def distances(self) -> dict[str, float]:
        """How far the transform is from the identity, by part."""
        result = self._order_distances()
        for name, element in self.elements.items():
            parts = element.distances()
            if name == "neurons":
                result |= {"neurons": parts["permutation"], "scale": parts["signs"] + parts["scales"]}
            else:
                result["stream" if name == "map" else name] = sum(parts.values())
        return result

    @property
    def words(self) -> str:
        """What the transform consists of, for reports: `heads, qk: rotation, vo: rotation and scales`."""
        words = [part for part, moved in self._order_distances().items() if moved > SEEN]
        for name, element in self.elements.items():
            kinds = " and ".join(kind for kind, moved in element.distances().items() if moved > SEEN)
            words += [kinds if name in ("map", "neurons") else f"{name}: {kinds}"] if kinds else []
        return ", ".join(words) or "identity"

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the transform, by name: `order0`, `order1`, `shift`, `qk.matrix`."""
        result = {f"order{level}": order for level, order in enumerate(self.orders)}
        result |= {} if self.shift is None else {"shift": self.shift}
        for name, element in self.elements.items():
            result |= {f"{name}.{key}": tensor for key, tensor in tensors_of(element).items()}
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
        orders = [parts.pop(name)[""].long() for name in ("order0", "order1") if "" in parts.get(name, ())]
        shift = parts.pop("shift")[""].double() if "" in parts.get("shift", ()) else None
        return cls(kind, {name: element_of(part) for name, part in parts.items()}, tuple(orders), shift)

    def to(self, device: torch.device) -> Transform:
        """The same transform, its tensors on a device."""
        return self.from_tensors(self.kind, {name: tensor.to(device) for name, tensor in self.tensors().items()})


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
