"""A group that acts on the coordinates of heads: everything that the rest of the code asks of one.

Elements (`base.GroupElement`) define their action; a group defines its elements, the best one for given statistics, an
upper bound on the gain, and a name. `admitted` selects the group of a space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.symmetry.base import GroupElement
from rotation_merge.symmetry.statistics import Grams

GROUPS: dict[str, type[Group]] = {}
"""The groups that may act inside heads, by kind."""


class Group(ABC):
    """A group that acts on the d coordinates of each of N heads (or of KV groups of heads).

    Attributes:
        kind: its name; every class that states one is found by it (`GROUPS`).
        words, symbol: its elements, in a sentence and in a table.
        statistic: the entries of the products A B^T that it needs (`statistics.STATISTICS`).
        rescale: False, True (map and scale jointly optimal) or "sequential" (the scale after the map).
        interleaved: layout of RoPE pairs, where it matters.
    """

    kind: ClassVar[str]
    words: Any
    symbol: Any
    statistic: ClassVar[str] = "full"
    rescale: bool | str = False
    interleaved: bool = False

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            GROUPS[cls.kind] = cls

    @abstractmethod
    def identity(self, batch: int, size: int) -> GroupElement:
        """Identities, as elements of the kind that `solve` gives."""

    @abstractmethod
    def random(self, batch: int, size: int, generator: torch.Generator) -> GroupElement:
        """Random elements, for tests and twins."""

    @abstractmethod
    def solve(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        """The best elements for the statistics, and their gains, shape (N,), float64."""

    @abstractmethod
    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        """<A, g^-T B> for dual products of many heads, (N, r, r, *S), under one element for each N; (N, r, r)."""

    @abstractmethod
    def admits(self, maps: Tensor) -> bool:
        """Whether invertible matrices (N, d, d), float64, are maps of the group."""

    def unordered(self) -> Group:
        """Its elements that leave coordinates at their places, of a group whose permutations heads share."""
        return self

    def lift(self, element: GroupElement) -> GroupElement:
        """An element of this group, made from one of `unordered`."""
        return element

    def parts(self, size: int) -> list[tuple[Group, slice]]:
        """The groups that act on consecutive coordinates and are solved one by one: of most groups, itself."""
        return [(self, slice(0, size))]

    def reach(self, products: Tensor) -> Tensor:
        """Upper bound on each product under the group, real."""
        return products.abs()

    def bound(self, primal: Tensor, dual: Tensor, grams: Grams) -> Tensor:
        """An upper bound on the gain from bounds on <g, M_P> and <g, M_D>, shape (N,); for O(d) these are |M|_*.

        By the triangle inequality ``|a M_P + M_D / a|_* <= a |M_P|_* + |M_D|_* / a``.
        """
        primal, dual = (x.sum(-1) if x.ndim > 1 else x for x in (primal, dual))
        return self._bounded(primal, dual, (grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)))

    def ceiling(self, grams: Grams) -> Tensor:
        """An upper bound on the gain that is nearly attained, shape (N,): for most groups, the gain of `solve`."""
        return self.solve(grams)[1]

    def _bounded(self, primal: Tensor, dual: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
        scale = best_scale(*norms, primal, dual) if self.rescale else torch.ones_like(primal)
        return -cost(scale, *norms, primal, dual)

    def gain_as_it_stands(self, grams: Grams) -> Tensor:
        """The gain of the identity, shape (N,)."""
        traces = self._traces(grams.primal) + self._traces(grams.dual)
        if grams.follow is not None:
            traces = traces + grams.follow.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 2 * traces - grams.norms()

    def _traces(self, products: Tensor) -> Tensor:
        if self.statistic == "full":
            return products.diagonal(dim1=-2, dim2=-1).sum(-1)
        return products.real.sum(-1)


def near(maps: Tensor, expected: Tensor) -> bool:
    """Whether matrices are the same up to rounding."""
    return bool((maps - expected).abs().max() <= 1e-6 * maps.abs().max())


def agreement_by_matrices(element: GroupElement, products: Tensor) -> Tensor:
    """`Group.agreement` for `full` products."""
    d = products.shape[-1]
    eye = torch.eye(d, dtype=products.dtype, device=products.device).expand(len(products), d, d)
    return torch.einsum("nij,nabij->nab", element.act(eye, 0, 1, dual=True), products)
