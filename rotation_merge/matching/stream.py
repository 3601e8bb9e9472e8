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

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import AlignmentError, RecipeError, nearest
from rotation_merge.matching.matrix_pairs import Tensors
from rotation_merge.matching.stream_products import Product, TensorMeasurement, measured
from rotation_merge.symmetry import SpaceTransform, StreamTransform
from rotation_merge.symmetry.admitted import by_stream

FLOOR = 1e-2
"""Relative squared distance below which a tensor's agreement no longer raises its weight."""

_IN_TENSORS = ("architecture", "products", "gains")


@dataclass
class StreamStatistics:
    """Sums over both models for matching a stream.

    Attributes:
        architecture: whose streams are matched.
        equal: give every tensor the same say, 1 / |A| |B|, in the products: for a start, when nothing is known of
            how well each of them agrees.
        products: by stream, sum of w A B^T over the axes on which the donor's signs count, (d, d), float64.
        gains: the same over norm gains and layer scales, which follow a permutation but not its signs.
        weights: of every tensor seen, by name; they belong to the next pass.
        blocks: how many were added.
    """

    architecture: Architecture
    equal: bool = False
    products: dict[str, Tensor] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    blocks: int = 0
    _apart: float = 0.0
    _logs: float = 0.0
    _overlap: float = 0.0
    _entries: int = 0

    @property
    def objective(self) -> float:
        """Geometric mean over all entries of their tensor's relative squared distance, plus `FLOOR`."""
        return math.exp(self._logs / self._entries) if self._entries else 0.0

    def bound(self, transforms: Mapping[str, SpaceTransform]) -> float:
        """Upper bound on the objective under other maps of the streams, with local spaces held fixed.

        It uses the tangent of the logarithm, and equals the objective under the maps used for counting.
        """
        logs = self._logs - 2 * (self._overlapping(transforms) - self._overlap)
        return math.exp(logs / self._entries) if self._entries else 0.0

    @classmethod
    def of(cls, architecture: Architecture, blocks: Iterable[StreamStatistics]) -> StreamStatistics:
        """Sum the statistics of several blocks."""
        total = cls(architecture)
        for block in blocks:
            for totals, addends in ((total.products, block.products), (total.gains, block.gains)):
                for stream, product in addends.items():
                    totals[stream] = totals[stream].add_(product) if stream in totals else product.clone()
            total.weights.update(block.weights)
            total.blocks += block.blocks
            total._apart += block._apart
            total._logs += block._logs
            total._overlap += block._overlap
            total._entries += block._entries
        return total

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the statistics as tensors and facts for JSON."""
        parts = (("products", self.products), ("gains", self.gains))
        tensors = {
            f"{part}|{stream}": x for part, tensors_by_stream in parts for stream, x in tensors_by_stream.items()
        }
        return tensors, {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _IN_TENSORS}

    @classmethod
    def unpacked(
        cls, architecture: Architecture, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
    ) -> StreamStatistics:
        """The same again."""
        by_part: dict[str, dict[str, Tensor]] = {"products": {}, "gains": {}}
        for key, tensor in tensors.items():
            part, _, stream = key.partition("|")
            by_part[part][stream] = tensor
        return cls(architecture, products=by_part["products"], gains=by_part["gains"], **facts)

    def to(self, device: torch.device) -> StreamStatistics:
        """The same, its products on a device."""
        products, gains = (
            {name: x.to(device) for name, x in by_stream.items()} for by_stream in (self.products, self.gains)
        )
        return dataclasses.replace(self, products=products, gains=gains)

    def add(
        self,
        block: Block,
        anchor: Tensors,
        donor: Tensors,
        transforms: Mapping[str, SpaceTransform],
        precise: bool = False,
    ) -> None:
        """Add one block, the donor's axes moved by `transforms`, which name the streams that are matched.

        Args:
            precise: sum products in float64, for tensors that nearly agree; else in float32, inside blocks of columns.
        """
        self.blocks += 1
        for info, a, b in compared(block, anchor, donor):
            self.count(measured(info, a, b, transforms, precise).centred(), transforms)

    def count(self, tensor: TensorMeasurement, transforms: Mapping[str, SpaceTransform]) -> None:
        """Add one tensor under the streams' transforms.

        Raises:
            AlignmentError: it holds NaN or infinity.
        """
        overlaps = [(p, _element(transforms, p.stream).overlap(p.product, p.role)) for p in tensor.products]
        still = all(p.role == "gain" and not _element(transforms, p.stream).moves_gains for p in tensor.products)
        if tensor.norm == 0 or (tensor.products and still):
            return
        last = tensor.products[-1].dim if tensor.products else 0
        distance_told = tensor.norm + tensor.donor_norm - 2 * sum(overlap for p, overlap in overlaps if p.dim == last)
        distance = distance_told if tensor.products else tensor.apart
        if not math.isfinite(distance):
            raise AlignmentError(
                f"tensor '{tensor.name}' of the anchor or the donor holds NaN or infinity",
                remedy="repair or replace the checkpoint",
            )
        lifted = max(distance, 0.0) + FLOOR * tensor.norm
        self._logs += tensor.entries * math.log(lifted / tensor.norm)
        self._entries += tensor.entries
        weight = self._weight(tensor, lifted)
        self.weights[tensor.name] = weight
        self._apart += weight * max(distance, 0.0)
        for product, overlap in overlaps:
            self._overlap += weight * overlap
            self._gather(product, weight)

    def _weight(self, tensor: TensorMeasurement, lifted: float) -> float:
        """The weight of a tensor in the products."""
        return (tensor.norm * tensor.donor_norm or math.inf) ** -0.5 if self.equal else tensor.entries / lifted

    def _gather(self, product: Product, weight: float) -> None:
        chosen = self.gains if product.role == "gain" else self.products
        if product.stream in chosen:
            chosen[product.stream].add_(product.product, alpha=weight)
        else:
            chosen[product.stream] = product.product * weight

    def solve(self, stream: str, group: str) -> StreamTransform | None:
        """The best element of a group for the accumulated statistics; None without any."""
        stream_group = self.architecture.stream_group(stream, group)
        nothing = torch.zeros(stream_group.size, stream_group.size, dtype=torch.float64)
        if stream not in self.products and stream not in self.gains:
            return None
        products, gains = (x.get(stream, nothing) for x in (self.products, self.gains))
        return stream_group.solve(products, gains)

    def promise(self, current: Mapping[str, SpaceTransform], solved: Mapping[str, SpaceTransform]) -> float:
        """Share of the weighted squared distance that better stream elements would remove."""
        gained = 2 * (self._overlapping(solved) - self._overlapping(current))
        return gained / self._apart if self._apart else 0.0

    def _overlapping(self, transforms: Mapping[str, SpaceTransform]) -> float:
        """The sum of <R, w A B^T>."""
        parts = ((self.products, "read"), (self.gains, "gain"))
        return sum(_element(transforms, s).overlap(x, role) for products, role in parts for s, x in products.items())


def compared(block: Block, anchor: Tensors, donor: Tensors) -> Iterator[tuple[TensorInfo, Tensor, Tensor]]:
    """The tensors with one shape in both models."""
    for info in block.tensors:
        a, b = anchor.get(info.key), donor.get(info.key)
        if a is not None and b is not None and a.is_floating_point() and a.shape == b.shape:
            yield info, a, b


def _element(transforms: Mapping[str, SpaceTransform], stream: str) -> StreamTransform:
    transform = transforms[stream]
    assert isinstance(transform, StreamTransform)
    return transform


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
        admitted = architecture.stream_groups[name]
        if group != "largest" and group not in admitted:
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
