"""Matching one block: every local space of a layer, under fixed residual streams."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space
from rotation_merge.errors import AlignmentError
from rotation_merge.linalg.scaling import limited
from rotation_merge.matching.heads import match_heads
from rotation_merge.matching.matrix_pairs import SpaceMatch, Squares, Tensors, chunks, sides, views
from rotation_merge.matching.neurons import match_neurons
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import transform_tensor
from rotation_merge.record import SpaceRow
from rotation_merge.symmetry import Linear, Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted

CHUNK = 1 << 20
"""Entries that are widened at a time."""
LARGEST = {torch.float32: 1e15, torch.float64: 1e150}
"""Sums of products of larger numbers may be infinite."""
STILL = "not moved: rounding would cost more than the move gains"
"""Rounding costs spacing^2 / 12 for 1 <= x < 2 over the mean square 7/3 there: eps^2 / 28 of the squared norm."""
MOST_ROUNDS = 12
"""Spaces that share tensors are matched in turn so often at most."""
SETTLED = 1e-9
"""Share of the squared distance that a round has to take off."""


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
    whole: Squares = (0.0, 0.0, 0.0)

    def plus(self, part: BlockMatch) -> BlockMatch:
        """The match of this and of a further part."""
        first, second, third = (a + b for a, b in zip(self.whole, part.whole, strict=True))
        return BlockMatch(self.transforms | part.transforms, self.rows + part.rows, (first, second, third))


# so that an interrupted run reads them again
torch.serialization.add_safe_globals([BlockMatch, SpaceRow, Transform, Monomial, Linear])


@contextmanager
def named(anchor: str, donor: str) -> Iterator[None]:
    """Add the names of both models to errors of matching."""
    try:
        yield
    except AlignmentError as error:
        where = f"{donor} to {anchor}, {error.where}" if error.where else f"{donor} to {anchor}"
        raise AlignmentError(error.what, where=where, remedy=error.remedy) from error


def checked(block: Block, anchor: Tensors, donor: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a block of both models, in float64 where their products in float32 might be infinite.

    Raises:
        AlignmentError: a number is not finite, or too large for products in float64; names the tensor, and which of the
            models it is of.
    """
    wide = max(_largest(block, anchor, "anchor"), _largest(block, donor, "donor")) > LARGEST[torch.float32]
    first, second = (
        {key: x.double() if wide and x.is_floating_point() else x for key, x in tensors.items()}
        for tensors in (anchor, donor)
    )
    return first, second


def _largest(block: Block, tensors: Tensors, model: str) -> float:
    """The largest number in a block's tensors; errors as of `checked`."""
    names = {info.key: info.name for info in block.tensors}
    floats = {key: x for key, x in tensors.items() if key in names and x.is_floating_point() and x.numel()}
    if not floats:
        return 0.0
    wide = (x.float() if x.itemsize < 2 else x for x in floats.values())
    largest = torch.stack([torch.stack(x.aminmax()).abs().amax().double() for x in wide]).tolist()  # one question
    most = LARGEST[torch.float64]
    if bad := next((names[key] for key, x in zip(floats, largest, strict=True) if not x <= most), None):
        problem = f"tensor '{bad}' of the {model} holds NaN, infinity, or numbers of more than {most:g}"
        raise AlignmentError(problem, where=block.name, remedy="repair or replace the checkpoint")
    return max(largest)


def wanted_spaces(block: Block, options: AlignConfig) -> list[Space]:
    """The local spaces of a block that these options ask to match."""
    if not options.matches_layer(block.index):
        return []
    spaces = [space for space in block.spaces.values() if admitted(space, options).words != "none"]
    return sorted(spaces, key=lambda space: space.kind != "translation")  # exact whatever the others are: they go first


def match_block(
    block: Block,
    anchor: Tensors,
    donor: Tensors,
    options: AlignConfig,
    streams: Mapping[str, Transform] | None = None,
    with_rows: bool = True,
) -> BlockMatch:
    """Best transform of every local space of one block.

    Args:
        block: the anchor's block (the donor's has the same spaces).
        anchor, donor: tensors of the block by key (`checked`).
        options: which groups to use.
        streams: transforms of the residual streams, under which the donor is looked at.
        with_rows: whether the report's rows are given, too; with them a move that rounding would undo is left out.
    """
    spaces = wanted_spaces(block, options)
    matching = _Matching(block, anchor, donor, options, streams or {})
    seconds = list[float]()
    for place, space in enumerate(spaces):
        began = time.perf_counter()
        matching.match(space, {later.name for later in spaces[place + 1 :]})
        seconds.append(time.perf_counter() - began)
    matching.settle(spaces)
    pairs = zip(spaces, seconds, strict=True) if with_rows else ()
    rows = [row_of(block, space, matching.judged(space), took) for space, took in pairs]  # which may end a move
    return BlockMatch(matching.transforms, rows)


@dataclass
class _Matching:
    """The matches of one block's spaces so far, by name.

    Attributes:
        streams: transforms of the residual streams.
    """

    block: Block
    anchor: Tensors
    donor: Tensors
    options: AlignConfig
    streams: Mapping[str, Transform]
    matches: dict[str, SpaceMatch] = field(default_factory=dict)

    @property
    def transforms(self) -> dict[str, Transform]:
        return {name: match.transform for name, match in self.matches.items()}

    def match(self, space: Space, unknown: set[str] | None = None) -> None:
        """Match one space with all others fixed, if possible without the tensors of `unknown` spaces."""
        self.matches[space.name] = self._best(space, admitted(space, self.options), unknown or set())

    def _best(self, space: Space, group: SpaceGroup, unknown: set[str]) -> SpaceMatch:
        arguments = (self.block, space, self.anchor, self.donor, {**self.streams, **self.transforms})
        if space.kind == "translation":
            return SpaceMatch(match_translation(*arguments, group))
        parts = list(views(*arguments, unknown)) or list(views(*arguments))
        if all(torch.equal(a, b.to(a)) for *_, a, b in parts):
            return SpaceMatch(group.identity())
        if space.kind in ("ffn", "experts"):
            return match_neurons(space, parts, self.options)
        axes = sides(parts)
        if space.kind == "attention":
            return match_heads(space, axes, self.options)
        free, _, size = group.groups["map"]  # of a latent
        products, gains = (torch.zeros(1, size, size, dtype=torch.float64) for _ in range(2))
        for role, pairs in axes.items():
            for a, b in pairs:
                product = a.double() @ b.to(a.device).double().T
                (gains if role == "gain" else products)[0].add_(product.cpu())
        return SpaceMatch(Transform("latent", {"map": free.solve(Stats.of_products(products, gains))}))

    def settle(self, spaces: list[Space]) -> None:
        """Match the spaces that share a tensor in turn, from their current and, if need be, from no transforms."""
        names = {space.name for space in spaces if space.kind != "translation"}
        shared = [{space.name for space in info.spaces()} & names for info in self.block.tensors]
        linked = set[str]().union(*(together for together in shared if len(together) > 1))
        spaces = [space for space in spaces if space.name in linked]
        if not spaces:
            return
        distance = self._rounds(spaces)
        if distance > SETTLED * self._distance(spaces, {})[0] > 0:
            best = dict(self.matches)
            self.matches |= {space.name: SpaceMatch(admitted(space, self.options).identity()) for space in spaces}
            self.matches = best if self._rounds(spaces) >= distance else self.matches
        for space in spaces:  # what each was at belongs to earlier transforms of the others
            self.matches[space.name] = replace(self.matches[space.name], squares=None)

    def _rounds(self, spaces: list[Space]) -> float:
        """Repeat rounds until the squared distance stops falling; return it."""
        distance, _ = self._distance(spaces)
        for _ in range(MOST_ROUNDS):
            matches, before = dict(self.matches), distance
            for space in spaces:
                self.match(space)
            distance, _ = self._distance(spaces)
            if distance > before:
                self.matches, distance = matches, before
            if distance >= before * (1 - SETTLED):
                break
        return distance

    def _distance(self, spaces: list[Space], local: Mapping[str, Transform] | None = None) -> tuple[float, float]:
        """Squared distance, and the anchor's squared norm, over the tensors of some spaces."""
        maps = {**self.streams, **(self.transforms if local is None else local)}
        return squared_distances(self.block, self.anchor, self.donor, maps, spaces)

    def judged(self, space: Space) -> SpaceMatch:
        """The match of a space with its distances and notes; it stays where rounding its tensors costs more.

        The distances of a match are over its sides, which may be less, or more, than the tensors as they are stored.
        """
        match = self.matches[space.name]
        infos = [info for info in self.block.tensors if space in info.spaces() and info.key in self.donor]
        parts = (part for info in infos for axis in info.axes for piece in axis.pieces for part in piece)
        stored = not any(info.offset for info in infos) and all(part.space.kind != "fixed" for part in parts)
        if match.squares is None or not stored:
            before, anchor = self._distance([space], {})
            still = all(transform.is_identity() for transform in self.transforms.values())
            match = replace(match, squares=(before, before if still else self._distance([space])[0], anchor))
        before, after, anchor = match.squares or (0.0, 0.0, 0.0)
        local = {known.name for known in self.block.spaces.values()}
        alone = not self.streams and all(len(local & {s.name for s in info.spaces()}) < 2 for info in infos)
        errors = [torch.finfo(self.donor[info.key].dtype).eps ** 2 / 28 for info in infos]
        if alone and before - after < min(errors, default=0.0) * anchor:
            match = SpaceMatch(admitted(space, self.options).identity(), (before, before, anchor), [STILL])
        self.matches[space.name] = match
        factors = (e.factor for e in match.transform.elements.values() if isinstance(e, Monomial))
        count = sum(int(limited(factor).sum()) for factor in factors)
        limit = [f"{count} scales stopped at the limit of a million"] if count else []
        return replace(match, notes=[*match.notes, *limit])


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, Transform],
    group: SpaceGroup,
) -> Transform:
    """The nearest translation, which brings the donor's mean row to the anchor's, whatever the order of the rows."""
    fixed = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and group.shift and info.key in anchor and info.key in donor:
            pair = anchor[info.key], transform_tensor(donor[info.key], info, fixed)
            if not torch.equal(pair[0], pair[1].to(pair[0])):
                first, second = (x.cpu().double().reshape(-1, group.shift).mean(0) for x in pair)
                return replace(group.identity(), shift=first - second)
    return group.identity()


def squared_distances(
    block: Block, anchor: Tensors, donor: Tensors, transforms: Mapping[str, Transform], spaces: Sequence[Space] = ()
) -> tuple[float, float]:
    """Squared distance donor - anchor and squared norm of the anchor, over the tensors of some spaces (none: all)."""
    sums: list[Tensor] = []
    for info in block.tensors:
        if info.key in anchor and info.key in donor and (not spaces or any(s in info.spaces() for s in spaces)):
            moved = transform_tensor(donor[info.key], info, transforms).reshape(anchor[info.key].shape)
            for _, a, b in chunks(anchor[info.key], moved, CHUNK):
                sums += [(a - b).square_().sum(), (a * a).sum()]
    sums_list = torch.stack(sums).tolist() if sums else []  # one question to the device
    return math.fsum(sums_list[::2]), math.fsum(sums_list[1::2])


def row_of(block: Block, space: Space, match: SpaceMatch, seconds: float = 0.0) -> SpaceRow:
    """A report's row on the match of one space, without the donor's name."""
    before, after, anchor = (math.sqrt(max(square, 0.0)) for square in match.squares or (0.0, 0.0, 0.0))
    order = match.transform.head_order()
    return SpaceRow(
        *("", block.name, block.index, space.name, space.kind, match.transform.words),
        distance_before=before,
        distance_after=after,
        anchor_norm=anchor,
        from_identity=dict(match.transform.distances()),
        seconds=seconds,
        head_order=None if order is None else order.tolist(),
        notes=list(match.notes),
    )
