r"""A model's tensors, or its statistics, in other coordinates: folded, transformed, rounded once.

If alignment moves a map's weight by ``W' = L_out W L_in``, the input moves by the inverse transpose of the transform on
its axis, ``x' = M x``. So the Gram of ``(x, 1)`` becomes ``A G A^T`` with ``A = [[M, 0], [0, 1]]``. A Fisher diagonal
can only follow maps that do not mix coordinates.

What a norm gives to its readers is measured before gain and shift and moves as the stream does; gain and shift are
those of the moved donor, ones and zeros where they are folded. So nothing is divided by a gain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from rotation_merge.architecture.model import Architecture, Block, TensorInfo
from rotation_merge.errors import RotationMergeError, StatisticsError
from rotation_merge.matching.stream import Transforms
from rotation_merge.model.apply import blockwise, read_tensor, reader, transform_axis, transform_tensor, unstack
from rotation_merge.model.fold import Fold
from rotation_merge.model.labels import LabelRows, in_order
from rotation_merge.model.tensors import Tensors, TensorSource, as_tensors, by_name
from rotation_merge.model.view import TensorOf, stored_dtype
from rotation_merge.model.vocabulary import in_slices
from rotation_merge.run.maps import LinearMap, linear_maps
from rotation_merge.run.statistics import Statistics, first_readers
from rotation_merge.symmetry import Transform


def moved_tensors(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, Transform],
    folded: Sequence[str] = (),
) -> Tensors:
    """A model in other coordinates, in float32 at least where it changes; arguments as of `mover`."""
    tensors, fold = as_tensors(source), Fold(architecture, folded)
    return blockwise(architecture, tensors, lambda block, info: _moved(block, info, tensors, fold, transforms))


def mover(
    architecture: Architecture,
    source: TensorSource,
    transforms: Mapping[str, Transform],
    folded: Sequence[str] = (),
    least: torch.dtype | None = None,
) -> TensorOf:
    """Computes a model's tensors in other coordinates one by one, long vocabularies in slices, each rounded once.

    Args:
        architecture: by whose names the source's tensors are known.
        folded: streams whose norm gains are folded first.
        least: the least precise type that results are rounded to in the end, which folding has to survive; None: that
            of each tensor.
    """

    def tensor(block: Block, info: TensorInfo, dtype: torch.dtype | None) -> Tensor | None:
        whole = as_tensors(source).cached(math.inf)  # each is read once
        stored, fold = read_tensor(info, whole), Fold(architecture, folded, least or dtype)
        if stored is None:
            return None

        def moved(parts: Sequence[Tensors] | None) -> Tensor:
            return _moved(block, info, whole if parts is None else parts[0], fold, transforms)

        return in_slices(block, info, [whole], stored_dtype(stored, dtype), moved)

    return tensor


def relative(
    architecture: Architecture, base: Mapping[str, Transform], frame: Mapping[str, Transform] | None = None
) -> dict[str, Transform]:
    """The transforms of a frame (None: nothing moves), then the inverse of those of a base: from one to the other."""
    cpu = torch.device("cpu")  # a frame that has not moved is not where one that was solved for is
    back = {name: transform.to(cpu).inverse() for name, transform in base.items()}
    moved = {
        name: back[name].compose(transform.to(cpu)) if name in back else transform
        for name, transform in (frame or {}).items()
    }
    result = back | moved
    for info in architecture.tensors() if back else ():
        name = info.common.name if info.common is not None else ""
        shift = result[name].shift if name in result else None
        if shift is not None and bool(shift.any()):  # added when all axes have moved, and goes back with them
            row = replace(info, axes=info.axes[1:], common=None)
            result[name] = replace(result[name], shift=transform_tensor(shift, row, back))
    return result


def _moved(
    block: Block, info: TensorInfo, source: TensorSource, fold: Fold, transforms: Mapping[str, Transform]
) -> Tensor:
    """A tensor in other coordinates, not rounded."""
    return transform_tensor(fold.tensor(block, info, reader(block, source)), info, transforms)


def moved_statistics(
    statistics: Statistics,
    architecture: Architecture,
    transforms: Transforms,
    folded: Collection[str] = (),
    rows: LabelRows | None = None,
    dtype: torch.dtype | None = None,
) -> Statistics:
    """Statistics of a donor, moved as an alignment moves the donor, computed when they are read.

    Args:
        architecture: by whose names the statistics go.
        transforms: by space name; each is looked up when a tensor that it moves is read.
        folded: the streams whose gains are folded.
        rows: what puts the donor's classes into the anchor's order.
        dtype: of the moved numbers; None: as they are stored.

    Raises:
        StatisticsError: they hold a tensor that the architecture does not know. When they are read: a transform does
            not allow it; names the model.
    """
    maps, infos = linear_maps(architecture), architecture.named()
    _check_known(statistics, infos)
    readers = {axis: maps[name] for axis, name in first_readers(statistics.axes).items()}
    stored = statistics.tensors.dtypes
    dtypes = {key: dtype if dtype and kind.is_floating_point else kind for key, kind in stored.items()}

    @lru_cache(1)  # several maps read one input, and the experts of a tensor are read in turn
    def gram(axis: str) -> Tensor:
        norm = readers[axis].norm
        if axis not in statistics.split and norm is not None and norm.stream in folded:
            problem = f"the Gram of '{readers[axis].info.name}' was measured after a norm gain that this merge folds"
            remedy = "leave out 'residual: rotation', or measure the donor that 'align' wrote"
            raise StatisticsError(problem, remedy=remedy)
        return moved_gram(readers[axis], statistics[f"{axis}.gram"], transforms)

    @lru_cache(1)
    def fisher(names: tuple[str, ...]) -> Tensor:
        pieces = [in_order(statistics[f"{name}.fisher"], (rows or {}).get(name)) for name in names]
        diagonal = torch.stack(pieces) if infos[names[0]].stacked else pieces[0]
        return moved_fisher(infos[names[0]], diagonal, transforms, folded)

    def moved(key: str) -> Tensor:
        name, _, kind = key.rpartition(".")
        if kind == "count":
            return moved_experts(readers[name], statistics[key], transforms)
        return gram(name) if kind == "gram" else unstack(infos[name], fisher(infos[name].names))[name]

    def read(key: str) -> Tensor:
        try:
            return moved(key).to(dtypes[key])
        except RotationMergeError as error:
            where = error.where or str(statistics.metadata.get("model", statistics.path))
            raise StatisticsError(error.what, where=where, remedy=error.remedy) from error

    return replace(statistics, tensors=Tensors(statistics.tensors.shapes, dtypes, by_name(read)))


def _check_known(statistics: Statistics, infos: Collection[str]) -> None:
    """Refuse statistics of tensors that the architecture, whose names are given, does not know."""
    names = {*statistics.axes, *(key.removesuffix(".fisher") for key in statistics if key.endswith(".fisher"))}
    if unknown := sorted(names - {*infos}):
        problem = f"hold '{unknown[0]}', which the alignment does not know"
        remedy = "measure the moved model: rotation_merge.measure(alignment.apply(donor), ...)"
        raise StatisticsError(problem, where=statistics.path, remedy=remedy)


def moved_gram(linear: LinearMap, gram: Tensor, transforms: Transforms) -> Tensor:
    """The Gram of (x, 1) in the anchor's coordinates, (..., n + 1, n + 1), float64; experts in their new order.

    Args:
        linear: a map that reads x.
    """
    moved, axis, dim = moved_experts(linear, gram.double(), transforms).clone(), linear.inputs, int(linear.stacked)
    if axis.parts:
        moved[..., :-1, :] = transform_axis(moved[..., :-1, :], dim, axis, transforms, dual=True)
        moved[..., :-1] = transform_axis(moved[..., :-1], dim + 1, axis, transforms, dual=True)
    return moved


def moved_experts(linear: LinearMap, tensor: Tensor, transforms: Transforms) -> Tensor:
    """The rows of (experts, ...) in their new order; tensors of maps without experts as they are."""
    return transform_axis(tensor, 0, linear.info.axes[0], transforms) if linear.stacked else tensor


def moved_fisher(info: TensorInfo, diagonal: Tensor, transforms: Transforms, folded: Collection[str] = ()) -> Tensor:
    """A Fisher diagonal of a (stacked) tensor in the anchor's coordinates, float64: moved like the weights, over s^2.

    Raises:
        StatisticsError: a transform adds coordinates up, or gains are folded.
    """
    if folded:
        problem = "a Fisher diagonal cannot be kept when norm gains are folded, which 'residual: rotation' needs"
        raise StatisticsError(problem, remedy="leave that out, or use regmean")
    for part in (part for axis in info.axes for part in axis.parts):
        if part.space.name in transforms and transforms[part.space.name].mixes(part.role):
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
