"""Causes in the weights: NaN, overflow of the dtype, zeros.

Some show only when the merge runs: activations that fade from layer to layer, explode, or leave the dtype.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from rotation_merge.diagnose.doctor.case import Case, Cause, is_small
from rotation_merge.diagnose.doctor.span import of_layers
from rotation_merge.errors import RotationMergeError
from rotation_merge.linalg.finite import all_finite
from rotation_merge.mergekit_plugin import delegates
from rotation_merge.mergekit_plugin.document import Document
from rotation_merge.mergekit_plugin.rules import check_structure, other_sums, sums_of_zero
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.run.proof import LARGEST, random_batch
from rotation_merge.workers import Progress

HALF = torch.finfo(torch.float16).max
BEYOND = f"float16 ends at {HALF:.0f}"
FADED, SWOLLEN = 0.6, 2.0
"""A layer's output over the parents' mean, from which on it counts as faded, and as swollen."""
STOPS = {"NaN", "dtype overflow", "do not fit"}
"""Causes after which a model need not be run."""


def of_weights(case: Case, progress: Progress | None = None) -> Iterator[Cause]:
    """Look at every tensor of the merge (of a recipe: of the parents), and at the recipe's weights."""
    models = {case.name: case.merged_model} if case.merged_model is not None else case.models
    for name, model in models.items():
        yield from _values(case, name, model, progress)
    yield from _sums(case)


def _sums(case: Case) -> Iterator[Cause]:
    """Weights of the recipe that do not add up as its method needs."""
    document = Document(dict(case.recipe))
    if case.recipe and case.delegate in delegates.names():
        check_structure(document)
        delegate = delegates.get(case.delegate)
        for _, problem, remedy in (*sums_of_zero(document.config, delegate), *other_sums(document.config, delegate)):
            yield Cause("scale", 0.75, problem, case.name, remedy)


def _values(case: Case, name: str, model: View, progress: Progress | None) -> Iterator[Cause]:
    """NaN, infinity, numbers that float16 does not hold, and tensors of zeros that are not so in the parents."""
    for number, tensor_name in enumerate(model):
        if progress is not None:
            progress("reading", number, len(model))
        tensor = model[tensor_name]
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.float())
        largest = max(abs(float(low)), abs(float(high)))
        if largest == 0 and tensor.ndim > 1 and case.merged_model is not None:
            parents = [parent for parent in case.models.values() if tensor_name in parent]
            if parents and all(bool(parent[tensor_name].any()) for parent in parents):
                remedy = "take it from a parent, or merge again"
                yield Cause("zero tensor", 0.9, f"tensor '{tensor_name}' holds nothing but zeros", name, remedy)
        if low.isnan() or high.isnan():
            yield Cause("NaN", 1.0, f"tensor '{tensor_name}' holds NaN", name, _remedy_of_nan(case, tensor_name))
            return
        if largest == float("inf") or (case.half and largest > HALF):
            yield _overflow(f"tensor '{tensor_name}' reaches {largest:.3g}", name)
            return


def _remedy_of_nan(case: Case, name: str) -> str:
    """Where NaN in a tensor comes from (a parent, weights that add up to 0, sums beyond float16), and what to do."""
    if case.merged_model is None:
        return "download the model again, or leave it out"
    for parent_name, parent in case.models.items():
        if name in parent and not all_finite([parent[name]]):
            return f"{parent_name} holds it: download that model again, or leave it out"
    for cause in _sums(case):
        return f"{cause.what}: {cause.remedy}, and merge again"
    sources = [model for model in (*case.models.values(), case.merged_model) if name in model]
    dtype = str(case.recipe.get("dtype") or sources[0].dtypes[name]).removeprefix("torch.")
    if dtype == "float16":
        return f"{BEYOND}, which sums in the merge exceed: merge again with 'dtype: bfloat16', or float32"
    return "no parent that is known holds it: merge again with other parameters of the method, or from other parents"


def _overflow(words: str, name: str) -> Cause:
    remedy = "merge and run with 'dtype: bfloat16', or float32"
    return Cause("dtype overflow", 1.0, f"{words}, {BEYOND}", name, remedy)


def of_activations(case: Case, known: Collection[str]) -> Iterator[Cause]:
    """Run the merge (of a recipe: nothing but, for float16, the parents) on random inputs."""
    merged = [case.merged] if case.merged is not None else []
    names = [*merged, *(case.parents if merged or case.half else ())]
    if not all(map(is_small, names)):
        case.unexamined.append(
            f"No activations were measured: a model has more than {LARGEST / 1e6:.0f} million weights."
        )
        return
    if STOPS & set(known) or not names:
        return
    spreads = {}
    for name in names:
        try:
            spreads[name] = _spreads(load(name))
        except RotationMergeError as error:
            if name == case.merged:
                yield Cause("damaged", 0.97, error.what, name, error.remedy or "merge again")
            return
    for name, layers in spreads.items() if case.half else ():
        if beyond := [layer for layer, (_, largest) in layers.items() if not largest <= HALF]:
            yield _overflow(f"hidden states reach {layers[beyond[0]][1]:.3g} in {beyond[0]}", name)
            break
    if case.merged is not None and len(spreads) > 1:
        parents, shares = [layers for name, layers in spreads.items() if name != case.merged], {}
        for layer, (spread, _) in spreads[case.merged].items():
            values = [layers[layer][0] for layers in parents if layer in layers]
            if sum(values) > 0:
                shares[layer] = spread * len(values) / sum(values)
        yield from of_layers("outputs", shares, FADED, SWOLLEN)


def _spreads(model: Any) -> dict[str, tuple[float, float]]:
    """Spread of each layer's output over features (median over tokens) and its largest value, by layer.

    Args:
        model: loaded for this alone: its hooks stay.
    """
    spread_of: dict[str, tuple[float, float]] = {}

    def look(name: str, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        if isinstance(states, Tensor) and states.is_floating_point():
            spread_of[name] = float(states.std(-1).median()), float(states.abs().max())

    layers = {block.name for block in architecture_of(model).blocks if block.index is not None}
    for name in layers:
        model.get_submodule(name).register_forward_hook(lambda _, __, output, name=name: look(name, output))
    with torch.no_grad():
        model(**random_batch(model, torch.Generator().manual_seed(0)))
    return spread_of
