"""Matching one block: every local space of a layer, under fixed residual streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Part, Space, TensorInfo
from rotation_merge.errors import AlignmentError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.scaling import limited
from rotation_merge.matching.heads import match_heads
from rotation_merge.matching.matrix_pairs import Side, SpaceMatch, Tensors, chunks, sides
from rotation_merge.matching.neurons import match_experts, match_ffn
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import join_axis, split_axis, transform_tensor
from rotation_merge.record import SpaceRow
from rotation_merge.run.ledger import Ledger
from rotation_merge.symmetry import Linear, Monomial, Stats, Transform
from rotation_merge.symmetry.admitted import SpaceGroup, admitted, asks

CHUNK = 1 << 20
"""Entries that are widened at a time."""
LARGE = 1e12
"""Products of larger numbers may be infinite in float32."""
STILL = "not moved: rounding would cost more than the move gains"
MOST_ROUNDS = 12
"""Spaces that share tensors are matched in turn so often at most."""
SETTLED = 1e-9
"""Share of the squared distance that a round has to take off."""


def rounding_error(dtype: torch.dtype) -> float:
    """Relative mean squared error of storing values in a type.

    Spacing^2 / 12 for 1 <= x < 2, over the mean square 7/3 there.
    """
    return torch.finfo(dtype).eps ** 2 / 28


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

    def plus(self, part: BlockMatch) -> BlockMatch:
        """The match of this and of a further part."""
        first, second, third = (a + b for a, b in zip(self.whole, part.whole, strict=True))
        return BlockMatch(self.transforms | part.transforms, self.rows + part.rows, (first, second, third))

    @classmethod
    def once(cls, ledger: Ledger, name: str, match: Callable[[], BlockMatch]) -> BlockMatch:
        """A match of an earlier run, or computed now."""
        known: BlockMatch | None = ledger.get(name)
        if known is None:
            known = match()
            ledger.keep(name, lambda: known)
        return known


# so that an interrupted run reads them again
torch.serialization.add_safe_globals([BlockMatch, SpaceRow, Transform, Monomial, Linear])


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
    with_rows: bool = True,
) -> BlockMatch:
    """Best transform of every local space of one block.

    Args:
        block: the anchor's block (the donor's has the same spaces).
        anchor, donor: tensors of the block by key, all of them finite (`check_finite`).
        options: which groups to use.
        streams: transforms of the residual streams, under which the donor is looked at.
        with_rows: whether the report's rows are given, too; with them a move that rounding would undo is left out.
    """
    spaces = wanted_spaces(block, options)
    anchor, donor = compared(block, anchor), compared(block, donor)
    matching = _Matching(block, anchor, donor, options, streams or {})
    seconds = list[float]()
    for place, space in enumerate(spaces):
        began = time.perf_counter()
        with _refused_if_large(space, anchor, donor):
            matching.match(space, {later.name for later in spaces[place + 1 :]})
        seconds.append(time.perf_counter() - began)
    matching.settle(linked(block, spaces))
    pairs = zip(spaces, seconds, strict=True) if with_rows else ()
    rows = [row_of(block, space, matching.judged(space), took) for space, took in pairs]  # which may end a move
    return BlockMatch(matching.transforms, rows)


def compared(block: Block, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a block that matching looks at: with zeros for biases of keys that softmax does not see."""
    result = dict(tensors)
    for info in (info for info in block.tensors if len(info.axes) == 1 and info.key in tensors):
        unseen = [bool(piece) and all(map(_unseen_key, piece)) for piece in info.axes[0].pieces]
        if any(unseen):
            pieces = zip(split_axis(tensors[info.key], 0, info.axes[0]), unseen, strict=True)
            parts = [torch.zeros_like(piece) if hidden else piece for piece, hidden in pieces]
            result[info.key] = join_axis(parts, 0, info.axes[0])
    return result


def _unseen_key(part: Part) -> bool:
    """Whether a bias of this part adds the same to all logits of a query."""
    space = part.space
    free = not space.visible_bias and not space.rotary and space.norm is None
    return space.kind == "attention" and part.role == "k" and free


@contextmanager
def _refused_if_large(space: Space, *models: Mapping[str, Tensor]) -> Iterator[None]:
    """Names a space that a solver cannot solve because products of its numbers are infinite."""
    try:
        yield
    except (ValueError, torch.linalg.LinAlgError) as error:
        floats = (x for tensors in models for x in tensors.values() if x.numel() and x.is_floating_point())
        if max(float(x.abs().max()) for x in floats) < LARGE:
            raise
        problem = f"'{space.name}' holds numbers of more than {LARGE:g}, whose products are infinite"
        raise AlignmentError(problem, remedy="repair or replace the checkpoint") from error


def linked(block: Block, spaces: list[Space]) -> list[Space]:
    """The spaces that share a tensor with another one; they are matched in turn."""
    names = {space.name for space in spaces if space.kind != "translation"}
    shared = [{space.name for space in info.spaces()} & names for info in block.tensors]
    return [space for space in spaces if any(space.name in together and len(together) > 1 for together in shared)]


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

    def match(self, space: Space, unknown: Collection[str] = ()) -> None:
        """Match one space with all others fixed, if possible without the tensors of `unknown` spaces."""
        self.matches[space.name] = self._best(space, admitted(space, self.options), unknown)

    def _best(self, space: Space, group: SpaceGroup, unknown: Collection[str]) -> SpaceMatch:
        arguments = (self.block, space, self.anchor, self.donor, {**self.streams, **self.transforms})
        if space.kind == "experts":
            return SpaceMatch(match_experts(*arguments, self.options))
        if space.kind == "translation":
            return SpaceMatch(match_translation(*arguments, group))
        axes = sides(*arguments, unknown) or sides(*arguments)
        if all(torch.equal(side.anchor, side.donor.to(side.anchor)) for side in axes):
            return SpaceMatch(group.identity())
        if space.kind == "attention":
            return match_heads(space, axes, self.options)
        return match_ffn(space, axes, self.options) if space.kind == "ffn" else SpaceMatch(match_latent(axes, group))

    def settle(self, spaces: list[Space]) -> None:
        """Match spaces that share tensors in turn, from their current and, if need be, from no transforms."""
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

    def judged(self, space: Space) -> SpaceMatch:
        """The match of a space with its distances and notes; it stays where rounding its tensors costs more.

        The distances of a match are over its sides, which may be less, or more, than the tensors as they are stored.
        """
        match, infos = self.matches[space.name], [i for i in self.block.tensors if space in i.spaces()]
        infos = [info for info in infos if info.key in self.donor]
        parts = (part for info in infos for axis in info.axes for piece in axis.pieces for part in piece)
        stored = not any(info.offset for info in infos) and all(part.space.kind != "fixed" for part in parts)
        if match.squares is None or not stored:
            before, anchor = self._distance([space], {})
            still = all(transform.is_identity() for transform in self.transforms.values())
            match = replace(match, squares=(before, before if still else self._distance([space])[0], anchor))
        before, after, anchor = match.squares or (0.0, 0.0, 0.0)
        if self._blurred(infos, before - after, anchor):
            match = SpaceMatch(admitted(space, self.options).identity(), (before, before, anchor), [STILL])
        self.matches[space.name] = match
        return replace(match, notes=[*match.notes, *_at_the_limit(match.transform)])

    def _blurred(self, infos: list[TensorInfo], gained: float, anchor: float) -> bool:
        """Whether a move gains less than rounding its tensors to storage costs.

        Args:
            infos: the space's tensors.
            anchor: the anchor's squared norm there.
        """
        local = {space.name for space in self.block.spaces.values()}
        if self.streams or any(len(local & {space.name for space in info.spaces()}) > 1 for info in infos):
            return False
        least = min((rounding_error(self.donor[info.key].dtype) for info in infos), default=0.0)
        return gained < least * anchor

    def _distance(self, spaces: list[Space], local: Mapping[str, Transform] | None = None) -> tuple[float, float]:
        """Squared distance, and the anchor's squared norm, over the tensors of some spaces."""
        maps = {**self.streams, **(self.transforms if local is None else local)}
        return squared_distances(self.block, self.anchor, self.donor, maps, spaces)


def _at_the_limit(transform: Transform) -> list[str]:
    """A note if rescaling reached the largest or smallest allowed factor."""
    factors = (element.factor for element in transform.elements.values() if isinstance(element, Monomial))
    count = sum(int(limited(factor).sum()) for factor in factors)
    return [f"{count} scales stopped at the limit of a million"] if count else []


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
            problem = f"tensor '{info.name}' of the {model} holds NaN or infinity"
            raise NotFiniteError(problem, where=block.name, remedy="repair or replace the checkpoint")


def match_latent(sides: list[Side], group: SpaceGroup) -> Transform:
    """The best element: a signed assignment of coordinates, or Procrustes if gains are folded."""
    free, _, size = group.groups["map"]
    products, gains = (torch.zeros(1, size, size, dtype=torch.float64) for _ in range(2))
    for side in sides:
        product = side.anchor.double() @ side.donor.to(side.anchor.device).double().T
        (gains if side.role == "gain" else products)[0].add_(product.cpu())
    return Transform("latent", {"map": free.solve(Stats.of_products(products, gains))})


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, Transform],
    group: SpaceGroup,
) -> Transform:
    """The nearest translation, which brings the donor's mean row to the anchor's, whatever the order of the rows."""
    other_spaces = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and group.shift and info.key in anchor and info.key in donor:
            pair = anchor[info.key], transform_tensor(donor[info.key], info, other_spaces)
            if not torch.equal(pair[0], pair[1].to(pair[0])):
                first, second = (x.cpu().double().reshape(-1, group.shift).mean(0) for x in pair)
                return replace(group.identity(), shift=first - second)
    return group.identity()
