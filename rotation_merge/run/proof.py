"""Checks that two models compute the same on given inputs, up to the effect of rounding weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.model.labels import with_classes_of
from rotation_merge.model.open import open_model, weights_of
from rotation_merge.run.batches import Batch
from rotation_merge.run.functions import empty_model, floating_outputs, load, outputs, stored_dtype
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.runner import Runner

LARGEST = 500_000_000
"""Weights of the largest model that is held whole; larger ones run layer by layer."""

ROUNDINGS = 16.0
"""Allowed difference of two models, as a multiple of the effect of rounding the first one's weights."""

BATCHES = 2
"""Random batches of a proof."""


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
        noisy = view.tensors.map(lambda _, tensor: _noisy(self._cast(tensor), unit, draw))
        run = Runner(replace(view, tensors=noisy) if unit else view, inputs, dtype=self.dtype)
        run.run_through()
        return [floating_outputs(run.model, run.answer(batch)) for batch in range(len(inputs))]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _noisy(tensor: Tensor, unit: float, draw: torch.Generator) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor * (1 + unit * (torch.rand(tensor.shape, generator=draw, dtype=torch.float32).to(tensor) - 0.5))


@dataclass(frozen=True)
class OutputDifference:
    """The largest difference between two models' outputs.

    Attributes:
        absolute, relative: by itself, and by the root mean square of the first model's output; infinite for NaN.
        output: name of the output that it is in.
        allowed: largest relative difference that passes.
    """

    absolute: float
    relative: float
    output: str
    allowed: float

    @property
    def passes(self) -> bool:
        return self.relative <= self.allowed


def difference(
    first: ModelOutputs,
    expected: Sequence[Batch],
    second: ModelOutputs,
    inputs: Sequence[Batch],
    *,
    probabilities: bool = False,
    tolerance: float | None = None,
    seed: int = 0,
) -> OutputDifference:
    """Compare two models' outputs for inputs; the first model is let go before the second is loaded.

    Args:
        expected: the first one's outputs.
        probabilities: compare the logarithms of the probabilities that logits stand for, which a number added to all
            logits of a token does not change.
        tolerance: largest relative difference that passes; None: a multiple of the effect of rounding the first one's
            weights, each by up to half a unit in the last place of the less precise storage type, or of float32.

    Raises:
        CheckpointError: their outputs have other names or shapes.
    """
    names, allowed = (first.path, second.path), tolerance
    if allowed is None:
        dtypes = stored_dtype(first.path), stored_dtype(second.path), torch.float32
        unit = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)
        rounded = _largest(expected, first.on(inputs, unit, seed), ("the model", "the model, rounded"), probabilities)
        allowed = ROUNDINGS * rounded[1]
    vars(first).pop("model", None)
    return OutputDifference(*_largest(expected, second.on(inputs), names, probabilities), allowed)


def _largest(
    a: Sequence[Batch], b: Sequence[Batch], names: tuple[str, str], probabilities: bool
) -> tuple[float, float, str]:
    """The largest relative difference: absolute, relative, and the output that it is in."""
    worst = 0.0, 0.0, "all outputs"
    pairs = [(n, x.get(n), y.get(n)) for x, y in zip(a, b, strict=True) for n in dict.fromkeys([*x, *y])]
    for name, x, y in pairs:
        if x is None or y is None or y.shape != x.shape:
            shapes = ["nothing" if z is None else str(list(z.shape)) for z in (y, x)]
            problem = f"output '{name}' is {shapes[0]}, that of {names[0]} is {shapes[1]}"
            raise CheckpointError(problem, where=names[1], remedy="compare models of one class and size")
        if probabilities and name == "logits":
            x, y = x.log_softmax(-1), y.log_softmax(-1)
        absolute = float((x - y).abs().max())
        if absolute != absolute:
            return math.inf, math.inf, f"{name} (NaN)"
        worst = max(worst, (absolute, absolute / (float(x.square().mean().sqrt()) or 1.0), name), key=lambda e: e[1])
    return worst


@dataclass(frozen=True)
class Proof:
    """Result of a proof: the largest difference of outputs and its limit, both relative; None with a reason."""

    difference: float | None = None
    allowed: float | None = None
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.difference is not None and self.allowed is not None and not self.difference <= self.allowed

    @property
    def words(self) -> str:
        if self.difference is None or self.allowed is None:
            return f"not checked: {self.reason}"
        return (
            f"outputs on {BATCHES} random batches differ by at most {self.difference:.2g} of their size; "
            f"{self.allowed:.2g} is allowed ({ROUNDINGS:g} times the effect of rounding the weights)"
        )


def prove(donor: str, result: str, probabilities: bool = False) -> Proof:
    """Compare the outputs of a donor and of its moved copy, both from their files, class by class.

    Args:
        probabilities: logits by the probabilities that they stand for.

    Raises:
        CheckpointError: the result cannot be loaded.
    """
    try:
        first = ModelOutputs(donor)
        inputs = [random_batch(first.model, torch.Generator().manual_seed(i)) for i in range(BATCHES)]
        expected = first.on(inputs)
    except RotationMergeError as error:
        return Proof(reason=str(error))
    except Exception as error:  # whatever a model's class raises on inputs that it does not take
        return Proof(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    second = ModelOutputs(result, like=donor)
    apart = difference(first, expected, second, inputs, probabilities=probabilities)
    return Proof(apart.relative, apart.allowed)
