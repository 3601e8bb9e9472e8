r"""Statistics of a donor, moved with the donor into the anchor's coordinates.

If alignment moves a map's weight by ``W' = L_out W L_in``, the input moves by the inverse transpose of the transform on
its axis, ``x' = M x + s``, where s is what the anchor's biases add. So the Gram of ``(x, 1)`` becomes ``A G A^T`` with
``A = [[M, s], [0, 1]]``. A Fisher diagonal can only follow maps that do not mix coordinates.

What a norm gives to its readers is measured before gain and shift and moves as the stream does; gain and shift are
those of the moved donor, ones and zeros where they are folded. So nothing is divided by a gain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import RotationMergeError, StatisticsError
from rotation_merge.model.apply import transform_axis
from rotation_merge.model.biases import along, read_by, shifted
from rotation_merge.model.blocks import Get, moved_reader
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.tensors import Tensors, by_name
from rotation_merge.run.maps import LinearMap, linear_maps
from rotation_merge.run.statistics import Statistics
from rotation_merge.run.sums import first_readers
from rotation_merge.symmetry import Transform

Transforms = Mapping[str, Transform]


def moved_gram(linear: LinearMap, gram: Tensor, transforms: Transforms, shift: Tensor | None = None) -> Tensor:
    """The Gram of (x, 1) in the anchor's coordinates, (..., n + 1, n + 1), float64; experts in their new order.

    Args:
        linear: a map that reads x.
        shift: what is added to x once it is moved, (n,).
    """
    moved = moved_experts(linear, gram.double(), transforms)
    means, share = moved[..., :-1, -1], moved[..., -1, -1]
    inner, axis, dim = moved[..., :-1, :-1], linear.inputs, int(linear.stacked)
    if axis.parts:
        means = transform_axis(means, dim, axis, transforms, dual=True)
        inner = transform_axis(inner, dim, axis, transforms, dual=True)
        inner = transform_axis(inner, dim + 1, axis, transforms, dual=True)
    if shift is not None:
        shift = shift.to(means)
        crossed = torch.outer(shift, means)
        inner = inner + crossed + crossed.mT + share * torch.outer(shift, shift)
        means = means + share * shift
    result = torch.empty_like(moved)
    result[..., :-1, :-1], result[..., -1, -1] = inner, share
    result[..., :-1, -1] = result[..., -1, :-1] = means
    return result


def moved_experts(linear: LinearMap, tensor: Tensor, transforms: Transforms) -> Tensor:
    """The rows of (experts, ...) in their new order; tensors of maps without experts as they are."""
    return transform_axis(tensor, 0, linear.info.axes[0], transforms) if linear.stacked else tensor


def moved_fisher(info: TensorInfo, diagonal: Tensor, transforms: Transforms) -> Tensor:
    """A Fisher diagonal of a (stacked) tensor in the anchor's coordinates, float64: moved like the weights, over s^2.

    Raises:
        StatisticsError: a transform adds coordinates up.
    """
    for axis in info.axes:
        for part in axis.parts:
            transform = transforms.get(part.space.name)
            if transform is not None and transform.mixes(part.role):
                raise StatisticsError(
                    f"a Fisher diagonal cannot be kept under a rotation of '{part.space.name}' ('{info.name}')",
                    remedy="set 'attention: none' and no residual rotation, measure the donor that 'align' wrote, "
                    "or use delegate regmean",
                )
    root = diagonal.double().sqrt()
    for dim, axis in enumerate(info.axes):
        if axis.parts:
            root = transform_axis(root, dim, axis, transforms, dual=True)
    return root.square()


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


@dataclass(frozen=True)
class StatisticsMover:
    """Moves statistics of a donor as an alignment moves the donor.

    Attributes:
        architecture: by whose names the statistics go.
        transforms: by space name; each is looked up when a tensor that it moves is read.
        folded: the streams whose gains are folded.
        anchor, donor: their biases that softmax cannot see, by name, folded; empty: the donor keeps its own.
        rows: what puts the donor's classes into the anchor's order.
    """

    architecture: Architecture
    transforms: Transforms
    folded: Collection[str] = ()
    anchor: Mapping[str, Tensor] = field(default_factory=dict)
    donor: Mapping[str, Tensor] = field(default_factory=dict)
    rows: LabelRows = field(default_factory=dict)

    def moved(self, statistics: Statistics, dtype: torch.dtype | None = None) -> Statistics:
        """The statistics of the moved donor, computed when they are read.

        Args:
            dtype: of the moved numbers; None: as they are stored.

        Raises:
            StatisticsError: they hold a tensor that the architecture does not know. When they are read: a transform
                does not allow it; names the model.
        """
        maps, infos = linear_maps(self.architecture), self.architecture.named()
        names = {*statistics.axes, *(key.removesuffix(".fisher") for key in statistics if key.endswith(".fisher"))}
        if unknown := sorted(names - infos.keys()):
            raise StatisticsError(
                f"hold '{unknown[0]}', which the alignment does not know",
                where=statistics.path,
                remedy="measure the moved model: rotation_merge.measure(alignment.apply(donor), ...)",
            )
        readers = {axis: maps[name] for axis, name in first_readers(statistics.axes).items()}
        shared = {axis for axis, count in Counter(statistics.axes.values()).items() if count > 1}
        stored, latest = statistics.tensors, Latest()
        dtypes = {key: dtype if dtype and kind.is_floating_point else kind for key, kind in stored.dtypes.items()}

        def moved(key: str) -> Tensor:
            name, _, kind = key.rpartition(".")
            if kind == "count":
                return moved_experts(readers[name], statistics[key], self.transforms)
            if kind == "gram":
                split = name in statistics.split
                return latest.get(key, lambda: self._gram(readers[name], statistics[key], split), name in shared)
            info = infos[name]
            whole = latest.get(info.name, lambda: self._fisher(info, statistics), info.stacked)
            return whole[info.names.index(name)] if info.stacked else whole

        def read(key: str) -> Tensor:
            try:
                return moved(key).to(dtypes[key])
            except RotationMergeError as error:
                where = error.where or str(statistics.metadata.get("model", statistics.path))
                raise StatisticsError(error.what, where=where, remedy=error.remedy) from error

        return replace(statistics, tensors=Tensors(stored.shapes, dtypes, by_name(read)))

    def _gram(self, linear: LinearMap, gram: Tensor, split: bool) -> Tensor:
        if linear.norm is not None and linear.norm.stream in self.folded and not split:
            raise StatisticsError(
                f"the Gram of '{linear.info.name}' was measured after a norm gain that this merge folds",
                remedy="leave out 'residual: rotation', or measure the donor that 'align' wrote",
            )
        donor, anchor = (self._biases(linear.block, biases) for biases in (self.donor, self.anchor))
        return moved_gram(linear, gram, self.transforms, value_shift(linear, donor, anchor, self.transforms))

    def _fisher(self, info: TensorInfo, statistics: Statistics) -> Tensor:
        """The diagonal of a whole tensor, stacked if it is stored in pieces."""
        if self.folded:
            raise StatisticsError(
                "a Fisher diagonal cannot be kept when norm gains are folded, which 'residual: rotation' needs",
                remedy="leave that out, or use regmean",
            )
        pieces = [in_order(statistics[f"{name}.fisher"], self.rows.get(name)) for name in info.names]
        return moved_fisher(info, torch.stack(pieces) if info.stacked else pieces[0], self.transforms)

    @staticmethod
    def _biases(block: Block, biases: Mapping[str, Tensor]) -> Get:
        """Gives the biases of a block by key."""

        def get(key: str) -> Tensor | None:
            info = block.tensor(key)
            return None if info is None else biases.get(info.name)

        return get


class Latest:
    """The result that was computed last, for what is read several times in a row."""

    def __init__(self) -> None:
        self._known: tuple[str, Tensor] | None = None

    def get(self, key: str, compute: Callable[[], Tensor], kept: bool) -> Tensor:
        """A result, computed unless it is known.

        Args:
            kept: whether it takes the place of the one that is known.
        """
        known = self._known
        if known is not None and known[0] == key:
            return known[1]
        result = compute()
        if kept:
            self._known = key, result
        return result
