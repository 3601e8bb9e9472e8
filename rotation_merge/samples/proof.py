"""Do two models compute the same? Judged on random inputs, against what rounding a model's own weights does to it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from rotation_merge.checkpoints.models import weights_of
from rotation_merge.errors import CheckpointError, RotationMergeError
from rotation_merge.samples.functions import Batch, load, outputs, random_batch, stored_dtype

ROUNDINGS = 16.0
"""So many times what rounding the first model's own weights does to its outputs may the two differ."""

BATCHES = 2
"""Random batches of a proof."""

LARGEST = 500_000_000
"""Weights of the largest model that is loaded whole for a proof."""


@dataclass(frozen=True)
class Proof:
    """What a proof found: the largest difference of outputs and what is allowed, relative to their size; None where
    none could be run, for the reason given."""

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
            f"outputs on {BATCHES} random batches differ by {self.difference:.2g} of their size at most, "
            f"{self.allowed:.2g} is allowed ({ROUNDINGS:g} times what rounding the weights does)"
        )


def prove(donor: str, result: str) -> Proof:
    """Compare the outputs of a donor and of what was made of it, both from their files, class by class.

    Raises:
        CheckpointError: what was made cannot be loaded.
    """
    try:
        size = weights_of(donor)
        if size > LARGEST:
            return Proof(reason=f"{size:,} weights are more than {LARGEST:,}; 'rotation-merge verify' compares them")
        first = load(donor)
        inputs = [random_batch(first, torch.Generator().manual_seed(i)) for i in range(BATCHES)]
        for batch in inputs:
            outputs(first, batch)
    except RotationMergeError as error:
        return Proof(reason=str(error))
    except Exception as error:  # whatever a model's class raises on inputs that it does not take
        return Proof(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    second = load(result, like=donor)
    worst = largest_difference(first, second, inputs, (donor, result))["relative"]
    coarsest = coarser(stored_dtype(donor), stored_dtype(result))
    return Proof(float(worst), ROUNDINGS * own_rounding(first, inputs, coarsest))


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The type of fewest digits."""
    return max((d for d in dtypes if d.is_floating_point), key=lambda d: torch.finfo(d).eps, default=torch.float32)


@torch.no_grad()
def own_rounding(model: Any, inputs: list[Batch], dtype: torch.dtype, seed: int = 0) -> float:
    """The largest relative difference that rounding a model's weights makes: each is off by up to half a unit in the
    last place of `dtype`, or of float32 where that is coarser."""
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    rounded = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for parameter in rounded.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).to(parameter) - 0.5
        parameter.mul_(1 + unit * noise)
    return float(largest_difference(model, rounded, inputs, ("the model", "the model, rounded"))["relative"])


def largest_difference(a: Any, b: Any, inputs: list[Batch], names: tuple[str, str]) -> dict[str, Any]:
    """The largest difference between two models' outputs.

    Raises:
        CheckpointError: their outputs have other names or shapes.
    """
    worst: dict[str, Any] = {"absolute": 0.0, "relative": 0.0, "output": "all outputs"}
    for batch in inputs:
        first, second = outputs(a, batch), outputs(b, batch)
        for name, x in first.items():
            y = second.get(name)
            if y is None or y.shape != x.shape:
                given = "nothing" if y is None else str(list(y.shape))
                raise CheckpointError(
                    f"output '{name}' is {given}, that of {names[0]} is {list(x.shape)}",
                    where=names[1],
                    remedy="only models of one class and size can be compared",
                )
            difference = float((x - y).abs().max())
            relative = difference / (float(x.square().mean().sqrt()) or 1.0)
            if not difference <= worst["absolute"]:
                worst = {"absolute": difference, "relative": relative, "output": name}
            if difference != difference:
                return {"absolute": float("inf"), "relative": float("inf"), "output": f"{name} (NaN)"}
    return worst
