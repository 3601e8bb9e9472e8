r"""Statistics moved along with the donor that they are of, so that they hold in the anchor's coordinates.

Where alignment moves a map's weight by ``W' = L_out W L_in``, what the map reads moves by the inverse transpose of
what moves its input axis, ``x' = M x``, so that its Gram becomes ``M G M^T``; gradients of what it gives likewise. A
diagonal survives only maps that add no coordinates up.

Where a norm feeds the map, the Gram is that of what was normalised, ``(x_hat, 1)``. What the stored weights read is
``x = D x_hat + c`` with the norm's gain D and shift c as they stand in the merge (where gains are folded into readers,
D is one), so its Gram comes by multiplication and nothing is divided by a gain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.errors import StatisticsError
from rotation_merge.model.apply import transform_axis
from rotation_merge.model.fold import Fold, times_gain
from rotation_merge.run.maps import LinearMap, along_inputs
from rotation_merge.run.statistics_file import Gram
from rotation_merge.symmetry import SpaceTransform

Transforms = Mapping[str, SpaceTransform]


@dataclass(frozen=True)
class Feeding:
    """What stands between a map and what was measured, as it is in the merge, before the donor is moved.

    Attributes:
        gain, shift: of the norm that feeds the map, the offset of the gain added.
        folded: whether the norm's gain has been folded into its readers.
        scale: the layer scale behind the map; None where there is none, or it has been folded into the map.
        scale_folded: whether it has.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    folded: bool = False
    scale: Tensor | None = None
    scale_folded: bool = False


def feeding_keys(linear: LinearMap) -> list[str]:
    """Keys of the tensors that stand around a map: its norm's gain and shift, its layer scale."""
    keys = [] if linear.norm is None else [linear.norm.gain, linear.norm.shift]
    keys += [] if linear.scale is None else [linear.scale.gain]
    return [key for key in keys if key is not None and linear.block.tensor(key) is not None]


def feeding(tensors: Mapping[str, Tensor], linear: LinearMap, fold: Fold | None) -> Feeding:
    """What stands around a map in a merge that folds (or does not).

    Args:
        tensors: of the map's block as stored, by key: those of `feeding_keys`, and what folding needs for them.
    """
    streams = () if fold is None else fold.streams

    def get(key: str | None) -> Tensor | None:
        info = None if key is None else linear.block.tensor(key)
        if info is None or info.key not in tensors:
            return None
        return tensors[info.key] if fold is None else fold.tensor(linear.block, info, tensors.get)

    norm, scale = linear.norm, linear.scale
    gain = None if norm is None else get(norm.gain)
    scaled = scale is not None and scale.stream in streams
    return Feeding(
        gain=None if gain is None or norm is None else gain.double() + norm.offset,
        shift=None if norm is None else get(norm.shift),
        folded=norm is not None and norm.stream in streams,
        scale=None if scale is None or scaled else get(scale.gain),
        scale_folded=scaled,
    )


def carried_gram(
    linear: LinearMap, gram: Gram, transforms: Transforms, feeding: Feeding, shift: Tensor | None = None
) -> dict[str, Tensor]:
    """The Gram of what a map reads, in the anchor's coordinates, float64.

    Args:
        shift: what is added to all that it reads once it is moved (the anchor's bias of values instead of the donor's),
            shape (n,). A sketch, which knows no means, stays without: it then weighs by what the donor itself read.

    Returns:
        `dense` (..., n, n), or `diagonal` (..., n) and `factor` (..., n, rank).

    Raises:
        StatisticsError: it cannot be had from what was measured.
    """
    if gram.matrix is None:
        return _carried_sketch(linear, gram, transforms)
    dense = gram.matrix.double()
    size = dense.shape[-1] - 1
    if gram.split:
        dense = _fed(linear, dense, feeding)
    elif feeding.folded:
        raise StatisticsError(
            f"the Gram of '{linear.info.name}' was measured behind a gain that is folded away here",
            remedy="leave out 'residual: rotation', or measure the donor that 'align' wrote",
        )
    inner = _both(linear, dense[..., :size, :size], linear.reads, transforms)
    if shift is not None:
        means = transform_axis(dense[:size, size], 0, linear.inputs, transforms, dual=True)
        crossed = torch.outer(shift.to(means), means)
        inner = inner + crossed + crossed.mT + dense[size, size] * torch.outer(shift, shift).to(means)
    return {"dense": inner}


def _fed(linear: LinearMap, augmented: Tensor, feeding: Feeding) -> Tensor:
    """The Gram of ``x = D x_hat + c`` from that of ``(x_hat, 1)``."""
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


def _both(linear: LinearMap, matrix: Tensor, dim: int, transforms: Transforms) -> Tensor:
    """Both dimensions of (..., n, n) by what is paired with an axis; experts in their new order first."""
    axis, at = linear.info.axes[dim], int(linear.stacked)
    if linear.stacked:
        matrix = transform_axis(matrix, 0, linear.info.axes[0], transforms)
    if axis.parts:
        matrix = transform_axis(matrix, at, axis, transforms, dual=True)
        matrix = transform_axis(matrix, at + 1, axis, transforms, dual=True)
    return matrix


def _carried_sketch(linear: LinearMap, gram: Gram, transforms: Transforms) -> dict[str, Tensor]:
    if gram.diagonal is None or gram.factor is None:
        raise StatisticsError(f"the Gram of '{linear.info.name}' is not whole", remedy="measure again")
    _no_mixing(linear.info, (linear.reads,), transforms, "of low rank")
    diagonal, factor, axis, at = gram.diagonal.double(), gram.factor.double(), linear.inputs, int(linear.stacked)
    if linear.stacked:
        diagonal, factor = (transform_axis(x, 0, linear.info.axes[0], transforms) for x in (diagonal, factor))
    return {
        "diagonal": transform_axis(diagonal.sqrt(), at, axis, transforms, dual=True).square(),
        "factor": transform_axis(factor, at, axis, transforms, dual=True),
    }


def carried_gradient(
    linear: LinearMap, gradient: Tensor, behind: bool, transforms: Transforms, feeding: Feeding
) -> Tensor:
    """The Gram of gradients of what a map gives, in the anchor's coordinates, float64.

    Args:
        gradient: as measured, (..., m, m).
        behind: whether it is that behind a layer scale.

    Raises:
        StatisticsError: it cannot be had from what was measured.
    """
    matrix = gradient.double()
    if behind and feeding.scale is not None and linear.scale is not None:
        axis = TensorInfo(linear.info.key, linear.info.names, (linear.outputs,))
        unit_scale = torch.ones(matrix.shape[-1], dtype=torch.float64, device=matrix.device)
        scale = times_gain(unit_scale, axis, feeding.scale.double(), linear.scale.stream, "write")
        matrix = scale[:, None] * matrix * scale
    elif feeding.scale_folded and not behind:
        raise StatisticsError(
            f"gradients of '{linear.info.name}' were measured before a layer scale that is folded away here",
            remedy="leave out 'residual: rotation'",
        )
    return _both(linear, matrix, linear.gives, transforms)


def carried_fisher(info: TensorInfo, diagonal: Tensor, transforms: Transforms) -> Tensor:
    """A Fisher diagonal of a whole (stacked) tensor in the anchor's coordinates: F moves with the weights, over s^2.

    Raises:
        StatisticsError: a transform adds coordinates up.
    """
    _no_mixing(info, range(len(info.axes)), transforms, "that is diagonal")
    root = diagonal.double().sqrt()
    for dim, axis in enumerate(info.axes):
        if axis.parts:
            root = transform_axis(root, dim, axis, transforms, dual=True)
    return root.square()


def _no_mixing(info: TensorInfo, dims: tuple[int, ...] | range, transforms: Transforms, kind: str) -> None:
    for dim in dims:
        for part in info.axes[dim].parts:
            transform = transforms.get(part.space.name)
            if transform is not None and transform.mixes(part.role):
                raise StatisticsError(
                    f"a statistic {kind} does not survive the rotation of '{part.space.name}' (tensor '{info.name}')",
                    remedy="set 'attention: none' and no residual rotation, measure the donor that 'align' wrote, "
                    "or use delegate kfac",
                )
