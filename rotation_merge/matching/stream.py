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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import groupby

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, TensorInfo
from rotation_merge.errors import RecipeError, nearest
from rotation_merge.matching.matrix_pairs import axis_views
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import at_least_float32, transform_tensor
from rotation_merge.symmetry import Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted
from rotation_merge.symmetry.options import by_stream

FLOOR = 1e-2
"""Relative squared distance below which a tensor's agreement no longer raises its weight."""

CHUNK = 1 << 22
"""Entries of a matrix that are widened at a time."""

Transforms = dict[str, Transform]
"""Transforms by the name of their space."""

Piece = tuple[Block, dict[str, Tensor], dict[str, Tensor]]
"""Tensors of a block, or a slice of one, and those of anchor and donor by key."""


Products = dict[tuple[str, bool], Tensor]
"""Products A B^T, (d, d), float64, by the stream, and whether they are of norm gains and layer scales, which follow an
order, but no signs."""


@dataclass(frozen=True)
class StreamMeasurement:
    """What one tensor says of the streams, whatever their maps are.

    Attributes:
        name: of the tensor.
        entries: how many it has.
        norm, donor_norm: squared norms of the anchor's and of the donor's.
        apart: their squared distance where no axis lives in a stream that moves; else 0.
        products: along each axis that lives in streams that move, over all other dimensions.
    """

    name: str
    entries: int
    norm: float
    donor_norm: float
    apart: float
    products: tuple[Products, ...]

    @classmethod
    def of(
        cls, info: TensorInfo, a: Tensor, b: Tensor, transforms: Mapping[str, Transform], precise: bool
    ) -> StreamMeasurement:
        """Measure a tensor of the anchor, a, and of the donor, b.

        Args:
            transforms: of local spaces, and of the streams that move; an axis in one of these is held still.
            precise: multiply in float64, for models that nearly agree.
        """
        products, donor_norm = list[Products](), 0.0
        for dim, axis in enumerate(info.axes):
            if not axis.parts or any(p.space.kind != "stream" or p.space.name not in transforms for p in axis.parts):
                continue
            without = replace(info, axes=(*info.axes[:dim], Axis(), *info.axes[dim + 1 :]), common=None)
            moved = transform_tensor(b, without, transforms)
            donor_norm = _square(moved, precise)
            products.append({})
            for part, start, x, y in axis_views(a, moved, dim, axis):
                x, y = (t.movedim(start, 0).flatten(1) if t.ndim > 1 else t[:, None] for t in (x, y))
                key, product, along = (part.space.name, part.role == "gain"), cross_product(x, y, precise), products[-1]
                along[key] = along[key] + product if key in along else product
        apart = 0.0 if products else _square(a - transform_tensor(b, info, transforms), precise)
        return cls(info.name, a.numel(), _square(a, precise), donor_norm, apart, tuple(products))

    def to(self, device: str | None) -> StreamMeasurement:
        """The same, its products on a device; None: where they are."""
        moved = ({key: matrix.to(device=device) for key, matrix in along.items()} for along in self.products)
        return replace(self, products=tuple(moved))

    def plus(self, piece: StreamMeasurement) -> StreamMeasurement:
        """That of this slice of a tensor and of a further one."""
        figures = ("entries", "norm", "donor_norm", "apart")
        sums = {name: getattr(self, name) + getattr(piece, name) for name in figures}
        pairs = zip(self.products, piece.products, strict=True)
        return replace(self, **sums, products=tuple({key: x[key] + y[key] for key in x} for x, y in pairs))

    def distance(self, transforms: Mapping[str, Transform]) -> float:
        """The squared distance under the streams' transforms; along each of its axes it is the same."""
        if not self.products:
            return self.apart
        return max(self.norm + self.donor_norm - 2 * overlap(transforms, self.products[0]), 0.0)


def measured(
    pieces: Iterable[Piece], transforms: Mapping[str, Transform], precise: bool = False
) -> Iterator[StreamMeasurement]:
    """What each tensor that both models have in one shape says of the streams, rows of heads and routers centred.

    Args:
        pieces: read when they are asked for; slices of one tensor follow each other.
        transforms, precise: as of `StreamMeasurement.of`.
    """
    present = (
        (info, anchor[info.key], donor[info.key])
        for block, anchor, donor in pieces
        for info in block.tensors
        if info.key in anchor and info.key in donor and anchor[info.key].is_floating_point()
    )
    alike = ((info, a, b) for info, a, b in present if a.shape == b.shape)
    for _, slices in groupby(alike, key=lambda piece: piece[0].key):
        parts = (
            replace(StreamMeasurement.of(info, a, b, transforms, precise), entries=entries)
            for info, entries, a, b in _centred(slices)
        )
        yield reduce(StreamMeasurement.plus, parts)


def _centred(
    slices: Iterable[tuple[TensorInfo, Tensor, Tensor]],
) -> Iterator[tuple[TensorInfo, int, Tensor, Tensor]]:
    """Slices of a tensor, with their numbers of entries; of a head or router about the mean of all rows.

    Each has its rows about their own mean, and one more: sqrt(m n / (m + n)) times how far that is from the mean of the
    m rows before. Products of such slices add up to those about the common mean (Chan, Golub & LeVeque 1979).
    """
    before, means = 0, [torch.zeros(1), torch.zeros(1)]
    for info, *pair in slices:
        reads = any(part.space.kind == "stream" and part.role == "read" for axis in info.axes for part in axis.parts)
        axis, entries = 0 if info.common is not None else info.vocabulary_axis if reads else None, pair[0].numel()
        if axis is not None:
            rows, pair = pair[0].shape[axis], [at_least_float32(x) for x in pair]
            added = [x.mean(axis, keepdim=True, dtype=torch.float64) for x in pair]
            pair = [x - mean.to(x) for x, mean in zip(pair, added, strict=True)]
            steps = [mean - known.to(mean) for mean, known in zip(added, means, strict=True)]
            if before:
                root = (before * rows / (before + rows)) ** 0.5
                pair = [torch.cat([x, (root * step).to(x)], axis) for x, step in zip(pair, steps, strict=True)]
            before += rows
            means = [mean - step * (1 - rows / before) for mean, step in zip(added, steps, strict=True)]
        yield info, entries, pair[0], pair[1]


@dataclass
class StreamSums:
    """Sums over tensors of both models for solving the streams.

    Attributes:
        products: sums of w A B^T.
        weights: of every tensor seen, by name; they belong to the next pass.
        apart, logs, entries: what the bound of the objective and the promise of a step are made of.
    """

    products: Products = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    apart: float = 0.0
    logs: float = 0.0
    entries: int = 0

    @classmethod
    def of(
        cls, measurements: Iterable[StreamMeasurement], transforms: Mapping[str, Transform], equal: bool = False
    ) -> StreamSums:
        """The sums over tensors under the streams' transforms.

        Args:
            equal: give every tensor the same say, 1 / |A| |B|, in the products: for a start, when nothing is known of
                how well each of them agrees.
        """
        sums = cls()
        for measurement in measurements:
            sums._count(measurement, transforms, equal)
        return sums

    def _count(self, tensor: StreamMeasurement, transforms: Mapping[str, Transform], equal: bool) -> None:
        folded = all(gain and transforms[stream].turns_stream for along in tensor.products for stream, gain in along)
        if tensor.norm == 0 or (tensor.products and folded):
            return
        distance = tensor.distance(transforms)
        lifted = distance + FLOOR * tensor.norm
        weight = (tensor.norm * tensor.donor_norm or math.inf) ** -0.5 if equal else tensor.entries / lifted
        self.weights[tensor.name] = weight
        if not tensor.products:
            return  # says nothing of the streams, but how much its local spaces agree
        self.logs += tensor.entries * math.log(lifted / tensor.norm)
        self.entries += tensor.entries
        self.apart += weight * distance
        for along in tensor.products:
            self.logs += 2 * weight * overlap(transforms, along)
            add(self.products, along, weight)

    @classmethod
    def total(cls, parts: Iterable[StreamSums]) -> StreamSums:
        """The sums of several blocks."""
        total = cls()
        for part in parts:
            add(total.products, part.products)
            total.weights.update(part.weights)
            for name in ("apart", "logs", "entries"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    def bound(self, transforms: Mapping[str, Transform]) -> float:
        """Upper bound on the objective under some maps of the streams, with local spaces held fixed.

        The objective is the geometric mean over entries of tensors in moving streams of their relative squared
        distance, plus `FLOOR`. The bound uses the tangent of the logarithm, and is the objective itself under the maps
        used for counting.
        """
        return math.exp((self.logs - 2 * overlap(transforms, self.products)) / self.entries) if self.entries else 0.0

    def promise(self, current: Mapping[str, Transform], solved: Mapping[str, Transform]) -> float:
        """Share of the weighted squared distance that better stream elements would remove."""
        gained = 2 * (overlap(solved, self.products) - overlap(current, self.products))
        return gained / self.apart if self.apart else 0.0

    def solve(self, architecture: Architecture, groups: Mapping[str, str], current: Transforms) -> Transforms:
        """The best element of each stream's group; the current one of a stream of which nothing is known."""
        solved = dict(current)
        for name in {stream for stream, _ in self.products} & groups.keys():
            free, _, size = architecture.stream_group(name, groups[name]).groups["map"]
            nothing = torch.zeros(size, size, dtype=torch.float64)
            products, gains = (self.products.get((name, gain), nothing)[None] for gain in (False, True))
            stats = Stats.of_products(products, gains.to(products.device))
            solved[name] = Transform("stream", {"map": free.solve(stats)})
        return solved


def add(total: Products, products: Products, weight: float = 1.0) -> None:
    """Add products, times a weight, to those that are summed."""
    for key, matrix in products.items():
        if key in total:
            total[key].add_(matrix.to(total[key].device), alpha=weight)
        else:
            total[key] = matrix * weight


def overlap(transforms: Mapping[str, Transform], products: Products) -> float:
    """The sum of <R, M> over products M and the elements R of their streams."""
    total = 0.0
    for (stream, gain), product in products.items():
        element = transforms[stream].elements["map"]
        if isinstance(element, Monomial):
            picked = product.gather(1, element.index[0].to(product.device)[:, None])[:, 0]
            total += float((picked if gain else picked * element.factor[0].to(picked)).sum())
        else:
            total += float(product.trace() if gain else (element.matrix[0].to(product) * product).sum())
    return total


def _chunks(x: Tensor, precise: bool) -> Iterator[Tensor]:
    """The columns of a matrix in chunks of limited size, widened to float32 at least, or to float64."""
    for piece in x.split(max(1, CHUNK // max(1, x.shape[0])), dim=1):
        yield piece.double() if precise else at_least_float32(piece)


def cross_product(a: Tensor, b: Tensor, precise: bool) -> Tensor:
    """A B^T of matrices of as many columns, (d, d), float64 (unless `precise`, multiplied in their own precision)."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y in zip(_chunks(a, precise), _chunks(b, precise), strict=True):
        dtype = torch.promote_types(x.dtype, y.dtype)
        total += x.to(dtype) @ y.to(a.device, dtype).T
    return total


def _square(x: Tensor, precise: bool) -> float:
    """Squared norm."""
    flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    return sum(float(piece.square().sum(dtype=torch.float64)) for piece in _chunks(flat, precise))


def residual_groups(architecture: Architecture, residual: str, model: str = "the model") -> dict[str, str]:
    """The group of each residual stream that moves.

    Args:
        residual: a group for all streams, `largest` (each stream's own), or groups by stream (`options.by_stream`).

    Raises:
        RecipeError: a stream is not there, or does not admit its group; says why, and the largest that it admits.
    """
    if residual == "none":
        return {}
    choices = by_stream(residual) or dict.fromkeys(architecture.streams, residual)
    known, word, family = architecture.stream_groups, f"'residual: {residual}'", architecture.family
    if not architecture.streams:
        raise RecipeError(f"{word}: the {family} architecture has no stream to move", where=model)
    for name, group in choices.items():
        if name not in known:
            raise RecipeError(f"{word}: there is no stream '{name}'", where=model, remedy=nearest(name, known))
        if group not in ("largest", *known[name]):
            out = architecture.handed_out.get(name)
            why = f"stream '{name}', which this model gives out as '{out}'" if out else f"stream '{name}'"
            problem = f"'residual: {group}' is not a symmetry of the {family} architecture ({why})"
            largest = as_option({stream: groups[-1] for stream, groups in known.items() if stream in choices}, known)
            raise RecipeError(problem, where=model, remedy=f"the largest it admits is 'residual: {largest}'")
    groups = {name: known[name][-1] if group == "largest" else group for name, group in choices.items()}
    return {name: group for name, group in groups.items() if group != "none"}


def space_groups(architecture: Architecture, options: AlignConfig) -> dict[str, SpaceGroup]:
    """The group of every space that `options` match, by space name.

    Raises:
        RecipeError: the architecture does not admit the residual group asked for.
    """
    blocks = [block for block in architecture.blocks if options.matches_layer(block.index)]
    local = {space.name: admitted(space, options) for block in blocks for space in block.spaces.values()}
    streams = residual_groups(architecture, options.residual)
    return local | {name: architecture.stream_group(name, group) for name, group in streams.items()}


def random_gauge(architecture: Architecture, options: AlignConfig, generator: torch.Generator) -> dict[str, Transform]:
    """A random transform of every space that `options` match, by space name.

    Applied to a model (`moved_tensors`) it gives other weights with the same outputs; a `residual: rotation` needs a
    folded model.
    """
    return {name: group.random(generator) for name, group in space_groups(architecture, options).items()}


def as_option(groups: Mapping[str, str], streams: Collection[str] = ()) -> str:
    """Groups by stream as one value of `residual`; one group of all `streams` there are is named alone."""
    if len(set(groups.values())) == 1 and set(groups) == set(streams):
        return next(iter(groups.values()))
    return ",".join(f"{name}={group}" for name, group in groups.items()) or "none"
