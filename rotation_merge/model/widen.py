r"""Widens a model to larger sizes with the same function, by zeros around its weights.

New neurons and heads are read by nobody: their rows and columns are zero. A stream of d coordinates becomes one of d'
whose new coordinates are zero. A norm then takes its mean square over d' instead of d: all writers of the stream are
multiplied by c = sqrt(d'/d), so that the epsilon has the same effect, and the norm's output, c times as large, is
multiplied by a gain divided by c. A LayerNorm's mean stays zero if every writer is centred (layer scales folded into
it), as for rotations (`fold`). Rectangular semi-orthogonal maps between models of two widths are rotations of the
larger one on such models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from torch import Tensor
from torch.nn.functional import pad

from rotation_merge.architecture.model import (
    Architecture,
    Axis,
    Block,
    Norm,
    Space,
    TensorInfo,
    factors_of,
    spell,
    stem_of,
)
from rotation_merge.errors import CheckpointError
from rotation_merge.model.apply import at_least_float32, join_axis, split_axis
from rotation_merge.model.fold import fold_tensor
from rotation_merge.model.source import TensorSource, read_tensor

_WORDS = {"groups": "KV heads", "per_group": "query heads for each KV head", "head_dim": "dimensions of a head"}

REMEDY = "only neurons, heads and residual streams can be widened"


class Widening:
    """The widening of a model to larger sizes.

    Args:
        narrow: the model's architecture.
        wide: the same resolved for the larger sizes, under the same tensor names.
        tied: a head that shares the embedding's tensor, if any.
        where, anchor: names of the model and of the one whose sizes it takes.

    Raises:
        CheckpointError: a size is smaller than the model's, or cannot change without changing the outputs.
    """

    def __init__(self, narrow: Architecture, wide: Architecture, tied: str | None, donor: str, anchor: str) -> None:
        self.narrow, self.wide = narrow, wide
        self.names = donor, anchor
        self.tied = None if tied is None else stem_of(tied)
        wide_spaces = wide.spaces()
        grown = {
            name: (space, wide_spaces[name])
            for name, space in narrow.spaces().items()
            if space.sizes != wide_spaces[name].sizes
        }
        for space, larger in grown.values():
            self._check(space, larger)
        streams = narrow.streams.keys() & grown.keys()
        self.factors = {
            name: math.sqrt(wide_spaces[name].sizes["size"] / narrow.streams[name].sizes["size"]) for name in streams
        }
        self.centred = tuple(name for name in sorted(streams) if narrow.layer_normed(name))
        scaled = {scale.stream for block in narrow.blocks for scale in block.scales}
        self.folded = tuple(name for name in self.centred if name in scaled)
        self.normed = {
            name: {stem_of(k) for b in narrow.blocks for n in b.norms if n.stream == name for k in n.reads}
            for name in streams
        }
        self.heads = {name: self._counted(*pair) for name, pair in grown.items() if pair[0].kind == "attention"}
        self.grown = grown
        self.places = narrow.places()
        self.larger = {b.name: {info.key: info for info in b.tensors} for b in wide.blocks}

    @property
    def growth(self) -> str:
        """The sizes that grow, in words; empty if none do."""
        words_by_order: dict[str, None] = {}
        for name, (narrow, wide) in self.grown.items():
            if narrow.kind == "translation":
                continue
            kind = name.rpartition(".")[2]
            sizes = ((key, narrow.sizes[key], size) for key, size in wide.sizes.items() if narrow.sizes[key] != size)
            words = (f"{kind} {_WORDS.get(key, key)} {small} to {large}" for key, small, large in sizes)
            words_by_order |= dict.fromkeys(words)
        return ", ".join(words_by_order)

    def tensor(self, block: Block, info: TensorInfo, get: Callable[[str], Tensor | None]) -> Tensor:
        """One tensor of the wider model, in float32 at least; the stored one itself where nothing changes.

        Args:
            get: the block's tensors as they are stored, by key.
        """
        stored = get(info.key)
        assert stored is not None
        larger = self.larger[block.name][info.key]
        factor = self.factor(block, info)
        result = fold_tensor(block, info, get, self.folded, self.centred)
        if result is stored and info.axes == larger.axes and factor == 1.0:
            return stored
        result = at_least_float32(result)
        if factor != 1.0:
            offset = next((norm.offset for norm in block.norms if norm.gain == info.key), 0.0)
            result = (result.double() + offset).mul(factor).sub(offset).to(result.dtype)
        fill = self._fill(info, result)
        for dim, (axis, wide) in enumerate(zip(info.axes, larger.axes, strict=True)):
            result = padded_axis(result, dim, axis, wide, fill)
        return result

    def cut(self, block: Block, info: TensorInfo, wide: Tensor) -> Tensor:
        """The entries of a wider tensor that belong to this model, still multiplied by `factor`."""
        larger = self.larger[block.name][info.key]
        for dim, (axis, wide_axis) in enumerate(zip(info.axes, larger.axes, strict=True)):
            wide = cut_axis(wide, dim, axis, wide_axis)
        return wide

    def trimmed(self, name: str, wide: Tensor) -> Tensor:
        """The change of a wider model's tensor without the entries that pad its gains."""
        block, info, _ = self.places[name]
        if not _is_gain(info) or info.axes == self.larger[block.name][info.key].axes:
            return wide
        return padded_axis(self.cut(block, info, wide), 0, info.axes[0], self.larger[block.name][info.key].axes[0], 0.0)

    def factor(self, block: Block, info: TensorInfo, folded: Collection[str] = ()) -> float:
        """The factor that a tensor's weights are multiplied by.

        Args:
            folded: streams whose gains are folded into their readers.
        """
        factor = 1.0
        lives = (dict.fromkeys((part.space.name, part.role) for part in axis.parts) for axis in info.axes)
        for name, role in (pair for pairs in lives for pair in pairs):  # what reads a stream several times over, once
            width = self.factors.get(name)
            if width is not None and role == "write":
                factor *= 1.0 if self._rooted(info, self.narrow.streams[name]) else width
            elif width is not None and role == "read":
                factor *= 1 / width if name in folded else self._read(block, info, name, width)
            elif width is not None and role == "gain":
                factor /= 1.0 if name in folded else self._gain(block, info, name, width)
            elif width is not None and role == "shift" and name in folded:
                factor *= width  # which is divided by the gain
            elif name in self.heads:
                factor *= self.heads[name].get(role, 1.0)
        return factor

    def _read(self, block: Block, info: TensorInfo, stream: str, width: float) -> float:
        """A reader of the stream whose norm sees a wider stream; beside a tied head, divided by the head's factor."""
        stem = stem_of(info.key)
        if stem not in self.normed[stream]:
            return 1 / width
        if not any(self._feeds_tied(norm) and stem in map(stem_of, norm.reads) for norm in block.norms):
            return 1.0
        return 1.0 if self.narrow.streams[stream].rooted else width

    def _gain(self, block: Block, info: TensorInfo, name: str, width: float) -> float:
        norm = next((n for n in block.norms if n.stream == name and n.gain == info.key), None)
        if norm is None or not norm.reads:  # a layer scale, or a norm that writes the stream, which is to be larger
            return 1.0
        if not self._feeds_tied(norm):
            return width
        return width if self.narrow.streams[name].rooted else width**2

    @staticmethod
    def _rooted(info: TensorInfo, stream: Space) -> bool:
        """Whether a tensor is an embedding that the model itself multiplies by the root of the stream's size."""
        return stream.rooted and info.vocabulary_axis is not None

    def _feeds_tied(self, norm: Norm) -> bool:
        named = (spell(read, self.narrow.base, self.narrow.spelling) for read in norm.reads)
        return self.tied is not None and self.tied in map(stem_of, named)

    @staticmethod
    def _fill(info: TensorInfo, tensor: Tensor) -> float:
        """New entries of a gain multiply zeros and are the mean of the others; all else is zero."""
        return float(tensor.mean()) if _is_gain(info) else 0.0

    def _counted(self, narrow: Space, wide: Space) -> dict[str, float]:
        """Factors of an attention's tensors by role."""
        factors = {}
        if narrow.norm in ("rms_all", "rms_clipped"):
            for role in ("q", "k"):
                width = math.sqrt(math.prod(wide.factors(role)) / math.prod(narrow.factors(role)))
                factors.update({role: width, f"{role}_gain": 1 / width})
        elif narrow.sizes["head_dim"] != wide.sizes["head_dim"]:
            factors["q"] = math.sqrt(wide.sizes["head_dim"] / narrow.sizes["head_dim"])
        return factors

    def _check(self, narrow: Space, wide: Space) -> None:
        def refuse(problem: str) -> CheckpointError:
            return CheckpointError(
                f"cannot take the sizes of {self.names[1]}: '{narrow.name}' {problem}",
                where=self.names[0],
                remedy=REMEDY,
            )

        smaller = [name for name, size in narrow.sizes.items() if size > wide.sizes.get(name, size)]
        if smaller:
            name = smaller[0]
            raise refuse(f"has {name} {narrow.sizes[name]}, more than {wide.sizes[name]}")
        differing = {name for name, size in narrow.sizes.items() if size != wide.sizes.get(name)}
        if narrow.kind == "attention":
            if differing & {"head_dim", "value_dim"} and (narrow.rotary or narrow.norm is not None):
                why = "rotary frequencies" if narrow.rotary else "the norm of queries and keys"
                dims = narrow.sizes["head_dim"], wide.sizes["head_dim"]
                raise refuse(f"has heads of {dims[0]} dimensions, against {dims[1]}, on which {why} depend")
            if differing & {"groups", "per_group"} and not (narrow.free_order and narrow.free_groups):
                raise refuse("has heads whose roles depend on their number (ALiBi, shared biases)")
        elif narrow.kind == "stream":
            self._check_stream(narrow.name, refuse)
        elif narrow.kind in ("ffn", "convolution"):
            if any(self._normed(info, narrow) for info in self.narrow.tensors()):
                raise refuse("is normalised, and added zeros would change its norm")
        elif narrow.kind != "translation":
            raise refuse(f"is a space of kind {narrow.kind}")

    @staticmethod
    def _normed(info: TensorInfo, space: Space) -> bool:
        """Whether a tensor is a gain of a space."""
        return len(info.axes) == 1 and not info.key.endswith(".bias") and space in info.spaces()

    def _check_stream(self, name: str, refuse: Callable[[str], CheckpointError]) -> None:
        groups = self.narrow.stream_groups[name]
        if groups == ("none",):
            raise refuse("is an output of the model")
        if self.narrow.layer_normed(name) and "rotation" not in groups:
            raise refuse("has a LayerNorm, and added zeros would change its mean")
        if self.narrow.layer_normed(name) and self.tied is not None:
            raise refuse("is centred for its LayerNorms, which would change the tied head; add 'untie'")
        if any(
            block.index is None and not norm.reads
            for block in self.narrow.blocks
            for norm in block.norms
            if norm.stream == name
        ):
            raise refuse("has a norm outside of the layers whose readers are not known")


class WidenedSource:
    """The tensors of a wider model, by the names of its checkpoint."""

    def __init__(self, source: TensorSource, widening: Widening) -> None:
        self.source, self.widening = source, widening

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __getitem__(self, name: str, /) -> Tensor:
        if name not in self.widening.places:
            return self.source[name]
        block, info, piece = self.widening.places[name]

        def get(key: str) -> Tensor | None:
            info_here = block.tensor(key)
            return None if info_here is None else read_tensor(info_here, self.source)

        tensor = self.widening.tensor(block, info, get)
        return tensor[piece] if info.stacked else tensor


def wide_shapes(shapes: Mapping[str, tuple[int, ...]], widening: Widening) -> dict[str, tuple[int, ...]]:
    """The shapes of a wider model's tensors, from the narrow model's."""
    result = dict(shapes)
    for name in shapes.keys() & widening.places.keys():
        block, info, _ = widening.places[name]
        sizes = [axis.size for axis in widening.larger[block.name][info.key].axes[info.stacked :]]
        result[name] = tuple(old if new is None else new for old, new in zip(shapes[name], sizes, strict=True))
    return result


def _is_gain(info: TensorInfo) -> bool:
    return len(info.axes) == 1 and any(part.role == "gain" for part in info.axes[0].parts)


def padded_axis(x: Tensor, dim: int, narrow: Axis, wide: Axis, fill: float) -> Tensor:
    """An axis with entries for all that the wider one has."""
    if narrow.size == wide.size or not narrow.pieces:
        return x
    pieces = split_axis(x, dim, narrow)
    for number, (piece, larger) in enumerate(zip(narrow.pieces, wide.pieces, strict=True)):
        more = [new - old for old, new in zip(factors_of(piece), factors_of(larger), strict=True)]
        behind = pieces[number].ndim - dim - len(more)
        widths = [0, 0] * behind + [n for extra in reversed(more) for n in (0, extra)]
        pieces[number] = pad(pieces[number], widths, value=fill)
    return join_axis(pieces, dim, wide)


def cut_axis(x: Tensor, dim: int, narrow: Axis, wide: Axis) -> Tensor:
    """The reverse of `padded_axis`: of a wider axis the entries that the narrower one has."""
    if narrow.size == wide.size or not narrow.pieces:
        return x
    pieces = split_axis(x, dim, wide)
    for number, piece in enumerate(narrow.pieces):
        for at, size in enumerate(factors_of(piece), dim):
            pieces[number] = pieces[number].narrow(at, 0, size)
    return join_axis(pieces, dim, narrow)
