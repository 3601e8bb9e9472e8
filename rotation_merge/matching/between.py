"""One model between an anchor and its donors, as a module whose weights are mixed when they are read.

Every weight is parametrized (`torch.nn.utils.parametrize`) as ``c_0 anchor + sum_i c_i moved donor_i``. Of small models
the mixed weights are kept for a step. Modules of larger ones run under `torch.utils.checkpoint`: their weights are
dropped once they have run, and mixed again in the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from rotation_merge.architecture import Architecture
from rotation_merge.matching.alignment import Transforms
from rotation_merge.matching.moving import moved_tensors
from rotation_merge.model.apply import at_least_float32, with_tied
from rotation_merge.model.fold import folded_tensors
from rotation_merge.model.forms import paired
from rotation_merge.model.tensors import Names, Tensors, TensorSource, as_tensors
from rotation_merge.symmetry import Transform
from rotation_merge.symmetry.group import Group, learnable, moved

LARGEST_KEPT = 1 << 28
"""Bytes of a mixed model whose weights are kept for a step; of larger ones they are mixed again."""


class Mixture:
    """The tensors of a model between an anchor and its donors.

    Args:
        architecture: of all of them.
        parents: their tensors by its names, the anchor's first; on any devices.
        folded: streams that are folded.
        device: where tensors are mixed, in float32 at least.
        keeps: whether folded and mixed tensors are kept in memory.
    """

    def __init__(
        self,
        architecture: Architecture,
        parents: Sequence[TensorSource],
        folded: Collection[str],
        device: torch.device,
        keeps: bool,
    ) -> None:
        def converted(_: str, tensor: Tensor) -> Tensor:
            return at_least_float32(tensor.to(device))

        def prepared(parent: TensorSource) -> Tensors:
            tensors = as_tensors(folded_tensors(architecture, with_tied(architecture, parent), folded)).map(converted)
            return tensors.cached(2 * LARGEST_KEPT) if keeps else tensors  # twice: in float64

        self.architecture, self.device, self.keeps = architecture, device, keeps
        self.parents = [prepared(parent) for parent in parents]
        self._moved: list[Tensors] = []
        self._shares: list[float] = []
        self._mixed: dict[tuple[Names, bool], Tensor] = {}

    @contextmanager
    def at(self, transforms: Sequence[Mapping[str, Transform]], coefficients: Tensor) -> Iterator[None]:
        """Choose a model for the block, which has to contain its backward pass.

        Args:
            transforms: of each donor.
            coefficients: (1 + donors,), the anchor's first; their sum is one.
        """
        anchor, *donors = self.parents
        pairs = zip(donors, transforms, strict=True)
        self._moved = [anchor, *(moved_tensors(self.architecture, donor, maps) for donor, maps in pairs)]
        self._shares = coefficients.tolist()
        try:
            yield
        finally:
            self._moved, self._mixed = [], {}

    def tensor(self, names: Names) -> Tensor:
        """A tensor of the chosen model, differentiable in the transforms; of several names, stacked."""
        key = names, torch.is_grad_enabled()
        if key in self._mixed:
            return self._mixed[key]
        with torch.autocast(self.device.type, enabled=False):
            parts = [(share, tensors) for share, tensors in zip(self._shares, self._moved, strict=True) if share]
            mixed = parts[0][0] * parts[0][1].read(names)
            for share, tensors in parts[1:]:
                mixed = mixed.add_(tensors.read(names), alpha=share)
        if self.keeps:
            self._mixed[key] = mixed
        return mixed


class MixedWeight(nn.Module):
    """Parametrization of a weight: the mixture's tensor takes its place.

    Args:
        names: of the tensor, or of the stack that it is a piece of.
        piece: which piece.
    """

    def __init__(self, mixture: Mixture, names: Names, piece: int) -> None:
        super().__init__()
        self.mixture, self.names, self.piece = mixture, names, piece

    def forward(self, _: Tensor) -> Tensor:
        mixed = self.mixture.tensor(self.names)
        return mixed if isinstance(self.names, str) else mixed[self.piece]


def mixed_model(model: nn.Module, mixture: Mixture, checkpointing: bool = False) -> nn.Module:
    """A copy of a model that computes what the mixture's model computes; holds no weights that are mixed.

    Args:
        checkpointing: store the inputs of layers only, and run them again in the backward pass.
    """
    model = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}).eval()
    recomputed = []
    if checkpointing:
        for config in (getattr(module, "config", None) for module in model.modules()):
            if getattr(config, "use_cache", False):  # which a second run of a layer would extend
                cast(Any, config).use_cache = False
        recomputed = list(_layers(model))
    leaves = [
        m for m in model.modules() if not any(next(child.parameters(), None) is not None for child in m.children())
    ]
    parametrized = _parametrize(model, mixture)
    recomputed += [module for module in leaves if module in parametrized and not mixture.keeps]
    for module in recomputed:  # which store their inputs only, and run again in the backward pass
        forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
        cast(Any, module).forward = forward
    return model


def _parametrize(model: nn.Module, mixture: Mixture) -> set[nn.Module]:
    """Parametrize weights and buffers of a model, tied ones under every name, and return the modules that hold them.

    Each is replaced by a tensor of the mixed weight's shape, dtype and device, without memory of its own.
    """
    stored: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    stored |= dict(model.named_buffers(remove_duplicate=False))
    weights = {
        name: MixedWeight(mixture, info.names if info.stacked else name, piece)
        for info in mixture.architecture.tensors()
        for piece, name in enumerate(info.names)
        if name in stored and all(name in parent for parent in mixture.parents)  # files hold what is shared once
    }
    tied = {id(stored[name]): weight for name, weight in weights.items()}
    modules = set()
    for name, tensor in stored.items():
        owner, _, leaf = name.rpartition(".")
        module, weight = model.get_submodule(owner), weights.get(name, tied.get(id(tensor)))
        if weight is None or parametrize.is_parametrized(module, leaf):
            continue
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        empty = torch.zeros((), dtype=dtype, device=mixture.device).expand(tensor.shape)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(empty, requires_grad=False)
        else:
            module._buffers[leaf] = empty
        parametrize.register_parametrization(module, leaf, weight, unsafe=True)
        modules.add(module)
    return modules


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model: the outermost lists of modules."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _layers(child)


class LearnedTransforms(nn.Module):
    """Trainable transforms of all spaces of one donor.

    Every element is a fixed start times a learned element of its group that begins at the identity (`group.moved`):
    ``exp(A)`` with A skew-symmetric for orthogonal maps (among vectors without a mean for LayerNorm streams), an added
    angle for RoPE pairs, ``exp(s)`` for positive scales. Orders and signs do not change.

    Args:
        architecture: whose spaces they are.
        start: transforms to begin at, by space name.
        scaling: whether positive scales are learned.
    """

    def __init__(self, architecture: Architecture, start: Mapping[str, Transform], scaling: bool = True) -> None:
        super().__init__()
        self.start, self.scaling, self.steps = dict(start), scaling, nn.ParameterDict()
        self.learned: dict[str, tuple[str, str, Group]] = {}  # space, part and group of every element, by key in steps
        spaces = architecture.spaces()
        for name, transform in start.items():
            for part, (group, *_) in architecture.widest_group(spaces[name], transform).groups.items():
                element = transform.elements[part]
                of_group = type(element) is type(group.identity(1, 1))
                if (step := learnable(group, element, scaling) if of_group else None) is not None:
                    key = f"{name}|{part}".replace(".", "/")  # names of modules must not hold dots
                    self.steps[key], self.learned[key] = step, (name, part, group)

    def forward(self, exact: bool = False) -> Transforms:
        """All transforms by space name, differentiable; with `exact` in float64 and projected onto their groups."""
        elements = {name: dict(transform.elements) for name, transform in self.start.items()}
        for key, (name, part, group) in self.learned.items():
            elements[name][part] = moved(group, elements[name][part], self.steps[key], self.scaling, exact)
        return {name: replace(transform, elements=elements[name]) for name, transform in self.start.items()}

    @torch.no_grad()
    def final_transforms(self) -> Transforms:
        """The transforms for storage: float64, on the CPU, exactly inside their groups."""
        device = next(iter(self.parameters()), torch.zeros(())).device
        self.cpu()
        transforms = self.forward(exact=True)
        self.to(device)
        return {name: transform.to(torch.device("cpu")) for name, transform in transforms.items()}


def renamed(transforms: Mapping[str, Transform], named: Architecture, target: Architecture) -> Transforms:
    """Transforms under the space names of another form of the model: a checkpoint's instead of a module's."""
    names = {name: name for name in named.streams}
    for same, block in paired(named, target):
        names.update({space.name: block.spaces[key].name for key, space in same.spaces.items() if key in block.spaces})
    return {names[name]: transform for name, transform in transforms.items()}
