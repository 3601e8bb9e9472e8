"""Outputs of models on given inputs: held whole in memory, or run one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.model import TensorInfo
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model, weights_of
from rotation_merge.run.empty_models import empty_model
from rotation_merge.run.functions import Batch, floating_outputs, kind_at, load, outputs
from rotation_merge.run.runner import Fill, Runner

LARGEST = 500_000_000
"""Weights of the largest model that is held whole; larger ones run layer by layer."""


class InMemoryModel:
    """A model in memory.

    Args:
        dtype: of the computation.
        like: a model in whose order its classes are to stand, where they have the same names.
    """

    def __init__(self, path: str, dtype: torch.dtype, like: str | None) -> None:
        self.path, self.dtype, self.like = path, dtype, like

    @cached_property
    def kind(self) -> Any:
        """transformers' class."""
        return kind_at(self.path)

    @cached_property
    def model(self) -> Any:
        """The model with all weights; its signature lists its inputs."""
        return load(self.path, self.dtype, self.like)

    def on(self, inputs: Sequence[Batch]) -> list[Batch]:
        """Outputs of the model for each batch."""
        return [outputs(self.model, {k: self._cast(v) for k, v in batch.items()}) for batch in inputs]

    @torch.no_grad()
    def rounded(self, inputs: Sequence[Batch], unit: float, seed: int) -> list[Batch]:
        """The same with each weight perturbed by up to half a unit in the last place; changes the model."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter.copy_(_noisy(parameter, unit, generator))
        return self.on(inputs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class LayerwiseModel:
    """A model that reads its weights one layer at a time, with the interface of `InMemoryModel`."""

    def __init__(self, path: str, dtype: torch.dtype, like: str | None) -> None:
        self.path, self.dtype = path, dtype
        self.files = open_model(path)
        if like is not None:
            self.files = with_classes_of(self.files, open_model(like))

    @cached_property
    def kind(self) -> Any:
        return kind_at(self.path)

    @cached_property
    def config(self) -> Any:
        return self.files.transformers_config

    @cached_property
    def model(self) -> Any:
        """The model without weights; its signature lists its inputs."""
        return empty_model(self.config)

    def on(self, inputs: Sequence[Batch]) -> list[Batch]:
        """Outputs of the model for each batch.

        Raises:
            CheckpointError: it cannot be run one layer at a time.
        """
        return self._run(inputs, lambda _, tensor: tensor)

    def rounded(self, inputs: Sequence[Batch], unit: float, seed: int) -> list[Batch]:
        """The same with each weight perturbed by up to half a unit in the last place."""
        generator = torch.Generator().manual_seed(seed)

        def fill(_: TensorInfo, tensor: Tensor) -> Tensor:
            return _noisy(tensor.to(self.dtype), unit, generator) if tensor.is_floating_point() else tensor

        return self._run(inputs, fill)

    def _run(self, inputs: Sequence[Batch], fill: Fill) -> list[Batch]:
        architecture = self.files.architecture
        run = Runner(self.config, self.files.tensors, architecture, inputs, dtype=self.dtype, fill=fill, name=self.path)
        run.run_through()
        return [floating_outputs(run.model, run.answer(batch)) for batch in range(len(inputs))]


def _noisy(tensor: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float32).to(tensor) - 0.5
    return tensor * (1 + unit * noise)


def open_for_outputs(
    path: str, dtype: torch.dtype = torch.float32, like: str | None = None
) -> InMemoryModel | LayerwiseModel:
    """Opens the model at a path: in memory if it is small enough, else layer by layer.

    Raises:
        CheckpointError: it cannot be read.
    """
    return (InMemoryModel if weights_of(path) <= LARGEST else LayerwiseModel)(path, dtype, like)
