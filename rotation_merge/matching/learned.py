"""Transforms as trainable modules.

Every element is a fixed start times a learned element of its group that begins at the identity (`Group.steps`):
``exp(A)`` with A skew-symmetric for orthogonal maps (in the complement of the all-ones vector for LayerNorm streams),
an added angle for RoPE pairs, ``exp(s)`` for positive scales. Orders of heads and experts, and signs, do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Transforms
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.element import Element


class LearnedTransforms(nn.Module):
    """Trainable transforms of all spaces of one donor.

    Args:
        architecture: whose spaces they are.
        start: transforms to begin at, by space name.
        scaling: whether positive scales are learned.
        permutations: whether orders of neurons are learned.
    """

    def __init__(
        self,
        architecture: Architecture,
        start: Mapping[str, Transform],
        scaling: bool = True,
        permutations: bool = False,
    ) -> None:
        super().__init__()
        self.start = dict(start)
        spaces = architecture.spaces()
        self.groups = {name: architecture.widest_group(spaces[name], transform) for name, transform in start.items()}
        self.steps = nn.ModuleDict()
        for name, part, element in self._elements():
            group = self.groups[name].groups[part][0]
            if steps := group.steps(element, scaling, permutations and spaces[name].kind in ("ffn", "experts")):
                self.steps[_key(name, part)] = nn.ParameterDict(steps)

    def _elements(self) -> Iterator[tuple[str, str, Element]]:
        """Space, part and start of every element whose form is that of its group's."""
        for name, transform in self.start.items():
            for part, (group, *_) in self.groups[name].groups.items():
                element = transform.elements[part]
                if type(element) is type(group.identity(1, 1)):
                    yield name, part, element

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name, differentiable; with `exact` in float64 and projected onto their groups."""
        return {name: self._moved(name, transform, exact) for name, transform in self.start.items()}

    def _moved(self, name: str, start: Transform, exact: bool) -> Transform:
        elements = dict(start.elements)
        for part, (group, *_) in self.groups[name].groups.items():
            if (key := _key(name, part)) in self.steps:
                steps: dict[str, Tensor] = dict(self.steps[key].items())  # type: ignore[operator]
                elements[part] = group.moved(elements[part], steps, exact)  # type: ignore[arg-type]
        return replace(start, elements=elements)

    @torch.no_grad()
    def final_transforms(self) -> Transforms:
        """The transforms for storage: float64, on the CPU, exactly inside their groups."""
        device = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        transforms = self.forward(exact=True)
        self.to(device)
        return {name: transform.to(torch.device("cpu")) for name, transform in transforms.items()}


def _key(space: str, part: str) -> str:
    """The name of an element's parameters; those of modules must not hold dots."""
    return f"{space}|{part}".replace(".", "/")


def identities(transforms: Mapping[str, Transform]) -> Transforms:
    """Identity elements of the same groups, as the start for models that share their coordinates."""
    return {name: transform.still() for name, transform in transforms.items()}
