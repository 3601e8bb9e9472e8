r"""Maps of the stream for every layer by itself, for what fine-tuning changed: how much two bases agree there.

Alignment has one map for a stream, as the skip connection demands of whole models; a change need not keep to that.
Behind the alignment let the columns of X be what a layer of the new base reads and writes of a stream (coordinates x
all the rest, each tensor with the same say), and those of Y the old base's. The layer's map,

    M = S^-1 (X Y^T + Y X^T + 2 r),   S = X X^T + Y Y^T + 2 r,   r = RIDGE * mean(diag (X X^T + Y Y^T) / 2)

moves what the layer's maps read and write. Its eigenvalues are correlations of the two, none beyond one: directions in
which they agree stay as they are; where they differ, a change means something else in the new base, and is made
smaller. Of two bases that are one in other coordinates, X = Y and M is the identity.

Which layers take theirs is decided by weights that neither was found from: the stream's map and the layer's are both
found on every other column, and M^T, the regression of X on Y and of Y on X, has to bring them nearer to each other in
the other columns than the stream's map does, each at its best scale; and the other way round.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block, Part, TensorInfo
from rotation_merge.groups import Orthogonal, SpaceTransform, StreamGroup
from rotation_merge.matching.apply import join_axis, placed, split_axis, transform_tensor
from rotation_merge.matching.fold import Folded
from rotation_merge.matching.measured import cross_product
from rotation_merge.matching.model import Alignment
from rotation_merge.matching.sides import Tensors, axis_views
from rotation_merge.matching.state import TensorSource, read_block

RIDGE = 0.3
"""Pulls a layer's map towards the identity, relative to how large the layer's weights are."""

BETTER = 1 + 1e-6
"""What a layer's map has to tell over what the stream's tells: where bases are one, rounding decides nothing."""

SIDES = ("read", "write")

Maps = dict[str, Tensor]
"""By stream: (size, size), float64; ``moved change = M @ aligned change`` along what reads or writes the stream."""


@dataclass
class LayerStreams:
    """The maps of all layers of two aligned bases, found when a layer is asked for.

    Attributes:
        architecture: of the two, in the sizes in which they are aligned.
        new, old: as they are stored, under its names.
        alignment: of the old base to the new one.
        forced: every layer takes its map, whatever weights say.
        told: by name of the layers looked at so far: of what they were not found from, the share that its own map
            tells, over the share that the stream's map tells.
    """

    architecture: Architecture
    new: TensorSource
    old: TensorSource
    alignment: Alignment
    forced: bool = False
    told: dict[str, float] = field(default_factory=dict)
    _kept: tuple[str, Maps] = ("", {})
    _lock: Any = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        if folded := self.alignment.folded:
            self.new, self.old = (Folded(self.architecture, source, folded) for source in (self.new, self.old))
        self._blocks = {block.name: block for block in self.architecture.blocks}

    def __call__(self, name: str) -> Maps:
        """The maps of the streams in a block, by its name; none of what is no layer, or keeps the alignment's."""
        block = self._blocks.get(name)
        if block is None or block.index is None or not self._streams:
            return {}
        with self._lock:
            if self._kept[0] != name:
                self._kept = name, self._found(block)
            return self._kept[1]

    @cached_property
    def _streams(self) -> tuple[str, ...]:
        return tuple(name for name in self.architecture.streams if name in self.alignment.transforms)

    @cached_property
    def _turns(self) -> dict[str, list[Tensor]]:
        """By stream: what turns the aligned old base as either half of all columns alone would have it."""
        sums = {name: [_Half(), _Half()] for name in self._streams}
        for block in self.architecture.blocks:
            for name, halves in self._halves(block, cross_only=True).items():
                sums[name] = [total + half for total, half in zip(sums[name], halves, strict=True)]
        found = {}
        for name, halves in sums.items():
            turned = isinstance(self.alignment.transforms[name].elements()["stream"], Orthogonal)
            group = self.architecture.stream_group(name, "rotation" if turned else "none")
            found[name] = [_solved(group, half.both) for half in halves]
        return found

    def _halves(self, block: Block, cross_only: bool = False) -> dict[str, list[_Half]]:
        """By stream: what a block's maps read and write of it, every other column and the others."""
        new, old = (read_block(block, source) for source in (self.new, self.old))
        found = {}
        for stream in self._streams:
            found[stream] = [_Half(), _Half()]
            for a, b in _columns(block, new, old, self.alignment.transforms, stream):
                size = float(a.norm() * b.norm())
                for which, half in enumerate(found[stream]):
                    half.add(a[:, which::2], b[:, which::2], size, cross_only)
        return found

    def _found(self, block: Block) -> Maps:
        found: Maps = {}
        own = shared = 0.0
        for stream, halves in self._halves(block).items():
            if not all(half.any for half in halves):
                continue
            found[stream] = (halves[0] + halves[1]).map()
            for which, turn in enumerate(() if self.forced else self._turns[stream]):
                known, unknown = (halves[i].turned(turn) for i in (which, 1 - which))
                own += unknown.told(known.map().mT)
                shared += unknown.told(torch.eye(len(turn)).to(turn))
        if not found:
            return {}
        self.told[block.name] = own / shared if shared > 0 else 1.0
        return found if self.forced or self.told[block.name] > BETTER else {}

    def words(self) -> list[str]:
        """What the reader of a report should know, once all layers have been moved."""
        if not self.told:
            return []
        what = "For the change alone, a map of the stream of its own for every layer was tried beside the shared one"
        if self.forced:
            return [f"{what}, and taken in all {len(self.told)}."]
        own = sum(ratio > BETTER for ratio in self.told.values())
        each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.told.items())
        return [
            f"{what}, and taken in {own} of {len(self.told)}: where, both found on half of the weights, it brings the "
            f"other half of a layer's nearer to the new base's (share of them that it tells, over that of the shared "
            f"map: {each})."
        ]


@dataclass
class _Half:
    """Products of columns: X Y^T, X X^T and Y Y^T, (size, size) each, float64."""

    both: Tensor = field(default_factory=lambda: torch.zeros(()).double())
    new: Tensor = field(default_factory=lambda: torch.zeros(()).double())
    old: Tensor = field(default_factory=lambda: torch.zeros(()).double())

    @property
    def any(self) -> bool:
        return self.both.ndim > 0

    def add(self, a: Tensor, b: Tensor, size: float, cross_only: bool = False) -> None:
        """Columns of one tensor, which has the same say as any other of such a size."""
        if a.shape[1] and size:
            self.both = self.both + _product(a, b) / size
            if not cross_only:
                self.new = self.new + _product(a, a) / size
                self.old = self.old + _product(b, b) / size

    def __add__(self, other: _Half) -> _Half:
        return _Half(self.both + other.both, self.new + other.new, self.old + other.old)

    def turned(self, turn: Tensor) -> _Half:
        """The same, Y turned."""
        return _Half(self.both @ turn.mT, self.new, turn @ self.old @ turn.mT)

    def map(self) -> Tensor:
        """How X and Y go together, by directions."""
        gram, cross = self.new + self.old, self.both + self.both.mT
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram)).to(gram)
        found: Tensor = torch.linalg.solve(gram + ridge, cross + ridge)
        return found

    def told(self, given: Tensor) -> float:
        """What a map tells of the columns: the share of ``|X|^2 + |Y|^2`` that ``X ~ c M Y`` and ``Y ~ c M X`` take off
        at the best number c, which is not below zero."""
        gram, cross = self.new + self.old, self.both + self.both.mT
        along, size = float((given * cross).sum()), float((given * (given @ gram)).sum())
        return max(along, 0.0) ** 2 / (size * float(gram.trace())) if size > 0 else 0.0


def _solved(group: StreamGroup, products: Tensor) -> Tensor:
    """The matrix of a group's best element."""
    eye = torch.eye(group.size).to(products)
    return group.solve(products, torch.zeros_like(products)).act(eye, "write", 0) if products.ndim else eye


def _columns(
    block: Block, new: Tensors, old: Tensors, transforms: Mapping[str, SpaceTransform], stream: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """What each of a layer's maps reads and writes of a stream, (size, all the rest): the new base's, the old one's."""
    for info in block.tensors:
        a, b = new.get(info.key), old.get(info.key)
        if a is None or b is None or len(info.axes) < 2 or not a.is_floating_point() or a.shape != b.shape:
            continue
        if not any(_moves(part, (stream,)) for axis in info.axes for part in axis.parts):
            continue
        moved = transform_tensor(b, info, transforms)
        for dim, axis in enumerate(info.axes):
            for part, start, x, y in axis_views(a, moved, dim, axis) if axis.parts else ():
                if _moves(part, (stream,)):
                    yield x.movedim(start, 0).flatten(1), y.movedim(start, 0).flatten(1)


def along_streams(change: Tensor, info: TensorInfo, maps: Mapping[str, Tensor]) -> Tensor:
    """A change in the new base's coordinates, moved on by its layer's maps along what reads or writes their streams."""
    for dim, axis in enumerate(info.axes):
        if not any(_moves(part, maps) for part in axis.parts):
            continue
        pieces = split_axis(change, dim, axis)
        for where, piece in enumerate(axis.pieces):
            for part, start in placed(piece, dim):
                if _moves(part, maps):
                    own = maps[part.space.name].to(pieces[where])
                    pieces[where] = (pieces[where].movedim(start, -1) @ own.mT).movedim(-1, start)
        change = join_axis(pieces, dim, axis)
    return change


def _moves(part: Part, streams: Container[str]) -> bool:
    return part.role in SIDES and part.space.name in streams


def _product(a: Tensor, b: Tensor) -> Tensor:
    return cross_product(a, b, precise=True)
