"""The two kinds of group elements: permutations with factors, and small matrices.

An element is a batch of G maps of d coordinates, one for each head (or expert); a whole axis has G = 1. It maps donor
coordinates to aligned ones, ``aligned = g(donor)``. An axis on the dual side of a pairing (queries against keys,
outputs against values) is moved by the inverse transpose, so that the pairing keeps its value.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.errors import AlignmentError


def is_order(index: Tensor) -> bool:
    """Whether each row of an index, (..., d), is a permutation of 0 to d - 1."""
    return bool((index.sort(-1).values == torch.arange(index.shape[-1], device=index.device)).all())


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


def _broadcast(values: Tensor, x: Tensor, batch_dim: int, dim: int) -> Tensor:
    """Values (G, d) shaped so that they multiply x along `batch_dim` and `dim`."""
    shape = [1] * x.ndim
    shape[batch_dim], shape[dim] = values.shape
    if batch_dim % x.ndim > dim % x.ndim:
        values = values.T
    return values.reshape(shape).to(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))


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
        index: int64, (G, d), on the CPU.
        factor: float64, (G, d), not zero.
        degree: k of an activation f(c x) = c^k f(x) between both sides; the factors are those of the first (`powered`).
    """

    index: Tensor
    factor: Tensor
    degree: int = 1

    @classmethod
    def identity(cls, batch: int, size: int, degree: int = 1) -> Monomial:
        """G identities on d coordinates."""
        return cls(torch.arange(size).repeat(batch, 1), torch.ones(batch, size, dtype=torch.float64), degree)

    @property
    def shape(self) -> tuple[int, int]:
        """G and d."""
        return self.index.shape[0], self.index.shape[1]

    @cached_property
    def reorders(self) -> bool:
        return not in_order(self.index)

    @cached_property
    def _rescales(self) -> bool:
        return self.factor.requires_grad or bool((self.factor != 1).any())

    def is_identity(self) -> bool:
        """True where nothing would be moved; never of an element that is being learned."""
        return not (self.reorders or self._rescales)

    @property
    def words(self) -> str:
        """What the element consists of."""
        signs = "signs" if bool((self.factor.abs() == 1).all()) else "scales"
        return " and ".join(["permutation"] * self.reorders + [signs] * self._rescales)

    def order(self) -> Monomial:
        """The permutation alone."""
        return replace(self, factor=torch.ones_like(self.factor))

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        """Move dimension `dim` of x (size d), element g acting where `batch_dim` (size G) is g; shape and dtype kept.

        Args:
            dual: act by the inverse transpose.
        """
        if self.reorders:
            x = self._reordered(x, batch_dim, dim)
        if not self._rescales:
            return x
        factor = 1 / self.factor if dual else self.factor
        return (x * _broadcast(factor, x, batch_dim, dim)).to(x.dtype)

    def powered(self) -> Monomial:
        """The element of the side behind the activation."""
        return self if self.degree == 1 else replace(self, factor=self.factor**self.degree, degree=1)

    def _reordered(self, x: Tensor, batch_dim: int, dim: int) -> Tensor:
        return gather(x, self.index, batch_dim, dim)

    def select(self, index: Tensor) -> Monomial:
        """The elements at `index` (int64, (G',)) of the batch, in that order."""
        return replace(self, index=self.index[index], factor=self.factor[index])

    def inverse(self) -> Monomial:
        back = self.index.argsort(1)
        return replace(self, index=back, factor=1 / self.factor.gather(1, back))

    def compose(self, first: Monomial) -> Monomial:
        """This after `first`."""
        factor = self.factor * first.factor.gather(1, self.index)
        return replace(self, index=first.index.gather(1, self.index), factor=factor)

    def still(self) -> Monomial:
        """The identity of the same batch and size."""
        return Monomial.identity(*self.shape, self.degree)

    def mixes(self) -> bool:
        """Whether some coordinate becomes a sum of several."""
        return False

    def distances(self) -> dict[str, float]:
        """The share of coordinates that move; of factors the root mean square logarithm and the share below zero."""
        signs = float((self.factor < 0).double().mean())
        scale = float(self.factor.abs().log().square().mean(1).sqrt().mean())
        return {"order": moved_share(self.index), "scale": scale + signs}

    def matrices(self) -> Tensor:
        """The maps as matrices, (G, d, d), float64."""
        eye = torch.eye(self.shape[1], dtype=torch.float64).repeat(self.shape[0], 1, 1)
        return self.act(eye, 0, 1)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors from which `element_of` makes the element again."""
        tensors = {"index": self.index, "factor": self.factor}
        return tensors if self.degree == 1 else {**tensors, "degree": torch.tensor(self.degree)}


@dataclass(frozen=True, eq=False)
class Linear:
    """Matrices with orthogonal rows, (G, d, d), float64: ``aligned[g] = matrix[g] @ donor[g]``.

    The inverse transpose is the matrix with each row over its squared length.
    """

    matrix: Tensor

    @classmethod
    def identity(cls, batch: int, size: int) -> Linear:
        """G identities on d coordinates."""
        return cls(torch.eye(size, dtype=torch.float64).repeat(batch, 1, 1))

    @property
    def shape(self) -> tuple[int, int]:
        """G and d."""
        return self.matrix.shape[0], self.matrix.shape[1]

    @cached_property
    def _still(self) -> bool:
        if self.matrix.requires_grad or bool((self.matrix.diagonal(dim1=1, dim2=2) != 1).any()):
            return False  # differs on the diagonal, as most maps do
        return bool((self.matrix == torch.eye(self.shape[1]).to(self.matrix)).all())

    def is_identity(self) -> bool:
        """True where nothing would be moved; never of an element that is being learned."""
        return self._still

    @property
    def words(self) -> str:
        """What the element consists of."""
        return "maps" if bool(((self.dual - self.matrix).abs() <= 1e-9).all()) else "maps with scales"

    @property
    def dual(self) -> Tensor:
        """The inverse transposes, (G, d, d)."""
        return self.matrix / self.matrix.square().sum(-1, keepdim=True)

    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        """As `Monomial.act`."""
        return x if self._still else act_by_matrices(self.dual if dual else self.matrix, x, batch_dim, dim)

    def select(self, index: Tensor) -> Linear:
        """The elements at `index` (int64, (G',)) of the batch, in that order."""
        return Linear(self.matrix[index])

    def inverse(self) -> Linear:
        return Linear(self.dual.mT.contiguous())

    def compose(self, first: Element) -> Linear:
        """This after `first`."""
        return Linear(self.matrix @ first.matrices())

    def still(self) -> Linear:
        """The identity of the same batch and size."""
        return Linear.identity(*self.shape)

    def mixes(self) -> bool:
        """Whether some coordinate becomes a sum of several."""
        entries = self.matrix.abs()
        return bool(((entries > 1e-9 * entries.amax(-1, keepdim=True)).sum(-1) > 1).any())

    def distances(self) -> dict[str, float]:
        """Of the rows' directions the Frobenius distance from the identity over 2 sqrt(d), of their lengths the log."""
        sizes = self.matrix.square().sum(-1).sqrt()
        turn = self.matrix / sizes[..., None] - torch.eye(self.shape[1]).to(self.matrix)
        scale = float(sizes.log().square().mean(1).sqrt().mean())
        return {"turn": float(turn.flatten(1).norm(dim=1).mean()) / (2 * self.shape[1] ** 0.5), "scale": scale}

    def matrices(self) -> Tensor:
        """The maps as matrices, (G, d, d), float64."""
        return self.matrix

    def tensors(self) -> dict[str, Tensor]:
        """The tensors from which `element_of` makes the element again."""
        return {"matrix": self.matrix}


@dataclass(frozen=True, eq=False)
class Translation:
    """One vector added to every row of a matrix whose rows only enter a softmax: ``aligned[i] = donor[i] + vector``.

    ``softmax(W x)`` does not see ``W + 1 v^T``: rows of a router, and, for probabilities, of a head. Nor does it see
    one number added to every entry of a bias, whose entries are rows of one number each. No axis plays a role in it: it
    is added once all axes have moved, and never to a difference of two models' tensors.

    Attributes:
        vector: float64, (d,), in the anchor's coordinates.
    """

    vector: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """1 and d."""
        return 1, len(self.vector)

    def is_identity(self) -> bool:
        return not bool(self.vector.any())

    words = "added vector"

    def added(self, x: Tensor) -> Tensor:
        """Rows (n, d), or of a bias (n,) with d = 1, with the vector on each, in x's dtype."""
        work = torch.promote_types(x.dtype, torch.float32)
        return (x.to(work) + self.vector.to(device=x.device, dtype=work)).to(x.dtype)

    def inverse(self) -> Translation:
        return Translation(-self.vector)

    def compose(self, first: Translation) -> Translation:
        """This after `first`."""
        return Translation(self.vector + first.vector.to(self.vector.device))

    def still(self) -> Translation:
        return Translation(torch.zeros_like(self.vector))

    def distances(self) -> dict[str, float]:
        """The root mean square of the vector."""
        return {"shift": float(self.vector.square().mean().sqrt())}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors from which `element_of` makes the element again."""
        return {"vector": self.vector}


Element = Monomial | Linear


def element_of(tensors: dict[str, Tensor]) -> Monomial | Linear | Translation:
    """An element from its `tensors`; matrices in their stored precision.

    Raises:
        AlignmentError: no element has these tensors.
    """
    if tensors.keys() == {"matrix"}:
        return Linear(tensors["matrix"].double())
    if tensors.keys() == {"vector"}:
        return Translation(tensors["vector"].double())
    if tensors.keys() - {"degree"} == {"index", "factor"}:
        return Monomial(tensors["index"].long(), tensors["factor"].double(), int(tensors.get("degree", 1)))
    raise AlignmentError(f"no group element has the tensors {sorted(tensors)}", remedy="write the file again")


@dataclass(frozen=True, eq=False)
class LearnedOrder(Monomial):
    """A permutation while it is learned: a matrix that stands for it, through which gradients go straight to scores.

    Source: Git Re-Basin (Ainsworth and others, 2023), section 3.3.

    Attributes:
        matrix: the permutation, (d, d), float32, differentiable.
    """

    matrix: Tensor = field(default_factory=lambda: torch.empty(0, 0))

    @cached_property
    def reorders(self) -> bool:
        return True

    def _reordered(self, x: Tensor, batch_dim: int, dim: int) -> Tensor:
        return act_by_matrices(self.matrix[None], x, batch_dim, dim)
