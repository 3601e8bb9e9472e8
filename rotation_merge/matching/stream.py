r"""Matching a residual stream: one element for the whole model, from every axis that lives in the stream.

With the local spaces held fixed, the best element maximises <Q, sum_k w_k A_k B_k^T> over all axes k of the stream:
an assignment for permutations (on absolute values for signed ones, the sign read off afterwards), Procrustes for
rotations; with LayerNorm, Procrustes in the complement of the all-ones vector, which every rotation has to fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rotation_merge.architectures.model import Architecture, Block, TensorInfo
from rotation_merge.errors import RecipeError
from rotation_merge.groups import (
    GroupElement,
    Monomial,
    Orthogonal,
    Permutation,
    Scaling,
    SpaceTransform,
    StreamTransform,
)
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import complement_of_ones, procrustes
from rotation_merge.matching.sides import Tensors, sides

GROUPS = ("permutation", "signed_permutation", "rotation")


@dataclass
class StreamStatistics:
    """What accumulates over the blocks of one pass, for one stream.

    Attributes:
        products: sum of w A B^T over the axes on which the donor's signs count, (d, d), float64.
        gains: the same over norm gains and layer scales, which follow a permutation but not its signs.
    """

    size: int
    products: Tensor = field(init=False)
    gains: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.products = torch.zeros(self.size, self.size, dtype=torch.float64)
        self.gains = torch.zeros(self.size, self.size, dtype=torch.float64)

    def add(
        self,
        architecture: Architecture,
        block: Block,
        stream: str,
        anchor: Tensors,
        donor: Tensors,
        transforms: Mapping[str, SpaceTransform],
    ) -> None:
        """Add the axes of one block, the donor's other axes moved by `transforms`."""
        space = architecture.streams[stream]
        for side in sides(block, space, anchor, donor, transforms):
            a, b = side.anchor.float(), side.donor.float()
            product = (a @ b.T).double().to(self.products.device)
            if side.role == "gain":
                self.gains += product
            else:
                self.products += product

    def solve(self, group: str, layer_norm: bool) -> GroupElement:
        """The best element of a group for what has accumulated."""
        if group == "rotation":
            return Orthogonal(_rotation(self.products, layer_norm)[None])
        if group == "permutation":
            return _monomial(assign(self.products + self.gains).permutation, None)
        found = assign(self.products.abs() + self.gains).permutation
        picked = self.products[torch.arange(self.size), found]
        return _monomial(found, torch.where(picked < 0, -1.0, 1.0).double())


def _rotation(products: Tensor, layer_norm: bool) -> Tensor:
    if not layer_norm:
        return procrustes(products)
    basis = complement_of_ones(len(products)).to(products.device)
    inner = procrustes(basis.T @ products @ basis)
    eye = torch.eye(len(inner), dtype=inner.dtype, device=inner.device)
    if torch.equal(inner, eye):
        return torch.eye(len(products), dtype=inner.dtype, device=inner.device)
    return basis @ inner @ basis.T + 1.0 / len(products)


def _monomial(index: Tensor, signs: Tensor | None) -> Monomial:
    factor = torch.ones(len(index), dtype=torch.float64) if signs is None else signs
    return Monomial(Permutation(index[None].cpu()), Scaling(factor[None].cpu()))


def identity(group: str, size: int) -> StreamTransform:
    """The element that moves nothing."""
    return StreamTransform((Orthogonal if group == "rotation" else Monomial).identity(1, size))


def check_group(architecture: Architecture, group: str, model: str = "the model") -> list[str]:
    """The streams that a residual group applies to.

    Raises:
        RecipeError: no stream, or not every stream, admits it; names the largest group that all admit.
    """
    if not architecture.streams:
        raise RecipeError(
            f"'residual: {group}': the {architecture.family} architecture has no stream to move", where=model
        )
    refusing = [name for name, groups in architecture.stream_groups.items() if group not in groups]
    if refusing:
        admitted = [g for g in ("none", *GROUPS) if all(g in groups for groups in architecture.stream_groups.values())]
        raise RecipeError(
            f"'residual: {group}' is not a symmetry of the {architecture.family} architecture (stream '{refusing[0]}')",
            where=model,
            remedy=f"the largest it admits is 'residual: {admitted[-1]}'",
        )
    return list(architecture.streams)


def layer_normed(architecture: Architecture, stream: str) -> bool:
    """Whether the stream's norms subtract the mean."""
    return "signed_permutation" not in architecture.stream_groups[stream]


def weight_of(info: TensorInfo, anchor: Tensor) -> float:
    """The factor by which a tensor counts in whole-model matching (its square weighs the squared distance).

    Each tensor is divided by its anchor's norm to the power of `NORM_POWER` (see benchmarks/README.md for the
    comparison): 0 lets large matrices drown the rest, 1 gives every tensor the same say, whatever its size.
    """
    norm = float(anchor.float().square().sum(dtype=torch.float64)) ** 0.5
    return 1.0 if norm == 0 else norm**-NORM_POWER


NORM_POWER = 0.5
