"""The groups that act on coordinates: everything that the rest of the code asks of one.

An element (`element.py`) defines its action; a group its elements: the identity, random ones, the best one for given
statistics, the nearest one to a stored or learned one, and the directions that learning takes. `admitted` selects the
groups of a space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import RANK_TOLERANCE, complement_of_ones, exp_skew, procrustes, random_orthogonal
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.symmetry.element import LARGEST_ENTRY, Element, Linear, Monomial, in_order

SETTLED = 1e-9
"""Change of a logarithm of a scale at which the turns end."""
NEAR = 1e-6
"""Largest deviation of an entry of a map from the group that it belongs to."""


@dataclass(frozen=True)
class Stats:
    r"""Second-order statistics of N (anchor, donor) pairs, float64, which the best element of every group follows from.

    The squared distance that a map g (primal side) leaves is a constant minus the gain

        gain(g) = 2 <g B_P, A_P> - |g B_P|^2 + 2 <g^-T B_D, A_D> - |g^-T B_D|^2,

    with P the primal side (keys, values), D the dual one (queries, outputs), A anchor and B donor.

    Attributes:
        products: A B^T of the primal and of the dual side, (N, d, d); third, if there are any, of tensors that are
            permuted with the coordinates and neither scaled nor turned.
        donor, anchor: squared norms of the coordinates on each of these, (N, d).
        rounding: relative rounding of the products.
        turns: how often map and scale take turns at most, where both are free.
    """

    products: tuple[Tensor, ...]
    donor: tuple[Tensor, ...]
    anchor: tuple[Tensor, ...]
    rounding: float = RANK_TOLERANCE
    turns: int = 60

    @classmethod
    def of_products(cls, products: Tensor, gains: Tensor) -> Stats:
        """Of one side whose maps keep norms, as a stream's: products of its axes and of gains, (N, d, d) each."""
        nothing = (torch.zeros_like(products[:, 0]),) * 3
        return cls((products, torch.zeros_like(products), gains), nothing, nothing)

    def part(self, dims: slice) -> Stats:
        """The statistics of some of the coordinates."""
        donor, anchor = (tuple(norms[:, dims] for norms in of_model) for of_model in (self.donor, self.anchor))
        return replace(self, products=tuple(m[:, dims, dims] for m in self.products), donor=donor, anchor=anchor)

    def gain(self, element: Monomial | Linear) -> Tensor:
        """The gain of one element for each pair, (N,)."""
        total = torch.zeros_like(self.products[0][:, 0, 0])
        sides = (element, False), (element.powered(), True), (element.order(), False)
        for (side, dual), products, norms in zip(sides, self.products, self.donor, strict=False):
            maps = side.matrices(dual).to(products)
            total = total + 2 * (maps * products).sum((1, 2)) - (maps.square().sum(1) * norms).sum(1)
        return total

    def of_equals(self, equal: Tensor) -> Stats:
        """The same with exact statistics where both models are equal, (N,): nothing moves there."""
        if not bool(equal.any()):
            return self
        pairs = zip(self.anchor, self.products, strict=True)
        products = (torch.where(equal[:, None, None], torch.diag_embed(norms), m) for norms, m in pairs)
        donor = (torch.where(equal[:, None], a, b) for a, b in zip(self.anchor, self.donor, strict=True))
        return replace(self, products=tuple(products), donor=tuple(donor))


@dataclass(frozen=True)
class Monomials:
    """Orders and factors of coordinates, as far as they are free: the identity alone where nothing is.

    Gains of the norms of queries and keys, for instance, have factors with a sign: a score is a sum of
    ``g_q q_i * g_k k_i`` over coordinates that the norms have brought to one length, so that ``g_q / t`` and ``g_k t``
    give the same one.

    Attributes:
        first: the first coordinate that may change its place, as in Git Re-Basin (2023) and TransFusion (2025); None:
            all keep theirs, which rotary embedding or a norm ties them to.
        signed, scaled: whether factors may be negative, and of any size.
        ties: numbers of the first coordinates, the same for those that share a factor (RoPE pairs, all of a head); the
            others have each their own.
        degree: of the activation between both sides: FFN neurons.
    """

    first: int | None = None
    signed: bool = False
    scaled: bool = False
    ties: tuple[int, ...] = ()
    degree: int = 1

    @property
    def words(self) -> str:
        """Its elements, in words."""
        sizes = f"{'signed' if self.signed else 'positive'} rescaling"
        factors = sizes if self.scaled else "signs" if self.signed else ""
        if factors and self.ties:
            factors += " of RoPE pairs" if len(self.ties) == 2 * len(set(self.ties)) else " of heads"
        return ", ".join(filter(None, ["permutation" if self.permutes else "", factors])) or "none"

    @property
    def permutes(self) -> bool:
        """Whether they are permutations."""
        return self.first is not None

    def identity(self, batch: int, size: int) -> Monomial:
        """Identities, in the form that `solve` gives."""
        return Monomial.identity(batch, size, self.degree)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        """Random elements, for tests and twins."""
        index, first = torch.arange(size).repeat(batch, 1), size if self.first is None else self.first
        for row in index[:, first:] if first < size else ():
            row.copy_(torch.randperm(size - first, generator=generator) + first)
        factor = random_factors(batch, size, generator) if self.scaled else torch.ones(batch, size).double()
        if self.signed:
            factor = factor * (torch.randint(0, 2, (batch, size), generator=generator).double() * 2 - 1)
        return Monomial(index, factor if self.permutes else factor[:, self.blocks(size)], self.degree)

    def solve(self, stats: Stats) -> Monomial:
        """The best elements for the statistics, one for each pair; ties go to the identity.

        Assignment over the gains of pairs of coordinates, each with its best sign or factor.
        """
        p, q = stats.products[:2]
        primal, dual = (norm[:, None] for norm in stats.donor[:2])
        numbers = self.blocks(p.shape[-1]).to(p.device)
        if not self.permutes:
            p, q = (summed(m.diagonal(dim1=1, dim2=2), numbers) for m in (p, q))
            primal, dual = (summed(norm, numbers) for norm in stats.donor[:2])
        if self.scaled:
            factor = best_scale(primal, dual, p, q, self.signed, self.degree)
        else:
            factor = signs(p + q) if self.signed else torch.ones_like(p)
        if not self.permutes:
            return replace(self.identity(*stats.donor[0].shape), factor=factor[:, numbers].double().cpu())
        gain = -cost(factor, primal, dual, p, q, self.degree) if self.scaled else 2 * (p + q) * factor
        gain, first = sum((2 * m for m in stats.products[2:]), gain), self.first or 0
        index = torch.stack([torch.cat([torch.arange(first), assign(m[first:, first:]) + first]) for m in gain])
        picked = factor.gather(2, index.to(factor.device)[..., None])[..., 0]
        return Monomial(index, picked.double().cpu(), self.degree)

    def project(self, element: Any) -> Monomial:
        """The nearest elements of the group; its own come back as they are, up to rounding."""
        keeps = self.permutes and in_order(element.index[:, : self.first])
        index = element.index if keeps else torch.arange(element.shape[1]).expand(element.shape)
        factor = _alike(self, element.factor)
        sizes = factor.abs().nan_to_num(1.0).clamp(1 / LARGEST_ENTRY, LARGEST_ENTRY)
        factor = signs(factor) * (sizes if self.scaled else 1)
        return Monomial(index, factor if self.signed else factor.abs(), self.degree)

    def blocks(self, size: int) -> Tensor:
        """Numbers, (d,), of the blocks of coordinates that maps stay inside."""
        alone = torch.arange(size - len(self.ties)).clamp_max(size if self.first is None else self.first)
        return torch.cat([torch.tensor(self.ties).long(), alone + len(set(self.ties))])


@dataclass(frozen=True)
class Rotations:
    """O(d), reflections included, with one positive factor for each map (`scaled`).

    The best maps are found in blocks, (N, k, s, s) for k blocks of s coordinates: here, of all coordinates.

    Attributes:
        sequential: the factor after the map, as in the ICML 2025 paper, not in turn with it.
        fixes_ones: maps have to keep the all-ones vector: LayerNorm takes off the mean.
    """

    scaled: bool = False
    sequential: bool = False
    fixes_ones: bool = False

    permutes = False

    @property
    def words(self) -> str:
        return "orthogonal maps"

    @property
    def first(self) -> int | None:
        return 0

    def identity(self, batch: int, size: int) -> Linear:
        return Linear(torch.eye(size, dtype=torch.float64).repeat(batch, 1, 1))

    def random(self, batch: int, size: int, generator: torch.Generator) -> Linear:
        turn = random_orthogonal(batch, size - self.fixes_ones, generator)
        if self.fixes_ones:
            basis = complement_of_ones(size)
            turn = basis @ turn @ basis.T + 1.0 / size
        return Linear(turn * random_factors(batch, 1, generator)[..., None] if self.scaled else turn)

    def blocks(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.long)

    def solve(self, stats: Stats) -> Linear:
        """The best map; where `scaled`, map and scale in turn until nothing moves.

        They begin at the scale that gives the donor the anchor's ratio of primal to dual norm.

        Source: ICML 2025 paper, section 4.2; jointly: its appendix D.
        """
        primal, dual = map(self._inside, stats.products[:2])
        blocks, count = self.blocks(stats.donor[0].shape[-1]), primal.shape[1]
        norms, anchor = (
            [summed(x, blocks)[:, :count, None, None] for x in of[:2]] for of in (stats.donor, stats.anchor)
        )
        scale = torch.ones_like(norms[0])
        if self.scaled and not self.sequential:
            ratio = (norms[1] * anchor[0]) / (norms[0] * anchor[1])
            scale = torch.where(ratio.isfinite() & (ratio > 0), ratio, scale) ** 0.25
        for _ in range(stats.turns if self.scaled else 1):
            turn = self._best(scale * primal + dual / scale, stats.rounding)
            if not self.scaled:
                break
            p, q = ((turn.conj() * m).real.sum((2, 3), keepdim=True) for m in (primal, dual))
            before, scale = scale, best_scale(norms[0], norms[1], p, q)
            if self.sequential or bool(((scale / before).log().abs() < SETTLED).all()):
                break
        return self._whole((turn * scale).cpu(), stats)

    def _inside(self, products: Tensor) -> Tensor:
        """The products, (N, d, d), that the blocks' maps depend on."""
        return products[:, None]

    def _best(self, products: Tensor, rounding: float) -> Tensor:
        """Procrustes; where the all-ones vector is kept, it is made a singular vector of the products on both sides."""
        if not self.fixes_ones:
            return procrustes(products, rounding)
        inside, size = centred(products), products.shape[-1]
        length = torch.linalg.matrix_norm(inside, keepdim=True) / size**0.5  # of no other order than the rest
        return procrustes(inside + length / size, rounding)

    def _whole(self, maps: Tensor, stats: Stats) -> Linear:
        """The blocks' maps as one."""
        return Linear(maps[:, 0])

    def project(self, element: Any) -> Linear:
        matrix = element.matrices()
        if not self.scaled:
            return Linear(self._best(matrix, 0.0))
        scale = matrix.square().sum(-1).mean(-1).sqrt()[:, None, None]
        return Linear(self._best(matrix / scale, 0.0) * scale)


@dataclass(frozen=True)
class Planar(Rotations):
    """A rotation of each RoPE pair, a block that is one complex number, with a positive factor for each (`scaled`).

    Attributes:
        pairs: numbers of the pairs that the coordinates belong to: (0, 1, 0, 1), or (0, 0, 1, 1) if interleaved.
        unturned: the group of the coordinates behind them, which rotary embedding leaves alone.
    """

    pairs: tuple[int, ...] = ()
    unturned: Rotations | None = None

    @property
    def words(self) -> str:
        return "a rotation for each RoPE pair" + (f", {self.unturned.words} on the rest" if self.unturned else "")

    @property
    def first(self) -> int | None:
        return self._rest.start if self.unturned else None

    @property
    def _rest(self) -> slice:
        """The coordinates that no pair has."""
        return slice(len(self.pairs), None)

    def blocks(self, size: int) -> Tensor:
        return torch.tensor(self.pairs + (len(self.pairs) // 2,) * (size - len(self.pairs)))

    def _coordinates(self, device: torch.device) -> Tensor:
        """First and second coordinates of the pairs, (2, p)."""
        return torch.tensor(self.pairs).argsort(stable=True).reshape(-1, 2).T.to(device)

    def _inside(self, products: Tensor) -> Tensor:
        """The sums over each pair, as complex numbers: real along the pair, imaginary across."""
        i, j = self._coordinates(products.device)
        along, across = products[:, i, i] + products[:, j, j], products[:, j, i] - products[:, i, j]
        return torch.complex(along, across)[..., None, None]

    def _best(self, products: Tensor, rounding: float) -> Tensor:
        """z / |z|; 1 where z is zero or its phase is below rounding, so that ties go to the identity."""
        size = products.abs()
        flat = size - products.real <= 1e-12 * size
        return torch.where(flat, 1.0, products / torch.where(size == 0, 1.0, size))

    def _joined(self, z: Tensor, size: int, unturned: Linear | None) -> Linear:
        """Complex factors of the pairs, (N, p), beside the maps of the rest."""
        i, j = self._coordinates(z.device)
        whole = torch.zeros(len(z), size, size, dtype=z.real.dtype, device=z.device)
        whole[:, i, i], whole[:, j, j], whole[:, j, i], whole[:, i, j] = z.real, z.real, z.imag, -z.imag
        if unturned is not None:
            whole[:, self._rest, self._rest] = unturned.matrix
        return Linear(whole)

    def _whole(self, maps: Tensor, stats: Stats) -> Linear:
        unturned = self.unturned.solve(stats.part(self._rest)) if self.unturned else None
        return self._joined(maps[..., 0, 0], stats.donor[0].shape[-1], unturned)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Linear:
        angle = (torch.rand(batch, len(self.pairs) // 2, dtype=torch.float64, generator=generator) * 2 - 1) * math.pi
        scale = random_factors(batch, angle.shape[1], generator) if self.scaled else torch.ones_like(angle)
        unturned = self.unturned.random(batch, size - self._rest.start, generator) if self.unturned else None
        return self._joined(torch.polar(scale, angle), size, unturned)

    def project(self, element: Any) -> Linear:
        matrix = element.matrices()
        z = self._inside(matrix)[..., 0, 0] / 2
        unturned = self.unturned.project(Linear(matrix[:, self._rest, self._rest])) if self.unturned else None
        return self._joined(z if self.scaled else z / z.abs(), matrix.shape[-1], unturned)


Group = Monomials | Rotations
"""A group of maps of d coordinates; both have the same members."""


def nearest_member(group: Group, element: Element, shape: tuple[int, int], deviation: float = NEAR) -> Element | None:
    """The nearest of a group's elements to one of any origin; None if some entry between them deviates by more."""
    form = group.identity(1, 1)
    kinds = (Linear, Monomial) if isinstance(form, Linear) else type(form)
    if not (isinstance(element, kinds) and element.degree == form.degree and element.fits(shape)):
        return None
    member: Any = group.project(element)
    return member if member.inverse().compose(element).deviation() <= deviation else None


def learnable(group: Group, element: Element, scales: bool) -> Tensor | None:
    """The step at which learning begins, float32: a map's or, if wanted, that of scales; None: nothing is learned."""
    batch, size = element.shape
    if isinstance(element, Linear):
        return torch.zeros(batch, size, size)
    return torch.zeros(batch, size) if scales and group.scaled else None


def moved(group: Group, element: Any, step: Tensor, scales: bool, exact: bool) -> Element:
    """The element where a step has led, differentiable in it.

    Maps are the exponential of the step's direction times the element, factors likewise.

    Args:
        exact: in float64 and inside the group to the last digit, else in float32.
    """
    dtype = torch.float64 if exact else torch.float32
    step = step.to(dtype)
    if not isinstance(element, Linear):
        return replace(element, factor=element.factor.to(step) * _alike(group, step).exp())
    turn = (torch.matrix_exp if exact else exp_skew)(_skew(group, step))
    result = Linear(turn @ element.matrix.to(step))
    if scales and group.scaled:
        result = Linear(result.matrix * _alike(group, step.diagonal(dim1=1, dim2=2)).exp()[..., None])
    return group.project(result) if exact else result


def _skew(group: Group, step: Tensor) -> Tensor:
    """The direction in the Lie algebra of a group's maps that is nearest to a step, (G, d, d), up to a factor."""
    numbers = group.blocks(step.shape[-1]).to(step.device)
    skew = (step - step.mT) * (numbers[:, None] == numbers)
    return centred(skew) if getattr(group, "fixes_ones", False) else skew


def _alike(group: Group, factors: Tensor) -> Tensor:
    """Factors or their logarithms, (G, d), the same for coordinates that share one: the mean."""
    if group.permutes:
        return factors
    numbers = group.blocks(factors.shape[-1]).to(factors.device)
    return (summed(factors, numbers) / torch.bincount(numbers).to(factors))[:, numbers]


def centred(m: Tensor) -> Tensor:
    """Matrices, (..., d, d), with the means of their rows and columns taken off."""
    inside = m - m.mean(-1, keepdim=True)
    return inside - inside.mean(-2, keepdim=True)


def signs(x: Tensor) -> Tensor:
    """-1 where x is below zero, else 1; float64."""
    return torch.where(x < 0, -1.0, 1.0).double()


def random_factors(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Positive factors, (G, d), float64."""
    return (0.5 * torch.randn(batch, size, dtype=torch.float64, generator=generator)).exp()


def summed(x: Tensor, groups: Tensor) -> Tensor:
    """Sums of (N, d) over the coordinates of each group, (N, k); on the CPU, as a GPU adds in any order."""
    sums = torch.zeros(*x.shape[:-1], int(groups.max()) + 1, dtype=x.dtype)
    return sums.index_add_(-1, groups.cpu(), x.cpu()).to(x.device)
