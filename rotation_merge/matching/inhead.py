r"""The maps inside a head: for each group the best element and what it gains, in closed form or one dimension.

The squared distance that a map g (primal side) leaves is a constant minus the gain

    gain(g) = 2 <g B_P, A_P> - |g B_P|^2 + 2 <g^-T B_D, A_D> - |g^-T B_D|^2,

with P the primal side (keys, values), D the dual one (queries, outputs), A anchor and B donor. Everything needed is in
the products of `Half.products` (how much of A B^T a group looks at is its `statistic`) and the squared norms of the
coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rotation_merge.groups import (
    DirectSum,
    GroupElement,
    Monomial,
    Orthogonal,
    Permutation,
    Planar,
    Scaled,
    Scaling,
)
from rotation_merge.groups.planar import pair_dims
from rotation_merge.linalg.polar import FLOAT32_RANK_TOLERANCE, RANK_TOLERANCE, nuclear_norm, procrustes
from rotation_merge.linalg.scaling import best_scale, cost, joint_scale


@dataclass(frozen=True)
class Grams:
    """Second-order statistics of N (anchor head, donor head) pairs, float64 or complex128.

    Attributes:
        primal, dual: statistics of A B^T of either side, shape (N, *S) as the group's `statistic` says.
        donor_primal, donor_dual, anchor_primal, anchor_dual: squared norm of each coordinate, shape (N, d).
        rank_tolerance: relative rounding of the products.
    """

    primal: Tensor
    dual: Tensor
    donor_primal: Tensor
    donor_dual: Tensor
    anchor_primal: Tensor
    anchor_dual: Tensor
    rank_tolerance: float = field(default=RANK_TOLERANCE, kw_only=True)

    @staticmethod
    def rounding(exact: bool) -> float:
        """Relative rounding of products summed from float64 values, or from float32 ones."""
        return RANK_TOLERANCE if exact else FLOAT32_RANK_TOLERANCE

    def norms(self) -> Tensor:
        """Squared norm of the donor's sides, shape (N,)."""
        return self.donor_primal.sum(-1) + self.donor_dual.sum(-1)

    def guess(self) -> Tensor:
        """The scale that gives the donor the anchor's ratio of primal to dual norm, shape (N,)."""
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
        kind: fixed, orthogonal, permutation, planar, pair_signs, coordinate_signs, head_sign, or split and split_signs
            (rotary dimensions first, rest after), which are solved part by part (`parts`).
        rescale: False, True (jointly optimal) or "sequential" (after the map).
        interleaved: layout of RoPE pairs.
        rotary: for split: how many leading dimensions are rotary.
    """

    kind: str
    rescale: bool | str = False
    interleaved: bool = False
    rotary: int = 0

    @property
    def statistic(self) -> str:
        """What of the products the group looks at, as in `products.Half`."""
        if self.kind in ("orthogonal", "permutation"):
            return "full"
        return "pairs" if self.kind in ("planar", "pair_signs") else "coordinates"

    def parts(self, d: int) -> list[tuple[InHead, slice]]:
        """The groups that act on consecutive coordinates: two for split, else this one."""
        if self.kind not in ("split", "split_signs"):
            return [(self, slice(0, d))]
        signs = self.kind == "split_signs"
        first = InHead("pair_signs" if signs else "planar", self.rescale, self.interleaved)
        second = InHead("coordinate_signs" if signs else "orthogonal", self.rescale)
        return [(first, slice(0, self.rotary)), (second, slice(self.rotary, d))]

    def identity(self, batch: int, d: int) -> GroupElement:
        """The identity as an element of the kind that `solve` gives."""
        if self.kind in ("split", "split_signs"):
            return DirectSum(tuple(part.identity(batch, where.stop - where.start) for part, where in self.parts(d)))
        if self.kind == "planar":
            start = Planar.identity(batch, d)
            return Planar(start.angle, start.scale, self.interleaved)
        kinds = {"orthogonal": Scaled if self.rescale else Orthogonal, "permutation": Monomial}
        return kinds.get(self.kind, Scaling).identity(batch, d)

    def solve(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        """Best element and its gain, shape (N,)."""
        return getattr(self, f"_solve_{self.kind}")(grams)

    def gain_as_it_stands(self, grams: Grams) -> Tensor:
        """The gain of the identity, shape (N,)."""
        return 2 * (self._traces(grams.primal) + self._traces(grams.dual)) - grams.norms()

    def _traces(self, products: Tensor) -> Tensor:
        if self.statistic == "full":
            return products.diagonal(dim1=-2, dim2=-1).sum(-1)
        return products.real.sum(-1)

    def _solve_fixed(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        identity = Scaling.identity(*grams.donor_primal.shape).to(grams.primal.device)
        return identity, self.gain_as_it_stands(grams)

    def _solve_orthogonal(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        if not self.rescale:
            rotation = procrustes(grams.primal + grams.dual, grams.rank_tolerance)
            return Orthogonal(rotation), 2 * _inner(rotation, grams.primal + grams.dual) - grams.norms()
        primal, dual = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
        scale = torch.ones_like(primal)
        if self.rescale != "sequential":
            scale = _joint_orthogonal(grams, primal, dual)
        rotation = procrustes(_mix(grams, scale), grams.rank_tolerance)
        scale = best_scale(primal, dual, _inner(rotation, grams.primal), _inner(rotation, grams.dual))
        inner = _inner(rotation, grams.primal), _inner(rotation, grams.dual)
        return Scaled(rotation, scale), -cost(scale, primal, dual, *inner)

    def _solve_permutation(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = grams.primal + grams.dual
        index = torch.stack([assign_small(m) for m in agreement])
        element = Monomial(Permutation(index), Scaling.identity(*index.shape))
        return element, 2 * agreement.gather(2, index.to(agreement.device)[..., None]).sum((1, 2)) - grams.norms()

    def _solve_planar(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        primal, dual = grams.primal, grams.dual
        norms = self._pair_norms(grams.donor_primal, grams.donor_dual)
        scale = torch.ones_like(norms[0])
        if self.rescale is True:
            anchor = self._pair_norms(grams.anchor_primal, grams.anchor_dual)
            scale = _joint_planar(primal, dual, norms, _balance(*norms, *anchor))
        turn = _phase(scale * primal + dual / scale).conj()
        inner = (turn * primal).real, (turn * dual).real
        if self.rescale:
            scale = best_scale(*norms, *inner)
        return Planar(-turn.angle(), scale, self.interleaved), -cost(scale, *norms, *inner).sum(-1)

    def _pair_norms(self, primal: Tensor, dual: Tensor) -> tuple[Tensor, Tensor]:
        return _pair_sums(primal, self.interleaved), _pair_sums(dual, self.interleaved)

    def _solve_pair_signs(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = (grams.primal + grams.dual).real
        factor = torch.ones_like(grams.donor_primal)
        for where in pair_dims(factor.shape[-1], self.interleaved):
            factor[:, where] = _sign(agreement)
        return Scaling(factor), 2 * agreement.abs().sum(-1) - grams.norms()

    def _solve_coordinate_signs(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = grams.primal + grams.dual
        return Scaling(_sign(agreement)), 2 * agreement.abs().sum(-1) - grams.norms()

    def _solve_head_sign(self, grams: Grams) -> tuple[GroupElement, Tensor]:
        agreement = (grams.primal + grams.dual).sum(-1)
        factor = _sign(agreement)[:, None].repeat(1, grams.primal.shape[-1])
        return Scaling(factor), 2 * agreement.abs() - grams.norms()

    def bound(self, primal: Tensor, dual: Tensor, grams: Grams) -> Tensor:
        """An upper bound on the gain from bounds on <g, M_P> and <g, M_D>, shape (N,); for O(d) these are |M|_*.

        By the triangle inequality ``|a M_P + M_D / a|_* <= a |M_P|_* + |M_D|_* / a``.
        """
        if self.kind == "planar":
            norms = self._pair_norms(grams.donor_primal, grams.donor_dual)
        else:
            norms = grams.donor_primal.sum(-1), grams.donor_dual.sum(-1)
            primal, dual = (x.sum(-1) if x.ndim > 1 else x for x in (primal, dual))
        scale = best_scale(*norms, primal, dual) if self.rescale else torch.ones_like(primal)
        value = -cost(scale, *norms, primal, dual)
        return value.sum(-1) if value.ndim > 1 else value

    def agreement(self, element: GroupElement, products: Tensor) -> Tensor:
        """<A, g^-T B> for dual products of many heads, (N, r, r, *S), under one element for each N; (N, r, r)."""
        if isinstance(element, Planar):
            turn = torch.polar(1 / element.scale, -element.angle)
            return torch.einsum("np,nabp->nab", turn, products).real
        if self.statistic == "full":
            d = products.shape[-1]
            eye = torch.eye(d, dtype=products.dtype, device=products.device).expand(len(products), d, d)
            return torch.einsum("nij,nabij->nab", element.act(eye, 0, 1, dual=True), products)
        assert isinstance(element, Scaling)
        factor = element.factor
        if self.kind == "pair_signs":
            factor = factor[:, pair_dims(element.size, self.interleaved)[0]]
        return torch.einsum("np,nabp->nab", 1 / factor, products.real)


def assign_small(values: Tensor) -> Tensor:
    """The best assignment of a small matrix (n, n), the identity on ties; int64 (n,), on the CPU."""
    matrix = values.detach().cpu().double()
    index = torch.from_numpy(linear_sum_assignment(matrix.numpy(), maximize=True)[1]).long()
    chosen, trace = float(matrix.gather(1, index[:, None]).sum()), float(matrix.trace())
    return torch.arange(len(index)) if trace >= chosen - 1e-12 * abs(chosen) else index


def _joint_orthogonal(grams: Grams, primal: Tensor, dual: Tensor) -> Tensor:
    def inner(scale: Tensor) -> tuple[Tensor, Tensor]:
        rotation = procrustes(_mix(grams, scale), grams.rank_tolerance)
        return _inner(rotation, grams.primal), _inner(rotation, grams.dual)

    bounds = nuclear_norm(grams.primal), nuclear_norm(grams.dual)
    return joint_scale(lambda a: nuclear_norm(_mix(grams, a)), inner, primal, dual, grams.guess(), bounds)


def _joint_planar(primal: Tensor, dual: Tensor, norms: tuple[Tensor, Tensor], guess: Tensor) -> Tensor:
    def inner(scale: Tensor) -> tuple[Tensor, Tensor]:
        turn = _phase(scale * primal + dual / scale).conj()
        return (turn * primal).real, (turn * dual).real

    bounds = primal.abs(), dual.abs()
    return joint_scale(lambda a: (a * primal + dual / a).abs(), inner, *norms, guess, bounds)


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


def _phase(z: Tensor) -> Tensor:
    """z / |z|; 1 where z is zero or its phase is below rounding, so that ties go to the identity."""
    size = z.abs()
    flat = (size == 0) | (size - z.real <= 1e-12 * size)
    return torch.where(flat, torch.ones_like(z), z / torch.where(size == 0, torch.ones_like(size), size))
