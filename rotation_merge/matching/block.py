"""Matching one block: every local space of a layer, under fixed residual streams."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space
from rotation_merge.errors import AlignmentError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.scaling import limited
from rotation_merge.matching.experts import match_experts
from rotation_merge.matching.heads import match_heads
from rotation_merge.matching.matrix_pairs import Side, Tensors, sides
from rotation_merge.matching.neurons import match_ffn
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.record import SpaceRow
from rotation_merge.symmetry import Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import admitted, asks

_BLOCK = 1 << 20  # entries widened at a time

STILL = "not moved: rounding would cost more than the move gains"


def rounding_error(dtype: torch.dtype) -> float:
    """Relative mean squared error of storing values in a type.

    Spacing^2 / 12 for 1 <= x < 2, over the mean square 7/3 there.
    """
    return torch.finfo(dtype).eps ** 2 / 28


def row_of(
    block: Block,
    space: Space,
    transform: Transform,
    squares: Sequence[float],
    seconds: float = 0.0,
    notes: Sequence[str] = (),
) -> SpaceRow:
    """A report's row on the match of one space, without the donor's name.

    Args:
        squares: squared Frobenius distance donor - anchor over the tensors that live in the space, before and after,
            and the anchor's squared norm there.
        seconds: wall time.
        notes: what a reader should know.
    """
    before, after, anchor = (math.sqrt(max(square, 0.0)) for square in squares)
    order = transform.head_order()
    return SpaceRow(
        *("", block.name, block.index, space.name, space.kind, transform.words),
        distance_before=before,
        distance_after=after,
        anchor_norm=anchor,
        from_identity=dict(transform.distances()),
        seconds=seconds,
        head_order=None if order is None else order.tolist(),
        notes=list(notes),
    )


@dataclass(frozen=True)
class BlockMatch:
    """The match of a block.

    Attributes:
        transforms: of its local spaces, by name.
        rows: what the report says of each.
        whole: where streams move, the squared distance of all its tensors before and after, and the anchor's squared
            norm.
    """

    transforms: dict[str, Transform]
    rows: list[SpaceRow]
    whole: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def to(self, device: torch.device) -> BlockMatch:
        """The same, its transforms on a device."""
        return replace(self, transforms={name: transform.to(device) for name, transform in self.transforms.items()})


class NotFiniteError(AlignmentError):
    """A tensor of either model holds NaN or infinity."""


@contextmanager
def named(anchor: str, donor: str) -> Iterator[None]:
    """Add the model's name to errors of matching: the donor, or the anchor if its tensor is not finite."""
    try:
        yield
    except NotFiniteError as error:
        model = anchor if " of the anchor " in error.what else donor
        raise AlignmentError(error.what, where=model, remedy=error.remedy) from error
    except AlignmentError as error:
        raise AlignmentError(error.what, where=f"{donor}, {error.where}", remedy=error.remedy) from error


def wanted_spaces(block: Block, options: AlignConfig) -> list[Space]:
    """The local spaces of a block that these options ask to match."""
    if not options.matches_layer(block.index):
        return []
    spaces = [space for space in block.spaces.values() if asks(space, options)]
    return sorted(spaces, key=lambda space: space.kind != "translation")  # exact whatever the others are: they go first


def match_block(
    block: Block,
    anchor: Tensors,
    donor: Tensors,
    options: AlignConfig,
    streams: Mapping[str, Transform] | None = None,
    told: bool = True,
) -> BlockMatch:
    """Best transform of every local space of one block.

    Args:
        block: the anchor's block (the donor's has the same spaces).
        anchor, donor: tensors of the block by key, all of them finite (`check_finite`).
        options: which groups to use.
        streams: transforms of the residual streams, under which the donor is looked at.
        told: whether the report's rows are given, too; with them a move that rounding would undo is left out.
    """
    spaces = wanted_spaces(block, options)
    names = {space.name for space in spaces}
    anchor, donor = without_hidden_biases(block, anchor, names), without_hidden_biases(block, donor, names)
    matching = _Matching(block, anchor, donor, options, streams or {}, told)
    for place, space in enumerate(spaces):
        matching.match(space, {later.name for later in spaces[place + 1 :]})
    matching.settle(linked(block, spaces))
    return BlockMatch(matching.local, list(matching.rows.values()))


def _at_the_limit(transform: Transform) -> list[str]:
    """A note if rescaling reached the largest or smallest allowed factor."""
    factors = (element.factor for element in transform.elements.values() if isinstance(element, Monomial))
    count = sum(int(limited(factor).sum()) for factor in factors)
    return [f"{count} scales stopped at the limit of a million"] if count else []


def linked(block: Block, spaces: list[Space]) -> list[Space]:
    """The spaces that share a tensor with another one; they are matched in turn."""
    names = {space.name for space in spaces}
    names -= {space.name for space in spaces if space.kind == "translation"}
    shared = [{space.name for space in info.spaces()} & names for info in block.tensors]
    return [space for space in spaces if any(space.name in names and len(names) > 1 for names in shared)]


MOST_ROUNDS = 12
"""Spaces that share tensors are matched in turn so often at most."""

_SETTLED = 1e-9  # share of the squared distance that a round has to take off


@dataclass
class _Matching:
    """The matches of one block's spaces so far.

    Attributes:
        streams: transforms of the residual streams.
        told: whether rows are wanted.
        local: transforms of the block's own spaces.
        rows: what the report says of each, by space name.
    """

    block: Block
    anchor: Tensors
    donor: Tensors
    options: AlignConfig
    streams: Mapping[str, Transform]
    told: bool
    local: dict[str, Transform] = field(default_factory=dict)
    rows: dict[str, SpaceRow] = field(default_factory=dict)

    def match(self, space: Space, unknown: Collection[str] = ()) -> None:
        """Match one space with all others fixed, if possible without the tensors of `unknown` spaces."""
        begin = time.perf_counter()
        best = self._best(space, unknown)
        self.local[space.name] = transform = best.transform
        if not self.told:
            return
        before, anchor = best.distances or self._distance([space], {})
        gained, notes = best.gained, best.notes
        if gained is None:
            gained = before - self._distance([space], {space.name: transform})[0]
        if self._blurred(space, gained, anchor):
            transform, gained, notes = admitted(space, self.options).identity(), 0.0, [STILL]
        self.local[space.name] = transform
        notes, seconds = [*notes, *_at_the_limit(transform)], time.perf_counter() - begin
        squares = before, before - gained, anchor
        self.rows[space.name] = row_of(self.block, space, transform, squares, seconds, notes)

    def _blurred(self, space: Space, gained: float, anchor: float) -> bool:
        """Whether a move gains less than rounding its tensors to storage costs.

        Args:
            anchor: the anchor's squared norm there.
        """
        local = {local_space.name for local_space in self.block.spaces.values()}
        names = {info.key: local & {space.name for space in info.spaces()} for info in self.block.tensors}
        touched = [key for key in self.donor if space.name in names.get(key, ())]
        if self.streams or any(len(names[key]) > 1 for key in touched):
            return False
        least = min((rounding_error(self.donor[key].dtype) for key in touched), default=0.0)
        return gained < least * anchor

    def settle(self, spaces: list[Space]) -> None:
        """Match spaces that share tensors in turn, from their current and from their best known transforms."""
        if not spaces:
            return
        before, _ = self._distance(spaces, {})
        distance = self._rounds(spaces)
        best = dict(self.local), dict(self.rows), distance
        if before and distance > _SETTLED * before:
            for space in spaces:
                self.local[space.name] = admitted(space, self.options).identity()
            for space in spaces:
                self.match(space)
            distance = self._rounds(spaces)
            if distance < best[2]:
                best = dict(self.local), dict(self.rows), distance
        self.local, self.rows = best[0], best[1]
        for space in spaces if self.told else ():
            (apart, norm), (after, _) = self._distance([space], {}), self._distance([space], self.local)
            row = self.rows[space.name]
            squares = apart, after, norm
            self.rows[space.name] = row_of(self.block, space, self.local[space.name], squares, row.seconds, row.notes)

    def _rounds(self, spaces: list[Space]) -> float:
        """Repeat rounds until the squared distance stops falling; return it."""
        distance, _ = self._distance(spaces, self.local)
        for _ in range(MOST_ROUNDS):
            previous = dict(self.local), dict(self.rows), distance
            for space in spaces:
                self.match(space)
            distance, _ = self._distance(spaces, self.local)
            if distance >= previous[2] * (1 - _SETTLED):
                if distance > previous[2]:
                    self.local, self.rows, distance = previous
                break
        return distance

    def _distance(self, spaces: list[Space], local: Mapping[str, Transform]) -> tuple[float, float]:
        """Squared distance, and the anchor's squared norm, over the tensors of some spaces."""
        return squared_distances(self.block, self.anchor, self.donor, {**self.streams, **local}, spaces)

    def _best(self, space: Space, unknown: Collection[str]) -> Best:
        """The best transform of one space."""
        transforms = {**self.streams, **self.local}
        arguments = (self.block, space, self.anchor, self.donor)
        group = admitted(space, self.options)
        if space.kind == "experts":
            return Best(match_experts(*arguments, transforms, self.options))
        if space.kind == "translation":
            return Best(match_translation(*arguments, transforms, self.options))
        axes = sides(*arguments, transforms, unknown) or sides(*arguments, transforms)
        if all(torch.equal(side.anchor, side.donor.to(side.anchor)) for side in axes):
            return Best(group.identity(), 0.0)
        if space.kind == "attention":
            return Best(*match_heads(space, axes, self.options))
        if space.kind == "ffn":
            neurons = match_ffn(space, axes, self.options)
            distances = neurons.before, neurons.anchor
            transform = Transform("ffn", {"neurons": neurons.element})
            return Best(transform, neurons.before - neurons.after, distances=distances)
        return Best(match_latent(space, axes, self.options))


@dataclass(frozen=True)
class Best:
    """The best transform of a space.

    Attributes:
        gained: by how much it lowers the squared distance; None: not known.
        notes: for the report.
        distances: the squared distance before, and the anchor's squared norm, where they are known.
    """

    transform: Transform
    gained: float | None = None
    notes: Sequence[str] = ()
    distances: tuple[float, float] | None = None


def squared_distances(
    block: Block, anchor: Tensors, donor: Tensors, transforms: Mapping[str, Transform], spaces: Sequence[Space] = ()
) -> tuple[float, float]:
    """Squared distance donor - anchor and squared norm of the anchor, over the tensors of some spaces (none: all)."""
    sums: list[Tensor] = []
    for info in block.tensors:
        if info.key in anchor and info.key in donor and (not spaces or any(s in info.spaces() for s in spaces)):
            moved = transform_tensor(donor[info.key], info, transforms)
            for a, b in _flat_blocks(anchor[info.key], moved):
                sums += [(a - b).square_().sum(), (a * a).sum()]
    sums_list = torch.stack(sums).tolist() if sums else []  # one question to the device
    return math.fsum(sums_list[::2]), math.fsum(sums_list[1::2])


def _flat_blocks(anchor: Tensor, donor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of two tensors of one shape along the first dimension, widened to float32 at least."""
    dtype = torch.promote_types(torch.promote_types(anchor.dtype, donor.dtype), torch.float32)
    rows = anchor.reshape(1) if anchor.ndim == 0 else anchor
    donor_rows = donor.reshape(rows.shape)
    step = max(1, _BLOCK * len(rows) // max(1, rows.numel()))
    for start in range(0, len(rows), step):
        yield rows[start : start + step].to(dtype), donor_rows[start : start + step].to(rows.device, dtype)


def check_finite(block: Block, tensors: Tensors, model: str) -> None:
    """Check that a tensor is finite.

    Raises:
        NotFiniteError: names the tensor, and which of the models it is.
    """
    present = [info for info in block.tensors if info.key in tensors]
    if all_finite([tensors[info.key] for info in present]):
        return
    for info in present:
        if not all_finite([tensors[info.key]]):
            raise NotFiniteError(
                f"tensor '{info.name}' of the {model} holds NaN or infinity",
                where=block.name,
                remedy="repair or replace the checkpoint",
            )


def match_latent(space: Space, sides: list[Side], options: AlignConfig) -> Transform:
    """The best element: a signed assignment of coordinates, or Procrustes if gains are folded."""
    group = admitted(space, options).groups["map"][0]
    size = space.sizes["size"]
    products, gains = (torch.zeros(1, size, size, dtype=torch.float64) for _ in range(2))
    for side in sides:
        product = side.anchor.double() @ side.donor.to(side.anchor.device).double().T
        (gains if side.role == "gain" else products)[0].add_(product.cpu())
    return Transform("latent", {"map": group.solve(Stats.of_products(products, gains))})


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, Transform],
    options: AlignConfig,
) -> Transform:
    """The nearest translation, which brings the donor's mean row to the anchor's, whatever the order of the rows."""
    group = admitted(space, options)
    other_spaces = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and group.shift and info.key in anchor and info.key in donor:
            pair = anchor[info.key], transform_tensor(donor[info.key], info, other_spaces)
            if not torch.equal(pair[0], pair[1].to(pair[0])):
                first, second = (x.cpu().double().reshape(-1, group.shift).mean(0) for x in pair)
                return replace(group.identity(), shift=first - second)
    return group.identity()
