"""Matching one block: every local space of a layer, under fixed residual streams."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import Block, Space
from rotation_merge.errors import AlignmentError
from rotation_merge.linalg.assignment import assign_small
from rotation_merge.linalg.finite import all_finite
from rotation_merge.linalg.scaling import limited
from rotation_merge.matching.attention import AttentionMatch, match_attention
from rotation_merge.matching.convolution import match_convolution
from rotation_merge.matching.experts import ExpertsMatch, match_experts
from rotation_merge.matching.ffn import NeuronMatch, match_ffn
from rotation_merge.matching.layer_spans import Leads, query_order_space, with_query_order, without_query_order
from rotation_merge.matching.matrix_pairs import Side, Tensors, sides
from rotation_merge.matching.options import AlignConfig
from rotation_merge.model.apply import transform_tensor
from rotation_merge.model.biases import without_hidden_biases
from rotation_merge.symmetry import HeadTransform, NeuronTransform, SpaceTransform, TranslationTransform
from rotation_merge.symmetry.admitted import asks, latent, mixer, translation
from rotation_merge.symmetry.latent import LatentTransform
from rotation_merge.symmetry.mixer import MixerTransform
from rotation_merge.symmetry.permutation import Permutation

_BLOCK = 1 << 20  # entries widened at a time

STILL = "not moved: rounding would cost more than the move gains"


def rounding_error(dtype: torch.dtype) -> float:
    """Relative mean squared error of storing values in a type.

    Spacing^2 / 12 for 1 <= x < 2, over the mean square 7/3 there.
    """
    return torch.finfo(dtype).eps ** 2 / 28


@dataclass(frozen=True)
class SpaceMatch:
    """The match of one space.

    Attributes:
        space, kind: the space's name and kind.
        group: the group its transform comes from.
        before, after: squared Frobenius distance donor - anchor over the axes that live in the space.
        anchor: squared norm of the anchor's tensors there.
        distances: how far the transform is from the identity, by part.
        seconds: wall time.
        gap: certified relative gap of the assignment, where there was one.
        head_order: the donor head that each aligned head came from, where heads may move.
        notes: what a reader should know.
    """

    space: str
    kind: str
    group: str
    before: float
    after: float
    anchor: float
    distances: dict[str, float]
    seconds: float
    gap: float | None = None
    head_order: list[int] | None = None
    notes: list[str] = field(default_factory=list)


def described(match: SpaceMatch, transform: SpaceTransform) -> SpaceMatch:
    """The record of a space under another transform; the caller supplies its distances."""
    order = transform.head_order().tolist() if isinstance(transform, HeadTransform) else None
    return replace(match, group=transform.group(), distances=transform.distances(), head_order=order, gap=None)


@dataclass(frozen=True)
class BlockMatch:
    """Transforms of a block's local spaces by space name, and the record of each."""

    transforms: dict[str, SpaceTransform]
    records: list[SpaceMatch]

    def to(self, device: torch.device) -> BlockMatch:
        """The same, its transforms on a device."""
        return BlockMatch({name: transform.to(device) for name, transform in self.transforms.items()}, self.records)


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
    streams: Mapping[str, SpaceTransform] | None = None,
    leads: Leads = MappingProxyType({}),
) -> BlockMatch:
    """Best transform of every local space of one block.

    Args:
        block: the anchor's block (the donor's has the same spaces).
        anchor, donor: tensors of the block by key, all of them finite (`check_finite`).
        options: which groups to use.
        streams: transforms of the residual streams that the donor has been given.
        leads: the spans that may move, with the element of the first layer unless this is it; others stay.
    """
    spaces = wanted_spaces(block, options)
    names = {space.name for space in spaces}
    anchor, donor = without_hidden_biases(block, anchor, names), without_hidden_biases(block, donor, names)
    matching = _Matching(block, anchor, donor, options, dict(streams or {}), leads)
    for place, space in enumerate(spaces):
        matching.match(space, {later.name for later in spaces[place + 1 :]})
    matching.settle(linked(block, spaces))
    return BlockMatch(matching.local, list(matching.records.values()))


def _at_the_limit(transform: SpaceTransform) -> list[str]:
    """A note if rescaling reached the largest or smallest allowed factor."""
    factors = [t for e in transform.elements().values() for n, t in e.tensors().items() if n in ("factor", "scale")]
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
        leads: elements of the spans that move, as `match_block` is given them.
        local: transforms of the block's own spaces.
        records: what the report says of each, by space name.
    """

    block: Block
    anchor: Tensors
    donor: Tensors
    options: AlignConfig
    streams: dict[str, SpaceTransform]
    leads: Leads
    local: dict[str, SpaceTransform] = field(default_factory=dict)
    records: dict[str, SpaceMatch] = field(default_factory=dict)

    def match(self, space: Space, unknown: Collection[str] = ()) -> None:
        """Match one space with all others fixed, if possible without the tensors of `unknown` spaces."""
        begin = time.perf_counter()
        transform, record = self._best(space, unknown)
        if self._blurred(space, record):
            transform, record = transform.still(), {**record, "after": record["before"], "notes": [STILL]}
        self.local[space.name] = transform
        self.records[space.name] = SpaceMatch(
            *(space.name, space.kind, transform.group()),
            distances=transform.distances(),
            seconds=time.perf_counter() - begin,
            head_order=transform.head_order().tolist() if isinstance(transform, HeadTransform) else None,
            **{**record, "notes": [*record.get("notes", []), *_at_the_limit(transform)]},
        )

    def _blurred(self, space: Space, record: Mapping[str, Any]) -> bool:
        """Whether a move gains less than rounding its tensors to storage costs."""
        local = {local_space.name for local_space in self.block.spaces.values()}
        names = {info.key: local & {space.name for space in info.spaces()} for info in self.block.tensors}
        touched = [key for key in self.donor if space.name in names.get(key, ())]
        if self.streams or self.leads or any(len(names[key]) > 1 for key in touched):
            return False
        least = min((rounding_error(self.donor[key].dtype) for key in touched), default=0.0)
        return record["before"] - record["after"] < least * record["anchor"]

    def settle(self, spaces: list[Space]) -> None:
        """Match spaces that share tensors in turn, from their current and from their best known transforms."""
        if not spaces:
            return
        before, _ = self._distance(spaces, {})
        distance = self._rounds(spaces)
        best = dict(self.local), dict(self.records), distance
        if before and distance > _SETTLED * before:
            for space in spaces:
                self.local[space.name] = self.local[space.name].still()
            for space in spaces:
                self.match(space)
            distance = self._rounds(spaces)
            if distance < best[2]:
                best = dict(self.local), dict(self.records), distance
        self.local, self.records = best[0], best[1]
        for space in spaces:
            (apart, norm), (after, _) = self._distance([space], {}), self._distance([space], self.local)
            self.records[space.name] = replace(self.records[space.name], before=apart, after=after, anchor=norm)

    def _rounds(self, spaces: list[Space]) -> float:
        """Repeat rounds until the squared distance stops falling; return it."""
        distance, _ = self._distance(spaces, self.local)
        for _ in range(MOST_ROUNDS):
            previous = dict(self.local), dict(self.records), distance
            for space in spaces:
                self.match(space)
            distance, _ = self._distance(spaces, self.local)
            if distance >= previous[2] * (1 - _SETTLED):
                self.local, self.records, distance = (
                    previous if distance > previous[2] else (self.local, self.records, distance)
                )
                break
        return distance

    def _distance(self, spaces: list[Space], local: Mapping[str, SpaceTransform]) -> tuple[float, float]:
        """Squared distance, and the anchor's squared norm, over the tensors of some spaces."""
        names = {space.name for space in spaces}
        touched = tuple(info for info in self.block.tensors if names & {space.name for space in info.spaces()})
        block = replace(self.block, tensors=touched)
        return squared_distances(block, None, self.anchor, self.donor, {**self.streams, **local})

    def _best(self, space: Space, unknown: Collection[str]) -> tuple[SpaceTransform, dict[str, Any]]:
        """The best transform of one space, and its record."""
        transforms = {**self.streams, **self.local}
        arguments = (self.block, space, self.anchor, self.donor)
        if space.kind == "experts":
            experts = match_experts(*arguments, transforms, self.options)
            return experts.transform, {**_distances(experts), "gap": experts.gap, "notes": experts.notes}
        if space.kind == "translation":
            return self._recorded(space, match_translation(*arguments, transforms, self.options))
        if space.kind == "attention" and space.span is not None:
            return self._spanning(space, transforms, unknown)
        axes = sides(*arguments, transforms, unknown) or sides(*arguments, transforms)
        if space.kind == "ffn":
            neurons = match_ffn(space, axes, self.options)
            return NeuronTransform(neurons.element, space.degree or 1), {**_distances(neurons), "gap": neurons.gap}
        if space.kind == "attention":
            attention = match_attention(space, axes, self.options)
            return attention.transform, {**_distances(attention), "notes": attention.notes}
        if space.kind == "convolution":
            channels, gap = match_convolution(space, axes, self.options)
            transform, record = self._recorded(space, channels)
            return transform, {**record, "gap": gap}
        match = match_latent if space.kind == "latent" else match_mixer
        return self._recorded(space, match(space, axes, self.options))

    def _spanning(
        self, space: Space, transforms: Mapping[str, SpaceTransform], unknown: Collection[str]
    ) -> tuple[SpaceTransform, dict[str, Any]]:
        """Match a space that spans layers, or follow the match of its first layer."""
        lead = self.leads.get(str(space.span))
        donor = dict(self.donor)
        moved = {} if lead is None else {space.name: without_query_order(lead)}
        for info in self.block.tensors:
            if info.key in donor and space in info.spaces():
                donor[info.key] = transform_tensor(donor[info.key], info, moved)
        arguments = (self.block, space, self.anchor, donor, transforms)
        is_lead = lead is None and space.span in self.leads
        match = match_attention(
            space if is_lead else query_order_space(space),
            sides(*arguments, unknown) or sides(*arguments),
            self.options,
        )
        transform, record = self._recorded(
            space, match.transform if lead is None else with_query_order(lead, match.transform)
        )
        return transform, {**record, "notes": match.notes}

    def _recorded(self, space: Space, transform: SpaceTransform) -> tuple[SpaceTransform, dict[str, Any]]:
        (before, norm), (after, _) = (self._distance([space], local) for local in ({}, {space.name: transform}))
        return transform, {"before": before, "after": after, "anchor": norm}


def _distances(match: AttentionMatch | ExpertsMatch | NeuronMatch) -> dict[str, float]:
    return {"before": match.before, "after": match.after, "anchor": match.anchor}


def squared_distances(
    block: Block, space: Space | None, anchor: Tensors, donor: Tensors, transforms: Mapping[str, SpaceTransform]
) -> tuple[float, float]:
    """Squared distance donor - anchor and squared norm of the anchor, over the tensors touching `space` (None: all)."""
    sums: list[Tensor] = []
    for info in block.tensors:
        if info.key in anchor and info.key in donor and (space is None or space in info.spaces()):
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


def match_latent(space: Space, sides: list[Side], options: AlignConfig) -> LatentTransform:
    """The best element: a signed assignment of coordinates, or Procrustes if gains are folded."""
    group = latent(space, options)
    if all(torch.equal(side.anchor, side.donor) for side in sides):
        return group.identity()
    products = torch.zeros(group.size, group.size, dtype=torch.float64)
    gains = torch.zeros_like(products)
    for side in sides:
        product = side.anchor.double() @ side.donor.to(side.anchor.device).double().T
        (gains if side.role == "gain" else products).add_(product.cpu())
    return group.solve(products, gains)


def match_translation(
    block: Block,
    space: Space,
    anchor: Tensors,
    donor: Tensors,
    transforms: Mapping[str, SpaceTransform],
    options: AlignConfig,
) -> TranslationTransform:
    """The nearest translation, for any order of the rows: an order does not change their mean."""
    group = translation(space, options)
    other_transforms = {name: transform for name, transform in transforms.items() if name != space.name}
    for info in block.tensors:
        if info.common == space and info.key in anchor and info.key in donor:
            return group.solve(anchor[info.key], transform_tensor(donor[info.key], info, other_transforms))
    return group.identity()


def match_mixer(space: Space, sides: list[Side], options: AlignConfig) -> MixerTransform:
    """The best order of groups, of heads inside groups, and of channels."""
    group = mixer(space, options)
    if all(torch.equal(side.anchor, side.donor) for side in sides):
        return group.identity()
    groups, per_group = group.groups, group.per_group
    leaves = _Level(sides, "head", "own", groups * per_group, group.own, group.channels)
    tops = _Level(sides, "group", "shared", groups, group.shared, group.channels)
    if not group.order:
        rows, all_heads = torch.arange(groups), torch.arange(groups * per_group)
        shared, channel_orders = tops.orders(rows, rows), leaves.orders(all_heads, all_heads)
        still = group.identity()
        return MixerTransform(still.groups, still.heads, Permutation(shared), Permutation(channel_orders))
    values, heads = tops.gains(), torch.zeros(groups, groups, per_group, dtype=torch.long)
    inner = leaves.gains().unflatten(1, (groups, per_group)).unflatten(0, (groups, per_group))
    for i in range(groups):
        for j in range(groups):
            heads[i, j] = assign_small(inner[i, :, j])
            values[i, j] += inner[i, torch.arange(per_group), j, heads[i, j]].sum()
    order = assign_small(values)
    rows = torch.arange(groups)
    chosen = heads[rows, order]
    donor = (order[:, None] * per_group + chosen).flatten()
    shared, channel_orders = tops.orders(rows, order), leaves.orders(torch.arange(groups * per_group), donor)
    return MixerTransform(order, chosen, Permutation(shared), Permutation(channel_orders))


class _Level:
    """Groups or heads, with their numbers and permutable channels."""

    def __init__(
        self, all_sides: Iterable[Side], number: str, channel: str, count: int, size: int, permute: bool
    ) -> None:
        sides = list(all_sides)
        self.count, self.size, self.permute = count, size, permute
        self.numbers = [_matrices(s, (count, -1)) for s in sides if s.role == number]
        self.channels = [_matrices(s, (count, size, -1)) for s in sides if s.role == channel]

    def products(self, i: int, j: int) -> Tensor:
        """<A, B> of the channels of the anchor's i and the donor's j, (size, size)."""
        total = torch.zeros(self.size, self.size, dtype=torch.float64)
        for a, b in self.channels:
            total += a[i].double() @ b[j].double().T
        return total

    def gains(self) -> Tensor:
        """Upper bound on each pair's reduction of half the squared norms, (count, count)."""
        total = torch.zeros(self.count, self.count, dtype=torch.float64)
        for a, b in self.numbers:
            total += a.double() @ b.double().T
        if self.channels:
            for i in range(self.count):
                for j in range(self.count):
                    total[i, j] += self._best(self.products(i, j))[1]
        return total

    def _best(self, products: Tensor) -> tuple[Tensor, float]:
        index = assign_small(products) if self.permute else torch.arange(self.size)
        return index, float(products.gather(1, index[:, None]).sum())

    def orders(self, anchor: Tensor, donor: Tensor) -> Tensor:
        """The best orders of the channels of pairs, (N, size)."""
        if not self.channels:
            return torch.arange(self.size).repeat(len(anchor), 1)
        pairs = zip(anchor.tolist(), donor.tolist(), strict=True)
        return torch.stack([self._best(self.products(i, j))[0] for i, j in pairs])


def _matrices(side: Side, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return side.anchor.reshape(shape).cpu(), side.donor.reshape(shape).cpu()
