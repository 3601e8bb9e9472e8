"""Outputs of models on given inputs: held whole in memory, or run one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model, weights_of
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import Batch, floating_outputs, kind_at, load, outputs
from rotation_merge.run.runner import Runner

LARGEST = 500_000_000
"""Weights of the largest model that is held whole; larger ones run layer by layer."""


@dataclass(frozen=True)
class ModelOutputs:
    """The model at a path as a function.

    Attributes:
        dtype: of the computation.
        like: a model in whose order its classes are to stand, where they have the same names.
    """

    path: str
    dtype: torch.dtype = torch.float32
    like: str | None = None

    @cached_property
    def is_large(self) -> bool:
        """Whether it reads its weights one layer at a time."""
        return weights_of(self.path) > LARGEST

    @cached_property
    def kind(self) -> Any:
        """transformers' class."""
        return kind_at(self.path)

    @cached_property
    def model(self) -> Any:
        """The model, without weights if it is large; its signature lists its inputs."""
        if self.is_large:
            return empty_model(open_model(self.path).transformers_config)
        return load(self.path, self.dtype, self.like)

    def on(self, inputs: Sequence[Batch], unit: float = 0.0, seed: int = 0) -> list[Batch]:
        """Outputs of the model for each batch.

        Args:
            unit: each weight is off by up to half of this share, drawn with the seed; a model in memory stays so.

        Raises:
            CheckpointError: it cannot be run one layer at a time.
        """
        draw = torch.Generator().manual_seed(seed)
        if self.is_large:
            return self._by_layer(inputs, unit, draw)
        with torch.no_grad():
            for parameter in self.model.parameters() if unit else ():
                parameter.copy_(_noisy(parameter, unit, draw))
        return [outputs(self.model, {name: self._cast(x) for name, x in batch.items()}) for batch in inputs]

    def _by_layer(self, inputs: Sequence[Batch], unit: float, draw: torch.Generator) -> list[Batch]:
        view = open_model(self.path)
        if self.like is not None:
            view = with_classes_of(view, open_model(self.like))
        if unit:
            noisy = view.tensors.map(lambda _, tensor: _noisy(self._cast(tensor), unit, draw))
            view = replace(view, tensors=noisy)
        run = Runner(view, inputs, dtype=self.dtype)
        run.run_through()
        return [floating_outputs(run.model, run.answer(batch)) for batch in range(len(inputs))]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _noisy(tensor: Tensor, unit: float, draw: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + unit * (torch.rand(tensor.shape, generator=draw, dtype=torch.float32).to(tensor) - 0.5))
