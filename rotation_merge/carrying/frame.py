r"""Two bases of different shapes in common sizes, layer by layer.

Each is widened (`widen`), with the same outputs, to sizes that hold both models; there the two are aligned like any
pair. A change that was moved to the new base's coordinates is then cut down to its own sizes: rows of an orthogonal map
of the larger stream are a semi-orthogonal map between the two, heads and neurons that meet zeros are left over. The
rest of the change does not fit the new base.

Source: rectangular maps as in GLMC (arXiv 2506.22712), for changes as in Theseus (arXiv 2602.12952).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Space, TensorInfo
from rotation_merge.errors import CheckpointError, RecipeError
from rotation_merge.matching.check_pair import Layers, paired_blocks
from rotation_merge.model.checkpoint import Model
from rotation_merge.model.source import TensorSource, read_tensor
from rotation_merge.model.sources import RestructuredSource
from rotation_merge.model.widen import WidenedSource, Widening

WIDTHS = "add 'widths' to carry between bases of different sizes"
DEPTH = "pair the layers with 'layers_map': OLD:NEW,... or auto"


class FramedSource(WidenedSource):
    """A model with the old base's shapes, under the names and in the sizes of a frame.

    Attributes:
        narrow_source: its tensors under their own names.
        paired: those names that have a partner in the new base.
    """

    def __init__(self, narrow_source: TensorSource, named: RestructuredSource, widening: Widening) -> None:
        super().__init__(named, widening)
        self.narrow_source = narrow_source
        self.paired = {
            *named.names.values(),
            *(n for recomputed, _ in named.made.values() for c in recomputed.cuts for n in c.info.names),
        }


@dataclass(frozen=True)
class Frame:
    """Common shapes in which two bases are aligned.

    Attributes:
        new, old: their architectures.
        layers: by module, which layer of the new base meets which of the old one.
        common: the new base's blocks that meet one of the old base's, in sizes that hold both.
        grow_new, grow_old: widening of each base to these sizes, under the new base's names.
        tied: a head that shares an embedding's tensor in either.
        likeness: where layers were paired by similarity: by module, the mean of their likeness.
    """

    new: Architecture
    old: Architecture
    layers: Layers
    common: Architecture
    grow_new: Widening
    grow_old: Widening
    tied: str | None = None
    likeness: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def _blocks(self) -> dict[str, Block]:
        return {block.name: block for block in self.common.blocks}

    def block(self, block: Block) -> Block | None:
        """The common block of a new base's block; None if no old block is paired with it."""
        return self._blocks.get(block.name)

    @cached_property
    def paired_architecture(self) -> Architecture:
        """The old base's paired blocks in the common sizes, under the new base's names."""
        return _with_spaces(_paired_architecture(self.new, self.old, self.layers), self.common.spaces())

    @property
    def folded(self) -> tuple[str, ...]:
        """Streams whose layer scales were folded in one of the two before widening."""
        return tuple(dict.fromkeys((*self.grow_new.folded, *self.grow_old.folded)))

    def of_new(self, source: TensorSource) -> TensorSource:
        """The new base in the common sizes."""
        return WidenedSource(source, self.grow_new)

    def of_old(self, source: TensorSource, architecture: Architecture) -> FramedSource:
        """The old base or its fine-tune in the common sizes, under the new base's names.

        Args:
            architecture: by which its tensors are named.
        """
        renamed = _paired_architecture(self.new, architecture, self.layers)
        return FramedSource(source, RestructuredSource(source, renamed, self.grow_old.narrow), self.grow_old)

    def of(self, block: Block, info: TensorInfo) -> TensorInfo:
        """A tensor of the new base in the common sizes."""
        framed = self._blocks[block.name].tensor(info.key)
        assert framed is not None
        return framed

    def cut(self, block: Block, info: TensorInfo, moved: Tensor) -> Tensor:
        """Cut a moved change to the new base's shapes, at the common scale."""
        return self.grow_new.cut(block, info, moved)

    def scaled(self, block: Block, info: TensorInfo, cut: Tensor, folded: Sequence[str]) -> Tensor:
        """A change that was cut, at the new base's own scale.

        Args:
            folded: the streams whose gains are folded in the new base.
        """
        return cut / self.grow_new.factor(block, info, folded)

    @property
    def alone(self) -> tuple[Block, ...]:
        """The old base's layers that meet none of the new base's."""
        paired = {(module, old) for module, pairs in self.layers.items() for _, old in pairs}
        return tuple(b for b in self.old.blocks if b.index is not None and (b.module, b.index) not in paired)

    def unmatched_norms(self, old: FramedSource, tuned: FramedSource) -> dict[str, float]:
        """Squared norms of the changes without a partner, by block of the old base."""
        changes: dict[str, float] = {}
        for block in self.old.blocks:
            for info in (info for info in block.tensors if not old.paired & {*info.names, *info.tied}):
                before, after = (read_tensor(info, framed.narrow_source) for framed in (old, tuned))
                if before is not None and after is not None and before.is_floating_point():
                    change = float((after.double() - before.double()).square().sum())
                    changes[block.name] = changes.get(block.name, 0.0) + change
        return changes

    def notes(self, names: tuple[str, str]) -> list[str]:
        """Lines for the report on padding and paired layers.

        Args:
            names: of the new base and of the old one.
        """
        new, old = names
        lines = []
        if self.grow_new.growth:
            lines.append(
                f"`{old}` is larger than `{new}` ({self.grow_new.growth}): `{new}` was padded with zeros and aligned; "
                "the part of the change on the padding is left out."
            )
        if self.grow_old.growth:
            lines.append(
                f"`{old}` is smaller than `{new}` ({self.grow_old.growth}): its weights were padded with zeros, which "
                "keeps its outputs."
            )
        for module, pairs in self.layers.items():
            even = [a for a, _ in pairs] == [b for _, b in pairs] and len(pairs) == len(self.new.layers(module))
            if even and not self.alone and module not in self.likeness:
                continue
            scope = "" if len(self.layers) == 1 else f" of the {module}"
            pairs_text = ", ".join(f"{old_layer}:{new_layer}" for new_layer, old_layer in pairs)
            how = f", by similarity (mean cosine {self.likeness[module]:.2f})" if module in self.likeness else ""
            lines.append(f"Layers{scope} of `{old}` paired with layers of `{new}`{how}, old:new: {pairs_text}.")
        return lines


def frame_of(new: Architecture, old: Architecture, layers: Layers, tied: str | None, names: tuple[str, str]) -> Frame:
    """The common frame of two bases of one family.

    Args:
        layers: by module, which layer of the new base meets which of the old one.
        tied: a head that shares an embedding's tensor in either, under the new base's names; None: none, or it is
            given one of its own.
        names: of the new base and of the old one.

    Raises:
        CheckpointError: sizes differ that decide a function.
    """
    paired = {block.name for block, _ in paired_blocks(new, old, layers)}
    ours = replace(new, blocks=tuple(block for block in new.blocks if block.name in paired))
    its = _paired_architecture(new, old, layers).spaces()
    small = {name: its.get(name, space) for name, space in ours.spaces().items()}
    for name, space in ours.spaces().items():
        if small[name].kind != space.kind or small[name].sizes.keys() != space.sizes.keys():
            problem = f"'{name}' is a space of kind {small[name].kind}, against {space.kind} in {names[0]}"
            raise CheckpointError(problem, where=names[1], remedy="carry between bases of one kind")

    def sized(choose: Callable[[int, int], int]) -> Architecture:
        return _with_spaces(
            ours,
            {
                name: replace(space, sizes={key: choose(n, small[name].sizes[key]) for key, n in space.sizes.items()})
                for name, space in ours.spaces().items()
            },
        )

    common, old_form = sized(max), sized(lambda _, n: n)
    grow_new = Widening(ours, common, tied, *names)
    grow_old = Widening(old_form, common, tied, names[1], names[0])
    return Frame(new, old, layers, common, grow_new, grow_old, tied)


def _paired_architecture(new: Architecture, old: Architecture, layers: Layers) -> Architecture:
    """The blocks of the old base that meet one of the new base's, their places and spaces called as there."""
    blocks = []
    for new_block, old_block in paired_blocks(new, old, layers):
        called = {
            space.name: replace(space, name=new_block.spaces[local].name)
            for local, space in old_block.spaces.items()
            if local in new_block.spaces
        }
        blocks.append(replace(_block_with(old_block, called), name=new_block.name, index=new_block.index))
    return replace(old, blocks=tuple(blocks))


def _with_spaces(architecture: Architecture, spaces: Mapping[str, Space]) -> Architecture:
    """The architecture with some spaces, by name, replaced."""
    return replace(
        architecture,
        streams={name: spaces.get(name, space) for name, space in architecture.streams.items()},
        blocks=tuple(_block_with(block, spaces) for block in architecture.blocks),
    )


def _block_with(block: Block, spaces: Mapping[str, Space]) -> Block:
    def axis(axis_before: Axis) -> Axis:
        pieces = (
            tuple(replace(part, space=spaces.get(part.space.name, part.space)) for part in piece)
            for piece in axis_before.pieces
        )
        return replace(axis_before, pieces=tuple(pieces))

    def tensor(info: TensorInfo) -> TensorInfo:
        common = info.common if info.common is None else spaces.get(info.common.name, info.common)
        return replace(info, axes=tuple(map(axis, info.axes)), common=common)

    return replace(
        block,
        tensors=tuple(map(tensor, block.tensors)),
        spaces={local: spaces.get(space.name, space) for local, space in block.spaces.items()},
    )


@dataclass
class FittingNorms:
    """Squared norms of the parts of a change that fit the new base's shapes.

    Attributes:
        found: by block and tensor of the new base: squared norm of the part that fits, and of the whole change.
        lost: by name of the old base's blocks: squared norm of changes in tensors without partner.
    """

    found: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)

    def share(self) -> float:
        """Share of the change that fits the new base's shapes; 1 if nothing changed."""
        whole = sum(norm for _, norm in self.found.values()) + sum(self.lost.values())
        return sum(placed for placed, _ in self.found.values()) / whole if whole else 1.0

    def words(self) -> list[str]:
        """Lines for the report on the share of each block."""
        if not self.found:
            return []
        blocks: dict[str, list[float]] = {}
        for (block, _), norms in self.found.items():
            sums = blocks.setdefault(block, [0.0, 0.0])
            for i, norm in enumerate(norms):
                sums[i] += norm
        each = [f"{name} {placed / whole:.0%}" for name, (placed, whole) in blocks.items() if whole]
        line = f"{self.share():.1%} of the change's squared norm fits the new base"
        lines = [f"{line}: {', '.join(each)}." if each else f"{line}."]
        if any(self.lost.values()):
            whole = sum(norm for _, norm in self.found.values()) + sum(self.lost.values())
            gone = ", ".join(f"{name} ({norm / whole:.1%} of the change)" for name, norm in self.lost.items())
            lines.append(f"Not carried, because the new base has no such part: {gone}.")
        return lines


AUTO = "auto"
_ENTRY = re.compile(r"(?:(?P<module>\w+)=)?(?P<old>\d+)(?:-(?P<old_end>\d+))?:(?P<new>\d+)(?:-(?P<new_end>\d+))?")


@dataclass(frozen=True)
class ResizeOptions:
    """Options for bases of different widths and depths.

    Attributes:
        widths: their sizes.
        layers: which layer of the old base meets which of the new one, `0:0,1-3:2-4`, before it the module's name
            where there are several (`encoder=0:0,1:2,decoder=0:0`); or `auto`, by similarity. Empty: each meets the
            one at its own place, and both have as many.
    """

    widths: bool = False
    layers: str = ""

    @property
    def is_set(self) -> bool:
        return self.widths or bool(self.layers)

    def layer_pairs(self, new: Model, old: Model) -> Layers:
        """Pairs of matching layers (new base, old base), by module. `auto` pairs layers at equal relative depth.

        Raises:
            RotationMergeError: the bases are of unlike depth and nothing is said of it; or layers are named that are
                not there, twice, or out of order.
        """
        counts = {
            module: tuple(len(model.architecture.layers(module)) for model in (new, old))
            for module in new.architecture.layers_key
        }
        if self.layers and self.layers != AUTO:
            return given(self.layers, counts)
        if not self.layers and (
            unlike := [m for m, (new_count, old_count) in counts.items() if new_count != old_count]
        ):
            new_count, old_count = counts[unlike[0]]
            problem = f"has {old_count} layers, {new.reference} has {new_count}"
            raise CheckpointError(problem, where=str(old.reference), remedy=DEPTH)
        return {module: spread(*pair) for module, pair in counts.items()}


def spread(new: int, old: int) -> list[tuple[int, int]]:
    """Select as many layers as the shallower model has, evenly spread over the deeper one."""
    count = min(new, old)
    if count < 2:
        return [(0, 0)][:count]
    steps = [[round(i * (depth - 1) / (count - 1)) for i in range(count)] for depth in (new, old)]
    return list(zip(*steps, strict=True))


def given(text: str, counts: dict[str, tuple[int, ...]]) -> dict[str, list[tuple[int, int]]]:
    """The layers that meet, as a user writes them.

    Args:
        counts: by module, the number of layers of the new and of the old base.

    Raises:
        RecipeError: it cannot be read, or does not fit these bases.
    """
    wrong = RecipeError(f"layers_map is '{text}'", remedy="write OLD:NEW or ranges, such as 0-3:0-3,4:6, or auto")
    layers: dict[str, list[tuple[int, int]]] = {module: [] for module in counts}
    module = next(iter(counts))
    for entry in re.split(r"[,;\s]+", text.strip()):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise wrong
        module = match["module"] or module
        if module not in counts:
            raise RecipeError(f"layers_map names '{module}'", remedy=f"the modules are: {', '.join(counts)}")
        old, new = (range(int(match[k]), int(match[f"{k}_end"] or match[k]) + 1) for k in ("old", "new"))
        if len(old) != len(new) or not old:
            raise wrong
        layers[module] += zip(new, old, strict=True)
    for module, pairs in layers.items():
        for which, base in ((0, "new"), (1, "old")):
            numbers = [pair[which] for pair in pairs]
            if numbers and max(numbers) >= counts[module][which]:
                problem = f"layers_map names layer {max(numbers)} of the {base} base, which has {counts[module][which]}"
                raise RecipeError(problem, remedy="layers are counted from 0")
            if any(a >= b for a, b in pairwise(numbers)):
                raise RecipeError(
                    f"layers_map is '{text}': it names layers of the {base} base twice or out of order",
                    remedy="name each layer once, in ascending order",
                )
    return layers
