r"""Statistics of a donor, moved with the donor into the anchor's coordinates.

If alignment moves a map's weight by ``W' = L_out W L_in``, the map's inputs move by the inverse transpose of the
transform on the input axis, ``x' = M x``, so their Gram becomes ``M G M^T``. A Fisher diagonal can only follow maps
that do not mix coordinates.

If a norm feeds the map, the Gram is that of the normalised inputs, ``(x_hat, 1)``. The stored weights read
``x = D x_hat + c`` with the norm's gain D and shift c in the merge (D is one if gains are folded into readers). So the
Gram follows by multiplication, without dividing by a gain.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, TensorInfo
from rotation_merge.errors import StatisticsError
from rotation_merge.model.apply import transform_axis
from rotation_merge.model.biases import along, read_by, shifted
from rotation_merge.model.blocks import Get, moved_reader
from rotation_merge.model.fold import Fold
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.run.maps import LinearMap, along_inputs, linear_maps
from rotation_merge.run.statistics_file import Gram, Statistics
from rotation_merge.symmetry import SpaceTransform

Transforms = Mapping[str, SpaceTransform]


@dataclass(frozen=True)
class Feeding:
    """Gain and shift of the norm that feeds a map in the merge, before the donor is moved.

    Attributes:
        gain, shift: the offset of the gain added.
        folded: whether the gain has been folded into its readers.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    folded: bool = False


def feeding_keys(linear: LinearMap) -> list[str]:
    """Keys of the gain and shift of a map's norm."""
    keys = [] if linear.norm is None else [linear.norm.gain, linear.norm.shift]
    return [key for key in keys if key is not None and linear.block.tensor(key) is not None]


def feeding(tensors: Mapping[str, Tensor], linear: LinearMap, fold: Fold | None) -> Feeding:
    """The norm gain and shift before a map in a merge that folds (or does not).

    Args:
        tensors: of the map's block as stored, by key: those of `feeding_keys`, and what folding needs for them.
    """
    streams = () if fold is None else fold.streams

    def get(key: str | None) -> Tensor | None:
        info = None if key is None else linear.block.tensor(key)
        if info is None or info.key not in tensors:
            return None
        return tensors[info.key] if fold is None else fold.tensor(linear.block, info, tensors.get)

    norm = linear.norm
    gain = None if norm is None else get(norm.gain)
    return Feeding(
        gain=None if gain is None or norm is None else gain.double() + norm.offset,
        shift=None if norm is None else get(norm.shift),
        folded=norm is not None and norm.stream in streams,
    )


def carried_gram(
    linear: LinearMap, gram: Gram, transforms: Transforms, feeding: Feeding, shift: Tensor | None = None
) -> Tensor:
    """The Gram of a map's inputs in the anchor's coordinates, (..., n, n), float64.

    Args:
        shift: what is added to all that it reads once it is moved (the anchor's bias of values instead of the donor's),
            shape (n,).

    Raises:
        StatisticsError: the measured statistics do not determine it.
    """
    if gram.split:
        return _both(linear, _fed(linear, gram.matrix.double(), feeding), transforms)
    return moved_gram(linear, gram, transforms, shift, feeding.folded)[..., :-1, :-1]


def moved_gram(linear: LinearMap, gram: Gram, transforms: Transforms, shift: Tensor | None, folded: bool) -> Tensor:
    """The Gram of a map's inputs (x, 1) in the moved donor, float64.

    Args:
        shift: as of `carried_gram`.
        folded: whether the gain of the norm that feeds the map has been folded into its readers.

    Raises:
        StatisticsError: the measured statistics do not determine it.
    """
    if folded and not gram.split:
        raise StatisticsError(
            f"the Gram of '{linear.info.name}' was measured after a norm gain that this merge folds",
            remedy="leave out 'residual: rotation', or measure the donor that 'align' wrote",
        )
    moved = gram.matrix.double().clone()
    means, share = _means(linear, moved[..., :-1, -1], transforms), _experts(linear, moved[..., -1, -1], transforms)
    inner = _both(linear, moved[..., :-1, :-1], transforms)
    if shift is not None:
        crossed = torch.outer(shift.to(means), means)
        inner = inner + crossed + crossed.mT + share * torch.outer(shift, shift).to(means)
        means = means + share * shift.to(means)
    moved[..., :-1, :-1], moved[..., -1, -1] = inner, share
    moved[..., :-1, -1] = moved[..., -1, :-1] = means
    return moved


def _means(linear: LinearMap, vector: Tensor, transforms: Transforms) -> Tensor:
    """Move values (..., n) that pair with the input axis, experts in their new order."""
    vector = _experts(linear, vector, transforms)
    axis = linear.inputs
    return transform_axis(vector, int(linear.stacked), axis, transforms, dual=True) if axis.parts else vector


def _experts(linear: LinearMap, tensor: Tensor, transforms: Transforms) -> Tensor:
    """Reorder the expert rows of (experts, ...). Tensors of maps without experts are returned as they are."""
    return transform_axis(tensor, 0, linear.info.axes[0], transforms) if linear.stacked else tensor


def _fed(linear: LinearMap, augmented: Tensor, feeding: Feeding) -> Tensor:
    """The Gram of ``x = D x_hat + c`` from the Gram of ``(x_hat, 1)``."""
    if feeding.gain is None:
        raise StatisticsError(
            f"'{linear.info.name}' is fed by a norm whose gain is missing", remedy="the checkpoint is incomplete"
        )
    gain, shift = along_inputs(linear, feeding.gain.double(), None if feeding.shift is None else feeding.shift.double())
    size = len(gain)
    inner, means = augmented[..., :size, :size], augmented[..., :size, size]
    share = augmented[..., size, size][..., None, None]  # one, or zero where no row was seen
    moved = (gain * means)[..., :, None] * shift
    return gain[:, None] * inner * gain + moved + moved.mT + share * torch.outer(shift, shift)


def _both(linear: LinearMap, matrix: Tensor, transforms: Transforms) -> Tensor:
    """Transform both dimensions of (..., n, n) by the dual of the input axis; experts in their new order first."""
    axis, at = linear.inputs, int(linear.stacked)
    matrix = _experts(linear, matrix, transforms)
    if axis.parts:
        matrix = transform_axis(matrix, at, axis, transforms, dual=True)
        matrix = transform_axis(matrix, at + 1, axis, transforms, dual=True)
    return matrix


def carried_fisher(info: TensorInfo, diagonal: Tensor, transforms: Transforms) -> Tensor:
    """A Fisher diagonal of a (stacked) tensor in the anchor's coordinates: moved like the weights, over s^2.

    Raises:
        StatisticsError: a transform adds coordinates up.
    """
    _no_mixing(info, transforms)
    root = diagonal.double().sqrt()
    for dim, axis in enumerate(info.axes):
        if axis.parts:
            root = transform_axis(root, dim, axis, transforms, dual=True)
    return root.square()


def _no_mixing(info: TensorInfo, transforms: Transforms) -> None:
    for axis in info.axes:
        for part in axis.parts:
            transform = transforms.get(part.space.name)
            if transform is not None and transform.mixes(part.role):
                raise StatisticsError(
                    f"a Fisher diagonal cannot be kept under a rotation of '{part.space.name}' ('{info.name}')",
                    remedy="set 'attention: none' and no residual rotation, measure the donor that 'align' wrote, "
                    "or use delegate regmean",
                )


def value_shift(linear: LinearMap, donor: Get, anchor: Get, transforms: Transforms) -> Tensor | None:
    """The shift, (in,), that the anchor's value bias adds to a map's inputs; None if nothing is added.

    Args:
        donor, anchor: give biases of the map's block by key, folded where the donor is moved.
    """
    reader = read_by(linear.block, linear.info)
    if reader is None or reader.space.name not in transforms:
        return None
    shift = shifted(reader, moved_reader(linear.block, donor, transforms), anchor)
    return None if shift is None else along(reader, linear.info, linear.reads, shift)


class MovedTensors:
    """Tensors of a donor's statistics in the moved donor, computed on access.

    Args:
        architecture: of the donor.
        folded: the streams whose gains are folded.
        biases: the anchor's and the donor's that softmax cannot see, by name, folded; empty: the donor keeps its own.
        rows: what puts the donor's classes into the anchor's order.

    Raises:
        StatisticsError: the statistics hold a tensor that the architecture does not know.
    """

    def __init__(
        self,
        statistics: Statistics,
        architecture: Architecture,
        transforms: Transforms,
        folded: Collection[str],
        biases: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
        rows: LabelRows,
    ) -> None:
        self.statistics, self.transforms, self.folded = statistics, transforms, folded
        self.biases, self.rows = biases, rows
        self.maps, self.infos = linear_maps(architecture), architecture.named()
        for name in sorted({key.rpartition(".")[0] for key in statistics.keys}):
            if name not in self.infos:
                raise StatisticsError(
                    f"hold '{name}', which the alignment does not know",
                    where=statistics.path,
                    remedy="measure the moved model: rotation_merge.measure(alignment.apply(donor), ...)",
                )

    def tensor(self, key: str) -> Tensor:
        """One tensor of the moved donor's statistics."""
        name, _, kind = key.rpartition(".")
        moved = self._fisher(name) if kind == "fisher" else self._of_map(self.maps[name], name, kind)
        return moved.to(self.statistics[key].dtype)

    def _fisher(self, name: str) -> Tensor:
        if self.folded:
            raise StatisticsError(
                "a Fisher diagonal cannot be kept when norm gains are folded, which 'residual: rotation' needs",
                remedy="leave that out, or use regmean",
            )
        info = self.infos[name]
        pieces = [in_order(self.statistics[f"{piece}.fisher"], self.rows.get(piece)) for piece in info.names]
        if not info.stacked:
            return carried_fisher(info, pieces[0], self.transforms)
        return carried_fisher(info, torch.stack(pieces), self.transforms)[info.names.index(name)]

    def _of_map(self, linear: LinearMap, name: str, kind: str) -> Tensor:
        if kind == "count":
            return _experts(linear, self.statistics[f"{name}.count"], self.transforms)
        shift = value_shift(linear, self._bias(linear, 1), self._bias(linear, 0), self.transforms)
        gram = self.statistics.gram(name)
        folded = linear.norm is not None and linear.norm.stream in self.folded
        assert gram is not None
        return moved_gram(linear, gram, self.transforms, shift, folded)

    def _bias(self, linear: LinearMap, side: int) -> Get:
        """Look up the biases of a map's block by key: the anchor's (0) or the donor's (1)."""

        def get(key: str) -> Tensor | None:
            info = linear.block.tensor(key)
            return None if info is None else self.biases[side].get(info.name)

        return get
