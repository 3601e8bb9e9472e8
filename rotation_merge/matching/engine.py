"""Models between anchor and donors, with the donors' coordinates inside the graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import stateless

from rotation_merge.architecture import Architecture
from rotation_merge.errors import CheckpointError
from rotation_merge.matching.alignment import Transforms
from rotation_merge.matching.mixing import Mixed, Mixing, ParentTensors
from rotation_merge.model.blocks import unstack
from rotation_merge.model.fold import Fold
from rotation_merge.model.tensors import TensorSource
from rotation_merge.symmetry import SpaceTransform

Batch = Mapping[str, Tensor]


def lookalike(model: nn.Module) -> nn.Module:
    """Copy a model's modules around the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy of the model with gradient checkpointing and unchanged outputs.

    transformers checkpoints only in training mode: the layers that support it are set to training, without dropout.
    """
    copy = lookalike(model).eval()
    cast(Any, copy).gradient_checkpointing_enable()
    for module in copy.modules():
        module.training = getattr(module, "gradient_checkpointing", False)
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return copy


def untie_heads(model: nn.Module, architecture: Architecture) -> None:
    """Give every tied head a copy of the embedding's tensor, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for info in architecture.tensors():
        if info.tied and info.name in parameters and any(parameters[info.name] is parameters.get(t) for t in info.tied):
            owner, _, leaf = info.name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameters[info.name].detach().clone()))
    cast(Any, model).config.tie_word_embeddings = False


LARGEST_HELD = 1 << 28
"""Bytes of a mixed model that is made as a whole, with all that its gradients need; of larger ones nothing stays."""


@dataclass
class Path:
    """All models ``w_0 anchor + sum_i w_i moved donor_i``, as one differentiable model.

    Attributes:
        model: an instance of the class, whose own weights are not used.
        parents: the tensors of anchor and donors.
        names: of the model's parameters.
    """

    model: nn.Module
    architecture: Architecture
    parents: ParentTensors
    names: frozenset[str]

    @classmethod
    def between(
        cls,
        model: nn.Module,
        architecture: Architecture,
        anchor: TensorSource,
        donors: Sequence[TensorSource],
        folded: Sequence[str],
        device: torch.device,
        in_memory: bool | None = None,
    ) -> Path:
        """The path between these models; streams in `folded` are folded.

        Args:
            in_memory: whether mixed models are made as a whole; by default those of `LARGEST_HELD` bytes at most.
        """
        parameters = dict(model.named_parameters())
        if in_memory is None:
            in_memory = sum(4 * parameter.numel() for parameter in parameters.values()) <= LARGEST_HELD
        parents = ParentTensors([anchor, *donors], Fold(architecture, folded), device, in_memory)
        return cls(model, architecture, parents, frozenset(parameters))

    def weights(self, transforms: Sequence[Mapping[str, SpaceTransform]], coefficients: Tensor) -> dict[str, Tensor]:
        """Tensors of one model on the path, or their lazy stand-ins.

        Args:
            transforms: one mapping a donor.
            coefficients: (1 + donors,), the anchor's first; their sum is one.
        """
        mixing = Mixing(self.parents, transforms, coefficients)
        result: dict[str, Tensor] = {}
        for block in self.architecture.blocks:
            for info in block.tensors:
                stored = self.parents.sources[0]
                if info.name not in self.names or info.name not in stored:
                    continue
                if self.parents.in_memory:
                    result.update(unstack(info, mixing.mixed(block, info)))
                    continue
                for piece, name in enumerate(info.names):
                    result[name] = Mixed.standing_for(mixing, block, info, piece, stored[name])
        return result

    def holding(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The model with these weights until the backward pass is done.

        Layers under gradient checkpointing run again then.
        """
        return stateless._reparametrize_module(self.model, dict(weights), tie_weights=True)

    def outputs(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        """The model's outputs with these weights."""
        mixing = next((weight.mixing for weight in weights.values() if isinstance(weight, Mixed)), None)
        with nullcontext() if mixing is None else mixing.sparing():
            return functional_call(self.model, dict(weights), args=(), kwargs=dict(batch))


def same_names(anchor: nn.Module, donor: nn.Module, names: tuple[str, str] = ("anchor", "donor")) -> None:
    """Refuse a donor with another class or other tensors.

    Raises:
        CheckpointError: names the first tensor that only one of the two has, or that has other shapes in them.
    """
    odd = sorted(set(anchor.state_dict()) ^ set(donor.state_dict()))
    if odd:
        raise CheckpointError(f"tensor '{odd[0]}' is only in one of the two models", remedy="fit models of one class")
    same_shapes(anchor, donor, names)


def same_shapes(anchor: nn.Module, donor: nn.Module, names: tuple[str, str]) -> None:
    """Refuse a donor whose tensors have other shapes, such as those of another vocabulary.

    Args:
        names: what the two are called.

    Raises:
        CheckpointError: names the first one.
    """
    states = anchor.state_dict(), donor.state_dict()
    for name, shape in ((name, tensor.shape) for name, tensor in states[0].items() if name in states[1]):
        if states[1][name].shape != shape:
            problem = f"tensor '{name}' is {list(states[1][name].shape)}, in {names[0]} it is {list(shape)}"
            raise CheckpointError(
                problem, where=names[1], remedy="bring the models to one vocabulary and one size first"
            )


def renamed(
    transforms: Mapping[str, SpaceTransform], architecture_of_transforms: Architecture, target: Architecture
) -> Transforms:
    """Transforms under the space names of another spelling of the model: a checkpoint's instead of a module's."""
    names = {name: name for name in architecture_of_transforms.streams}
    ours = {(b.module, b.place, b.index): b for b in architecture_of_transforms.blocks}
    for block in target.blocks:
        same = ours.get((block.module, block.place, block.index))
        if same is not None:
            names.update({s.name: block.spaces[k].name for k, s in same.spaces.items() if k in block.spaces})
    return {names[name]: transform for name, transform in transforms.items()}
