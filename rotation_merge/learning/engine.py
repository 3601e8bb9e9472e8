"""Models between anchor and donors, with the donors' coordinates inside the graph."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import stateless

from rotation_merge.architectures import Architecture
from rotation_merge.architectures.model import Block, TensorInfo
from rotation_merge.architectures.registry import tied_head
from rotation_merge.errors import CheckpointError
from rotation_merge.groups import SpaceTransform
from rotation_merge.matching.apply import transform_tensor
from rotation_merge.matching.biases import with_biases
from rotation_merge.matching.fold import Fold
from rotation_merge.matching.member import Member
from rotation_merge.matching.model import Transforms
from rotation_merge.matching.state import TensorSource, read_block, unstack
from rotation_merge.samples.functions import architecture_of

Batch = Mapping[str, Tensor]


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy under gradient checkpointing, which transformers only does while training: the layers that can are said to
    be training, and nothing in the copy drops anything, so that it computes what the model computes."""
    found = copy.deepcopy(model).eval()
    cast(Any, found).gradient_checkpointing_enable()
    for module in found.modules():
        module.training = getattr(module, "gradient_checkpointing", False)
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return found


def untie_heads(model: nn.Module, architecture: Architecture) -> None:
    """Give every head that shares an embedding's tensor a copy of its own, in place."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for info in architecture.tensors():
        if info.tied and info.name in parameters and any(parameters[info.name] is parameters.get(t) for t in info.tied):
            owner, _, leaf = info.name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameters[info.name].detach().clone()))
    cast(Any, model).config.tie_word_embeddings = False


def member_of(model: nn.Module, name: str = "", untie: bool = True) -> Member:
    """A loaded model as `check_pair` sees it."""
    name = name or type(model).__name__
    config = {**cast(Any, model).config.to_dict(), "architectures": [type(model).__name__]}
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    return Member(name, config, architecture_of(model, untie), shapes, tied_head(config, list(shapes), name))


@dataclass
class Path:
    """All models ``w_0 anchor + sum_i w_i moved donor_i``.

    Attributes:
        model: an instance of the class, whose own weights are not used.
        anchor: the anchor's tensors by name, folded, float32.
        donors: by block and key, each donor's tensors, folded, float32.
    """

    model: nn.Module
    architecture: Architecture
    anchor: dict[str, Tensor]
    donors: list[list[dict[str, Tensor]]]
    parameters: frozenset[str]

    @classmethod
    def between(
        cls,
        model: nn.Module,
        architecture: Architecture,
        anchor: TensorSource,
        donors: Sequence[TensorSource],
        folded: Sequence[str],
        device: torch.device,
    ) -> Path:
        """Read all models, folding what `folded` asks for."""
        fold = Fold(architecture, folded)

        def blocks(source: TensorSource) -> list[dict[str, Tensor]]:
            read = [fold.block(block, read_block(block, source)) for block in architecture.blocks]
            return [{k: t.to(device, torch.float32) for k, t in tensors.items()} for tensors in read]

        base: dict[str, Tensor] = {}
        for block, tensors in zip(architecture.blocks, blocks(anchor), strict=True):
            for key, tensor in tensors.items():
                info = block.tensor(key)
                if info is not None:
                    base.update(unstack(info, tensor))
        names = frozenset(name for name, _ in model.named_parameters())
        return cls(model, architecture, base, [blocks(donor) for donor in donors], names)

    def weights(self, transforms: Sequence[Mapping[str, SpaceTransform]], coefficients: Tensor) -> dict[str, Tensor]:
        """Tensors of one model on the path.

        Args:
            transforms: one mapping a donor.
            coefficients: (1 + donors,), the anchor's first; their sum is one.
        """
        result = {name: coefficients[0] * tensor for name, tensor in self.anchor.items() if name in self.parameters}
        for donor, maps, share in zip(self.donors, transforms, coefficients[1:], strict=True):
            for block, tensors in zip(self.architecture.blocks, donor, strict=True):
                for info in block.tensors:
                    if info.key in tensors and info.name in self.parameters:
                        for name, piece in unstack(info, self._moved(block, info, tensors, maps)).items():
                            result[name] = result[name] + share * piece
        return result

    def _moved(
        self, block: Block, info: TensorInfo, tensors: Mapping[str, Tensor], maps: Mapping[str, SpaceTransform]
    ) -> Tensor:
        """A donor's tensor in new coordinates, with the anchor's unseen biases."""

        def own(key: str) -> Tensor | None:
            known = block.tensor(key)
            return None if known is None or key not in tensors else transform_tensor(tensors[key], known, maps)

        def given(key: str) -> Tensor | None:
            known = block.tensor(key)
            return None if known is None else self.anchor.get(known.name)

        found = with_biases(block, info, own, given, maps)
        assert found is not None
        return found

    def holding(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The model with these weights for as long as gradients flow back: layers under gradient checkpointing are run
        again then."""
        return stateless._reparametrize_module(self.model, dict(weights), tie_weights=True)

    def outputs(self, weights: Mapping[str, Tensor], batch: Batch) -> Any:
        """The model's outputs with these weights."""
        return functional_call(self.model, dict(weights), args=(), kwargs=dict(batch))


def same_names(anchor: nn.Module, donor: nn.Module) -> None:
    """Refuse a donor of another class or with other tensors.

    Raises:
        CheckpointError: names the first tensor that only one of the two has.
    """
    odd = sorted(set(anchor.state_dict()) ^ set(donor.state_dict()))
    if odd:
        raise CheckpointError(f"tensor '{odd[0]}' is only in one of the two models", remedy="fit models of one class")


def renamed(transforms: Mapping[str, SpaceTransform], own: Architecture, wanted: Architecture) -> Transforms:
    """Transforms under the space names of another spelling of the same model (a checkpoint's instead of a module's)."""
    names = {name: name for name in own.streams}
    ours = {(b.module, b.place, b.index): b for b in own.blocks}
    for block in wanted.blocks:
        same = ours.get((block.module, block.place, block.index))
        if same is not None:
            names.update({s.name: block.spaces[k].name for k, s in same.spaces.items() if k in block.spaces})
    return {names[name]: transform for name, transform in transforms.items()}
