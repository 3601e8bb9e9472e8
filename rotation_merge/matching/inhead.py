r"""The maps inside a head: for each group the best element and what it gains, in closed form or one dimension.

The squared distance that a map g (primal side) leaves is a constant minus the gain

    gain(g) = 2 <g B_P, A_P> - |g B_P|^2 + 2 <g^-T B_D, A_D> - |g^-T B_D|^2,

with P the primal side (keys, values), D the dual one (queries, outputs), A anchor and B donor. Everything needed
is in the products ``A_P B_P^T`` and ``A_D B_D^T`` (d, d) and the squared norms of the coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.groups import DirectSum, GroupElement, Orthogonal, Planar, Scaled, Scaling
from rotation_merge.groups.planar import pair_dims
from rotation_merge.linalg.polar import nuclear_norm, procrustes
from rotation_merge.linalg.scaling import best_scale, cost, joint_scale


@dataclass(frozen=True)
class Grams:
    """Second-order statistics of a batch of (anchor head, donor head) pairs, float64.

    Attributes:
        primal, dual: A B^T of either side, shape (..., d, d).
        donor_primal, donor_dual, anchor_primal, anchor_dual: squared norm of each coordinate, shape (..., d).
    """

    primal: Tensor
    dual: Tensor
    donor_primal: Tensor
    donor_dual: Tensor
    anchor_primal: Tensor
    anchor_dual: Tensor

    def part(self, where: slice) -> Grams:
        """The statistics of some coordinates."""
        return Grams(
            self.primal[..., where, where],
            self.dual[..., where, where],
            *(n[..., where] for n in (self.donor_primal, self.donor_dual, self.anchor_primal, self.anchor_dual)),
        )

    def pick(self, index: tuple[Tensor, ...]) -> Grams:
        """The statistics of some pairs of the batch."""
        return Grams(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def norms(self) -> Tensor:
        """Squared norm of the donor's sides, shape (...)."""
        return self.donor_primal.sum(-1) + self.donor_dual.sum(-1)

    def guess(self) -> Tensor:
        """The scale that gives the donor the anchor's ratio of primal to dual norm, shape (...)."""
        return _balance(
            *(getattr(self, n).sum(-1) for n in ("donor_primal", "donor_dual", "anchor_primal", "anchor_dual"))
        )


def _balance(donor_primal: Tensor, donor_dual: Tensor, anchor_primal: Tensor, anchor_dual: Tensor) -> Tensor:
    ratio = (donor_dual * anchor_primal) / (donor_primal * anchor_dual)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio)) ** 0.25


@dataclass(frozen=True)
class InHead:
    """A group that acts inside heads.

    Attributes:
        kind: fixed, orthogonal, planar, pair_signs, coordinate_signs, head_sign, or split (rotary first, rest after).
        rescale: False, True (jointly optimal) or "sequential" (after the map).
        interleaved: layout of RoPE pairs.
        rotary: for split: how many leading dimensions are rotary.
    """

    kind: str
    rescale: bool | str = False
    interleaved: bool = False
    rotary: int = 0

    def solve(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        """Best element and its gain for a batch (G,) of pairs."""
        return getattr(self, f"_solve_{self.kind}")(grams)

    def without_scale(self) -> InHead:
        return InHead(self.kind, False, self.interleaved, self.rotary)

    def parts(self, d: int) -> tuple[tuple[InHead, slice], tuple[InHead, slice]]:
        """For split: the group of the rotary dimensions and that of the rest."""
        signs = self.kind == "split_signs"
        first = InHead("pair_signs" if signs else "planar", self.rescale, self.interleaved)
        second = InHead("coordinate_signs" if signs else "orthogonal", self.rescale)
        return (first, slice(0, self.rotary)), (second, slice(self.rotary, d))

    def _solve_split(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        solved = [group.solve(grams.part(where)) for group, where in self.parts(grams.primal.shape[-1])]
        return DirectSum(tuple(element for element, _ in solved)), solved[0][1] + solved[1][1]

    _solve_split_signs = _solve_split

    def _solve_fixed(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        trace = (grams.primal + grams.dual).diagonal(dim1=-2, dim2=-1).sum(-1)
        gain = 2 * trace - grams.norms()
        return Scaling.identity(grams.primal.shape[0], grams.primal.shape[-1]), gain

    def _solve_orthogonal(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        if not self.rescale:
            rotation = procrustes(grams.primal + grams.dual)
            return Orthogonal(rotation), 2 * _inner(rotation, grams.primal + grams.dual) - grams.norms()
        primal, dual = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
        scale = torch.ones_like(primal)
        if self.rescale != "sequential":
            scale = joint_scale(lambda a: nuclear_norm(_mix(grams, a)), primal, dual, grams.guess())
        rotation = procrustes(_mix(grams, scale))
        scale = best_scale(primal, dual, _inner(rotation, grams.primal), _inner(rotation, grams.dual))
        if self.rescale != "sequential":
            rotation = procrustes(_mix(grams, scale))
        inner = _inner(rotation, grams.primal), _inner(rotation, grams.dual)
        return Scaled(rotation, scale), -cost(scale, primal, dual, *inner)

    def _solve_planar(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        primal, dual = (_complex_products(m, self.interleaved) for m in (grams.primal, grams.dual))
        norms = [_pair_sums(n, self.interleaved) for n in (grams.donor_primal, grams.donor_dual)]
        anchor = [_pair_sums(n, self.interleaved) for n in (grams.anchor_primal, grams.anchor_dual)]
        scale = torch.ones_like(norms[0])
        if self.rescale is True:
            scale = joint_scale(lambda a: (a * primal + dual / a).abs(), *norms, _balance(*norms, *anchor))
        turn = _phase(scale * primal + dual / scale)
        inner = [(turn.conj() * m).real for m in (primal, dual)]
        if self.rescale == "sequential":
            scale = best_scale(*norms, *inner)
        return Planar(turn.angle(), scale, self.interleaved), -cost(scale, *norms, *inner).sum(-1)

    def _solve_pair_signs(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = _pair_sums((grams.primal + grams.dual).diagonal(dim1=-2, dim2=-1), self.interleaved)
        d = grams.primal.shape[-1]
        factor = torch.ones(grams.primal.shape[0], d, dtype=torch.float64, device=agreement.device)
        for where in pair_dims(d, self.interleaved):
            factor[:, where] = _sign(agreement)
        return Scaling(factor), 2 * agreement.abs().sum(-1) - grams.norms()

    def _solve_coordinate_signs(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = (grams.primal + grams.dual).diagonal(dim1=-2, dim2=-1)
        return Scaling(_sign(agreement)), 2 * agreement.abs().sum(-1) - grams.norms()

    def _solve_head_sign(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = (grams.primal + grams.dual).diagonal(dim1=-2, dim2=-1).sum(-1)
        factor = _sign(agreement)[:, None].repeat(1, grams.primal.shape[-1])
        return Scaling(factor), 2 * agreement.abs() - grams.norms()

    def bound(self, grams: Grams) -> Tensor:
        """An upper bound on the gain, cheap where the exact one is a search: see `_solve_orthogonal`.

        By the triangle inequality ``|a M_P + M_D / a|_* <= a |M_P|_* + |M_D|_* / a``.
        """
        if self.kind in ("split", "split_signs"):
            bounds = [group.bound(grams.part(where)) for group, where in self.parts(grams.primal.shape[-1])]
            return bounds[0] + bounds[1]
        if self.kind != "orthogonal" or not self.rescale:
            flat = grams.pick((torch.arange(len(grams.primal)),))
            return self.solve(flat)[1]
        primal, dual = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
        p, q = nuclear_norm(grams.primal), nuclear_norm(grams.dual)
        scale = best_scale(primal, dual, p, q)
        return -cost(scale, primal, dual, p, q)


def group_for_queries(
    attention: str, rotary: int, head_dim: int, interleaved: bool, norm: str | None, rescale: bool | str
) -> InHead:
    """The query/key group of DESIGN section 2's table: what commutes with the rotary embedding and the norm.

    Args:
        attention: none, rotation or invertible (the same here: `invertible_maps` refines the orthogonal ones).
        rotary: leading dimensions that rotary embedding turns.
        norm: as in `architectures.model.Space`.
    """
    if attention == "none" or norm == "affine_head":
        return InHead("fixed")
    if norm == "layer_head":
        return InHead("head_sign")
    if norm is not None:
        if rotary in (0, head_dim):
            return InHead("pair_signs" if rotary else "coordinate_signs", interleaved=interleaved)
        return InHead("split_signs", interleaved=interleaved, rotary=rotary)
    if rotary == 0:
        return InHead("orthogonal", rescale)
    if rotary == head_dim:
        return InHead("planar", rescale, interleaved)
    return InHead("split", rescale, interleaved, rotary)


def _mix(grams: Grams, scale: Tensor) -> Tensor:
    return scale[..., None, None] * grams.primal + grams.dual / scale[..., None, None]


def _inner(rotation: Tensor, products: Tensor) -> Tensor:
    return (rotation * products).sum((-2, -1))


def _sign(x: Tensor) -> Tensor:
    return torch.where(x < 0, -torch.ones_like(x), torch.ones_like(x))


def _pair_sums(values: Tensor, interleaved: bool) -> Tensor:
    first, second = pair_dims(values.shape[-1], interleaved)
    return values[..., first] + values[..., second]


def _complex_products(products: Tensor, interleaved: bool) -> Tensor:
    """Sum over columns of anchor times conjugated donor, as complex numbers, for each pair: (..., d/2)."""
    first, second = pair_dims(products.shape[-1], interleaved)
    blocks = [
        [products[..., rows, columns].diagonal(dim1=-2, dim2=-1) for columns in (first, second)]
        for rows in (first, second)
    ]
    return torch.complex(blocks[0][0] + blocks[1][1], blocks[1][0] - blocks[0][1])


def _phase(z: Tensor) -> Tensor:
    """z / |z|; 1 where z is zero or its phase is below rounding, so that ties go to the identity."""
    size = z.abs()
    flat = (size == 0) | (size - z.real <= 1e-12 * size)
    return torch.where(flat, torch.ones_like(z), z / torch.where(size == 0, torch.ones_like(size), size))
