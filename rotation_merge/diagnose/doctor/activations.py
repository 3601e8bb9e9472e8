"""Causes that show when a merge runs: activations that fade from layer to layer, explode, or leave the dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from rotation_merge.diagnose.doctor.case import Case
from rotation_merge.diagnose.doctor.cause import Cause
from rotation_merge.errors import RotationMergeError
from rotation_merge.model.checkpoint import weights_of
from rotation_merge.run.answers import LARGEST
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.store import hooked

FADED, SWOLLEN = 0.6, 2.0
"""A layer's output over the parents' mean, from which on it counts as faded, and as swollen."""
STOPS = {"NaN", "dtype overflow"}
"""Causes after which a model need not be run."""


def of_activations(case: Case, known: Collection[str]) -> Iterator[Cause]:
    """Run the merge (of a recipe: nothing but, for float16, the parents) on random inputs."""
    if STOPS & set(known):
        return
    names = [case.merged] if case.merged is not None else []
    names += case.parents if case.merged is not None or case.dtype == "float16" else []
    if "do not fit" in known or not names or not all(_runs(name) for name in names):
        return
    spreads = {}
    for name in names:
        try:
            spreads[name] = _spreads(load(name))
        except RotationMergeError as error:
            if name == case.merged:
                yield Cause("damaged", 0.97, error.what, name, error.remedy or "merge again")
            return
    yield from _overflow(case, spreads)
    if case.merged is not None and len(spreads) > 1:
        yield from _faded(case.merged, spreads)


def _runs(name: str) -> bool:
    return weights_of(name) <= LARGEST


def _spreads(model: Any) -> dict[str, tuple[float, float]]:
    """By layer: the spread of its output over features, median over the tokens, and its largest number."""
    spread_of: dict[str, tuple[float, float]] = {}

    def look(name: str, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.is_floating_point():
            spread_of[name] = float(states.std(-1).median()), float(states.abs().max())

    layers = [block.name for block in architecture_of(model).blocks if block.index is not None]
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name in layers
        if name in modules
    ]
    with hooked(hooks), torch.no_grad():
        model(**random_batch(model, torch.Generator().manual_seed(0)))
    return spread_of


def _overflow(case: Case, spreads: dict[str, dict[str, tuple[float, float]]]) -> Iterator[Cause]:
    if case.dtype != "float16":
        return
    most = torch.finfo(torch.float16).max
    for name, layers in spreads.items():
        layer = next((layer for layer, (_, largest) in layers.items() if not largest <= most), None)
        if layer is not None:
            problem = f"states reach {layers[layer][1]:.3g} in {layer}, float16 ends at {most:.0f}"
            yield Cause("dtype overflow", 0.97, problem, name, "merge and run with 'dtype: bfloat16'")
            return


def _faded(merged: str, spreads: dict[str, dict[str, tuple[float, float]]]) -> Iterator[Cause]:
    parents = [layers for name, layers in spreads.items() if name != merged]
    shares = {}
    for layer, (spread, _) in spreads[merged].items():
        parent_spreads = [layers[layer][0] for layers in parents if layer in layers]
        if parent_spreads and sum(parent_spreads) > 0:
            shares[layer] = spread * len(parent_spreads) / sum(parent_spreads)
    if not shares:
        return
    least, most = min(shares, key=lambda n: shares[n]), max(shares, key=lambda n: shares[n])
    first = next((layer for layer, share in shares.items() if share < FADED), None)
    if first is not None:
        problem = f"outputs fade to {shares[least]:.2f} of the parents' in {least}, first below {FADED} here"
        remedy = "align the models first ('preset: far'), then 'delegate: refit' or 'rotation-merge polish'"
        yield Cause("vanished variance", 0.75, problem, first, remedy)
    elif shares[most] > SWOLLEN:
        problem = f"outputs swell to {shares[most]:.2f} of the parents'"
        yield Cause("scale", 0.7, problem, most, "lower the weights of the models, or the method's 'lambda'")
