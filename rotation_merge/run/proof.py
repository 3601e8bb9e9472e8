"""Checks that two models compute the same on random inputs, up to the effect of rounding weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.run.functions import Batch, stored_dtype
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.model_outputs import ModelOutputs

ROUNDINGS = 16.0
"""Allowed difference of two models, as a multiple of the effect of rounding the first one's weights."""

BATCHES = 2
"""Random batches of a proof."""


@dataclass(frozen=True)
class Proof:
    """Result of a proof: the largest difference of outputs and its limit, both relative.

    None with a reason if none could be run.
    """

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
    coarsest = least_precise_dtype(stored_dtype(donor), stored_dtype(result))
    allowed = ROUNDINGS * rounding_effect(first, inputs, expected, coarsest, probabilities=probabilities)
    del first
    result_outputs = ModelOutputs(result, like=donor).on(inputs)
    return Proof(
        float(largest_difference(expected, result_outputs, (donor, result), probabilities)["relative"]), allowed
    )


def least_precise_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of lowest precision."""
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps, default=torch.float32)


def rounding_effect(
    model: ModelOutputs,
    inputs: list[Batch],
    expected: list[Batch],
    dtype: torch.dtype,
    seed: int = 0,
    probabilities: bool = False,
) -> float:
    """The largest relative effect of rounding a model's weights.

    Each is off by up to half a unit in the last place of `dtype`, or of float32 if that is coarser.

    Args:
        expected: its outputs for the inputs; a model in memory is modified.
    """
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    rounded = model.on(inputs, unit, seed)
    names = "the model", "the model, rounded"
    return float(largest_difference(expected, rounded, names, probabilities)["relative"])


def largest_difference(
    a: list[Batch], b: list[Batch], names: tuple[str, str], probabilities: bool = False
) -> dict[str, Any]:
    """The largest difference between two models' outputs, relative to the size of each output.

    Args:
        probabilities: compare the logarithms of the probabilities that logits stand for, which a number added to all
            logits of a token does not change.

    Raises:
        CheckpointError: their outputs have other names or shapes.
    """
    worst: dict[str, Any] = {"absolute": 0.0, "relative": 0.0, "output": "all outputs"}
    for first, second in zip(a, b, strict=True):
        for name in dict.fromkeys([*first, *second]):
            x, y = first.get(name), second.get(name)
            if x is None or y is None or y.shape != x.shape:
                shapes = ["nothing" if z is None else str(list(z.shape)) for z in (y, x)]
                raise CheckpointError(
                    f"output '{name}' is {shapes[0]}, that of {names[0]} is {shapes[1]}",
                    where=names[1],
                    remedy="only models of one class and size can be compared",
                )
            if probabilities and name == "logits":
                x, y = x.log_softmax(-1), y.log_softmax(-1)
            difference = float((x - y).abs().max())
            relative = difference / (float(x.square().mean().sqrt()) or 1.0)
            if not relative <= worst["relative"]:
                worst = {"absolute": difference, "relative": relative, "output": name}
            if difference != difference:
                return {"absolute": float("inf"), "relative": float("inf"), "output": f"{name} (NaN)"}
    return worst
