"""The groups that act on coordinates: everything that the rest of the code asks of one.

An element (`element.py`) defines its action; a group its elements: the identity, random ones, the best one for given
statistics, the nearest one to a stored or learned one, and the steps that learning takes. `admitted` selects the
groups of a space.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import complement_of_ones, exp_skew, nuclear_norm, procrustes, random_orthogonal
from rotation_merge.linalg.scaling import best_scale, cost
from rotation_merge.symmetry.element import Element, LearnedOrder, Linear, Monomial
from rotation_merge.symmetry.stats import Stats, summed

SETTLED = 1e-9
"""Change of a logarithm of a scale at which the turns end."""
LARGEST_ENTRY = 1e7
"""Largest entry of a map or of its inverse; beyond, storage types lose too much precision."""

Steps = Mapping[str, Tensor]
"""What is learned of an element, by name, float32; zero (of an order: the identity) at the element itself."""


class Group(Protocol):
    """A group of maps of d coordinates.

    Attributes:
        words, symbol: its elements, in a sentence and in a table.
    """

    @property
    def words(self) -> str: ...
    @property
    def symbol(self) -> str: ...

    def identity(self, batch: int, size: int) -> Element:
        """Identities, in the form that `solve` gives."""

    def random(self, batch: int, size: int, generator: torch.Generator) -> Element:
        """Random elements, for tests and twins."""

    def solve(self, stats: Stats) -> Element:
        """The best elements for the statistics, one for each pair."""

    def value(self, stats: Stats) -> Tensor:
        """The gains of the best elements, (N,), or of ones that are nearly the best: enough to choose pairs by."""

    def project(self, element: Element) -> Element:
        """The nearest elements of the group; its own come back as they are, up to rounding."""

    def blocks(self, size: int) -> Tensor:
        """Numbers, (d,), of the blocks of coordinates that maps stay inside."""

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        """What may be learned of an element: maps and, if wanted, scales and the order of a single element."""

    def moved(self, element: Element, steps: Steps, exact: bool) -> Element:
        """The element where steps have led, differentiable in them.

        Args:
            exact: in float64 and inside the group to the last digit, else in float32.
        """


class _Factors:
    """What groups share whose elements are orders and factors.

    `ties` numbers the coordinates that share a factor (RoPE pairs, all of a head); None: each has its own.
    """

    ties: tuple[int, ...] | None = None
    degree: int = 1

    @cached_property
    def _ties(self) -> Tensor | None:
        return None if self.ties is None else torch.tensor(self.ties)

    def _shared(self, x: Tensor) -> Tensor:
        """Sums, (N, d) to (N, k), over the coordinates that share a factor."""
        return x if self._ties is None else summed(x, self._ties)

    def _spread(self, x: Tensor) -> Tensor:
        """One factor for each that is shared, (N, k), as one for each coordinate, (N, d)."""
        return x if self._ties is None else x[:, self._ties.to(x.device)]

    def _count(self, size: int) -> int:
        """How many factors there are of `size` coordinates."""
        return len(set(self.ties or range(size)))

    def _mean(self, factor: Tensor) -> Tensor:
        """The mean factor of those that have to be equal, (N, d)."""
        return factor if self._ties is None else self._spread(self._shared(factor) / torch.bincount(self._ties))

    def identity(self, batch: int, size: int) -> Monomial:
        return Monomial.identity(batch, size, self.degree)

    def blocks(self, size: int) -> Tensor:
        return torch.arange(size) if self._ties is None else self._ties

    def value(self, stats: Stats) -> Tensor:
        return stats.gain(self.solve(stats))

    def solve(self, stats: Stats) -> Monomial:
        raise NotImplementedError

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        return {}

    def moved(self, element: Element, steps: Steps, exact: bool) -> Element:
        """The factors times the exponential of their steps."""
        assert isinstance(element, Monomial)
        return replace(element, factor=self._scaled(element.factor, steps, exact))

    def _scaled(self, factor: Tensor, steps: Steps, exact: bool) -> Tensor:
        step = next(iter(steps.values()))
        start = like(factor, step, exact)
        return start * self._spread(like(steps["log_scale"], step, exact)).exp() if "log_scale" in steps else start


@dataclass(frozen=True)
class Fixed(_Factors):
    """The identity alone."""

    words = "none"
    symbol = "none"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        return self.identity(batch, size)

    def solve(self, stats: Stats) -> Monomial:
        return self.identity(*stats.donor[0].shape)

    def project(self, element: Element) -> Monomial:
        return self.identity(*element.shape)


@dataclass(frozen=True)
class Signs(_Factors):
    """A sign for each coordinate or for each tie: what commutes with a gained norm of queries and keys, and rotary."""

    ties: tuple[int, ...] | None = None

    @property
    def words(self) -> str:
        return self._named("a sign for each {}")

    @property
    def symbol(self) -> str:
        return self._named("sign of each {}")

    def _named(self, text: str) -> str:
        if self.ties is None:
            return text.format("coordinate")
        return text.format("RoPE pair" if max(self.ties) else "head")

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        factor = random_signs(batch, self._count(size), generator)
        return replace(self.identity(batch, size), factor=self._spread(factor))

    def solve(self, stats: Stats) -> Monomial:
        agreement = self._shared((stats.primal + stats.dual).diagonal(dim1=1, dim2=2))
        return replace(self.identity(*stats.donor[0].shape), factor=self._spread(signs(agreement)).cpu())

    def project(self, element: Element) -> Monomial:
        assert isinstance(element, Monomial)
        return replace(self.identity(*element.shape), factor=signs(self._mean(element.factor)))


@dataclass(frozen=True)
class Exchange(_Factors):
    """A nonzero factor for each coordinate or tie: gains of the keys' norm times it, those of the queries' over it.

    A score is a sum of ``g_q q_i * g_k k_i`` over the coordinates that the norms have brought to one length, so that
    ``g_q / t`` and ``g_k t`` give the same one. Where rotary embedding follows, t is equal on both coordinates of a
    pair, which it mixes.
    """

    ties: tuple[int, ...] | None = None

    words = "gains exchanged"
    symbol = "gain exchange"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        count = self._count(size)
        factor = random_factors(batch, count, generator) * random_signs(batch, count, generator)
        return replace(self.identity(batch, size), factor=self._spread(factor))

    def solve(self, stats: Stats) -> Monomial:
        norms = [self._shared(x) for x in stats.donor]
        inner = [self._shared(m.diagonal(dim1=1, dim2=2)) for m in (stats.primal, stats.dual)]
        factor = best_scale(norms[0], norms[1], inner[0], inner[1], signed=True)
        return replace(self.identity(*stats.donor[0].shape), factor=self._spread(factor).cpu())

    def project(self, element: Element) -> Monomial:
        assert isinstance(element, Monomial)
        return replace(self.identity(*element.shape), factor=within(self._mean(element.factor)))

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        batch, size = element.shape
        return {"log_scale": torch.zeros(batch, self._count(size))} if scales else {}


@dataclass(frozen=True)
class Permutations(_Factors):
    """Orders of coordinates, with signs (`signed`) and factors (`scaled`) where they are admitted.

    Attributes:
        degree: of the activation between both sides: FFN neurons.
        first: the first coordinates, so many, keep their places.
        permute: False: all do.
        learnable: whether learning may change order and factors.
    """

    signed: bool = False
    scaled: bool = False
    degree: int = 1
    first: int = 0
    permute: bool = True
    learnable: bool = True

    @property
    def words(self) -> str:
        parts = ["permutation"] if self.permute else []
        if self.scaled:
            parts.append("signed rescaling" if self.signed else "positive rescaling")
        elif self.signed:
            parts.append("signs")
        return ", ".join(parts) or "none"

    @property
    def symbol(self) -> str:
        return "permuted, scaled" if self.scaled else "permutations"

    def random(self, batch: int, size: int, generator: torch.Generator) -> Monomial:
        element = self.identity(batch, size)
        if self.permute:
            orders = [torch.randperm(size - self.first, generator=generator) + self.first for _ in range(batch)]
            element = replace(element, index=torch.cat([element.index[:, : self.first], torch.stack(orders)], 1))
        factor = random_factors(batch, size, generator) if self.scaled else element.factor
        return replace(element, factor=factor * random_signs(batch, size, generator) if self.signed else factor)

    def solve(self, stats: Stats) -> Monomial:
        """Assignment over the gains of pairs of coordinates, each with its best sign or factor."""
        agreement = stats.primal + stats.dual
        factor = torch.ones_like(agreement)
        if self.scaled:
            norms = stats.donor[0][:, None], stats.donor[1][:, None]
            factor = best_scale(*norms, stats.primal, stats.dual, self.signed, self.degree)
            gain = -cost(factor, *norms, stats.primal, stats.dual, self.degree)
        else:
            factor = signs(agreement) if self.signed else factor
            gain = 2 * agreement * factor
        index = torch.stack([self._best(m) for m in (gain if stats.follow is None else gain + 2 * stats.follow)])
        picked = factor.gather(2, index.to(factor.device)[..., None])[..., 0]
        return Monomial(index, picked.double().cpu(), self.degree)

    def _best(self, gain: Tensor) -> Tensor:
        if not self.permute:
            return torch.arange(len(gain))
        places = torch.arange(self.first)
        return torch.cat([places, assign(gain[self.first :, self.first :]) + self.first])

    def project(self, element: Element) -> Monomial:
        assert isinstance(element, Monomial)
        index = element.index if self.permute else torch.arange(element.shape[1]).expand(element.shape)
        index = torch.cat([torch.arange(self.first).expand(len(index), -1), index[:, self.first :]], 1)
        factor = within(element.factor) if self.scaled else signs(element.factor)
        return Monomial(index, factor if self.signed else factor.abs(), self.degree)

    def blocks(self, size: int) -> Tensor:
        return torch.arange(size).clamp_max(self.first) if self.permute else torch.arange(size)

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        batch, size = element.shape
        scale = {"log_scale": torch.zeros(batch, size)} if scales and self.scaled and self.learnable else {}
        scores = orders and self.permute and self.learnable and batch == 1
        return {**scale, "scores": torch.eye(size)} if scores else scale

    def moved(self, element: Element, steps: Steps, exact: bool) -> Element:
        """The factors times the exponential of their steps, in the best order of the scores after the element's."""
        assert isinstance(element, Monomial)
        factor = self._scaled(element.factor, steps, exact)
        if "scores" not in steps:
            return replace(element, factor=factor)
        scores = steps["scores"]
        best = assign(scores.detach())[None]
        if exact:
            return Monomial(element.index.gather(1, best), factor, self.degree)
        hard = torch.zeros_like(scores).scatter(1, best.T.to(scores.device), 1.0)
        matrix = (hard + scores - scores.detach())[:, element.index[0].argsort().to(scores.device)]
        return LearnedOrder(element.index, factor, self.degree, matrix)


@dataclass(frozen=True)
class Rotations:
    """O(d), reflections included, with one positive factor for each map (`scaled`).

    Attributes:
        sequential: the factor after the map, as in the ICML 2025 paper, not in turn with it.
        fixes_ones: maps have to keep the all-ones vector: LayerNorm takes off the mean.
    """

    scaled: bool = False
    sequential: bool = False
    fixes_ones: bool = False

    words = "orthogonal maps"
    symbol = "O(d)"

    def identity(self, batch: int, size: int) -> Linear:
        return Linear.identity(batch, size)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Linear:
        turn = self._whole(random_orthogonal(batch, size - self.fixes_ones, generator))
        return Linear(turn * random_factors(batch, 1, generator)[..., None] if self.scaled else turn)

    def blocks(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.long)

    def _whole(self, inner: Tensor) -> Tensor:
        """Maps of the complement of the all-ones vector as maps that fix it, if they have to; else as they are."""
        if not self.fixes_ones:
            return inner
        size = inner.shape[-1] + 1
        basis = complement_of_ones(size).to(inner)
        return basis @ inner @ basis.T + 1.0 / size

    def _inner(self, m: Tensor) -> Tensor:
        """The reverse of `_whole`."""
        if not self.fixes_ones:
            return m
        basis = complement_of_ones(m.shape[-1]).to(m)
        return basis.T @ m @ basis

    def _best(self, m: Tensor, rounding: float) -> Tensor:
        inner = procrustes(self._inner(m), rounding)
        eye = torch.eye(inner.shape[-1]).to(inner)
        still = (inner == eye).all(-1).all(-1)[..., None, None]
        return torch.where(still, torch.eye(m.shape[-1]).to(inner), self._whole(inner)) if self.fixes_ones else inner

    def solve(self, stats: Stats) -> Linear:
        """Procrustes; where `scaled`, map and scale in turn from the balanced scale, until nothing moves.

        Source: ICML 2025 paper, section 4.2; jointly: its appendix D.
        """
        norms = stats.donor[0].sum(-1), stats.donor[1].sum(-1)
        scale = torch.ones_like(norms[0])
        if self.scaled and not self.sequential:
            scale = stats.balanced()[:, 0]
        for _ in range(stats.turns if self.scaled else 1):
            turn = self._best(mixed(stats.primal, stats.dual, scale), stats.rounding)
            if not self.scaled:
                break
            before, scale = scale, best_scale(*norms, inner(turn, stats.primal), inner(turn, stats.dual))
            if self.sequential or bool(((scale / before).log().abs() < SETTLED).all()):
                break
        return Linear((turn * scale[:, None, None]).cpu())

    def value(self, stats: Stats) -> Tensor:
        """From the singular values at the balanced scale."""
        norms = stats.donor[0].sum(-1), stats.donor[1].sum(-1)
        scale = stats.balanced()[:, 0] if self.scaled and not self.sequential else torch.ones_like(norms[0])
        products = mixed(stats.primal, stats.dual, scale)
        best = nuclear_norm(self._inner(products))
        if self.fixes_ones:
            best = best + products.sum((1, 2)) / products.shape[-1]
        return 2 * best - scale**2 * norms[0] - norms[1] / scale**2

    def project(self, element: Element) -> Linear:
        matrix = element.matrices()
        scale = row_scale(matrix) if self.scaled else torch.ones(len(matrix), dtype=torch.float64)
        return Linear(self._whole(procrustes(self._inner(matrix / scale[:, None, None]))) * scale[:, None, None])

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        batch, size = element.shape
        turn = {"turn": torch.zeros(batch, size - self.fixes_ones, size - self.fixes_ones)}
        return {**turn, "log_scale": torch.zeros(batch)} if scales and self.scaled else turn

    def moved(self, element: Element, steps: Steps, exact: bool) -> Linear:
        """``exp(A)`` of a skew-symmetric A times the element, in the complement of the all-ones vector if need be."""
        step = steps["turn"]
        skew = like(step - step.mT, step, exact)
        turn = self._whole(torch.matrix_exp(skew) if exact else exp_skew(skew))
        result = turn @ like(element.matrices(), step, exact)
        if "log_scale" in steps:
            result = result * like(steps["log_scale"], step, exact).exp()[:, None, None]
        return self.project(Linear(result)) if exact else Linear(result)


@dataclass(frozen=True)
class Planar:
    """A rotation of each RoPE pair, with a positive factor for each (`scaled`).

    Attributes:
        pairs: first and second coordinates of the pairs.
        unturned: the group of the coordinates from `at` on, which rotary embedding leaves alone.
    """

    pairs: tuple[tuple[int, ...], tuple[int, ...]]
    scaled: bool = False
    sequential: bool = False
    unturned: Rotations | None = None

    @property
    def words(self) -> str:
        return "a rotation for each RoPE pair" + (f", {self.unturned.words} on the rest" if self.unturned else "")

    @property
    def symbol(self) -> str:
        return "planar" + (f", {self.unturned.symbol} on what rotary leaves alone" if self.unturned else "")

    @property
    def at(self) -> int:
        """The first coordinate that no pair has."""
        return 2 * len(self.pairs[0])

    def blocks(self, size: int) -> Tensor:
        numbers = torch.full((size,), len(self.pairs[0]))
        for coordinates in self.pairs:
            numbers[list(coordinates)] = torch.arange(len(coordinates))
        return numbers

    def _complex(self, m: Tensor) -> Tensor:
        """The sums of the products of each pair, (N, p), as complex numbers: real along the pair, imaginary across."""
        i, j = (torch.tensor(x, device=m.device) for x in self.pairs)
        return torch.complex(m[:, i, i] + m[:, j, j], m[:, j, i] - m[:, i, j])

    def _whole(self, z: Tensor, size: int, unturned: Tensor | None) -> Linear:
        """Pairs turned by complex factors, (N, p), beside a matrix of the rest, (N, d - 2 p, d - 2 p)."""
        i, j = (torch.tensor(x, device=z.device) for x in self.pairs)
        eye = torch.eye(size, dtype=z.real.dtype, device=z.device).repeat(len(z), 1, 1)
        eye[:, i, i], eye[:, j, j], eye[:, j, i], eye[:, i, j] = z.real, z.real, z.imag, -z.imag
        if unturned is not None:
            eye[:, self.at :, self.at :] = unturned
        return Linear(eye)

    def identity(self, batch: int, size: int) -> Linear:
        return Linear.identity(batch, size)

    def random(self, batch: int, size: int, generator: torch.Generator) -> Linear:
        angle = (torch.rand(batch, len(self.pairs[0]), dtype=torch.float64, generator=generator) * 2 - 1) * math.pi
        scale = random_factors(batch, angle.shape[1], generator) if self.scaled else torch.ones_like(angle)
        unturned = self.unturned.random(batch, size - self.at, generator).matrix if self.unturned else None
        return self._whole(torch.polar(scale, angle), size, unturned)

    def _pair_sums(self, norms: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        i, j = (torch.tensor(x, device=norms[0].device) for x in self.pairs)
        return norms[0][:, i] + norms[0][:, j], norms[1][:, i] + norms[1][:, j]

    def solve(self, stats: Stats) -> Linear:
        """The angle of each pair's sum of complex inner products; angle and scale in turn until nothing moves."""
        z, w = self._complex(stats.primal), self._complex(stats.dual)
        norms, size = self._pair_sums(stats.donor), stats.primal.shape[-1]
        scale = torch.ones_like(norms[0])
        if self.scaled and not self.sequential:
            scale = stats.balanced(self.blocks(size))[:, : len(self.pairs[0])]
        for _ in range(stats.turns if self.scaled else 1):
            turn = _phase(scale * z + w / scale)
            if not self.scaled:
                break
            before, scale = scale, best_scale(*norms, (turn.conj() * z).real, (turn.conj() * w).real)
            if self.sequential or bool(((scale / before).log().abs() < SETTLED).all()):
                break
        unturned = self.unturned.solve(stats.part(slice(self.at, None))).matrix if self.unturned else None
        return self._whole((scale * turn).cpu(), size, unturned)

    def value(self, stats: Stats) -> Tensor:
        return stats.gain(self.solve(stats))

    def project(self, element: Element) -> Linear:
        matrix = element.matrices()
        z = self._complex(matrix) / 2
        unturned = self.unturned.project(Linear(matrix[:, self.at :, self.at :])).matrix if self.unturned else None
        return self._whole(z if self.scaled else z / z.abs(), matrix.shape[-1], unturned)

    def steps(self, element: Element, scales: bool, orders: bool) -> dict[str, Tensor]:
        zeros = torch.zeros(element.shape[0], len(self.pairs[0]))
        result = {"angle": zeros, "log_scale": zeros.clone()} if scales and self.scaled else {"angle": zeros}
        if self.unturned is not None:
            inner = Linear(element.matrices()[:, self.at :, self.at :])
            result |= {f"unturned/{name}": step for name, step in self.unturned.steps(inner, scales, orders).items()}
        return result

    def moved(self, element: Element, steps: Steps, exact: bool) -> Linear:
        """Each pair turned and scaled further."""
        angle = like(steps["angle"], steps["angle"], exact)
        scale = like(steps["log_scale"], angle, exact).exp() if "log_scale" in steps else torch.ones_like(angle)
        matrix = like(element.matrices(), angle, exact)
        unturned = None
        if self.unturned is not None:
            inner = {
                name.removeprefix("unturned/"): step for name, step in steps.items() if name.startswith("unturned/")
            }
            still = Linear.identity(matrix.shape[0], matrix.shape[1] - self.at)
            unturned = self.unturned.moved(still, inner, exact).matrix
        turned = Linear(self._whole(torch.polar(scale, angle), matrix.shape[-1], unturned).matrix @ matrix)
        return self.project(turned) if exact else turned


def mixed(primal: Tensor, dual: Tensor, scale: Tensor) -> Tensor:
    """a M_P + M_D / a, (N, d, d)."""
    return scale[..., None, None] * primal + dual / scale[..., None, None]


def inner(turn: Tensor, products: Tensor) -> Tensor:
    """<R, M>, (N,)."""
    return (turn * products).sum((-2, -1))


def row_scale(matrix: Tensor) -> Tensor:
    """The common length of the rows of each matrix, (N,)."""
    return matrix.square().sum(-1).mean(-1).sqrt()


def signs(x: Tensor) -> Tensor:
    """-1 where x is below zero, else 1; float64."""
    return torch.where(x < 0, -1.0, 1.0).double()


def within(factor: Tensor) -> Tensor:
    """Factors of either sign, neither zero nor infinite."""
    return signs(factor) * factor.abs().nan_to_num(1.0).clamp(1 / LARGEST_ENTRY, LARGEST_ENTRY)


def like(start: Tensor, step: Tensor, exact: bool) -> Tensor:
    """The start on the step's device, in float64 if `exact`, else in float32."""
    return start.to(device=step.device, dtype=torch.float64 if exact else torch.float32)


def random_factors(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Positive factors, (G, d), float64."""
    return (0.5 * torch.randn(batch, size, dtype=torch.float64, generator=generator)).exp()


def random_signs(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Factors of 1 and -1, (G, d), float64."""
    return torch.randint(0, 2, (batch, size), generator=generator).double() * 2 - 1


def _phase(z: Tensor) -> Tensor:
    """z / |z|; 1 where z is zero or its phase is below rounding, so that ties go to the identity."""
    size = z.abs()
    flat = size - z.real <= 1e-12 * size
    return torch.where(flat, torch.ones_like(z), z / torch.where(size == 0, torch.ones_like(size), size))
