r"""Matching a residual stream: one element for the whole model, from every axis that lives in the stream.

With the local spaces held fixed, the best element maximises <R, sum_k w_k A_k B_k^T> over all tensors k that touch the
stream: an assignment for permutations (on absolute values for signed ones, the sign read off afterwards), Procrustes
for rotations; with LayerNorm, Procrustes in the complement of the all-ones vector, which every rotation has to fix.

The objective is sum_k n_k log(|A_k - R B_k|^2 / |A_k|^2 + FLOOR), n_k the number of entries: the likelihood of a donor
with noise of a separate, unknown strength in each tensor. It is invariant under rescaling of single tensors, so large
matrices do not dominate. The weights w_k = n_k / (|A_k - R B_k|^2 + FLOOR |A_k|^2) of one pass bound it from above (the
logarithm is concave), so it never rises.

The rows of an output head over a vocabulary are centred first: softmax ignores a common part of all logits, and in
trained models that one direction has most of the head's norm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, TensorInfo
from rotation_merge.errors import AlignmentError, RecipeError, nearest
from rotation_merge.matching.matrix_pairs import Tensors, axis_views
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import at_least_float32, transform_tensor
from rotation_merge.symmetry import Linear, Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted, by_stream

FLOOR = 1e-2
"""Relative squared distance below which a tensor's agreement no longer raises its weight."""

CHUNK = 1 << 22
"""Entries of a matrix that are widened at a time."""

Transforms = dict[str, Transform]
"""Transforms by the name of their space."""


@dataclass(frozen=True)
class Product:
    """The product along one axis that lives in a stream which moves.

    Attributes:
        stream, role, dim: the axis.
        matrix: A B^T over all other dimensions, (d, d), float64.
    """

    stream: str
    role: str
    dim: int
    matrix: Tensor


@dataclass(frozen=True)
class StreamMeasurement:
    """What one tensor (or a slice of its vocabulary) says of the streams, whatever their maps are.

    Attributes:
        name: of the tensor.
        entries: how many it has.
        norm, donor_norm: squared norms of the anchor's and of the donor's.
        apart: their squared distance where no axis lives in a stream that moves; else 0.
        products: of the axes in streams that move.
    """

    name: str
    entries: int
    norm: float
    donor_norm: float
    apart: float
    products: tuple[Product, ...]

    @classmethod
    def of(
        cls, info: TensorInfo, a: Tensor, b: Tensor, transforms: Mapping[str, Transform], precise: bool
    ) -> StreamMeasurement:
        """Measure a tensor of the anchor, a, and of the donor, b.

        Args:
            transforms: of local spaces, and of the streams that move; an axis in one of these is held still.
            precise: sum products in float64, for tensors that nearly agree.
        """
        products, donor_norm = list[Product](), 0.0
        for dim, axis in enumerate(info.axes):
            if not axis.parts or any(p.space.kind != "stream" or p.space.name not in transforms for p in axis.parts):
                continue
            moved = transform_tensor(b, _without(info, dim), transforms)
            donor_norm = _square(moved)
            for part, start, x, y in axis_views(a, moved, dim, axis):
                x, y = (t.movedim(start, 0).flatten(1) if t.ndim > 1 else t[:, None] for t in (x, y))
                products.append(Product(part.space.name, part.role, dim, cross_product(x, y, precise)))
        apart = 0.0 if products else _square(a - transform_tensor(b, info, transforms))
        return cls(info.name, a.numel(), _square(a), donor_norm, apart, tuple(products))

    def plus(self, other: StreamMeasurement) -> StreamMeasurement:
        """That of both slices."""
        pairs = zip(self.products, other.products, strict=True)
        return replace(
            self,
            entries=self.entries + other.entries,
            norm=self.norm + other.norm,
            donor_norm=self.donor_norm + other.donor_norm,
            apart=self.apart + other.apart,
            products=tuple(replace(a, matrix=a.matrix + b.matrix) for a, b in pairs),
        )

    def to(self, device: torch.device) -> StreamMeasurement:
        """The same, its products on a device."""
        products = tuple(replace(product, matrix=product.matrix.to(device)) for product in self.products)
        return replace(self, products=products)


@dataclass
class StreamSums:
    """Sums over tensors of both models for solving the streams.

    Attributes:
        equal: give every tensor the same say, 1 / |A| |B|, in the products: for a start, when nothing is known of
            how well each of them agrees.
        products: by stream, sum of w A B^T over the axes on which the donor's signs count, (d, d), float64.
        gains: the same over norm gains and layer scales, which follow a permutation but not its signs.
        weights: of every tensor seen, by name; they belong to the next pass.
        apart, logs, overlap, entries: what the objective, its bound and the promise of a step are made of.
    """

    equal: bool = False
    products: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    logs: float = 0.0
    overlap: float = 0.0
    entries: int = 0

    @property
    def objective(self) -> float:
        """Geometric mean over entries of tensors in moving streams of their relative squared distance, plus `FLOOR`."""
        return math.exp(self.logs / self.entries) if self.entries else 0.0

    def bound(self, transforms: Mapping[str, Transform]) -> float:
        """Upper bound on the objective under other maps of the streams, with local spaces held fixed.

        It uses the tangent of the logarithm, and equals the objective under the maps used for counting.
        """
        logs = self.logs - 2 * (self._overlapping(transforms) - self.overlap)
        return math.exp(logs / self.entries) if self.entries else 0.0

    @classmethod
    def of(cls, parts: Iterable[StreamSums]) -> StreamSums:
        """The sums of several blocks."""
        total = cls()
        for part in parts:
            for totals, addends in ((total.products, part.products), (total.gains, part.gains)):
                for stream, matrix in addends.items():
                    totals[stream] = totals[stream].add_(matrix) if stream in totals else matrix.clone()
            total.weights.update(part.weights)
            for name in ("apart", "logs", "overlap", "entries"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    def to(self, device: torch.device) -> StreamSums:
        """The same, its products on a device."""
        products, gains = ({name: x.to(device) for name, x in sums.items()} for sums in (self.products, self.gains))
        return replace(self, products=products, gains=gains)

    def count(self, tensor: StreamMeasurement, transforms: Mapping[str, Transform]) -> None:
        """Add one tensor under the streams' transforms.

        Raises:
            AlignmentError: it holds NaN or infinity.
        """
        overlaps = [(p, overlap(transforms[p.stream], p.matrix, p.role)) for p in tensor.products]
        still = all(p.role == "gain" and transforms[p.stream].turns_stream for p in tensor.products)
        if tensor.norm == 0 or (tensor.products and still):
            return
        last = tensor.products[-1].dim if tensor.products else 0
        whole = tensor.norm + tensor.donor_norm - 2 * sum(value for p, value in overlaps if p.dim == last)
        distance = whole if tensor.products else tensor.apart
        if not math.isfinite(distance):
            raise AlignmentError(
                f"tensor '{tensor.name}' of the anchor or the donor holds NaN or infinity",
                remedy="repair or replace the checkpoint",
            )
        lifted = max(distance, 0.0) + FLOOR * tensor.norm
        weight = (tensor.norm * tensor.donor_norm or math.inf) ** -0.5 if self.equal else tensor.entries / lifted
        self.weights[tensor.name] = weight
        if not tensor.products:
            return  # says nothing of the streams, but how much its local spaces agree
        self.logs += tensor.entries * math.log(lifted / tensor.norm)
        self.entries += tensor.entries
        self.apart += weight * max(distance, 0.0)
        for product, value in overlaps:
            self.overlap += weight * value
            sums = self.gains if product.role == "gain" else self.products
            if product.stream in sums:
                sums[product.stream].add_(product.matrix, alpha=weight)
            else:
                sums[product.stream] = product.matrix * weight

    def solve(self, architecture: Architecture, groups: Mapping[str, str], current: Transforms) -> Transforms:
        """The best element of each stream's group; the current one of a stream of which nothing is known."""
        return {name: self._solved(architecture, name, group) or current[name] for name, group in groups.items()}

    def _solved(self, architecture: Architecture, stream: str, group: str) -> Transform | None:
        if stream not in self.products and stream not in self.gains:
            return None
        free = architecture.stream_group(stream, group).groups["map"][0]
        size = architecture.streams[stream].sizes["size"]
        nothing = torch.zeros(size, size, dtype=torch.float64)
        products, gains = (x.get(stream, nothing)[None] for x in (self.products, self.gains))
        stats = Stats.of_products(products, gains.to(products.device))
        return Transform("stream", {"map": free.solve(stats)})

    def promise(self, current: Mapping[str, Transform], solved: Mapping[str, Transform]) -> float:
        """Share of the weighted squared distance that better stream elements would remove."""
        gained = 2 * (self._overlapping(solved) - self._overlapping(current))
        return gained / self.apart if self.apart else 0.0

    def _overlapping(self, transforms: Mapping[str, Transform]) -> float:
        """The sum of <R, w A B^T>."""
        parts = ((self.products, "read"), (self.gains, "gain"))
        return sum(overlap(transforms[s], x, role) for sums, role in parts for s, x in sums.items())


def overlap(transform: Transform, product: Tensor, role: str) -> float:
    """<R, M> of a stream's element R for products M = A B^T (d, d) of axes of this role."""
    element = transform.elements["map"]
    if isinstance(element, Linear):
        return float(product.trace() if role == "gain" else (element.matrix[0].to(product) * product).sum())
    assert isinstance(element, Monomial)
    picked = product.gather(1, element.index[0].to(product.device)[:, None])[:, 0]
    return float((picked if role == "gain" else picked * element.factor[0].to(picked)).sum())


Piece = tuple[Block, Callable[[], tuple[Tensors, Tensors]]]
"""Tensors of a block, or rows of one, and what reads those of both models."""


def piece(block: Block, anchor: Tensors, donor: Tensors) -> Piece:
    """Tensors that are in memory."""
    return block, lambda: (anchor, donor)


def measured(
    pieces: Sequence[Piece], transforms: Mapping[str, Transform], precise: bool = False
) -> Iterator[StreamMeasurement]:
    """What each tensor says of the streams; arguments as of `StreamMeasurement.of`.

    Rows of heads and routers are centred. Slices of one tensor follow each other.
    """
    for _, slices in groupby(_slices_measured(pieces, transforms, precise), key=lambda measurement: measurement.name):
        yield reduce(StreamMeasurement.plus, slices)


def _slices_measured(
    pieces: Sequence[Piece], transforms: Mapping[str, Transform], precise: bool
) -> Iterator[StreamMeasurement]:
    means = _mean_logits(pieces)
    for part, read in pieces:
        for info, a, b in _compared(part, *read()):
            if info.key in means:
                a, b = (at_least_float32(x) - mean for x, mean in zip((a, b), means[info.key], strict=True))
            yield StreamMeasurement.of(info, a, b, transforms, precise)


def _mean_logits(pieces: Sequence[Piece]) -> dict[str, tuple[Tensor, Tensor]]:
    """The mean row of each head and router, of both models, by key."""
    rows, sums = Counter[str](), dict[str, tuple[Tensor, Tensor]]()
    for part, read in pieces:
        axes = {info.key: axis for info in part.tensors if (axis := _logits_axis(info)) is not None}
        for info, a, b in _compared(part, *read()) if axes else ():
            if (axis := axes.get(info.key)) is not None:
                rows[info.key] += a.shape[axis]
                added = _summed(a, axis), _summed(b, axis)
                known = sums.get(info.key)
                sums[info.key] = added if known is None else (added[0] + known[0], added[1] + known[1])
    return {key: (a / rows[key], b / rows[key]) for key, (a, b) in sums.items()}


def _summed(x: Tensor, axis: int) -> Tensor:
    return x.sum(axis, keepdim=True, dtype=torch.float64).to(torch.promote_types(x.dtype, torch.float32))


def _compared(block: Block, anchor: Tensors, donor: Tensors) -> Iterator[tuple[TensorInfo, Tensor, Tensor]]:
    """The tensors with one shape in both models."""
    for info in block.tensors:
        a, b = anchor.get(info.key), donor.get(info.key)
        if a is not None and b is not None and a.is_floating_point() and a.shape == b.shape:
            yield info, a, b


def _without(info: TensorInfo, dim: int) -> TensorInfo:
    """The tensor without one axis and without row shifts."""
    return replace(info, axes=(*info.axes[:dim], Axis(), *info.axes[dim + 1 :]), common=None)


def _logits_axis(info: TensorInfo) -> int | None:
    """The vocabulary's axis in a head that reads a stream, the experts' in a router; None in other tensors."""
    if info.common is not None:
        return 0
    reads = any(part.space.kind == "stream" and part.role == "read" for axis in info.axes for part in axis.parts)
    return info.vocabulary_axis if reads else None


def _chunks(x: Tensor, entries: int = CHUNK) -> Iterator[Tensor]:
    """The columns of a matrix in chunks of limited size, widened to float32 at least."""
    for piece in x.split(max(1, entries // max(1, x.shape[0])), dim=1):
        yield at_least_float32(piece)


def cross_product(a: Tensor, b: Tensor, precise: bool) -> Tensor:
    """A B^T of matrices of as many columns, (d, d), float64 (unless `precise`, summed in float32 inside a chunk)."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y in zip(_chunks(a), _chunks(b), strict=True):
        dtype = torch.float64 if precise else torch.promote_types(x.dtype, y.dtype)
        total += x.to(dtype) @ y.to(a.device, dtype).T
    return total


def _square(x: Tensor) -> float:
    """Squared norm."""
    flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    return sum(float(piece.square().sum(dtype=torch.float64)) for piece in _chunks(flat))


def residual_groups(architecture: Architecture, residual: str, model: str = "the model") -> dict[str, str]:
    """The group of each residual stream that moves.

    Args:
        residual: a group for all streams, `largest` (each stream's own), or groups by stream (`options.by_stream`).

    Raises:
        RecipeError: a stream is not there, or does not admit its group; says why, and the largest that it admits.
    """
    if residual == "none":
        return {}
    if not architecture.streams:
        raise RecipeError(
            f"'residual: {residual}': the {architecture.family} architecture has no stream to move", where=model
        )
    choices = by_stream(residual) or dict.fromkeys(architecture.streams, residual)
    for name, group in choices.items():
        if name not in architecture.streams:
            raise RecipeError(
                f"'residual: {residual}': there is no stream '{name}'",
                where=model,
                remedy=nearest(name, architecture.streams),
            )
        if group not in ("largest", *architecture.stream_groups[name]):
            out = architecture.handed_out.get(name)
            why = f", which this model gives out as '{out}'" if out else ""
            raise RecipeError(
                f"'residual: {group}' is not a symmetry of the {architecture.family} architecture "
                f"(stream '{name}'{why})",
                where=model,
                remedy=_smaller(architecture, choices),
            )
    groups = {name: architecture.stream_groups[name][-1] if g == "largest" else g for name, g in choices.items()}
    return {name: group for name, group in groups.items() if group != "none"}


def _smaller(architecture: Architecture, choices: Mapping[str, str]) -> str:
    """The remedy of an error: the largest groups that the model admits."""
    largest = {name: architecture.stream_groups[name][-1] for name in choices if name in architecture.streams}
    if len(set(largest.values())) == 1:
        return f"the largest it admits is 'residual: {next(iter(largest.values()))}'"
    return f"the largest it admits is 'residual: {','.join(f'{name}={group}' for name, group in largest.items())}'"


def space_groups(architecture: Architecture, options: AlignConfig) -> dict[str, SpaceGroup]:
    """The group of every space that `options` match, by space name.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
    """
    result: dict[str, SpaceGroup] = {}
    for block in architecture.blocks:
        if options.matches_layer(block.index):
            for space in block.spaces.values():
                result[space.name] = admitted(space, options)
    for name, group in residual_groups(architecture, options.residual).items():
        result[name] = architecture.stream_group(name, group)
    return result


def random_gauge(architecture: Architecture, options: AlignConfig, generator: torch.Generator) -> dict[str, Transform]:
    """A random transform of every space that `options` match, by space name.

    Applied to a model (`moved_tensors`) it gives other weights with the same outputs; a `residual: rotation` needs a
    folded model.
    """
    return {name: group.random(generator) for name, group in space_groups(architecture, options).items()}
