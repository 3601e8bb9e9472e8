"""The interface of group elements.

Elements are batched: one object holds G elements of the same group, one for each head (or expert); whole-axis
groups have G = 1. An element acts on one dimension of a tensor, with its batch on another. It maps donor
coordinates to aligned ones, ``aligned = g(donor)``; an axis on the dual side of a pairing (queries against
keys, outputs against values) is moved by the inverse transpose, so that the pairing keeps its value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from rotation_merge.errors import AlignmentError
from rotation_merge.symmetry.tangent import Freedom, Steps

Self = TypeVar("Self", bound="GroupElement")

KINDS: dict[str, type[GroupElement]] = {}
"""The groups by name."""


class GroupElement(ABC):
    """A batch of G elements of one group acting on d coordinates."""

    kind: ClassVar[str]
    """Name of the group in reports and alignment files; every class that states one is found by it (`KINDS`)."""

    monomial: ClassVar[bool] = False
    """Whether every element is a permutation with a rescaling."""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    @property
    @abstractmethod
    def batch(self) -> int:
        """G, the number of elements."""

    @property
    @abstractmethod
    def size(self) -> int:
        """d, the number of coordinates each element acts on."""

    @classmethod
    @abstractmethod
    def identity(cls: type[Self], batch: int, size: int) -> Self:
        """G identities on d coordinates."""

    @classmethod
    @abstractmethod
    def random(cls: type[Self], batch: int, size: int, generator: torch.Generator) -> Self:
        """G random elements, for tests and twins."""

    @abstractmethod
    def inverse(self: Self) -> Self:
        """The elements that undo these."""

    @abstractmethod
    def compose(self: Self, first: Self) -> Self:
        """This after `first`: ``compose(f).act(x) == self.act(f.act(x))``."""

    @abstractmethod
    def select(self: Self, index: Tensor) -> Self:
        """The elements at `index` (int64, (G',)) of the batch, in that order."""

    @abstractmethod
    def act(self, x: Tensor, batch_dim: int, dim: int, dual: bool = False) -> Tensor:
        """Move dimension `dim` (size d) of x, element g acting where `batch_dim` (size G) is g.

        Args:
            x: any shape with x.shape[batch_dim] == G and x.shape[dim] == d; not modified.
            dual: act by the inverse transpose.

        Returns:
            A tensor of x's shape and dtype.
        """

    @abstractmethod
    def distance(self) -> Tensor:
        """Distance of each element from the identity: shape (G,), float64, >= 0, zero only at the identity."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors from which `from_tensors` rebuilds the element, by name."""

    @classmethod
    @abstractmethod
    def from_tensors(cls: type[Self], tensors: dict[str, Tensor]) -> Self:
        """Rebuild an element; maps stored in half precision come back inside their group."""

    def still(self: Self) -> Self:
        """The identity of the same group, batch and layout."""
        return self.identity(self.batch, self.size)

    def tangent(self, freedom: Freedom) -> Steps:
        """Learnable parameters at the element itself; none if it is discrete."""
        return {}

    def along(self: Self, steps: Steps, freedom: Freedom, exact: bool) -> Self:
        """The element where the parameters have led, differentiable in them.

        Args:
            steps: as `tangent` names them, not empty.
            freedom: that `tangent` was asked for.
            exact: in float64 and inside the group to the last digit, else in float32.
        """
        raise NotImplementedError

    def is_identity(self) -> bool:
        """True where nothing would be moved; never of an element that is being learned."""
        return not self._learned and self._still

    @cached_property
    def _learned(self) -> bool:
        return any(tensor.requires_grad for tensor in self.tensors().values())

    @cached_property
    def _still(self) -> bool:
        return bool((self.distance() == 0).all())

    def to(self: Self, device: torch.device) -> Self:
        """The same element with its tensors on `device`; itself if they are there."""
        tensors = self.tensors()
        if all(tensor.device == device for tensor in tensors.values()):
            return self
        return self.from_tensors({name: tensor.to(device) for name, tensor in tensors.items()})


def dump(element: GroupElement) -> dict[str, Tensor]:
    """The element's tensors, its kind in the key: ``{"orthogonal:matrix": ...}``; see `load`."""
    return {f"{element.kind}:{name}": tensor for name, tensor in element.tensors().items()}


def load(tensors: dict[str, Tensor]) -> GroupElement:
    """Rebuild an element from the result of `dump`."""
    kinds = {key.split(":", 1)[0] for key in tensors}
    if len(kinds) != 1 or (kind := kinds.pop()) not in KINDS:
        raise AlignmentError(
            f"no group element is stored under the keys {sorted(tensors)}", remedy="write the file again"
        )
    return KINDS[kind].from_tensors({key.split(":", 1)[1]: tensor for key, tensor in tensors.items()})


def nested(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group ``{"a.b": t}`` by the word before the first dot: ``{"a": {"b": t}}``."""
    result: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        first, inner_key = key.split(".", 1)
        result.setdefault(first, {})[inner_key] = tensor
    return result


def mixes(element: GroupElement) -> bool:
    """Whether an element is more than a permutation with a rescaling: some coordinate becomes a sum of several."""
    if element.monomial or element.is_identity():
        return False
    eye = torch.eye(element.size, dtype=torch.float64)
    moved = element.act(eye.repeat(element.batch, 1, 1), 0, 1).abs()
    return bool(((moved > 1e-9 * moved.amax(-1, keepdim=True)).sum(-1) > 1).any())


LARGEST_ENTRY = 1e7
"""Largest norm of a map or its inverse; beyond, storage types lose too much precision."""


def is_order(index: Tensor) -> bool:
    """Whether each row of an index, (G, d), is a permutation of 0 to d - 1."""
    places = torch.arange(index.shape[-1], device=index.device)
    return bool((index.sort(-1).values == places).all())


def proven_maps(element: GroupElement) -> Tensor | None:
    """The matrices (G, d, d) of an element; None if its dual action is not their inverse transpose.

    Pairings would then change: an index that is no permutation, a map that is not orthogonal, a factor of zero.
    """
    eye = torch.eye(element.size, dtype=torch.float64).repeat(element.batch, 1, 1)
    try:
        primal, dual = element.act(eye, 0, 1), element.act(eye, 0, 1, dual=True)
    except (IndexError, RuntimeError):  # an index beyond the axis, shapes that do not fit
        return None
    off = (primal.mT @ dual - eye).abs().max()
    largest = torch.maximum(primal.abs().max(), dual.abs().max())
    return primal if bool(off <= 1e-6) and bool(largest <= LARGEST_ENTRY) else None


def act_by_matrices(matrices: Tensor, x: Tensor, batch_dim: int, dim: int) -> Tensor:
    """Multiply dimension `dim` of x by matrices (G, d, d), at least in float32; shape and dtype of x kept.

    The matrices are laid out anew: products of a transposed view and of a stored matrix differ in the last bit.
    """
    work = torch.promote_types(x.dtype, torch.float32)
    moved = x.movedim((batch_dim, dim), (0, 1))
    flat = moved.reshape(moved.shape[0], moved.shape[1], -1).to(work)
    result = torch.bmm(matrices.to(device=x.device, dtype=work).contiguous(), flat)
    return result.reshape(moved.shape).movedim((0, 1), (batch_dim, dim)).to(x.dtype)


def broadcast(values: Tensor, x: Tensor, batch_dim: int, dim: int) -> Tensor:
    """Values (G, d) shaped so that they multiply x along `batch_dim` and `dim`."""
    shape = [1] * x.ndim
    shape[batch_dim], shape[dim] = values.shape
    if batch_dim % x.ndim > dim % x.ndim:
        values = values.T
    return values.reshape(shape).to(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))


def gather(x: Tensor, index: Tensor, batch_dim: int, dim: int) -> Tensor:
    """``out[g, i] = x[g, index[g, i]]`` along `batch_dim` and `dim`, index (G, d)."""
    index = index.to(x.device)
    if index.shape[0] == 1:
        return x.index_select(dim, index[0])
    parts = [part.index_select(dim % x.ndim, row) for part, row in zip(x.split(1, batch_dim), index, strict=True)]
    return torch.cat(parts, dim=batch_dim)
