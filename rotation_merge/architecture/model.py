"""An architecture file made concrete for one model: spaces with sizes, tensors with labelled axes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from rotation_merge.symmetry import Space, Transform
from rotation_merge.symmetry.admitted import STREAM_GROUPS, WIDEST, SpaceGroup, admitted, stream_group


@dataclass(frozen=True)
class Part:
    """One role of a space on an axis; a space of a kind in `STILL` is never moved."""

    space: Space
    role: str

    @property
    def factors(self) -> tuple[int, ...]:
        return self.space.factors(self.role)

    @property
    def size(self) -> int:
        return math.prod(self.factors)


AxisPiece = tuple[Part, ...]
"""Parts multiplied with one another, outermost first: `attn.head * rope.q` has an entry for each pair of both."""


def factors_of(piece: AxisPiece) -> tuple[int, ...]:
    """The dimensions that a piece of an axis splits into."""
    return tuple(factor for part in piece for factor in part.factors)


@dataclass(frozen=True)
class Axis:
    """A dimension of a tensor, made of pieces (none: outside every space).

    Attributes:
        pieces: one after the other.
        depth: number of leading factors that the pieces share: they follow one another for each entry of these (0:
            whole pieces do; 1: they alternate for each KV group, or for each neuron).
        label: as the architecture file has it.
    """

    pieces: tuple[AxisPiece, ...] = ()
    depth: int = 0
    label: str = "fixed"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all pieces that live in a space."""
        return tuple(part for piece in self.pieces for part in piece if part.space.kind != "fixed")

    @cached_property
    def size(self) -> int | None:
        """Required length of the dimension; None where the architecture leaves it open."""
        return sum(math.prod(factors_of(piece)) for piece in self.pieces) if self.pieces else None


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the checkpoint.

    Attributes:
        key: its name in the architecture file, the same in every model of the family.
        names: its name in the checkpoint; several where one is stored for each entry of the first axis.
        axes: outermost first.
        tied: names it may be stored under instead.
        unless: name of a tensor that holds the same weights in another form.
        common: the translations of its rows, which only a softmax sees; None where there are none.
        offset: added to the stored value (gains stored as 1 + weight).
    """

    key: str
    names: tuple[str, ...]
    axes: tuple[Axis, ...]
    optional: bool = False
    stacked: bool = False
    tied: tuple[str, ...] = ()
    unless: str | None = None
    offset: float = 0.0
    common: Space | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    def spaces(self) -> Iterator[Space]:
        for axis in self.axes:
            for part in axis.parts:
                yield part.space
        if self.common is not None:
            yield self.common

    def roles(self) -> list[tuple[str, str]]:
        """The spaces by name, each with the role that an axis plays there."""
        roles = [(part.space.name, part.role) for axis in self.axes for part in axis.parts]
        return roles if self.common is None else [*roles, (self.common.name, "")]

    @property
    def vocabulary_axis(self) -> int | None:
        return next((d for d, axis in enumerate(self.axes) if axis.label == "vocabulary"), None)


@dataclass(frozen=True)
class Norm:
    """A norm of a stream: keys of its gain and shift, and of the tensors that read it (None: cannot be folded)."""

    stream: str
    gain: str
    shift: str | None
    reads: tuple[str, ...]
    layer: bool
    offset: float


@dataclass(frozen=True)
class Scale:
    """A layer scale: key of the gain and of the tensors (weight, bias) that it multiplies."""

    stream: str
    gain: str
    writes: tuple[str, ...]


@dataclass(frozen=True)
class Block:
    """Tensors that share local spaces: one layer, or the tensors before or after the layers.

    Attributes:
        name: module path, which recipe filters see: `model.layers.3`.
        index: layer number, None before and after the layers.
        dropped: name beginnings of weights that stand there and are not read, as in the architecture file.
        known: cache of derived facts, by the name of the function that computed them.
    """

    name: str
    module: str
    index: int | None
    place: str
    tensors: tuple[TensorInfo, ...]
    spaces: dict[str, Space] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    scales: tuple[Scale, ...] = ()
    dropped: tuple[str, ...] = ()
    known: dict[str, Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    @cached_property
    def _by_key(self) -> dict[str, TensorInfo]:
        return {info.key: info for info in reversed(self.tensors)}

    def tensor(self, key: str) -> TensorInfo | None:
        return self._by_key.get(key)


@dataclass(frozen=True)
class Architecture:
    """One model of a family.

    Attributes:
        family: name of the architecture file.
        streams: residual streams by name.
        stream_groups: the groups each stream admits, smallest first.
        handed_out: by stream that admits none: the output of the model's forward that it is.
        blocks: in the order of the forward pass.
        layers_key: config key of each module's number of layers.
        base, spelling: naming of the checkpoint's tensors (see `ArchitectureSpec`).
    """

    family: str
    streams: dict[str, Space]
    stream_groups: dict[str, tuple[str, ...]]
    blocks: tuple[Block, ...]
    layers_key: dict[str, str]
    handed_out: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[str, ...] = ()
    base: str = ""
    spelling: tuple[tuple[str, str], ...] = ()

    def spaces(self) -> dict[str, Space]:
        """Every space by name, the streams first."""
        return {**self.streams, **{s.name: s for block in self.blocks for s in block.spaces.values()}}

    def layer_normed(self, stream: str) -> bool:
        """Whether a norm of the stream takes off its mean, so that rotations have to fix the all-ones vector."""
        return any(norm.layer for block in self.blocks for norm in block.norms if norm.stream == stream)

    def stream_group(self, stream: str, kind: str) -> SpaceGroup:
        """The group of a residual stream that is called `kind` in recipes."""
        return stream_group(kind, self.streams[stream].sizes["size"], self.layer_normed(stream))

    def widest_group(self, space: Space, transform: Transform) -> SpaceGroup:
        """The widest group that a transform of a space may be of, whatever recipe it comes from."""
        turned = transform.turns_stream
        if space.kind == "stream":
            kinds = [kind for kind in self.stream_groups[space.name] if (kind == "rotation") == turned]
            return self.stream_group(space.name, kinds[-1] if kinds else "none")
        return admitted(space, replace(WIDEST, residual="rotation" if turned else "none"))

    def admitting(self, kind: str) -> list[str]:
        """The streams that admit a residual group."""
        return [name for name, groups in self.stream_groups.items() if kind in groups]

    def folds(self, groups: Mapping[str, str]) -> tuple[str, ...]:
        """Streams and latents that are folded if streams are moved by these groups."""
        streams = [name for name, group in groups.items() if group == "rotation"]
        if not streams:
            return ()
        local = (space.name for block in self.blocks for space in block.spaces.values() if space.kind == "latent")
        return (*streams, *local)

    @property
    def residual_groups(self) -> list[str]:
        """The residual groups that every stream admits, smallest first: `none` at least."""
        whole = len(self.streams) or 1
        return [kind for kind in STREAM_GROUPS if kind == "none" or len(self.admitting(kind)) == whole]

    def names(self, info: TensorInfo, index: int | None) -> tuple[str, ...]:
        """Names of a tensor in layer `index` of a checkpoint that is spelled like this one."""
        key = info.key if index is None else info.key.replace("{i}", str(index))
        name = spell(key, self.base, self.spelling)
        return tuple(name.replace("{e}", str(e)) for e in range(len(info.names))) if info.stacked else (name,)

    def tensors(self) -> Iterator[TensorInfo]:
        for block in self.blocks:
            yield from block.tensors

    def heads(self) -> Iterator[TensorInfo]:
        """Heads that may share the tensor of an embedding."""
        after = (info for block in self.blocks if block.place == "after" for info in block.tensors)
        return (info for info in after if info.tied and len(info.axes) == 2)

    def layers(self, module: str) -> list[Block]:
        return [b for b in self.blocks if b.module == module and b.index is not None]

    def without(self, names: Collection[str]) -> Architecture:
        """Return the architecture without the named tensors."""
        if not names:
            return self
        known = [tuple(info for info in block.tensors if info.name not in names) for block in self.blocks]
        blocks = zip(self.blocks, known, strict=True)
        return replace(self, blocks=tuple(b if len(k) == len(b.tensors) else replace(b, tensors=k) for b, k in blocks))

    def named(self) -> dict[str, TensorInfo]:
        """Every checkpoint name and the tensor it belongs to."""
        return {name: tensor for tensor in self.tensors() for name in tensor.names}

    def places(self) -> dict[str, tuple[Block, TensorInfo, int]]:
        """Every checkpoint name's block and tensor, and which piece of the tensor it is."""
        return {
            n: (block, info, i) for block in self.blocks for info in block.tensors for i, n in enumerate(info.names)
        }


def spell(name: str, base: str, spelling: Iterable[tuple[str, str]]) -> str:
    """A name of an architecture file as a checkpoint spells it."""
    name = name.replace("{base}", base)
    for file_spelling, checkpoint_spelling in spelling:
        name = name.replace(file_spelling, checkpoint_spelling)
    return name


def stem_of(key: str) -> str:
    """The common prefix of a map's weight and bias."""
    return key.removesuffix(".weight").removesuffix(".bias")
