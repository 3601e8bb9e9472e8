"""The two kinds of group elements: permutations with factors, and small matrices.

An element is a batch of G maps of d coordinates, one for each head (or expert); a whole axis has G = 1. It maps donor
coordinates to aligned ones, ``aligned = g(donor)``. An axis on the dual side of a pairing (queries against keys,
outputs against values) is moved by the inverse transpose, so that the pairing keeps its value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import AlignmentError

LARGEST_ENTRY = 1e7
"""Largest entry of a map or of its inverse; beyond, storage types lose too much precision."""


def in_order(index: Tensor) -> bool:
    """Whether each row of an index, (..., d), leaves d entries where they are."""
    return bool((index == torch.arange(index.shape[-1], device=index.device)).all())


def moved_share(index: Tensor) -> float:
    """The share of the entries of an index, (..., d), that change places."""
    return float((index != torch.arange(index.shape[-1], device=index.device)).double().mean())


def gather(x: Tensor, index: Tensor, batch_dim: int, dim: int) -> Tensor:
    """``out[g, i] = x[g, index[g, i]]`` along `batch_dim` and `dim`, index (G, d)."""
    index = index.to(x.device)
    if index.shape[0] == 1:
        return x.index_select(dim, index[0])
    parts = [part.index_select(dim % x.ndim, row) for part, row in zip(x.split(1, batch_dim), index, strict=True)]
    return torch.cat(parts, dim=batch_dim)


def act_by_matrices(matrices: Tensor, x: Tensor, batch_dim: int, dim: int) -> Tensor:
    """Multiply dimension `dim` of x by matrices (G, d, d), at least in float32; shape and dtype of x kept.

    The matrices are laid out anew: products of a transposed view and of a stored matrix differ in the last bit.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    moved = x.movedim((batch_dim, dim), (0, 1))
    flat = moved.reshape(moved.shape[0], moved.shape[1], -1).to(work)
    result = torch.bmm(matrices.to(device=x.device, dtype=work).contiguous(), flat)
    return result.reshape(moved.shape).movedim((0, 1), (batch_dim, dim)).to(x.dtype)


@dataclass(frozen=True, eq=False)
class Monomial:
    """Permutations with a factor for each coordinate: ``aligned[g, i] = factor[g, i] * donor[g, index[g, i]]``.

    Attributes:
        index: int64, (G, d).
        factor: float64, (G, d), not zero.
        degree: k of an activation f(c x) = c^k f(x) between both sides; the factors are those of the first (`powered`).
    """

    index: Tensor
    factor: Tensor
    degree: int = 1

    @classmethod
    def identity(cls, batch: int, size: int, degree: int = 1) -> Monomial:
        """G identities on d coordinates."""
        return replace(cls.permutation(torch.arange(size).repeat(batch, 1)), degree=degree)

    @classmethod
    def permutation(cls, index: Tensor) -> Monomial:
        """Permutations alone, by their index."""
        return cls(index, torch.ones(index.shape, dtype=torch.float64, device=index.device))

    @property
    def shape(self) -> tuple[int, int]:
        """G and d."""
        return self.index.shape[0], self.index.shape[1]

    @cached_property
    def _reorders(self) -> bool:
        return not in_order(self.index)

    @cached_property
    def _rescales(self) -> bool:
        return self.factor.requires_grad or bool((self.factor != 1).any())

    def is_identity(self) -> bool:
        """True where nothing would be moved; never of an element that is being learned."""
        return not (self._reorders or self._rescales)

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether the tensors, which may be of any origin, are those of G regular maps of d coordinates."""
        sizes = self.factor.abs()
        fits = self.index.shape == self.factor.shape == shape and in_order(self.index.sort(1).values)
        return fits and bool(((sizes >= 1 / LARGEST_ENTRY) & (sizes <= LARGEST_ENTRY)).all())

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        """Move dimension `dim` of x (size d), element g acting where `batch_dim` (size G) is g; shape and dtype kept.

        Args:
            dual: act by the inverse transpose.
        """
        if self._reorders:
            x = gather(x, self.index, batch_dim, dim)
        if not self._rescales:
            return x
        factor = (1 / self.factor if dual else self.factor)[(..., *[None] * (x.ndim - 2))]
        wide = factor.to(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
        return (x * wide.movedim((0, 1), (batch_dim, dim))).to(x.dtype)

    def matrices(self, dual: bool = False) -> Tensor:
        """The maps, or their inverse transposes, as matrices, (G, d, d), float64."""
        return self.act(torch.eye(self.shape[1], dtype=torch.float64).repeat(self.shape[0], 1, 1), 0, 1, dual)

    def inverse(self) -> Monomial:
        back = self.index.argsort(1)
        return replace(self, index=back, factor=1 / self.factor.gather(1, back))

    def compose(self, first: Monomial) -> Monomial:
        """This after `first`."""
        factor = self.factor * first.factor.gather(1, self.index)
        return replace(self, index=first.index.gather(1, self.index), factor=factor)

    def order(self) -> Monomial:
        """The permutation alone."""
        return self.permutation(self.index)

    def powered(self) -> Monomial:
        """The element of the side behind the activation."""
        return self if self.degree == 1 else replace(self, factor=self.factor**self.degree, degree=1)

    def deviation(self) -> float:
        """The largest deviation of an entry from the identity; infinite where coordinates change places."""
        return math.inf if self._reorders else float((self.factor - 1).abs().max())

    def distances(self) -> dict[str, float]:
        """The share of coordinates that move; of factors the share below zero and the root mean square logarithm."""
        signs = float((self.factor < 0).double().mean())
        scale = float(self.factor.abs().log().square().mean(1).sqrt().mean())
        return {"permutation": moved_share(self.index), "signs": signs, "scales": scale}


@dataclass(frozen=True, eq=False)
class Linear:
    """Matrices with orthogonal rows, (G, d, d), float64: ``aligned[g] = matrix[g] @ donor[g]``.

    The inverse transpose is the matrix with each row over its squared length. All members are those of `Monomial`.
    """

    matrix: Tensor
    degree = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @cached_property
    def _still(self) -> bool:
        if self.matrix.requires_grad or bool((self.matrix.diagonal(dim1=1, dim2=2) != 1).any()):
            return False  # differs on the diagonal, as most maps do
        return bool((self.matrix == torch.eye(self.shape[1]).to(self.matrix)).all())

    def is_identity(self) -> bool:
        return self._still

    def fits(self, shape: tuple[int, int]) -> bool:
        if self.matrix.shape != (*shape, shape[1]):
            return False
        largest = self.matrix.abs().amax((1, 2))
        return bool(((largest >= 1 / LARGEST_ENTRY) & (largest <= LARGEST_ENTRY)).all())

    def matrices(self, dual: bool = False) -> Tensor:
        return self.matrix / self.matrix.square().sum(-1, keepdim=True) if dual else self.matrix

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        return x if self._still else act_by_matrices(self.matrices(dual), x, batch_dim, dim)

    def inverse(self) -> Linear:
        return Linear(self.matrices(dual=True).mT.contiguous())

    def compose(self, first: Linear | Monomial) -> Linear:
        return Linear(self.matrix @ first.matrices())

    def order(self) -> Monomial:
        return Monomial.identity(*self.shape)

    def powered(self) -> Linear:
        return self

    def deviation(self) -> float:
        return float((self.matrix - torch.eye(self.shape[1]).to(self.matrix)).abs().max())

    def distances(self) -> dict[str, float]:
        """Of the rows' directions the Frobenius distance from the identity over 2 sqrt(d), of their lengths the log."""
        sizes = self.matrix.square().sum(-1).sqrt()
        turn = self.matrix / sizes[..., None] - torch.eye(self.shape[1]).to(self.matrix)
        scale = float(sizes.log().square().mean(1).sqrt().mean())
        return {"rotation": float(turn.flatten(1).norm(dim=1).mean()) / (2 * self.shape[1] ** 0.5), "scales": scale}


Element = Monomial | Linear


def in_batch_order(element: Any, index: Tensor) -> Any:
    """A batch of elements in another order, int64 (G,); one for all groups stays as it is."""
    if element.shape[0] != len(index):
        return element
    tensors = {f.name: x[index] for f in fields(element) if isinstance(x := getattr(element, f.name), Tensor)}
    return replace(element, **tensors)


def tensors_of(element: Element) -> dict[str, Tensor]:
    """The tensors from which `element_of` makes an element again: its fields that are not at their defaults."""
    values = [(field, getattr(element, field.name)) for field in fields(element)]
    return {f.name: torch.as_tensor(x) for f, x in values if isinstance(x, Tensor) or x != f.default}


def element_of(tensors: dict[str, Tensor]) -> Element:
    """An element from its `tensors_of`; matrices in their stored precision.

    Raises:
        AlignmentError: no element has these tensors.
    """
    if tensors.keys() == {"matrix"}:
        return Linear(tensors["matrix"].double())
    if tensors.keys() - {"degree"} == {"index", "factor"}:
        return Monomial(tensors["index"].long(), tensors["factor"].double(), int(tensors.get("degree", 1)))
    raise AlignmentError(f"no group element has the tensors {sorted(tensors)}", remedy="write the file again")
