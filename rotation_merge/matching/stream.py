r"""Matching a residual stream: one element for the whole model, from every axis that lives in the stream.

With the local spaces held fixed, the best element maximises <R, sum_k w_k A_k B_k^T> over all tensors k that touch the
stream: an assignment for permutations (on absolute values for signed ones, the sign read off afterwards), Procrustes
for rotations; with LayerNorm, Procrustes in the complement of the all-ones vector, which every rotation has to fix.

What is minimised is sum_k n_k log(|A_k - R B_k|^2 / |A_k|^2 + FLOOR), n_k the number of entries: the likelihood of a
donor whose tensors each carry noise of their own, unknown strength. It is invariant under rescaling of single tensors,
so that no large matrix drowns the rest. The weights w_k = n_k / (|A_k - R B_k|^2 + FLOOR |A_k|^2) of one pass bound it
from above (the logarithm is concave), hence it never rises; benchmarks/residual.md compares it with other weightings.

The rows of a head that gives logits over a vocabulary count as they deviate from their mean: softmax does not see what
all logits share, and in trained models that one direction holds most of such a head's norm.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Axis, Block, Space, TensorInfo
from rotation_merge.errors import AlignmentError, RecipeError, nearest
from rotation_merge.groups import SpaceTransform, StreamTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.options import by_stream
from rotation_merge.matching.sides import Tensors, axis_views

FLOOR = 1e-2
"""Relative squared distance below which a tensor's agreement no longer raises its weight."""

_ENTRIES = 1 << 22  # of a matrix widened at a time


@dataclass
class Statistics:
    """What one pass over both models accumulates.

    Attributes:
        architecture: whose streams are matched.
        equal: give every tensor the same say, 1 / |A| |B|, in the products: for a start, when nothing is known of
            how well each of them agrees.
        precise: sum products in float64 where tensors nearly agree; else in float32, inside blocks of columns.
        products: by stream, sum of w A B^T over the axes on which the donor's signs count, (d, d), float64.
        gains: the same over norm gains and layer scales, which follow a permutation but not its signs.
        weights: of every tensor seen, by name; they belong to the next pass.
        blocks: how many were added.
    """

    architecture: Architecture
    equal: bool = False
    precise: bool = False
    products: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    blocks: int = 0
    _apart: float = 0.0
    _logs: float = 0.0
    _entries: int = 0

    @property
    def objective(self) -> float:
        """Geometric mean over all entries of their tensor's relative squared distance, plus `FLOOR`."""
        return math.exp(self._logs / self._entries) if self._entries else 0.0

    @property
    def excess(self) -> float:
        """What remains of the objective above `FLOOR`: zero for models that agree."""
        return max(self.objective - FLOOR, 0.0)

    @classmethod
    def of(cls, architecture: Architecture, blocks: Iterable[Statistics]) -> Statistics:
        """The sum of what was gathered block by block."""
        total = cls(architecture)
        for other in blocks:
            for mine, theirs in ((total.products, other.products), (total.gains, other.gains)):
                for stream, product in theirs.items():
                    if stream in mine:
                        mine[stream] += product
                    else:
                        mine[stream] = product
            total.weights.update(other.weights)
            total.blocks += other.blocks
            total._apart += other._apart
            total._logs += other._logs
            total._entries += other._entries
        return total

    def to(self, device: torch.device) -> Statistics:
        """The same, its products on a device."""
        products, gains = ({name: x.to(device) for name, x in own.items()} for own in (self.products, self.gains))
        return dataclasses.replace(self, products=products, gains=gains)

    def add(self, block: Block, anchor: Tensors, donor: Tensors, transforms: Mapping[str, SpaceTransform]) -> None:
        """Add one block, the donor's axes moved by `transforms`, which name the streams that are matched."""
        self.blocks += 1
        for info in block.tensors:
            a, b = anchor.get(info.key), donor.get(info.key)
            if a is not None and b is not None and a.is_floating_point() and a.shape == b.shape:
                self._add_tensor(info, a, b, transforms)

    def _add_tensor(self, info: TensorInfo, a: Tensor, b: Tensor, transforms: Mapping[str, SpaceTransform]) -> None:
        found = []
        distance: float | None = None
        logits = _logits_axis(info)
        norm, other = _square(a, logits), 0.0
        for dim, axis in enumerate(info.axes):
            if not axis.parts or any(not _moves(part.space, transforms) for part in axis.parts):
                continue
            moved = transform_tensor(b, _without(info, dim), transforms)
            other = _square(moved, logits)
            distance = norm + other
            for part, start, x, y in axis_views(a, moved, dim, axis):
                product = cross_product(x.movedim(start, 0), y.movedim(start, 0), self.precise, logits is not None)
                distance -= 2 * _element(transforms, part.space.name).overlap(product, part.role)
                found.append((part.space.name, part.role, product))
        if norm == 0 or (
            found and all(role == "gain" and not _element(transforms, name).moves_gains for name, role, _ in found)
        ):
            return
        if distance is None:
            distance = _square(a - transform_tensor(b, info, transforms))
        if not math.isfinite(distance):
            raise AlignmentError(
                f"tensor '{info.name}' of the anchor or the donor holds NaN or infinity",
                remedy="repair or replace the checkpoint",
            )
        lifted = max(distance, 0.0) + FLOOR * norm
        self._logs += a.numel() * math.log(lifted / norm)
        self._entries += a.numel()
        weight = self._weight(a.numel(), norm, other, lifted)
        self.weights[info.name] = weight
        self._apart += weight * max(distance, 0.0)
        for name, role, product in found:
            self._gather(name, role, product * weight)

    def _weight(self, entries: int, norm: float, other: float, lifted: float) -> float:
        """What a tensor counts for in the products."""
        return (norm * other or math.inf) ** -0.5 if self.equal else entries / lifted

    def _gather(self, stream: str, role: str, product: Tensor) -> None:
        chosen = self.gains if role == "gain" else self.products
        chosen[stream] = chosen[stream] + product if stream in chosen else product

    def solve(self, stream: str, group: str) -> StreamTransform | None:
        """The best element of a group for what has accumulated; None where nothing has."""
        found = self.architecture.stream_group(stream, group)
        nothing = torch.zeros(found.size, found.size, dtype=torch.float64)
        if stream not in self.products and stream not in self.gains:
            return None
        products, gains = (x.get(stream, nothing) for x in (self.products, self.gains))
        return found.solve(products, gains)

    def promise(self, current: Mapping[str, SpaceTransform], solved: Mapping[str, SpaceTransform]) -> float:
        """Share of the weighted squared distance that other stream elements would take off, the rest held still."""
        gained = 0.0
        for products, role in ((self.products, "read"), (self.gains, "gain")):
            for stream, product in products.items():
                better, now = (_element(x, stream).overlap(product, role) for x in (solved, current))
                gained += 2 * (better - now)
        return gained / self._apart if self._apart else 0.0


def _without(info: TensorInfo, dim: int) -> TensorInfo:
    """The same tensor, one axis held still, and nothing added to its rows."""
    return dataclasses.replace(info, axes=(*info.axes[:dim], Axis(), *info.axes[dim + 1 :]), common=None)


def _chunks(x: Tensor, entries: int = _ENTRIES) -> Iterator[Tensor]:
    """The columns of a matrix, widened to float32 at least, as many at a time as have so many entries."""
    step = max(1, entries // max(1, x.shape[0]))
    for piece in x.split(step, dim=1):
        yield piece.to(torch.promote_types(piece.dtype, torch.float32))


def _logits_axis(info: TensorInfo) -> int | None:
    """The vocabulary's axis in a head that reads a stream, the experts' in a router; None in other tensors."""
    if info.common is not None:
        return 0
    reads = any(part.space.kind == "stream" and part.role == "read" for axis in info.axes for part in axis.parts)
    return info.vocabulary_axis if reads else None


def cross_product(a: Tensor, b: Tensor, precise: bool, centred: bool) -> Tensor:
    """A B^T over all other dimensions, (d, d), float64 (unless `precise`, summed in float32 inside a chunk).

    With `centred`, of both matrices' columns less their mean column.
    """
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    pairs = zip(_chunks(a), _chunks(b), strict=True)
    total = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for x, y in pairs:
        dtype = torch.float64 if precise else torch.promote_types(x.dtype, y.dtype)
        total += (x.to(dtype) @ y.to(a.device, dtype).T).double()
    return total - torch.outer(_sums(a), _sums(b).to(a.device)) / a.shape[1] if centred else total


def _sums(x: Tensor) -> Tensor:
    """Sum of a matrix's columns, float64."""
    total = torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for piece in _chunks(x, _ENTRIES >> 3):
        total += piece.sum(1, dtype=torch.float64)
    return total


def _square(x: Tensor, centred: int | None = None) -> float:
    """Squared norm; of what is left after taking off the mean along a dimension, if one is given."""
    flat = x.reshape(len(x), -1) if x.ndim else x.reshape(1, 1)
    square = sum(float(piece.square().sum(dtype=torch.float64)) for piece in _chunks(flat))
    if centred is None:
        return square
    sums = _sums(x.movedim(centred, -1).reshape(-1, x.shape[centred]))
    return max(square - float(sums.square().sum()) / x.shape[centred], 0.0)


def _moves(space: Space, transforms: Mapping[str, SpaceTransform]) -> bool:
    return space.kind == "stream" and space.name in transforms


def _element(transforms: Mapping[str, SpaceTransform], stream: str) -> StreamTransform:
    found = transforms[stream]
    assert isinstance(found, StreamTransform)
    return found


def residual_groups(architecture: Architecture, asked: str, model: str = "the model") -> dict[str, str]:
    """The group of each residual stream that is to move.

    Args:
        asked: a group for all streams, `largest` (each stream's own), or groups by stream (`options.by_stream`).

    Raises:
        RecipeError: a stream is not there, or does not admit its group; says why, and the largest that it admits.
    """
    if asked == "none":
        return {}
    if not architecture.streams:
        raise RecipeError(
            f"'residual: {asked}': the {architecture.family} architecture has no stream to move", where=model
        )
    wanted = by_stream(asked) or dict.fromkeys(architecture.streams, asked)
    for name, group in wanted.items():
        if name not in architecture.streams:
            raise RecipeError(
                f"'residual: {asked}': there is no stream '{name}'",
                where=model,
                remedy=nearest(name, architecture.streams),
            )
        admitted = architecture.stream_groups[name]
        if group != "largest" and group not in admitted:
            out = architecture.handed_out.get(name)
            why = f", which this model gives out as '{out}'" if out else ""
            raise RecipeError(
                f"'residual: {group}' is not a symmetry of the {architecture.family} architecture "
                f"(stream '{name}'{why})",
                where=model,
                remedy=_smaller(architecture, wanted),
            )
    groups = {name: architecture.stream_groups[name][-1] if g == "largest" else g for name, g in wanted.items()}
    return {name: group for name, group in groups.items() if group != "none"}


def _smaller(architecture: Architecture, wanted: Mapping[str, str]) -> str:
    """The largest groups that can be had."""
    largest = {name: architecture.stream_groups[name][-1] for name in wanted if name in architecture.streams}
    if len(set(largest.values())) == 1:
        return f"the largest it admits is 'residual: {next(iter(largest.values()))}'"
    return f"the largest it admits is 'residual: {','.join(f'{name}={group}' for name, group in largest.items())}'"
