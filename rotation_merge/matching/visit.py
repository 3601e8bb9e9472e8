"""Visiting the blocks of two models; each block of both is one piece of work, for a thread, a device or a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from threading import Lock
from typing import Any

from rotation_merge.architecture.model import Architecture, Block
from rotation_merge.matching.block import BlockMatch, checked, match_block, squared_distances, wanted_spaces
from rotation_merge.matching.options import AlignConfig
from rotation_merge.matching.stream import Piece, StreamMeasurement, StreamSums, Transforms, measured
from rotation_merge.model.apply import at_least_float32, read_block, transform_tensor
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.tensors import TensorSource, as_tensors
from rotation_merge.model.vocabulary import stored_tensors, vocabulary_axes, vocabulary_slices, with_rows
from rotation_merge.workers import BYTES_A_WEIGHT, workers_for

BYTES_FOLDED = 20
"""As `BYTES_A_WEIGHT`, of models that are folded: both are widened. With freed memory in between, pass after pass, a
layer of 8B shape takes 28 at its peak: workers then have 0.7 of what is free."""

PROBED = 1 << 16
"""Bytes of a model that are kept from the question on which device it lies."""


@dataclass(frozen=True, eq=False)
class Visits:
    """Two models, read block by block.

    Attributes:
        architecture: of the anchor; both sources go by its tensor names.
        anchor, donor: as they are stored.
        options: of every block, by its name.
        folded: streams whose norms are folded as blocks are read.
        cached: whether what fits in memory is kept, as the models are read more than once.
        device: where blocks are brought; None: they stay where they are read.
        home: where sums are brought; None: they stay where they are computed.
    """

    architecture: Architecture
    anchor: TensorSource
    donor: TensorSource
    options: Mapping[str, AlignConfig]
    folded: tuple[str, ...] = ()
    cached: bool = False
    device: str | None = None
    home: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Visits, tuple(getattr(self, field.name) for field in fields(self))

    @cached_property
    def _reading(self) -> Lock:
        return Lock()

    @cached_property
    def _stored(self) -> list[TensorSource]:
        sources = [as_tensors(source) for source in (self.anchor, self.donor)]
        return [(s if self.device is None else s.on(self.device)).cached(PROBED) for s in sources]

    @cached_property
    def _sources(self) -> list[TensorSource]:
        """Both models, folded."""
        sources = [folded_tensors(self.architecture, source, self.folded) for source in self._stored]
        return [as_tensors(source).cached() for source in sources] if self.cached else sources

    @property
    def at_once(self) -> int:
        """The number of blocks matched at once; 0 on an accelerator, which one block keeps busy."""
        layers = [block for block in self.architecture.blocks if block.index is not None]
        shapes = as_tensors(self.anchor).shapes
        sizes = {n: math.prod(shapes[n]) for block in layers[:1] for i in block.tensors for n in i.names if n in shapes}
        smallest = self._stored[0][min(sizes, key=lambda name: sizes[name])] if sizes else None
        if smallest is not None and smallest.device.type != "cpu":
            return 0
        return workers_for(sum(sizes.values()) * (BYTES_FOLDED if self.folded else BYTES_A_WEIGHT) // BYTES_A_WEIGHT)

    def on(self, device: str, home: str) -> Visits:
        return replace(self, device=device, home=home)

    def is_plain(self, block: Block) -> bool:
        """Whether a block says the same of the streams in every pass.

        It is outside of layers, has no matched space, and no tensor between two streams.
        """
        sides = (sum(any(p.space.kind == "stream" for p in axis.parts) for axis in i.axes) for i in block.tensors)
        matched = wanted_spaces(block, self.options[block.name])
        return block.index is None and not matched and max(sides, default=0) <= 1

    def piece(self, step: Callable[[Visits, Block], Any], item: int) -> Any:
        """A step, which is one of the following methods with its arguments, on the block of a number."""
        return step(self, self.architecture.blocks[item])

    def measurements(self, block: Block, streams: Transforms, precise: bool = False) -> list[StreamMeasurement]:
        """What the tensors of a plain block say of the streams, whatever their maps are.

        Args:
            precise: products are summed in float64.
        """
        return [tensor.to(self.home) for tensor in measured(self._pieces(block), streams, precise)]

    def sums(
        self,
        block: Block,
        streams: Transforms,
        weights: Mapping[str, float],
        equal: bool = False,
        precise: bool = False,
    ) -> StreamSums:
        """Match all local spaces under the streams' transforms, and sum what the block says of the streams.

        Tensors have the roots of their weights as factors, in place; not those that are stored without an offset.

        Args:
            weights: of tensors by name, for the local spaces; one not named counts as it stands.
            equal: every tensor has the same say in the sums.
            precise: products are summed in float64.
        """
        ((_, anchor, donor),) = self._pieces(block)
        options = self.options[block.name]
        weighted = [i for i in block.tensors if i.name in weights and not i.offset and wanted_spaces(block, options)]
        factors = {info.key: weights[info.name] for info in weighted}
        for tensors in (anchor, donor):
            for key in factors.keys() & tensors.keys():
                tensors[key] = at_least_float32(tensors[key]) * factors[key] ** 0.5
        maps = streams | match_block(block, anchor, donor, options, streams, with_rows=False).transforms
        sums = StreamSums.of(measured([(block, anchor, donor)], maps, precise), maps, equal)
        applied = {info.name: factors.get(info.key, 1.0) for info in block.tensors}
        of_stored = {name: weight * applied[name] for name, weight in sums.weights.items()}
        return replace(
            sums, weights=of_stored, products={key: x.to(device=self.home) for key, x in sums.products.items()}
        )

    def match(self, block: Block, streams: Transforms) -> BlockMatch:
        """Match the local spaces without weights under the streams' transforms."""
        result, options = BlockMatch({}, []), self.options[block.name]
        matched = wanted_spaces(block, options)
        for part, anchor, donor in self._pieces(block) if streams or matched else ():
            before, norm = squared_distances(part, anchor, donor, {}) if streams else (0.0, 0.0)
            for info in (info for info in part.tensors if info.key in donor):  # turned once, not for every look at it
                donor[info.key] = transform_tensor(donor[info.key], info, streams)
            match = match_block(part, anchor, donor, options) if matched else BlockMatch({}, [])
            after = squared_distances(part, anchor, donor, match.transforms)[0] if streams else 0.0
            result = result.plus(replace(match, whole=(before, after, norm)))
        return result

    def _pieces(self, block: Block) -> Iterator[Piece]:
        """A block with the tensors of both models, checked; of a plain one, long vocabularies in slices."""
        slices = self._slices(block) if self.is_plain(block) else {}
        short = replace(block, tensors=tuple(info for info in block.tensors if info.key not in slices))
        with self._reading:
            whole = [read_block(short, source) for source in self._sources]
            stored = [stored_tensors(block, source) for source in self._stored] if slices else []
        yield short, *checked(short, *whole)
        axes = vocabulary_axes(block.tensors)
        for info in (info for info in block.tensors if info.key in slices):
            part = replace(block, tensors=(info,))
            for rows in slices[info.key]:
                sliced = (with_rows(source, axes, rows) for source in stored)
                folded = (folded_tensors(self.architecture, source, self.folded) for source in sliced)
                yield part, *checked(part, *(read_block(part, source) for source in folded))

    def _slices(self, block: Block) -> dict[str, list[slice]]:
        """The slices of long vocabularies, by the keys of their tensors."""
        result = {}
        for info in block.tensors:
            known = [[s.shapes[n] for n in (*info.names, *info.tied) if n in s] for s in map(as_tensors, self._stored)]
            if all(known) and (slices := vocabulary_slices(info, [shapes[0] for shapes in known])):
                result[info.key] = slices
        return result
