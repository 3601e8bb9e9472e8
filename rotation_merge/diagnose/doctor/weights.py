"""Causes in the weights: NaN, overflow of the dtype, an ignored head, layers with shrunken weights.

Some show only when the merge runs: activations that fade from layer to layer, explode, or leave the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from rotation_merge.architecture.registry import find
from rotation_merge.diagnose.doctor.case import Case, Cause, is_small
from rotation_merge.errors import RotationMergeError
from rotation_merge.model.view import View
from rotation_merge.run.functions import architecture_of, load
from rotation_merge.run.inputs import random_batch
from rotation_merge.run.store import hooked
from rotation_merge.workers import Progress

HALF = torch.finfo(torch.float16).max
SHRUNK, GROWN = 0.8, 1.25
"""A layer's weights over the parents' mean norm, from which on they count as shrunk (two unrelated models: 0.71), and
as grown."""
OF_A_LAYER = 4
"""Matrices of a layer whose norms are compared."""


def of_weights(case: Case, progress: Progress | None = None, norms: bool = True) -> Iterator[Cause]:
    """Look at every tensor of the merge (of a recipe: of the parents), then at norms by layer.

    Args:
        norms: whether those are still to be explained.
    """
    looked = {case.name: case.merged_model} if case.merged_model is not None else case.models
    for name, model in looked.items():
        yield from _values(case, name, model, progress)
    if case.merged_model is not None:
        yield from _own_head(case.merged_model)
    yield from _sum(case)
    if norms:
        yield from _norms(case)


def _values(case: Case, name: str, model: View, progress: Progress | None) -> Iterator[Cause]:
    """NaN, infinity, and numbers that float16 does not hold."""
    for number, tensor_name in enumerate(model):
        if progress is not None:
            progress("reading", number, len(model))
        tensor = model[tensor_name]
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = torch.aminmax(tensor.float())
        largest = max(abs(float(low)), abs(float(high)))
        if largest == 0 and tensor.ndim > 1 and not _zero_before(case, tensor_name):
            remedy = "take it from a parent, or merge again"
            yield Cause("zero tensor", 0.9, f"tensor '{tensor_name}' holds nothing but zeros", name, remedy)
        if low.isnan() or high.isnan():
            remedy = "a parent holds NaN, or weights add up to 0: run 'rotation-merge doctor RECIPE'"
            yield Cause("NaN", 1.0, f"tensor '{tensor_name}' holds NaN", name, remedy)
            return
        if largest == float("inf") or (case.dtype == "float16" and largest > HALF):
            problem = f"tensor '{tensor_name}' reaches {largest:.3g}, float16 ends at {HALF:.0f}"
            yield Cause("dtype overflow", 1.0, problem, name, "merge with 'dtype: bfloat16', or float32")
            return


def _zero_before(case: Case, name: str) -> bool:
    """Whether a parent's tensor is zero, too; true without parents, so that there is no finding."""
    if case.merged_model is None:
        return True
    parents = [model for model in case.models.values() if name in model]
    return not parents or any(not bool(model[name].any()) for model in parents)


def _own_head(patient: View) -> Iterator[Cause]:
    """A stored head that differs from the embeddings and is ignored by the config."""
    if find(patient.config) is None:
        return
    head = patient.tied_head
    if head is None or head not in patient:
        return
    info = next((info for info in patient.architecture.tensors() if info.name in _embeddings(patient, head)), None)
    if info is not None and not torch.equal(patient[info.name], patient[head]):
        yield Cause(
            *("tied head", 0.95, f"'{head}' is stored and differs from '{info.name}', but the config ties them"),
            str(patient.reference),
            "set 'tie_word_embeddings': false in its config.json, or merge with 'untie: true'",
        )


def _embeddings(patient: View, head: str) -> set[str]:
    """Names of the tensors of the head's shape that are rows of words."""
    known = patient.architecture.tensors()
    shape = patient.shapes[head]
    return {i.name for i in known if i.vocabulary_axis == 0 and i.name != head and patient.shapes.get(i.name) == shape}


def _sum(case: Case) -> Iterator[Cause]:
    """Weights that do not add up to 1 and are not normalised."""
    if case.parameters.get("normalize", True) is not False:
        return
    entries = [(model.get("parameters") or {}).get("weight") for model in case.recipe.get("models") or []]
    weights = [float(weight) for weight in entries if isinstance(weight, int | float)]
    if len(weights) == len(entries) and weights and abs(sum(weights) - 1) > 0.05 and case.method != "task_arithmetic":
        remedy = "make them add up to 1, or leave out 'normalize: false'"
        yield Cause("scale", 0.75, f"the weights add up to {sum(weights):.3g}", case.name, remedy)


def _norms(case: Case) -> Iterator[Cause]:
    """Layers whose matrices have much smaller or larger norms than the parents'.

    Smaller norms are an effect of averaging unlike matrices.
    """
    if (len(case.parents) < 2 and case.merged_model is None) or not case.parents or not _comparable(case):
        return
    shares: dict[str, float] = {}
    for layer, names in _by_layer(case.models[case.parents[0]]).items():
        ratios = [ratio for name in names[:OF_A_LAYER] if (ratio := _ratio(case, name)) is not None]
        if ratios:
            shares[layer] = sum(ratios) / len(ratios)
    yield from _of_layers("weights", shares, SHRUNK, GROWN, 0.65)


def _of_layers(words: str, shares: dict[str, float], small: float, large: float, likelihood: float) -> Iterator[Cause]:
    """Layers that hold much less, or much more, than the parents' mean.

    Args:
        shares: of that mean, by layer.
    """
    faded = [layer for layer, share in shares.items() if share < small]
    if faded:
        least = min(shares, key=lambda layer: shares[layer])
        problem = (
            f"{words} fade in {len(faded)} of {len(shares)} layers, to {shares[least]:.2f} of the parents' in {least}"
        )
        remedy = "align the models first ('preset: far'), then 'delegate: refit' or 'rotation-merge polish'"
        yield Cause("vanished variance", likelihood, problem, faded[0], remedy)
    elif shares and (most := max(shares, key=lambda layer: shares[layer])) and shares[most] > large:
        problem = f"{words} grow to {shares[most]:.2f} of the parents'"
        yield Cause("scale", 0.7, problem, most, "lower the weights of the models, or the method's 'lambda'")


def _comparable(case: Case) -> bool:
    """Whether norms of the same tensors are comparable: nothing was folded or, in a recipe, moved."""
    if case.merged_model is not None:
        return all(donor.options.residual == "none" for donor in case.donors.values())
    return case.method == "linear"


def _by_layer(model: View) -> dict[str, list[str]]:
    layers: dict[str, list[str]] = {}
    for block in model.architecture.blocks:
        names = [name for info in block.tensors for name in info.names if len(model.shapes.get(name, ())) == 2]
        if block.index is not None and names:
            layers[block.name] = names
    return layers


def _ratio(case: Case, name: str) -> float | None:
    """Norm of the merged tensor (of a recipe: of the parents' mean) over the mean of the parents' norms."""
    try:
        tensors = [model[name].double() for model in case.models.values() if name in model]
        merged = torch.stack(tensors).mean(0) if case.merged_model is None else case.merged_model[name].double()
    except (RotationMergeError, RuntimeError, KeyError):
        return None
    norm = sum(float(tensor.norm()) for tensor in tensors) / max(len(tensors), 1)
    ratio = float(merged.norm()) / norm if norm > 0 else 1.0
    return None if math.isnan(ratio) else ratio


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
    if "do not fit" in known or not names or not all(map(is_small, names)):
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
        yield from _vanished_variance(case.merged, spreads)


def _spreads(model: Any) -> dict[str, tuple[float, float]]:
    """Spread of each layer's output over features (median over tokens) and its largest value, by layer."""
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
    for name, layers in spreads.items() if case.dtype == "float16" else ():
        layer = next((layer for layer, (_, largest) in layers.items() if not largest <= HALF), None)
        if layer is not None:
            problem = f"hidden states reach {layers[layer][1]:.3g} in {layer}, float16 ends at {HALF:.0f}"
            yield Cause("dtype overflow", 0.97, problem, name, "merge and run with 'dtype: bfloat16'")
            return


def _vanished_variance(merged: str, spreads: dict[str, dict[str, tuple[float, float]]]) -> Iterator[Cause]:
    parents = [layers for name, layers in spreads.items() if name != merged]
    shares = {}
    for layer, (spread, _) in spreads[merged].items():
        total = sum(layers[layer][0] for layers in parents if layer in layers)
        if total > 0:
            shares[layer] = spread * sum(layer in layers for layers in parents) / total
    yield from _of_layers("outputs", shares, FADED, SWOLLEN, 0.75)
