"""Transforms as trainable modules.

Every element is a fixed start times a learned element of its group that begins at the identity (`group.moved`):
``exp(A)`` with A skew-symmetric for orthogonal maps (among vectors without a mean for LayerNorm streams), an added
angle for RoPE pairs, ``exp(s)`` for positive scales. Orders of heads and experts, and signs, do not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rotation_merge.architecture.model import Architecture
from rotation_merge.matching.alignment import Transforms
from rotation_merge.symmetry import Transform
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
        self.start, self.scaling, self.steps = dict(start), scaling, nn.ModuleDict()
        self.learned: dict[str, tuple[str, str, Group]] = {}  # space, part and group of every element, by key in steps
        spaces = architecture.spaces()
        for name, transform in start.items():
            orders = permutations and spaces[name].kind in ("ffn", "experts")
            for part, (group, *_) in architecture.widest_group(spaces[name], transform).groups.items():
                element = transform.elements[part]
                of_group = type(element) is type(group.identity(1, 1))
                if steps := learnable(group, element, scaling, orders) if of_group else {}:
                    key = f"{name}|{part}".replace(".", "/")  # names of modules must not hold dots
                    self.steps[key], self.learned[key] = nn.ParameterDict(steps), (name, part, group)

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name, differentiable; with `exact` in float64 and projected onto their groups."""
        elements = {name: dict(transform.elements) for name, transform in self.start.items()}
        for key, (name, part, group) in self.learned.items():
            steps: dict[str, Tensor] = dict(self.steps[key].items())  # type: ignore[operator]
            elements[name][part] = moved(group, elements[name][part], steps, self.scaling, exact)
        return {name: replace(transform, elements=elements[name]) for name, transform in self.start.items()}

    @torch.no_grad()
    def final_transforms(self) -> Transforms:
        """The transforms for storage: float64, on the CPU, exactly inside their groups."""
        device = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        transforms = self.forward(exact=True)
        self.to(device)
        return {name: transform.to(torch.device("cpu")) for name, transform in transforms.items()}
