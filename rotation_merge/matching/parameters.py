r"""Transforms with trainable parameters that cannot leave their groups.

Every element is a fixed start times something that is the identity at first (`GroupElement.tangent`): ``exp(A)`` with A
skew-symmetric for orthogonal maps (in the complement of the all-ones vector where a LayerNorm stream asks for it), an
added angle for RoPE pairs, ``exp(s)`` for positive scales. Orders of heads and experts, and signs, stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rotation_merge.architecture.model import Architecture, Space
from rotation_merge.matching.alignment import Transforms
from rotation_merge.symmetry import GroupElement, SpaceTransform
from rotation_merge.symmetry.admitted import neurons
from rotation_merge.symmetry.tangent import Freedom


class LearnedElement(nn.Module):
    """One batch of group elements: `start` moved along its group by the module's parameters."""

    def __init__(self, start: GroupElement, freedom: Freedom) -> None:
        super().__init__()
        self.start, self.freedom = start, freedom
        for name, step in start.tangent(freedom).items():
            self.register_parameter(name, nn.Parameter(step))

    def forward(self, exact: bool = False) -> GroupElement:
        """The element now; in float64 and put back onto the group to the last digit if `exact`."""
        steps = dict(self.named_parameters())
        return self.start.along(steps, self.freedom, exact) if steps else self.start


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
        spaces: dict[str, Space] = dict(architecture.streams)
        spaces |= {s.name: s for block in architecture.blocks for s in block.spaces.values()}
        self.elements = nn.ModuleDict()
        for name, transform in self.start.items():
            if spaces[name].span is not None:
                continue  # stays as it was found, for all its layers alike
            freedom = _freedom(architecture, spaces[name], rescale, permutations)
            for part, element in transform.elements().items():
                self.elements[_key(name, part)] = LearnedElement(element, freedom)

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name; differentiable in the parameters unless `exact`."""
        return {name: self._moved(name, transform, exact) for name, transform in self.start.items()}

    def _moved(self, name: str, start: SpaceTransform, exact: bool) -> SpaceTransform:
        keys = {part: _key(name, part) for part in start.elements()}
        learned = {part: self.elements[key](exact) for part, key in keys.items() if key in self.elements}
        return start.with_elements({**start.elements(), **learned})

    @torch.no_grad()
    def hardened(self) -> Transforms:
        """The transforms as they are stored and applied: float64, on the CPU, exactly inside their groups."""
        was = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        result = self.forward(exact=True)
        self.to(was)
        return {name: transform.to(torch.device("cpu")) for name, transform in result.items()}


def _freedom(architecture: Architecture, space: Space, rescale: bool, permutations: bool) -> Freedom:
    """What may be learned of a space's elements."""
    if space.kind == "stream":
        return Freedom(scales=False, fixes_ones=architecture.layer_normed(space.name))
    if space.kind in ("attention", "mixer", "convolution"):
        return Freedom(scales=rescale)
    if space.kind == "latent":
        return Freedom(scales=False)
    return Freedom(scales=rescale and neurons(space).degree > 0, permutations=permutations)


def _key(space: str, part: str) -> str:
    """Module names must not hold dots."""
    return f"{space}|{part}".replace(".", "/")


def identities(transforms: Mapping[str, SpaceTransform]) -> Transforms:
    """Identities of the same groups: where learning starts if the models share their coordinates already."""
    return {name: transform.still() for name, transform in transforms.items()}
