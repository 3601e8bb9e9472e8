"""Transforms of one attention layer: the order of its heads and the maps inside them (a wreath product)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.symmetry.base import GroupElement, dump, gather, is_order, load, mixes, nested, proven_maps
from rotation_merge.symmetry.group import Group
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.ordered import orders_of, tied, with_orders
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform

QUERY_ROLES = ("q", "o", "gate", "q_gain", "head")
"""Roles whose axis has one entry for each query head: dimensions (G, r, ...)."""

SHARED_GAINS = ("q_norm", "k_norm")
"""Roles of gains that all heads of a layer share."""


@dataclass(frozen=True, eq=False)
class HeadTransform(SpaceTransform):
    """G KV groups of r query heads each; first reordered, then turned inside.

    Attributes:
        groups: int64 (G,), ``aligned group i = donor group groups[i]``.
        queries: int64 (G, r), the query heads inside each group, ``queries[i]`` indexing donor group groups[i].
        qk: element (batch G) acting on keys, and dually on the queries of the group.
        vo: element (batch G) acting on values, and dually on the outputs of the group's heads.
        gains: element (batch G, or 1 for all heads) acting on the gains of the keys' norm, and dually on those of the
            queries'; None where they are not exchanged.

    Roles and their dimensions: q (G, r, d), k (G, d), v (G, d_v), o (G, r, d_v); gains of norms of all heads together:
    q_gain (G, r, d), k_gain (G, d), and of a norm that all heads share: q_norm (d), k_norm (d); one number a head:
    head (G, r), kv_head (G); a gate of the outputs, which follows the order of values: gate (G, r, d_v).
    """

    groups: Tensor
    queries: Tensor
    qk: GroupElement
    vo: GroupElement
    gains: GroupElement | None = None

    space_kind = "attention"

    @staticmethod
    def identity_order(groups: int, per_group: int) -> tuple[Tensor, Tensor]:
        """`groups` and `queries` of heads in their own order."""
        return torch.arange(groups), torch.arange(per_group).repeat(groups, 1)

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        if role in SHARED_GAINS:
            return self._exchange(x.unsqueeze(dim), dim, dim + 1, dual != (role == "q_norm")).squeeze(dim)
        x = self._reorder(x, role, dim)
        if role in ("q_gain", "k_gain"):
            return self._exchange(x, dim, dim + 1 + (role == "q_gain"), dual != (role == "q_gain"))
        if role in ("q", "k") and not self.qk.is_identity():
            return self.qk.act(x, dim, dim + 1 + (role == "q"), dual=(role == "q") != dual)
        if role in ("v", "o") and not self.vo.is_identity():
            return self.vo.act(x, dim, dim + 1 + (role == "o"), dual=(role == "o") != dual)
        if role == "gate" and isinstance(self.vo, Monomial):
            return self.vo.permutation.act(x, dim, dim + 2)
        return x

    def _exchange(self, x: Tensor, batch_dim: int, dim: int, dual: bool) -> Tensor:
        moves = self.gains is not None and not self.gains.is_identity()
        return self.gains.act(x, batch_dim, dim, dual) if moves and self.gains is not None else x

    def _gains_of(self, index: Tensor) -> GroupElement | None:
        """The gains' elements in another order of the groups; one for all heads has none."""
        return self.gains if self.gains is None or self.gains.batch == 1 else self.gains.select(index)

    def mixes(self, role: str) -> bool:
        return (role in ("q", "k") and mixes(self.qk)) or (role in ("v", "o") and mixes(self.vo))

    def _reorder(self, x: Tensor, role: str, dim: int) -> Tensor:
        if not self._groups_still:
            x = x.index_select(dim, self.groups.to(x.device))
        if role in QUERY_ROLES and not self._queries_still:
            x = gather(x, self.queries, dim, dim + 1)
        return x

    @cached_property
    def _groups_still(self) -> bool:
        return _in_order(self.groups)

    @cached_property
    def _queries_still(self) -> bool:
        return _in_order(self.queries)

    def inverse(self) -> HeadTransform:
        back = self.groups.argsort()
        gains = self._gains_of(back)
        return HeadTransform(
            back,
            self.queries.argsort(dim=1)[back],
            self.qk.inverse().select(back),
            self.vo.inverse().select(back),
            None if gains is None else gains.inverse(),
        )

    def compose(self, first: HeadTransform) -> HeadTransform:
        gains = first._gains_of(self.groups)
        if self.gains is not None:
            gains = self.gains if gains is None else self.gains.compose(gains)
        return HeadTransform(
            first.groups[self.groups],
            first.queries[self.groups].gather(1, self.queries),
            self.qk.compose(first.qk.select(self.groups)),
            self.vo.compose(first.vo.select(self.groups)),
            gains,
        )

    def still(self) -> HeadTransform:
        gains = None if self.gains is None else self.gains.still()
        return HeadTransform(*self.identity_order(*self.queries.shape), self.qk.still(), self.vo.still(), gains)

    def elements(self) -> dict[str, GroupElement]:
        elements = {"qk": self.qk, "vo": self.vo}
        return elements if self.gains is None else {**elements, "gains": self.gains}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> HeadTransform:
        return HeadTransform(self.groups, self.queries, elements["qk"], elements["vo"], elements.get("gains"))

    def is_identity(self) -> bool:
        return (
            self._groups_still
            and self._queries_still
            and all(element.is_identity() for element in self.elements().values())
        )

    def head_order(self) -> Tensor:
        """The order of all query heads, int64 (G r,): ``aligned head i = donor head order[i]``."""
        return (self.groups[:, None] * self.queries.shape[1] + self.queries).flatten()

    def distances(self) -> dict[str, float]:
        order = self.head_order()
        moved = (order != torch.arange(len(order), device=order.device)).double().mean()
        inside = {name: float(element.distance().mean()) for name, element in self.elements().items()}
        return {"heads": float(moved), **inside}

    def group(self) -> str:
        order = "" if self.distances()["heads"] == 0 else "head order, "
        gains = ", gains exchanged" if self.gains is not None and not self.gains.is_identity() else ""
        return f"{order}qk {self.qk.kind}, vo {self.vo.kind}{gains}"

    def tensors(self) -> dict[str, Tensor]:
        result = {"groups": self.groups, "queries": self.queries}
        for name, element in self.elements().items():
            result |= {f"{name}.{key}": tensor for key, tensor in dump(element).items()}
        return result

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> HeadTransform:
        maps = nested({key: tensor for key, tensor in tensors.items() if "." in key})
        gains = load(maps["gains"]) if "gains" in maps else None
        return cls(tensors["groups"].long(), tensors["queries"].long(), load(maps["qk"]), load(maps["vo"]), gains)


def _in_order(index: Tensor) -> bool:
    """Whether every row of indices, int64 (..., n), leaves n entries where they are."""
    return bool((index == torch.arange(index.shape[-1], device=index.device)).all())


_PAIR_FLOPS = 480.0
"""Work of judging one pairing of heads, in units of the cube of their size: eigenvectors at a scale or two."""


@dataclass(frozen=True)
class HeadGroup(SpaceGroup):
    """The order of the heads of one layer, and the groups inside them.

    Attributes:
        order: of heads: none (not asked for), permutation (the best), spectral (by singular values), or fixed (asked
            for where the architecture forbids it).
        gains, shared: the group of the gains of norms of queries and keys, if any, and whether all heads share them.
        inside: whether KV groups keep their places, and query heads change theirs inside them.
    """

    groups: int
    per_group: int
    head_dim: int
    value_dim: int
    order: str
    qk: Group
    vo: Group
    gains: Group | None = None
    shared: bool = True
    inside: bool = False

    @property
    def own_order(self) -> tuple[Tensor, Tensor]:
        """`groups` and `queries` of heads in their own order."""
        return HeadTransform.identity_order(self.groups, self.per_group)

    def identity(self) -> HeadTransform:
        qk, vo = self.qk.identity(self.groups, self.head_dim), self.vo.identity(self.groups, self.value_dim)
        return HeadTransform(*self.own_order, qk, vo, self._gains(lambda group, *sizes: group.identity(*sizes)))

    def _gains(self, make: Callable[[Group, int, int], GroupElement]) -> GroupElement | None:
        return None if self.gains is None else make(self.gains, 1 if self.shared else self.groups, self.head_dim)

    @property
    def orders(self) -> bool:
        """Whether coordinates of queries and keys may change places for several heads together."""
        return self.gains is not None and self.gains.unordered() != self.gains

    def unordered(self) -> HeadGroup:
        """The same without such permutations."""
        return replace(self, qk=self.qk.unordered(), gains=None if self.gains is None else self.gains.unordered())

    def lifted(self, transform: HeadTransform) -> HeadTransform:
        """A transform of this group, made from one of `unordered`."""
        gains = None if transform.gains is None or self.gains is None else self.gains.lift(transform.gains)
        return replace(transform, qk=self.qk.lift(transform.qk), gains=gains)

    def refuses(self, transform: SpaceTransform) -> str | None:
        if not isinstance(transform, HeadTransform):
            return "it is not a transform of heads"
        if (len(transform.groups), *transform.queries.shape) != (self.groups, self.groups, self.per_group):
            return f"it does not have {self.groups} KV heads of {self.per_group} query heads each"
        if not (is_order(transform.groups[None]) and is_order(transform.queries)):
            return "the order of its heads is not a permutation"
        if self.order not in ("permutation", "spectral") and not torch.equal(
            transform.head_order(), torch.arange(self.groups * self.per_group)
        ):
            return "heads have to keep their places"
        if self.inside and not torch.equal(transform.groups, self.own_order[0]):
            return "KV heads have to keep their places"
        sides: list[tuple[str, GroupElement, Group | None, int, int]] = [
            ("query/key", transform.qk, self.qk, self.groups, self.head_dim),
            ("value/output", transform.vo, self.vo, self.groups, self.value_dim),
        ]
        if transform.gains is not None:
            sides.append(("gains", transform.gains, self.gains, 1 if self.shared else self.groups, self.head_dim))
        if self.gains is not None and not tied(transform.qk, transform.gains):
            return "query/key: coordinates move apart from the gains of their norms"
        for side, element, group, batch, size in sides:
            if (element.batch, element.size) != (batch, size):
                return f"{side}: it does not have {batch} maps of size {size}"
            maps = proven_maps(element)
            if group is None or maps is None or not group.admits(maps):
                return f"{side}: it does not belong to the group: {group.words if group else 'none'}"
        return None

    def random(self, generator: torch.Generator) -> HeadTransform:
        order, queries = self.own_order
        if self.order in ("permutation", "spectral"):
            order = order if self.inside else torch.randperm(self.groups, generator=generator)
            queries = torch.stack([torch.randperm(self.per_group, generator=generator) for _ in range(self.groups)])
        qk = self.qk.random(self.groups, self.head_dim, generator)
        vo = self.vo.random(self.groups, self.value_dim, generator)
        gains = self._gains(lambda group, *sizes: group.random(*sizes, generator))
        if self.orders and gains is not None and (orders := orders_of(gains)) is not None:
            qk = with_orders(qk, orders)
        return HeadTransform(order, queries, qk, vo, gains)

    @property
    def words(self) -> str:
        inside = " inside KV groups" if self.inside else ""
        order = "" if self.order == "none" else f"head order: {self.order}{inside}; "
        gains = f"; {self.gains.words}" if self.gains is not None else ""
        return f"{order}query/key: {self.qk.words}; value/output: {self.vo.words}{gains}"

    def work(self) -> MatchingCost:
        if self.order == "none":
            return MatchingCost(2.0 * self.head_dim)
        heads = self.groups * self.per_group
        per_weight = 2.0 * self.head_dim * heads
        return MatchingCost(per_weight, _PAIR_FLOPS * heads**2 * self.head_dim**3, near=per_weight)
