"""Second-order statistics of anchor and donor heads, summed block by block from the stored tensors.

Blocks are widened to float32 (float64 for float64 tensors) and their sums kept in float64, so that no copy of a whole
tensor is made. What is summed depends on the group that acts inside the heads: all products of two coordinates
(`full`), one complex number for each RoPE pair (`pairs`), or one number for each coordinate (`coordinates`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotation_merge.symmetry.planar import pair_dims

_BLOCK = 1 << 20
"""Entries of a tensor that are widened at a time for products of all heads with all."""

_CACHED = 1 << 17
"""The same for sums that look at each entry once or twice, so that they stay in the processor's cache."""


class HeadProjections:
    """One side of an in-head space: the same rows of one or more tensors, by KV group and head.

    Attributes:
        pairs: (anchor, donor), each of shape (G, r, d, m) with one G, r, d; r is 1 for keys and values.
        statistic: full, pairs or coordinates.
        interleaved: layout of RoPE pairs, for `pairs`.
        device: of the sums, where there are no pairs; else that of the anchor's tensors.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        shape: tuple[int, int, int],
        statistic: str,
        interleaved: bool,
        device: torch.device | None = None,
    ) -> None:
        self.pairs, self.shape, self.statistic, self.interleaved = list(pairs), shape, statistic, interleaved
        self.device = self.pairs[0][0].device if self.pairs else device

    def narrow(self, dims: slice, statistic: str) -> HeadProjections:
        """Projections of a slice of the coordinates."""
        groups, per_group, _ = self.shape
        pairs = [(a[:, :, dims], b[:, :, dims]) for a, b in self.pairs]
        shape = (groups, per_group, dims.stop - dims.start)
        return HeadProjections(pairs, shape, statistic, self.interleaved, self.device)

    @property
    def exact(self) -> bool:
        """Whether sums are over float64 values."""
        return all(torch.float64 in (a.dtype, b.dtype) for a, b in self.pairs)

    @property
    def anchor_norms(self) -> Tensor:
        """Squared norms (G, r, d)."""
        return self._unmoved[0]

    @property
    def donor_norms(self) -> Tensor:
        """Squared norms (G, r, d)."""
        return self._unmoved[1]

    @cached_property
    def _unmoved(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Squared norms of both models, squared distances and statistics in the donor's own order, in one pass."""
        anchor, donor, apart = self._zeros(self.shape), self._zeros(self.shape), self._zeros(self.shape[:1])
        products = self._zeros((self.shape[0], *self._statistic_shape()), self.statistic == "pairs")
        for pair in self.pairs:
            for part, (x, y) in _blocks(*pair):
                anchor[part] += (x * x).sum(-1)
                donor[part] += (y * y).sum(-1)
                apart[part] += _apart(x, y)
                products[part] += self._summed(x, y)
        return anchor, donor, apart, products

    def _zeros(self, shape: tuple[int, ...], complex_: bool = False) -> Tensor:
        return torch.zeros(shape, dtype=torch.complex128 if complex_ else torch.float64, device=self.device)

    def distance(self, order: Order | None = None) -> Tensor:
        """Squared distance of the pairs of groups in `order` (None: the donor's own order), (N,)."""
        if order is None:
            return self._unmoved[2]
        total = self._zeros((len(order.anchor),))
        for picked in self._picked(order):
            for part, (x, y) in _blocks(*picked):
                total[part] += _apart(x, y)
        return total

    def _picked(self, order: Order) -> Iterator[tuple[Tensor, Tensor]]:
        for a, b in self.pairs:
            yield a[order.anchor.to(a.device)], order.moved(b)

    def products(self, order: Order | None = None) -> Tensor:
        """Statistics of the N pairs in `order`, shape (N, *S): S is (d, d), (d/2,) or (d,)."""
        if order is None:
            return self._unmoved[3]
        total = self._zeros((len(order.anchor), *self._statistic_shape()), self.statistic == "pairs")
        for picked in self._picked(order):
            for part, (x, y) in _blocks(*picked):
                total[part] += self._summed(x, y)
        return total

    def _statistic_shape(self) -> tuple[int, ...]:
        d = self.shape[2]
        return {"full": (d, d), "pairs": (d // 2,), "coordinates": (d,)}[self.statistic]

    def _summed(self, x: Tensor, y: Tensor) -> Tensor:
        if self.statistic == "full":
            n, r, d, m = x.shape
            flat = torch.bmm(x.reshape(n * r, d, m), y.reshape(n * r, d, m).mT)
            return flat.reshape(n, r, d, d).sum(1, dtype=torch.float64)
        if self.statistic == "coordinates":
            return (x * y).sum(-1).sum(1, dtype=torch.float64)
        first, second = pair_dims(x.shape[2], self.interleaved)
        squares = (x * y).sum(-1).sum(1, dtype=torch.float64)
        turned = (x[:, :, second] * y[:, :, first]).sum(-1) - (x[:, :, first] * y[:, :, second]).sum(-1)
        return torch.complex(squares[:, first] + squares[:, second], turned.sum(1, dtype=torch.float64))

    def all_products(self) -> Tensor:
        """Statistics of all pairs of heads, shape (G, r, G, r, *S); for `full` only where that is small."""
        groups, per_group, d = self.shape
        heads = groups * per_group
        rows = 2 * heads if self.statistic == "pairs" else heads
        batch = d // 2 if self.statistic == "pairs" else d
        total = self._zeros((batch, rows, rows))
        for a, b in self.pairs:
            step = max(1, _BLOCK // (heads * d))
            for start in range(0, a.shape[-1], step):
                x, y = (self._by_coordinate(t[..., start : start + step]) for t in _widened(a, b))
                total += torch.bmm(x, y.mT)
        if self.statistic == "pairs":
            n = heads
            real = total[:, :n, :n] + total[:, n:, n:]
            total = torch.complex(real, total[:, n:, :n] - total[:, :n, n:])
        return total.permute(1, 2, 0).reshape(groups, per_group, groups, per_group, batch)

    def product_norms(self) -> Tensor:
        """Frobenius norms of the `full` products of all pairs of groups of one head each, (G, G)."""
        groups = self.shape[0]
        result = self._zeros((groups, groups))
        for i in range(groups):
            total: Tensor | None = None
            for a, b in self.pairs:
                x, y = _widened(a[i, 0], b[:, 0])
                product = torch.matmul(x, y.mT)
                total = product if total is None else total.add_(product)
            if total is not None:
                result[i] = torch.linalg.vector_norm(total.double(), dim=(1, 2))
        return result

    def _by_coordinate(self, x: Tensor) -> Tensor:
        """(G, r, d, m) as (d, heads, m), or (d/2, 2 heads, m) with first and second coordinates stacked."""
        flat = x.flatten(0, 1).movedim(1, 0)
        if self.statistic == "coordinates":
            return flat
        first, second = pair_dims(flat.shape[0], self.interleaved)
        return torch.cat([flat[first], flat[second]], dim=1)

    def table_bytes(self) -> int:
        """Bytes of `head_products` for all pairs of groups."""
        return 8 * math.prod(self.shape) ** 2

    def head_products(self, anchor: Tensor, donor: Tensor) -> Tensor:
        """Products of every pair of heads for N pairs of groups with `full` statistics, (N, r, r, d, d)."""
        _, r, d = self.shape
        total = self._zeros((len(anchor), r, r, d, d))
        for a, b in self.pairs:
            for n, (i, j) in enumerate(zip(anchor.tolist(), donor.tolist(), strict=True)):
                x, y = (t.flatten(0, 1) for t in _widened(a[i], b[j]))
                total[n] += (x @ y.T).reshape(r, d, r, d).movedim(2, 1)
        return total


@dataclass(frozen=True)
class Order:
    """N pairs of KV groups, with the order of the query heads inside each.

    Attributes:
        anchor, donor: group indices, int64 (N,).
        queries: int64 (N, r): head a of the anchor's group meets head queries[:, a] of the donor's.
    """

    anchor: Tensor
    donor: Tensor
    queries: Tensor

    def is_own(self, groups: int) -> bool:
        """Whether the order is complete and changes nothing."""
        rows = torch.arange(groups)
        at_home = all(x.shape == rows.shape and bool((x.cpu() == rows).all()) for x in (self.anchor, self.donor))
        return at_home and bool((self.queries.cpu() == torch.arange(self.queries.shape[1])).all())

    def moved(self, x: Tensor) -> Tensor:
        """The donor's entries (G, r or 1, ...) in the anchor's order, (N, r or 1, ...)."""
        donor = self.donor.to(x.device)
        if x.shape[1] == 1:
            return x[donor]
        return x[donor[:, None], self.queries.to(x.device)]


def _apart(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances of heads (N, r, d, m), (N,)."""
    return (x - y).square_().sum(-1).sum((1, 2), dtype=torch.float64)


def _widened(*tensors: Tensor) -> list[Tensor]:
    double = any(x.dtype == torch.float64 for x in tensors)
    device = tensors[0].device
    return [x.to(device=device, dtype=torch.float64 if double else torch.float32) for x in tensors]


def _blocks(*tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Blocks of equal shape of the tensors (N, r, d, m), widened, and the slice of the first dimension they cover."""
    n, columns = tensors[0].shape[0], tensors[0].shape[-1]
    row = tensors[0][0].numel() if n else 0
    if tensors[0].stride(-1) == 1 or columns == 1:
        step = max(1, _CACHED // max(1, row))
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            yield part, _widened(*(x[part] for x in tensors))
        return
    step = max(16, _CACHED * columns // max(1, n * row))
    for start in range(0, columns, step):
        yield slice(0, n), _widened(*(x[..., start : start + step] for x in tensors))
