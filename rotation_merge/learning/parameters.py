r"""Group elements with trainable parameters that cannot leave their groups.

Every element is a fixed start times something that is the identity at zero: ``exp(A)`` with A skew-symmetric for
orthogonal maps (in the complement of the all-ones vector where a LayerNorm stream asks for it), an added angle for RoPE
pairs, ``exp(s)`` for positive scales. Permutations and signs stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from rotation_merge.architectures.model import Architecture, Space
from rotation_merge.groups import (
    DirectSum,
    ExpertTransform,
    GroupElement,
    HeadTransform,
    Invertible,
    Monomial,
    NeuronTransform,
    Orthogonal,
    Permutation,
    Planar,
    Scaled,
    Scaling,
    SpaceTransform,
    StreamTransform,
)
from rotation_merge.linalg.assignment import assign
from rotation_merge.linalg.polar import complement_of_ones, procrustes
from rotation_merge.matching.model import Transforms
from rotation_merge.matching.stream import layer_normed


class LearnedElement(nn.Module):
    """One batch of group elements: `start` moved along its group by the module's parameters."""

    def __init__(
        self, start: GroupElement, scales: bool = True, fix_ones: bool = False, permutations: bool = False
    ) -> None:
        super().__init__()
        self.start, self.fix_ones = start, fix_ones
        batch, size = start.batch, start.size - fix_ones
        if isinstance(start, Orthogonal | Scaled | Invertible):
            self.turn = nn.Parameter(torch.zeros(batch, size, size))
        if isinstance(start, Scaled) and scales:
            self.log_scale = nn.Parameter(torch.zeros(batch))
        if isinstance(start, Planar):
            self.angle = nn.Parameter(torch.zeros_like(start.angle, dtype=torch.float32))
            if scales:
                self.log_scale = nn.Parameter(torch.zeros_like(start.scale, dtype=torch.float32))
        if isinstance(start, Monomial) and scales:
            self.log_scale = nn.Parameter(torch.zeros_like(start.scaling.factor, dtype=torch.float32))
        if isinstance(start, Monomial) and permutations and start.batch == 1:
            self.scores = nn.Parameter(torch.eye(start.size))
        if isinstance(start, DirectSum):
            self.parts = nn.ModuleList(LearnedElement(part, scales) for part in start.parts)

    def forward(self, exact: bool = False) -> GroupElement:
        """The element now; in float64 and put back onto the group to the last digit if `exact`."""
        start = self.start
        if next(self.parameters(), None) is None:
            return start
        match start:
            case DirectSum():
                return DirectSum(tuple(part(exact) for part in self.parts))
            case Orthogonal():
                return Orthogonal(self._turned(start.matrix, exact))
            case Scaled():
                return Scaled(self._turned(start.matrix, exact), self._scaled(start.factor, exact))
            case Invertible():
                return Invertible(self._exponential(self.turn, exact) @ self._like(start.matrix, exact))
            case Planar():
                angle = self._like(start.angle, exact) + self._like(self.angle, exact)
                return Planar(angle, self._scaled(start.scale, exact), start.interleaved)
            case Monomial():
                return Monomial(self._permuted(start, exact), Scaling(self._scaled(start.scaling.factor, exact)))
        return start

    def _like(self, tensor: Tensor, exact: bool) -> Tensor:
        return tensor.double() if exact else tensor.to(device=self._device(), dtype=torch.float32)

    def _device(self) -> torch.device:
        return next(self.parameters()).device

    def _scaled(self, start: Tensor, exact: bool) -> Tensor:
        start = self._like(start, exact)
        return start * self._like(self.log_scale, exact).exp() if hasattr(self, "log_scale") else start

    def _permuted(self, start: Monomial, exact: bool) -> Permutation:
        """The start's permutation, or the best assignment of the scores after it.

        While learning, the hard permutation stands as a matrix whose gradient goes straight through to the scores
        (Git Re-Basin, 2023, section 3.3).
        """
        if not hasattr(self, "scores"):
            return start.permutation
        found = assign(self.scores.detach()).permutation[None]
        if exact:
            return Permutation(found).compose(start.permutation)
        hard = torch.zeros_like(self.scores).scatter(1, found.T.to(self.scores.device), 1.0)
        matrix = (hard + self.scores - self.scores.detach())[:, start.permutation.inverse().index[0]]
        return cast(Permutation, Orthogonal(matrix[None]))  # acts as a permutation does

    def _exponential(self, generator: Tensor, exact: bool) -> Tensor:
        return torch.matrix_exp(self._like(generator, exact))

    def _turned(self, start: Tensor, exact: bool) -> Tensor:
        turn = self._exponential(self.turn - self.turn.mT, exact)
        if self.fix_ones:
            basis = self._like(complement_of_ones(self.start.size), exact)
            turn = basis @ turn @ basis.T + 1.0 / self.start.size
        matrix = turn @ self._like(start, exact)
        if not exact:
            return matrix
        if not self.fix_ones:
            return procrustes(matrix)
        basis = complement_of_ones(self.start.size)
        return basis @ procrustes(basis.T @ matrix.cpu() @ basis) @ basis.T + 1.0 / self.start.size


class LearnedTransforms(nn.Module):
    """Trainable transforms of all spaces of one donor."""

    def __init__(
        self,
        architecture: Architecture,
        start: Mapping[str, SpaceTransform],
        rescale: bool = True,
        permutations: bool = False,
    ) -> None:
        super().__init__()
        self.start = dict(start)
        self.spaces: dict[str, Space] = dict(architecture.streams)
        self.spaces |= {s.name: s for block in architecture.blocks for s in block.spaces.values()}
        self.elements = nn.ModuleDict()
        for name, transform in self.start.items():
            space = self.spaces[name]
            for part, element in _parts(transform).items():
                ones = space.kind == "stream" and layer_normed(architecture, name) and isinstance(element, Orthogonal)
                scales = rescale and (space.kind == "attention" or space.degree > 0)
                self.elements[_key(name, part)] = LearnedElement(
                    element, scales, ones, permutations and part == "neurons"
                )

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name; differentiable in the parameters unless `exact`."""
        return {name: self._transform(name, transform, exact) for name, transform in self.start.items()}

    def _transform(self, name: str, transform: SpaceTransform, exact: bool) -> SpaceTransform:
        def element(part: str) -> GroupElement:
            return self.elements[_key(name, part)](exact)

        match transform:
            case HeadTransform():
                return HeadTransform(transform.groups, transform.queries, element("qk"), element("vo"))
            case StreamTransform():
                return StreamTransform(element("stream"))
            case NeuronTransform():
                return NeuronTransform(element("neurons"), transform.degree)  # type: ignore[arg-type]
            case ExpertTransform():
                return ExpertTransform(transform.order, element("neurons"), transform.degree)  # type: ignore[arg-type]
        return transform

    @torch.no_grad()
    def hardened(self) -> Transforms:
        """The transforms as they are stored and applied: float64, on the CPU, exactly inside their groups."""
        was = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        result = self.forward(exact=True)
        self.to(was)
        return result


def _parts(transform: SpaceTransform) -> dict[str, GroupElement]:
    match transform:
        case HeadTransform():
            return {"qk": transform.qk, "vo": transform.vo}
        case StreamTransform():
            return {"stream": transform.element}
        case NeuronTransform():
            return {"neurons": transform.element}
        case ExpertTransform():
            return {"neurons": transform.neurons}
    return {}


def _key(space: str, part: str) -> str:
    """Module names must not hold dots."""
    return f"{space}|{part}".replace(".", "/")


def identities(transforms: Mapping[str, SpaceTransform]) -> Transforms:
    """Identities of the same groups: where learning starts if the models share their coordinates already."""
    return {name: _still(transform) for name, transform in transforms.items()}


def _still(transform: SpaceTransform) -> SpaceTransform:
    match transform:
        case HeadTransform():
            order = HeadTransform.identity_order(*transform.queries.shape)
            return HeadTransform(*order, _still_element(transform.qk), _still_element(transform.vo))
        case StreamTransform():
            return StreamTransform(_still_element(transform.element))
        case NeuronTransform():
            return NeuronTransform(Monomial.identity(transform.element.batch, transform.element.size), transform.degree)
        case ExpertTransform():
            neurons = Monomial.identity(transform.neurons.batch, transform.neurons.size)
            return ExpertTransform(torch.arange(len(transform.order)), neurons, transform.degree)
    return transform


def _still_element(element: GroupElement) -> GroupElement:
    match element:
        case DirectSum():
            return DirectSum(tuple(_still_element(part) for part in element.parts))
        case Planar():
            return Planar(torch.zeros_like(element.angle), torch.ones_like(element.scale), element.interleaved)
    return type(element).identity(element.batch, element.size)
