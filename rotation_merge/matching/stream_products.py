"""Norms and products of one tensor of both models along its streams, independent of the maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Axis, Space, TensorInfo
from rotation_merge.matching.matrix_pairs import axis_views
from rotation_merge.model.apply import at_least_float32, transform_tensor
from rotation_merge.symmetry import SpaceTransform

_ENTRIES = 1 << 22  # of a matrix widened at a time


@dataclass(frozen=True)
class Product:
    """The product along one axis.

    Attributes:
        stream, role, dim: the axis.
        product: A B^T over all other dimensions, (d, d), float64.
        sums: of a head that gives logits, the sums of the columns of A and of B, (d,) each.
        columns: of A.
    """

    stream: str
    role: str
    dim: int
    product: Tensor
    sums: tuple[Tensor, Tensor] | None
    columns: int

    def plus(self, addend: Product) -> Product:
        return replace(
            self,
            product=self.product + addend.product,
            sums=_added(self.sums, addend.sums),
            columns=self.columns + addend.columns,
        )

    def centred(self) -> Product:
        """The product of the columns less their mean."""
        if self.sums is None:
            return self
        return replace(self, product=self.product - torch.outer(*self.sums) / self.columns, sums=None)

    def to(self, device: torch.device) -> Product:
        sums = None if self.sums is None else (self.sums[0].to(device), self.sums[1].to(device))
        return replace(self, product=self.product.to(device), sums=sums)


@dataclass(frozen=True)
class TensorMeasurement:
    """Norms and products of a tensor, or of a slice of its vocabulary.

    Attributes:
        name: of the tensor.
        entries: how many it has.
        norm, donor_norm: squared norms of the anchor's and of the donor's.
        apart: their squared distance where no axis lives in a stream that moves; else 0.
        products: of the axes in streams that move.
        sums: of a head that gives logits, what its entries sum to over the vocabulary, in both models.
        rows: of the vocabulary.
    """

    name: str
    entries: int
    norm: float
    donor_norm: float
    apart: float
    products: tuple[Product, ...]
    sums: tuple[Tensor, Tensor] | None = None
    rows: int = 0

    def plus(self, addend: TensorMeasurement) -> TensorMeasurement:
        return replace(
            self,
            entries=self.entries + addend.entries,
            norm=self.norm + addend.norm,
            donor_norm=self.donor_norm + addend.donor_norm,
            apart=self.apart + addend.apart,
            products=tuple(a.plus(b) for a, b in zip(self.products, addend.products, strict=True)),
            sums=_added(self.sums, addend.sums),
            rows=self.rows + addend.rows,
        )

    def centred(self) -> TensorMeasurement:
        """The product of the rows less their mean."""
        if self.sums is None:
            return self
        shared = [float(x.square().sum()) / self.rows for x in self.sums]
        return replace(
            self,
            norm=max(self.norm - shared[0], 0.0),
            donor_norm=max(self.donor_norm - shared[1], 0.0) if self.products else self.donor_norm,
            products=tuple(product.centred() for product in self.products),
            sums=None,
        )

    def to(self, device: torch.device) -> TensorMeasurement:
        sums = None if self.sums is None else (self.sums[0].to(device), self.sums[1].to(device))
        return replace(self, products=tuple(product.to(device) for product in self.products), sums=sums)


def measured(
    info: TensorInfo, a: Tensor, b: Tensor, transforms: Mapping[str, SpaceTransform], precise: bool
) -> TensorMeasurement:
    """Measure a tensor, or a slice of its vocabulary.

    Args:
        a, b: the anchor's and the donor's.
        transforms: of local spaces, and of the streams that move; an axis in one of these is held still.
        precise: sum products in float64.
    """
    logits, products, donor_norm = _logits_axis(info), list[Product](), 0.0
    sums = None if logits is None else (_along(a, logits), _along(b, logits))
    for dim, axis in enumerate(info.axes):
        if not axis.parts or any(not _moves(part.space, transforms) for part in axis.parts):
            continue
        moved = transform_tensor(b, _without(info, dim), transforms)
        donor_norm = _square(moved)
        sums = sums if logits is None else (_along(a, logits), _along(moved, logits))
        for part, start, x, y in axis_views(a, moved, dim, axis):
            x, y = (tensor.movedim(start, 0).flatten(1) if tensor.ndim > 1 else tensor[:, None] for tensor in (x, y))
            shared = None if logits is None else (_sums(x), _sums(y).to(x.device))
            product = cross_product(x, y, precise)
            products.append(Product(part.space.name, part.role, dim, product, shared, x.shape[1]))
    apart = 0.0 if products else _square(a - transform_tensor(b, info, transforms))
    rows = 0 if logits is None else a.shape[logits]
    return TensorMeasurement(info.name, a.numel(), _square(a), donor_norm, apart, tuple(products), sums, rows)


def _added(first: tuple[Tensor, Tensor] | None, second: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if first is None or second is None else (first[0] + second[0], first[1] + second[1])


def _without(info: TensorInfo, dim: int) -> TensorInfo:
    """The tensor without one axis and without row shifts."""
    return dataclasses.replace(info, axes=(*info.axes[:dim], Axis(), *info.axes[dim + 1 :]), common=None)


def _chunks(x: Tensor, entries: int = _ENTRIES) -> Iterator[Tensor]:
    """The columns of a matrix in chunks of limited size, widened to float32 at least."""
    step = max(1, entries // max(1, x.shape[0]))
    for piece in x.split(step, dim=1):
        yield at_least_float32(piece)


def _logits_axis(info: TensorInfo) -> int | None:
    """The vocabulary's axis in a head that reads a stream, the experts' in a router; None in other tensors."""
    if info.common is not None:
        return 0
    reads = any(part.space.kind == "stream" and part.role == "read" for axis in info.axes for part in axis.parts)
    return info.vocabulary_axis if reads else None


def cross_product(a: Tensor, b: Tensor, precise: bool) -> Tensor:
    """A B^T of matrices of as many columns, (d, d), float64 (unless `precise`, summed in float32 inside a chunk)."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y in zip(_chunks(a), _chunks(b), strict=True):
        dtype = torch.float64 if precise else torch.promote_types(x.dtype, y.dtype)
        total += x.to(dtype) @ y.to(a.device, dtype).T
    return total


def _along(x: Tensor, dim: int) -> Tensor:
    """Sums over all dimensions but one, float64, flat."""
    return _sums(x.movedim(dim, -1).reshape(-1, x.shape[dim]))


def _sums(x: Tensor) -> Tensor:
    """Sum of a matrix's columns, float64."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for piece in _chunks(x, _ENTRIES >> 3):
        total += piece.sum(1, dtype=torch.float64)
    return total


def _square(x: Tensor) -> float:
    """Squared norm."""
    flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    return sum(float(piece.square().sum(dtype=torch.float64)) for piece in _chunks(flat))


def _moves(space: Space, transforms: Mapping[str, SpaceTransform]) -> bool:
    return space.kind == "stream" and space.name in transforms
