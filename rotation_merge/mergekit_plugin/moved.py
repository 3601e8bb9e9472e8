"""A recipe's models in the anchor's coordinates: every tensor of the output, computed when it is asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.averaging.average import check_finite
from rotation_merge.carrying.carrier import Carrier
from rotation_merge.carrying.delta import Delta
from rotation_merge.errors import AlignmentError
from rotation_merge.matching.alignment import Alignment
from rotation_merge.matching.moving import Mover
from rotation_merge.matching.run import Run
from rotation_merge.mergekit_plugin.output import OutputBlock
from rotation_merge.model import biases
from rotation_merge.model.blocks import read_tensor
from rotation_merge.model.fold import Fold, folded_tensors
from rotation_merge.model.rows import padded_as, vocabulary_axes
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.model.view import View
from rotation_merge.symmetry import Transform


def named_as(tensors: Tensors, stored: Block, named: Block) -> Tensors:
    """A model's tensors of one block, under the names of another block; tied ones under their first name."""
    present: dict[str, str] = {}
    for info in named.tensors:
        stored_info = stored.tensor(info.key) or info
        for new, old in zip(info.names, stored_info.names, strict=True):
            known = next((name for name in (old, *stored_info.tied) if name in tensors), None)
            if known is not None:
                present[new] = known
    return tensors.renamed(present).only(present)


def touches(info: TensorInfo, block: Block, whole: bool) -> bool:
    """Whether a tensor has an axis that transforms may move: those of the block's spaces; `whole`: and of streams."""
    local = {space.name for space in block.spaces.values()}
    return any(space.name in local or (whole and space.kind == "stream") for space in info.spaces())


@dataclass(frozen=True, eq=False)
class MovedBlock:
    """One model's tensors of one output block, in the anchor's coordinates.

    Attributes:
        architecture: of the anchor.
        block: the anchor's, by whose names all tensors are known here.
        tensors, anchor: of the model and of the anchor, as they are stored.
        maps: gives the transforms of the block's spaces and of the streams; None: it does not move.
        whole: whether streams may move.
        fold: folds streams in every model of the merge, for the least precise type that results are rounded to.
        storage: type in which the merge stores a tensor of the model (None: its own).
        rounds: whether results are rounded to that, once; else an average of our own rounds what it gives.
        computed: whether tensors come unrounded from an adapter.
    """

    architecture: Architecture
    block: Block
    tensors: Tensors = field(repr=False)
    anchor: Tensors = field(repr=False)
    name: str
    maps: Callable[[], Mapping[str, Transform]] | None = None
    whole: bool = False
    fold: Fold | None = None
    storage: Callable[[TensorInfo], torch.dtype | None] = lambda _: None
    rounds: bool = True
    computed: bool = False

    def tensor(self, info: TensorInfo) -> Tensor | None:
        """A tensor of the block; None if the model lacks it.

        Raises:
            CheckpointError: it holds NaN or infinity, perhaps only in the type that it is rounded to.
        """
        kind = self.tensors.dtypes.get(info.name)
        if kind is None or not kind.is_floating_point or not self.changes(info):
            return read_tensor(info, self.tensors)
        tensor = self._moved(info, self.dtype(info))
        if tensor is not None:
            check_finite(tensor, info.name, self.name)
        return tensor

    def dtype(self, info: TensorInfo) -> torch.dtype | None:
        """The type that a moved tensor is rounded to; None: that in which it is read."""
        storage = self.storage(info)
        return storage if self.rounds else torch.promote_types(storage or torch.float32, torch.float32)

    def changes(self, info: TensorInfo) -> bool:
        """Whether a tensor is computed, and not taken as it is stored."""
        folds = self.fold is not None and self.fold.touches(self.block, info)
        return folds or self.computed or self.moves(info)

    @property
    def folded(self) -> tuple[str, ...]:
        """The streams that are folded."""
        return () if self.fold is None else self.fold.streams

    @property
    def least(self) -> torch.dtype | None:
        """The type that folding has to survive."""
        return None if self.fold is None else self.fold.dtype

    def moves(self, info: TensorInfo) -> bool:
        """Whether a transform may touch a tensor, or it takes biases of the anchor's."""
        if self.maps is None:
            return False
        return touches(info, self.block, self.whole) or biases.touches(self.block, info)

    def _moved(self, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        mover = self._mover if self.moves(info) else self._still
        return mover.tensor(self.block, info, dtype)

    @cached_property
    def alignment(self) -> Alignment:
        return Alignment(self.maps() if self.maps is not None else {}, self.folded)  # type: ignore[arg-type]

    @cached_property
    def _mover(self) -> Mover:
        anchor = folded_tensors(self.architecture, self.anchor, self.folded)
        return Mover(self.architecture, self.tensors, self.alignment.transforms, self.folded, anchor, self.least)

    @cached_property
    def _still(self) -> Mover:
        return Mover(self.architecture, self.tensors, {}, self.folded, least=self.least)


@dataclass(frozen=True, eq=False)
class ChangedBlock(MovedBlock):
    """One output block of the anchor with a fine-tune's change: anchor + scale * moved(tuned - origin).

    Attributes:
        tensors: of the fine-tune.
        origin: of the model that it was tuned from.
        base: the anchor.
        rows: where ids or sizes differ, the anchor's and the origin's rows of the same tokens.
        run: takes the squared norms of change and origin.
    """

    origin: Tensors = field(kw_only=True, repr=False)
    base: View = field(kw_only=True, repr=False)
    rows: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    run: Run | None = None

    def changes(self, info: TensorInfo) -> bool:
        return True

    def _moved(self, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        sources = (self.anchor, self.origin, self._tuned)
        anchor, origin, tuned = (source.shapes.get(info.name) for source in sources)
        if anchor is None or origin is None or tuned is None:
            raise self._cannot(info, "a model lacks it")
        free = info.vocabulary_axis if self.rows is not None else None
        lengths = zip(anchor, origin, strict=False)
        fits = len(anchor) == len(origin) and all(a == b or dim == free for dim, (a, b) in enumerate(lengths))
        if tuned != origin or not fits:
            raise self._cannot(info, "shapes differ")
        return self._delta.tensor(self.block, info, dtype or self.tensors.dtypes[info.name], self._record)

    def _record(self, change: float, before: float) -> None:
        if self.run is not None:
            self.run.transport(self.name, change, before)

    def _cannot(self, info: TensorInfo, why: str) -> AlignmentError:
        problem = f"tensor '{info.name}' cannot be carried over: {why}"
        remedy = "name it under 'exclude' to copy it from base_model"
        return AlignmentError(problem, where=self.name, remedy=remedy)

    @cached_property
    def _tuned(self) -> Tensors:
        """The fine-tune's tensors with the origin's padding of the vocabulary."""
        return padded_as(self.tensors, self.origin, vocabulary_axes(self.block.tensors))

    @cached_property
    def _delta(self) -> Delta:
        carrier = Carrier(self.architecture, self.origin, self.anchor, self.alignment, self.rows, self.least)
        return Delta(carrier, self._tuned, self.base, self.scale)


class OutputTensors:
    """The tensors of one model by the names of the output; those that are stored in pieces are computed once.

    Args:
        blocks: of the output, each with the model's part in it.
    """

    def __init__(self, blocks: Sequence[tuple[OutputBlock, MovedBlock]]) -> None:
        self.places: dict[str, tuple[MovedBlock, TensorInfo, int]] = {}
        self._stacks: dict[tuple[int, str], dict[int, Tensor]] = defaultdict(dict)
        self._locks: dict[tuple[int, str], Lock] = defaultdict(Lock)
        shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, torch.dtype]()
        for out, part in blocks:
            for info, frame in out.pairs():
                for piece, (name, stored) in enumerate(zip(info.names, frame.names, strict=True)):
                    if stored in part.tensors:
                        self.places[name] = part, frame, piece
                        shapes[name], dtypes[name] = part.tensors.shapes[stored], part.tensors.dtypes[stored]
        self.tensors = Tensors(shapes, dtypes, by_name(self._read))

    def _read(self, name: str) -> Tensor:
        part, info, piece = self.places[name]
        if not info.stacked:
            return self._computed(part, info)
        key = id(part), info.key
        with self._locks[key]:
            stack = self._stacks[key]
            if piece not in stack:
                stack.update(enumerate(self._computed(part, info).unbind(0)))
            return stack.pop(piece)

    def _computed(self, part: MovedBlock, info: TensorInfo) -> Tensor:
        tensor = part.tensor(info)
        assert tensor is not None
        return tensor
