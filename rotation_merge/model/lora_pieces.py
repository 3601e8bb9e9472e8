"""What an adapter changes in one form and a checkpoint stores in another: experts apart or all in one tensor, gates and
values (or queries, keys and values) apart or one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from rotation_merge.architecture.model import Architecture
from rotation_merge.architecture.registry import Spot
from rotation_merge.model.adapters import Adapter
from rotation_merge.model.factors import stacks
from rotation_merge.model.lora import AdapterEntry, entry_of, sizes
from rotation_merge.model.sources import ComposedTensor, Cut, other_form

Span = tuple[int, int, int]
"""Some of a tensor's entries: dimension, first, number."""


@dataclass(frozen=True)
class Piece:
    """The part of a change that lands in one stored tensor, or in a part of it.

    Attributes:
        name: the adapter's, of what is changed.
        entry: what a change of low rank is; None: of another kind.
        count: of experts whose factors stand in one.
        expert: whose part of the change; at: which entry of the stored tensor gets it. None: all.
        source_span: of the change, of one expert where one is told; lands: of the stored tensor likewise. None: all.
    """

    name: str
    entry: AdapterEntry | None
    count: int
    expert: int | None
    at: int | None
    source_span: Span | None
    lands: Span | None

    def sizes(self, adapter: Adapter) -> tuple[int, ...]:
        """Of the change that this is a part of."""
        if self.entry is None:
            change = adapter.changes[self.name]
            return adapter.shapes[str(change.value or change.shift)]
        shape = sizes(adapter, self.entry.change)
        return (*([self.count] * bool(self.count)), *(shape[::-1] if self.entry.transposed else shape))

    def fits(self, adapter: Adapter, stored: tuple[int, ...]) -> bool:
        """Whether this part has the size of what it lands in."""
        piece_shape, stored_shape = (
            list(self.sizes(adapter)[self.expert is not None :]),
            list(stored[self.at is not None :]),
        )
        for shape, span in ((piece_shape, self.source_span), (stored_shape, self.lands)):
            if span is not None:
                shape[span[0]] = span[2] if span[1] + span[2] <= shape[span[0]] else 0
        return piece_shape == stored_shape

    def apply(self, adapter: Adapter, tensor: Tensor) -> Tensor:
        """Add this part of the change to a stored tensor, in place."""
        region, change = _some(tensor if self.at is None else tensor[self.at], self.lands), adapter.changes[self.name]
        if change.value is not None:
            region.copy_(self._part(adapter.tensor(change.value)))
        if change.shift is not None:
            region.add_(self._part(adapter.tensor(change.shift)).to(tensor), alpha=change.scale)
        if self.entry is not None:
            region.add_(_some(self._product(adapter, self.entry, tensor), self.source_span), alpha=self.entry.scale)
        return tensor

    def _part(self, whole: Tensor) -> Tensor:
        return _some(whole if self.expert is None else whole[self.expert], self.source_span)

    def _product(self, adapter: Adapter, entry: AdapterEntry, like: Tensor) -> Tensor:
        """B A as the adapter's form of the weight has it; peft has factors of E experts as A (E rank, in), experts one
        after the other, and B (out, rank E), experts side by side."""
        a, b = adapter.factor(entry.a).to(like), adapter.factor(entry.b).to(like)
        if self.count:
            a, b = a.reshape(self.count, -1, a.shape[-1]), b.reshape(len(b), -1, self.count).permute(2, 0, 1)
            if self.expert is not None:
                a, b = a[self.expert], b[self.expert]
        product = b @ a
        return product.mT if entry.transposed else product


def pieces_of(
    adapter: Adapter, name: str, architecture: Architecture, names: Mapping[str, Spot]
) -> dict[str, list[Piece]]:
    """The parts of an adapter's change, by the checkpoint tensor that each changes; empty if there is none.

    Args:
        architecture: of the checkpoint.
        names: all that its tensors may go by.
    """
    change = adapter.changes[name]
    entry = entry_of(adapter, name, names) if change.a is not None else None
    spot = entry.spot if entry is not None else names.get(name)
    composed = _made(spot, architecture) if spot is not None and change.magnitude is None else None
    if spot is None or composed is None:
        return {}
    info = spot.info
    alone = entry.expert if entry is not None else (info.names.index(name) if info.stacked else None)
    whole = bool(stacks(info)) and alone is None
    count = (info.axes[0].size or 0) if whole else 0
    pieces: dict[str, list[Piece]] = {}
    start = 0
    for cut in composed.cuts:
        extent = cut.info.axes[cut.dim].size
        length = cut.length if cut.dim == composed.dim else (cut.info.axes[composed.dim].size or 0)
        for expert in range(count) if whole and (cut.info.stacked or info.stacked) else (alone,):
            less = int(expert is not None)
            source_span = None if len(composed.cuts) == 1 else (composed.dim - less, start, length)
            lands = None if cut.length == extent else (cut.dim - less, cut.start, cut.length)
            key, at = (cut.info.names[expert or 0], None) if cut.info.stacked else (cut.info.name, expert)
            pieces.setdefault(key, []).append(
                Piece(name, entry, count, expert if whole else None, at, source_span, lands)
            )
        start += length
    return pieces


def _some(tensor: Tensor, span: Span | None) -> Tensor:
    return tensor if span is None else tensor.narrow(*span)


def _made(spot: Spot, architecture: Architecture) -> ComposedTensor | None:
    """The stored tensors that a tensor is composed of; None if there are none."""
    for block in architecture.blocks:
        if spot.in_block(block):
            if (info := block.tensor(spot.info.key)) is not None:
                return ComposedTensor(0, (Cut(info, 0, 0, info.axes[0].size or 0),))
            return other_form(block, replace(block, tensors=(*block.tensors, spot.info))).get(spot.info.key)
    return None
