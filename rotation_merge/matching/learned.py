"""Transforms as trainable modules.

Every element is a fixed start times a learned element of its group that begins at the identity (`group.moved`):
``exp(A)`` with A skew-symmetric for orthogonal maps (among vectors without a mean for LayerNorm streams), an added
angle for RoPE pairs, ``exp(s)`` for positive scales. Orders of heads and experts, and signs, do not change.
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
from rotation_merge.symmetry.group import Group, learnable, moved


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
        self.start, self.scaling = dict(start), scaling
        spaces = architecture.spaces()
        self.groups = {name: architecture.widest_group(spaces[name], transform) for name, transform in start.items()}
        self.steps = nn.ModuleDict()
        for name, part, group, element in self._elements():
            if steps := learnable(group, element, scaling, permutations and spaces[name].kind in ("ffn", "experts")):
                self.steps[_key(name, part)] = nn.ParameterDict(steps)

    def _elements(self) -> Iterator[tuple[str, str, Group, Element]]:
        """Space, part, group and start of every element whose form is that of its group's."""
        for name, transform in self.start.items():
            for part, (group, *_) in self.groups[name].groups.items():
                element = transform.elements[part]
                if type(element) is type(group.identity(1, 1)):
                    yield name, part, group, element

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name, differentiable; with `exact` in float64 and projected onto their groups."""
        elements = {name: dict(transform.elements) for name, transform in self.start.items()}
        for name, part, group, element in self._elements():
            if (key := _key(name, part)) in self.steps:
                steps: dict[str, Tensor] = dict(self.steps[key].items())  # type: ignore[operator]
                elements[name][part] = moved(group, element, steps, self.scaling, exact)
        return {name: replace(transform, elements=elements[name]) for name, transform in self.start.items()}

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
