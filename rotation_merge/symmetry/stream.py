"""Transforms of a residual stream, and the groups they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rotation_merge.errors import RecipeError, nearest
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import complement_of_ones, procrustes
from rotation_merge.symmetry.base import GroupElement, dump, is_order, load, mixes, proven_maps
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.orthogonal import Orthogonal, beside_ones, fixing_ones
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.space import MatchingCost, SpaceGroup, SpaceTransform


@dataclass(frozen=True, eq=False)
class StreamTransform(SpaceTransform):
    """One element (G = 1) for the whole stream.

    Roles: `write` (into the stream), `read` (out of it), `shift` (norm biases, added to the readers' inputs) move with
        the element; `gain` (norm gains and layer scales, multiplied coordinate by coordinate) only follows its
        permutation, so that a map that mixes coordinates needs the gains folded away first.
    """

    element: GroupElement

    space_kind = "stream"

    def act(self, x: Tensor, role: str, dim: int, dual: bool = False) -> Tensor:
        element = self.element
        if role == "gain":
            if not isinstance(element, Monomial):
                return x
            element = element.permutation
        return element.act(x.unsqueeze(0), 0, dim + 1, dual).squeeze(0)

    def mixes(self, role: str) -> bool:
        return role != "gain" and mixes(self.element)

    def moves(self, role: str) -> bool:
        return (role != "gain" or self.moves_gains) and super().moves(role)

    def inverse(self) -> StreamTransform:
        return type(self)(self.element.inverse())

    def compose(self, first: StreamTransform) -> StreamTransform:
        return type(self)(self.element.compose(first.element))

    def still(self) -> StreamTransform:
        return type(self)(self.element.still())

    def elements(self) -> dict[str, GroupElement]:
        return {"stream": self.element}

    def with_elements(self, elements: Mapping[str, GroupElement]) -> StreamTransform:
        return type(self)(elements["stream"])

    @property
    def moves_gains(self) -> bool:
        """Whether gains follow the element; a map that mixes coordinates needs them folded away."""
        return isinstance(self.element, Monomial)

    def overlap(self, product: Tensor, role: str) -> float:
        """<R, M> for products M = A B^T (d, d) of axes of this role."""
        if isinstance(self.element, Monomial):
            index, factor = self.element.permutation.index[0], self.element.scaling.factor[0]
            picked = product[torch.arange(len(product), device=product.device), index.to(product.device)]
            return float((picked if role == "gain" else picked * factor.to(picked)).sum())
        assert isinstance(self.element, Orthogonal)
        return float(product.trace() if role == "gain" else (self.element.matrix[0].to(product) * product).sum())

    def is_identity(self) -> bool:
        return self.element.is_identity()

    def distances(self) -> dict[str, float]:
        return {"stream": float(self.element.distance().mean())}

    def group(self) -> str:
        return self.element.kind

    def tensors(self) -> dict[str, Tensor]:
        return dump(self.element)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> StreamTransform:
        return cls(load(tensors))


_POLAR_FLOPS = 50.0  # of a polar factor in float64, by cubed size, at the speed of float32

STREAM_GROUPS = {
    "none": "none",
    "permutation": "permutations",
    "signed_permutation": "signed permutations",
    "rotation": "rotations",
}
"""The residual groups, smallest first, and their words in a table."""


@dataclass(frozen=True)
class StreamGroup(SpaceGroup):
    """A group of a residual stream.

    Attributes:
        kind: one of `STREAM_GROUPS`.
        size: d.
        fixes_ones: whether rotations have to fix the all-ones vector: LayerNorm takes off the mean.
    """

    kind: str
    size: int
    fixes_ones: bool

    def __post_init__(self) -> None:
        if self.kind not in STREAM_GROUPS:
            raise RecipeError(f"no residual group is called '{self.kind}'", remedy=nearest(self.kind, STREAM_GROUPS))

    @property
    def rotates(self) -> bool:
        return self.kind == "rotation"

    def identity(self) -> StreamTransform:
        return StreamTransform((Orthogonal if self.rotates else Monomial).identity(1, self.size))

    def random(self, generator: torch.Generator) -> StreamTransform:
        if self.kind == "none":
            return self.identity()
        if self.rotates:
            inner = Orthogonal.random(1, self.size - self.fixes_ones, generator)
            return StreamTransform(Orthogonal(beside_ones(inner.matrix)) if self.fixes_ones else inner)
        order, signs = Permutation.random(1, self.size, generator), Scaling.identity(1, self.size)
        if self.kind == "signed_permutation":
            signs = Scaling.random_signs(1, self.size, generator)
        return StreamTransform(Monomial(order, signs))

    def refuses(self, transform: SpaceTransform) -> str | None:
        element = transform.element if isinstance(transform, StreamTransform) else None
        if element is None or (element.batch, element.size) != (1, self.size):
            return f"it is not a transform of a stream of size {self.size}"
        if isinstance(element, Orthogonal):
            all_ones = torch.ones(self.size, 1, dtype=torch.float64)
            if not self.rotates or proven_maps(element) is None:
                return f"it does not belong to the group: {self.words}"
            stays = not self.fixes_ones or bool(((element.matrix[0] @ all_ones - all_ones).abs() <= 1e-6).all())
            return None if stays else "it moves the all-ones vector, which LayerNorm subtracts"
        if not isinstance(element, Monomial) or self.kind not in ("permutation", "signed_permutation"):
            return f"it does not belong to the group: {self.words}"
        factor = element.scaling.factor
        if factor.shape != element.permutation.index.shape or not is_order(element.permutation.index):
            return "its order is not a permutation"
        signs = factor.abs() if self.kind == "signed_permutation" else factor
        return None if bool((signs == 1).all()) else f"its factors are not those of: {self.words}"

    def solve(self, products: Tensor, gains: Tensor) -> StreamTransform:
        """The element that maximises the overlap with products of axes, and with those of gains, (d, d) each.

        Assignment, on absolute values for signed permutations, the sign read off afterwards; Procrustes for rotations,
        in the complement of the all-ones vector where that is fixed. Gains follow a permutation but not its signs.
        """
        if self.kind == "none":
            return self.identity()
        if self.rotates:
            return StreamTransform(Orthogonal(self._rotation(products)[None]))
        gains = gains.to(products.device)
        if self.kind == "permutation":
            return _monomial(assign(products + gains).permutation, torch.ones(self.size))
        assigned = assign(products.abs() + gains).permutation
        picked = products.gather(1, assigned.to(products.device)[:, None])[:, 0]
        return _monomial(assigned, torch.where(picked < 0, -1.0, 1.0))

    def _rotation(self, products: Tensor) -> Tensor:
        if not self.fixes_ones:
            return procrustes(products)
        basis = complement_of_ones(self.size).to(products.device)
        inner = procrustes(basis.T @ products @ basis)
        eye = torch.eye(self.size, dtype=inner.dtype, device=inner.device)
        return eye if torch.equal(inner, eye[1:, 1:]) else beside_ones(inner)

    def restored(self, transform: StreamTransform) -> StreamTransform:
        """A transform that storage has rounded, put back inside the group to the last digit."""
        if not (self.fixes_ones and isinstance(transform.element, Orthogonal)):
            return transform
        return StreamTransform(fixing_ones(transform.element))

    @property
    def words(self) -> str:
        return self.kind

    def work(self) -> MatchingCost:
        solving = _POLAR_FLOPS * self.size**3 if self.rotates else 0.0
        return MatchingCost(2.0 * self.size, solving, table=self.size**2)


def _monomial(index: Tensor, signs: Tensor) -> StreamTransform:
    return StreamTransform(Monomial(Permutation(index[None].cpu()), Scaling(signs[None].double().cpu())))
