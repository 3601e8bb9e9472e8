"""Linear maps among the tensors, with their inputs and outputs, from the labelled axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Axis, Block, Norm, TensorInfo
from rotation_merge.model.apply import times_gain
from rotation_merge.model.forms import lives, pieces

READERS = ("read", "o", "out", "own")
"""Roles of an axis that reads activations."""

GIVERS = ("write", "in", "gate", "q", "k", "v", "index")
"""Roles of an axis that activations come out of."""


@dataclass(frozen=True)
class LinearMap:
    """A weight that multiplies activations.

    Attributes:
        reads, gives: its dimension of inputs and that of outputs.
        stacked: whether dimension 0 counts experts, each a map of its own.
    """

    block: Block
    info: TensorInfo
    reads: int
    gives: int
    stacked: bool

    @property
    def inputs(self) -> Axis:
        return self.info.axes[self.reads]

    @property
    def outputs(self) -> Axis:
        return self.info.axes[self.gives]

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """A tensor of the map's shape as (outputs, inputs), or (experts, outputs, inputs)."""
        return tensor if self.gives < self.reads else tensor.mT

    as_stored = as_matrices
    """The other way: transposing is its own inverse."""

    @property
    def norm(self) -> Norm | None:
        """The norm that feeds the map, if its gain and shift can be determined from its input."""
        stem = self.info.key.removesuffix(".weight")
        return next((n for n in self.block.norms if self.info.key in n.reads or stem in n.reads), None)


def along_inputs(linear: LinearMap, gain: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """A norm's gain and shift along the whole axis that a map reads, which may hold the stream several times over."""
    norm = linear.norm
    size = linear.inputs.size
    if norm is None or size is None:
        raise KeyError(linear.info.key)
    axis = TensorInfo(linear.info.key, linear.info.names, (linear.inputs,))
    full = torch.ones(size, dtype=gain.dtype, device=gain.device)
    gains = times_gain(full, axis, gain, norm.stream)
    if shift is None:
        return gains, torch.zeros_like(gains)
    elsewhere = times_gain(full, axis, torch.zeros_like(gain), norm.stream)
    return gains, times_gain(full, axis, shift, norm.stream) - elsewhere


def linear_map(block: Block, info: TensorInfo, tied: bool = False) -> LinearMap | None:
    """The map that a tensor is, or None: embeddings, biases, gains, convolutions.

    Args:
        tied: whether an embedding of tokens is the head, too, and so a map from the stream to the vocabulary.
    """
    axes = info.axes
    stacked = len(axes) == 3 and _is(axes[0], ("index",))
    if len(axes) != 2 + stacked:
        return None
    first, last = (int(stacked), len(axes) - 1)
    for reads, gives in ((last, first), (first, last)):
        if _is(axes[reads], READERS) and not _is(axes[gives], ("gain", "shift")):
            return LinearMap(block, info, reads, gives, stacked)
    head = axes[last].label == "fixed" and (axes[first].label in ("fixed", "classes") or _is(axes[first], GIVERS))
    if tied and not stacked and info.vocabulary_axis is not None:
        return LinearMap(block, info, 1 - info.vocabulary_axis, info.vocabulary_axis, stacked)
    return LinearMap(block, info, last, first, stacked) if head else None


def _is(axis: Axis, roles: tuple[str, ...]) -> bool:
    return bool(axis.parts) and all(part.role in roles for part in axis.parts)


def maps_of(block: Block) -> list[LinearMap]:
    """Every map of a block."""
    return [linear for info in block.tensors if (linear := linear_map(block, info)) is not None]


def linear_maps(architecture: Architecture) -> dict[str, LinearMap]:
    """Every map by the first of its tensor's names."""
    return {linear.info.name: linear for block in architecture.blocks for linear in maps_of(block)}


def same_map(target: LinearMap, candidates: Sequence[LinearMap]) -> tuple[LinearMap, slice] | None:
    """Finds a map in another spelling of the same block: the map, and which of its outputs.

    A checkpoint may hold gate and up apart that a module holds as one tensor, or the other way round.
    """
    living = lives(target.info)
    for candidate in candidates:
        if candidate.info.key == target.info.key:
            return candidate, slice(None)
    for candidate in candidates:
        if any(living) and lives(candidate.info) == living:
            return candidate, slice(None)
        for piece, cut in pieces(candidate.info):
            if piece == living and cut.dim == candidate.gives:
                return candidate, slice(cut.start, cut.start + cut.length)
    return None
